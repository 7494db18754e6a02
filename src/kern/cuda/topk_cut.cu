/* topk_cut.cu - the cut of the k best of a few lists, without the set itself: what a rank needs of the candidates of
 * all ranks to know which of its own are in.
 *
 * A block has one row and keeps all of its candidates in registers, E a thread. The score of the worst member is
 * searched bit by bit, from the highest bit in which the row's scores differ: each step counts who is at or above.
 * It ends as soon as exactly as many are as shall be in. Of those with the worst score the ids are searched likewise,
 * where not all of them are in. A step is one barrier; nothing is sorted, and no step has to do with how scores are
 * distributed. */
#include "kern/cuda/cuda.h"
#include "kern/cuda/launch.cuh"
#include "kern/cuda/ptx.cuh"
#include "kern/cuda/select.cuh"
#include "kern/cuda/topk.h"

namespace
{

enum { TEAM = 1024, N_WARP = TEAM / 32 };

typedef struct team_shared {
    uint32_t of_warp[2][3][N_WARP]; /* by turns, so that a step has one barrier */
    uint32_t turn;
} team_shared;

/* What all threads bring, put together: a sum, a least and a largest. */
typedef struct team_sum {
    uint32_t sum, least, largest;
} team_sum;

static __device__ __forceinline__ team_sum together(team_shared *s, uint32_t turn, uint32_t add,
                                                    uint32_t low, uint32_t high)
{
    uint32_t(*w)[N_WARP] = s->of_warp[turn & 1u];
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t a = __reduce_add_sync(~0u, add);
    const uint32_t l = __reduce_min_sync(~0u, low);
    const uint32_t h = __reduce_max_sync(~0u, high);
    if (lane == 0) {
        w[0][warp] = a;
        w[1][warp] = l;
        w[2][warp] = h;
    }
    __syncthreads();
    team_sum t;
    t.sum = __reduce_add_sync(~0u, w[0][lane]);
    t.least = __reduce_min_sync(~0u, w[1][lane]);
    t.largest = __reduce_max_sync(~0u, w[2][lane]);
    return t;
}

static __device__ __forceinline__ uint32_t count_all(team_shared *s, uint32_t turn, uint32_t add)
{
    uint32_t *w = s->of_warp[turn & 1u][0];
    const uint32_t a = __reduce_add_sync(~0u, add);
    if (threadIdx.x % 32 == 0) {
        w[threadIdx.x / 32] = a;
    }
    __syncthreads();
    return __reduce_add_sync(~0u, w[threadIdx.x % 32]);
}

/* The need-th largest of values, of which at least as many take part; those of `low` to `high` do. All threads get it.
 * Values that do not take part are below low. */
template <int E>
static __device__ __forceinline__ uint32_t nth_largest(team_shared *s, uint32_t *turn,
                                                       const uint32_t (&v)[E], uint32_t low,
                                                       uint32_t high, uint32_t need)
{
    const int top = 32 - __clz((int)(low ^ high)); /* bits in which they may differ */
    uint32_t at = top >= 32 ? 0u : high >> top << top;
    for (int bit = top - 1; bit >= 0; bit--) {
        const uint32_t more = at | 1u << bit;
        uint32_t n = 0;
#pragma unroll
        for (int e = 0; e < E; e++) {
            n += v[e] >= more;
        }
        n = count_all(s, (*turn)++, n);
        at = n >= need ? more : at;
        if (n == need) { /* the least of these */
            uint32_t least = UINT32_MAX;
#pragma unroll
            for (int e = 0; e < E; e++) {
                least = v[e] >= more ? min(least, v[e]) : least;
            }
            return together(s, (*turn)++, 0, least, 0).least;
        }
    }
    return at;
}

/* Candidate f of the row, lists one behind the other; false where it is none. */
static __device__ __forceinline__ bool cand_at(const topk_lists &a, int64_t row, uint32_t f,
                                               float *x, uint32_t *inv)
{
    const uint32_t list = f / (uint32_t)a.stride;
    const int64_t i = f - list * (uint32_t)a.stride;
    if (list >= (uint32_t)a.n_list || i >= a.count[list][row]) {
        return false;
    }
    *x = a.score[list][row * a.stride + i];
    const int32_t id = a.id[list][row * a.stride + i];
    *inv = sel_inv(id);
    return *x > -INFINITY && id >= 0;
}

template <int E>
__global__ void __launch_bounds__(TEAM) cut_kernel(const __grid_constant__ topk_lists a)
{
    __shared__ team_shared s;
    uint32_t turn = 0;
    grid_wait();
    grid_release();
    for (int64_t row = blockIdx.x; row < a.n_row; row += gridDim.x) {
        uint32_t key[E]; /* 0: none */
        uint32_t inv[E];
        uint32_t n = 0;
        uint32_t low = UINT32_MAX;
        uint32_t high = 0;
#pragma unroll
        for (int e = 0; e < E; e++) {
            float x = 0.0f;
            inv[e] = 0;
            key[e] = cand_at(a, row, threadIdx.x + TEAM * e, &x, &inv[e])
                         ? sel_key(__float_as_uint(x))
                         : 0u;
            n += key[e] != 0;
            low = key[e] != 0 ? min(low, key[e]) : low;
            high = max(high, key[e]);
        }
        const team_sum all = together(&s, turn++, n, low, high);
        const uint32_t n_in = min((uint32_t)a.k, all.sum);
        if (threadIdx.x == 0) {
            a.n_total[row] = (int32_t)n_in;
            if (n_in == 0) {
                a.cut_score[row] = INFINITY;
                a.cut_id[row] = -1;
            }
        }
        if (n_in == 0) {
            continue;
        }
        const uint32_t worst = nth_largest<E>(&s, &turn, key, all.least, all.largest, n_in);
        uint32_t better = 0;
        low = UINT32_MAX;
        high = 0;
#pragma unroll
        for (int e = 0; e < E; e++) {
            better += key[e] > worst;
            inv[e] = key[e] == worst ? inv[e] + 1 : 0u; /* 0: not of them */
            low = inv[e] != 0 ? min(low, inv[e]) : low;
            high = max(high, inv[e]);
        }
        const team_sum last = together(&s, turn++, better, low, high);
        const uint32_t cut =
            nth_largest<E>(&s, &turn, inv, last.least, last.largest, n_in - last.sum);
#pragma unroll
        for (int e = 0; e < E; e++) {
            if (inv[e] == cut) {
                uint32_t same;
                float x;
                (void)cand_at(a, row, threadIdx.x + TEAM * e, &x, &same);
                a.cut_score[row] = x; /* its own zero */
                a.cut_id[row] = (int32_t)(0x7FFFFFFFu - (cut - 1));
            }
        }
    }
}

template <int E> static void launch_cut(const topk_lists *a, dev_queue *q)
{
    (void)launch_kernel(cut_kernel<E>, dim3(cuda_blocks(q, a->n_row, 1, 64)), TEAM, 0, true, *a,
                        cuda_stream(q));
    cuda_launched(q, "cut_kernel");
}

} // namespace

bool topk_cut_fits(const topk_lists *a)
{
    return a->stride > 0 && a->n_list * a->stride <= 16 * TEAM;
}

void topk_cut_launch(const topk_lists *a, dev_queue *q)
{
    const int64_t n = a->n_list * a->stride;
    n <= 4 * TEAM   ? launch_cut<4>(a, q)
    : n <= 8 * TEAM ? launch_cut<8>(a, q)
                    : launch_cut<16>(a, q);
}
