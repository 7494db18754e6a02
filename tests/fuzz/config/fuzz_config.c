/* fuzz_config.c - a config.json of any bytes is refused with a message, or read into hyper-parameters that keep the
 * limits of their header, so that what is computed from them stays in range. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/hp.h"
#include "model/weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(int holds)
{
    if (!holds) {
        abort();
    }
}

static void check_sizes(const hp *h)
{
    must(h->vocab >= 1 && h->vocab <= 1 << 24 && h->hidden >= 1 && h->hidden <= 65536);
    must(h->inter >= 1 && h->inter <= 1 << 18 && h->n_layer >= 1 && h->n_layer <= HP_MAX_LAYER);
    must(h->n_dense >= 0 && h->n_dense <= h->n_layer && h->n_head >= 1 && h->n_head <= 1024);
    must(h->q_lora >= 0 && h->q_lora <= 65536 && h->kv_lora >= 1 && h->kv_lora <= 65536);
    must(h->nope >= 1 && h->nope <= 4096 && h->rope >= 2 && h->rope <= 4096 && h->rope % 2 == 0);
    must(h->v_dim >= 1 && h->v_dim <= 4096 && h->n_mtp >= 0 && h->n_mtp <= 8);
    must(h->max_ctx >= 1 && h->max_ctx <= INT32_MAX && h->bos >= -1);
    must(h->n_eos >= 0 && h->n_eos <= HP_MAX_EOS);
    int32_t n_full = 0;
    for (int32_t i = 0; i < HP_MAX_LAYER; i++) {
        n_full += h->index_full[i];
        must(h->index_full[i] == 0 || i < h->n_layer);
    }
    must(n_full == h->n_index_layer && (n_full > 0) == (h->n_index_head > 0));
    must(n_full == 0 || (h->index_full[0] && h->topk >= 1 && h->index_dim >= 1 && h->q_lora >= 1));
}

static void check_experts(const hp *h)
{
    must(h->n_expert >= 0 && h->n_expert <= 4096 && h->n_shared >= 0);
    if (h->n_expert == 0) {
        must(h->n_dense == h->n_layer);
        return;
    }
    must(h->moe_inter >= 1 && h->n_group >= 1 && h->n_expert % h->n_group == 0);
    must(h->topk_group >= 1 && h->topk_group <= h->n_group);
    must(h->n_active >= 1 && h->n_active <= h->n_expert / h->n_group * h->topk_group);
    must(h->router == HP_SOFTMAX || h->router == HP_SIGMOID);
    must(h->route_scale > 0.0f && isfinite(h->route_scale));
}

static void check_maths(const hp *h)
{
    static float f[2048];
    hp_inv_freq(h, f);
    for (int32_t i = 0; i < h->rope / 2; i++) {
        must(isfinite(f[i]) && f[i] >= 0.0f);
    }
    must(isfinite(hp_softmax_scale(h)) && hp_softmax_scale(h) > 0.0f);
    must(isfinite(hp_rope_magnitude(h)) && h->eps > 0.0f);
    must(weights_params(h, WEIGHTS_MAIN) > 0 && weights_params(h, WEIGHTS_MTP) >= 0);
    must(weights_rank_bytes(h, WEIGHTS_MAIN, KVS_WEIGHT_FP8, 8, 4, 3) >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static hp h;
    kvs_error err;
    memset(&err, 0, sizeof err);
    const kvs_status st = hp_parse(&h, "fuzz", (const char *)data, size, &err);
    if (st < 0) {
        must(err.code == st && strlen(err.text) > 10);
        return 0;
    }
    check_sizes(&h);
    check_experts(&h);
    check_maths(&h);
    const kvs_status run = hp_runnable(&h, &err);
    must(run == KVS_OK || (run == KVS_UNSUPPORTED && strlen(err.text) > 10));
    return 0;
}
