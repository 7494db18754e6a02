/* Exchanges on the device of fake_cuda.c: ranks meet in memory of the host. A launch waits for nobody: what it
 * is to do is done once the last rank has come, and waiting for a queue gives up those who have not. */
#include "unit/check/fake_cuda.h"

#include <string.h>
#include <time.h>
#include "kern/exchange.h"
#include "unit/check/fake_processes.h"

/* The exchange that attention of a rank has sent for, of those that have not ended; 0: none. */
static uint32_t g_sent[WIRE_MAX_RANK];

/* Ranks that wait; a plain exchange or a merge. */
static struct {
    int n, is_merge;
    int here[WIRE_MAX_RANK];
    exchange_args a[WIRE_MAX_RANK];
    exchange_merge_args m[WIRE_MAX_RANK];
} g_wait;

static wire_control *control(const wire *w, int32_t rank)
{
    return (wire_control *)(void *)w->area[rank];
}

static const wire *wire_of(int32_t rank)
{
    return g_wait.is_merge ? &g_wait.m[rank].w : &g_wait.a[rank].w;
}

static int32_t first_here(void)
{
    int32_t r = 0;
    while (!g_wait.here[r]) {
        r++;
    }
    return r;
}

static void fault_all(const wire *w, uint64_t fault)
{
    for (int32_t r = 0; r < w->n_rank; r++) {
        if (control(w, r)->fault == 0) {
            control(w, r)->fault = fault;
        }
    }
}

/* What rank `to` gets of rank `from`. */
static void move(const exchange_args *from, const exchange_args *to)
{
    for (int32_t k = 0; k < to->n_part; k++) {
        const exchange_part *s = &from->part[k];
        const exchange_part *d = &to->part[k];
        for (int32_t row = 0; row < to->n_row; row++) {
            memcpy((uint8_t *)d->dst + from->w.rank * d->dst_rank + row * d->dst_row,
                   (const uint8_t *)s->src + to->w.rank * s->src_rank + row * s->src_row, (size_t)d->bytes);
        }
    }
}

void fake_merge(const exchange_merge_args *a, const float *const *out_in, int64_t out_row, const float *const *lse_in,
                int64_t lse_row, dev_queue *q)
{
    static kern_table ref;
    const int32_t n = a->w.n_rank;
    if (ref.merge == NULL) {
        kern_init(&ref, 0, NULL, NULL);
    }
    const merge_args m = {.n_part = n, .mode = 8 % n == 0 ? MERGE_TREE : MERGE_FOLD, .n_row = a->n_row,
                          .n_head = a->n_head / n, .dim = 512, .out_in = out_in, .lse_in = lse_in,
                          .in_stride_row = out_row, .in_stride_head = 512, .lse_stride_row = lse_row,
                          .out = a->out, .out_type = a->out_type, .out_stride_row = a->out_row,
                          .out_stride_head = 512, .lse = a->lse, .n_nan = a->n_nan};
    ref.merge(&m, q);
    if (fake.wrong && a->n_row > 0) {
        const int64_t size = a->out_type == KVS_DTYPE_BF16 ? 2 : 4;
        ((uint8_t *)a->out)[(a->n_row - 1) * a->out_row * size + 5] ^= 1;
    }
}

static void merge(const exchange_merge_args *a, dev_queue *q)
{
    const float *out_in[WIRE_MAX_RANK];
    const float *lse_in[WIRE_MAX_RANK];
    const int32_t local = a->n_head / a->w.n_rank;
    for (int32_t p = 0; p < a->w.n_rank; p++) {
        out_in[p] = g_wait.m[p].part + (int64_t)a->w.rank * local * 512;
        lse_in[p] = g_wait.m[p].part_lse + a->w.rank * local;
    }
    fake_merge(a, out_in, a->part_row, lse_in, a->lse_row, q);
}

/* The head of a rank's message, left with every rank. */
static void send_head(const wire *w, uint32_t what, int32_t n_row, int64_t bytes)
{
    const uint32_t epoch = wire_epoch(control(w, w->rank)->done);
    const wire_head h = {what, (uint32_t)n_row, (uint32_t)(bytes / 4), epoch};
    for (int32_t p = 0; p < w->n_rank; p++) {
        memcpy(w->area[p] + wire_head_at(w->n_rank, epoch, w->rank), &h, sizeof h);
    }
}

/* All have come: ends the group where they differ, else does it. */
static void complete(dev_queue *q)
{
    const wire *w = wire_of(0);
    const uint32_t epoch = wire_epoch(control(w, 0)->done);
    uint32_t sent[WIRE_MAX_RANK];
    memcpy(sent, g_sent, sizeof sent);
    memset(g_sent, 0, sizeof g_sent);
    wire_head h[WIRE_MAX_RANK];
    memcpy(h, w->area[0] + wire_head_at(w->n_rank, epoch, 0), (size_t)w->n_rank * sizeof *h);
    for (int32_t r = 1; r < w->n_rank; r++) {
        if (memcmp(&h[0], &h[r], sizeof h[0]) != 0) {
            const int32_t about = fake.blames ? (r + 1) % w->n_rank : r;
            const int32_t by = fake.blames ? (r + 2) % w->n_rank : 0;
            if (!fake.deaf) {
                fault_all(w, WIRE_FAULT(WIRE_MISMATCH, about, by, epoch));
            }
            return;
        }
    }
    for (int32_t r = 0; r < w->n_rank && g_wait.is_merge; r++) {
        /* who says that it has sent and has not, or has sent and sends again */
        if ((g_wait.m[r].sent != 0) != (sent[r] == epoch)) {
            if (!fake.deaf) {
                const int32_t about = fake.blames ? (r + 1) % w->n_rank : r;
                const int32_t by = fake.blames ? (r + 2) % w->n_rank : (r + 1) % w->n_rank;
                fault_all(w, WIRE_FAULT(WIRE_LATE, about, by, epoch));
            }
            return;
        }
    }
    for (int32_t r = 0; r < w->n_rank; r++) {
        control(w, r)->done += WIRE_TURN;
        for (int32_t from = 0; from < w->n_rank && !g_wait.is_merge; from++) {
            move(&g_wait.a[from], &g_wait.a[r]);
        }
        if (g_wait.is_merge) {
            merge(&g_wait.m[r], q);
        } else if (fake.wrong && g_wait.a[r].n_part > 0 && g_wait.a[r].n_row > 0) {
            ((uint8_t *)g_wait.a[r].part[0].dst)[3] ^= 1;
        }
    }
}

static void come(const wire *w, dev_queue *q)
{
    g_wait.here[w->rank] = 1;
    if (++g_wait.n == w->n_rank) {
        complete(q);
        memset(g_wait.here, 0, sizeof g_wait.here);
        g_wait.n = 0;
    }
}

/* Whoever waits gives up: the group has been ended, or ends now. */
static void give_up(void)
{
    if (g_wait.n == 0) {
        return;
    }
    const wire *w = wire_of(first_here());
    if (control(w, w->rank)->fault == 0) {
        const struct timespec t = {.tv_sec = 0, .tv_nsec = (long)w->limit_ns};
        int32_t missing = 0;
        while (g_wait.here[missing]) {
            missing++;
        }
        nanosleep(&t, NULL);
        fault_all(w, WIRE_FAULT(WIRE_LATE, missing, w->rank, wire_epoch(control(w, w->rank)->done)));
    }
    memset(g_wait.here, 0, sizeof g_wait.here);
    memset(g_sent, 0, sizeof g_sent);
    g_wait.n = 0;
}

typedef struct some {
    int32_t n;
    exchange_args a[WIRE_MAX_RANK];
} some;

typedef struct some_sent {
    attn_args a;
    wire w;
    int32_t deterministic;
} some_sent;

typedef struct some_merge {
    int32_t n;
    exchange_merge_args a[WIRE_MAX_RANK];
} some_merge;

static void call(const void *args, dev_queue *q)
{
    const some *s = args;
    exchange_sm90(s->a, s->n, q);
}

static void call_merge(const void *args, dev_queue *q)
{
    const some_merge *s = args;
    exchange_merge_sm90(s->a, s->n, q);
}

static void call_sent(const void *args, dev_queue *q)
{
    const some_sent *s = args;
    attn_send_sm90(&s->a, &s->w, s->deterministic, q);
}

/* Results of all heads lie where the merge looks, as if attention had not sent them. */
void attn_send_sm90(const attn_args *a, const wire *w, int32_t deterministic, dev_queue *q)
{
    static kern_table ref;
    some_sent s;
    memset(&s, 0, sizeof s);
    s.a = *a;
    s.w = *w;
    s.deterministic = deterministic;
    if (fake_recorded(call_sent, &s, sizeof s)) {
        return;
    }
    const char *why = attn_send_refuses(a, w, deterministic);
    if (why != NULL) {
        dev_queue_fail(q, KVS_UNSUPPORTED, why);
        return;
    }
    if (ref.attn == NULL) {
        kern_init(&ref, 0, NULL, NULL);
    }
    ref.attn(a, q);
    if (fake.strays && a->n_row > 0) {
        a->out[0] += 0.5f;
    }
    g_sent[w->rank] = control(w, w->rank)->fault == 0 ? wire_epoch(control(w, w->rank)->done) : 0;
}

void exchange_sm90(const exchange_args *a, int32_t n, dev_queue *q)
{
    some s;
    memset(&s, 0, sizeof s);
    s.n = n;
    memcpy(s.a, a, (size_t)n * sizeof *a);
    fake.on_sync = give_up;
    if (fake_recorded(call, &s, sizeof s) || fake_process_exchange(a, q)) {
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        if (exchange_refuses(&a[i]) != NULL) {
            dev_queue_fail(q, KVS_UNSUPPORTED, exchange_refuses(&a[i]));
        } else if (control(&a[i].w, a[i].w.rank)->fault == 0) {
            g_wait.is_merge = 0;
            g_wait.a[a[i].w.rank] = a[i];
            send_head(&a[i].w, (uint32_t)a[i].op, a[i].n_row, exchange_bytes(&a[i]));
            come(&a[i].w, q);
        }
    }
}

void exchange_merge_sm90(const exchange_merge_args *a, int32_t n, dev_queue *q)
{
    some_merge s;
    memset(&s, 0, sizeof s);
    s.n = n;
    memcpy(s.a, a, (size_t)n * sizeof *a);
    if (fake_recorded(call_merge, &s, sizeof s) || fake_process_merge(a, q)) {
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        if (exchange_merge_refuses(&a[i]) != NULL) {
            dev_queue_fail(q, KVS_UNSUPPORTED, exchange_merge_refuses(&a[i]));
        } else if (control(&a[i].w, a[i].w.rank)->fault == 0) {
            g_wait.is_merge = 1;
            g_wait.m[a[i].w.rank] = a[i];
            send_head(&a[i].w, EXCHANGE_PARTIAL, a[i].n_row, exchange_merge_bytes(&a[i]));
            come(&a[i].w, q);
        }
    }
}
