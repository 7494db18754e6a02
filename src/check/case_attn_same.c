/* case_attn_same.c - attention computed a second way that must give the same bits: rows alone,
 * heads alone, lanes on other ranks, segments by themselves, tables as lists. */
#include <math.h>
#include <string.h>

#include "check/case_attn.h"
#include "kern/exp.h"

enum { VDIM = KVS_LATENT_DIM, SEGMENT = 2048 };

static void second_outputs(check_case *k)
{
    const attn_args *a = k->args;
    attn_expect *e = k->expect;
    e->out2 = case_buf(k, "out2", BUF_OUT, EL_F32, a->n_row * a->out_stride_row, case_step(k, 4));
    e->lse2 = case_buf(k, "lse2", BUF_OUT, EL_F32, (int64_t)a->n_row * a->n_head, 0);
    case_mark_all(k, e->lse2);
    for (int64_t row = 0; row < a->n_row; row++) {
        for (int64_t head = 0; head < a->n_head; head++) {
            case_mark(k, e->out2 + row * a->out_stride_row + head * a->out_stride_head, 4 * VDIM);
        }
    }
}

/* ---- results as bf16 ---- */

/* Whole rows, rows cut in many pieces, rows of nothing; every other case begins at an odd element. */
void attn_bf16(check_case *k, int32_t index)
{
    static const attn_shape shapes[] = {
        {16, 1, 1, 1, 4, {0}, 130, 10}, {128, 8, 1, 1, 2, {0}, 700, 30}, {40, 2, 1, 1, 3, {0}, 65, 0},
        {64, 1, 1, 1, 2, {0}, 3000, 5}, {5, 4, 1, 1, 5, {0}, 100, 100},  {7, 1, 1, 300, 1, {0}, 40, 50},
    };
    const attn_shape *s = &shapes[index / 2 % 6];
    const attn_args *a = attn_new(k, s, index % 4 < 2 ? KVS_KV_FP8_DS_MLA : KVS_KV_BF16);
    attn_expect *e = k->expect;
    e->out16 = case_buf(k, "out as bf16", BUF_OUT, EL_U16, a->n_row * a->out_stride_row, index % 2);
    e->lse2 = case_buf(k, "lse2", BUF_OUT, EL_F32, (int64_t)a->n_row * a->n_head, 0);
    case_mark_all(k, e->lse2);
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        case_mark(k, e->out16 + i / a->n_head * a->out_stride_row + i % a->n_head * a->out_stride_head, 2 * VDIM);
    }
    attn_fill(k);
    attn_finish(k);
}

void attn_bf16_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const attn_expect *e = k->expect;
    attn_run(t, k, q);
    attn_args a = *(const attn_args *)k->args;
    a.out = (float *)(void *)e->out16;
    a.out_type = KVS_DTYPE_BF16;
    a.lse = e->lse2;
    a.stats = NULL;
    attn_call(t, k, q, &a);
}

/* ---- rows and heads alone ---- */

void attn_alone(check_case *k, int32_t index)
{
    static const attn_shape shapes[] = {
        {16, 1, 1, 16, 4, {130, 64, 3, 65, 0, 190, -1}, 0, 0},
        {128, 2, 1, 1, 2, {0}, 90, 20},
        {8, 4, 1, 1, 64, {0}, 60, 40},
        {128, 8, 2, 2, 2, {70, 40, 101, -1}, 0, 0},
        {24, 1, 1, 3, 5, {64, 128, 130, 129, 127, -1}, 0, 0},
        {40, 8, 1, 1, 4, {0}, 200, 10},
    };
    const int32_t n = sizeof shapes / sizeof *shapes;
    attn_new(k, &shapes[index % n], attn_fmt_of(index, n));
    second_outputs(k);
    attn_fill(k);
    attn_finish(k);
}

/* The args of heads [head, head + n) of one row, writing to the second outputs. */
static attn_args part_of(const check_case *k, int64_t row, int32_t head, int32_t n)
{
    attn_args a = *(const attn_args *)k->args;
    const attn_expect *e = k->expect;
    const int64_t q = row * a.q_stride_row + head * a.q_stride_head;
    const int64_t at = row * a.n_head + head;
    a.q = (const uint8_t *)a.q + q * (a.q_type == KVS_DTYPE_F32 ? 4 : 2);
    a.q_scale = a.q_scale != NULL ? a.q_scale + at : NULL;
    a.out = e->out2 + row * a.out_stride_row + head * a.out_stride_head;
    a.lse = e->lse2 + at;
    a.stats = NULL;
    a.n_row = 1;
    a.n_head = n;
    if (a.slots != NULL) {
        a.slots += row * a.slots_stride;
        a.lane_count += row * a.n_lane;
    } else {
        a.row_req += row;
        a.kv_len += row;
    }
    return a;
}

void attn_alone_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const attn_args *whole = k->args;
    attn_run(t, k, q);
    for (int64_t row = 0; row < whole->n_row; row++) {
        /* rows by themselves; of every other row, heads in groups of 8 or of an odd size */
        const int32_t group = row % 2 == 0 ? whole->n_head : row % 4 == 1 ? 8 : 5;
        for (int32_t head = 0; head < whole->n_head; head += group) {
            const int32_t left = whole->n_head - head;
            attn_args a = part_of(k, row, head, left < group ? left : group);
            attn_call(t, k, q, &a);
        }
    }
}

/* ---- lanes on other ranks ---- */

void attn_tree(check_case *k, int32_t index)
{
    static const attn_shape shapes[] = {
        {8, 8, 1, 1, 3, {0}, 700, 10},
        {3, 8, 1, 1, 4, {0}, 90, 60},
        {16, 8, 1, 1, 2, {0}, 40, 30},
        {2, 8, 1, 1, 1, {0}, 4000, 0},
    };
    attn_new(k, &shapes[index % 4], attn_fmt(index + index / 4));
    second_outputs(k);
    attn_fill(k);
    attn_finish(k);
}

typedef struct part {
    float *out; /* [n_head, 512] */
    float *lse; /* [n_head] */
} part;

static part part_new(check_case *k, int32_t n_head)
{
    const part p = {case_alloc(k, n_head, VDIM * sizeof(float)),
                    case_alloc(k, n_head, sizeof(float))};
    return p;
}

/* a <- node(a, b) for every head. */
static void part_merge(part a, part b, int32_t n_head)
{
    for (int32_t h = 0; h < n_head; h++) {
        const merge_weight w = merge_node_weights(a.lse[h], b.lse[h]);
        for (int64_t d = h * (int64_t)VDIM; d < (h + 1) * (int64_t)VDIM; d++) {
            a.out[d] = merge_node_value(w, a.out[d], b.out[d]);
        }
        a.lse[h] = w.lse;
    }
}

static void part_store(const check_case *k, int64_t row, part p)
{
    const attn_args *a = k->args;
    const attn_expect *e = k->expect;
    for (int64_t h = 0; h < a->n_head; h++) {
        memcpy(e->out2 + row * a->out_stride_row + h * a->out_stride_head, p.out + h * VDIM,
               VDIM * sizeof(float));
        e->lse2[row * a->n_head + h] = p.lse[h];
    }
}

/* The lanes of rank r of n, as a rank of its own would get them. */
static void rank_call(const kern_table *t, check_case *k, dev_queue *q, int64_t row, int32_t r,
                      int32_t n, part p)
{
    attn_args a = part_of(k, row, 0, ((const attn_args *)k->args)->n_head);
    const int32_t *list = a.slots;
    const int32_t *count = a.lane_count;
    int32_t *own = case_alloc(k, a.slots_stride, sizeof *own);
    int32_t *own_count = case_alloc(k, 8, sizeof *own_count);
    memset(own_count, 0, 8 * sizeof *own_count);
    int64_t n_own = 0;
    for (int32_t lane = 0; lane < 8; lane++) {
        if (lane % n == r) {
            memcpy(own + n_own, list, (size_t)count[lane] * sizeof *own);
            own_count[lane / n] = count[lane];
            n_own += count[lane];
        }
        list += count[lane];
    }
    a.n_lane = 8 / n;
    a.slots = own;
    a.lane_count = own_count;
    a.out = p.out;
    a.out_stride_head = VDIM;
    a.lse = p.lse;
    attn_call(t, k, q, &a);
    case_sync(q);
}

void attn_tree_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const attn_args *whole = k->args;
    attn_run(t, k, q);
    for (int64_t row = 0; row < whole->n_row; row++) {
        const int32_t n = 2 << ((row + k->index) % 3); /* 2, 4 or 8 ranks */
        part rank[8];
        for (int32_t r = 0; r < n; r++) {
            rank[r] = part_new(k, whole->n_head);
            rank_call(t, k, q, row, r, n, rank[r]);
        }
        for (int32_t half = n / 2; half >= 1; half /= 2) {
            for (int32_t r = 0; r < half; r++) {
                part_merge(rank[r], rank[r + half], whole->n_head);
            }
        }
        part_store(k, row, rank[0]);
    }
}

/* ---- tables as lists ---- */

void attn_listed(check_case *k, int32_t index)
{
    static const attn_shape shapes[] = {
        {8, 8, 2, 2, 2, {700, 701, 64, -1}, 0, 0},
        {33, 4, 16, 1, 3, {130, 0, 257, -1}, 0, 0},
        {3, 2, 1, 2, 1, {4500, 63, -1}, 0, 0},
        {16, 1, 64, 3, 1, {2049, 1, 200, -1}, 0, 0},
    };
    attn_args *a = attn_new(k, &shapes[index % 4], attn_fmt(index + index / 4));
    second_outputs(k);
    if (!k->failed) {
        ((int32_t *)a->table)[0] = -1; /* keys that nobody attends move the segments behind them */
    }
    attn_fill(k);
    attn_finish(k);
}

/* Row by row what the table says, lane by lane. */
static attn_args as_lists(check_case *k)
{
    attn_args a = *(const attn_args *)k->args;
    int32_t most = 1;
    for (int64_t row = 0; row < a.n_row; row++) {
        most = a.kv_len[row] > most ? a.kv_len[row] : most;
    }
    int32_t *slots = case_alloc(k, a.n_row * (int64_t)most, sizeof *slots);
    int32_t *count = case_alloc(k, (int64_t)a.n_row * a.n_lane, sizeof *count);
    for (int64_t row = 0; row < a.n_row && !k->failed; row++) {
        const int32_t *table = a.table + a.row_req[row] * a.table_stride;
        int32_t *to = slots + row * most;
        for (int32_t lane = 0; lane < a.n_lane; lane++) {
            const int32_t *begin = to;
            for (int32_t l = 0; l < a.kv_len[row]; l++) {
                if (l / a.interleave % a.n_lane == lane) {
                    *to++ = (int32_t)orc_slot(table, a.table_width, a.n_slot, l);
                }
            }
            count[row * a.n_lane + lane] = (int32_t)(to - begin);
        }
    }
    a.table = NULL;
    a.slots = slots;
    a.slots_stride = most;
    a.lane_count = count;
    return a;
}

void attn_listed_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const attn_expect *e = k->expect;
    attn_run(t, k, q);
    attn_args a = as_lists(k);
    a.out = e->out2;
    a.lse = e->lse2;
    a.stats = NULL;
    if (!k->failed) {
        attn_call(t, k, q, &a);
    }
}

/* ---- segments by themselves ---- */

void attn_fold(check_case *k, int32_t index)
{
    static const attn_shape shapes[] = {
        {2, 1, 1, 1, 1, {0}, 4300, 0},
        {3, 1, 1, 1, 2, {0}, 2700, 20},
    };
    attn_new(k, &shapes[index % 2], attn_fmt(index + index / 2));
    second_outputs(k);
    attn_fill(k);
    attn_finish(k);
}

void attn_fold_run(const kern_table *t, check_case *k, dev_queue *q)
{
    const attn_args *whole = k->args;
    attn_run(t, k, q);
    for (int64_t row = 0; row < whole->n_row; row++) {
        part sum = {NULL, NULL};
        const int32_t *list = whole->slots + row * whole->slots_stride;
        const int32_t *end = list + whole->lane_count[row];
        while (list < end) {
            /* the next 2048 that are attended, whatever lies between them */
            int32_t n = 0;
            const int32_t *begin = list;
            for (; list < end && n < SEGMENT; list++) {
                n += *list >= 0;
            }
            int32_t *count = case_alloc(k, 1, sizeof *count);
            *count = (int32_t)(list - begin);
            attn_args a = part_of(k, row, 0, whole->n_head);
            const part p = part_new(k, whole->n_head);
            a.slots = begin;
            a.lane_count = count;
            a.out = p.out;
            a.out_stride_head = VDIM;
            a.lse = p.lse;
            attn_call(t, k, q, &a);
            case_sync(q);
            if (sum.out == NULL) {
                sum = p;
            } else {
                part_merge(sum, p, whole->n_head);
            }
        }
        part_store(k, row, sum);
    }
}
