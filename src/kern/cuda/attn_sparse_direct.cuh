/* attn_sparse_direct.cuh - sparse attention in one launch, for few rows (attn_sparse_direct_sm90.cu): the warps that find
 * a block's keys and bring them.
 *
 * A block has one group of heads of one row and a share of the row's list, cut by position, so that no count is needed before
 * it begins: it packs the ids of its share itself. The blocks of a row and group are one cluster, or several clusters
 * whose results a second launch joins.
 */
#ifndef KVS_KERN_CUDA_ATTN_SPARSE_DIRECT_CUH
#define KVS_KERN_CUDA_ATTN_SPARSE_DIRECT_CUH

#include "kern/attn.h"
#include "kern/cuda/attn_sparse_keys.cuh"
#include "kern/cuda/attn_sparse_main.cuh"
#include "kern/cuda/ptx_tile.cuh"

enum { BAR_IDS = 6, BAR_READY = 7 };

/* Shared memory behind that of the main kernel: ids int32 [SPARSE_SHARE], counts of four warps, how many ids, the
 * exchange that results go with. */
template <int N> struct direct_layout {
    static constexpr int ids_at = (layout<N, SPARSE_FP8>::bytes + 15) / 16 * 16;
    static constexpr int scan_at = ids_at + SPARSE_SHARE * 4, n_at = scan_at + 16, epoch_at = n_at + 4;
    static constexpr int bytes = n_at + 16;
    static_assert(bytes <= 232448, "shared memory");
};

/* ---- ids ----------------------------------------------------------------------------------- */

enum { SHARE_IDS = 4, SHARE_ROUNDS = SPARSE_SHARE / (COPIERS * SHARE_IDS) };

/* Ids [e, e + 4) of a list, -1 from `end` on. wide: it begins at a multiple of 16 bytes. */
static __device__ __forceinline__ int4 ids_four(const int32_t *slots, int e, int end, bool wide)
{
    if (wide && e + 4 <= end)
        return __ldg((const int4 *)(slots + e));
    return make_int4(e < end ? slots[e] : -1, e + 1 < end ? slots[e + 1] : -1,
                     e + 2 < end ? slots[e + 2] : -1, e + 3 < end ? slots[e + 3] : -1);
}

/* How many ids of all warps lie before this warp's in each round, from the counts of the warps, a byte a round. */
struct share_scan {
    int before[SHARE_ROUNDS], all;

    __device__ __forceinline__ share_scan(uint32_t at, int warp)
    {
        all = 0;
#pragma unroll
        for (int r = 0; r < SHARE_ROUNDS; r++)
#pragma unroll
            for (int w = 0; w < COPIERS / 32; w++) {
                if (w == warp)
                    before[r] = all;
                all += lds32(at + 4 * w) >> 8 * r & 255;
            }
    }
};

/* Warps 8 to 11: the ids of the share that name a slot, in order, to shared memory; returns how many. The share is read
 * at once, four ids of a thread in each of four rounds. count: whether this block adds to the counters. */
template <int N>
static __device__ int ids_pack(const direct_params &p, int64_t row, int which, bool count)
{
    using D = direct_layout<N>;
    const int thread = threadIdx.x - CONSUMERS, lane = thread % 32, warp = thread / 32;
    const int32_t *slots = p.slots + row * p.slots_stride;
    int64_t total = 0;
    for (int l = 0; l < p.n_lane; l++)
        total = min(total + max(p.lane_count[row * p.n_lane + l], 0), p.slots_stride);
    const int n_share = p.n_split * p.n_join;
    const int share = (((int)total + n_share - 1) / n_share + 3) / 4 * 4;
    const int begin = min(which * share, (int)total), end = min(begin + share, (int)total);
    const bool wide = (uintptr_t)slots % 16 == 0;
    int4 id[SHARE_ROUNDS];
#pragma unroll
    for (int r = 0; r < SHARE_ROUNDS; r++)
        id[r] = ids_four(slots, begin + SHARE_IDS * (r * COPIERS + thread), end, wide);
    uint32_t ok = 0, own = 0; /* a bit an id; counts, a byte a round */
    int n_bad = 0;
#pragma unroll
    for (int r = 0; r < SHARE_ROUNDS; r++) {
        const int of[SHARE_IDS] = {id[r].x, id[r].y, id[r].z, id[r].w};
#pragma unroll
        for (int i = 0; i < SHARE_IDS; i++) {
            const bool in = of[i] >= 0 && of[i] < p.n_slot;
            ok |= (uint32_t)in << (SHARE_IDS * r + i);
            own += (uint32_t)in << 8 * r;
            n_bad += !in && of[i] != -1;
        }
    }
    uint32_t sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t v = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? v : 0;
    }
    if (lane == 31)
        sts32(SMEM + D::scan_at + 4 * warp, sum);
    named_barrier<BAR_IDS, COPIERS>();
    const share_scan scan(SMEM + D::scan_at, warp);
    sum -= own;
#pragma unroll
    for (int r = 0; r < SHARE_ROUNDS; r++) {
        const int of[SHARE_IDS] = {id[r].x, id[r].y, id[r].z, id[r].w};
        uint32_t at = SMEM + D::ids_at + (scan.before[r] + (sum >> 8 * r & 255)) * 4;
#pragma unroll
        for (int i = 0; i < SHARE_IDS; i++)
            if (ok >> (SHARE_IDS * r + i) & 1) {
                sts32(at, (uint32_t)of[i]);
                at += 4;
            }
    }
    if (thread == 0)
        sts32(SMEM + D::n_at, (uint32_t)scan.all);
    named_barrier<BAR_IDS, COPIERS>();
    if (count && p.stats != NULL) {
        n_bad = __reduce_add_sync(~0u, n_bad);
        if (lane == 0 && n_bad > 0)
            atomicAdd((unsigned long long *)&p.stats->n_bad_id, (unsigned long long)n_bad);
        if (thread == 0 && scan.all > 0) {
            atomicAdd((unsigned long long *)&p.stats->n_key, (unsigned long long)scan.all);
            atomicAdd((unsigned long long *)&p.stats->n_fetched, (unsigned long long)scan.all);
        }
    }
    return scan.all;
}

/* ---- keys ---------------------------------------------------------------------------------- */

/* Warps 8 to 11: copies the tiles of the share, whose n ids are in shared memory, into the ring. */
template <int N> static __device__ void share_bring(const sparse_params &p, int n)
{
    using D = direct_layout<N>;
    const copier<N, SPARSE_FP8> me;
    for (int b = 0; b * SPARSE_TILE < n; b++) {
        const int k = b * SPARSE_TILE;
        int id[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            id[i] = k + me.own + 4 * i < n
                        ? (int)lds32(SMEM + D::ids_at + (k + me.own + 4 * i) * 4)
                        : 0;
        const int id_left =
            k + me.left < n ? (int)lds32(SMEM + D::ids_at + (k + me.left) * 4) : 0;
        const uint8_t *from[4], *from_left;
        me.addresses(p, id, id_left, from, from_left);
        me.bring(b, from, from_left, n - k);
    }
}

#endif
