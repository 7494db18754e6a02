/* x86/topk_merge.c - the global cut of several candidate lists, over the loops of a topk_isa.
 *
 * The lists of a row count as one row of scores. As in topk.c the maxima of groups give a floor, the
 * candidates from that floor up are collected as (score, position in the lists end to end), and the
 * search for the k-th largest runs over them alone. Positions do not ascend with ids across lists, so
 * ties at the cut are settled by the ids, which ascend in each list.
 */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/pool.h"
#include "kern/x86/topk.h"

typedef struct merge_job {
    const topk_isa *isa;
    const topk_merge_args *a;
    int64_t cap; /* candidates of a row, and TOPK_PAD more */
    int64_t n_group;
} merge_job;

/* One row under way, in a worker's memory. */
typedef struct merge_state {
    const merge_job *j;
    int64_t row;
    topk_buf b;     /* id: position                                            */
    float *group;   /* [n_group + TOPK_PAD]                                    */
    float *clean;   /* [spare_len + TOPK_PAD] scores of one list, NaN where unusable; or spare */
    int32_t *eq;    /* [cap + TOPK_PAD] ids at the cut's score, list by list   */
    int64_t *begin; /* [n_list + 1] where each list's run of eq begins         */
} merge_state;

static int64_t merge_cap(const topk_merge_args *a)
{
    return ((int64_t)a->n_list * a->cand_stride + 2 * TOPK_PAD - 1) / TOPK_PAD * TOPK_PAD;
}

static size_t array_bytes(int64_t n)
{
    return topk_align64((size_t)(n + TOPK_PAD) * sizeof(float));
}

static int64_t spare_len(const topk_merge_args *a)
{
    const int64_t n_group = topk_n_group(a->k);
    return merge_cap(a) > n_group ? merge_cap(a) : n_group;
}

static size_t worker_bytes(const topk_merge_args *a)
{
    return 3 * array_bytes(merge_cap(a)) + array_bytes(spare_len(a)) +
           array_bytes(topk_n_group(a->k)) +
           topk_align64((size_t)(a->n_list + 1) * sizeof(int64_t));
}

size_t topk_merge_scratch_x86(const topk_merge_args *a, const dev_queue *q)
{
    const size_t n_worker = q != NULL && q->n_worker > 1 ? (size_t)q->n_worker : 1;
    return n_worker * worker_bytes(a);
}

static merge_state state_of(const merge_job *j, int64_t row, int i_worker)
{
    uint8_t *w = (uint8_t *)j->a->scratch + (size_t)i_worker * worker_bytes(j->a);
    const size_t step = array_bytes(j->cap);
    merge_state s = {.j = j, .row = row};
    s.b.cap = j->cap;
    s.b.val = (float *)(void *)w;
    s.b.id = (int32_t *)(void *)(w + step);
    s.eq = (int32_t *)(void *)(w + 2 * step);
    s.clean = (float *)(void *)(w + 3 * step);
    w += 3 * step + array_bytes(spare_len(j->a));
    s.group = (float *)(void *)w;
    s.begin = (int64_t *)(void *)(w + array_bytes(j->n_group));
    return s;
}

static int64_t list_len(const topk_merge_args *a, int64_t row, int32_t list)
{
    const int64_t n = a->cand_count[list][row];
    return n > 0 ? n : 0;
}

static const int32_t *list_ids(const topk_merge_args *a, int64_t row, int32_t list)
{
    return a->cand_id[list] + row * a->cand_stride;
}

/* The scores of a list; where an id is negative, a copy in which that entry is NaN. */
static const float *list_scores(const merge_state *s, int32_t list)
{
    const topk_merge_args *a = s->j->a;
    const float *score = a->cand_score[list] + s->row * a->cand_stride;
    const int32_t *id = list_ids(a, s->row, list);
    const int64_t n = list_len(a, s->row, list);
    if (!s->j->isa->any_negative(id, n)) {
        return score;
    }
    for (int64_t i = 0; i < n; i++) {
        s->clean[i] = id[i] >= 0 ? score[i] : NAN;
    }
    return s->clean;
}

/* Collects every candidate that can be among the k best. */
static void state_collect(merge_state *s)
{
    const topk_merge_args *a = s->j->a;
    const topk_isa *isa = s->j->isa;
    int64_t n_all = 0;
    for (int32_t l = 0; l < a->n_list; l++) {
        n_all += list_len(a, s->row, l);
    }
    int32_t floor = TOPK_KEY_LOWEST;
    if (n_all > a->k + a->k / 2) {
        for (int64_t g = 0; g < s->j->n_group; g++) {
            s->group[g] = -INFINITY;
        }
        for (int32_t l = 0; l < a->n_list; l++) {
            isa->group_max(s->group, s->j->n_group, list_scores(s, l), list_len(a, s->row, l),
                           (uint32_t)l);
        }
        const topk_cut c = topk_cut_find(isa, s->group, s->j->n_group, a->k, a->k / 16, s->clean);
        floor = c.key > floor ? c.key : floor;
    }
    int64_t base = 0;
    for (int32_t l = 0; l < a->n_list; l++) {
        const int64_t n = list_len(a, s->row, l);
        isa->filter(&s->b, list_scores(s, l), n, topk_float(floor), (int32_t)base);
        base += n;
    }
}

/* Ids of the n positions at[], which ascend, into eq (eq may be at), and each list's run. */
static void state_ids(merge_state *s, const int32_t *at, int64_t n, int32_t *id)
{
    const topk_merge_args *a = s->j->a;
    int64_t base = 0;
    int64_t i = 0;
    for (int32_t l = 0; l < a->n_list; l++) {
        const int32_t *from = list_ids(a, s->row, l);
        const int64_t count = list_len(a, s->row, l);
        s->begin[l] = i;
        for (; i < n && at[i] < base + count; i++) {
            id[i] = from[at[i] - base];
        }
        base += count;
    }
    s->begin[a->n_list] = i;
}

/* How many of the ascending v[begin, end) are <= x. */
static int64_t count_le(const int32_t *v, int64_t begin, int64_t end, int64_t x)
{
    int64_t lo = begin;
    int64_t hi = end;
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (v[mid] <= x) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo - begin;
}

/* The r-th smallest id, r >= 1, over the runs of eq. */
static int32_t nth_id(const merge_state *s, int64_t r)
{
    int64_t lo = 0;
    int64_t hi = INT32_MAX;
    while (lo < hi) { /* the least x with count(<= x) >= r */
        const int64_t mid = lo + (hi - lo) / 2;
        int64_t count = 0;
        for (int32_t l = 0; l < s->j->a->n_list; l++) {
            count += count_le(s->eq, s->begin[l], s->begin[l + 1], mid);
        }
        if (count >= r) {
            hi = mid;
        } else {
            lo = mid + 1;
        }
    }
    return (int32_t)lo;
}

/* Finds the cut among the collected. Afterwards the buffer holds the set and, perhaps, entries with the
 * cut's score and a higher id. */
static void state_cut(merge_state *s, int64_t n_total)
{
    const topk_merge_args *a = s->j->a;
    const topk_isa *isa = s->j->isa;
    topk_buf *b = &s->b;
    const topk_cut c = topk_cut_find(isa, b->val, b->n, n_total, 0, s->clean);
    isa->keep(b, topk_float(c.key), INT64_MAX);
    float worst = 0.0f;
    float best = 0.0f;
    isa->range(b->val, b->n, &worst, &best);
    const int64_t n_equal = isa->match(b->val, b->n, worst, s->eq);
    const int64_t n_above = b->n - n_equal;
    for (int64_t i = 0; i < n_equal; i++) {
        s->eq[i] = b->id[s->eq[i]];
    }
    state_ids(s, s->eq, n_equal, s->eq);
    const int32_t cut_id = nth_id(s, n_total - n_above);
    a->cut_id[s->row] = cut_id;
    a->cut_score[s->row] = worst;
    if (worst == 0.0f) { /* -0.0 or +0.0, as the candidate came */
        for (int32_t l = 0; l < a->n_list; l++) {
            const int64_t n = list_len(a, s->row, l);
            const int64_t i = count_le(list_ids(a, s->row, l), 0, n, cut_id) - 1;
            if (i >= 0 && list_ids(a, s->row, l)[i] == cut_id) {
                a->cut_score[s->row] = a->cand_score[l][s->row * a->cand_stride + i];
            }
        }
    }
}

/* out = the n ids of x and the m ids of y, both ascending, merged. */
static void merge_two(const int32_t *x, int64_t n, const int32_t *y, int64_t m, int32_t *out)
{
    int64_t i = 0;
    int64_t j = 0;
    while (i < n && j < m) {
        const bool first = x[i] < y[j];
        *out++ = first ? x[i] : y[j];
        i += first;
        j += !first;
    }
    memcpy(out, x + i, (size_t)(n - i) * sizeof *out);
    memcpy(out + (n - i), y + j, (size_t)(m - j) * sizeof *out);
}

/* Writes the members of the set in the order of their ids, list by list into what is there. */
static void state_write_all(merge_state *s)
{
    const topk_merge_args *a = s->j->a;
    int32_t *all = a->all_id + s->row * a->k;
    int32_t *const spare = (int32_t *)(void *)s->clean;
    int64_t n_kept = 0;
    int32_t *const id = s->b.id;
    state_ids(s, id, s->b.n, id);
    const float worst = s->b.n > 0 ? a->cut_score[s->row] : INFINITY;
    for (int32_t l = 0; l < a->n_list && s->b.n > 0; l++) {
        int64_t n = 0;
        for (int64_t i = s->begin[l]; i < s->begin[l + 1]; i++) {
            if (s->b.val[i] > worst || id[i] <= a->cut_id[s->row]) {
                s->eq[n++] = id[i];
            }
        }
        merge_two(all, n_kept, s->eq, n, spare);
        n_kept += n;
        memcpy(all, spare, (size_t)n_kept * sizeof *all);
    }
    for (int64_t i = n_kept; i < a->k; i++) {
        all[i] = -1;
    }
}

static void merge_task(void *ctx, int64_t row, int i_worker)
{
    const merge_job *j = ctx;
    const topk_merge_args *a = j->a;
    merge_state s = state_of(j, row, i_worker);
    state_collect(&s);
    const int64_t n_total = s.b.n < a->k ? s.b.n : a->k;
    a->n_total[row] = (int32_t)n_total;
    a->cut_score[row] = INFINITY;
    a->cut_id[row] = -1;
    if (n_total > 0) {
        state_cut(&s, n_total);
    }
    if (a->all_id != NULL) {
        state_write_all(&s);
    }
}

void topk_merge_run(const topk_isa *isa, const topk_merge_args *a, dev_queue *q)
{
    merge_job j = {.isa = isa, .a = a, .cap = merge_cap(a), .n_group = topk_n_group(a->k)};
    pool_run(q != NULL ? q->pool : NULL, merge_task, &j, a->n_row);
}
