/* Allocation failures in the calls that plan, check and time: each fails with a message and leaves nothing
 * behind, whichever allocation it was. A call is made once to count its allocations, then once per
 * allocation with that one failing. */
#include "unit/unit.h"

#include <jansson.h>

#include "base/mem.h"
#include "kvspan/bench.h"
#include "kvspan/check.h"
#include "kvspan/log.h"
#include "kvspan/plan.h"
#include "unit/kv/shards.h"

typedef kvs_status (*call_fn)(const void *ctx, kvs_error *err);

typedef struct live {
    int64_t n, bytes;
} live;

static live live_now(void)
{
    const mem_stats s = mem_stats_get();
    return (live){s.n_live, s.live_bytes};
}

/* Fails allocation number `at` of the call. */
static void fail_one(const char *name, call_fn call, const void *ctx, int64_t at)
{
    const live before = live_now();
    kvs_error err = {0};
   mem_fail_after(at);
    const kvs_status st = call(ctx, &err);
    const bool fired = mem_fail_fired();
    mem_fail_after(0);
    const live after = live_now();
    if (!fired || st == KVS_OK || err.text[0] == '\0') {
        fail_msg("%s, allocation %d: %s, status %s, \"%s\"", name, (int)at,
                 fired ? "failed" : "not reached", kvs_status_name(st), err.text);
    }
    if (after.n != before.n || after.bytes != before.bytes) {
        fail_msg("%s, allocation %d: %d blocks, %d bytes are left", name, (int)at,
                 (int)(after.n - before.n), (int)(after.bytes - before.bytes));
    }
}

/* The call alone; returns how many allocations it makes. */
static int64_t count(const char *name, call_fn call, const void *ctx)
{
    const int64_t before = mem_stats_get().n_alloc;
    kvs_error err = {0};
    if (call(ctx, &err) != KVS_OK) {
        fail_msg("%s: %s", name, err.text);
    }
    return mem_stats_get().n_alloc - before;
}

/* Every allocation; returns how many there are. */
static int64_t fail_each(const char *name, call_fn call, const void *ctx)
{
    const int64_t n = count(name, call, ctx);
    for (int64_t at = 1; at <= n; at++) {
        fail_one(name, call, ctx, at);
    }
    return n;
}

/* ---- plan ------------------------------------------------------------------------------------ */

static kvs_status call_plan(const void *ctx, kvs_error *err)
{
    kvs_plan p = kvs_plan_empty();
    const kvs_status st = kvs_plan_make(&p, ctx, err);
    assert_true((st == KVS_OK) == (p.n_layer > 0)); /* a plan or nothing */
    return st;
}

static const char k_model[] =
    "{\"architectures\":[\"DeepseekV2ForCausalLM\"],\"vocab_size\":102400,\"hidden_size\":2048,"
    "\"intermediate_size\":10944,\"moe_intermediate_size\":1408,\"num_hidden_layers\":27,"
    "\"num_attention_heads\":16,\"num_key_value_heads\":16,\"q_lora_rank\":null,"
    "\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
    "\"n_routed_experts\":64,\"n_shared_experts\":2,\"first_k_dense_replace\":1,"
    "\"moe_layer_freq\":1,\"max_position_embeddings\":163840,\"torch_dtype\":\"bfloat16\","
    "\"num_experts_per_tok\":6,\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":false,"
    "\"routed_scaling_factor\":1.0,\"scoring_func\":\"softmax\",\"topk_method\":\"greedy\","
    "\"rms_norm_eps\":1e-06,\"bos_token_id\":100000,\"eos_token_id\":100001,"
    "\"rope_theta\":10000,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,"
    "\"original_max_position_embeddings\":4096,\"beta_fast\":32,\"beta_slow\":1,"
    "\"mscale\":0.707,\"mscale_all_dim\":0.707}}";

static void *json_take(size_t n)
{
    return mem_alloc(n, 0);
}

/* Also what the JSON reader takes. */
static void a_plan_without_memory_is_no_plan(void **state)
{
    (void)state;
    json_malloc_t take = NULL;
    json_free_t give = NULL;
    json_get_alloc_funcs(&take, &give);
    json_set_alloc_funcs(json_take, mem_free);
    kvs_plan_config c = kvs_plan_config_default();
    int64_t n = 0;
    for (int32_t i = 0; kvs_plan_preset(i) != NULL; i++) {
        c.preset = kvs_plan_preset(i);
        n += fail_each(c.preset, call_plan, &c);
    }
    assert_int_equal(n, 0);
    FILE *f = fopen(test_path("config.json"), "w");
    assert_non_null(f);
    assert_true(fputs(k_model, f) >= 0 && fclose(f) == 0);
    c.preset = NULL;
    c.model_dir = test_dir();
    assert_true(fail_each("a folder", call_plan, &c) > 100);
    json_set_alloc_funcs(take, give);
    remove(test_path("config.json"));
    test_dir_remove();
}

/* ---- check ----------------------------------------------------------------------------------- */

static kvs_status call_check(const void *ctx, kvs_error *err)
{
    return kvs_check_run(ctx, err);
}

static void a_check_without_memory_does_not_pass(void **state)
{
    (void)state;
    kvs_check_config c = kvs_check_config_default();
    c.cpu = "ref";
    c.op = "merge";
    c.quick = 1;
    assert_true(fail_each(c.op, call_check, &c) >= 3);
    c.op = "index_write";
    c.csv = test_path("rows.csv");
    assert_true(fail_each("rows to a file", call_check, &c) >= 3);
    assert_int_equal(test_dir_files(), 1); /* that of the first call; those that failed leave nothing */
    remove(c.csv);
    c.csv = NULL;
    c.quick = 0;
    c.conformance = 1;
    assert_true(fail_each("conformance", call_check, &c) >= 3);
    test_dir_remove();
}

/* ---- bench ----------------------------------------------------------------------------------- */

static kvs_status call_bench(const void *ctx, kvs_error *err)
{
    return kvs_bench_run(ctx, err);
}

static void a_bench_without_memory_gives_no_row(void **state)
{
    (void)state;
    assert_int_equal(kvs_log_levels("off", NULL), KVS_OK); /* ranks of an exchange say what ended them */
    const int64_t small = 64;
    const int64_t two = 2;
    const int64_t kv = KVS_KV_FP8;
    for (int32_t i = 0; kvs_bench_ops(i) != NULL; i++) {
        const kvs_bench_op *op = kvs_bench_ops(i);
        kvs_bench_config c = kvs_bench_config_default();
        c.op = op->name;
        c.one = 1;
        c.reps = 1;
        if ((op->axes & KVS_BENCH_POOL) != 0) {
            c.pool_bytes = 1 << 20;
        }
        if ((op->axes & KVS_BENCH_EXCHANGE) != 0) {
            c.timeout_ms = 2000;
        }
        if ((op->axes & KVS_BENCH_BATCH) != 0) {
            c.batch = (kvs_bench_axis){&two, 1};
        }
        if ((op->axes & KVS_BENCH_LEN) != 0) {
            c.len = (kvs_bench_axis){&small, 1};
        }
        if ((op->axes & KVS_BENCH_TOPK) != 0) {
            c.topk = (kvs_bench_axis){&two, 1};
        }
        if ((op->axes & KVS_BENCH_DCP) != 0) {
            c.dcp = (kvs_bench_axis){&two, 1};
        }
        if (strcmp(op->name, "write") == 0) {
            c.kv = (kvs_bench_axis){&kv, 1};
        }
        if (strncmp(op->name, "mha", 3) == 0) {
            c.q = (kvs_bench_axis){&two, 1};
        }
        c.threads = (kvs_bench_axis){&two, (op->axes & KVS_BENCH_THREADS) != 0};
        if ((op->axes & KVS_BENCH_POOL) != 0) {
            assert_true(fail_each(op->name, call_bench, &c) >= 3);
            continue;
        }
        /* these take a second each, for ceilings of 1 GiB: the first ones, and three of the case */
        const int64_t n = count(op->name, call_bench, &c);
        const int64_t at[] = {1, 2, n / 2, n * 3 / 4, n};
        for (size_t k = 0; k < UNIT_COUNT(at); k++) {
            fail_one(op->name, call_bench, &c, at[k]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_without_memory_is_no_plan),
        cmocka_unit_test(a_check_without_memory_does_not_pass),
        cmocka_unit_test(a_bench_without_memory_gives_no_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
