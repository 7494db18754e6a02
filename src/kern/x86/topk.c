/* x86/topk.c - exact top-k of streamed rows: the method, in plain C over the loops of a topk_isa.
 *
 * A row is taken in pieces that fit the second-level cache, each at most twice. The first reading, from
 * memory, keeps the maximum of each of 2k or more disjoint groups of columns: at least k scores are as
 * large as the k-th largest of those maxima, and for most rows hardly more are. The second, from cache,
 * collects the scores from that floor up into a buffer. Whenever the buffer is full it is cut to its k
 * best and the floor rises above the worst of them; ids ascend, so an equal score that comes later can
 * never win. Ties, sorted rows and periodic ones therefore cost a few cuts and not another method. Once
 * a list is full, a piece is read once, with the floor that the list gives.
 *
 * Values are compared as floats, so -0.0 equals +0.0 and NaN never passes a floor; floors are handled as
 * sortable integers (topk_key), which name the next larger float by adding one.
 */
#include "kern/x86/topk.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/pool.h"
#include "num/fmt.h"

enum {
    PIECE = 131072, /* columns: half a MiB of scores             */
    MIN_CAP = 4096, /* of the buffer                             */
    MIN_GROUP = 256,
    MIN_PART = 32768 /* columns of a row that is cut over workers */
};

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* An interval of keys that should hold the k-th largest of v, from a sample: [lo, hi). */
typedef struct bracket {
    int32_t lo, hi;
} bracket;

/* The r-th largest of m values, r from 1. */
static float sample_nth(const topk_isa *isa, float *s, int64_t m, int64_t r)
{
    float least = 0.0f;
    float most = 0.0f;
    isa->range(s, m, &least, &most);
    int64_t lo = topk_key(least);
    int64_t hi = (int64_t)topk_key(most) + 1;
    while (hi - lo > 1) {
        const int64_t mid = lo + (hi - lo) / 2;
        const int64_t n = isa->count_ge(s, m, topk_float((int32_t)mid));
        if (n == r) {
            return topk_float((int32_t)mid);
        }
        if (n > r) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    return topk_float((int32_t)lo);
}

static bracket sample_bracket(const topk_isa *isa, const float *v, int64_t n, int64_t k)
{
    enum { M = 128, MARGIN = 14 }; /* 2.5 deviations of a rank near the middle of the sample */
    float s[M + TOPK_PAD];
    const int64_t step = n / M;
    for (int64_t i = 0; i < M; i++) {
        s[i] = v[i * step + (int64_t)((uint64_t)topk_hash((uint32_t)i) * (uint64_t)step >> 32)];
    }
    const int64_t r = k * M / n;
    bracket b = {topk_key(-INFINITY), topk_key(INFINITY) + 1};
    if (r + MARGIN <= M) {
        b.lo = topk_key(sample_nth(isa, s, M, r + MARGIN));
    }
    if (r - MARGIN > 0) {
        b.hi = topk_key(sample_nth(isa, s, M, r - MARGIN));
        b.hi = b.hi > b.lo ? b.hi : b.lo + 1;
    }
    return b;
}

/* Rounds of: find the range of the values in question; halve that interval of keys a few times, every
 * other time at the point that a straight line through the counts suggests; keep the values inside it
 * alone. Ties end it quickly, since a range of one value is a result. For many values a sample takes the
 * place of the first round. */
topk_cut topk_cut_find(const topk_isa *isa, float *v, int64_t n, int64_t k, int64_t slack,
                       float *spare)
{
    enum { STEPS = 4, FEW = 64, MANY = 1024 };
    topk_cut c = {.key = 0, .n_ge = n, .n_above = 0};
    if (n >= MANY && n - k > n / 8) {
        const bracket b = sample_bracket(isa, v, n, k);
        int64_t n_ge = 0;
        const int64_t in = isa->between(v, n, topk_float(b.lo), topk_float(b.hi), spare, &n_ge);
        if (n_ge >= k && n_ge - in < k) {
            c.n_ge = n_ge;
            c.n_above = n_ge - in;
            n = in;
            v = spare;
        }
    }
    int64_t above = c.n_above; /* values above those in v, which are no longer looked at */
    for (;;) {
        float least = 0.0f;
        float most = 0.0f;
        isa->range(v, n, &least, &most);
        int64_t lo = topk_key(least);
        int64_t hi = (int64_t)topk_key(most) + 1;
        c.key = (int32_t)lo;
        for (int step = 0; hi - lo > 1 && c.n_ge > k + slack && (step < STEPS || n <= FEW);
             step++) {
            int64_t mid = lo + (hi - lo) / 2;
            if (step % 2 == 0) {
                const double part = (double)(c.n_ge - k) / (double)(c.n_ge - c.n_above);
                mid = lo + (int64_t)((double)(hi - lo) * part);
                mid = min64(max64(mid, lo + 1), hi - 1);
            }
            const int64_t n_ge = above + isa->count_ge(v, n, topk_float((int32_t)mid));
            if (n_ge >= k) {
                lo = mid;
                c.key = (int32_t)mid;
                c.n_ge = n_ge;
            } else {
                hi = mid;
                c.n_above = n_ge;
            }
        }
        if (hi - lo <= 1 || c.n_ge <= k + slack) {
            return c;
        }
        int64_t n_ge = 0;
        n = isa->between(v, n, topk_float((int32_t)lo), topk_float((int32_t)hi), spare, &n_ge);
        v = spare;
        above = c.n_above;
    }
}

/* One row's selection under way. */
typedef struct topk_state {
    const topk_isa *isa;
    topk_buf b;
    float *group; /* [n_group + TOPK_PAD]            */
    float *spare; /* [max(cap, n_group) + TOPK_PAD] */
    int64_t n_group;
    int64_t k;
    int64_t cap;   /* of b; b.cap may be less for a while */
    int32_t floor; /* key: scores below it cannot enter   */
} topk_state;

static void floor_raise(topk_state *s, int32_t key)
{
    s->floor = key > s->floor ? key : s->floor;
}

/* Cuts the buffer to its k best and raises the floor above the worst of them. */
static void state_cut(topk_state *s)
{
    topk_buf *b = &s->b;
    b->cap = s->cap;
    if (b->n < s->k) {
        return;
    }
    if (b->n > s->k) {
        const topk_cut c = topk_cut_find(s->isa, b->val, b->n, s->k, 0, s->spare);
        s->isa->keep(b, topk_float(c.key), c.n_ge == s->k ? INT64_MAX : s->k - c.n_above);
    }
    float worst = 0.0f;
    float best = 0.0f;
    s->isa->range(b->val, b->n, &worst, &best);
    floor_raise(s, topk_key(worst) + 1);
}

/* Raises the floor as far as the maxima of groups of n scores allow. */
static void state_sample(topk_state *s, const float *score, int64_t n, uint32_t seed)
{
    for (int64_t g = 0; g < s->n_group; g++) {
        s->group[g] = -INFINITY;
    }
    s->isa->group_max(s->group, s->n_group, score, n, seed);
    const topk_cut c = topk_cut_find(s->isa, s->group, s->n_group, s->k, s->k / 16, s->spare);
    floor_raise(s, c.key);
    if (c.n_ge > s->k + s->k / 16) { /* ties at the floor: soon no more of them can enter */
        const int64_t soon = s->b.n + s->k + s->k / 8 + 2 * TOPK_PAD;
        s->b.cap = min64(soon / TOPK_PAD * TOPK_PAD, s->cap);
    }
}

static int64_t piece_cols(const topk_state *s)
{
    return max64(PIECE, 16 * s->n_group);
}

/* Selects from a short row when nothing has been collected yet: finds the cut first and then collects
 * the winners alone. Returns false, with nothing done, where the row holds NaN or -inf. */
static bool state_take_short(topk_state *s, const float *score, int64_t n, int32_t id0)
{
    memcpy(s->b.val, score, (size_t)n * sizeof *score);
    if (s->isa->count_ge(s->b.val, n, topk_float(TOPK_KEY_LOWEST)) < n) {
        return false;
    }
    const topk_cut c = topk_cut_find(s->isa, s->b.val, n, s->k, 0, s->spare);
    s->isa->filter(&s->b, score, n, topk_float(c.key), id0);
    if (s->b.n > s->k) {
        s->isa->keep(&s->b, topk_float(c.key), s->k - c.n_above);
    }
    floor_raise(s, c.key);
    return true;
}

/* Feeds n scores, column 0 having the id id0. */
static void state_feed(topk_state *s, const float *score, int64_t n, int32_t id0)
{
    if (s->b.n == 0 && s->floor == TOPK_KEY_LOWEST && n > s->k && n <= s->b.cap - TOPK_PAD &&
        state_take_short(s, score, n, id0)) {
        return;
    }
    for (int64_t at = 0; at < n;) {
        const int64_t end = min64(at + piece_cols(s), n);
        bool sampled = false;
        if (s->floor == TOPK_KEY_LOWEST && end - at + s->b.n > s->b.cap - TOPK_PAD) {
            state_sample(s, score + at, end - at, (uint32_t)at);
            sampled = true;
        }
        while (at < end) {
            at += s->isa->filter(&s->b, score + at, end - at, topk_float(s->floor),
                                 id0 + (int32_t)at);
            if (at < end) {
                state_cut(s);
                if (!sampled && end - at >= 2 * s->n_group) {
                    state_sample(s, score + at, end - at, (uint32_t)at);
                    sampled = true;
                }
            }
        }
        state_cut(s);
    }
}

/* Appends a list whose ids lie above those of the buffer. */
static void state_append(topk_state *s, const float *val, const int32_t *id, int64_t n)
{
    if (s->b.n + n > s->b.cap) {
        state_cut(s);
    }
    memcpy(s->b.val + s->b.n, val, (size_t)n * sizeof *val);
    memcpy(s->b.id + s->b.n, id, (size_t)n * sizeof *id);
    s->b.n += n;
}

/* ---- topk --------------------------------------------------------------------------------------- */

typedef struct topk_job {
    const topk_isa *isa;
    const topk_args *a;
    int64_t cap, n_group;
    int64_t n_part;      /* a row is cut into that many runs of columns       */
    uint8_t *work;       /* one block of worker_bytes per worker              */
    float *part_val;     /* [n_row, n_part, k]                                */
    int32_t *part_id;    /* [n_row, n_part, k]                                */
    int64_t *part_count; /* [n_row, n_part]                                   */
} topk_job;

static int64_t cap_for(int32_t k)
{
    return (max64(MIN_CAP, 4 * (int64_t)k) + TOPK_PAD - 1) / TOPK_PAD * TOPK_PAD;
}

int64_t topk_n_group(int32_t k)
{
    int64_t n = MIN_GROUP;
    while (n < 2 * (int64_t)k) {
        n *= 2;
    }
    return n;
}

static int64_t part_for(const topk_args *a, const dev_queue *q)
{
    const int64_t n_worker = q != NULL && q->n_worker > 1 ? q->n_worker : 1;
    return a->n_row > 0 && a->n_row < n_worker ? n_worker / a->n_row : 1;
}

static size_t worker_bytes(int64_t cap, int64_t n_group)
{
    const int64_t spare = max64(cap, n_group);
    return topk_align64((size_t)(2 * cap + n_group + spare + 4 * TOPK_PAD) * sizeof(float));
}

static size_t part_bytes(const topk_args *a, int64_t n_part)
{
    if (n_part == 1) {
        return 0;
    }
    const size_t n = (size_t)a->n_row * (size_t)n_part;
    return topk_align64(n * sizeof(int64_t)) + 2 * topk_align64(n * (size_t)a->k * sizeof(float));
}

size_t topk_scratch_x86(const topk_args *a, const dev_queue *q)
{
    const size_t n_worker = q != NULL && q->n_worker > 1 ? (size_t)q->n_worker : 1;
    return n_worker * worker_bytes(cap_for(a->k), topk_n_group(a->k)) +
           part_bytes(a, part_for(a, q));
}

static topk_state state_of(const topk_job *j, int i_worker)
{
    uint8_t *w = j->work + (size_t)i_worker * worker_bytes(j->cap, j->n_group);
    topk_state s = {.isa = j->isa, .n_group = j->n_group, .k = j->a->k, .floor = TOPK_KEY_LOWEST};
    s.group = (float *)(void *)w;
    s.spare = s.group + j->n_group + TOPK_PAD;
    s.b.val = s.spare + max64(j->cap, j->n_group) + TOPK_PAD;
    s.b.id = (int32_t *)(void *)(s.b.val + j->cap + TOPK_PAD);
    s.b.cap = j->cap;
    s.cap = j->cap;
    return s;
}

static void state_take_list(topk_state *s, const topk_args *a, int64_t row)
{
    state_append(s, a->list_score + row * a->k, a->list_id + row * a->k, a->list_count[row]);
    state_cut(s);
}

static void state_give_list(const topk_state *s, const topk_args *a, int64_t row)
{
    memcpy(a->list_score + row * a->k, s->b.val, (size_t)s->b.n * sizeof(float));
    memcpy(a->list_id + row * a->k, s->b.id, (size_t)s->b.n * sizeof(int32_t));
    a->list_count[row] = (int32_t)s->b.n;
}

static void row_task(void *ctx, int64_t row, int i_worker)
{
    const topk_job *j = ctx;
    const topk_args *a = j->a;
    if (a->n_col[row] <= 0) {
        return;
    }
    topk_state s = state_of(j, i_worker);
    state_take_list(&s, a, row);
    state_feed(&s, a->score + row * a->score_stride, a->n_col[row], a->id_base);
    state_give_list(&s, a, row);
}

/* The k best of one run of a row's columns, among those that the row's list lets in. */
static void part_task(void *ctx, int64_t i_task, int i_worker)
{
    const topk_job *j = ctx;
    const topk_args *a = j->a;
    const int64_t row = i_task / j->n_part;
    const int64_t part = i_task % j->n_part;
    const int64_t n_col = max64(a->n_col[row], 0);
    const int64_t width = (max64(MIN_PART, (n_col + j->n_part - 1) / j->n_part) + 63) / 64 * 64;
    const int64_t begin = min64(part * width, n_col);
    const int64_t end = min64(begin + width, n_col);
    topk_state s = state_of(j, i_worker);
    state_take_list(&s, a, row);
    s.b.n = 0;
    state_feed(&s, a->score + row * a->score_stride + begin, end - begin,
               a->id_base + (int32_t)begin);
    memcpy(j->part_val + i_task * a->k, s.b.val, (size_t)s.b.n * sizeof(float));
    memcpy(j->part_id + i_task * a->k, s.b.id, (size_t)s.b.n * sizeof(int32_t));
    j->part_count[i_task] = s.b.n;
}

static void join_task(void *ctx, int64_t row, int i_worker)
{
    const topk_job *j = ctx;
    const topk_args *a = j->a;
    topk_state s = state_of(j, i_worker);
    state_take_list(&s, a, row);
    for (int64_t p = row * j->n_part; p < (row + 1) * j->n_part; p++) {
        state_append(&s, j->part_val + p * a->k, j->part_id + p * a->k, j->part_count[p]);
    }
    state_cut(&s);
    state_give_list(&s, a, row);
}

void topk_run(const topk_isa *isa, const topk_args *a, dev_queue *q)
{
    topk_job j = {.isa = isa, .a = a, .cap = cap_for(a->k), .n_group = topk_n_group(a->k)};
    struct pool *const workers = q != NULL ? q->pool : NULL;
    j.n_part = part_for(a, q);
    j.work = a->scratch;
    if (j.n_part == 1) {
        pool_run(workers, row_task, &j, a->n_row);
        return;
    }
    const int64_t n = a->n_row * j.n_part;
    uint8_t *p = j.work + (size_t)q->n_worker * worker_bytes(j.cap, j.n_group);
    j.part_count = (int64_t *)(void *)p;
    p += topk_align64((size_t)n * sizeof(int64_t));
    j.part_val = (float *)(void *)p;
    p += topk_align64((size_t)n * (size_t)a->k * sizeof(float));
    j.part_id = (int32_t *)(void *)p;
    pool_run(workers, part_task, &j, n);
    pool_run(workers, join_task, &j, a->n_row);
}
