/* attn_sparse_out.cuh - where the results of a piece of sparse attention go (attn_sparse.cuh). */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_OUT_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_OUT_CUH

#include "kern/cuda/attn_out.cuh"
#include "kern/cuda/attn_sparse.cuh"

/* Where a piece's results go. */
struct target {
    void *out;
    float *lse; /* of the group's first head */
    int64_t stride_head;
    bool bf16, wide, partial;
};

static __device__ target target_of(const sparse_params &p, const sparse_unit &u, int part,
                                   int head0)
{
    target t;
    const bool cut = !p.whole && u.nb > 0 && (u.b0 > 0 || u.b1 < u.nb);
    if (p.whole || cut) {
        const int64_t slot = p.whole ? u.item : 2 * (int64_t)part + (u.b0 == 0);
        t.out = p.part_out + (slot * p.n_head + head0) * SPARSE_VDIM;
        t.lse = p.part_lse + slot * p.n_head + head0;
        t.stride_head = SPARSE_VDIM;
        t.bf16 = false;
        t.wide = true;
    } else {
        const int64_t at = u.item * p.out_stride_row + head0 * p.out_stride_head;
        t.out = (char *)p.out + at * (p.out_bf16 ? 2 : 4);
        t.lse = p.lse + (int64_t)u.item * p.n_head + head0;
        t.stride_head = p.out_stride_head;
        t.bf16 = p.out_bf16;
        t.wide = p.out_wide;
    }
    t.partial = cut;
    return t;
}

/* By 256 threads, an item without keys: (0, -inf); a partial needs the lse alone. */
static __device__ void empty_write(const sparse_params &p, const target &t, int n_head)
{
    if (threadIdx.x < n_head)
        t.lse[threadIdx.x] = -__int_as_float(0x7f800000);
    if (p.whole)
        return;
    for (int h = 0; h < n_head; h++)
        out_pair(t.out, t.bf16, t.wide, h * t.stride_head + 2 * threadIdx.x, 0.0f, 0.0f);
}

#endif
