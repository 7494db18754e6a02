/* x86/kvio.c - cache writers, the dequantising gather and query quantisation: the drivers.
 *
 * Tokens are dealt out in blocks over threads; each is written by one thread in one pass. Counters are
 * gathered per block and added up atomically, so totals do not depend on threads.
 *
 * A call that writes much writes past the caches. fp8 rows of whole lines go there straight from registers.
 * Others, which lie one behind the other, are made in a buffer, from where the lines that they fill go to
 * memory whole; the bytes of a line that is shared with other rows are stored as usual. A call that writes
 * little leaves its rows in the caches, for attention.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <xmmintrin.h>

#include "base/pool.h"
#include "kern/x86/kvio_x86.h"
#include "shard/shard.h"

enum {
    LINE = 64,
    BLOCK = 32,                      /* rows or heads of a task                             */
    STREAM_BYTES = 4 * 1024 * 1024,  /* a gather that writes more goes past the caches      */
    AHEAD = 4,                       /* rows that a gather asks for early ...               */
    FETCH_BYTES = 1024,              /* ... where they are short; long ones the machine sees */
    WRITE_STREAM_BYTES = 256 * 1024, /* a writer that writes more goes past the caches      */
    WRITE_BLOCK_MAX = 256,           /* tokens of a task of a writer                        */
    WRITE_BLOCK_MIN = 16,
    ROW_AHEAD = 4,           /* tokens whose values are asked for early: latents and rope,  */
    KEY_AHEAD = 12,          /* index keys,                                                 */
    SHARED_AHEAD = 8,        /* and, of where they go, lines that are not written whole     */
    AHEAD_MAX = 12,          /* of these                                                    */
    RUN_BYTES = LINE + 2688, /* of a run: a row of f32 or four of fp8_ds_mla, and an offset */
};

static struct pool *workers(const dev_queue *q)
{
    return q != NULL ? q->pool : NULL;
}

static int64_t elem_bytes(int32_t type)
{
    return type == KVS_DTYPE_BF16 ? (int64_t)sizeof(bf16) : (int64_t)sizeof(float);
}

static int64_t block_end(int64_t begin, int64_t block, int64_t n)
{
    return begin + block < n ? begin + block : n;
}

/* ---- writers -------------------------------------------------------------------------------------- */

typedef struct write_stats {
    _Atomic uint64_t n_written, n_bad_id, n_nan, n_sat;
} write_stats;

static void stats_add(write_stats *s, kvio_stats x, kv_count c)
{
    atomic_fetch_add_explicit(&s->n_written, x.n_written, memory_order_relaxed);
    if ((x.n_bad_id | c.n_nan | c.n_sat) != 0) {
        atomic_fetch_add_explicit(&s->n_bad_id, x.n_bad_id, memory_order_relaxed);
        atomic_fetch_add_explicit(&s->n_nan, c.n_nan, memory_order_relaxed);
        atomic_fetch_add_explicit(&s->n_sat, c.n_sat, memory_order_relaxed);
    }
}

static void stats_give(write_stats *s, kvio_stats *to)
{
    if (to != NULL) {
        to->n_written += atomic_load(&s->n_written);
        to->n_bad_id += atomic_load(&s->n_bad_id);
        to->n_nan += atomic_load(&s->n_nan);
        to->n_sat += atomic_load(&s->n_sat);
    }
}

/* Whether the token is to be written; a slot outside the pool other than -1 is counted. */
static bool slot_ok(int64_t slot, int64_t n_slot, kvio_stats *stats)
{
    if ((uint64_t)slot >= (uint64_t)n_slot) {
        stats->n_bad_id += (uint64_t)(slot != SHARD_NO_SLOT);
        return false;
    }
    stats->n_written++;
    return true;
}

/* Asks for `bytes` from p on, a constant. */
static inline __attribute__((always_inline)) void fetch(const uint8_t *p, const int32_t bytes)
{
#pragma GCC unroll 32
    for (int32_t i = 0; i < bytes; i += LINE) {
        __builtin_prefetch(p + i);
    }
}

/* Tokens of a task: several tasks a thread where there are enough. */
static int64_t write_block(const dev_queue *q, int64_t n_tok)
{
    const int64_t n_task = 4 * (int64_t)pool_size(workers(q));
    int64_t block = WRITE_BLOCK_MAX;
    while (block > WRITE_BLOCK_MIN && shard_cdiv(n_tok, block) < n_task) {
        block /= 2;
    }
    return block;
}

/* The tokens of a block that are to be written, and a few behind it, whose data is asked for early. */
typedef struct picks {
    int32_t n, n_ahead; /* n of the block; n_ahead with those behind it */
    int64_t token[WRITE_BLOCK_MAX + AHEAD_MAX];
    int64_t slot[WRITE_BLOCK_MAX + AHEAD_MAX];
} picks;

static void picks_add(picks *p, int64_t token, int64_t slot)
{
    p->token[p->n_ahead] = token;
    p->slot[p->n_ahead++] = slot;
}

static void picks_make(picks *p, const int64_t *slot, int64_t n_slot, int64_t begin, int64_t end,
                       int64_t n_tok, kvio_stats *stats)
{
    p->n_ahead = 0;
    for (int64_t t = begin; t < end; t++) {
        if (slot_ok(slot[t], n_slot, stats)) {
            picks_add(p, t, slot[t]);
        }
    }
    p->n = p->n_ahead;
    const int64_t stop = end + WRITE_BLOCK_MAX < n_tok ? end + WRITE_BLOCK_MAX : n_tok;
    for (int64_t t = end; t < stop && p->n_ahead < p->n + AHEAD_MAX; t++) {
        if ((uint64_t)slot[t] < (uint64_t)n_slot) {
            picks_add(p, t, slot[t]);
        }
    }
}

/* Rows that lie one behind the other, to be written together. The first byte is at buf + at % LINE. */
typedef struct run {
    uint8_t *at;
    int64_t bytes;
    uint8_t *buf; /* [RUN_BYTES], aligned to LINE */
} run;

static int64_t in_line(const uint8_t *p)
{
    return (int64_t)((uintptr_t)p % LINE);
}

static bool run_takes(const run *r, const uint8_t *row, int64_t row_bytes)
{
    return row == r->at + r->bytes && in_line(row) != 0 &&
           in_line(r->at) + r->bytes + row_bytes <= RUN_BYTES;
}

static void run_emit(const kvio_isa *isa, run *r)
{
    if (r->bytes == 0) {
        return;
    }
    const int64_t first = in_line(r->at);
    const int64_t end = first + r->bytes; /* beyond the first line: a row is longer */
    const int64_t whole = first == 0 ? 0 : LINE;
    const int64_t rest = end / LINE * LINE;
    uint8_t *line = r->at - first;
    if (first != whole) {
        memcpy(r->at, r->buf + first, (size_t)(whole - first));
    }
    isa->stream(line + whole, r->buf + whole, rest - whole);
    if (rest != end) {
        memcpy(line + rest, r->buf + rest, (size_t)(end - rest));
    }
    r->bytes = 0;
}

typedef struct kv_write_job {
    const kvio_isa *isa;
    const kv_write_args *a;
    int64_t block, row_bytes, size; /* size: of an element */
    bool stream;
    write_stats stats;
} kv_write_job;

static uint8_t *kv_row_at(const kv_write_args *a, int64_t slot)
{
    const uint64_t s = (uint64_t)slot;
    return a->kv + (int64_t)(s / KVS_PAGE_TOKENS) * a->page_stride +
           (int64_t)(s % KVS_PAGE_TOKENS) * a->row_stride;
}

/* Asks for the lines that the row of pick i shares with rows that are not of its run. */
static void kv_write_fetch_shared(const kv_write_job *j, const picks *p, int32_t i)
{
    const uint8_t *row = kv_row_at(j->a, p->slot[i]);
    if (in_line(row) != 0 && p->slot[i - 1] + 1 != p->slot[i]) {
        __builtin_prefetch(row, 1);
    }
    if (in_line(row + j->row_bytes) != 0 &&
        (i + 1 == p->n_ahead || p->slot[i] + 1 != p->slot[i + 1])) {
        __builtin_prefetch(row + j->row_bytes, 1);
    }
}

static const uint8_t *latent_at(const kv_write_job *j, int64_t t)
{
    return (const uint8_t *)j->a->latent + t * j->a->latent_stride * j->size;
}

static const uint8_t *rope_at(const kv_write_job *j, int64_t t)
{
    return (const uint8_t *)j->a->rope + t * j->a->rope_stride * j->size;
}

/* Whether the loops ask for the values of later rows themselves: where they convert bf16. */
static bool kv_write_asks(const kv_write_job *j)
{
    return j->size == sizeof(bf16) && (j->a->fmt == KVS_KV_FP8 || j->a->fmt == KVS_KV_FP8_DS_MLA);
}

/* Pick i, and asks for what it and a later one need. */
static kvio_row kv_write_row(const kv_write_job *j, const picks *p, int32_t i)
{
    kvio_row r = {.latent = latent_at(j, p->token[i]), .rope = rope_at(j, p->token[i])};
    r.next_latent = r.latent;
    r.next_rope = r.rope;
    if (!j->stream) {
        return r;
    }
    if (i + SHARED_AHEAD < p->n_ahead) {
        kv_write_fetch_shared(j, p, i + SHARED_AHEAD);
    }
    if (i + ROW_AHEAD >= p->n_ahead) {
        return r;
    }
    const int64_t t = p->token[i + ROW_AHEAD];
    if (kv_write_asks(j)) {
        r.next_latent = latent_at(j, t);
        r.next_rope = rope_at(j, t);
    } else if (j->size == sizeof(bf16)) {
        fetch(latent_at(j, t), KVS_LATENT_DIM * sizeof(bf16));
        fetch(rope_at(j, t), KVS_ROPE_DIM * sizeof(bf16));
    } else {
        fetch(latent_at(j, t), KVS_LATENT_DIM * sizeof(float));
        fetch(rope_at(j, t), KVS_ROPE_DIM * sizeof(float));
    }
    return r;
}

/* Whether rows are written past the caches straight from registers. */
static bool kv_write_direct(const kv_write_job *j)
{
    const kv_write_args *a = j->a;
    return kv_write_asks(j) && j->row_bytes % LINE == 0 && a->row_stride % LINE == 0 &&
           a->page_stride % LINE == 0 && in_line(a->kv) == 0;
}

/* By way of a buffer. There are the run in hand and the one before: a line is read some time after it was
 * made, so that it is not waited for. */
static void kv_write_stream(const kv_write_job *j, const kv_writer *w, const picks *p, kv_count *count)
{
    _Alignas(LINE) uint8_t buf[2][RUN_BYTES];
    run runs[2] = {{.buf = buf[0]}, {.buf = buf[1]}};
    run *r = &runs[0];
    const bool direct = kv_write_direct(j);
    for (int32_t i = 0; i < p->n; i++) {
        uint8_t *row = kv_row_at(j->a, p->slot[i]);
        kvio_row in = kv_write_row(j, p, i);
        if (direct) {
            in.stream = true;
            j->isa->write_row(w, row, &in, count);
            continue;
        }
        if (!run_takes(r, row, j->row_bytes)) {
            r = r == &runs[0] ? &runs[1] : &runs[0];
            run_emit(j->isa, r);
            r->at = row;
        }
        uint8_t *out = r->buf + in_line(r->at) + r->bytes;
        r->bytes += j->row_bytes;
        j->isa->write_row(w, out, &in, count);
    }
    run_emit(j->isa, &runs[0]);
    run_emit(j->isa, &runs[1]);
    _mm_sfence(); /* before another thread is told that the rows are there */
}

static void kv_write_task(void *ctx, int64_t i_task, int i_worker)
{
    kv_write_job *j = ctx;
    const kv_write_args *a = j->a;
    (void)i_worker;
    const kv_writer w = {a->fmt, a->rule, a->k_scale, a->in_type};
    kvio_stats stats = {0};
    kv_count count = {0};
    picks p;
    picks_make(&p, a->slot, a->n_slot, i_task * j->block,
               block_end(i_task * j->block, j->block, a->n_tok), a->n_tok, &stats);
    if (j->stream) {
        kv_write_stream(j, &w, &p, &count);
    } else {
        for (int32_t i = 0; i < p.n; i++) {
            const kvio_row in = kv_write_row(j, &p, i);
            j->isa->write_row(&w, kv_row_at(a, p.slot[i]), &in, &count);
        }
    }
    stats_add(&j->stats, stats, count);
}

void kv_write_run(const kvio_isa *isa, const kv_write_args *a, dev_queue *q)
{
    kv_write_job j = {.isa = isa, .a = a, .block = write_block(q, a->n_tok)};
    j.row_bytes = kv_row_bytes(a->fmt);
    j.size = elem_bytes(a->in_type);
    j.stream = a->n_tok * j.row_bytes > WRITE_STREAM_BYTES;
    pool_run(workers(q), kv_write_task, &j, shard_cdiv(a->n_tok, j.block));
    stats_give(&j.stats, a->stats);
}

typedef struct index_write_job {
    const kvio_isa *isa;
    const index_write_args *a;
    int64_t block;
    bool stream;
    write_stats stats;
} index_write_job;

static uint8_t *index_page_at(const index_write_args *a, int64_t slot)
{
    return a->keys + (int64_t)((uint64_t)slot / KVS_PAGE_TOKENS) * a->page_stride;
}

static const uint8_t *key_at(const index_write_args *a, int64_t t)
{
    return (const uint8_t *)a->key + t * a->key_stride * elem_bytes(a->in_type);
}

/* Pick i. Asks for the values of a later one, unless the loops do, and for the line with the scale of another
 * where it is not that of the pick before. */
static kvio_key index_write_key(const index_write_job *j, const picks *p, int32_t i)
{
    const index_write_args *a = j->a;
    kvio_key k = {.value = key_at(a, p->token[i]),
                  .page = index_page_at(a, p->slot[i]),
                  .off = (int32_t)((uint64_t)p->slot[i] % KVS_PAGE_TOKENS)};
    k.next = k.value;
    if (!j->stream) {
        return k;
    }
    if (i + KEY_AHEAD < p->n_ahead) {
        const uint8_t *key = key_at(a, p->token[i + KEY_AHEAD]);
        if (a->in_type == KVS_DTYPE_BF16 && a->fmt == KVS_INDEX_FP8) {
            k.next = key;
        } else if (a->in_type == KVS_DTYPE_BF16) {
            fetch(key, KVS_INDEX_DIM * sizeof(bf16));
        } else {
            fetch(key, KVS_INDEX_DIM * sizeof(float));
        }
    }
    const int32_t s = i + SHARED_AHEAD;
    if (s < p->n_ahead && a->fmt == KVS_INDEX_FP8 &&
        (p->slot[s - 1] + 1 != p->slot[s] || p->slot[s] % (LINE / (int64_t)sizeof(float)) == 0)) {
        const int32_t off = (int32_t)((uint64_t)p->slot[s] % KVS_PAGE_TOKENS);
        __builtin_prefetch(index_page_at(a, p->slot[s]) + index_scale_at(off), 1);
    }
    return k;
}

/* How many picks from i on, in fours, are tokens and slots one behind the other in one page. */
static int32_t picks_in_line(const picks *p, int32_t i)
{
    const int64_t token = p->token[i];
    const int64_t slot = p->slot[i];
    const int64_t room = KVS_PAGE_TOKENS - (int64_t)((uint64_t)slot % KVS_PAGE_TOKENS);
    const int32_t most = p->n - i < room ? p->n - i : (int32_t)room;
    int32_t n = 1;
    while (n < most && p->token[i + n] == token + n && p->slot[i + n] == slot + n) {
        n++;
    }
    return n / KVIO_KEYS * KVIO_KEYS;
}

/* n picks in a line from i on. Asks for the lines of their scales, and for values of later tokens while there
 * are any in the call. */
static void index_write_line(const index_write_job *j, const picks *p, int32_t i, int32_t n, kv_count *count)
{
    const index_write_args *a = j->a;
    kvio_line l = {.value = key_at(a, p->token[i]),
                   .stride = a->key_stride * elem_bytes(a->in_type),
                   .page = index_page_at(a, p->slot[i]),
                   .off = (int32_t)((uint64_t)p->slot[i] % KVS_PAGE_TOKENS),
                   .n = n};
    l.ahead = p->token[i] + n + KEY_AHEAD <= a->n_tok ? KEY_AHEAD * l.stride : 0;
    for (int32_t k = 0; k < n; k += LINE / (int32_t)sizeof(float)) {
        __builtin_prefetch(l.page + index_scale_at(l.off + k), 1);
    }
    j->isa->write_line(&l, count);
}

static void index_write_task(void *ctx, int64_t i_task, int i_worker)
{
    index_write_job *j = ctx;
    const index_write_args *a = j->a;
    (void)i_worker;
    kvio_stats stats = {0};
    kv_count count = {0};
    picks p;
    picks_make(&p, a->slot, a->n_slot, i_task * j->block,
               block_end(i_task * j->block, j->block, a->n_tok), a->n_tok, &stats);
    const bool line = j->stream && a->fmt == KVS_INDEX_FP8 && a->in_type == KVS_DTYPE_BF16;
    for (int32_t i = 0; i < p.n;) {
        const int32_t n_line = line ? picks_in_line(&p, i) : 0;
        if (n_line > 0) {
            index_write_line(j, &p, i, n_line, &count);
            i += n_line;
            continue;
        }
        kvio_key key[KVIO_KEYS];
        const int32_t n = p.n - i < KVIO_KEYS ? p.n - i : KVIO_KEYS;
        for (int32_t k = 0; k < n; k++) {
            key[k] = index_write_key(j, &p, i + k);
        }
        j->isa->write_keys(a->fmt, a->in_type, key, n, j->stream, &count);
        i += n;
    }
    if (j->stream) {
        _mm_sfence(); /* before another thread is told that the keys are there */
    }
    stats_add(&j->stats, stats, count);
}

void index_write_run(const kvio_isa *isa, const index_write_args *a, dev_queue *q)
{
    index_write_job j = {.isa = isa, .a = a, .block = write_block(q, a->n_tok)};
    const int64_t bytes = a->n_tok * (index_page_bytes(a->fmt) / KVS_PAGE_TOKENS);
    j.stream = bytes > WRITE_STREAM_BYTES && in_line(a->keys) == 0 && a->page_stride % LINE == 0;
    pool_run(workers(q), index_write_task, &j, shard_cdiv(a->n_tok, j.block));
    stats_give(&j.stats, a->stats);
}

/* ---- gather --------------------------------------------------------------------------------------- */

typedef struct gather_job {
    const kvio_isa *isa;
    const gather_args *a;
    int64_t n_block; /* of the longest request */
    bool stream;     /* past the caches        */
    _Atomic uint64_t n_bad;
} gather_job;

static void gather_task(void *ctx, int64_t i_task, int i_worker)
{
    gather_job *j = ctx;
    const gather_args *a = j->a;
    (void)i_worker;
    const int64_t r = i_task / j->n_block;
    const int64_t begin = i_task % j->n_block * BLOCK;
    const int64_t size = elem_bytes(a->out_type);
    _Alignas(64) uint8_t line[KV_ROW_BYTES_F32];
    uint64_t n_bad = 0;
    for (int64_t t = begin; t < block_end(begin, BLOCK, a->count[r]); t++) {
        uint8_t *out = (uint8_t *)a->out + (a->out_begin[r] + t) * a->out_stride * size;
        const int64_t slot = shard_slot_checked(a->table + r * a->table_stride, a->table_width,
                                                a->n_slot, (kvs_local){a->start[r] + t})
                                 .v;
        if (slot < 0) {
            n_bad++;
            memset(out, 0, (size_t)(KVS_ROW_DIM * size));
            continue;
        }
        const uint8_t *row = a->kv + slot / KVS_PAGE_TOKENS * a->page_stride +
                             slot % KVS_PAGE_TOKENS * a->row_stride;
        if (slot % KVS_PAGE_TOKENS + AHEAD < KVS_PAGE_TOKENS && a->row_stride <= FETCH_BYTES) {
            for (int64_t i = 0; i < a->row_stride; i += 64) {
                __builtin_prefetch(row + AHEAD * a->row_stride + i);
            }
        }
        if (j->stream) {
            j->isa->read_row(a->fmt, a->k_scale, row, a->out_type, line);
            j->isa->stream(out, line, KVS_ROW_DIM * size);
        } else {
            j->isa->read_row(a->fmt, a->k_scale, row, a->out_type, out);
        }
    }
    if (j->stream) {
        _mm_sfence(); /* before another thread is told that the rows are there */
    }
    atomic_fetch_add_explicit(&j->n_bad, n_bad, memory_order_relaxed);
}

void gather_run(const kvio_isa *isa, const gather_args *a, dev_queue *q)
{
    gather_job j = {.isa = isa, .a = a, .n_block = 1};
    const int64_t stride = a->out_stride * elem_bytes(a->out_type);
    int64_t n_row = 0;
    for (int32_t r = 0; r < a->n_req; r++) {
        const int64_t count = a->count[r] > 0 ? a->count[r] : 0;
        const int64_t n = shard_cdiv(count, BLOCK);
        j.n_block = n > j.n_block ? n : j.n_block;
        n_row += count;
    }
    j.stream = n_row * KVS_ROW_DIM * elem_bytes(a->out_type) > STREAM_BYTES && stride % 64 == 0 &&
               (uintptr_t)a->out % 64 == 0;
    pool_run(workers(q), gather_task, &j, a->n_req * j.n_block);
    if (a->n_bad_id != NULL) {
        *a->n_bad_id += atomic_load(&j.n_bad);
    }
}

/* ---- index_quant ---------------------------------------------------------------------------------- */

typedef struct quant_job {
    const kvio_isa *isa;
    const index_quant_args *a;
    float by_dim, by_head;
    _Atomic uint64_t n_nan;
} quant_job;

static void quant_task(void *ctx, int64_t i_task, int i_worker)
{
    quant_job *j = ctx;
    const index_quant_args *a = j->a;
    (void)i_worker;
    const int64_t size = elem_bytes(a->q_type);
    uint64_t n_nan = 0;
    const int64_t n = (int64_t)a->n_row * a->n_head;
    for (int64_t i = i_task * BLOCK; i < block_end(i_task * BLOCK, BLOCK, n); i++) {
        const int64_t at = i * KVS_INDEX_DIM;
        const uint8_t *x = (const uint8_t *)a->q + at * size;
        float s = 1.0f;
        if (a->q8 != NULL) {
            s = j->isa->quant_head(x, a->q_type, a->q8 + at, &n_nan);
        } else {
            j->isa->widen_head(x, a->q_type, a->q_f32 + at, &n_nan);
        }
        n_nan += (uint64_t)f32_is_nan(a->w[i]);
        a->w_out[i] = a->w[i] * s * j->by_dim * j->by_head;
    }
    atomic_fetch_add_explicit(&j->n_nan, n_nan, memory_order_relaxed);
}

void index_quant_run(const kvio_isa *isa, const index_quant_args *a, dev_queue *q)
{
    quant_job j = {.isa = isa, .a = a};
    j.by_dim = (float)(1.0 / sqrt((double)KVS_INDEX_DIM));
    j.by_head = (float)(1.0 / sqrt((double)a->n_head));
    pool_run(workers(q), quant_task, &j, shard_cdiv((int64_t)a->n_row * a->n_head, BLOCK));
    if (a->n_nan != NULL) {
        *a->n_nan += atomic_load(&j.n_nan);
    }
}
