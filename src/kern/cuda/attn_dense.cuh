/* kern/cuda/attn_dense.cuh - what the kernels of dense attention on sm_90a share: the division of work.
 *
 * An op is two launches, three with counters: the main kernel (attn_dense_sm90.cu) and the merge of rows
 * that more than one thread block worked on (attn_dense.cu). Lengths are known on the device alone: every
 * block finds its share of the work from row_req and kv_len.
 *
 * An item is up to `span` adjacent rows of one request: it begins where the request changes and at every
 * multiple of `span`. It costs item_cost for its queries and results and one per tile of 64 keys, a page,
 * of its longest row (1 when it has none). Costs are laid end to end, and part p of P takes positions
 * [p W / P, (p + 1) W / P) of the total W, P being at most W. An item cut by a part's end leaves partials, at
 * most two per part: slot 0 of a part holds what began in an earlier one, slot 1 what goes on in the next.
 *
 * The rows of an item in groups of `rows`, and heads in groups of `heads`, with rows x heads at most 64, are
 * the M of the products: one group of rows and heads to a thread block. The `n_side` blocks of a part, one
 * per group, lie side by side and read the same pages at about the same time.
 */
#ifndef KVS_KERN_CUDA_ATTN_DENSE_CUH
#define KVS_KERN_CUDA_ATTN_DENSE_CUH

#include <cuda.h>
#include <stdint.h>

enum {
    DENSE_TILE = 64,    /* keys of a tile, a page                 */
    DENSE_M = 64,       /* rows x heads of a thread block, at most */
    DENSE_MAX_SPAN = 8, /* rows of an item, at most                */
    DENSE_VDIM = 512,
    DENSE_DIM = 576
};

struct dense_params {
    CUtensorMap map;      /* of the pool: [page][64][row's values or codes]                  */
    CUtensorMap rope_map; /* of the ropes of fp8_ds_mla rows                                  */
    /* keys */
    const uint8_t *kv;
    int64_t page_stride,
        row_stride; /* bytes                                                        */
    int32_t n_page;
    float k_scale;
    const int32_t *table;
    int64_t table_stride; /* elements                                                     */
    int32_t table_width, n_req;
    const int32_t *row_req,
        *kv_len; /* [n_row]                                                      */
    /* queries: [n_row, n_head, 576] bf16 */
    const uint16_t *q;
    int64_t q_stride_row,
        q_stride_head;    /* elements                                                 */
    const float *q_scale; /* [n_row, n_head] or NULL                                  */
    float scale_log2;     /* softmax scale x log2(e)                                  */
    /* division of work */
    int32_t n_row, n_head;
    int32_t heads, rows, span; /* of a group of heads, of a group of rows, of an item           */
    int32_t n_head_group, n_side, n_part, item_cost;
    /* results */
    void *out; /* [n_row, n_head, 512] f32 or bf16                              */
    int64_t out_stride_row,
        out_stride_head;        /* elements                                             */
    int32_t out_bf16, out_wide; /* wide: pairs are aligned                              */
    float *lse;                 /* [n_row, n_head], natural log                         */
    float *part_out;            /* [2 n_part, span, n_head, 512]                        */
    float *part_lse;            /* the same without 512; base 2                         */
    int4 *cut; /* [n_part] {row, rows, last part, 0} of the item that goes on, or {-1}      */
    unsigned long long *n_nan; /* may be NULL                                                  */
};

/* Keys row r attends of those that the table has room for. */
__device__ inline int32_t dense_len(const dense_params &p, int32_t r)
{
    const int32_t req = p.row_req[r], len = p.kv_len[r];
    const int64_t most = (int64_t)p.table_width * DENSE_TILE;
    return req < 0 || req >= p.n_req || len < 0 ? 0 : len < most ? len : (int32_t)most;
}

__device__ inline bool dense_begins(const dense_params &p, int32_t r)
{
    return r % p.span == 0 || p.row_req[r] != p.row_req[r - 1];
}

/* Rows [row, row + n) of one request, the longest of len keys. */
struct dense_item {
    int32_t row, n, len;
};

__device__ inline dense_item dense_item_at(const dense_params &p, int32_t row)
{
    dense_item i;
    i.row = row;
    i.n = 1;
    i.len = dense_len(p, row);
    while (row + i.n < p.n_row && !dense_begins(p, row + i.n)) {
        const int32_t len = dense_len(p, row + i.n);
        i.len = len > i.len ? len : i.len;
        i.n++;
    }
    return i;
}

__device__ inline int32_t dense_tiles(int32_t n_key)
{
    return (int32_t)(((int64_t)n_key + DENSE_TILE - 1) / DENSE_TILE);
}

__device__ inline int64_t dense_cost(const dense_params &p, const dense_item &i)
{
    return i.len == 0 ? 1 : p.item_cost + dense_tiles(i.len);
}

/* Where a part is in its work. */
struct dense_walk {
    int32_t row;    /* first of the next item              */
    int64_t at;     /* position of that item's first cost */
    int64_t lo, hi; /* positions of the part              */
};

/* A piece of an item: tiles [b0, b1) of its nb, and the part whose work it ends in. */
struct dense_unit {
    dense_item item;
    int32_t b0, b1, nb;
};

/* The next piece of this part, an empty item included (b1 = 0); 0 at the end. */
__device__ inline int dense_next(dense_walk &w, const dense_params &p, dense_unit &u)
{
    while (w.row < p.n_row && w.at < w.hi) {
        const int64_t at = w.at, first = at + p.item_cost;
        u.item = dense_item_at(p, w.row);
        u.nb = dense_tiles(u.item.len);
        w.row += u.item.n;
        w.at = at + dense_cost(p, u.item);
        if (u.nb == 0) {
            u.b0 = u.b1 = 0;
            if (at >= w.lo)
                return 1;
            continue;
        }
        u.b0 = (int32_t)(w.lo > first ? w.lo - first : 0);
        u.b1 = (int32_t)(w.hi - first < u.nb ? w.hi - first : u.nb);
        if (u.b0 < u.b1)
            return 1;
    }
    return 0;
}

/* The part that owns a position, total cost w. */
__device__ inline int32_t dense_part_of(int64_t at, int64_t w, int32_t n_part)
{
    return (int32_t)(((at + 1) * n_part - 1) / w);
}

__device__ inline float dense_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* kind: the rows of the pool. */
enum { DENSE_BF16, DENSE_FP8, DENSE_DS };
cudaError_t attn_dense_main_launch(const dense_params &p, int kind, cudaStream_t stream);

#endif
