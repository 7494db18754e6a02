/* Plans through the public API: bytes per token of the public models, what fits where, what an
 * exchange sends, and refusals whose nearest setting really lifts them. */
#include "unit/unit.h"

#include <inttypes.h>

#include "base/rng.h"
#include "kvspan/plan.h"

static kvs_plan made(const kvs_plan_config *cfg)
{
    kvs_plan p = kvs_plan_empty();
    kvs_error err = {.code = KVS_OK};
    if (kvs_plan_make(&p, cfg, &err) != KVS_OK) {
        fail_msg("plan failed: %s", err.text);
    }
    return p;
}

static kvs_plan_config config(const char *preset)
{
    kvs_plan_config c = kvs_plan_config_default();
    c.preset = preset;
    return c;
}

static const kvs_plan_refusal *refusal(const kvs_plan *p, const char *rule)
{
    for (int32_t i = 0; i < p->n_refusal; i++) {
        if (strcmp(p->refusal[i].rule, rule) == 0) {
            return &p->refusal[i];
        }
    }
    return NULL;
}

/* ---- the public figures ---------------------------------------------------------------------- */

static void bytes_per_token_are_the_published_ones(void **state)
{
    (void)state;
    static const struct {
        const char *preset;
        int32_t mtp;
        int64_t latent, index, draft;
    } want[] = {
        {"deepseek-v2-lite", 0, 27 * 1152, 0, 0},    {"deepseek-v3", 0, 61 * 1152, 0, 0},
        {"deepseek-v3", 1, 61 * 1152, 0, 1152},      {"kimi-k2", 0, 61 * 1152, 0, 0},
        {"deepseek-v3.2", 0, 61 * 656, 61 * 132, 0}, {"glm-5", 0, 78 * 656, 78 * 132, 0},
        {"glm-5.2", 0, 78 * 656, 21 * 132, 0},       {"glm-5.2", 3, 78 * 656, 21 * 132, 788},
    };
    for (size_t i = 0; i < UNIT_COUNT(want); i++) {
        kvs_plan_config c = config(want[i].preset);
        c.mtp = want[i].mtp;
        const kvs_plan p = made(&c);
        assert_int_equal(p.token_latent, want[i].latent);
        assert_int_equal(p.token_index, want[i].index);
        assert_int_equal(p.token_draft, want[i].draft);
        assert_int_equal(p.token_bytes, want[i].latent + want[i].index + want[i].draft);
        assert_int_equal(p.page_bytes, 64 * p.token_bytes);
    }
    kvs_plan_config c = config("glm-5");
    assert_int_equal(made(&c).token_bytes, 61464);
    c = config("glm-5.2");
    assert_int_equal(made(&c).token_bytes, 53940);
    c.mtp = 5;
    assert_int_equal(made(&c).token_bytes, 54728);
}

static void formats_change_the_bytes_of_rows_and_keys(void **state)
{
    (void)state;
    static const struct {
        kvs_kv_format kv;
        kvs_index_format index;
        int64_t row, key;
    } want[] = {
        {KVS_KV_FP8_DS_MLA, KVS_INDEX_AUTO, 656, 132}, {KVS_KV_BF16, KVS_INDEX_AUTO, 1152, 132},
        {KVS_KV_BF16, KVS_INDEX_F32, 1152, 512},       {KVS_KV_F32, KVS_INDEX_AUTO, 2304, 512},
        {KVS_KV_F32, KVS_INDEX_FP8, 2304, 132},
    };
    for (size_t i = 0; i < UNIT_COUNT(want); i++) {
        kvs_plan_config c = config("deepseek-v3.2");
        c.kv = want[i].kv;
        c.index_kv = want[i].index;
        const kvs_plan p = made(&c);
        assert_null(refusal(&p, "kv_format"));
        assert_int_equal(p.row_bytes, want[i].row);
        assert_int_equal(p.index_token_bytes, want[i].key);
        assert_int_equal(p.token_bytes, 61 * (want[i].row + want[i].key));
    }
}

static void model_facts_are_reported(void **state)
{
    (void)state;
    kvs_plan_config c = config("glm-5.2");
    const kvs_plan p = made(&c);
    assert_string_equal(p.model, "glm-5.2");
    assert_string_equal(p.architecture, "GlmMoeDsaForCausalLM");
    assert_int_equal(p.n_layer, 78);
    assert_int_equal(p.n_index_layer, 21);
    assert_int_equal(p.n_param + p.n_param_mtp, 753329921024);
    assert_in_range(p.checkpoint_bytes, 755550000000, 755650000000);
    assert_int_equal(p.weights, KVS_WEIGHT_FP8);
    assert_int_equal(p.ctx, 1048576);
    c = config("deepseek-v2-lite");
    assert_int_equal(made(&c).weights, KVS_WEIGHT_BF16);
}

/* ---- what fits ------------------------------------------------------------------------------- */

/* By hand from the published shapes: eight of 256 experts and the shared one, no embedding table. */
static void a_tokens_pass_takes_its_active_experts_only(void **state)
{
    (void)state;
    const kvs_plan_config c = config("deepseek-v3");
    const kvs_plan p = made(&c);
    const int64_t attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 +
                              128 * 128 * 7168 + 2 * 7168 + 1536 + 512;
    const int64_t ffn = 3 * 7168 * 18432; /* also nine experts of 2048 */
    const int64_t want = 61 * (attention + ffn) + 58 * INT64_C(256) * 7168 + 7168;
    assert_int_equal(p.head_param, INT64_C(129280) * 7168);
    assert_int_equal(p.step_param, want);
    assert_true(p.step_weight_bytes > want + 2 * p.head_param);
    assert_true(p.step_weight_bytes < (want + 2 * p.head_param) / 100 * 101);
}

static void pages_fill_what_the_weights_leave(void **state)
{
    (void)state;
    for (int32_t dcp = 1; dcp <= 8; dcp *= 2) {
        kvs_plan_config c = config("deepseek-v3.2");
        c.gpus = 16;
        c.tp = 8;
        c.dcp = dcp;
        c.ctx = 4096;
        const kvs_plan p = made(&c);
        assert_int_equal(p.n_refusal, 0);
        assert_int_equal(p.usable_bytes, (int64_t)(141e9 * 0.92));
        assert_int_equal(p.cache_bytes, p.usable_bytes - p.weight_bytes - p.weight_copies -
                                            p.workspace_bytes);
        assert_true(p.n_page * p.page_bytes <= p.cache_bytes);
        assert_true((p.n_page + 1) * p.page_bytes > p.cache_bytes);
        assert_int_equal(p.tokens_per_rank, 64 * p.n_page);
        assert_int_equal(p.tokens_total, 64 * p.n_page * dcp);
        assert_int_equal(p.tokens_replicas, 2 * p.tokens_total);
        assert_int_equal(p.longest_ctx, p.tokens_total < 163840 ? p.tokens_total : 163840);
        assert_int_equal(p.weight_mtp, 0);
    }
}

static void draft_layers_cost_weights_and_cache_only_when_used(void **state)
{
    (void)state;
    kvs_plan_config c = config("deepseek-v3.2");
    const kvs_plan without = made(&c);
    c.mtp = 2;
    const kvs_plan with = made(&c);
    assert_true(with.weight_mtp > 0);
    assert_int_equal(with.weight_bytes, without.weight_bytes);
    assert_true(with.n_page < without.n_page);
    assert_int_equal(with.n_row, 3);
}

/* A sequence takes whole pages on every rank: seqs of one token more than a span need two each. */
static void sequences_take_whole_spans(void **state)
{
    (void)state;
    kvs_plan_config c = config("deepseek-v3.2");
    c.dcp = 4;
    const kvs_plan p = made(&c);
    assert_true(p.n_page > 64 && p.n_page < 65536);
    const int64_t span = 64 * 4;
    c.seqs = (int32_t)(p.n_page / 2 + 1);
    c.ctx = span;
    c.chunk = c.seqs; /* the same rows, so the same workspaces but for the tables */
    kvs_plan q = made(&c);
    assert_null(refusal(&q, "cache_fit"));
    c.ctx = span + 1;
    q = made(&c);
    assert_non_null(refusal(&q, "cache_fit"));
    assert_int_equal(q.longest_ctx_seqs, q.n_page / c.seqs * span);
}

static void longest_context_is_the_models_where_memory_allows_more(void **state)
{
    (void)state;
    kvs_plan_config c = config("deepseek-v2-lite");
    c.gpus = 8;
    c.tp = 8;
    c.dcp = 8;
    const kvs_plan p = made(&c);
    assert_true(p.tokens_total > 163840);
    assert_int_equal(p.longest_ctx, 163840);
    assert_int_equal(p.n_refusal, 0);
}

/* ---- exchange -------------------------------------------------------------------------------- */

static void exchange_bytes_follow_from_shapes(void **state)
{
    (void)state;
    kvs_plan_config c = config("deepseek-v3.2");
    c.tp = 8;
    c.dcp = 4;
    c.seqs = 3;
    c.mtp = 1;
    c.ctx = 100000;
    const kvs_plan p = made(&c);
    /* 6 rows, 16 heads on a rank, 3 peers */
    assert_int_equal(p.n_row, 6);
    assert_int_equal(p.a2a.q, 6 * 16 * 576 * 2 * 3);
    assert_int_equal(p.a2a.partial, 6 * 16 * 512 * 4 * 3);
    assert_int_equal(p.a2a.lse, 6 * 16 * 4 * 3);
    assert_int_equal(p.a2a.selection, 6 * (2048 * 8 + 4) * 3);
    assert_int_equal(p.ag_rs.q, p.a2a.q);
    assert_int_equal(p.ag_rs.partial, p.a2a.partial);
    assert_int_equal(p.ag_rs.lse, 6 * 64 * 4 * 3);
    assert_int_equal(p.a2a_step, 61 * (p.a2a.q + p.a2a.partial + p.a2a.lse) + 61 * p.a2a.selection);
    /* a shard of 250 tokens has no more candidates to bring */
    c.ctx = 1000;
    assert_int_equal(made(&c).a2a.selection, 6 * (250 * 8 + 4) * 3);

    c.preset = "glm-5.2"; /* selects in 21 of 78 layers */
    const kvs_plan g = made(&c);
    assert_int_equal(g.a2a_step, 78 * (g.a2a.q + g.a2a.partial + g.a2a.lse) + 21 * g.a2a.selection);
    c.dcp = 1;
    const kvs_plan one = made(&c);
    assert_int_equal(one.a2a_step, 0);
    assert_int_equal(one.ag_rs_step, 0);
    c.preset = "deepseek-v3";
    c.dcp = 8;
    assert_int_equal(made(&c).a2a.selection, 0);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void expect(const kvs_plan_config *c, const char *rule, const char *value,
                   const char *nearest)
{
    const kvs_plan p = made(c);
    const kvs_plan_refusal *r = refusal(&p, rule);
    if (r == NULL || strstr(r->value, value) == NULL || strcmp(r->nearest, nearest) != 0 ||
        r->why[0] == '\0') {
        fail_msg("%s: got %s \"%s\" \"%s\" \"%s\", %d refusals (first %s)", rule,
                 r ? r->rule : "nothing", r ? r->value : "", r ? r->why : "", r ? r->nearest : "",
                 p.n_refusal, p.n_refusal > 0 ? p.refusal[0].rule : "-");
    }
}

static void each_rule_says_what_and_what_would_work(void **state)
{
    (void)state;
    kvs_plan_config c = config("deepseek-v3.2");
    c.gpus = 8;
    c.tp = 6;
    expect(&c, "tp_divides_heads", "heads 128, tp 6", "--tp 8");
    c.tp = 16;
    expect(&c, "tp_divides_gpus", "tp 16, gpus 8", "--tp 8");
    c.gpus = 7;
    c.tp = 8;
    c.dcp = 2;
    expect(&c, "tp_divides_gpus", "tp 8, gpus 7", "--gpus 8");
    c = config("deepseek-v2-lite"); /* 16 heads */
    c.gpus = 32;
    expect(&c, "tp_divides_heads", "heads 16, tp 32", "--tp 16");
    c = config("deepseek-v3.2");
    c.dcp = 3;
    expect(&c, "dcp_same_bits", "dcp 3", "--dcp 4");
    c.dcp = 16;
    expect(&c, "dcp_range", "dcp 16", "--dcp 8");
    c.dcp = 8;
    c.gpus = 8;
    c.tp = 4;
    expect(&c, "dcp_divides_tp", "dcp 8, tp 4", "--dcp 4");
    c = config("deepseek-v3.2");
    c.interleave = 128;
    expect(&c, "interleave_divides_page", "interleave 128", "--interleave 64");
    c.interleave = 3;
    expect(&c, "interleave_divides_page", "interleave 3", "--interleave 4");
    c = config("kimi-k2");
    c.gpus = 64;
    c.ep = 3;
    expect(&c, "ep_divides_tp", "ep 3, tp 64", "--ep 4");
    c.gpus = 16;
    c.ep = 32;
    expect(&c, "ep_divides_tp", "ep 32, tp 16", "--ep 16");
    c = config("deepseek-v3.2");
    c.kv = KVS_KV_FP8;
    expect(&c, "kv_format", "kv fp8", "--kv fp8_ds_mla");
    c.kv = KVS_KV_FP8_DS_MLA;
    c.index_kv = KVS_INDEX_F32;
    expect(&c, "kv_format", "index-kv f32", "--kv fp8_ds_mla");
    c = config("kimi-k2");
    c.mtp = 1;
    expect(&c, "mtp_layers", "mtp 1", "--mtp 0");
    c = config("glm-5.2");
    c.mtp = 8;
    expect(&c, "mtp_range", "mtp 8", "--mtp 7");
    c = config("deepseek-v3");
    c.ctx = 163841;
    expect(&c, "ctx_model", "ctx 163841", "--ctx 163840");
    c = config("deepseek-v3");
    c.gpus = 4;
    expect(&c, "weights_fit", "GB usable", "--gpus 8 --tp 8");
    c.gpus = 8;
    c.weights = KVS_WEIGHT_BF16;
    expect(&c, "weights_fit", "GB usable", "--weights fp8");
}

static void a_cache_that_is_too_small_names_the_dcp_size_that_holds(void **state)
{
    (void)state;
    kvs_plan_config c = config("glm-5.2");
    c.gpus = 8;
    c.seqs = 2;
    const kvs_plan p = made(&c);
    const kvs_plan_refusal *r = refusal(&p, "cache_fit");
    assert_non_null(r);
    assert_non_null(strstr(r->value, "2 x 1048576"));
    int32_t dcp = 0;
    int64_t ctx = 0;
    assert_int_equal(sscanf(r->nearest, "--dcp %d, or --ctx %" SCNd64, &dcp, &ctx), 2);
    assert_int_equal(ctx, p.longest_ctx_seqs);
    c.dcp = dcp;
    kvs_plan q = made(&c);
    assert_int_equal(q.n_refusal, 0);
    c.dcp = dcp / 2; /* no smaller one holds */
    q = made(&c);
    assert_non_null(refusal(&q, "cache_fit"));
}

/* Puts the (first) options of a nearest setting in: "--gpus 16 --tp 16", "--dcp 2, or --ctx 5". */
static void apply(kvs_plan_config *c, const char *nearest)
{
    char text[96];
    snprintf(text, sizeof text, "%s", nearest);
    char *cut = strchr(text, ',');
    if (cut != NULL) {
        *cut = '\0';
    }
    char *save = NULL;
    for (char *o = strtok_r(text, " ", &save); o != NULL; o = strtok_r(NULL, " ", &save)) {
        const char *v = strtok_r(NULL, " ", &save);
        assert_non_null(v);
        const int64_t n = strtoll(v, NULL, 10);
        if (strcmp(o, "--tp") == 0) {
            c->tp = (int32_t)n;
        } else if (strcmp(o, "--gpus") == 0) {
            c->gpus = (int32_t)n;
        } else if (strcmp(o, "--dcp") == 0) {
            c->dcp = (int32_t)n;
        } else if (strcmp(o, "--ep") == 0) {
            c->ep = (int32_t)n;
        } else if (strcmp(o, "--interleave") == 0) {
            c->interleave = (int32_t)n;
        } else if (strcmp(o, "--mtp") == 0) {
            c->mtp = (int32_t)n;
        } else if (strcmp(o, "--seqs") == 0) {
            c->seqs = (int32_t)n;
        } else if (strcmp(o, "--ctx") == 0) {
            c->ctx = n;
        } else if (strcmp(o, "--weights") == 0) {
            c->weights = KVS_WEIGHT_FP8;
        } else if (strcmp(o, "--kv") == 0) {
            c->kv = KVS_KV_FP8_DS_MLA;
            c->index_kv = KVS_INDEX_AUTO;
        } else {
            fail_msg("unknown option in \"%s\"", nearest);
        }
    }
}

static void taking_the_nearest_setting_lifts_the_refusal(void **state)
{
    (void)state;
    const uint64_t seed = 20260101;
    int n_refused = 0;
    for (uint64_t run = 0; run < 2000; run++) {
        rng r = rng_init(seed, run);
        kvs_plan_config c = config(kvs_plan_preset((int32_t)rng_next_below(&r, 10)));
        c.gpus = (int32_t)rng_next_below(&r, 3) == 0 ? 0 : (int32_t)rng_next_range(&r, 1, 40);
        c.tp = (int32_t)rng_next_below(&r, 2) == 0 ? 0 : (int32_t)rng_next_range(&r, 1, 40);
        c.dcp = (int32_t)rng_next_range(&r, 0, 10);
        c.ep = (int32_t)rng_next_below(&r, 2) == 0 ? 0 : (int32_t)rng_next_range(&r, 1, 20);
        c.interleave = (int32_t)rng_next_range(&r, 0, 70);
        c.kv = (kvs_kv_format)rng_next_below(&r, 5);
        c.index_kv = (kvs_index_format)rng_next_below(&r, 3);
        c.weights = (kvs_weight_format)rng_next_below(&r, 3);
        c.mtp = (int32_t)rng_next_range(&r, 0, 9);
        c.ctx = rng_next_range(&r, 0, 1 << 21);
        c.seqs = (int32_t)rng_next_range(&r, 0, 64);
        c.mem_bytes = rng_next_range(&r, 1, 300) * INT64_C(1000000000);
        const kvs_plan p = made(&c);
        assert_true(p.n_refusal < KVS_PLAN_MAX_REFUSAL);
        assert_true(p.page_bytes > 0 && p.tp >= 1 && p.gpus % p.tp == 0 && p.tp % p.dcp == 0);
        for (int32_t i = 0; i < p.n_refusal; i++) {
            const kvs_plan_refusal *f = &p.refusal[i];
            n_refused++;
            assert_true(f->rule[0] != '\0' && f->value[0] != '\0' && f->why[0] != '\0');
            if (f->nearest[0] == '\0' || strcmp(f->rule, "kv_format") == 0) {
                continue; /* kv-format depends on what the model has: tested above */
            }
            /* what was refused before it was replaced by its own nearest setting */
            kvs_plan_config d = c;
            for (int32_t k = 0; k <= i; k++) {
                if (strcmp(p.refusal[k].rule, "kv_format") != 0) {
                    apply(&d, p.refusal[k].nearest);
                }
            }
            const kvs_plan q = made(&d);
            if (refusal(&q, f->rule) != NULL) {
                fail_msg("seed %" PRIu64 " run %" PRIu64 ": %s (%s) still refused after %s", seed,
                         run, f->rule, f->value, f->nearest);
            }
        }
    }
    assert_true(n_refused > 1000);
}

/* ---- arguments ------------------------------------------------------------------------------- */

static void what_is_no_setting_is_an_error_that_names_the_field(void **state)
{
    (void)state;
    kvs_plan p = kvs_plan_empty();
    kvs_error err;
    kvs_plan_config c = kvs_plan_config_default();
    p.n_head = 4711;
    assert_int_equal(kvs_plan_make(&p, &c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "preset or a model folder"));
    c.preset = "deepseek-v3";
    c.model_dir = "/tmp";
    assert_int_equal(kvs_plan_make(&p, &c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "not two"));
    c = config("deepseek-v4");
    assert_int_equal(kvs_plan_make(&p, &c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "deepseek-v4"));
    assert_non_null(strstr(err.text, "glm-5.2"));
    c = config("glm-5");
    c.gpus = -1;
    assert_int_equal(kvs_plan_make(&p, &c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "gpus -1"));
    c = config("glm-5");
    c.util = 1.5;
    assert_int_equal(kvs_plan_make(&p, &c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "util 1.5"));
    c = config("glm-5");
    c.kv = (kvs_kv_format)9;
    assert_int_equal(kvs_plan_make(&p, &c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "kv 9"));
    c = config("glm-5");
    c.struct_size = 0;
    assert_int_equal(kvs_plan_make(&p, &c, &err), KVS_INVALID);
    assert_non_null(strstr(err.text, "struct_size"));
    c = kvs_plan_config_default();
    c.model_dir = "/nonexistent";
    assert_int_equal(kvs_plan_make(&p, &c, &err), KVS_IO);
    assert_int_equal(kvs_plan_make(NULL, &c, NULL), KVS_INVALID);
    assert_int_equal(p.n_head, 4711); /* untouched by all of these */
}

/* A caller compiled against shorter structs: what lies past them is neither read nor written. */
static void shorter_structs_of_older_callers_work(void **state)
{
    (void)state;
    kvs_plan_config c = config("glm-5.2");
    c.mtp = 7;
    c.chunk = -5;
    c.struct_size = offsetof(kvs_plan_config, mtp);
    kvs_plan p;
    memset(&p, 0xA5, sizeof p);
    p.struct_size = offsetof(kvs_plan, gpus);
    assert_int_equal(kvs_plan_make(&p, &c, NULL), KVS_OK);
    assert_int_equal(p.struct_size, offsetof(kvs_plan, gpus));
    assert_int_equal(p.n_layer, 78);
    const unsigned char *b = (const unsigned char *)&p;
    for (size_t i = offsetof(kvs_plan, gpus); i < sizeof p; i++) {
        assert_int_equal(b[i], 0xA5);
    }
}

static void extreme_settings_stay_in_range(void **state)
{
    (void)state;
    kvs_plan_config c = config("glm-5.2");
    c.gpus = 65536;
    c.tp = 64;
    c.dcp = 8;
    c.seqs = 65536;
    c.mtp = 7;
    c.mem_bytes = INT64_C(1) << 50;
    c.util = 1.0;
    const kvs_plan p = made(&c);
    assert_true(p.n_page > 0 && p.n_page < (INT64_C(1) << 31) / 64);
    assert_true(p.tokens_replicas > p.tokens_total && p.a2a_step > 0 && p.workspace_bytes > 0);
    c.mem_bytes = 1;
    const kvs_plan q = made(&c);
    assert_int_equal(q.n_page, 0);
    assert_int_equal(q.longest_ctx, 0);
    assert_non_null(refusal(&q, "weights_fit"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_per_token_are_the_published_ones),
        cmocka_unit_test(formats_change_the_bytes_of_rows_and_keys),
        cmocka_unit_test(model_facts_are_reported),
        cmocka_unit_test(a_tokens_pass_takes_its_active_experts_only),
        cmocka_unit_test(pages_fill_what_the_weights_leave),
        cmocka_unit_test(draft_layers_cost_weights_and_cache_only_when_used),
        cmocka_unit_test(sequences_take_whole_spans),
        cmocka_unit_test(longest_context_is_the_models_where_memory_allows_more),
        cmocka_unit_test(exchange_bytes_follow_from_shapes),
        cmocka_unit_test(each_rule_says_what_and_what_would_work),
        cmocka_unit_test(a_cache_that_is_too_small_names_the_dcp_size_that_holds),
        cmocka_unit_test(taking_the_nearest_setting_lifts_the_refusal),
        cmocka_unit_test(what_is_no_setting_is_an_error_that_names_the_field),
        cmocka_unit_test(shorter_structs_of_older_callers_work),
        cmocka_unit_test(extreme_settings_stay_in_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
