/* comm/comm.c: the collectives, on top of the one primitive of a transport.
 *
 * A call is: begin (refuse on an ended group, number it, note it in the ring), one or two
 * exchanges, end (count, note the outcome). Sums are made here, from views of what the peers sent,
 * so their order cannot depend on the transport.
 *
 * Invariants:
 *   C1  a rank that returns a failure has ended the family, except comm_split, comm_agree and
 *       comm_handshake, whose refusals all ranks see alike.
 *   C2  family->text is written once, before family->failed is set.
 *   C3  the counters move only when a call succeeds. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"
#include "comm/impl.h"

/* Text kept of the last calls in an error; the log has them all. */
enum { TAIL_CALLS = 3, RECORD_TEXT = 192 };

const char *comm_op_name(int32_t op)
{
    static const char *const name[COMM_N_OP] = {
        [COMM_OP_ALL_GATHER] = "all_gather",
        [COMM_OP_ALL_TO_ALL] = "all_to_all",
        [COMM_OP_REDUCE_SCATTER] = "reduce_scatter",
        [COMM_OP_ALL_REDUCE] = "all_reduce",
        [COMM_OP_BROADCAST] = "broadcast",
        [COMM_OP_BARRIER] = "barrier",
        [COMM_OP_SPLIT] = "split",
    };
    return op >= 0 && op < COMM_N_OP ? name[op] : "?";
}

int32_t comm_rank(const comm *c)
{
    return c->rank;
}

int32_t comm_size(const comm *c)
{
    return c->size;
}

const char *comm_transport(const comm *c)
{
    return c->transport->name;
}

const comm_stats *comm_counters(const comm *c)
{
    return &c->stats;
}

void comm_set_timeout(comm *c, int32_t ms)
{
    c->cfg.timeout_ms = ms;
}

bool comm_failed(const comm *c)
{
    return atomic_load_explicit(&c->family->failed, memory_order_acquire);
}

void comm_set_hook(comm *c, comm_hook fn, void *ctx)
{
    c->hook = fn;
    c->hook_ctx = ctx;
}

/* ---- life ------------------------------------------------------------------------------------ */

static comm_family *family_new(void)
{
    comm_family *f = mem_calloc(1, sizeof *f);
    if (f == NULL) {
        return NULL;
    }
    if (pthread_mutex_init(&f->lock, NULL) != 0) {
        mem_free(f);
        return NULL;
    }
    atomic_init(&f->refs, 0);
    atomic_init(&f->failed, false);
    return f;
}

static void family_unref(comm_family *f, const transport *t)
{
    if (atomic_fetch_sub(&f->refs, 1) != 1) {
        return;
    }
    if (t->family_free != NULL) {
        t->family_free(f);
    }
    pthread_mutex_destroy(&f->lock);
    mem_free(f);
}

comm *comm_new(const transport *t, comm_family *family, int32_t rank, int32_t size,
               const comm_config *cfg)
{
    comm *c = mem_calloc(1, sizeof *c);
    if (c == NULL) {
        return NULL;
    }
    const size_t n = (size_t)size;
    c->out = mem_calloc(n, sizeof *c->out);
    c->in = mem_calloc(n, sizeof *c->in);
    c->src = mem_calloc(n, sizeof *c->src);
    c->members = mem_calloc(n, sizeof *c->members);
    c->meta = mem_calloc(n, COMM_META);
    c->family = family != NULL ? family : family_new();
    if (c->family != NULL) {
        atomic_fetch_add(&c->family->refs, 1);
    }
    c->transport = t;
    c->rank = rank;
    c->size = size;
    c->cfg = *cfg;
    if (c->out == NULL || c->in == NULL || c->src == NULL || c->members == NULL ||
        c->meta == NULL || c->family == NULL) {
        comm_discard(c);
        return NULL;
    }
    return c;
}

void comm_discard(comm *c)
{
    if (c->family != NULL) {
        family_unref(c->family, c->transport);
    }
    mem_free(c->out);
    mem_free(c->in);
    mem_free(c->src);
    mem_free(c->members);
    mem_free(c->meta);
    mem_free(c->fault);
    mem_free(c);
}

void comm_close(comm *c)
{
    if (c == NULL) {
        return;
    }
    c->transport->close(c);
    comm_discard(c);
}

/* ---- failure --------------------------------------------------------------------------------- */

/* True for the caller that ended the family. */
static bool family_end(comm_family *f, const char *text)
{
    pthread_mutex_lock(&f->lock);
    const bool first = !atomic_load_explicit(&f->failed, memory_order_relaxed);
    if (first) {
        snprintf(f->text, sizeof f->text, "%s", text);
        atomic_store_explicit(&f->failed, true, memory_order_release);
    }
    pthread_mutex_unlock(&f->lock);
    return first;
}

void comm_family_fail(comm_family *f, const char *text)
{
    (void)family_end(f, text);
}

kvs_status comm_fail(comm *c, const char *fmt, ...)
{
    char text[COMM_TEXT];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (family_end(c->family, text)) {
        c->transport->tell(c);
    }
    return KVS_PEER;
}

void comm_head_text(char *buf, size_t cap, const comm_head *h)
{
    const unsigned long long bytes = h->bytes;
    const unsigned long long number = h->number;
    if (h->op == COMM_OP_BROADCAST) {
        snprintf(buf, cap, "%s of %llu bytes from rank %d (call %llu)", comm_op_name(h->op), bytes,
                 h->root, number);
    } else if (bytes == 0 && (h->op == COMM_OP_BARRIER || h->op == COMM_OP_SPLIT)) {
        snprintf(buf, cap, "%s (call %llu)", comm_op_name(h->op), number);
    } else {
        snprintf(buf, cap, "%s of %llu bytes (call %llu)", comm_op_name(h->op), bytes, number);
    }
}

kvs_status comm_fail_late(comm *c, const comm_head *head, const bool *late)
{
    char who[64];
    size_t len = 0;
    int n = 0;
    who[0] = '\0';
    for (int32_t r = 0; r < c->size; r++) {
        if (!late[r]) {
            continue;
        }
        n++;
        if (len + 16 < sizeof who) {
            len += (size_t)snprintf(who + len, sizeof who - len, "%s%d", n > 1 ? ", " : "", r);
        } else if (len + 6 < sizeof who) {
            memcpy(who + len, ", ...", 6);
            len = sizeof who;
        }
    }
    char what[96];
    comm_head_text(what, sizeof what, head);
    return comm_fail(c, "rank%s %s more than %d ms late for %s", n > 1 ? "s" : "", who,
                     c->cfg.timeout_ms, what);
}

kvs_status comm_fail_mismatch(comm *c, int32_t rank_a, const comm_head *a, int32_t rank_b,
                              const comm_head *b)
{
    char text_a[96];
    char text_b[96];
    comm_head_text(text_a, sizeof text_a, a);
    comm_head_text(text_b, sizeof text_b, b);
    return comm_fail(c, "rank %d called %s, rank %d %s", rank_b, text_b, rank_a, text_a);
}

kvs_status comm_fail_size(comm *c, const comm_head *head, int32_t rank, size_t got, size_t want)
{
    char what[96];
    comm_head_text(what, sizeof what, head);
    return comm_fail(c, "rank %d sent %zu bytes to rank %d, which expects %zu, in %s", rank, got,
                     c->rank, want, what);
}

kvs_status comm_fail_closed(comm *c, const comm_head *head, int32_t rank)
{
    char what[96];
    comm_head_text(what, sizeof what, head);
    return comm_fail(c, "rank %d has closed its end before %s", rank, what);
}

kvs_status comm_check_stamps(comm *c, const comm_head *head, bool first, const comm_stamp *stamps,
                             size_t stride)
{
    const unsigned char *base = (const unsigned char *)stamps;
    for (int32_t p = 0; p < c->size; p++) {
        const comm_stamp *s = (const comm_stamp *)(const void *)(base + (size_t)p * stride);
        if (p != c->rank && s->head.op == COMM_OP_CLOSE) {
            return comm_fail_closed(c, head, p);
        }
    }
    for (int32_t p = 1; p < c->size && first && !c->cfg.no_check; p++) {
        const comm_stamp *s = (const comm_stamp *)(const void *)(base + (size_t)p * stride);
        if (!comm_head_equal(&stamps->head, &s->head)) {
            return comm_fail_mismatch(c, 0, &stamps->head, p, &s->head);
        }
    }
    for (int32_t p = 0; p < c->size; p++) {
        const comm_stamp *s = (const comm_stamp *)(const void *)(base + (size_t)p * stride);
        if (p != c->rank && s->bytes != c->in[p].bytes) {
            return comm_fail_size(c, head, p, s->bytes, c->in[p].bytes);
        }
    }
    return KVS_OK;
}

void comm_abort(comm *c, const char *reason)
{
    if (c != NULL) {
        (void)comm_fail(c, "rank %d ended the group: %s", c->rank,
                        reason != NULL && reason[0] != '\0' ? reason : "no reason given");
    }
}

/* ---- ring of the last calls ------------------------------------------------------------------ */

static size_t ring_first(const comm *c)
{
    return c->n_call > COMM_RING ? (size_t)(c->n_call - COMM_RING) : 0;
}

/* Call number i + 1 as a line without its end. */
static void record_text(char *buf, size_t cap, const comm *c, uint64_t i)
{
    const comm_record *r = &c->ring[i % COMM_RING];
    char what[96];
    comm_head_text(what, sizeof what, &r->head);
    if (r->t_end == 0) {
        snprintf(buf, cap, "rank %d: %s: not finished after %.3f ms", c->rank, what,
                 (double)(clock_ns() - r->t_begin) * 1e-6);
    } else {
        snprintf(buf, cap, "rank %d: %s: %s after %.3f ms", c->rank, what, kvs_status_name(r->st),
                 (double)(r->t_end - r->t_begin) * 1e-6);
    }
}

size_t comm_history(const comm *c, char *buf, size_t cap)
{
    size_t len = 0;
    if (cap > 0) {
        buf[0] = '\0';
    }
    for (uint64_t i = ring_first(c); i < c->n_call; i++) {
        char line[RECORD_TEXT];
        record_text(line, sizeof line, c, i);
        const size_t at = len < cap ? len : cap;
        len += (size_t)snprintf(at < cap ? buf + at : NULL, cap - at, "%s\n", line);
    }
    return len;
}

/* "barrier 0, all_gather 64": the newest calls in short. */
static void tail_text(const comm *c, char *buf, size_t cap)
{
    size_t len = 0;
    buf[0] = '\0';
    const uint64_t first = c->n_call > TAIL_CALLS ? c->n_call - TAIL_CALLS : 0;
    for (uint64_t i = first; i < c->n_call && len < cap; i++) {
        const comm_head *h = &c->ring[i % COMM_RING].head;
        len += (size_t)snprintf(buf + len, cap - len, "%s%s %llu", i > first ? ", " : "",
                                comm_op_name(h->op), (unsigned long long)h->bytes);
    }
}

static void dump_ring(const comm *c)
{
    if (!log_wants(KVS_LOG_WARN, KVS_LOG_COMM)) {
        return;
    }
    LOG(WARN, COMM, "rank %d of %d (%s): the group has ended: %s; its last calls:", c->rank,
        c->size, c->transport->name, c->family->text);
    for (uint64_t i = ring_first(c); i < c->n_call; i++) {
        char line[RECORD_TEXT];
        record_text(line, sizeof line, c, i);
        LOG(WARN, COMM, "%s", line);
    }
}

/* The error of a call on an ended group: the family's reason and this rank's last calls. The first
 * one of a rank also logs the whole ring. */
static kvs_status err_ended(comm *c, kvs_error *err)
{
    if (!c->dumped) {
        c->dumped = true;
        dump_ring(c);
    }
    char tail[96];
    tail_text(c, tail, sizeof tail);
    return err_set(err, KVS_PEER, "%s [rank %d, last calls: %s]", c->family->text, c->rank,
                   tail[0] != '\0' ? tail : "none");
}

/* ---- memory ---------------------------------------------------------------------------------- */

bool comm_room_reserve(comm_room *r, size_t n)
{
    if (n <= r->cap) {
        return true;
    }
    unsigned char *fresh = mem_alloc(n, 0);
    if (fresh == NULL) {
        return false;
    }
    mem_free(r->p);
    *r = (comm_room){fresh, n};
    return true;
}

kvs_status comm_room_for_views(comm *c, comm_room *r, kvs_error *err)
{
    size_t n = 0;
    for (int32_t p = 0; p < c->size; p++) {
        n += p != c->rank && c->in[p].p == NULL ? comm_align_up(c->in[p].bytes) : 0;
    }
    if (!comm_room_reserve(r, n)) {
        return err_set(err, KVS_NOMEM, "no memory for %zu bytes of views on rank %d", n, c->rank);
    }
    size_t at = 0;
    for (int32_t p = 0; p < c->size; p++) {
        if (p != c->rank && c->in[p].p == NULL && c->in[p].bytes > 0) {
            c->in[p].p = r->p + at;
            at += comm_align_up(c->in[p].bytes);
        }
    }
    return KVS_OK;
}

/* ---- a call ---------------------------------------------------------------------------------- */

/* Ends the group because this rank cannot enter; err holds why. */
kvs_status comm_call_refuse(comm *c, kvs_status st, int32_t op, const char *why, kvs_error *err)
{
    if (comm_failed(c)) {
        return err_ended(c, err);
    }
    (void)comm_fail(c, "rank %d did not enter %s: %s", c->rank, comm_op_name(op), why);
    return err_set(err, st, "%s on rank %d: %s", comm_op_name(op), c->rank, why);
}

kvs_status comm_call_begin(comm *c, comm_op op, uint64_t bytes, int32_t root, kvs_error *err)
{
    if (comm_failed(c)) {
        return err_ended(c, err);
    }
    comm_record *r = &c->ring[c->n_call % COMM_RING];
    c->n_call++;
    *r = (comm_record){
        .head = {.number = c->n_call, .bytes = bytes, .op = (int32_t)op, .root = root},
        .t_begin = clock_ns(),
    };
    c->sent = 0;
    c->received = 0;
    memset(c->out, 0, (size_t)c->size * sizeof *c->out);
    memset(c->in, 0, (size_t)c->size * sizeof *c->in);
    if (c->hook != NULL) {
        c->hook(c->hook_ctx, c->rank, true);
    }
    return KVS_OK;
}

static comm_record *call_record(comm *c)
{
    return &c->ring[(c->n_call - 1) % COMM_RING];
}

kvs_status comm_call_exchange(comm *c, bool first, kvs_error *err)
{
    const comm_head *head = &call_record(c)->head;
    const kvs_status st = c->fault != NULL ? comm_fault_exchange(c, head, first, err)
                                           : c->transport->exchange(c, head, first, err);
    for (int32_t p = 0; p < c->size && st == KVS_OK; p++) {
        if (p != c->rank) {
            c->sent += c->out[p].bytes;
            c->received += c->in[p].bytes;
        }
    }
    return st;
}

kvs_status comm_call_end(comm *c, kvs_status st, kvs_error *err)
{
    if (c->hook != NULL) {
        c->hook(c->hook_ctx, c->rank, false);
    }
    comm_record *r = call_record(c);
    r->t_end = clock_ns();
    r->st = st;
    if (st == KVS_IDLE) {
        return KVS_OK;
    }
    if (st == KVS_OK) {
        c->stats.n_call[r->head.op]++;
        c->stats.bytes_sent[r->head.op] += c->sent;
        c->stats.bytes_received[r->head.op] += c->received;
        return KVS_OK;
    }
    if (st == KVS_PEER) {
        return err_ended(c, err);
    }
    (void)comm_fail(c, "rank %d left %s: %s", c->rank, comm_op_name(r->head.op),
                    kvs_status_text(st));
    return st;
}

/* ---- collectives ----------------------------------------------------------------------------- */

static bool mul_fits(size_t a, size_t b)
{
    size_t x;
    return !__builtin_mul_overflow(a, b, &x) && x <= PTRDIFF_MAX;
}

kvs_status comm_all_gather(comm *c, const void *send, void *recv, size_t bytes, kvs_error *err)
{
    const comm_op op = COMM_OP_ALL_GATHER;
    if (!mul_fits(bytes, (size_t)c->size)) {
        return comm_call_refuse(c, KVS_INVALID, op, "bytes times ranks overflows", err);
    }
    if (bytes > 0 && (send == NULL || recv == NULL)) {
        return comm_call_refuse(c, KVS_INVALID, op, "a buffer is NULL", err);
    }
    TRY(comm_call_begin(c, op, bytes, 0, err));
    unsigned char *dst = recv;
    for (int32_t p = 0; p < c->size; p++) {
        c->out[p] = (comm_out){send, bytes};
        c->in[p] = (comm_in){bytes > 0 ? dst + (size_t)p * bytes : NULL, bytes};
    }
    const kvs_status st = comm_call_exchange(c, true, err);
    if (st == KVS_OK && bytes > 0 && send != dst + (size_t)c->rank * bytes) {
        memcpy(dst + (size_t)c->rank * bytes, send, bytes);
    }
    return comm_call_end(c, st, err);
}

kvs_status comm_all_to_all(comm *c, const void *send, void *recv, size_t bytes, kvs_error *err)
{
    const comm_op op = COMM_OP_ALL_TO_ALL;
    if (!mul_fits(bytes, (size_t)c->size)) {
        return comm_call_refuse(c, KVS_INVALID, op, "bytes times ranks overflows", err);
    }
    if (bytes > 0 && (send == NULL || recv == NULL)) {
        return comm_call_refuse(c, KVS_INVALID, op, "a buffer is NULL", err);
    }
    const size_t all = bytes * (size_t)c->size;
    const uintptr_t a = (uintptr_t)send;
    const uintptr_t b = (uintptr_t)recv;
    if (all > 0 && a < b + all && b < a + all) {
        return comm_call_refuse(c, KVS_INVALID, op, "send and recv overlap; use two buffers", err);
    }
    TRY(comm_call_begin(c, op, bytes, 0, err));
    const unsigned char *src = send;
    unsigned char *dst = recv;
    for (int32_t p = 0; p < c->size && bytes > 0; p++) {
        c->out[p] = (comm_out){src + (size_t)p * bytes, bytes};
        c->in[p] = (comm_in){dst + (size_t)p * bytes, bytes};
    }
    const kvs_status st = comm_call_exchange(c, true, err);
    if (st == KVS_OK && bytes > 0) {
        memcpy(dst + (size_t)c->rank * bytes, src + (size_t)c->rank * bytes, bytes);
    }
    return comm_call_end(c, st, err);
}

/* dst [n] = sum of own [n] and the views of the exchange that has just run. */
static void sum_views(comm *c, float *dst, const float *own, size_t n)
{
    for (int32_t p = 0; p < c->size; p++) {
        c->src[p] = p == c->rank ? own : (const float *)c->in[p].p;
    }
    comm_sum(dst, c->src, c->size, n);
}

kvs_status comm_reduce_scatter(comm *c, const float *send, float *recv, size_t n, kvs_error *err)
{
    const comm_op op = COMM_OP_REDUCE_SCATTER;
    if (!mul_fits(n, (size_t)c->size * sizeof(float))) {
        return comm_call_refuse(c, KVS_INVALID, op, "elements times ranks overflows", err);
    }
    if (n > 0 && (send == NULL || recv == NULL)) {
        return comm_call_refuse(c, KVS_INVALID, op, "a buffer is NULL", err);
    }
    TRY(comm_call_begin(c, op, n * sizeof(float), 0, err));
    for (int32_t p = 0; p < c->size && n > 0; p++) {
        c->out[p] = (comm_out){send + (size_t)p * n, n * sizeof(float)};
        c->in[p] = (comm_in){NULL, n * sizeof(float)};
    }
    const kvs_status st = comm_call_exchange(c, true, err);
    if (st == KVS_OK && n > 0) {
        sum_views(c, recv, send + (size_t)c->rank * n, n);
    }
    return comm_call_end(c, st, err);
}

static void all_reduce_segments(comm *c, float *buf, size_t n, bool scatter)
{
    const size_t own = comm_block(n, c->size, c->rank);
    float *mine = own > 0 ? buf + comm_block_begin(n, c->size, c->rank) : NULL;
    for (int32_t p = 0; p < c->size; p++) {
        const size_t theirs = comm_block(n, c->size, p);
        float *block = theirs > 0 ? buf + comm_block_begin(n, c->size, p) : NULL;
        if (scatter) {
            c->out[p] = (comm_out){block, theirs * sizeof(float)};
            c->in[p] = (comm_in){NULL, own * sizeof(float)};
        } else {
            c->out[p] = (comm_out){mine, own * sizeof(float)};
            c->in[p] = (comm_in){block, theirs * sizeof(float)};
        }
    }
}

kvs_status comm_all_reduce(comm *c, float *buf, size_t n, kvs_error *err)
{
    const comm_op op = COMM_OP_ALL_REDUCE;
    if (!mul_fits(n, sizeof(float))) {
        return comm_call_refuse(c, KVS_INVALID, op, "elements times 4 overflows", err);
    }
    if (n > 0 && buf == NULL) {
        return comm_call_refuse(c, KVS_INVALID, op, "the buffer is NULL", err);
    }
    TRY(comm_call_begin(c, op, n * sizeof(float), 0, err));
    all_reduce_segments(c, buf, n, true);
    kvs_status st = comm_call_exchange(c, true, err);
    if (st == KVS_OK) {
        const size_t own = comm_block(n, c->size, c->rank);
        if (own > 0) {
            float *mine = buf + comm_block_begin(n, c->size, c->rank);
            sum_views(c, mine, mine, own);
        }
        all_reduce_segments(c, buf, n, false);
        st = comm_call_exchange(c, false, err);
    }
    return comm_call_end(c, st, err);
}

kvs_status comm_broadcast(comm *c, void *buf, size_t bytes, int32_t root, kvs_error *err)
{
    const comm_op op = COMM_OP_BROADCAST;
    if (root < 0 || root >= c->size) {
        char why[64];
        snprintf(why, sizeof why, "root %d is not in 0..%d", root, c->size - 1);
        return comm_call_refuse(c, KVS_INVALID, op, why, err);
    }
    if (bytes > PTRDIFF_MAX || (bytes > 0 && buf == NULL)) {
        return comm_call_refuse(c, KVS_INVALID, op, "the buffer is NULL or too large", err);
    }
    TRY(comm_call_begin(c, op, bytes, root, err));
    if (c->rank != root) {
        c->in[root] = (comm_in){buf, bytes};
    }
    for (int32_t p = 0; p < c->size && c->rank == root; p++) {
        c->out[p] = (comm_out){buf, bytes};
    }
    return comm_call_end(c, comm_call_exchange(c, true, err), err);
}

kvs_status comm_barrier(comm *c, kvs_error *err)
{
    TRY(comm_call_begin(c, COMM_OP_BARRIER, 0, 0, err));
    return comm_call_end(c, comm_call_exchange(c, true, err), err);
}
