/* attn_sparse_walk.cuh - how a thread block of sparse attention's main kernels finds its part of the work
 * (attn_sparse.cuh).
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_WALK_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_WALK_CUH

#include "kern/cuda/attn_sparse.cuh"

/* Every thread of the block: the walk of part `part`, and the total cost. scan: of 2 THREADS / 32 + 2. */
template <int THREADS>
static __device__ sparse_walk walk_begin(const sparse_params &p, int part, int32_t *scan,
                                         int32_t *total)
{
    constexpr int N_WARP = THREADS / 32;
    const int per = (p.n_item + THREADS - 1) / THREADS;
    const int begin = min((int)threadIdx.x * per, p.n_item), end = min(begin + per, p.n_item);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t own = 0, most = 0;
    for (int i = begin; i < end; i++) {
        const int32_t c = sparse_cost(p, p.count[i]);
        own += c;
        most = c > most ? c : most;
    }
    int32_t sum = own;
    for (int d = 1; d < 32; d *= 2) {
        const int32_t v = __shfl_up_sync(~0u, sum, d), m = __shfl_xor_sync(~0u, most, d);
        most = m > most ? m : most;
        if (lane >= d)
            sum += v;
    }
    if (lane == 31) {
        scan[warp] = sum;
        scan[N_WARP + warp] = most;
    }
    __syncthreads();
    int32_t before = 0, all = 0;
    for (int i = 0; i < N_WARP; i++) {
        before += i < warp ? scan[i] : 0;
        all += scan[i];
        most = scan[N_WARP + i] > most ? scan[N_WARP + i] : most;
    }
    *total = all;
    sparse_walk w;
    const int each = (p.n_item + p.n_part - 1) / p.n_part;
    if (!p.whole && (int64_t)each * most <= all / p.n_part + 1 + p.item_cost) {
        w.item = min(part * each, p.n_item);
        w.end = min(w.item + each, p.n_item);
        w.at = w.lo = 0;
        w.hi = INT32_MAX;
        return w;
    }
    sum += before;
    const int32_t n_part = all < p.n_part ? all : p.n_part;
    const int32_t lo = part < n_part ? (int32_t)((int64_t)all * part / n_part) : all,
                  hi = part < n_part ? (int32_t)((int64_t)all * (part + 1) / n_part) : all;
    int32_t at = sum - own, *found = scan + 2 * N_WARP;
    if (lo >= at && lo < sum) {
        int i = begin;
        for (int32_t c; at + (c = sparse_cost(p, p.count[i])) <= lo; at += c)
            i++;
        found[0] = i;
        found[1] = at;
    }
    if (threadIdx.x == 0 && lo == all)
        found[0] = p.n_item;
    __syncthreads();
    w.item = found[0];
    w.end = p.n_item;
    w.at = found[1];
    w.lo = lo;
    w.hi = hi;
    return w;
}

/* A slot's row. */
static __device__ __forceinline__ const uint8_t *key_address(const sparse_params &p, int id)
{
    return p.kv + (int64_t)(id / SPARSE_TILE) * p.page_stride +
           (int64_t)(id % SPARSE_TILE) * p.row_stride;
}

#endif
