/* fake_cuda.c - see fake_cuda.h. */
#include "unit/check/fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "check/roof_cuda.h"
#include "kern/cuda/cuda.h"
#include "num/fmt.h"
#include "unit/comm/fake_ipc.h"

fake_cuda fake;

/* ---- memory ---- */

static void *fake_alloc(size_t bytes)
{
    if (fake.full > 0 && bytes == fake.full) {
        return NULL;
    }
    void *shared = bytes < (size_t)64 << 20 ? fake_ipc_alloc(bytes) : NULL;
    void *p = shared != NULL || bytes >= (size_t)8 << 30 ? shared : aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (p != NULL) {
        fake.n_live++;
        memset(p, 0xA5, bytes < 1 << 20 ? bytes : 1 << 20);
    }
    return p;
}

static void fake_free(void *p)
{
    fake.n_live -= p != NULL;
    if (!fake_ipc_free(p)) {
        free(p);
    }
}

static void fake_copy(void *dst, const void *src, size_t bytes)
{
    if (bytes > 0) {
        memcpy(dst, src, bytes);
    }
}

/* What is only there to be large is not touched. */
static void fake_fill(void *dst, int byte, size_t bytes)
{
    if (bytes > 0 && bytes < (size_t)64 << 20) {
        memset(dst, byte, bytes);
    }
}

const dev_place dev_cuda = {"cuda",    fake_alloc, fake_free,     fake_copy,
                            fake_copy, fake_fill,  dev_queue_sync};

void *dev_cuda_alloc_shared(size_t bytes)
{
    fake.shared = fake_alloc(bytes);
    return fake.shared;
}

void dev_cuda_free_shared(void *p)
{
    fake.shared = fake.shared == p ? NULL : fake.shared;
    fake_free(p);
}

/* ---- device, queue, events, graphs ---- */

int dev_cuda_built(void)
{
    return 1;
}

kvs_status dev_cuda_open(int32_t index, dev_cuda_info *info, kvs_error *err)
{
    if (fake.absent || index != 0) {
        return err_set(err, KVS_NODEV, "no CUDA device here");
    }
    if (info != NULL) {
        memset(info, 0, sizeof *info);
        info->n_device = 1;
        info->n_sm = 8;
        info->l2_bytes = 1 << 16;
        memset(info->uuid, 0x40 + fake.device, sizeof info->uuid);
        snprintf(info->name, sizeof info->name, "fake");
    }
    return KVS_OK;
}

kvs_status dev_cuda_use(int32_t index, kvs_error *err)
{
    return dev_cuda_open(index, NULL, err);
}

kvs_status dev_cuda_reach(int32_t from, int32_t to, kvs_error *err)
{
    (void)to;
    return dev_cuda_open(from, NULL, err);
}

kvs_status dev_queue_open_cuda(dev_queue *q, kvs_error *err)
{
    (void)err;
    dev_queue_init(q, NULL);
    q->stream = &fake;
    q->n_sm = 8;
    fake.n_open++;
    return KVS_OK;
}

void dev_queue_close(dev_queue *q)
{
    fake.n_open -= q->stream != NULL;
    q->stream = NULL;
}

void dev_queue_sync(dev_queue *q)
{
    (void)q;
    if (fake.on_sync != NULL) {
        fake.on_sync();
    }
}

int dev_queue_is_done(dev_queue *q)
{
    (void)q;
    return 1;
}

void dev_queue_fail_cuda(dev_queue *q, int cuda_error, const char *what)
{
    if (cuda_error != 0) {
        dev_queue_fail(q, KVS_DEVICE, what);
    }
}

void dev_queue_copy(dev_queue *q, void *dst, const void *src, size_t bytes)
{
    (void)q;
    fake_copy(dst, src, bytes < (size_t)64 << 20 ? bytes : 0);
}

void dev_queue_fill(dev_queue *q, void *dst, int byte, size_t bytes)
{
    (void)q;
    fake_fill(dst, byte, bytes);
}

kvs_status dev_event_open(dev_event *e, kvs_error *err)
{
    (void)err;
    e->event = &fake;
    fake.n_open++;
    return KVS_OK;
}

void dev_event_close(dev_event *e)
{
    fake.n_open -= e->event != NULL;
    e->event = NULL;
}

void dev_event_record(dev_event *e, dev_queue *q)
{
    (void)e;
    (void)q;
}

double dev_event_elapsed_us(const dev_event *from, const dev_event *to)
{
    (void)from;
    (void)to;
    return 10.0;
}

/* What a graph holds: calls of kernels, each with the args that it was launched with. */
enum { MAX_CALL = 4096 };
typedef struct graph_calls {
    int32_t n;
    struct {
        fake_call fn;
        void *args;
    } call[MAX_CALL];
} graph_calls;

static graph_calls *g_record; /* not NULL: calls are recorded */

int fake_recorded(fake_call fn, const void *args, size_t bytes)
{
    if (g_record == NULL) {
        return 0;
    }
    if (g_record->n < MAX_CALL) {
        void *copy = malloc(bytes);
        memcpy(copy, args, bytes);
        g_record->call[g_record->n].fn = fn;
        g_record->call[g_record->n].args = copy;
    }
    g_record->n++;
    return 1;
}

static int recorded(fake_call fn, const void *args, size_t bytes)
{
    return fake_recorded(fn, args, bytes);
}

static void drop_calls(graph_calls *c)
{
    for (int32_t i = 0; i < c->n && i < MAX_CALL; i++) {
        free(c->call[i].args);
    }
    c->n = 0;
}

kvs_status dev_capture_begin(dev_queue *q, kvs_error *err)
{
    (void)q;
    (void)err;
    g_record = malloc(sizeof *g_record);
    g_record->n = 0;
    return KVS_OK;
}

kvs_status dev_capture_end(dev_queue *q, dev_graph *g, kvs_error *err)
{
    graph_calls *c = g_record;
    (void)q;
    g_record = NULL;
    if (c->n > MAX_CALL) {
        const int32_t n = c->n;
        drop_calls(c);
        free(c);
        return err_set(err, KVS_LIMIT, "a graph of %d calls", n);
    }
    *g = (dev_graph){c, 1};
    fake.n_open++;
    return KVS_OK;
}

void dev_graph_launch(const dev_graph *g, dev_queue *q)
{
    graph_calls *c = g->exec;
    for (int32_t i = 0; i < c->n; i++) {
        c->call[i].fn(c->call[i].args, q);
    }
    if (!fake.replays) {
        drop_calls(c); /* the bench launches many times and looks at nothing */
    }
    fake.n_graph++;
}

void dev_graph_free(dev_graph *g)
{
    if (g->exec != NULL) {
        drop_calls(g->exec);
        free(g->exec);
        fake.n_open--;
    }
    g->exec = NULL;
}

void roof_cuda_read(const void *p, int64_t n_bytes, uint32_t *sink, dev_queue *q)
{
    (void)p;
    (void)n_bytes;
    (void)sink;
    (void)q;
}

void roof_cuda_gather(const uint8_t *kv, int64_t row_bytes, const int32_t *slots, int64_t stride,
                      const int32_t *count, int32_t n_lane, int32_t n_row, uint32_t *sink, dev_queue *q)
{
    (void)q;
    uint32_t sum = 0;
    for (int32_t row = 0; row < n_row; row++) {
        int32_t n = 0;
        for (int32_t i = 0; i < n_lane; i++) {
            n += count[row * n_lane + i];
        }
        for (int32_t i = 0; i < n; i++) {
            const int64_t slot = slots[row * stride + i];
            sum += slot >= 0 ? kv[slot * row_bytes] : 0u;
        }
    }
    *sink = sum;
}

void roof_cuda_products(double flop, float *sink, dev_queue *q)
{
    (void)q;
    *sink = (float)flop;
}

/* ---- kernels ---- */

static const kern_table *ref(void)
{
    static kern_table t;
    if (t.attn == NULL) {
        kern_init(&t, 0, NULL, NULL);
    }
    return &t;
}

static const char *aligned(const void *const *p, const int64_t *bytes, int n)
{
    int ok = 1;
    for (int i = 0; i < n; i++) {
        ok &= ((uintptr_t)p[i] & 15) == 0 && bytes[i] % 16 == 0;
    }
    fake.n_refused += !ok;
    return ok ? NULL : "not at multiples of 16 bytes";
}

static const char *attn_refuses(const void *args)
{
    const attn_args *a = args;
    if (a->fmt != KVS_KV_FP8_DS_MLA && a->fmt != KVS_KV_BF16) {
        return "attn: rows of fp8_ds_mla or bf16 only";
    }
    const void *p[] = {a->q, a->q, a->kv, a->kv, a->out, a->out};
    const int64_t n[] = {2 * a->q_stride_row, 2 * a->q_stride_head, a->page_stride,
                         a->row_stride,       4 * a->out_stride_row, 4 * a->out_stride_head};
    return aligned(p, n, 6);
}

static const char *kv_write_refuses(const void *args)
{
    const kv_write_args *a = args;
    const int64_t size = a->in_type == KVS_DTYPE_F32 ? 4 : 2;
    const void *p[] = {a->latent, a->rope, a->kv, a->kv};
    const int64_t n[] = {size * a->latent_stride, size * a->rope_stride, a->page_stride,
                         a->row_stride};
    return aligned(p, n, 4);
}

static const char *gather_refuses(const void *args)
{
    const gather_args *a = args;
    const void *p[] = {a->kv, a->kv, a->out};
    const int64_t n[] = {a->page_stride, a->row_stride,
                         (a->out_type == KVS_DTYPE_F32 ? 4 : 2) * a->out_stride};
    return aligned(p, n, 3);
}

static const char *index_write_refuses(const void *args)
{
    const index_write_args *a = args;
    const void *p[] = {a->key, a->keys};
    const int64_t n[] = {(a->in_type == KVS_DTYPE_F32 ? 4 : 2) * a->key_stride, a->page_stride};
    return aligned(p, n, 2);
}

static const char *quant_q_refuses(const void *args)
{
    const quant_q_args *a = args;
    const int64_t size = a->q_type == KVS_DTYPE_F32 ? 4 : 2;
    const void *p[] = {a->q, a->q_out};
    const int64_t n[] = {size * a->q_stride_row, size * a->q_stride_head};
    return aligned(p, n, 2);
}

static const char *merge_refuses(const void *args)
{
    const merge_args *a = args;
    const int64_t size = a->out_type == KVS_DTYPE_BF16 ? 2 : 4;
    const void *p[] = {a->out, a->out, a->out_in[0], a->out_in[a->n_part - 1]};
    const int64_t n[] = {size * a->out_stride_row, size * a->out_stride_head, 4 * a->in_stride_row,
                         4 * a->in_stride_head};
    return aligned(p, n, 4);
}

static const char *index_score_refuses(const void *args)
{
    const index_score_args *a = args;
    const void *p[] = {a->q, a->keys};
    const int64_t n[] = {0, a->page_stride};
    return aligned(p, n, 2);
}

static void attn_bf16(const attn_args *a, dev_queue *q)
{
    attn_args f32 = *a;
    f32.out = malloc((size_t)(a->n_row * a->out_stride_row) * sizeof(float));
    f32.out_type = KVS_DTYPE_F32;
    ref()->attn(&f32, q);
    for (int64_t i = 0; i < (int64_t)a->n_row * a->n_head; i++) {
        const int64_t at = i / a->n_head * a->out_stride_row + i % a->n_head * a->out_stride_head;
        for (int64_t d = at; d < at + 512; d++) {
            const uint16_t rounded = bf16_from_f32(f32.out[d]).bits;
            ((uint16_t *)(void *)a->out)[d] = fake.cuts ? (uint16_t)(f32_bits(f32.out[d]) >> 16) : rounded;
        }
    }
    free(f32.out);
}

static void attn_fake(const attn_args *a, dev_queue *q);

static void attn_call(const void *args, dev_queue *q)
{
    attn_fake(args, q);
}

static void attn_fake(const attn_args *a, dev_queue *q)
{
    if (recorded(attn_call, a, sizeof *a)) {
        return;
    }
    if (a->out_type == KVS_DTYPE_BF16) {
        attn_bf16(a, q);
        return;
    }
    ref()->attn(a, q);
    if (fake.wrong && a->n_row > 0) {
        a->out[0] += 0.5f;
    }
}

static void kv_write_fake(const kv_write_args *a, dev_queue *q);

static void kv_write_call(const void *args, dev_queue *q)
{
    kv_write_fake(args, q);
}

static void kv_write_fake(const kv_write_args *a, dev_queue *q)
{
    if (recorded(kv_write_call, a, sizeof *a)) {
        return;
    }
    ref()->kv_write(a, q);
    if (fake.wrong && a->n_tok > 0 && a->slot[0] >= 0 && a->slot[0] < a->n_slot) {
        a->kv[a->slot[0] / 64 * a->page_stride + a->slot[0] % 64 * a->row_stride] ^= 1;
    }
}

static void index_select_fake(const index_select_args *a, dev_queue *q);

static void index_select_call(const void *args, dev_queue *q)
{
    index_select_fake(args, q);
}

static void index_select_fake(const index_select_args *a, dev_queue *q)
{
    if (fake.peeks && a->in.n_row > 0 && a->in.kv_len[0] > 1 << 20) {
        return;
    }
    if (recorded(index_select_call, a, sizeof *a)) {
        return;
    }
    ref()->index_select(a, q);
    const int wrong = fake.wrong || (fake.narrow && q->n_sm < 8);
    if (wrong && a->in.n_row > 0 && a->list_count[0] > 0) {
        a->list_id[0]++;
    }
}

static void topk_fake(const topk_args *a, dev_queue *q);

static void topk_call(const void *args, dev_queue *q)
{
    topk_fake(args, q);
}

static void topk_fake(const topk_args *a, dev_queue *q)
{
    if (recorded(topk_call, a, sizeof *a)) {
        return;
    }
    ref()->topk(a, q);
    if (fake.wrong && a->n_row > 0 && a->list_count[0] > 0) {
        a->list_id[0]++;
    }
}

static void merge_fake(const merge_args *a, dev_queue *q);

static void merge_call(const void *args, dev_queue *q)
{
    merge_fake(args, q);
}

static void merge_fake(const merge_args *a, dev_queue *q)
{
    if (recorded(merge_call, a, sizeof *a)) {
        return;
    }
    ref()->merge(a, q);
    if (fake.dies) {
        dev_queue_fail_cuda(q, 700, "merge_kernel: an illegal address");
    }
}

/* Functions of their own: the reference's would be called inherited. */
static void gather_fake(const gather_args *a, dev_queue *q);

static void gather_call(const void *args, dev_queue *q)
{
    gather_fake(args, q);
}

static void gather_fake(const gather_args *a, dev_queue *q)
{
    if (recorded(gather_call, a, sizeof *a)) {
        return;
    }
    ref()->gather(a, q);
}

static void index_write_fake(const index_write_args *a, dev_queue *q);

static void index_write_call(const void *args, dev_queue *q)
{
    index_write_fake(args, q);
}

static void index_write_fake(const index_write_args *a, dev_queue *q)
{
    if (recorded(index_write_call, a, sizeof *a)) {
        return;
    }
    ref()->index_write(a, q);
}

static void quant_q_fake(const quant_q_args *a, dev_queue *q);

static void quant_q_call(const void *args, dev_queue *q)
{
    quant_q_fake(args, q);
}

static void quant_q_fake(const quant_q_args *a, dev_queue *q)
{
    if (recorded(quant_q_call, a, sizeof *a)) {
        return;
    }
    ref()->quant_q(a, q);
}

static void index_score_fake(const index_score_args *a, dev_queue *q);

static void index_score_call(const void *args, dev_queue *q)
{
    index_score_fake(args, q);
}

static void index_score_fake(const index_score_args *a, dev_queue *q)
{
    if (recorded(index_score_call, a, sizeof *a)) {
        return;
    }
    ref()->index_score(a, q);
}

static void mha_fake(const mha_args *a, dev_queue *q);

static void mha_call(const void *args, dev_queue *q)
{
    mha_fake(args, q);
}

static void mha_fake(const mha_args *a, dev_queue *q)
{
    if (recorded(mha_call, a, sizeof *a)) {
        return;
    }
    ref()->mha(a, q);
    if (fake.wrong && a->n_row > 0) {
        a->out[0] += 0.5f;
    }
}

static void apply_mha(kern_table *t)
{
    t->mha = mha_fake;
    t->mha_scratch = ref()->mha_scratch;
}

static void gemm_fake(const gemm_args *a, dev_queue *q);

static void gemm_again(const void *args, dev_queue *q)
{
    gemm_fake(args, q);
}

static void gemm_fake(const gemm_args *a, dev_queue *q)
{
    if (recorded(gemm_again, a, sizeof *a)) {
        return;
    }
    ref()->gemm(a, q);
    if (fake.wrong && a->n_row > 0) {
        a->y[0] += 0.5f;
    }
}

static void apply_gemm(kern_table *t)
{
    t->gemm = gemm_fake;
    t->gemm_scratch = ref()->gemm_scratch;
}

/* The lists are an array of whoever calls: kept with the call. */
typedef struct topk_merge_copy {
    topk_merge_args a;
    const float *score[8];
    const int32_t *id[8];
    const int32_t *count[8];
} topk_merge_copy;

static void topk_merge_fake(const topk_merge_args *a, dev_queue *q);

static void topk_merge_call(const void *args, dev_queue *q)
{
    topk_merge_copy c = *(const topk_merge_copy *)args;
    c.a.cand_score = c.score;
    c.a.cand_id = c.id;
    c.a.cand_count = c.count;
    topk_merge_fake(&c.a, q);
}

static void topk_merge_fake(const topk_merge_args *a, dev_queue *q)
{
    topk_merge_copy c;
    memset(&c, 0, sizeof c);
    c.a = *a;
    memcpy(c.score, a->cand_score, (size_t)a->n_list * sizeof *c.score);
    memcpy(c.id, a->cand_id, (size_t)a->n_list * sizeof *c.id);
    memcpy(c.count, a->cand_count, (size_t)a->n_list * sizeof *c.count);
    if (recorded(topk_merge_call, &c, sizeof c)) {
        return;
    }
    ref()->topk_merge(a, q);
    if (fake.cut && a->n_row > 0) {
        a->cut_score[a->n_row - 1] += 1.0f;
    }
}

static void localise_fake(const localise_args *a, dev_queue *q);

static void localise_call(const void *args, dev_queue *q)
{
    localise_fake(args, q);
}

static void localise_fake(const localise_args *a, dev_queue *q)
{
    if (recorded(localise_call, a, sizeof *a)) {
        return;
    }
    ref()->localise(a, q);
}

static void apply_topk_merge(kern_table *t)
{
    t->topk_merge = topk_merge_fake;
    t->topk_merge_scratch = ref()->topk_merge_scratch;
}

static void apply_localise(kern_table *t)
{
    t->localise = localise_fake;
    t->localise_scratch = ref()->localise_scratch;
}

static void apply_attn(kern_table *t)
{
    t->attn = attn_fake;
    t->attn_scratch = ref()->attn_scratch;
}

static void apply_kv_write(kern_table *t)
{
    t->kv_write = kv_write_fake;
}

static void apply_gather(kern_table *t)
{
    t->gather = gather_fake;
}

static void apply_index_write(kern_table *t)
{
    t->index_write = index_write_fake;
}

static void apply_quant_q(kern_table *t)
{
    t->quant_q = quant_q_fake;
}

static void apply_merge(kern_table *t)
{
    t->merge = merge_fake;
}

static void apply_index_score(kern_table *t)
{
    t->index_score = index_score_fake;
    t->index_score_scratch = ref()->index_score_scratch;
}

static void apply_index_select(kern_table *t)
{
    t->index_select = index_select_fake;
    t->index_select_scratch = ref()->index_select_scratch;
}

static void apply_topk(kern_table *t)
{
    t->topk = topk_fake;
    t->topk_scratch = ref()->topk_scratch;
}

static const kern_variant g_variants[] = {
    {KERN_OP_attn, "sm90", 0, apply_attn, KERN_CUDA, KERN_FREE_ORDER, attn_refuses, 189, 0.33f, 0},
    {KERN_OP_kv_write, "sm90", 0, apply_kv_write, KERN_CUDA, 0, kv_write_refuses, 0, 0, 0},
    {KERN_OP_gather, "sm90", 0, apply_gather, KERN_CUDA, 0, gather_refuses, 0, 0, 0},
    {KERN_OP_index_write, "sm90", 0, apply_index_write, KERN_CUDA, 0, index_write_refuses, 0, 0, 0},
    {KERN_OP_quant_q, "sm90", 0, apply_quant_q, KERN_CUDA, 0, quant_q_refuses, 0, 0, 0},
    {KERN_OP_merge, "sm90", 0, apply_merge, KERN_CUDA, 0, merge_refuses, 0, 0, 0},
    {KERN_OP_index_score, "sm90", 0, apply_index_score, KERN_CUDA, 0, index_score_refuses, 0, 0, 0},
    {KERN_OP_index_select, "sm90", 0, apply_index_select, KERN_CUDA, 0, NULL, 0, 0, 0},
    {KERN_OP_topk, "sm90", 0, apply_topk, KERN_CUDA, 0, NULL, 0, 0, 0},
    {KERN_OP_mha, "sm90", 0, apply_mha, KERN_CUDA, 0, NULL, 63, 0.34f, 0},
    {KERN_OP_gemm, "sm90", 0, apply_gemm, KERN_CUDA, 0, NULL, 0, 0.34f, 0},
    {KERN_OP_topk_merge, "sm90", 0, apply_topk_merge, KERN_CUDA, 0, NULL, 0, 0, 0},
    {KERN_OP_localise, "sm90", 0, apply_localise, KERN_CUDA, 0, NULL, 0, 0, 0},
};

const kern_variant *cuda_variants(int32_t *n)
{
    *n = sizeof g_variants / sizeof *g_variants;
    return g_variants;
}
