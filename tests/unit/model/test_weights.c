/* The inventory of weights: parameter counts of the public models, bytes of whole checkpoints, and
 * the bytes of a rank against a walk over every row and column of every tensor. */
#include "unit/unit.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/weights.h"

static hp preset(const char *name)
{
    hp g;
    assert_int_equal(hp_find(&g, name, NULL), KVS_OK);
    return g;
}

static void parameter_counts_are_the_published_ones(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t n_main, n_mtp;
    } want[] = {
        {"deepseek-v2-lite", 15706484224, 0},
        {"deepseek-v3", 671026404352, 11610067968},
        {"deepseek-v3.1", 671026404352, 11610067968},
        {"deepseek-v3.2", 671877929216, 11624027392},
        {"kimi-k2", 1026408209408, 0},
        {"glm-5", 743911199232, 9952920320},
        {"glm-5.1", 743911199232, 9952920320},
        {"glm-5.2", 753329921024 - 9952920320, 9952920320},
        {"needle", 13223424, 2086016},
        {"random-v32", 5751808, 2093056},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        const hp g = preset(want[i].name);
        assert_int_equal(weights_params(&g, WEIGHTS_MAIN), want[i].n_main);
        assert_int_equal(weights_params(&g, WEIGHTS_MTP), want[i].n_mtp);
        assert_string_equal(hp_preset((int32_t)i)->name, want[i].name);
    }
    assert_null(hp_preset((int32_t)(sizeof want / sizeof *want)));
    assert_null(hp_preset(-1));
}

/* A bf16 checkpoint is two bytes per parameter, and four per expert and layer of router bias. */
static void bf16_bytes_are_two_per_parameter(void **state)
{
    (void)state;
    for (int32_t i = 0; hp_preset(i) != NULL; i++) {
        const hp *g = hp_preset(i);
        const int64_t bias = g->router_bias ? 4 * (int64_t)g->n_expert : 0;
        assert_int_equal(weights_bytes(g, WEIGHTS_MAIN, KVS_WEIGHT_BF16),
                         2 * weights_params(g, WEIGHTS_MAIN) + bias * (g->n_layer - g->n_dense));
        assert_int_equal(weights_bytes(g, WEIGHTS_MTP, KVS_WEIGHT_BF16),
                         2 * weights_params(g, WEIGHTS_MTP) + bias * g->n_mtp);
    }
}

/* The FP8 repository of GLM-5.2 is 755.6 GB. */
static void fp8_bytes_are_those_of_the_repository(void **state)
{
    (void)state;
    const hp g = preset("glm-5.2");
    const int64_t bytes = weights_bytes(&g, WEIGHTS_MAIN, KVS_WEIGHT_FP8) +
                          weights_bytes(&g, WEIGHTS_MTP, KVS_WEIGHT_FP8);
    assert_in_range(bytes, 755550000000, 755650000000);
}

/* ---- a walk over small tensors --------------------------------------------------------------- */

/* Small, with every kind of layer; no dimension is a multiple of 128 where it need not be. */
static hp tiny(void)
{
    return (hp){.name = "tiny",
                .vocab = 301,
                .hidden = 192,
                .inter = 330,
                .moe_inter = 270,
                .n_layer = 5,
                .n_dense = 2,
                .n_head = 8,
                .q_lora = 96,
                .kv_lora = 80,
                .nope = 24,
                .rope = 8,
                .v_dim = 40,
                .n_index_head = 4,
                .index_dim = 32,
                .topk = 16,
                .n_index_layer = 3,
                .n_expert = 6,
                .n_shared = 1,
                .router_bias = true,
                .n_mtp = 1,
                .max_ctx = 1000};
}

typedef struct walk {
    kvs_weight_format format;
    int tp, ep, rank;
    int64_t bytes;
} walk;

/* Adds what rank w->rank holds of a tensor [out, in]. by: 'n' on every rank, 'o' rows split, 'i'
 * columns split, in units of `unit`; 'O', 'I': the same inside an expert, of which there are n. */
static void visit(walk *w, int out, int in, char by, int unit, int n, bool quant)
{
    const bool expert = by == 'O' || by == 'I';
    const int per = expert ? w->tp / w->ep : w->tp;
    const int me = expert ? w->rank % per : w->rank;
    const int n_row_block = (out + 127) / 128;
    const int n_col_block = (in + 127) / 128;
    char *touched = calloc((size_t)n_row_block * (size_t)n_col_block, 1);
    assert_non_null(touched);
    /* who holds each row or column of the split dimension: the share whose range has its unit */
    const bool rows = by == 'o' || by == 'O';
    const int dim = by == 'n' ? 0 : rows ? out : in;
    char *mine = calloc((size_t)dim + 1, 1);
    assert_non_null(mine);
    for (int x = 0; x < dim; x++) {
        int owner = 0;
        while ((owner + 1) * ((dim + unit - 1) / unit) / per <= x / unit) {
            owner++;
        }
        mine[x] = owner == me;
    }
    int64_t elements = 0;
    for (int r = 0; r < out; r++) {
        for (int c = 0; c < in; c++) {
            if (dim > 0 && !mine[rows ? r : c]) {
                continue;
            }
            elements++;
            touched[r / 128 * n_col_block + c / 128] = 1;
        }
    }
    free(mine);
    int64_t bytes = elements * 2;
    if (quant && w->format == KVS_WEIGHT_FP8) {
        bytes = elements;
        for (int i = 0; i < n_row_block * n_col_block; i++) {
            bytes += touched[i] ? 4 : 0;
        }
    }
    free(touched);
    int copies = 1;
    if (expert) {
        copies = 0;
        for (int e = 0; e < n; e++) {
            int group = 0;
            while ((group + 1) * n / w->ep <= e) {
                group++;
            }
            copies += group == w->rank / per;
        }
    }
    w->bytes += bytes * copies;
}

static void visit_ffn(walk *w, int hidden, int inter, int n_expert)
{
    const char o = n_expert > 0 ? 'O' : 'o';
    const char i = n_expert > 0 ? 'I' : 'i';
    visit(w, inter, hidden, o, 128, n_expert, true);
    visit(w, inter, hidden, o, 128, n_expert, true);
    visit(w, hidden, inter, i, 128, n_expert, true);
}

static void visit_layer(walk *w, const hp *g, bool moe, bool index)
{
    const int qd = g->nope + g->rope;
    const int kd = g->nope + g->v_dim;
    visit(w, 2, g->hidden, 'n', 0, 0, false);
    if (g->q_lora > 0) {
        visit(w, g->q_lora, g->hidden, 'n', 0, 0, true);
        visit(w, 1, g->q_lora, 'n', 0, 0, false);
        visit(w, g->n_head * qd, g->q_lora, 'o', qd, 0, true);
    } else {
        visit(w, g->n_head * qd, g->hidden, 'o', qd, 0, true);
    }
    visit(w, g->kv_lora + g->rope, g->hidden, 'n', 0, 0, true);
    visit(w, 1, g->kv_lora, 'n', 0, 0, false);
    visit(w, g->n_head * kd, g->kv_lora, 'o', kd, 0, true);
    visit(w, g->hidden, g->n_head * g->v_dim, 'i', g->v_dim, 0, true);
    if (index) {
        visit(w, g->n_index_head * g->index_dim, g->q_lora, 'n', 0, 0, true);
        visit(w, g->index_dim, g->hidden, 'n', 0, 0, true);
        visit(w, 2, g->index_dim, 'n', 0, 0, false);
        visit(w, g->n_index_head, g->hidden, 'n', 0, 0, false);
    }
    if (!moe) {
        visit_ffn(w, g->hidden, g->inter, 0);
        return;
    }
    visit(w, g->n_expert, g->hidden, 'n', 0, 0, false);
    w->bytes += g->router_bias ? 4 * g->n_expert : 0;
    visit_ffn(w, g->hidden, g->moe_inter, g->n_expert);
    if (g->n_shared > 0) {
        visit_ffn(w, g->hidden, g->n_shared * g->moe_inter, 0);
    }
}

static int64_t walk_main(const hp *g, kvs_weight_format format, int tp, int ep, int rank)
{
    walk w = {format, tp, ep, rank, 0};
    visit(&w, g->vocab, g->hidden, 'o', 1, 0, false);
    if (!g->tied) {
        visit(&w, g->vocab, g->hidden, 'o', 1, 0, false);
    }
    visit(&w, 1, g->hidden, 'n', 0, 0, false);
    for (int i = 0; i < g->n_layer; i++) {
        visit_layer(&w, g, i >= g->n_dense, i < g->n_index_layer);
    }
    return w.bytes;
}

static int64_t walk_mtp(const hp *g, kvs_weight_format format, int tp, int ep, int rank)
{
    walk w = {format, tp, ep, rank, 0};
    visit(&w, 3, g->hidden, 'n', 0, 0, false);
    visit(&w, g->hidden, 2 * g->hidden, 'n', 0, 0, false);
    visit_layer(&w, g, true, g->n_index_head > 0);
    return w.bytes;
}

static void check_ranks(const hp *g)
{
    static const struct {
        int tp, ep;
    } cut[] = {{1, 1}, {2, 1}, {2, 2}, {4, 2}, {8, 2}, {6, 3}, {6, 6}, {3, 1}};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        /* bf16 for two of the cuts only: its bytes are those of fp8 without the scales */
        for (int f = i < 2 ? KVS_WEIGHT_BF16 : KVS_WEIGHT_FP8; f <= KVS_WEIGHT_FP8; f++) {
            const kvs_weight_format format = (kvs_weight_format)f;
            int64_t most = 0;
            for (int r = 0; r < cut[i].tp; r++) {
                const int64_t main_bytes =
                    weights_rank_bytes(g, WEIGHTS_MAIN, format, cut[i].tp, cut[i].ep, r);
                const int64_t mtp_bytes =
                    weights_rank_bytes(g, WEIGHTS_MTP, format, cut[i].tp, cut[i].ep, r);
                assert_int_equal(main_bytes, walk_main(g, format, cut[i].tp, cut[i].ep, r));
                assert_int_equal(mtp_bytes, walk_mtp(g, format, cut[i].tp, cut[i].ep, r));
                most = main_bytes > most ? main_bytes : most;
            }
            assert_int_equal(weights_rank_bytes_max(g, WEIGHTS_MAIN, format, cut[i].tp, cut[i].ep),
                             most);
        }
    }
}

static void bytes_of_a_rank_equal_a_walk_over_the_tensors(void **state)
{
    (void)state;
    hp g = tiny();
    check_ranks(&g);
    g.q_lora = 0;
    g.n_index_head = 0;
    g.n_index_layer = 0;
    g.router_bias = false;
    g.n_shared = 2;
    g.tied = true;
    check_ranks(&g);
}

/* Heads of 448 rows cross blocks of 128: every rank needs the scales of the blocks it touches. */
static void scale_blocks_that_heads_share_are_counted_on_both_ranks(void **state)
{
    (void)state;
    hp g = tiny();
    g.n_head = 4;
    g.nope = 60;
    g.v_dim = 40; /* kv_b rows of a head: 100 */
    const int64_t two = weights_rank_bytes(&g, WEIGHTS_MAIN, KVS_WEIGHT_FP8, 4, 1, 1);
    assert_int_equal(two, walk_main(&g, KVS_WEIGHT_FP8, 4, 1, 1));
    int64_t sum = 0;
    for (int32_t r = 0; r < 4; r++) {
        sum += weights_rank_bytes(&g, WEIGHTS_MAIN, KVS_WEIGHT_FP8, 4, 1, r);
    }
    assert_true(sum > weights_bytes(&g, WEIGHTS_MAIN, KVS_WEIGHT_FP8));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameter_counts_are_the_published_ones),
        cmocka_unit_test(bf16_bytes_are_two_per_parameter),
        cmocka_unit_test(fp8_bytes_are_those_of_the_repository),
        cmocka_unit_test(bytes_of_a_rank_equal_a_walk_over_the_tensors),
        cmocka_unit_test(scale_blocks_that_heads_share_are_counted_on_both_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
