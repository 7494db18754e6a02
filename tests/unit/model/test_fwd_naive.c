/* The forward pass against one written a second time in double precision: every kind of model, every type of
 * weight, whole and split over ranks, in pieces and with drafts. */
#include "unit/unit.h"

#include <math.h>

#include "naive.h"
#include "tiny.h"

#include "base/mem.h"

enum { N_TOK = 56 };

/* Largest difference of a result's rows to the naive ones, how many rows differ by more than 0.25 anywhere,
 * and in how many the largest logit is another. */
typedef struct distance {
    double most;
    int32_t n_far, n_other;
} distance;

static int32_t largest(const double *x)
{
    int32_t best = 0;
    for (int32_t k = 1; k < TINY_VOCAB; k++) {
        best = x[k] > x[best] ? k : best;
    }
    return best;
}

static distance compare(float *got, const double *want)
{
    distance d = {0.0, 0, 0};
    for (int32_t t = 0; t < N_TOK; t++) {
        const float *x = tiny_at(got, 0, t, TINY_VOCAB);
        double wide[TINY_VOCAB];
        double row = 0.0;
        for (int32_t k = 0; k < TINY_VOCAB; k++) {
            wide[k] = (double)x[k];
            const double off = fabs(wide[k] - want[t * TINY_VOCAB + k]);
            row = off > row || isnan(off) ? off : row;
        }
        d.most = row > d.most || isnan(row) ? row : d.most;
        d.n_far += !(row <= 0.25);
        d.n_other += largest(wide) != largest(want + t * TINY_VOCAB);
    }
    return d;
}

static void expect_selection(const wt *w, const tiny_result *got, const naive *want)
{
    for (int64_t layer = 0; layer < w->h.n_layer; layer++) {
        for (int64_t t = 0; t < N_TOK; t++) {
            const int32_t *ids =
                got->ids + (layer * (int64_t)TINY_MAX_SEQ * TINY_MAX_LEN + t) * TINY_TOPK;
            const uint8_t *chosen = want->chosen + (layer * N_TOK + t) * N_TOK;
            int32_t n = 0;
            for (int32_t s = 0; s <= t; s++) {
                if (chosen[s] && ids[n++] != s) {
                    fail_msg("layer %d, row %d: entry %d is %d, want %d", (int)layer, (int)t, n - 1,
                             ids[n - 1], s);
                }
            }
            for (; n < TINY_TOPK; n++) {
                assert_int_equal(ids[n], -1);
            }
        }
    }
}

static tiny_run run_of(const wt *w)
{
    tiny_run r = tiny_default();
    r.n_seq = 1;
    r.len[0] = N_TOK;
    r.cut = 40;
    r.draft = w->h.n_mtp > 0;
    r.trace = w->h.n_index_head > 0;
    return r;
}

static void naive_of(const wt *w, double latent_eps, naive *n)
{
    int32_t token[N_TOK + 1];
    for (int32_t t = 0; t <= N_TOK; t++) {
        token[t] = tiny_token(0, t);
    }
    naive_run(w, token, N_TOK, latent_eps, n);
}

/* f32 all the way: logits to 2e-4, the same selections. */
static void f32_to_rounding(void **state)
{
    (void)state;
    for (tiny_kind kind = TINY_GLM52; kind <= TINY_V2; kind++) {
        const tiny_spec spec = {.kind = kind, .type = GEMM_F32, .seed = 11};
        wt *w = tiny_new(&spec);
        naive want;
        naive_of(w, (double)w->h.eps, &want);
        assert_true(want.gap > 1e-6);
        for (int32_t tp = 1; tp <= 8; tp += 7) {
            tiny_run r = run_of(w);
            r.tp = tp;
            r.ep = tp == 8 ? 4 : 0; /* two ranks share an expert */
            r.dcp = tp == 8 ? 4 : 1;
            r.kv = KVS_KV_F32;
            tiny_result got;
            tiny_execute(w, &r, &got);
            const distance main_model = compare(got.logits, want.logits);
            const distance draft = compare(got.draft, want.draft);
            print_message("kind %d tp %d: logits off by %.2g, draft %.2g\n", (int)kind, tp,
                          main_model.most, w->h.n_mtp > 0 ? draft.most : 0.0);
            assert_true(main_model.most < 2e-4);
            assert_true(w->h.n_mtp == 0 || draft.most < 2e-4);
            if (w->h.n_index_head > 0) {
                expect_selection(w, &got, &want);
            }
            tiny_result_free(&got);
        }
        naive_free(&want);
        tiny_free(w);
    }
}

/* Rounded operands, every type of weight: logits near and the likeliest token the same, but for a few rows whose
 * router was close to a tie and took another expert. A wrong scale, slice or order of blocks moves every row. */
static void rounded_weights(void **state)
{
    (void)state;
    static const struct {
        tiny_kind kind;
        int32_t type, mixed, tp;
    } cell[] = {{TINY_V3, GEMM_FP8, 0, 8}, {TINY_V2, GEMM_FP8, 1, 1}, {TINY_V3, GEMM_BF16, 0, 4}};
    for (size_t i = 0; i < UNIT_COUNT(cell); i++) {
        const tiny_spec spec = {.kind = cell[i].kind, .type = cell[i].type, .mixed = cell[i].mixed,
                                .seed = 12};
        wt *w = tiny_new(&spec);
        naive want;
        naive_of(w, (double)w->h.eps, &want);
        tiny_run r = run_of(w);
        r.tp = cell[i].tp;
        r.ep = r.tp / 2;
        r.kv = KVS_KV_BF16;
        tiny_result got;
        tiny_execute(w, &r, &got);
        const distance d = compare(got.logits, want.logits);
        print_message("cell %zu: logits off by %.2g, %d of %d rows by more than 0.25, %d prefer another token\n", i,
                      d.most, d.n_far, N_TOK, d.n_other);
        assert_true(d.n_far <= N_TOK / 4);
        assert_true(d.n_other <= N_TOK / 8);
        tiny_result_free(&got);
        naive_free(&want);
        tiny_free(w);
    }
}

/* The eps of the latent norms is one of its own. */
static void latent_eps(void **state)
{
    (void)state;
    const tiny_spec spec = {.kind = TINY_V3, .type = GEMM_F32, .seed = 13};
    wt *w = tiny_new(&spec);
    tiny_run r = run_of(w);
    r.kv = KVS_KV_F32;
    r.latent_eps = 0.25f;
    tiny_result got;
    tiny_execute(w, &r, &got);
    naive want;
    naive_of(w, 0.25, &want);
    assert_true(compare(got.logits, want.logits).most < 2e-4);
    naive_free(&want);
    naive_of(w, (double)w->h.eps, &want);
    assert_true(compare(got.logits, want.logits).most > 1e-2);
    naive_free(&want);
    tiny_result_free(&got);
    tiny_free(w);
}

int main(void)
{
    mem_poison(true);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f32_to_rounding),
        cmocka_unit_test(rounded_weights),
        cmocka_unit_test(latent_eps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
