/* topk_ref.c - selection of the k best of a streamed row and of several candidate lists, the
 * definition.
 *
 * Both keep a heap of at most k candidates in scratch, the worst at the root, and leave it sorted
 * by id.
 */
#include "kern/ref/ref.h"

typedef struct cand {
    float score;
    int32_t id;
} cand;

typedef struct heap {
    cand *v;
    int64_t n, cap;
} heap;

/* The total order of selection: larger score, then lower id. -0.0 and +0.0 compare equal. */
static int better(cand a, cand b)
{
    return a.score > b.score || (a.score == b.score && a.id < b.id);
}

static int before(cand a, cand b)
{
    return a.id < b.id;
}

/* Restores the heap below i: no child is `above` its parent. */
static void sift_down(cand *v, int64_t n, int64_t i, int (*below)(cand, cand))
{
    for (int64_t c = 2 * i + 1; c < n; c = 2 * i + 1) {
        if (c + 1 < n && below(v[c], v[c + 1])) {
            c++;
        }
        if (!below(v[i], v[c])) {
            return;
        }
        const cand t = v[i];
        v[i] = v[c];
        v[c] = t;
        i = c;
    }
}

static void heap_push(heap *h, cand c)
{
    if (!(c.score > -INFINITY) || c.id < 0) {
        return; /* NaN compares false */
    }
    if (h->n == h->cap) {
        if (better(c, h->v[0])) {
            h->v[0] = c;
            sift_down(h->v, h->n, 0, better);
        }
        return;
    }
    int64_t i = h->n++;
    for (; i > 0 && better(h->v[(i - 1) / 2], c); i = (i - 1) / 2) {
        h->v[i] = h->v[(i - 1) / 2];
    }
    h->v[i] = c;
}

static void sort_by_id(heap *h)
{
    for (int64_t i = h->n / 2 - 1; i >= 0; i--) {
        sift_down(h->v, h->n, i, before);
    }
    for (int64_t end = h->n - 1; end > 0; end--) {
        const cand t = h->v[0];
        h->v[0] = h->v[end];
        h->v[end] = t;
        sift_down(h->v, end, 0, before);
    }
}

static size_t topk_scratch_ref(const topk_args *a, const dev_queue *q)
{
    (void)q;
    return (size_t)a->k * sizeof(cand);
}

static void topk_ref(const topk_args *a, dev_queue *q)
{
    (void)q;
    for (int64_t row = 0; row < a->n_row; row++) {
        heap h = {.v = a->scratch, .n = 0, .cap = a->k};
        int32_t *id = a->list_id + row * a->k;
        float *score = a->list_score + row * a->k;
        for (int32_t i = 0; i < a->list_count[row]; i++) {
            heap_push(&h, (cand){score[i], id[i]});
        }
        const float *in = a->score + row * a->score_stride;
        for (int32_t c = 0; c < a->n_col[row]; c++) {
            heap_push(&h, (cand){in[c], a->id_base + c});
        }
        sort_by_id(&h);
        for (int64_t i = 0; i < h.n; i++) {
            id[i] = h.v[i].id;
            score[i] = h.v[i].score;
        }
        a->list_count[row] = (int32_t)h.n;
    }
}

static size_t topk_merge_scratch_ref(const topk_merge_args *a, const dev_queue *q)
{
    (void)q;
    return (size_t)a->k * sizeof(cand);
}

static void topk_merge_ref(const topk_merge_args *a, dev_queue *q)
{
    (void)q;
    for (int64_t row = 0; row < a->n_row; row++) {
        heap h = {.v = a->scratch, .n = 0, .cap = a->k};
        for (int32_t list = 0; list < a->n_list; list++) {
            const float *score = a->cand_score[list] + row * a->cand_stride;
            const int32_t *id = a->cand_id[list] + row * a->cand_stride;
            for (int32_t i = 0; i < a->cand_count[list][row]; i++) {
                heap_push(&h, (cand){score[i], id[i]});
            }
        }
        a->n_total[row] = (int32_t)h.n;
        a->cut_score[row] = h.n > 0 ? h.v[0].score : INFINITY;
        a->cut_id[row] = h.n > 0 ? h.v[0].id : -1;
        if (a->all_id == NULL) {
            continue;
        }
        sort_by_id(&h);
        int32_t *all = a->all_id + row * a->k;
        for (int64_t i = 0; i < a->k; i++) {
            all[i] = i < h.n ? h.v[i].id : -1;
        }
    }
}

void ref_apply_topk(kern_table *t)
{
    t->topk = topk_ref;
    t->topk_scratch = topk_scratch_ref;
}

void ref_apply_topk_merge(kern_table *t)
{
    t->topk_merge = topk_merge_ref;
    t->topk_merge_scratch = topk_merge_scratch_ref;
}
