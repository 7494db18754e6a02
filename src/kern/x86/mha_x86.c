/* kern/x86/mha_x86.c - multi-head attention, block by block: pieces of (head, rows) shared among the workers. The
 * arithmetic is in the instruction sets' kernels (mha_x86.h).
 *
 * A piece goes through the whole block, so that pieces know nothing of each other and any worker may take any.
 * Pieces of one head follow each other: they read the same keys. Scratch: a state per worker.
 */
#include "kern/x86/mha_x86.h"

#include "base/pool.h"

typedef struct run {
    const mha_args *a;
    const mha_isa *isa;
    mha_work *work;  /* [n_worker] */
    int32_t n_piece; /* of a head */
    int32_t key0;    /* keys of the call before the block */
} run;

static size_t take(size_t *at, size_t cells)
{
    const size_t here = *at;
    *at += (cells * sizeof(float) + 63) / 64 * 64;
    return here;
}

static int32_t up(int32_t n, int32_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Cells of a query or key, and of a row of values: those of f32, which bf16 stays below. */
static int32_t steps_of(const mha_args *a, int32_t bf16)
{
    const int32_t n = a->nope + KVS_ROPE_DIM;
    return bf16 ? up(n, 16) / 2 : up(n, 8);
}

static int32_t values_of(const mha_args *a)
{
    return up(a->v_dim, 16);
}

/* Lays a worker's arrays out behind base; returns their bytes. */
static size_t lay(mha_work *w, const mha_args *a, uint8_t *base)
{
    const size_t step = (size_t)steps_of(a, 0);
    const size_t value = (size_t)values_of(a);
    const size_t scores = (size_t)MHA_TILE * 2 * MHA_LANES_MAX;
    size_t n = 0;
    const size_t at[] = {take(&n, MHA_COLS * step), take(&n, MHA_TILE * step),
                         take(&n, MHA_TILE * value), take(&n, scores),
                         take(&n, scores), take(&n, MHA_COLS * value),
                         take(&n, MHA_COLS), take(&n, MHA_COLS),
                         take(&n, 8 * step), take(&n, MHA_COLS)};
    if (base != NULL) {
        float **const to[] = {&w->q, &w->k, &w->v, &w->s, &w->p, &w->o, &w->m, &w->l, &w->turn};
        for (size_t i = 0; i < sizeof to / sizeof *to; i++) {
            *to[i] = (float *)(void *)(base + at[i]);
        }
        w->len = (int32_t *)(void *)(base + at[sizeof to / sizeof *to]);
    }
    return n;
}

static size_t workers_of(const dev_queue *q)
{
    return (size_t)(q->n_worker > 0 ? q->n_worker : 1);
}

size_t mha_x86_scratch(const mha_args *a, const dev_queue *q)
{
    const size_t n = workers_of(q);
    size_t at = 0;
    take(&at, n * (sizeof(mha_work) / sizeof(float) + 1));
    return at + n * lay(NULL, a, NULL);
}

static void piece_task(void *ctx, int64_t i_task, int i_worker)
{
    const run *r = ctx;
    const mha_args *a = r->a;
    mha_work *w = &r->work[i_worker];
    w->head = (int32_t)(i_task / r->n_piece);
    w->row0 = (int32_t)(i_task % r->n_piece) * MHA_COLS;
    w->n_row = a->n_row - w->row0 < MHA_COLS ? a->n_row - w->row0 : MHA_COLS;
    const int32_t pair = 2 * r->isa->lanes;
    w->n_pair = (w->n_row + pair - 1) / pair;
    int32_t most = 0;
    for (int32_t i = 0; i < w->n_pair * pair; i++) {
        int32_t n = most; /* of a column that is not there: no less than its neighbours */
        if (i < w->n_row) {
            n = a->len[w->row0 + i];
            n = n < r->key0 ? 0 : n - r->key0 > a->n_key ? a->n_key : n - r->key0;
            most = n > most ? n : most;
        }
        w->len[i] = n;
    }
    r->isa->run(w);
}

/* The part of `all` that is the block of keys from key0 on. */
static void block_set(mha_args *block, const mha_args *all, int64_t key0)
{
    const int64_t elem = all->type == KVS_DTYPE_F32 ? 4 : 2;
    const int64_t left = all->n_key - key0;
    block->n_key = (int32_t)(left < MHA_BLOCK ? left : MHA_BLOCK);
    block->kv = all->kv + key0 * all->kv_stride_key;
    block->rope = (const uint8_t *)all->rope + key0 * all->rope_stride * elem;
    block->first = all->first && key0 == 0;
}

void mha_x86_run(const mha_kernels *k, const mha_args *a, dev_queue *q)
{
    if (a->scratch_bytes < mha_x86_scratch(a, q)) {
        dev_queue_fail(q, KVS_INVALID, "mha: scratch is smaller than mha_scratch says");
        return;
    }
    const size_t n = workers_of(q);
    const mha_isa *isa = a->type == KVS_DTYPE_F32 ? k->f32 : k->other;
    mha_args block = *a;
    run r = {.a = &block, .isa = isa, .work = a->scratch, .n_piece = (a->n_row + MHA_COLS - 1) / MHA_COLS};
    size_t at = 0;
    take(&at, n * (sizeof(mha_work) / sizeof(float) + 1));
    for (size_t i = 0; i < n; i++) {
        mha_work *w = &r.work[i];
        *w = (mha_work){.a = &block, .n_step = steps_of(a, isa->bf16), .n_value = values_of(a)};
        at += lay(w, a, (uint8_t *)a->scratch + at);
    }
    int64_t key0 = 0;
    do { /* once at least: `first` leaves (0, -inf) where there are no keys */
        block_set(&block, a, key0);
        r.key0 = (int32_t)key0;
        pool_run(q->pool, piece_task, &r, (int64_t)r.n_piece * a->n_head);
        key0 += MHA_BLOCK;
    } while (key0 < a->n_key);
    for (size_t i = 0; i < n && a->n_nan != NULL; i++) {
        *a->n_nan += r.work[i].n_nan;
    }
}

static void run_avx2(const mha_args *a, dev_queue *q)
{
    static const mha_kernels k = {&mha_isa_avx2, &mha_isa_avx2};
    mha_x86_run(&k, a, q);
}

static void run_avx512(const mha_args *a, dev_queue *q)
{
    static const mha_kernels k = {&mha_isa_avx512, &mha_isa_avx512};
    mha_x86_run(&k, a, q);
}

static void run_avx512bf16(const mha_args *a, dev_queue *q)
{
    static const mha_kernels k = {&mha_isa_avx512, &mha_isa_avx512bf16};
    mha_x86_run(&k, a, q);
}

void mha_apply_avx2(kern_table *t)
{
    t->mha = run_avx2;
    t->mha_scratch = mha_x86_scratch;
}

void mha_apply_avx512(kern_table *t)
{
    t->mha = run_avx512;
    t->mha_scratch = mha_x86_scratch;
}

void mha_apply_avx512bf16(kern_table *t)
{
    t->mha = run_avx512bf16;
    t->mha_scratch = mha_x86_scratch;
}
