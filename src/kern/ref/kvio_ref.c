/* kvio_ref.c - writers and gathers, the definition: num/kvfmt.h row by row, behind the slot checks.
 */
#include "kern/ref/ref.h"
#include "num/kvfmt.h"

static size_t elem_bytes(int32_t type)
{
    return type == KVS_DTYPE_BF16 ? sizeof(bf16) : sizeof(float);
}

/* Whether the token is to be written; a slot outside the pool other than -1 is counted. */
static int slot_ok(int64_t slot, int64_t n_slot, kvio_stats *stats)
{
    const int ok = slot >= 0 && slot < n_slot;
    if (!ok && slot != -1) {
        stats->n_bad_id++;
    }
    return ok;
}

static void stats_add(kvio_stats *to, kvio_stats s, kv_count c)
{
    if (to != NULL) {
        to->n_written += s.n_written;
        to->n_bad_id += s.n_bad_id;
        to->n_nan += c.n_nan;
        to->n_sat += c.n_sat;
    }
}

static void kv_write_ref(const kv_write_args *a, dev_queue *q)
{
    (void)q;
    const kv_writer w = {a->fmt, a->rule, a->k_scale, a->in_type};
    const int64_t size = (int64_t)elem_bytes(a->in_type);
    kvio_stats stats = {0};
    kv_count count = {0};
    for (int64_t t = 0; t < a->n_tok; t++) {
        const int64_t slot = a->slot[t];
        if (!slot_ok(slot, a->n_slot, &stats)) {
            continue;
        }
        uint8_t *row = a->kv + slot / KVS_PAGE_TOKENS * a->page_stride +
                       slot % KVS_PAGE_TOKENS * a->row_stride;
        kv_row_write(&w, row, (const uint8_t *)a->latent + t * a->latent_stride * size,
                     (const uint8_t *)a->rope + t * a->rope_stride * size, &count);
        stats.n_written++;
    }
    stats_add(a->stats, stats, count);
}

static void index_write_ref(const index_write_args *a, dev_queue *q)
{
    (void)q;
    const int64_t size = (int64_t)elem_bytes(a->in_type);
    kvio_stats stats = {0};
    kv_count count = {0};
    for (int64_t t = 0; t < a->n_tok; t++) {
        const int64_t slot = a->slot[t];
        if (!slot_ok(slot, a->n_slot, &stats)) {
            continue;
        }
        index_key_write(a->fmt, a->in_type, a->keys + slot / KVS_PAGE_TOKENS * a->page_stride,
                        (int32_t)(slot % KVS_PAGE_TOKENS),
                        (const uint8_t *)a->key + t * a->key_stride * size, &count);
        stats.n_written++;
    }
    stats_add(a->stats, stats, count);
}

static void gather_row(const gather_args *a, int64_t slot, int64_t out_row)
{
    float v[KVS_ROW_DIM] = {0};
    if (slot >= 0) {
        kv_row_read(a->fmt, a->k_scale,
                    a->kv + slot / KVS_PAGE_TOKENS * a->page_stride +
                        slot % KVS_PAGE_TOKENS * a->row_stride,
                    v);
    }
    const int64_t at = out_row * a->out_stride;
    for (int32_t d = 0; d < KVS_ROW_DIM; d++) {
        if (a->out_type == KVS_DTYPE_BF16) {
            ((bf16 *)a->out)[at + d] = bf16_from_f32(v[d]);
        } else {
            ((float *)a->out)[at + d] = v[d];
        }
    }
}

static void gather_ref(const gather_args *a, dev_queue *q)
{
    (void)q;
    uint64_t n_bad = 0;
    for (int64_t r = 0; r < a->n_req; r++) {
        for (int64_t t = 0; t < a->count[r]; t++) {
            const int64_t slot = ref_slot(a->table + r * a->table_stride, a->table_width, a->n_slot,
                                          a->start[r] + t);
            n_bad += slot < 0;
            gather_row(a, slot, a->out_begin[r] + t);
        }
    }
    ref_count(a->n_bad_id, n_bad);
}

void ref_apply_kv_write(kern_table *t)
{
    t->kv_write = kv_write_ref;
}

void ref_apply_index_write(kern_table *t)
{
    t->index_write = index_write_ref;
}

void ref_apply_gather(kern_table *t)
{
    t->gather = gather_ref;
}
