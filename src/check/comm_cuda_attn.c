/* check/comm_cuda_attn.c: attention that sends its results, beside attention whose results the merge sends: the same bits, launch
 * by launch and from a graph. And a rank that sends nothing, or under the number of an earlier exchange, is named. */
#include "check/comm_cuda.h"
#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "check/check.h"
#include "kern/kern.h"

enum {
    DIM = KVS_ROW_DIM,
    VDIM = KVS_LATENT_DIM,
    SLOTS = 512,
    Q_ROWS = 97, /* heads of queries, repeated */
    REPLAYS = 3,
    BUSY_SM = 64, /* a device with fewer multiprocessors is given less to do */
    FEW_HEADS = 2,
    FEW_KEYS = 80,
    TIMEOUT_MS = 5000
};

/* Each is another way of the results out of the kernels. */
typedef struct sent_spec {
    const char *name;
    int32_t det, fmt;
    int32_t local;  /* heads of a rank */
    int32_t n_row;  /* 0: more than there are multiprocessors */
    int32_t keys;   /* most of a row */
    int32_t ragged; /* rows differ in length */
    int32_t tables; /* keys by block tables */
} sent_spec;

static const sent_spec k_spec[] = {
    {"one_launch", 0, KVS_KV_FP8_DS_MLA, 3, 2, 512, 1, 0},
    {"clusters", 0, KVS_KV_FP8_DS_MLA, 2, 1, 8192, 0, 0},
    {"one_launch_many", 0, KVS_KV_FP8_DS_MLA, 16, 7, 1500, 1, 0},
    {"whole_rows", 0, KVS_KV_FP8_DS_MLA, 3, 0, 64, 0, 0},
    {"cut_rows", 0, KVS_KV_FP8_DS_MLA, 3, 0, 300, 1, 0},
    {"cut_rows_many", 0, KVS_KV_FP8_DS_MLA, 16, 0, 700, 1, 0},
    {"lanes", 1, KVS_KV_FP8_DS_MLA, 3, 70, 130, 1, 0},
    {"lanes_bf16", 1, KVS_KV_BF16, 3, 3, 90, 1, 0},
    {"tables", 1, KVS_KV_BF16, 3, 70, 130, 1, 1},
};
enum { N_SPEC = sizeof k_spec / sizeof *k_spec };

typedef struct sent_case {
    const sent_spec *spec;
    int32_t n_row, local, keys;
    kern_table kern;
    attn_args attn[WIRE_MAX_RANK];
    wire send[WIRE_MAX_RANK]; /* what attention is given */
    exchange_merge_args merge[WIRE_MAX_RANK];
    int32_t mute; /* a rank that sends nothing; -1: all do */
    uint8_t *want[WIRE_MAX_RANK]; /* results and LSE of the merge that sends */
} sent_case;

static size_t out_bytes(const sent_case *c)
{
    return (size_t)c->n_row * (size_t)c->local * VDIM * sizeof(float);
}

static size_t lse_bytes(const sent_case *c)
{
    return (size_t)c->n_row * (size_t)c->local * sizeof(float);
}

/* ---- inputs ------------------------------------------------------------------------------------ */

static kvs_status make_rows(sent_case *c, gpu_world *w, int32_t r, rng *g, kvs_error *err)
{
    attn_args *a = &c->attn[r];
    const size_t row = (size_t)orc_row_bytes(c->spec->fmt);
    void *p = NULL;
    TRY(gpu_alloc(w, r, SLOTS * row, &p, err));
    uint8_t *rows = mem_alloc(SLOTS * row, 0);
    if (rows == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for rows of the check");
    }
    for (size_t i = 0; i < SLOTS; i++) {
        gen_row(g, c->spec->fmt, 1.0f, rows + i * row, 1.0f);
    }
    gpu_put(w, r, p, rows, SLOTS * row);
    mem_free(rows);
    a->kv = p;
    a->fmt = c->spec->fmt;
    a->row_stride = (int64_t)row;
    a->page_stride = (int64_t)row * KVS_PAGE_TOKENS;
    a->n_slot = SLOTS;
    a->k_scale = 1.0f;
    return KVS_OK;
}

/* Lists of the rank's own, of which one in three has nothing, if they are ragged; ids of none among the others. */
static kvs_status make_lists(sent_case *c, gpu_world *w, int32_t r, rng *g, kvs_error *err)
{
    attn_args *a = &c->attn[r];
    const int32_t keys = c->keys;
    const size_t n = (size_t)c->n_row * (size_t)keys;
    const size_t counts = (size_t)c->n_row * (size_t)a->n_lane;
    void *p = NULL;
    int32_t *id = mem_calloc(n + counts, sizeof *id);
    if (id == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for lists of the check");
    }
    for (size_t i = 0; i < n; i++) {
        id[i] = gen_pick(g, 16) == 0 ? -1 : gen_pick(g, SLOTS);
    }
    for (size_t i = 0; i < counts; i++) {
        const int32_t most = keys / a->n_lane;
        id[n + i] = !c->spec->ragged ? most : gen_pick(g, 3) == 0 ? 0 : gen_pick(g, most + 1);
    }
    kvs_status st = gpu_alloc(w, r, (n + counts) * sizeof *id, &p, err);
    if (st == KVS_OK) {
        gpu_put(w, r, p, id, (n + counts) * sizeof *id);
        a->slots = p;
        a->slots_stride = keys;
        a->lane_count = a->slots + n;
    }
    mem_free(id);
    return st;
}

/* Two requests whose pages are no neighbours, with half of the rows each; lengths as those of lists. */
static kvs_status make_tables(sent_case *c, gpu_world *w, int32_t r, rng *g, kvs_error *err)
{
    enum { N_REQ = 2, N_PAGE = SLOTS / KVS_PAGE_TOKENS };
    attn_args *a = &c->attn[r];
    const int32_t width = (c->keys + KVS_PAGE_TOKENS - 1) / KVS_PAGE_TOKENS;
    const size_t n = (size_t)(N_REQ * width);
    const size_t rows = (size_t)c->n_row;
    void *p = NULL;
    int32_t *v = mem_calloc(n + 2 * rows, sizeof *v);
    if (v == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for tables of the check");
    }
    for (size_t i = 0; i < n; i++) {
        v[i] = (int32_t)(3 * i % N_PAGE);
    }
    for (size_t i = 0; i < rows; i++) {
        v[n + i] = (int32_t)(i * N_REQ / rows);
        v[n + rows + i] = gen_pick(g, 3) == 0 ? 0 : gen_pick(g, c->keys + 1);
    }
    const kvs_status st = gpu_alloc(w, r, (n + 2 * rows) * sizeof *v, &p, err);
    if (st == KVS_OK) {
        gpu_put(w, r, p, v, (n + 2 * rows) * sizeof *v);
        a->table = p;
        a->table_stride = width;
        a->table_width = width;
        a->row_req = a->table + n;
        a->kv_len = a->row_req + rows;
        a->interleave = 2;
        a->n_req = N_REQ;
    }
    mem_free(v);
    return st;
}

/* The same on all ranks. */
static kvs_status make_queries(sent_case *c, gpu_world *w, int32_t r, uint64_t seed, kvs_error *err)
{
    attn_args *a = &c->attn[r];
    const size_t heads = (size_t)c->n_row * (size_t)a->n_head;
    rng g = rng_init(seed, 99);
    void *p = NULL;
    TRY(gpu_alloc(w, r, heads * DIM * sizeof(uint16_t), &p, err));
    uint16_t *q = mem_alloc_array(heads * DIM, sizeof *q, 0);
    if (q == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for queries of the check");
    }
    const size_t own = heads < Q_ROWS ? heads : Q_ROWS;
    gen_bf16(&g, q, (int64_t)(own * DIM), 1.5f);
    for (size_t i = own; i < heads; i++) {
        memcpy(q + i * DIM, q + (i - own) * DIM, DIM * sizeof *q);
    }
    gpu_put(w, r, p, q, heads * DIM * sizeof *q);
    mem_free(q);
    a->q = p;
    a->q_type = KVS_DTYPE_BF16;
    a->q_stride_head = DIM;
    a->q_stride_row = (int64_t)a->n_head * DIM;
    a->softmax_scale = 1.0f / 24.0f;
    return KVS_OK;
}

static kvs_status make_results(sent_case *c, gpu_world *w, int32_t r, kvs_error *err)
{
    attn_args *a = &c->attn[r];
    exchange_merge_args *m = &c->merge[r];
    void *p = NULL;
    a->out_stride_head = VDIM;
    a->out_stride_row = (int64_t)a->n_head * VDIM;
    TRY(gpu_alloc(w, r, out_bytes(c) * (size_t)w->n, &p, err));
    a->out = p;
    TRY(gpu_alloc(w, r, lse_bytes(c) * (size_t)w->n, &p, err));
    a->lse = p;
    a->scratch_bytes = c->kern.attn_scratch(a, &w->queue[r]);
    TRY(gpu_alloc(w, r, a->scratch_bytes + 64, &a->scratch, err));
    m->w = c->send[r] = p2p_wire(w->g, r);
    m->n_row = c->n_row;
    m->n_head = a->n_head;
    m->part = a->out;
    m->part_row = a->out_stride_row;
    m->part_lse = a->lse;
    m->lse_row = a->n_head;
    m->out_row = (int64_t)c->local * VDIM;
    TRY(gpu_alloc(w, r, out_bytes(c), &m->out, err));
    TRY(gpu_alloc(w, r, lse_bytes(c), &p, err));
    m->lse = p;
    c->want[r] = mem_alloc(2 * (out_bytes(c) + lse_bytes(c)), 0);
    return c->want[r] != NULL ? KVS_OK : err_set(err, KVS_NOMEM, "no memory for results of the check");
}

static kvs_status make(sent_case *c, gpu_world *w, uint64_t seed, kvs_error *err)
{
    for (int32_t r = 0; r < w->n; r++) {
        rng g = rng_init(seed, (uint64_t)r);
        attn_args *a = &c->attn[r];
        a->n_row = c->n_row;
        a->n_head = c->local * w->n;
        a->n_lane = KVS_LANES % w->n == 0 ? KVS_LANES / w->n : 1;
        TRY(make_rows(c, w, r, &g, err));
        TRY(c->spec->tables ? make_tables(c, w, r, &g, err) : make_lists(c, w, r, &g, err));
        TRY(make_queries(c, w, r, seed, err));
        TRY(make_results(c, w, r, err));
    }
    return KVS_OK;
}

/* ---- both ways --------------------------------------------------------------------------------- */

static void poison(sent_case *c, gpu_world *w)
{
    for (int32_t r = 0; r < w->n; r++) {
        gpu_fill(w, r, c->attn[r].out, GPU_POISON, out_bytes(c) * (size_t)w->n);
        gpu_fill(w, r, c->attn[r].lse, GPU_POISON, lse_bytes(c) * (size_t)w->n);
        gpu_fill(w, r, c->merge[r].out, GPU_POISON, out_bytes(c));
        gpu_fill(w, r, c->merge[r].lse, GPU_POISON, lse_bytes(c));
    }
}

static void enqueue(gpu_world *w, int32_t lead, void *ctx)
{
    sent_case *c = ctx;
    int32_t led[WIRE_MAX_RANK];
    const int32_t n = gpu_ranks_led_by(w, lead, led);
    for (int32_t i = 0; i < n; i++) {
        const int32_t r = led[i];
        if (!c->merge[r].sent) {
            c->kern.attn(&c->attn[r], &w->queue[lead]);
        } else if (r != c->mute) {
            attn_send_sm90(&c->attn[r], &c->send[r], c->spec->det, &w->queue[lead]);
        }
    }
    gpu_merge_led_by(w, c->merge, lead);
}

static kvs_status run_once(sent_case *c, gpu_world *w, int32_t sent, kvs_error *err)
{
    poison(c, w);
    for (int32_t r = 0; r < w->n; r++) {
        c->merge[r].sent = sent;
    }
    for (int32_t r = 0; r < w->n; r++) {
        TRY(p2p_use(w->g, r, err));
        enqueue(w, r, c);
    }
    return gpu_sync(w, err);
}

static void fetch(sent_case *c, gpu_world *w, int32_t r, uint8_t *to)
{
    gpu_get(w, r, to, c->merge[r].out, out_bytes(c));
    gpu_get(w, r, to + out_bytes(c), c->merge[r].lse, lse_bytes(c));
}

static void compare(sent_case *c, gpu_world *w, const char *how, char *wrong, size_t cap)
{
    const size_t n = out_bytes(c) + lse_bytes(c);
    for (int32_t r = 0; r < w->n && wrong[0] == '\0'; r++) {
        kvs_error why;
        const uint8_t *want = c->want[r];
        uint8_t *got = c->want[r] + n;
        if (p2p_check(w->g, r, &why) < 0) {
            snprintf(wrong, cap, "%s: rank %d: %.130s", how, (int)r, why.text);
            return;
        }
        fetch(c, w, r, got);
        for (size_t i = 0; i < n && wrong[0] == '\0'; i += 4) {
            if (memcmp(got + i, want + i, 4) != 0) {
                const size_t at = i < out_bytes(c) ? i / (VDIM * 4) : (i - out_bytes(c)) / 4;
                float g, e;
                memcpy(&g, got + i, 4);
                memcpy(&e, want + i, 4);
                snprintf(wrong, cap, "%s: rank %d, %s of row %d, head %d, value %d: %a, want %a", how, (int)r,
                         i < out_bytes(c) ? "out" : "lse", (int)(at / (size_t)c->local),
                         (int)(at % (size_t)c->local), i < out_bytes(c) ? (int)(i / 4 % VDIM) : 0, (double)g,
                         (double)e);
            }
        }
    }
}

static kvs_status replay(sent_case *c, gpu_world *w, char *wrong, size_t cap, kvs_error *err)
{
    dev_graph g[WIRE_MAX_RANK];
    memset(g, 0, sizeof g);
    kvs_status st = gpu_record(w, enqueue, c, g, err);
    for (int rep = 0; rep < REPLAYS && st == KVS_OK && wrong[0] == '\0'; rep++) {
        poison(c, w);
        for (int32_t r = 0; r < w->n; r++) {
            gpu_launch(w, g, r);
        }
        st = gpu_sync(w, err);
        compare(c, w, "graph", wrong, cap);
    }
    for (int i = 0; i < WIRE_MAX_RANK; i++) {
        dev_graph_free(&g[i]);
    }
    return st;
}

static kvs_status run_case(sent_case *c, gpu_world *w, char *wrong, size_t cap, kvs_error *err)
{
    TRY(run_once(c, w, 0, err));
    for (int32_t r = 0; r < w->n; r++) {
        fetch(c, w, r, c->want[r]);
    }
    for (int rep = 0; rep < 2 && wrong[0] == '\0'; rep++) { /* on both sides of the areas */
        TRY(run_once(c, w, 1, err));
        compare(c, w, "launches", wrong, cap);
    }
    return wrong[0] == '\0' ? replay(c, w, wrong, cap, err) : KVS_OK;
}

/* ---- a rank that is not heard -------------------------------------------------------------------- */

/* Ended by a wait that names rank v. */
static void expect_named(gpu_world *w, int32_t v, char *wrong, size_t cap)
{
    char who[24];
    snprintf(who, sizeof who, "rank %d", (int)v);
    for (int32_t r = 0; r < w->n && wrong[0] == '\0'; r++) {
        kvs_error e;
        memset(&e, 0, sizeof e);
        const kvs_status st = p2p_check(w->g, r, &e);
        if (st != KVS_PEER || strstr(e.text, who) == NULL || strstr(e.text, "late") == NULL) {
            snprintf(wrong, cap, "rank %d was told %s \"%.120s\"", (int)r, kvs_status_name(st), e.text);
        }
    }
}

/* stale: the rank sends, but as if it had finished an exchange less; else it sends nothing. */
static kvs_status run_unheard(sent_case *c, gpu_world *w, int32_t v, int stale, char *wrong, size_t cap, kvs_error *err)
{
    wire_control control = {0, 0};
    void *old = NULL;
    TRY(run_once(c, w, 1, err));
    if (stale) {
        TRY(gpu_alloc(w, v, sizeof control, &old, err));
        gpu_put(w, v, old, &control, sizeof control);
        c->send[v].area[v] = old;
    } else {
        c->mute = v;
    }
    TRY(run_once(c, w, 1, err));
    expect_named(w, v, wrong, cap);
    return KVS_OK;
}

/* ---- the run ------------------------------------------------------------------------------------- */

/* What is run of a case: all of it right, or a rank that is not heard. */
typedef enum trial { TRIAL_RIGHT, TRIAL_MUTE, TRIAL_STALE } trial;

static kvs_status run_open(gpu_run *run, gpu_world *w, sent_case *c, trial t, char *wrong, size_t cap, kvs_error *err)
{
    TRY(make(c, w, run->cfg->seed + ++run->n_case, err));
    return t == TRIAL_RIGHT ? run_case(c, w, wrong, cap, err)
                            : run_unheard(c, w, w->n - 1, t == TRIAL_STALE, wrong, cap, err);
}

static kvs_status run_spec(gpu_run *run, const sent_spec *spec, int32_t n, trial t, kvs_error *err)
{
    static const char *const fault[] = {"", " fault=mute", " fault=stale"};
    gpu_world w;
    sent_case c;
    char what[128];
    char wrong[192] = "";
    char tail[64];
    char group[64];
    memset(&c, 0, sizeof c);
    c.spec = spec;
    c.mute = -1;
    gpu_group_text(run, n, n < run->n_device ? n : run->n_device, group, sizeof group);
    snprintf(what, sizeof what, "op=attn_sent %s case=%s%s", group, spec->name, fault[t]);
    if (kern_init_cuda(&c.kern, spec->det ? "attn=sm90_det" : "attn=sm90", NULL) < 0) {
        gpu_skip(run, what, "no such variant of attention");
        return KVS_OK;
    }
    const int busy = run->n_sm >= BUSY_SM;
    c.n_row = spec->n_row > 0 ? spec->n_row : run->n_sm + 9;
    c.local = busy ? spec->local : FEW_HEADS;
    c.keys = busy || spec->keys < FEW_KEYS ? spec->keys : FEW_KEYS;
    TRY(gpu_open(&w, n, run->n_device, true, (int64_t)c.n_row * c.local * (VDIM + 1) * 4,
                 t == TRIAL_RIGHT ? TIMEOUT_MS : run->timeout_ms, err));
    const kvs_status st = run_open(run, &w, &c, t, wrong, sizeof wrong, err);
    for (int i = 0; i < WIRE_MAX_RANK; i++) {
        mem_free(c.want[i]);
    }
    if (st != KVS_DEVICE) {
        gpu_close(&w);
    }
    TRY(st);
    snprintf(tail, sizeof tail, "rows=%d heads=%d keys=%d", (int)c.n_row, (int)(c.local * n), (int)c.keys);
    gpu_row(run, what, wrong, tail);
    return KVS_OK;
}

kvs_status gpu_check_sent(gpu_run *run, kvs_error *err)
{
    static const int32_t ranks[] = {8, 2, 3, 1, 4, 5, 6, 7};
    const int n = run->cfg->quick ? 3 : 8;
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < N_SPEC; k++) {
            TRY(run_spec(run, &k_spec[k], ranks[i], TRIAL_RIGHT, err));
        }
    }
    TRY(run_spec(run, &k_spec[0], 2, TRIAL_MUTE, err));
    TRY(run_spec(run, &k_spec[0], 3, TRIAL_STALE, err));
    return KVS_OK;
}
