/* attn_online.cuh - online softmax of rows that lie as the results of a product with M = 64: a thread has two rows, 8
 * apart, with three others, 4 j + 0, 1 and 2, 3 of its registers being theirs. All in base 2.
 *
 * The reference of a row's exponentials moves only when its maximum has grown by more than GROW: weights stay
 * below 2^GROW, and what is summed under it is seldom rescaled.
 */
#ifndef KVS_KERN_CUDA_ATTN_ONLINE_CUH
#define KVS_KERN_CUDA_ATTN_ONLINE_CUH

#include "kern/cuda/ptx.cuh"

#define GROW    8.0f
#define NEG_INF (-__int_as_float(0x7f800000))

/* What a thread knows of its two rows. */
struct two {
    float x, y;
};

template <int N> static __device__ __forceinline__ two rows_max(const float (&s)[N])
{
    float mx = NEG_INF, my = NEG_INF;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        mx = fmaxf(mx, fmaxf(s[4 * j], s[4 * j + 1]));
        my = fmaxf(my, fmaxf(s[4 * j + 2], s[4 * j + 3]));
    }
    mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 1));
    my = fmaxf(my, __shfl_xor_sync(~0u, my, 1));
    mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 2));
    my = fmaxf(my, __shfl_xor_sync(~0u, my, 2));
    return {mx, my};
}

/* What sums under reference `was` are to be multiplied by under `is`. */
static __device__ __forceinline__ float ref_change(float was, float is)
{
    return is == was ? 1.0f : exp2_approx(was - is);
}

/* The references after maxima `most`; what the sums so far are to be multiplied by. */
static __device__ __forceinline__ two refs_move(two &ref, two most)
{
    const two was = ref;
    ref.x = most.x > was.x + GROW ? most.x : was.x;
    ref.y = most.y > was.y + GROW ? most.y : was.y;
    return {ref_change(was.x, ref.x), ref_change(was.y, ref.y)};
}

/* What scores are held against: of a row without any, whose weights are to be 0, not NaN, 0. */
static __device__ __forceinline__ float ref_finite(float ref)
{
    return ref == NEG_INF ? 0.0f : ref;
}

#endif
