/* kern/cuda/localise.cu - selected positions to this rank's slots.
 *
 * A block has one row. The ids that the rank owns go to shared memory in the order they came in; unless
 * they ascend already, as those of a selection do, they are sorted there. Then each finds its slot, and its
 * place behind the lanes before its own and the earlier ids of its lane, counted chunk by chunk in order.
 */
#include "kern/cuda/cuda.h"
#include "kern/cuda/select.cuh"
#include "shard/shard.h"

namespace
{

enum { MAX_K = 32768 };

typedef struct lane_state {
    sel_shared sel;
    uint32_t in_lane[SEL_WARP][KVS_LANES]; /* of a chunk, by warp   */
    uint32_t next[KVS_LANES];              /* where the lane's next slot goes */
    uint32_t count[KVS_LANES];
    uint32_t n_bad;
    int32_t unsorted;
} lane_state;

/* An id of the row as this rank sees it. */
typedef struct place {
    int32_t slot; /* -1: bad */
    int32_t lane;
} place;

static __device__ place find_place(const localise_args &a, const int32_t *table, int32_t n_lane,
                                   const int32_t *id, int32_t i)
{
    shard_geom g;
    g.n = a.dcp;
    g.i = a.interleave;
    g.rank = a.rank;
    kvs_pos pos;
    pos.v = id[i];
    const kvs_local l = shard_local(g, pos);
    place p;
    p.lane = shard_lane_of_local(n_lane, a.interleave, l);
    p.slot = -1;
    if (table != NULL && (i == 0 || id[i - 1] != id[i])) {
        const int64_t slot = shard_slot_checked(table, a.table_width, a.n_slot, l).v;
        p.slot = slot < 0 || slot > INT32_MAX ? -1 : (int32_t)slot;
    }
    return p;
}

/* The ids of the row that this rank owns, into id, in order of coming; returns how many. */
static __device__ int32_t collect(lane_state *s, const localise_args &a, int64_t row, int32_t *id)
{
    shard_geom g;
    g.n = a.dcp;
    g.i = a.interleave;
    g.rank = a.rank;
    const int32_t n_in = a.count != NULL ? min(a.count[row], a.k) : a.k;
    const int32_t bound = a.bound[row];
    uint32_t n_out = 0;
    uint32_t n_bad = 0;
    for (int32_t at = 0; at < n_in; at += SEL_TEAM) {
        const int32_t i = at + (int32_t)threadIdx.x;
        int32_t x = -1;
        if (i < n_in) {
            x = a.id[row * a.id_stride + i];
            if (x != -1 && a.cut_score != NULL) {
                const float score = a.score[row * a.id_stride + i];
                const float cut = a.cut_score[row];
                x = score > cut || (score == cut && x <= a.cut_id[row]) ? x : -1;
            }
            if (x != -1 && (x < 0 || x >= bound)) {
                n_bad++;
                x = -1;
            }
        }
        kvs_pos pos;
        pos.v = x;
        const bool mine = x >= 0 && shard_owner(g, pos) == g.rank;
        uint32_t total;
        const uint32_t before = sel_scan(&s->sel, mine, &total);
        if (mine) {
            id[n_out + before] = x;
        }
        n_out += total;
    }
    if (n_bad > 0) {
        atomicAdd(&s->n_bad, n_bad);
    }
    sel_sync();
    return (int32_t)n_out;
}

/* Sorts id[0, n); it has room for the next power of two. */
static __device__ void sort_ids(lane_state *s, int32_t *id, int32_t n)
{
    for (int32_t i = threadIdx.x; i + 1 < n; i += SEL_TEAM) {
        if (id[i] > id[i + 1]) {
            s->unsorted = 1;
        }
    }
    sel_sync();
    if (s->unsorted == 0) {
        return;
    }
    int32_t n2 = 1;
    while (n2 < n) {
        n2 *= 2;
    }
    for (int32_t i = n + (int32_t)threadIdx.x; i < n2; i += SEL_TEAM) {
        id[i] = INT32_MAX;
    }
    for (int32_t size = 2; size <= n2; size *= 2) {
        for (int32_t step = size / 2; step > 0; step /= 2) {
            sel_sync();
            for (int32_t j = threadIdx.x; j < n2 / 2; j += SEL_TEAM) {
                const int32_t lo = j / step * 2 * step + j % step;
                const int32_t hi = lo + step;
                const int32_t x = id[lo];
                const int32_t y = id[hi];
                if ((x > y) == ((lo & size) == 0)) {
                    id[lo] = y;
                    id[hi] = x;
                }
            }
        }
    }
    sel_sync();
}

__global__ void __launch_bounds__(SEL_TEAM) localise_kernel(const __grid_constant__ localise_args a)
{
    extern __shared__ int32_t id[];
    __shared__ lane_state s;
    const int32_t tid = threadIdx.x;
    shard_geom g;
    g.n = a.dcp;
    g.i = a.interleave;
    g.rank = a.rank;
    const int32_t n_lane = shard_n_lane(g);
    for (int64_t row = blockIdx.x; row < a.n_row; row += gridDim.x) {
        sel_sync();
        if (tid < KVS_LANES) {
            s.count[tid] = 0;
        }
        if (tid == 0) {
            s.n_bad = 0;
            s.unsorted = 0;
        }
        sel_sync();
        const int32_t req = a.row_req[row];
        const int32_t *table = req >= 0 && req < a.n_req ? a.table + req * a.table_stride : NULL;
        int32_t *slots = a.slots + row * a.slots_stride;
        const int32_t n = collect(&s, a, row, id);
        sort_ids(&s, id, n);
        uint32_t n_bad = 0;
        for (int32_t i = tid; i < n; i += SEL_TEAM) {
            const place p = find_place(a, table, n_lane, id, i);
            if (p.slot >= 0) {
                atomicAdd(&s.count[p.lane], 1u);
            } else {
                n_bad++;
            }
        }
        if (n_bad > 0) {
            atomicAdd(&s.n_bad, n_bad);
        }
        sel_sync();
        uint32_t n_out = 0;
        for (int32_t lane = 0; lane < n_lane; lane++) {
            if (tid == lane) {
                s.next[lane] = n_out;
                a.lane_count[row * n_lane + lane] = (int32_t)s.count[lane];
            }
            n_out += s.count[lane];
        }
        for (int32_t at = 0; at < n; at += SEL_TEAM) {
            const int32_t i = at + tid;
            place p = {-1, 0};
            if (i < n) {
                p = find_place(a, table, n_lane, id, i);
            }
            const int32_t key = p.slot >= 0 ? p.lane : KVS_LANES;
            const uint32_t same = __match_any_sync(~0u, key);
            const uint32_t before = (uint32_t)__popc(same & ((1u << (tid % 32)) - 1));
            if (tid % 32 < KVS_LANES) {
                s.in_lane[tid / 32][tid % 32] = 0;
            }
            __syncwarp();
            if (p.slot >= 0 && before == 0) {
                s.in_lane[tid / 32][p.lane] = (uint32_t)__popc(same);
            }
            sel_sync();
            if (p.slot >= 0) {
                uint32_t to = s.next[p.lane] + before;
                for (int32_t w = 0; w < tid / 32; w++) {
                    to += s.in_lane[w][p.lane];
                }
                slots[to] = p.slot;
            }
            sel_sync();
            if (tid < n_lane) {
                for (int32_t w = 0; w < SEL_WARP; w++) {
                    s.next[tid] += s.in_lane[w][tid];
                }
            }
            sel_sync();
        }
        for (int32_t i = (int32_t)n_out + tid; i < a.k; i += SEL_TEAM) {
            slots[i] = -1;
        }
        if (tid == 0 && s.n_bad > 0 && a.n_bad_id != NULL) {
            atomicAdd((unsigned long long *)a.n_bad_id, (unsigned long long)s.n_bad);
        }
    }
}

} // namespace

const char *localise_refuses_sm90(const void *args)
{
    return ((const localise_args *)args)->k > MAX_K ? "localise: more than 32768 ids in a row"
                                                    : NULL;
}

void localise_sm90(const localise_args *a, dev_queue *q)
{
    if (cuda_refused(q, localise_refuses_sm90(a)) || a->n_row <= 0) {
        return;
    }
    int64_t room = 64;
    while (room < a->k) {
        room *= 2;
    }
    const size_t smem = (size_t)room * sizeof(int32_t);
    static uint64_t done;
    cuda_shared_max(localise_kernel, MAX_K * sizeof(int32_t), &done);
    localise_kernel<<<cuda_blocks(q, a->n_row, 1, 64), SEL_TEAM, smem, cuda_stream(q)>>>(*a);
    cuda_launched(q, "localise_sm90");
}

size_t localise_scratch_sm90(const localise_args *a, const dev_queue *q)
{
    (void)a;
    (void)q;
    return 0;
}
