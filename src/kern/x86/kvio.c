/* x86/kvio.c - cache writers, the dequantising gather and query quantisation: the drivers.
 *
 * Tokens are dealt out in blocks over threads; each is written by one thread in one pass. Counters are
 * gathered per block and added up atomically, so totals do not depend on threads.
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
    BLOCK = 32,                     /* tokens, rows or heads of a task                     */
    STREAM_BYTES = 4 * 1024 * 1024, /* a gather that writes more goes past the caches      */
    AHEAD = 4,                      /* rows that a gather asks for early ...               */
    FETCH_BYTES = 1024              /* ... where they are short; long ones the machine sees */
};

static struct pool *workers(const dev_queue *q)
{
    return q != NULL ? q->pool : NULL;
}

static int64_t elem_bytes(int32_t type)
{
    return type == KVS_DTYPE_BF16 ? (int64_t)sizeof(bf16) : (int64_t)sizeof(float);
}

static int64_t block_end(int64_t begin, int64_t n)
{
    return begin + BLOCK < n ? begin + BLOCK : n;
}

/* ---- writers -------------------------------------------------------------------------------------- */

typedef struct write_stats {
    _Atomic uint64_t n_written, n_bad_id, n_nan, n_sat;
} write_stats;

static void stats_add(write_stats *s, kvio_stats x, kv_count c)
{
    atomic_fetch_add_explicit(&s->n_written, x.n_written, memory_order_relaxed);
    atomic_fetch_add_explicit(&s->n_bad_id, x.n_bad_id, memory_order_relaxed);
    atomic_fetch_add_explicit(&s->n_nan, c.n_nan, memory_order_relaxed);
    atomic_fetch_add_explicit(&s->n_sat, c.n_sat, memory_order_relaxed);
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
static int slot_ok(int64_t slot, int64_t n_slot, kvio_stats *stats)
{
    const int ok = slot >= 0 && slot < n_slot;
    stats->n_bad_id += (uint64_t)(!ok && slot != SHARD_NO_SLOT);
    stats->n_written += (uint64_t)ok;
    return ok;
}

typedef struct kv_write_job {
    const kvio_isa *isa;
    const kv_write_args *a;
    write_stats stats;
} kv_write_job;

static void kv_write_task(void *ctx, int64_t i_task, int i_worker)
{
    kv_write_job *j = ctx;
    const kv_write_args *a = j->a;
    (void)i_worker;
    const kv_writer w = {a->fmt, a->rule, a->k_scale, a->in_type};
    const int64_t size = elem_bytes(a->in_type);
    kvio_stats stats = {0};
    kv_count count = {0};
    for (int64_t t = i_task * BLOCK; t < block_end(i_task * BLOCK, a->n_tok); t++) {
        const int64_t slot = a->slot[t];
        if (slot_ok(slot, a->n_slot, &stats)) {
            uint8_t *row = a->kv + slot / KVS_PAGE_TOKENS * a->page_stride +
                           slot % KVS_PAGE_TOKENS * a->row_stride;
            j->isa->write_row(&w, row, (const uint8_t *)a->latent + t * a->latent_stride * size,
                              (const uint8_t *)a->rope + t * a->rope_stride * size, &count);
        }
    }
    stats_add(&j->stats, stats, count);
}

void kv_write_run(const kvio_isa *isa, const kv_write_args *a, dev_queue *q)
{
    kv_write_job j = {.isa = isa, .a = a};
    pool_run(workers(q), kv_write_task, &j, shard_cdiv(a->n_tok, BLOCK));
    stats_give(&j.stats, a->stats);
}

typedef struct index_write_job {
    const kvio_isa *isa;
    const index_write_args *a;
    write_stats stats;
} index_write_job;

static void index_write_task(void *ctx, int64_t i_task, int i_worker)
{
    index_write_job *j = ctx;
    const index_write_args *a = j->a;
    (void)i_worker;
    const int64_t size = elem_bytes(a->in_type);
    kvio_stats stats = {0};
    kv_count count = {0};
    kvio_key key[KVIO_KEYS];
    int32_t n = 0;
    for (int64_t t = i_task * BLOCK; t < block_end(i_task * BLOCK, a->n_tok); t++) {
        const int64_t slot = a->slot[t];
        if (slot_ok(slot, a->n_slot, &stats)) {
            key[n].value = (const uint8_t *)a->key + t * a->key_stride * size;
            key[n].page = a->keys + slot / KVS_PAGE_TOKENS * a->page_stride;
            key[n++].off = (int32_t)(slot % KVS_PAGE_TOKENS);
        }
        if (n == KVIO_KEYS) {
            j->isa->write_keys(a->fmt, a->in_type, key, n, &count);
            n = 0;
        }
    }
    j->isa->write_keys(a->fmt, a->in_type, key, n, &count);
    stats_add(&j->stats, stats, count);
}

void index_write_run(const kvio_isa *isa, const index_write_args *a, dev_queue *q)
{
    index_write_job j = {.isa = isa, .a = a};
    pool_run(workers(q), index_write_task, &j, shard_cdiv(a->n_tok, BLOCK));
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
    for (int64_t t = begin; t < block_end(begin, a->count[r]); t++) {
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
    for (int64_t i = i_task * BLOCK; i < block_end(i_task * BLOCK, n); i++) {
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
