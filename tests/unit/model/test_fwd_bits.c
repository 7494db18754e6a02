/* The forward pass gives the same bits for every DCP size, interleave aside, every cut of a prompt, a row
 * alone or in company, any number of threads and any deal of pages; drafts included. Prompt rows of dense models
 * take the multi-head form, which the other form meets to rounding. With the argument `rest` the
 * cells that take longer. */
#include "unit/unit.h"

#include <float.h>

#include "tiny.h"

#include "base/mem.h"
#include "model/fwd_impl.h"

static const tiny_kind g_kinds[] = {TINY_GLM52, TINY_V32, TINY_V3, TINY_V2};
static int g_rest;

static tiny_run run_of(tiny_kind kind)
{
    tiny_run r = tiny_default();
    r.trace = kind == TINY_GLM52 || kind == TINY_V32;
    r.draft = kind != TINY_V2;
    return r;
}

/* Runs r and compares it with `want`. */
static void expect_same(const wt *w, const tiny_run *r, const tiny_result *want, const char *what)
{
    tiny_result got;
    tiny_execute(w, r, &got);
    tiny_same(r, want, &got, what);
    tiny_result_free(&got);
}

static void dcp_sizes(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(g_kinds); i++) {
        if ((!g_rest && i % 2 == 1) || (UNIT_TSAN && i > 0)) {
            continue;
        }
        const tiny_spec spec = {.kind = g_kinds[i], .type = i == 2 ? GEMM_FP8 : GEMM_BF16, .mixed = 1,
                                .seed = 1};
        wt *w = tiny_new(&spec);
        tiny_run r = run_of(spec.kind);
        r.tp = 8;
        r.chain = r.draft;
        tiny_result one;
        tiny_execute(w, &r, &one);
        for (r.dcp = g_rest ? 2 : i == 0 ? 8 : 4; r.dcp <= 8; r.dcp *= g_rest ? 2 : 8) {
            r.pages = r.dcp == 4 ? 1 : 0;
            expect_same(w, &r, &one, "dcp 1 and more");
        }
        tiny_result_free(&one);
        tiny_free(w);
    }
}

static void interleave_and_formats(void **state)
{
    (void)state;
    static const struct {
        kvs_kv_format kv;
        kvs_index_format index;
        int32_t interleave, hadamard;
    } cell[] = {{KVS_KV_F32, KVS_INDEX_F32, 4, 0},
                {KVS_KV_BF16, KVS_INDEX_FP8, 64, 1},
                {KVS_KV_FP8_DS_MLA, KVS_INDEX_FP8, 2, 0},
                {KVS_KV_F32, KVS_INDEX_FP8, 1, 1}};
    const tiny_spec spec = {.kind = TINY_GLM52, .type = GEMM_FP8, .seed = 2};
    wt *w = tiny_new(&spec);
    for (size_t i = 0; i < (g_rest ? UNIT_COUNT(cell) : 1); i++) {
        tiny_run r = run_of(spec.kind);
        r.tp = 4;
        r.kv = cell[i].kv;
        r.index_kv = cell[i].index;
        r.interleave = cell[i].interleave;
        r.hadamard = cell[i].hadamard;
        tiny_result one;
        tiny_execute(w, &r, &one);
        r.dcp = 4;
        r.cut = 29;
        expect_same(w, &r, &one, "formats");
        tiny_result_free(&one);
    }
    tiny_free(w);
}

/* Chunks on and off page borders, single tokens, one sequence after the other, drafts in other pieces. */
static void cuts_and_company(void **state)
{
    (void)state;
    static const struct {
        int32_t cut, apart, draft_cut, pages;
    } cell[] = {{64, 0, 0, 1}, {7, 0, 3, 0}, {1, 0, 0, 0}, {50, 1, 20, 1}};
    for (size_t k = 0; k < UNIT_COUNT(g_kinds); k++) {
        if (!g_rest && (k == 1 || k == 2)) {
            continue;
        }
        const tiny_spec spec = {.kind = g_kinds[k], .type = k == 0 ? GEMM_F32 : GEMM_FP8, .mixed = k == 3,
                                .seed = 3};
        wt *w = tiny_new(&spec);
        tiny_run r = run_of(spec.kind);
        tiny_result whole;
        tiny_execute(w, &r, &whole);
        for (size_t i = g_rest ? 0 : 1 + k / 3; i < (g_rest ? UNIT_COUNT(cell) : 2 + k / 3); i++) {
            r.cut = cell[i].cut;
            r.apart = cell[i].apart;
            r.draft_cut = cell[i].draft_cut;
            r.pages = cell[i].pages;
            expect_same(w, &r, &whole, "cut");
        }
        tiny_result_free(&whole);
        tiny_free(w);
    }
}

static void threads(void **state)
{
    (void)state;
    static const tiny_kind kinds[] = {TINY_GLM52, TINY_V3};
    for (size_t i = 0; i < UNIT_COUNT(kinds); i++) {
        const tiny_spec spec = {.kind = kinds[i], .type = GEMM_BF16, .seed = 4};
        wt *w = tiny_new(&spec);
        tiny_run r = run_of(spec.kind);
        r.chain = 1;
        tiny_result one;
        tiny_execute(w, &r, &one);
        for (r.threads = 2; r.threads <= (g_rest ? 3 : 2); r.threads++) {
            expect_same(w, &r, &one, "threads");
        }
        tiny_result_free(&one);
        tiny_free(w);
    }
}

/* Small chunks of rows and of sums, where a real step would have large ones. */
static const char *small_chunks(fwd *f, const kvs_batch *b)
{
    (void)b;
    f->s.attend_rows = 7;
    f->s.ffn_rows = 3;
    f->s.reduce_values = 1000;
    f->s.head_pairs = 100; /* so that groups of heads follow from the rows of a request */
    f->s.head_most = 3;
    return NULL;
}

static void chunks_of_rows(void **state)
{
    (void)state;
    static const tiny_kind kinds[] = {TINY_GLM52, TINY_V3};
    for (size_t i = 0; i < UNIT_COUNT(kinds); i++) {
        const tiny_spec spec = {.kind = kinds[i], .type = GEMM_FP8, .mixed = 1, .seed = 5};
        wt *w = tiny_new(&spec);
        tiny_run r = run_of(spec.kind);
        r.tp = 2;
        r.dcp = 2;
        tiny_result whole;
        tiny_execute(w, &r, &whole);
        r.between = small_chunks;
        expect_same(w, &r, &whole, "chunks");
        tiny_result_free(&whole);
        tiny_free(w);
    }
}

/* A prompt of more than a block of 512 positions, and rows generated behind it. */
static void blocks_of_the_context(void **state)
{
    (void)state;
    static const struct {
        tiny_kind kind;
        int32_t type;
        kvs_kv_format kv;
        int32_t tp, dcp, interleave, cut, threads;
    } cell[] = {{TINY_V2, GEMM_BF16, KVS_KV_BF16, 4, 4, 1, 97, 1},
                {TINY_V2, GEMM_F32, KVS_KV_F32, 2, 2, 64, 513, 2},
                {TINY_V3, GEMM_FP8, KVS_KV_FP8_DS_MLA, 8, 8, 16, 300, 1},
                {TINY_V3, GEMM_F32, KVS_KV_BF16, 4, 2, 1, 64, 1},
                {TINY_V2, GEMM_BF16, KVS_KV_F32, 4, 2, 8, 511, 2},
                {TINY_V2, GEMM_BF16, KVS_KV_FP8, 8, 4, 2, 128, 1}};
    for (size_t i = 0; i < (g_rest ? UNIT_COUNT(cell) : 1); i++) {
        const tiny_spec spec = {.kind = cell[i].kind, .type = cell[i].type, .seed = 6};
        wt *w = tiny_new(&spec);
        tiny_run r = run_of(spec.kind);
        r.tp = cell[i].tp;
        r.kv = cell[i].kv;
        r.interleave = cell[i].interleave;
        r.n_seq = 2;
        r.len[0] = 560;
        r.prompt[0] = 540;
        r.len[1] = 514;
        r.prompt[1] = 514;
        tiny_result whole;
        tiny_execute(w, &r, &whole);
        r.dcp = cell[i].dcp;
        r.cut = cell[i].cut;
        r.threads = cell[i].threads;
        r.pages = 1;
        expect_same(w, &r, &whole, "blocks");
        tiny_result_free(&whole);
        tiny_free(w);
    }
}

static void both_forms(const wt *w, tiny_run r, float least, float most)
{
    tiny_result heads, absorbed;
    tiny_execute(w, &r, &heads);
    for (int32_t i = 0; i < r.n_seq; i++) {
        r.prompt[i] = 0;
    }
    tiny_execute(w, &r, &absorbed);
    const float apart = tiny_apart(&r, &heads, &absorbed);
    print_message("two forms: logits apart by %.2g\n", (double)apart);
    assert_true(apart >= least && apart < most);
    tiny_result_free(&heads);
    tiny_result_free(&absorbed);
}

/* The two forms differ in rounding and in nothing else; a model with an indexer knows one only. */
static void forms_agree(void **state)
{
    (void)state;
    static const struct {
        tiny_kind kind;
        int32_t type;
        kvs_kv_format kv;
        float least, most;
        int64_t len;
    } cell[] = {{TINY_V2, GEMM_F32, KVS_KV_F32, 1e-9f, 1e-4f, 540}, /* two blocks */
                {TINY_V3, GEMM_F32, KVS_KV_F32, 1e-9f, 1e-4f, 90},
                {TINY_V2, GEMM_BF16, KVS_KV_BF16, 1e-9f, 0.5f, 90},
                {TINY_V32, GEMM_BF16, KVS_KV_BF16, 0.0f, FLT_MIN, 90}};
    for (size_t i = 0; i < UNIT_COUNT(cell); i++) {
        const tiny_spec spec = {.kind = cell[i].kind, .type = cell[i].type, .seed = 7};
        wt *w = tiny_new(&spec);
        tiny_run r = run_of(spec.kind);
        r.kv = cell[i].kv;
        r.n_seq = 1;
        r.len[0] = r.prompt[0] = cell[i].len;
        both_forms(w, r, cell[i].least, cell[i].most);
        tiny_free(w);
    }
}

int main(int argc, char **argv)
{
    g_rest = argc > 1 && strcmp(argv[1], "rest") == 0;
    mem_poison(true);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dcp_sizes),
        cmocka_unit_test(interleave_and_formats),
        cmocka_unit_test(cuts_and_company),
        cmocka_unit_test(threads),
        cmocka_unit_test(chunks_of_rows),
        cmocka_unit_test(blocks_of_the_context),
        cmocka_unit_test(forms_agree),
    };
    if (UNIT_TSAN) {
        const struct CMUnitTest shared[] = {
            cmocka_unit_test(dcp_sizes),
            cmocka_unit_test(threads),
        };
        return cmocka_run_group_tests(shared, NULL, NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
