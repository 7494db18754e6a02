/* kern/cuda/topk.cu - the k best of a running list and a row of scores, and the cut of several lists.
 *
 * A block has one row. A radix select over 11 + 11 + 10 bits of the score (select.cuh) reads the row three
 * times and finds the score of the k-th best, and how many equal to it are still in; the way out is one
 * more pass in ascending order of ids that counts as it goes, so equal scores are taken from the lowest id.
 * The merge takes the last ties by a radix select over ids; its lists are joined by rank: a member's place
 * is its place in its own list and, found by halving, that in every other list. */
#include "kern/cuda/cuda.h"
#include "kern/cuda/index_select.h"
#include "kern/cuda/select.cuh"
#include "kern/cuda/topk.h"

namespace
{

enum { VEC = 4, CHUNK = VEC * SEL_TEAM };

static __device__ __forceinline__ bool is_score(float x)
{
    return x > -INFINITY;
}

/* ---- topk ---- */

typedef struct row_view {
    const float *list_score;
    const int32_t *list_id;
    int64_t n_list;
    const float *score;
    int64_t n; /* of the list and the row */
    int32_t id_base;
} row_view;

/* Candidate i of a row, in ascending order of ids; false where it is none. */
static __device__ __forceinline__ bool row_at(const row_view &v, int64_t i, uint2 *e)
{
    if (i >= v.n) {
        return false;
    }
    float x;
    int32_t id;
    if (i < v.n_list) {
        x = v.list_score[i];
        id = v.list_id[i];
    } else {
        x = v.score[i - v.n_list];
        id = v.id_base + (int32_t)(i - v.n_list);
    }
    *e = make_uint2(__float_as_uint(x), (uint32_t)id);
    return is_score(x) && id >= 0;
}

/* The cut of a row by score alone; *n_equal: how many of those equal to it are in. A row of fewer than k
 * candidates has a cut below all. */
static __device__ sel_cut row_cut(sel_shared *s, const row_view &v, int32_t k, uint32_t *n_equal)
{
    sel_cut c = {0, 0};
    uint32_t need = (uint32_t)k;
    *n_equal = UINT32_MAX;
    for (int32_t digit = 0; digit < 3; digit++) {
        sel_hist_zero(s);
        for (int64_t i = threadIdx.x; i < v.n; i += SEL_TEAM) {
            uint2 e;
            if (row_at(v, i, &e) && sel_agrees(c, sel_key(e.x), 0, digit)) {
                atomicAdd(&s->hist[sel_digit(sel_key(e.x), 0, digit)], 1u);
            }
        }
        sel_sync();
        uint32_t h[4];
        sel_own_bins(s->hist, h);
        sel_find_bin(s, h, need);
        const bool all = s->total <= need && digit == 0;
        sel_set_digit(&c, digit, s->bin);
        need -= s->above;
        sel_sync();
        if (all) {
            c.key = 0;
            return c;
        }
    }
    *n_equal = need;
    return c;
}

__global__ void __launch_bounds__(SEL_TEAM) topk_kernel(const __grid_constant__ topk_rows a)
{
    __shared__ sel_shared s;
    const int32_t tid = threadIdx.x;
    for (int64_t row = blockIdx.x; row < a.t.n_row; row += gridDim.x) {
        int32_t *id = a.t.list_id + row * a.t.k;
        float *score = a.t.list_score + row * a.t.k;
        row_view v;
        v.list_score = score;
        v.list_id = id;
        v.n_list = a.fresh ? 0 : a.t.list_count[row];
        v.score = a.t.score + row * a.t.score_stride;
        int64_t n_col = a.len != NULL ? min((int64_t)a.n_col, (int64_t)a.len[row] - a.t.id_base)
                                      : a.t.n_col[row];
        n_col = max((int64_t)0, n_col);
        v.n = v.n_list + n_col;
        v.id_base = a.t.id_base;
        uint32_t n_equal;
        const sel_cut c = row_cut(&s, v, a.t.k, &n_equal);
        uint32_t n_out = 0;
        uint32_t n_tie = 0;
        for (int64_t at = 0; at < v.n; at += CHUNK) {
            uint2 e[VEC];
            uint32_t over = 0; /* bits: better than the cut; equal to it */
            uint32_t tie = 0;
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                if (row_at(v, at + tid * VEC + i, &e[i])) {
                    const uint32_t key = sel_key(e[i].x);
                    over |= (uint32_t)(key > c.key) << i;
                    tie |= (uint32_t)(key == c.key) << i;
                }
            }
            /* 16 bits each: a chunk has 2048 */
            uint32_t total;
            const uint32_t before =
                sel_scan(&s, (uint32_t)__popc(over) | (uint32_t)__popc(tie) << 16, &total);
            uint32_t ties = n_tie + (before >> 16);
            uint32_t to = n_out + (before & 0xFFFF) + min(ties, n_equal) - min(n_tie, n_equal);
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                const bool is_tie = (tie >> i & 1) != 0;
                if ((over >> i & 1) != 0 || (is_tie && ties < n_equal)) {
                    id[to] = (int32_t)e[i].y;
                    score[to] = __uint_as_float(e[i].x);
                    to++;
                }
                ties += is_tie;
            }
            const uint32_t n_tie_after = n_tie + (total >> 16);
            n_out += (total & 0xFFFF) + min(n_tie_after, n_equal) - min(n_tie, n_equal);
            n_tie = n_tie_after;
        }
        sel_sync();
        if (tid == 0) {
            a.t.list_count[row] = (int32_t)n_out;
        }
        if (a.fill) {
            for (int32_t i = (int32_t)n_out + tid; i < a.t.k; i += SEL_TEAM) {
                id[i] = -1;
                score[i] = 0.0f;
            }
        }
        sel_sync();
    }
}

/* ---- topk_merge ---- */

enum { MAX_LIST = TOPK_MAX_LIST };

typedef struct merge_view {
    topk_lists l;
    int32_t *all_id;
    int32_t *member; /* [n_row, k] scratch */
} merge_view;

static __device__ __forceinline__ bool list_at(const merge_view &a, int32_t list, int64_t row,
                                               int32_t i, uint2 *e)
{
    const float x = a.l.score[list][row * a.l.stride + i];
    const int32_t id = a.l.id[list][row * a.l.stride + i];
    *e = make_uint2(__float_as_uint(x), (uint32_t)id);
    return is_score(x) && id >= 0;
}

static __device__ int32_t list_len(const merge_view &a, int32_t list, int64_t row)
{
    return (int32_t)min((int64_t)a.l.count[list][row], a.l.stride);
}

/* The worst member as a cut; *n_in: how many members there are. */
static __device__ sel_cut lists_cut(sel_shared *s, const merge_view &a, int64_t row, uint32_t *n_in)
{
    sel_cut c = {0, 0};
    uint32_t need = (uint32_t)a.l.k;
    *n_in = need;
    for (int32_t digit = 0; digit < 6; digit++) {
        sel_hist_zero(s);
        for (int32_t list = 0; list < a.l.n_list; list++) {
            const int32_t n = list_len(a, list, row);
            for (int32_t i = threadIdx.x; i < n; i += SEL_TEAM) {
                uint2 e;
                if (!list_at(a, list, row, i, &e)) {
                    continue;
                }
                const uint32_t key = sel_key(e.x);
                const uint32_t inv = sel_inv((int32_t)e.y);
                if (sel_agrees(c, key, inv, digit)) {
                    atomicAdd(&s->hist[sel_digit(key, inv, digit)], 1u);
                }
            }
        }
        sel_sync();
        uint32_t h[4];
        sel_own_bins(s->hist, h);
        if (digit == 0) {
            /* the worst of fewer than k is the worst of all */
            uint32_t total;
            (void)sel_scan(s, h[0] + h[1] + h[2] + h[3], &total);
            need = min(need, total);
            *n_in = need;
            if (need == 0) {
                return c;
            }
        }
        sel_find_bin(s, h, need);
        sel_set_digit(&c, digit, s->bin);
        need -= s->above;
        sel_sync();
    }
    return c;
}

/* Place of the first of v[0, n) that is not below id; ascending. */
static __device__ int32_t lower_bound(const int32_t *v, int32_t n, int32_t id)
{
    int32_t lo = 0;
    while (lo < n) {
        const int32_t mid = lo + (n - lo) / 2;
        if (v[mid] < id) {
            lo = mid + 1;
        } else {
            n = mid;
        }
    }
    return lo;
}

/* The members of each list into a.member, one list behind the other, first[list] being where. */
static __device__ void gather_members(sel_shared *s, const merge_view &a, int64_t row, sel_cut c,
                                      int32_t *first)
{
    int32_t *member = a.member + row * a.l.k;
    uint32_t n_out = 0;
    for (int32_t list = 0; list < a.l.n_list; list++) {
        if (threadIdx.x == 0) {
            first[list] = (int32_t)n_out;
        }
        const int32_t n = list_len(a, list, row);
        for (int32_t at = 0; at < n; at += SEL_TEAM) {
            const int32_t i = at + (int32_t)threadIdx.x;
            uint2 e;
            const bool in = i < n && list_at(a, list, row, i, &e) && sel_in(c, e.x, (int32_t)e.y);
            uint32_t total;
            const uint32_t before = sel_scan(s, in, &total);
            if (in) {
                member[n_out + before] = (int32_t)e.y;
            }
            n_out += total;
        }
    }
    if (threadIdx.x == 0) {
        first[a.l.n_list] = (int32_t)n_out;
    }
    sel_sync();
}

__global__ void __launch_bounds__(SEL_TEAM) topk_merge_kernel(const __grid_constant__ merge_view a)
{
    __shared__ sel_shared s;
    __shared__ int32_t first[MAX_LIST + 1];
    const int32_t tid = threadIdx.x;
    for (int64_t row = blockIdx.x; row < a.l.n_row; row += gridDim.x) {
        uint32_t n_in;
        const sel_cut c = lists_cut(&s, a, row, &n_in);
        if (tid == 0) {
            a.l.n_total[row] = (int32_t)n_in;
            a.l.cut_id[row] = n_in > 0 ? (int32_t)(0x7FFFFFFFu - c.inv) : -1;
            if (n_in == 0) {
                a.l.cut_score[row] = INFINITY;
            }
        }
        for (int32_t list = 0; list < a.l.n_list && n_in > 0; list++) {
            const int32_t n = list_len(a, list, row);
            for (int32_t i = tid; i < n; i += SEL_TEAM) {
                uint2 e;
                if (list_at(a, list, row, i, &e) && sel_key(e.x) == c.key &&
                    sel_inv((int32_t)e.y) == c.inv) {
                    a.l.cut_score[row] = __uint_as_float(e.x); /* its own zero */
                }
            }
        }
        if (a.all_id == NULL) {
            continue;
        }
        if (n_in == 0) {
            for (int32_t i = tid; i < a.l.k; i += SEL_TEAM) {
                a.all_id[row * a.l.k + i] = -1;
            }
            continue;
        }
        gather_members(&s, a, row, c, first);
        const int32_t *member = a.member + row * a.l.k;
        const int32_t n = first[a.l.n_list];
        for (int32_t i = tid; i < a.l.k; i += SEL_TEAM) {
            if (i >= n) {
                a.all_id[row * a.l.k + i] = -1;
                continue;
            }
            const int32_t id = member[i];
            int32_t to = 0;
            for (int32_t list = 0; list < a.l.n_list; list++) {
                const int32_t at = first[list];
                const int32_t len = first[list + 1] - at;
                to += i >= at && i < at + len ? i - at : lower_bound(member + at, len, id);
            }
            a.all_id[row * a.l.k + to] = id;
        }
        sel_sync();
    }
}

/* ---- selection by steps ---- */

enum { STEP_COLUMN = 8192 };

/* Local indices to positions; counts the keys past the table, which no range of columns has. */
__global__ void position_kernel(const __grid_constant__ index_select_args a)
{
    const int64_t n = (int64_t)a.in.n_row * a.k;
    const int64_t wide = (int64_t)a.in.table_width * KVS_PAGE_TOKENS;
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t i = first; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        if (a.list_id[i] >= 0) {
            shard_geom g;
            g.n = a.dcp;
            g.i = a.interleave;
            g.rank = a.rank;
            kvs_local l;
            l.v = a.list_id[i];
            a.list_id[i] = (int32_t)shard_pos(g, l).v;
        }
    }
    unsigned long long n_bad = 0;
    for (int64_t i = first; i < a.in.n_row; i += (int64_t)gridDim.x * blockDim.x) {
        n_bad += (unsigned long long)max((int64_t)0, a.in.kv_len[i] - wide);
    }
    if (n_bad > 0 && a.in.n_bad_id != NULL) {
        atomicAdd((unsigned long long *)a.in.n_bad_id, n_bad);
    }
}

} // namespace

void topk_rows_launch(const topk_rows *a, dev_queue *q)
{
    topk_kernel<<<cuda_blocks(q, a->t.n_row, 1, 64), SEL_TEAM, 0, cuda_stream(q)>>>(*a);
}

const char *topk_refuses_sm90(const void *args)
{
    (void)args;
    return NULL;
}

void topk_sm90(const topk_args *a, dev_queue *q)
{
    if (a->n_row <= 0) {
        return;
    }
    topk_rows r = {};
    r.t = *a;
    topk_rows_launch(&r, q);
    cuda_launched(q, "topk_sm90");
}

size_t topk_scratch_sm90(const topk_args *a, const dev_queue *q)
{
    (void)a;
    (void)q;
    return 0;
}

const char *topk_merge_refuses_sm90(const void *args)
{
    return ((const topk_merge_args *)args)->n_list > MAX_LIST ? "topk_merge: more than 8 lists"
                                                              : NULL;
}

void topk_merge_sm90(const topk_merge_args *a, dev_queue *q)
{
    if (cuda_refused(q, topk_merge_refuses_sm90(a)) || a->n_row <= 0) {
        return;
    }
    merge_view v = {};
    v.l.n_row = a->n_row;
    v.l.n_list = a->n_list;
    v.l.k = a->k;
    v.l.stride = a->cand_stride;
    for (int32_t i = 0; i < a->n_list; i++) {
        v.l.score[i] = a->cand_score[i];
        v.l.id[i] = a->cand_id[i];
        v.l.count[i] = a->cand_count[i];
    }
    v.l.cut_score = a->cut_score;
    v.l.cut_id = a->cut_id;
    v.l.n_total = a->n_total;
    if (a->all_id == NULL && topk_cut_fits(&v.l)) {
        topk_cut_launch(&v.l, q);
        return;
    }
    v.all_id = a->all_id;
    v.member = (int32_t *)a->scratch;
    topk_merge_kernel<<<cuda_blocks(q, a->n_row, 1, 64), SEL_TEAM, 0, cuda_stream(q)>>>(v);
    cuda_launched(q, "topk_merge_sm90");
}

size_t topk_merge_scratch_sm90(const topk_merge_args *a, const dev_queue *q)
{
    (void)q;
    return a->all_id != NULL ? (size_t)a->n_row * (size_t)a->k * sizeof(int32_t) : 0;
}

size_t select_steps_scratch(const index_select_args *a, const dev_queue *q)
{
    (void)q;
    return (size_t)a->in.n_row * STEP_COLUMN * sizeof(float);
}

void select_steps(const index_select_args *a, dev_queue *q)
{
    index_score_args s = a->in;
    topk_rows t = {};
    t.t.n_row = a->in.n_row;
    t.t.k = a->k;
    t.t.score = (const float *)a->scratch;
    t.t.score_stride = STEP_COLUMN;
    t.t.list_id = a->list_id;
    t.t.list_score = a->list_score;
    t.t.list_count = a->list_count;
    t.len = a->in.kv_len;
    t.n_col = STEP_COLUMN;
    s.score = (float *)a->scratch;
    s.score_stride = STEP_COLUMN;
    const int64_t table = (int64_t)a->in.table_width * KVS_PAGE_TOKENS,
                  wide = table < INDEX_MAX_LEN ? table : (int64_t)INDEX_MAX_LEN;
    for (int64_t col = 0; col == 0 || col < wide; col += STEP_COLUMN) {
        s.col_begin = (int32_t)col;
        s.col_end = (int32_t)(wide - col < STEP_COLUMN ? wide : col + STEP_COLUMN);
        index_score_sm90(&s, q);
        t.t.id_base = (int32_t)col;
        t.n_col = s.col_end - s.col_begin;
        t.fresh = col == 0;
        t.fill = col + STEP_COLUMN >= wide;
        topk_rows_launch(&t, q);
    }
    position_kernel<<<cuda_blocks(q, (int64_t)a->in.n_row * a->k, 256, 16), 256, 0,
                      cuda_stream(q)>>>(*a);
    cuda_launched(q, "index_select_sm90");
}
