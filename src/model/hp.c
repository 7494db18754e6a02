/* model/hp.c - what follows from the hyper-parameters: scale, rotary frequencies, what the forward pass can run. */
#include "model/hp.h"

#include <math.h>

#include "base/err.h"
#include "kvspan/config.h"
#include "kvspan/dcp.h"

enum { INDEX_HEADS_MAX = 64 }; /* kern/index.h */

static const double k_pi = 3.14159265358979323846;

/* YaRN's length correction for one mscale; 1 where it is not set or nothing is stretched. */
static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

float hp_softmax_scale(const hp *h)
{
    const double scale = 1.0 / sqrt((double)h->nope + (double)h->rope);
    if (!h->yarn) {
        return (float)scale;
    }
    const double m = yarn_mscale(h->yarn_factor, h->yarn_mscale_all);
    return (float)(scale * m * m);
}

double hp_rope_magnitude(const hp *h)
{
    if (!h->yarn) {
        return 1.0;
    }
    return yarn_mscale(h->yarn_factor, h->yarn_mscale) /
           yarn_mscale(h->yarn_factor, h->yarn_mscale_all);
}

/* The pair that turns `turns` times over the original length, as a real number. */
static double yarn_pair(const hp *h, double turns)
{
    return h->rope * log((double)h->yarn_orig / (turns * 2.0 * k_pi)) / (2.0 * log(h->theta));
}

void hp_yarn_ramp(const hp *h, double *low, double *high)
{
    const double last = h->rope - 1;
    *low = floor(yarn_pair(h, h->yarn_beta_fast));
    *high = ceil(yarn_pair(h, h->yarn_beta_slow));
    *low = *low < 0.0 ? 0.0 : *low;
    *high = *high > last ? last : *high;
    if (*low == *high) {
        *high += 0.001;
    }
}

void hp_inv_freq(const hp *h, float *inv_freq)
{
    double low = 0.0;
    double high = 1.0;
    if (h->yarn) {
        hp_yarn_ramp(h, &low, &high);
    }
    for (int32_t i = 0; i < h->rope / 2; i++) {
        double f = pow(h->theta, -2.0 * i / h->rope);
        if (h->yarn) {
            double ramp = (i - low) / (high - low);
            ramp = ramp < 0.0 ? 0.0 : ramp > 1.0 ? 1.0 : ramp;
            f = f * (1.0 - ramp) + f / h->yarn_factor * ramp;
        }
        inv_freq[i] = (float)f;
    }
}

kvs_status hp_readable(const hp *h, kvs_error *err)
{
    if (h->stored == KVS_WEIGHT_AUTO) {
        return err_set(err, KVS_UNSUPPORTED,
                       "quantization_config %s: weights are read as bf16, f32, or fp8 (e4m3) in "
                       "blocks of 128 x 128",
                       h->stored_as);
    }
    return KVS_OK;
}

kvs_status hp_runnable(const hp *h, kvs_error *err)
{
    if (h->kv_lora != KVS_LATENT_DIM) {
        return err_set(err, KVS_UNSUPPORTED, "kv_lora_rank %d: cache rows hold %d latent values",
                       h->kv_lora, KVS_LATENT_DIM);
    }
    if (h->rope != KVS_ROPE_DIM) {
        return err_set(err, KVS_UNSUPPORTED, "qk_rope_head_dim %d: cache rows hold %d rope values",
                       h->rope, KVS_ROPE_DIM);
    }
    if (h->n_index_head > 0 && h->index_dim != KVS_INDEX_DIM) {
        return err_set(err, KVS_UNSUPPORTED, "index_head_dim %d: index keys have %d values",
                       h->index_dim, KVS_INDEX_DIM);
    }
    if (h->n_index_head > INDEX_HEADS_MAX) {
        return err_set(err, KVS_UNSUPPORTED, "index_n_heads %d: at most %d are scored",
                       h->n_index_head, INDEX_HEADS_MAX);
    }
    if (h->topk > KVS_MAX_TOPK) {
        return err_set(err, KVS_UNSUPPORTED, "index_topk %d: a selection holds at most %d tokens",
                       h->topk, KVS_MAX_TOPK);
    }
    const double magnitude = hp_rope_magnitude(h);
    if (fabs(magnitude - 1.0) > 1e-9) {
        return err_set(err, KVS_UNSUPPORTED,
                       "mscale %g with mscale_all_dim %g would scale cos and sin by %g: only equal "
                       "values are run",
                       h->yarn_mscale, h->yarn_mscale_all, magnitude);
    }
    return hp_readable(h, err);
}
