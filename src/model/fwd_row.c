/* model/fwd_row.c - what happens to rows between the ops: casts, gathers, sums, rope tables, Hadamard.
 *
 * Every loop is over rows (or vectors) that know nothing of each other, shared among the rank's workers; no
 * value depends on how they are shared. There is no fused multiply-add here: a product is rounded, then added.
 */
#include <math.h>
#include <string.h>
#include "base/pool.h"
#include "model/fwd_impl.h"
#include "num/trig.h"

enum { BLOCK_VALUES = 16384, CHUNK_VALUES = 4096 };

typedef struct job {
    void (*fn)(const void *args, int64_t row);
    const void *args;
    int64_t n_row, block;
} job;

static void run_block(void *ctx, int64_t task, int worker)
{
    (void)worker;
    const job *j = ctx;
    const int64_t first = task * j->block;
    const int64_t last = first + j->block < j->n_row ? first + j->block : j->n_row;
    for (int64_t row = first; row < last; row++)
        j->fn(j->args, row);
}

static void over_rows(fwd *f, void (*fn)(const void *args, int64_t row), const void *args, int64_t n_row,
                      int64_t width)
{
    job j = {fn, args, n_row, 1 + BLOCK_VALUES / (width < 1 ? 1 : width)};
    pool_run(f->d->workers, run_block, &j, (n_row + j.block - 1) / j.block);
}

static void cast_row(const float *from, void *to, int64_t at, int32_t n, int32_t type)
{
    if (type == KVS_DTYPE_F32) {
        memcpy((float *)to + at, from, (size_t)n * sizeof *from);
        return;
    }
    bf16 *y = (bf16 *)to + at;
    for (int32_t i = 0; i < n; i++)
        y[i] = bf16_from_f32(from[i]);
}

/* ---- casts ---- */

typedef struct cast_args {
    int32_t n_head, n, type;
    const float *from;
    int64_t from_row, from_head;
    void *to;
    int64_t to_row, to_head;
} cast_args;

static void cast_heads_row(const void *args, int64_t row)
{
    const cast_args *a = args;
    for (int64_t h = 0; h < a->n_head; h++)
        cast_row(a->from + row * a->from_row + h * a->from_head, a->to, row * a->to_row + h * a->to_head,
                 a->n, a->type);
}

void fwd_cast_heads(fwd *f, int32_t n_row, int32_t n_head, int32_t n, const float *from,
                    int64_t from_row, int64_t from_head, void *to, int64_t to_row, int64_t to_head,
                    int32_t type)
{
    const cast_args a = {n_head, n, type, from, from_row, from_head, to, to_row, to_head};
    over_rows(f, cast_heads_row, &a, n_row, (int64_t)n_head * n);
}

void fwd_cast(fwd *f, int32_t n_row, int32_t n, const float *from, int64_t from_stride, void *to,
              int64_t to_stride, int32_t type)
{
    fwd_cast_heads(f, n_row, 1, n, from, from_stride, 0, to, to_stride, 0, type);
}

typedef struct latent_args {
    const void *rows;
    void *to;
    int32_t type, to_type;
} latent_args;

static void latent_row(const void *args, int64_t row)
{
    const latent_args *a = args;
    const int64_t from = row * KVS_ROW_DIM;
    const int64_t at = row * KVS_LATENT_DIM;
    if (a->type == KVS_DTYPE_F32) {
        cast_row((const float *)a->rows + from, a->to, at, KVS_LATENT_DIM, a->to_type);
        return;
    }
    const bf16 *x = (const bf16 *)a->rows + from;
    if (a->to_type == KVS_DTYPE_BF16) {
        memcpy((bf16 *)a->to + at, x, KVS_LATENT_DIM * sizeof *x);
        return;
    }
    float *y = (float *)a->to + at;
    for (int32_t i = 0; i < KVS_LATENT_DIM; i++)
        y[i] = bf16_to_f32(x[i]);
}

void fwd_latents(fwd *f, int32_t n_row, const void *rows, int32_t type, const gemm_mat *w, void *to)
{
    const latent_args a = {rows, to, type, (int32_t)fwd_operand(w)};
    over_rows(f, latent_row, &a, n_row, KVS_LATENT_DIM);
}

/* ---- sums ---- */

typedef struct add_args {
    float *x;
    const float *y;
    int64_t n;
} add_args;

static void add_chunk(const void *args, int64_t chunk)
{
    const add_args *a = args;
    const int64_t first = chunk * CHUNK_VALUES;
    const int64_t last = first + CHUNK_VALUES < a->n ? first + CHUNK_VALUES : a->n;
    for (int64_t i = first; i < last; i++)
        a->x[i] += a->y[i];
}

void fwd_add(fwd *f, int64_t n, float *x, const float *y)
{
    const add_args a = {x, y, n};
    over_rows(f, add_chunk, &a, (n + CHUNK_VALUES - 1) / CHUNK_VALUES, CHUNK_VALUES);
}

void fwd_zero(float *x, int64_t n)
{
    memset(x, 0, (size_t)n * sizeof *x);
}

/* ---- embedding ---- */

typedef struct embed_args {
    const gemm_mat *m;
    const int32_t *token;
    float *to;
} embed_args;

static void embed_row(const void *args, int64_t row)
{
    const embed_args *a = args;
    const gemm_mat *m = a->m;
    const int64_t token = a->token[row];
    const int64_t at = token * m->stride;
    float *y = a->to + row * m->n_in;
    if (m->type == GEMM_F32) {
        memcpy(y, (const float *)m->data + at, (size_t)m->n_in * sizeof *y);
    } else if (m->type == GEMM_BF16) {
        const bf16 *x = (const bf16 *)m->data + at;
        for (int32_t i = 0; i < m->n_in; i++)
            y[i] = bf16_to_f32(x[i]);
    } else {
        const uint8_t *x = (const uint8_t *)m->data + at;
        const float *scale = m->scale + (m->row0 + token) / GEMM_BLOCK * m->scale_stride;
        for (int32_t i = 0; i < m->n_in; i++)
            y[i] = e4m3_dequant(x[i], scale[(m->col0 + i) / GEMM_BLOCK]);
    }
}

void fwd_embed(fwd *f, int32_t n_row, const int32_t *token, float *to)
{
    const embed_args a = {&f->w->embed, token, to};
    over_rows(f, embed_row, &a, n_row, f->h->hidden);
}

/* ---- rope tables ---- */

static void angle_row(const void *args, int64_t row)
{
    const fwd *f = args;
    /* positions are below 2^31, angles f32 products as the models were trained with */
    const float pos = (float)(f->d->plan.bound[row] - 1);
    for (int32_t i = 0; i < FWD_HALF_ROPE; i++) {
        const float angle = pos * f->inv_freq[i];
        double s = 0.0;
        double c = 0.0;
        trig_sincos((double)angle, &s, &c);
        f->b.cos[row * FWD_HALF_ROPE + i] = (float)c;
        f->b.sin[row * FWD_HALF_ROPE + i] = (float)s;
    }
}

void fwd_angles(fwd *f)
{
    over_rows(f, angle_row, f, f->d->plan.n_row, 64 * (int64_t)FWD_HALF_ROPE);
}

/* ---- Hadamard ---- */

static void hadamard_vector(const void *args, int64_t i)
{
    float *const *x = args;
    float *v = *x + i * KVS_INDEX_DIM;
    for (int32_t half = 1; half < KVS_INDEX_DIM; half *= 2) {
        for (int32_t from = 0; from < KVS_INDEX_DIM; from += 2 * half) {
            for (int32_t j = from; j < from + half; j++) {
                const float a = v[j];
                const float b = v[j + half];
                v[j] = a + b;
                v[j + half] = a - b;
            }
        }
    }
    for (int32_t j = 0; j < KVS_INDEX_DIM; j++)
        v[j] *= 0.08838834764831845f; /* 128^-1/2 */
}

void fwd_hadamard(fwd *f, int64_t n, float *x)
{
    over_rows(f, hadamard_vector, &x, n, 8 * (int64_t)KVS_INDEX_DIM);
}

/* ---- the rows of an expert ---- */

typedef struct list_args {
    const int32_t *list;
    const float *weight;
    int32_t width;
    fwd_op in;
    bf16 *to_b;
    float *to_f;
    const float *y;
    float *sum;
} list_args;

static void gather_row(const void *args, int64_t i)
{
    const list_args *a = args;
    const int64_t from = a->list[i] * a->in.stride;
    if (a->to_b)
        memcpy(a->to_b + i * a->width, a->in.b + from, (size_t)a->width * sizeof *a->to_b);
    if (a->to_f)
        memcpy(a->to_f + i * a->width, a->in.f + from, (size_t)a->width * sizeof *a->to_f);
}

void fwd_gather(fwd *f, int32_t n, const int32_t *list, int32_t width, fwd_op in, bf16 *to_b, float *to_f)
{
    const list_args a = {.list = list, .width = width, .in = in, .to_b = to_b, .to_f = to_f};
    over_rows(f, gather_row, &a, n, width);
}

static void scatter_row(const void *args, int64_t i)
{
    const list_args *a = args;
    const float *y = a->y + i * a->width;
    float *sum = a->sum + (int64_t)a->list[i] * a->width;
    const float w = a->weight[i];
    for (int32_t j = 0; j < a->width; j++)
        sum[j] += w * y[j];
}

void fwd_scatter_add(fwd *f, int32_t n, const int32_t *list, const float *weight, int32_t width,
                     const float *y, float *sum)
{
    const list_args a = {.list = list, .weight = weight, .width = width, .y = y, .sum = sum};
    over_rows(f, scatter_row, &a, n, width);
}
