/* kern/cuda/attn_sparse.cuh - what the three kernels of sparse attention on sm_90a share.
 *
 * An op is three launches: compaction (valid ids of each row, packed, with counts), the main kernel
 * (attention over packed keys), and the merge of rows that more than one thread block worked on. Nothing
 * is read back by the host: the main kernel divides the work by the counts it finds.
 *
 * An item is what has one softmax of its own: a row, or in the deterministic mode one segment of one lane
 * of a row. An item costs
 * item_cost for its queries and results and one per tile of 64 keys (1 when it has none); costs are laid end to end, and part p of
 * P takes positions [p W / P, (p + 1) W / P) of the total W, P being at most W. A row cut by a part's end leaves partials,
 * at most two per part: slot 0 of a part holds what began in an earlier one, slot 1 what goes on in the
 * next. Where as many whole items for each part take no longer than such parts with their cuts, nothing is cut.
 * Items of the deterministic mode never are.
 *
 * Heads are worked on in groups of at most N; the thread blocks of one part, one per group, lie side by
 * side so that they find the rows they share in the L2 cache.
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_CUH

#include <stdint.h>

enum {
    SPARSE_TILE = 64, /* keys of one tile                                                      */
    SPARSE_VDIM = 512,
    SPARSE_DIM = 576,
    SPARSE_ROWS = 1 << 20 /* of one launch: costs add up to less than 2^31 */
};

struct sparse_params {
    /* keys */
    const uint8_t *kv;
    int64_t page_stride,
        row_stride;     /* bytes                                                        */
    const int32_t *ids; /* [n_row, ids_stride] packed slots                              */
    int64_t ids_stride;
    const int32_t *count; /* [n_item] keys                                                */
    const int32_t *begin; /* [n_item] first key in its row's ids                           */
    int32_t n_item;
    int32_t item_per_row; /* 1, or lanes x segments                                        */
    /* queries: [n_row, n_head, 576] bf16 */
    const uint16_t *q;
    int64_t q_stride_row,
        q_stride_head;    /* elements                                                 */
    const float *q_scale; /* [n_row, n_head] or NULL                                      */
    float scale_log2;     /* softmax scale x log2(e)                                       */
    int32_t q_wide;       /* 16-byte loads are aligned                                     */
    /* division of work */
    int32_t n_head, n_group, group_heads, n_part;
    int32_t item_cost; /* in tiles                                                      */
    int32_t whole;     /* items are not cut; results go to part_out by item             */
    /* results */
    void *out; /* [n_row, n_head, 512] f32 or bf16                              */
    int64_t out_stride_row,
        out_stride_head;        /* elements                                             */
    int32_t out_bf16, out_wide; /* wide: fours are aligned                                       */
    float *lse;                 /* [n_row, n_head], natural log                                  */
    float *part_out;            /* [2 n_part or n_item, n_head, 512]                             */
    float *part_lse;            /* the same without 512; base 2, natural when whole              */
    int2 *cut;                  /* [n_part] {row, last part} of the row that goes on, or {-1, 0} */
    unsigned long long *n_nan;  /* may be NULL                                                   */
};

/* A piece of an item: tiles [b0, b1) of its nb. */
struct sparse_unit {
    int32_t item, n_key, begin, b0, b1, nb;
};

/* Where a part is in its work. */
struct sparse_walk {
    int32_t item, end; /* items up to `end`                 */
    int32_t at;        /* position of the item's first cost */
    int32_t lo, hi;    /* positions of the part             */
};

__device__ inline int32_t sparse_cost(const sparse_params &p, int32_t n_key)
{
    return n_key == 0 ? 1 : p.item_cost + (n_key + SPARSE_TILE - 1) / SPARSE_TILE;
}

/* The next piece of this part, an empty item included (b1 = 0); 0 at the end. */
__device__ inline int sparse_next(sparse_walk &w, const sparse_params &p, sparse_unit &u)
{
    while (w.item < w.end && w.at < w.hi) {
        const int32_t at = w.at, first = at + p.item_cost;
        u.item = w.item;
        u.n_key = p.count[w.item];
        u.begin = p.begin[w.item];
        u.nb = (u.n_key + SPARSE_TILE - 1) / SPARSE_TILE;
        w.item++;
        w.at = at + sparse_cost(p, u.n_key);
        if (u.nb == 0 || p.whole) {
            if (at >= w.lo) {
                u.b0 = 0;
                u.b1 = u.nb;
                return 1;
            }
            continue;
        }
        u.b0 = w.lo > first ? w.lo - first : 0;
        u.b1 = w.hi - first < u.nb ? w.hi - first : u.nb;
        if (u.b0 < u.b1)
            return 1;
    }
    return 0;
}

/* The part that owns a position, total cost w. */
__device__ inline int32_t sparse_part_of(int32_t at, int32_t w, int32_t n_part)
{
    return (int32_t)(((int64_t)(at + 1) * n_part - 1) / w);
}

#endif
