/* The bench: useful work against counts made here, grids, refusals, and that a kernel that is
 * wrong in one value does not pass. Shapes and pools are small; speed is not looked at. */
#include "unit/unit.h"

#include <math.h>

#include "check/bench.h"

enum { MIB = 1 << 20, MAX_ROW = 64 };

typedef struct seen {
    kvs_bench_row row[MAX_ROW];
    char name[MAX_ROW][64];
    int n;
    int64_t stop_at; /* the case at which progress ends the run; 0: none */
} seen;

static void on_row(void *ctx, const kvs_bench_row *r)
{
    seen *s = ctx;
    assert_true(s->n < MAX_ROW);
    s->row[s->n] = *r;
    snprintf(s->name[s->n], sizeof s->name[s->n], "%s", r->name);
    s->row[s->n].name = s->name[s->n];
    s->n++;
}

static int on_progress(void *ctx, const char *what, int64_t done, int64_t total)
{
    seen *s = ctx;
    assert_true(what[0] != '\0' && done >= 0 && done < total);
    return s->stop_at > 0 && done == s->stop_at;
}

static kvs_bench_config config(const char *op, seen *s)
{
    memset(s, 0, sizeof *s);
    kvs_bench_config c = kvs_bench_config_default();
    c.op = op;
    c.reps = 2;
    c.row = on_row;
    c.ctx = s;
    if (strcmp(op, "exchange") != 0 && strcmp(op, "roof") != 0) {
        c.pool_bytes = MIB;
    }
    return c;
}

#define AXIS(...)                                                                                  \
    (kvs_bench_axis)                                                                               \
    {                                                                                              \
        (const int64_t[]){__VA_ARGS__},                                                            \
            (int32_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))                    \
    }

static void run(const kvs_bench_config *c)
{
    kvs_error err;
    const kvs_status st = kvs_bench_run(c, &err);
    if (st != KVS_OK) {
        fail_msg("bench %s: %s", c->op, err.text);
    }
}

static void assert_close(double got, double want)
{
    if (fabs(got - want) > 1e-9 * fabs(want)) {
        fail_msg("got %.12g, want %.12g", got, want);
    }
}

static void check_rows(const seen *s)
{
    for (int i = 0; i < s->n; i++) {
        const kvs_bench_row *r = &s->row[i];
        assert_int_equal(r->passed, 1);
        assert_int_equal(r->n_rep, 2);
        assert_true(r->min_us > 0.0 && r->min_us <= r->median_us && r->median_us <= r->p90_us);
        assert_close(r->byte_per_s, r->gbyte * 1e9 / (r->median_us * 1e-6));
        assert_close(r->flop_per_s, r->gflop * 1e9 / (r->median_us * 1e-6));
        assert_true(r->ceiling > 0.0 && r->share > 0.0);
        const double rate =
            strcmp(r->ceiling_kind, "read") == 0 || strcmp(r->ceiling_kind, "copy") == 0
                ? r->byte_per_s
                : r->flop_per_s;
        assert_close(r->share, rate / r->ceiling);
        assert_string_equal(r->device, "cpu");
    }
}

/* ---- useful work ----------------------------------------------------------------------------- */

static void dense_attention_counts_each_key_of_a_sequence_once(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("attn", &s);
    c.batch = AXIS(2);
    c.q = AXIS(3);
    c.heads = AXIS(5);
    c.len = AXIS(200);
    c.topk = AXIS(0);
    c.kv = AXIS(KVS_KV_BF16, KVS_KV_F32, KVS_KV_FP8, KVS_KV_FP8_DS_MLA);
    run(&c);
    assert_int_equal(s.n, 4);
    check_rows(&s);
    const int row_bytes[] = {1152, 2304, 576, 656};
    for (int i = 0; i < 4; i++) {
        const int q_elem = i == 1 ? 4 : 2;
        const double pairs = 2.0 * (198 + 199 + 200);
        assert_close(s.row[i].gflop * 1e9, pairs * 5 * 2 * (576 + 512));
        assert_close(s.row[i].gbyte * 1e9,
                     2.0 * 200 * row_bytes[i] + 2 * 3 * 5 * 576.0 * q_elem + 2 * 3 * 5 * 513.0 * 4);
        assert_string_equal(s.row[i].op, "attn");
        assert_non_null(strstr(s.row[i].name, "dense/cold/t"));
    }
}

static void sparse_attention_counts_valid_entries_only(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("attn", &s);
    const double invalid[] = {0.0, 0.75};
    c.batch = AXIS(2);
    c.heads = AXIS(17);
    c.len = AXIS(4000);
    c.topk = AXIS(64);
    c.kv = AXIS(KVS_KV_FP8_DS_MLA);
    c.invalid = invalid;
    c.n_invalid = 2;
    c.warm = 1;
    run(&c);
    assert_int_equal(s.n, 2);
    check_rows(&s);
    for (int i = 0; i < 2; i++) {
        const double entries = 2.0 * (i == 0 ? 64 : 16);
        assert_close(s.row[i].gflop * 1e9, entries * 17 * 2 * (576 + 512));
        assert_close(s.row[i].gbyte * 1e9, entries * 656 + 2 * 17 * 576.0 * 2 + 2 * 17 * 513.0 * 4);
        assert_non_null(strstr(s.row[i].name, "sparse/warm/t"));
    }
}

/* A rank of eight has an eighth of the work, whatever the interleave. */
static void a_shard_has_its_part_of_the_work(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("attn", &s);
    c.batch = AXIS(4);
    c.heads = AXIS(8);
    c.len = AXIS(4096);
    c.topk = AXIS(0, 2048);
    c.dcp = AXIS(1, 2, 8);
    c.kv = AXIS(KVS_KV_BF16);
    c.interleave = 4;
    run(&c);
    assert_int_equal(s.n, 6);
    check_rows(&s);
    for (int i = 0; i < 6; i++) {
        const double keys = 4.0 * (s.row[i].topk == 0 ? 4096 : 2048) / s.row[i].dcp;
        const double want = keys * 8 * 2 * (576 + 512) * 1e-9;
        const double slack = s.row[i].topk == 0 || s.row[i].dcp == 1 ? 1e-9 : 0.15;
        assert_true(fabs(s.row[i].gflop - want) <= slack * want);
    }
}

static void indexer_work_is_keys_times_heads(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("index", &s);
    c.batch = AXIS(2);
    c.q = AXIS(2);
    c.heads = AXIS(32);
    c.len = AXIS(300);
    c.kv = AXIS(KVS_KV_FP8, KVS_KV_F32);
    c.dcp = AXIS(1, 4);
    run(&c);
    assert_int_equal(s.n, 4);
    check_rows(&s);
    for (int i = 0; i < 4; i++) {
        const int sharded = s.row[i].dcp == 4;
        const int local = sharded ? 75 : 300;
        const double pairs = 2.0 * (sharded ? 75 + 75 : 299 + 300);
        const int key = strcmp(s.row[i].kv, "fp8") == 0 ? 132 : 512;
        assert_close(s.row[i].gflop * 1e9, pairs * 32 * 2 * 128);
        assert_close(s.row[i].gbyte * 1e9, 2.0 * local * key + pairs * 4);
    }
}

static void selection_reads_scores_once_and_leaves_a_list(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("topk", &s);
    c.batch = AXIS(3);
    c.len = AXIS(10, 5000);
    c.topk = AXIS(64);
    run(&c);
    assert_int_equal(s.n, 8);
    check_rows(&s);
    static const char *const labels[] = {"random", "equal", "rising", "falling"};
    for (int i = 0; i < 8; i++) {
        assert_ptr_equal(strstr(s.row[i].name, labels[i % 4]), s.row[i].name);
        const double taken = s.row[i].len < 64 ? 10 : 64;
        assert_close(s.row[i].gbyte * 1e9, 3.0 * ((double)s.row[i].len * 4 + taken * 8));
        assert_true(s.row[i].gflop == 0.0);
    }
    c = config("select", &s);
    c.batch = AXIS(2);
    c.heads = AXIS(8);
    c.len = AXIS(20000);
    c.topk = AXIS(500);
    run(&c);
    assert_int_equal(s.n, 1);
    check_rows(&s);
    assert_close(s.row[0].gflop * 1e9, 2.0 * 20000 * 8 * 2 * 128);
    assert_close(s.row[0].gbyte * 1e9, 2.0 * 20000 * 132 + 2 * 500.0 * 8);
}

static void moved_bytes_are_read_and_written(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("merge", &s);
    c.batch = AXIS(3);
    c.heads = AXIS(5);
    c.dcp = AXIS(1, 2, 4, 8);
    run(&c);
    assert_int_equal(s.n, 4);
    check_rows(&s);
    for (int i = 0; i < 4; i++) {
        assert_close(s.row[i].gbyte * 1e9, 15.0 * (s.row[i].dcp * 513 * 4 + 512 * 2 + 4));
        assert_string_equal(s.row[i].ceiling_kind, "copy");
    }
    c = config("write", &s);
    c.batch = AXIS(100);
    c.kv = AXIS(KVS_KV_F32, KVS_KV_BF16, KVS_KV_FP8, KVS_KV_FP8_DS_MLA);
    run(&c);
    assert_int_equal(s.n, 6);
    check_rows(&s);
    const double latent[] = {2304, 1152, 576, 656};
    int n_latent = 0;
    for (int i = 0; i < 6; i++) {
        if (strstr(s.row[i].name, "latent") != NULL) {
            assert_close(s.row[i].gbyte * 1e9, 100 * (576.0 * 2 + latent[n_latent++] + 8));
        } else {
            const double key = strcmp(s.row[i].kv, "f32") == 0 ? 512 : 132;
            assert_close(s.row[i].gbyte * 1e9, 100 * (128.0 * 2 + key + 8));
        }
    }
    assert_int_equal(n_latent, 4);
}

static void products_count_weights_scales_and_rows(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("gemm", &s);
    c.batch = AXIS(3);
    c.q = AXIS(2);
    c.kv = AXIS(KVS_KV_F32, KVS_KV_BF16, KVS_KV_FP8);
    run(&c);
    assert_int_equal(s.n, 9);
    check_rows(&s);
    const double dims[3][2] = {{2048, 7168}, {7168, 2048}, {576, 7168}};
    for (int i = 0; i < 9; i++) {
        const double *d = dims[i % 3];
        const double w[] = {4, 2, 1 + 4 / 16384.0 * (i % 3 == 2 ? 5 / 4.5 : 1)};
        const double x[] = {4, 2, 2};
        assert_close(s.row[i].gflop * 1e9, 2 * 6 * d[0] * d[1]);
        assert_close(s.row[i].gbyte * 1e9,
                     d[0] * d[1] * w[i / 3] + 6 * d[1] * x[i / 3] + 6 * d[0] * 4);
    }
}

static kern_table g_heads_right;

static void wrong_mha(const mha_args *a, dev_queue *q)
{
    g_heads_right.mha(a, q);
    a->out[(int64_t)(a->n_row - 1) * a->out_stride_row + 7] *= 1.05f;
}

static void the_multi_head_form_counts_keys_that_rows_attend(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("mha", &s);
    c.q = AXIS(3);
    c.heads = AXIS(1);
    c.len = AXIS(3, 700);
    c.kv = AXIS(KVS_KV_BF16, KVS_KV_F32);
    run(&c);
    assert_int_equal(s.n, 4);
    check_rows(&s);
    for (int i = 0; i < 4; i++) {
        const double len = i % 2 == 0 ? 3 : 700;
        const double size = i / 2 == 0 ? 2 : 4;
        assert_close(s.row[i].gflop * 1e9, 2 * 320 * (3 * len - 3));
        assert_close(s.row[i].gbyte * 1e9, len * (256 * 4 + 64 * size) + 3 * (192 * size + 128 * 4 + 4));
    }
    c.op = "mha_wide";
    s.n = 0;
    run(&c);
    assert_int_equal(s.n, 4);
    check_rows(&s);
    for (int i = 0; i < 4; i++) {
        const double len = i % 2 == 0 ? 3 : 700;
        const double size = i / 2 == 0 ? 2 : 4;
        assert_close(s.row[i].gflop * 1e9, 2 * 512 * (3 * len - 3));
        assert_close(s.row[i].gbyte * 1e9, len * (448 * 4 + 64 * size) + 3 * (256 * size + 256 * 4 + 4));
    }
    c.op = "mha";
    assert_int_equal(kern_init(&g_heads_right, 0, NULL, NULL), KVS_OK);
    kern_table broken = g_heads_right;
    broken.mha = wrong_mha;
    kvs_error err;
    s.n = 0;
    assert_int_equal(bench_run_table(&c, &broken, &err), KVS_INTERNAL);
    assert_non_null(strstr(err.text, "4 of 4 rows are wrong"));
    c.kv = AXIS(KVS_KV_FP8);
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    c.kv.n = 0;
    c.len = AXIS(2);
    assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "no last 3"));
}

/* Every op names its format in kv, and bf16 instructions take no f32. */
static void f32_products_are_held_against_the_fma(void **state)
{
    (void)state;
    static const char *const kv[] = {"", "bf16", "fp8", "fp8_ds_mla", "f32"};
    for (size_t i = 0; i < UNIT_COUNT(kv); i++) {
        const int f32 = i == 4;
        const bench_case tiles = {.variant = "amx", .kv = kv[i]};
        assert_int_equal(bench_flop_kind(&tiles), f32 ? ROOF_FMA_AVX512 : ROOF_TILE_BF16);
        const bench_case dots = {.variant = "avx512bf16", .kv = kv[i]};
        assert_int_equal(bench_flop_kind(&dots), f32 ? ROOF_FMA_AVX512 : ROOF_DOT_BF16);
    }
}

static void exchanged_bytes_are_written_and_read(void **state)
{
    (void)state;
    for (int form = KVS_EXCHANGE_A2A; form <= KVS_EXCHANGE_AG_RS; form++) {
        seen s;
        kvs_bench_config c = config("exchange", &s);
        c.exchange = (kvs_exchange)form;
        c.batch = AXIS(3);
        c.q = AXIS(2);
        c.heads = AXIS(16);
        c.dcp = AXIS(2, 8);
        run(&c);
        assert_int_equal(s.n, 2);
        check_rows(&s);
        for (int i = 0; i < 2; i++) {
            const int n = s.row[i].dcp;
            const double lse = form == KVS_EXCHANGE_A2A ? 16.0 / n : 16.0;
            const double peer = 6 * ((16.0 / n) * (576 * 2 + 512 * 4) + lse * 4);
            assert_close(s.row[i].gbyte * 1e9, 2 * peer * n * (n - 1));
            assert_string_equal(s.row[i].variant, "threads");
        }
    }
}

/* ---- a wrong kernel -------------------------------------------------------------------------- */

static kern_table g_right;

static void wrong_attn(const attn_args *a, dev_queue *q)
{
    g_right.attn(a, q);
    a->out[(int64_t)(a->n_row - 1) * a->out_stride_row + 77] *= 1.05f;
}

static void wrong_score(const index_score_args *a, dev_queue *q)
{
    g_right.index_score(a, q);
    a->score[0] += 1e-3f * (1.0f + fabsf(a->score[0]));
}

static void wrong_topk(const topk_args *a, dev_queue *q)
{
    g_right.topk(a, q);
    a->list_id[3]++;
}

static void wrong_merge(const merge_args *a, dev_queue *q)
{
    g_right.merge(a, q);
    ((uint16_t *)a->out)[5] ^= 8;
}

static void wrong_kv_write(const kv_write_args *a, dev_queue *q)
{
    g_right.kv_write(a, q);
    a->kv[a->slot[0] / 64 * a->page_stride + a->slot[0] % 64 * a->row_stride + 600] ^= 1;
}

static void wrong_index_write(const index_write_args *a, dev_queue *q)
{
    g_right.index_write(a, q);
    a->keys[a->slot[0] / 64 * a->page_stride + a->slot[0] % 64 * 128 + 9] ^= 1;
}

static void wrong_gemm(const gemm_args *a, dev_queue *q)
{
    g_right.gemm(a, q);
    a->y[(int64_t)(a->n_row - 1) * a->y_stride + a->w.n_out - 1] += 1.0f;
}

static void a_kernel_that_is_wrong_in_one_value_fails(void **state)
{
    (void)state;
    assert_int_equal(kern_init(&g_right, 0, NULL, NULL), KVS_OK);
    kern_table broken = g_right;
    broken.attn = wrong_attn;
    broken.index_score = wrong_score;
    broken.topk = wrong_topk;
    broken.merge = wrong_merge;
    broken.kv_write = wrong_kv_write;
    broken.index_write = wrong_index_write;
    broken.gemm = wrong_gemm;
    static const char *const ops[] = {"attn", "index", "topk", "select", "merge", "write", "gemm"};
    for (size_t i = 0; i < UNIT_COUNT(ops); i++) {
        seen s;
        kvs_bench_config c = config(ops[i], &s);
        c.batch = AXIS(2);
        const kvs_bench_axis len = AXIS(200);
        const kvs_bench_axis heads = AXIS(4);
        const kvs_bench_axis kv = AXIS(KVS_KV_FP8_DS_MLA, KVS_KV_FP8); /* byte 600: a rope */
        const kvs_bench_axis f32 = AXIS(KVS_KV_F32);
        const int gemm = strcmp(ops[i], "gemm") == 0;
        if (strcmp(ops[i], "merge") != 0 && strcmp(ops[i], "write") != 0 && !gemm) {
            c.len = len;
        }
        if (strcmp(ops[i], "topk") != 0 && strcmp(ops[i], "write") != 0 && !gemm) {
            c.heads = heads;
        }
        if (gemm) {
            c.kv = f32;
        }
        if (strcmp(ops[i], "write") == 0) {
            c.kv = kv;
        }
        kvs_error err;
        assert_int_equal(bench_run_table(&c, &g_right, &err), KVS_OK);
        const int n = s.n;
        s.n = 0;
        assert_int_equal(bench_run_table(&c, &broken, &err), KVS_INTERNAL);
        assert_int_equal(s.n, n); /* all rows come, the wrong ones marked */
        int n_wrong = 0;
        for (int k = 0; k < s.n; k++) {
            n_wrong += !s.row[k].passed;
        }
        assert_true(n_wrong > 0);
        assert_non_null(strstr(err.text, ops[i]));
    }
}

/* ---- grids and refusals ---------------------------------------------------------------------- */

static void every_point_of_a_grid_is_a_row_and_threads_vary_last(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("merge", &s);
    c.batch = AXIS(1, 2);
    c.q = AXIS(1, 3);
    c.heads = AXIS(1, 4, 16);
    c.dcp = AXIS(2);
    c.threads = AXIS(1, 2);
    run(&c);
    assert_int_equal(s.n, 24);
    int seen_at[2][3][4][17] = {{{{0}}}};
    for (int i = 0; i < s.n; i++) {
        const kvs_bench_row *r = &s.row[i];
        assert_int_equal(r->threads, 1 + i / 12);
        seen_at[r->threads - 1][r->batch][r->q][r->heads]++;
    }
    for (int t = 0; t < 2; t++) {
        for (int b = 1; b <= 2; b++) {
            for (int q = 1; q <= 3; q += 2) {
                assert_int_equal(seen_at[t][b][q][1], 1);
                assert_int_equal(seen_at[t][b][q][4], 1);
                assert_int_equal(seen_at[t][b][q][16], 1);
            }
        }
    }
}

static void what_an_op_does_not_use_is_refused(void **state)
{
    (void)state;
    const double half = 0.5;
    for (int32_t i = 0; kvs_bench_ops(i) != NULL; i++) {
        const kvs_bench_op *op = kvs_bench_ops(i);
        for (int k = 0; k < 14; k++) {
            seen s;
            kvs_bench_config c = config(op->name, &s);
            c.pool_bytes = 0;
            kvs_bench_axis *const axes[] = {&c.batch, &c.q,   &c.heads, &c.len,
                                            &c.topk,  &c.dcp, &c.kv,    &c.threads};
            const uint32_t bits[] = {KVS_BENCH_BATCH,      KVS_BENCH_Q,        KVS_BENCH_HEADS,
                                     KVS_BENCH_LEN,        KVS_BENCH_TOPK,     KVS_BENCH_DCP,
                                     KVS_BENCH_KV,         KVS_BENCH_THREADS,  KVS_BENCH_INVALID,
                                     KVS_BENCH_INTERLEAVE, KVS_BENCH_EXCHANGE, KVS_BENCH_KERNELS,
                                     KVS_BENCH_POOL,       KVS_BENCH_EXCHANGE};
            const char *const names[] = {"batch",    "q",       "heads",   "len",     "topk",
                                         "dcp",      "kv",      "threads", "invalid", "interleave",
                                         "exchange", "kernels", "warm",    "timeout"};
            if ((op->axes & bits[k]) != 0) {
                continue;
            }
            const kvs_bench_axis one = AXIS(1);
            if (k < 8) {
                *axes[k] = one;
            } else if (k == 8) {
                c.invalid = &half;
                c.n_invalid = 1;
            } else if (k == 9) {
                c.interleave = 2;
            } else if (k == 10) {
                c.exchange = KVS_EXCHANGE_AG_RS;
            } else if (k == 11) {
                c.kernels = "attn=ref";
            } else if (k == 12) {
                c.warm = 1;
            } else {
                c.timeout_ms = 5;
            }
            kvs_error err;
            assert_int_equal(kvs_bench_run(&c, &err), KVS_INVALID);
            assert_non_null(strstr(err.text, names[k]));
            assert_non_null(strstr(err.text, op->name));
            assert_int_equal(s.n, 0);
        }
    }
}

static void expect(const kvs_bench_config *c, kvs_status st, const char *says)
{
    kvs_error err = {.text = ""};
    const kvs_status got = kvs_bench_run(c, &err);
    if (got != st || strstr(err.text, says) == NULL) {
        fail_msg("%s \"%s\", want %s \"%s\"", kvs_status_name(got), err.text, kvs_status_name(st),
                 says);
    }
}

static void what_cannot_be_run_says_why(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("matmul", &s);
    expect(&c, KVS_INVALID, "attn, index, topk");
    c = config("attn", &s);
    c.heads = AXIS(129);
    expect(&c, KVS_INVALID, "heads 129: must be 1 to 128");
    c = config("attn", &s);
    c.kv = AXIS(9);
    expect(&c, KVS_INVALID, "kv 9");
    c = config("attn", &s);
    c.interleave = 3;
    expect(&c, KVS_INVALID, "interleave 3");
    c = config("attn", &s);
    const double much = 1.5;
    c.invalid = &much;
    c.n_invalid = 1;
    expect(&c, KVS_INVALID, "invalid 1.5");
    c = config("attn", &s);
    c.len = AXIS(INT32_MAX - 1);
    c.topk = AXIS(0);
    expect(&c, KVS_LIMIT, "6 GiB");
    c = config("attn", &s);
    c.batch = AXIS(65536);
    c.q = AXIS(65536);
    expect(&c, KVS_LIMIT, "rows");
    c = config("attn", &s);
    c.topk = AXIS(64);
    c.len = AXIS(100);
    c.kv = AXIS(KVS_KV_FP8);
    expect(&c, KVS_INVALID, "models that select store fp8_ds_mla");
    c = config("exchange", &s);
    c.heads = AXIS(12);
    c.dcp = AXIS(8);
    expect(&c, KVS_INVALID, "12 heads cannot be cut over 8 ranks");
    c = config("attn", &s);
    c.cpu = "avx1024";
    expect(&c, KVS_INVALID, "avx1024");
    c = config("attn", &s);
    c.kernels = "attn=fast";
    expect(&c, KVS_INVALID, "fast");
    c = config("attn", &s);
    c.reps = -1;
    expect(&c, KVS_INVALID, "reps -1");
    c.struct_size = 0;
    expect(&c, KVS_INVALID, "struct_size");
    assert_int_equal(kvs_bench_run(NULL, NULL), KVS_INVALID);
}

static void progress_may_end_the_run(void **state)
{
    (void)state;
    seen s;
    kvs_bench_config c = config("merge", &s);
    c.batch = AXIS(1, 2, 3, 4);
    c.heads = AXIS(1);
    c.dcp = AXIS(2);
    c.progress = on_progress;
    s.stop_at = 2;
    kvs_error err;
    assert_int_equal(kvs_bench_run(&c, &err), KVS_CANCELLED);
    assert_int_equal(s.n, 2);
}

static void samples_are_distinct_and_ascending(void **state)
{
    (void)state;
    uint8_t mark[100] = {0};
    int32_t out[100];
    rng r = rng_init(1, 2);
    int hits[100] = {0};
    for (int32_t round = 0; round < 400; round++) {
        const int32_t n = 1 + round % 100;
        const int32_t k = round * 7 % (n + 1);
        bench_sample(&r, n, k, mark, out);
        for (int32_t i = 0; i < k; i++) {
            assert_in_range(out[i], 0, n - 1);
            assert_true(i == 0 || out[i] > out[i - 1]);
            hits[out[i]]++;
        }
        for (int i = 0; i < 100; i++) {
            assert_int_equal(mark[i], 0);
        }
    }
    assert_true(hits[0] > 50 && hits[40] > 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_attention_counts_each_key_of_a_sequence_once),
        cmocka_unit_test(sparse_attention_counts_valid_entries_only),
        cmocka_unit_test(a_shard_has_its_part_of_the_work),
        cmocka_unit_test(indexer_work_is_keys_times_heads),
        cmocka_unit_test(selection_reads_scores_once_and_leaves_a_list),
        cmocka_unit_test(moved_bytes_are_read_and_written),
        cmocka_unit_test(products_count_weights_scales_and_rows),
        cmocka_unit_test(the_multi_head_form_counts_keys_that_rows_attend),
        cmocka_unit_test(f32_products_are_held_against_the_fma),
        cmocka_unit_test(exchanged_bytes_are_written_and_read),
        cmocka_unit_test(a_kernel_that_is_wrong_in_one_value_fails),
        cmocka_unit_test(every_point_of_a_grid_is_a_row_and_threads_vary_last),
        cmocka_unit_test(what_an_op_does_not_use_is_refused),
        cmocka_unit_test(what_cannot_be_run_says_why),
        cmocka_unit_test(progress_may_end_the_run),
        cmocka_unit_test(samples_are_distinct_and_ascending),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
