/* naive.c - the forward pass written a second time: double precision, one rank, one sequence, no cache. */
#include "naive.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- matrices -------------------------------------------------------------------------------- */

static double bf16_value(uint16_t bits)
{
    const uint32_t u = (uint32_t)bits << 16;
    float f = 0.0f;
    memcpy(&f, &u, sizeof f);
    return (double)f;
}

/* To the nearest of 8 significant bits: what is cut off when 2^45 times as much is added and taken away. */
static double nearest_bf16(double x)
{
    const double big = x * 0x1.00002p45;
    return (x + big) - big;
}

static double e4m3_value(uint8_t c)
{
    static double table[256];
    if (table[1] == 0.0) {
        for (int i = 0; i < 256; i++) {
            const int exponent = i >> 3 & 15;
            const double m = exponent == 0 ? ldexp(i & 7, -9) : ldexp(8 + (i & 7), exponent - 10);
            table[i] = (i & 128) != 0 ? -m : m;
        }
    }
    return table[c];
}

static double at(const gemm_mat *w, int64_t o, int64_t i)
{
    const int64_t k = o * w->stride + i;
    if (w->type == GEMM_F32) {
        return (double)((const float *)w->data)[k];
    }
    if (w->type == GEMM_BF16) {
        return bf16_value(((const uint16_t *)w->data)[k]);
    }
    const double scale = (double)w->scale[o / 128 * w->scale_stride + i / 128];
    return nearest_bf16(e4m3_value(((const uint8_t *)w->data)[k]) * scale);
}

/* y = rows [first, first + n) of w times x. */
static void times(const gemm_mat *w, int64_t first, int64_t n, const double *x, double *y)
{
    const float *plain = w->type == GEMM_F32 ? w->data : NULL;
    for (int64_t o = 0; o < n; o++) {
        double sum[4] = {0.0};
        for (int64_t i = 0; i < w->n_in; i++) {
            const double v = plain != NULL ? (double)plain[(first + o) * w->stride + i] : at(w, first + o, i);
            sum[i & 3] += v * x[i];
        }
        y[o] = sum[0] + sum[1] + sum[2] + sum[3];
    }
}

static void whole(const gemm_mat *w, const double *x, double *y)
{
    times(w, 0, w->n_out, x, y);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void rms(const double *x, const float *weight, int32_t n, double eps, double *y)
{
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) {
        sum += x[i] * x[i];
    }
    const double r = 1.0 / sqrt(sum / n + eps);
    for (int32_t i = 0; i < n; i++) {
        y[i] = x[i] * r * (double)weight[i];
    }
}

static void layer_norm(double *x, const float *weight, const float *bias, int32_t n)
{
    double mean = 0.0;
    double var = 0.0;
    for (int32_t i = 0; i < n; i++) {
        mean += x[i] / n;
    }
    for (int32_t i = 0; i < n; i++) {
        var += (x[i] - mean) * (x[i] - mean) / n;
    }
    for (int32_t i = 0; i < n; i++) {
        x[i] = (x[i] - mean) / sqrt(var + 1e-6) * (double)weight[i] + (double)bias[i];
    }
}

/* theta^(-2i/64), slowed by YaRN between the two corrections. */
static double frequency(const hp *h, int i)
{
    const double f = pow(h->theta, -2.0 * i / 64.0);
    if (!h->yarn) {
        return f;
    }
    const double orig = (double)h->yarn_orig;
    const double two_pi = 6.283185307179586477;
    double low = floor(64.0 * log(orig / (two_pi * h->yarn_beta_fast)) / (2.0 * log(h->theta)));
    double high = ceil(64.0 * log(orig / (two_pi * h->yarn_beta_slow)) / (2.0 * log(h->theta)));
    low = fmax(low, 0.0);
    high = fmin(high, 63.0);
    high = low == high ? high + 0.001 : high;
    const double ramp = fmin(fmax((i - low) / (high - low), 0.0), 1.0);
    return f * (1.0 - ramp) + f / h->yarn_factor * ramp;
}

static void rotate(const float *freq, double *x, int32_t pos, int interleaved)
{
    for (int i = 0; i < 32; i++) {
        const int a = interleaved ? 2 * i : i;
        const int b = interleaved ? 2 * i + 1 : i + 32;
        const double angle = (double)((float)pos * freq[i]);
        const double u = x[a] * cos(angle) - x[b] * sin(angle);
        const double v = x[a] * sin(angle) + x[b] * cos(angle);
        x[a] = u;
        x[b] = v;
    }
}

static double silu(double g)
{
    return g / (1.0 + exp(-g));
}

/* ---- attention ------------------------------------------------------------------------------- */

typedef struct pass {
    const wt *w;
    const hp *h;
    int32_t n;
    double latent_eps;
    float freq[32];
    double *x;       /* [n, hidden] residual stream */
    double *in;      /* [n, hidden] */
    double *q_lat;   /* [n, q_lora] or the layer's input */
    double *latent;  /* [n, 512] */
    double *k_rope;  /* [n, 64] */
    uint8_t *chosen; /* [n, n] */
    double gap;
} pass;

static double *room(int64_t n)
{
    return calloc((size_t)n, sizeof(double));
}

/* The best topk of positions 0..t by their score for row t, by a full sort; the smallest gap at the edge. */
static void choose(pass *p, int32_t t, const double *score)
{
    const int32_t k = p->h->topk;
    uint8_t *chosen = p->chosen + (int64_t)t * p->n;
    memset(chosen, 0, (size_t)p->n);
    double last = INFINITY;
    for (int32_t i = 0; i <= t && i < k; i++) {
        int32_t best = -1;
        for (int32_t s = 0; s <= t; s++) {
            if (!chosen[s] && (best < 0 || score[s] > score[best])) {
                best = s;
            }
        }
        chosen[best] = 1;
        last = score[best];
    }
    for (int32_t s = 0; s <= t; s++) {
        /* scores of 0, where no head of a key is positive, are equal on both sides */
        if (!chosen[s] && last != score[s] && last - score[s] < p->gap) {
            p->gap = last - score[s];
        }
    }
}

static void index_positions(pass *p, const wt_layer *l)
{
    const hp *h = p->h;
    double *key = room(p->n * 128);
    double *q = room(h->n_index_head * 128);
    double *weight = room(h->n_index_head);
    double *score = room(p->n);
    for (int32_t t = 0; t < p->n; t++) {
        whole(&l->ik, p->in + (int64_t)t * h->hidden, key + t * 128);
        layer_norm(key + t * 128, l->ik_norm, l->ik_bias, 128);
        rotate(p->freq, key + t * 128, t, h->index_interleaved);
        whole(&l->iq, p->q_lat + (int64_t)t * h->q_lora, q);
        whole(&l->iw, p->in + (int64_t)t * h->hidden, weight);
        for (int32_t j = 0; j < h->n_index_head; j++) {
            rotate(p->freq, q + j * 128, t, h->index_interleaved);
        }
        for (int32_t s = 0; s <= t; s++) {
            score[s] = 0.0;
            for (int32_t j = 0; j < h->n_index_head; j++) {
                double dot = 0.0;
                for (int d = 0; d < 128; d++) {
                    dot += q[j * 128 + d] * key[s * 128 + d];
                }
                score[s] += weight[j] / sqrt((double)h->n_index_head) / sqrt(128.0) * fmax(dot, 0.0);
            }
        }
        choose(p, t, score);
    }
    free(key);
    free(q);
    free(weight);
    free(score);
}

/* Head j of every row, from keys and values of its own, into o. */
static void one_head(pass *p, const wt_layer *l, int32_t j, double *o)
{
    const hp *h = p->h;
    const int32_t dim = h->nope + h->rope;
    const double scale_m = h->yarn ? 0.1 * h->yarn_mscale_all * log(h->yarn_factor) + 1.0 : 1.0;
    const double scale = scale_m * scale_m / sqrt((double)dim);
    double *k = room((int64_t)p->n * h->nope);
    double *v = room((int64_t)p->n * h->v_dim);
    double *q = room(dim);
    double *weight = room(p->n);
    const gemm_mat *from = h->q_lora > 0 ? &l->q_b : &l->q;
    const int64_t width = h->q_lora > 0 ? h->q_lora : h->hidden;
    for (int32_t t = 0; t < p->n; t++) {
        const int64_t row = (int64_t)j * (h->nope + h->v_dim);
        times(&l->kv_b, row, h->nope, p->latent + t * 512, k + (int64_t)t * h->nope);
        times(&l->kv_b, row + h->nope, h->v_dim, p->latent + t * 512, v + (int64_t)t * h->v_dim);
        times(from, (int64_t)j * dim, dim, p->q_lat + t * width, q);
        rotate(p->freq, q + h->nope, t, 1);
        double top = -INFINITY;
        double sum = 0.0;
        for (int32_t s = 0; s <= t; s++) {
            double dot = 0.0;
            for (int d = 0; d < h->nope; d++) {
                dot += q[d] * k[(int64_t)s * h->nope + d];
            }
            for (int d = 0; d < 64; d++) {
                dot += q[h->nope + d] * p->k_rope[s * 64 + d];
            }
            weight[s] = p->chosen[(int64_t)t * p->n + s] ? dot * scale : -INFINITY;
            top = fmax(top, weight[s]);
        }
        double *out = o + ((int64_t)t * h->n_head + j) * h->v_dim;
        for (int32_t s = 0; s <= t; s++) {
            weight[s] = exp(weight[s] - top);
            sum += weight[s];
        }
        for (int32_t s = 0; s <= t; s++) {
            for (int d = 0; d < h->v_dim; d++) {
                out[d] += weight[s] / sum * v[(int64_t)s * h->v_dim + d];
            }
        }
    }
    free(k);
    free(v);
    free(q);
    free(weight);
}

static void attention(pass *p, const wt_layer *l)
{
    const hp *h = p->h;
    double *kv = room(576);
    double *raw = room(h->q_lora + 1);
    double *o = room((int64_t)p->n * h->n_head * h->v_dim);
    double *y = room(h->hidden);
    for (int32_t t = 0; t < p->n; t++) {
        double *in = p->in + (int64_t)t * h->hidden;
        rms(p->x + (int64_t)t * h->hidden, l->attn_norm, h->hidden, (double)h->eps, in);
        whole(&l->kv_a, in, kv);
        rms(kv, l->kv_norm, 512, p->latent_eps, p->latent + t * 512);
        rotate(p->freq, kv + 512, t, 1);
        memcpy(p->k_rope + t * 64, kv + 512, 64 * sizeof *kv);
        if (h->q_lora > 0) {
            whole(&l->q_a, in, raw);
            rms(raw, l->q_norm, h->q_lora, p->latent_eps, p->q_lat + (int64_t)t * h->q_lora);
        } else {
            memcpy(p->q_lat + (int64_t)t * h->hidden, in, (size_t)h->hidden * sizeof *in);
        }
    }
    if (l->has_index) {
        index_positions(p, l);
    }
    for (int32_t j = 0; j < h->n_head; j++) {
        one_head(p, l, j, o);
    }
    for (int32_t t = 0; t < p->n; t++) {
        whole(&l->o, o + (int64_t)t * h->n_head * h->v_dim, y);
        for (int32_t i = 0; i < h->hidden; i++) {
            p->x[(int64_t)t * h->hidden + i] += y[i];
        }
    }
    free(kv);
    free(raw);
    free(o);
    free(y);
}

/* ---- feed-forward ---------------------------------------------------------------------------- */

/* y += weight * ffn(x). */
static void ffn(const wt_ffn *f, const double *x, double weight, double *y, int32_t hidden)
{
    const int32_t inner = f->gate.n_out;
    double *g = room(inner);
    double *u = room(inner);
    double *o = room(hidden);
    whole(&f->gate, x, g);
    whole(&f->up, x, u);
    for (int32_t i = 0; i < inner; i++) {
        g[i] = silu(g[i]) * u[i];
    }
    whole(&f->down, g, o);
    for (int32_t i = 0; i < hidden; i++) {
        y[i] += weight * o[i];
    }
    free(g);
    free(u);
    free(o);
}

/* Whether expert e's group is among the topk_group best. */
static int group_kept(const hp *h, const double *choice, int32_t e)
{
    const int32_t size = h->n_expert / h->n_group;
    double score[64];
    for (int32_t g = 0; g < h->n_group; g++) {
        double first = -INFINITY;
        double second = -INFINITY;
        for (int32_t i = g * size; i < (g + 1) * size; i++) {
            second = choice[i] > first ? first : fmax(second, choice[i]);
            first = fmax(first, choice[i]);
        }
        score[g] = h->group_max || size == 1 ? first : first + second;
    }
    int32_t better = 0;
    for (int32_t g = 0; g < h->n_group; g++) {
        better += score[g] > score[e / size];
    }
    return better < h->topk_group;
}

static void experts(const hp *h, const wt_layer *l, const double *x, double *y)
{
    double s[64];
    double choice[64];
    double top = -INFINITY;
    double sum = 0.0;
    whole(&l->router, x, s);
    for (int32_t e = 0; e < h->n_expert; e++) {
        top = fmax(top, s[e]);
    }
    for (int32_t e = 0; e < h->n_expert; e++) {
        s[e] = h->router == HP_SIGMOID ? 1.0 / (1.0 + exp(-s[e])) : exp(s[e] - top);
        sum += s[e];
    }
    for (int32_t e = 0; e < h->n_expert; e++) {
        s[e] /= h->router == HP_SIGMOID ? 1.0 : sum;
        choice[e] = s[e] + (l->router_bias != NULL ? (double)l->router_bias[e] : 0.0);
    }
    int taken[64];
    double weights = 0.0;
    for (int32_t e = 0; e < h->n_expert; e++) {
        int32_t better = 0;
        for (int32_t i = 0; i < h->n_expert; i++) {
            better += group_kept(h, choice, i) && choice[i] > choice[e];
        }
        taken[e] = group_kept(h, choice, e) && better < h->n_active;
        weights += taken[e] ? s[e] : 0.0;
    }
    for (int32_t e = 0; e < h->n_expert; e++) {
        if (taken[e]) {
            ffn(&l->expert[e], x, s[e] / (h->norm_topk ? weights : 1.0) * (double)h->route_scale, y,
                h->hidden);
        }
    }
    ffn(&l->shared, x, 1.0, y, h->hidden);
}

static void one_layer(pass *p, const wt_layer *l)
{
    const hp *h = p->h;
    attention(p, l);
    double *in = room(h->hidden);
    for (int32_t t = 0; t < p->n; t++) {
        double *x = p->x + (int64_t)t * h->hidden;
        rms(x, l->ffn_norm, h->hidden, (double)h->eps, in);
        if (l->n_expert > 0) {
            experts(h, l, in, x);
        } else {
            ffn(&l->ffn, in, 1.0, x, h->hidden);
        }
    }
    free(in);
}

/* ---- the model ------------------------------------------------------------------------------- */

static void embed(const wt *w, int32_t token, double *x)
{
    for (int32_t i = 0; i < w->h.hidden; i++) {
        x[i] = at(&w->embed, token, i);
    }
}

/* The draft layer's input from the hidden rows and the next tokens. */
static void draft_input(pass *p, const wt_layer *l, const double *hidden, const int32_t *token)
{
    const int32_t n = p->h->hidden;
    double *e = room(n);
    double *both = room(2 * n);
    for (int32_t t = 0; t < p->n; t++) {
        embed(p->w, token[t + 1], e);
        rms(e, l->enorm, n, (double)p->h->eps, both);
        rms(hidden + (int64_t)t * n, l->hnorm, n, (double)p->h->eps, both + n);
        whole(&l->eh, both, p->x + (int64_t)t * n);
    }
    free(e);
    free(both);
}

/* Every row normed into `to`, and its logits. */
static void finish(const pass *p, const float *norm, double *to, double *logits)
{
    const hp *h = p->h;
    for (int32_t t = 0; t < p->n; t++) {
        double *g = to + (int64_t)t * h->hidden;
        rms(p->x + (int64_t)t * h->hidden, norm, h->hidden, (double)h->eps, g);
        whole(&p->w->head, g, logits + (int64_t)t * h->vocab);
    }
}

void naive_run(const wt *w, const int32_t *token, int32_t n_tok, double latent_eps, naive *out)
{
    const hp *h = &w->h;
    const int64_t square = (int64_t)n_tok * n_tok;
    pass p = {.w = w, .h = h, .n = n_tok, .latent_eps = latent_eps, .gap = INFINITY};
    for (int i = 0; i < 32; i++) {
        p.freq[i] = (float)frequency(h, i);
    }
    p.x = room((int64_t)n_tok * h->hidden);
    p.in = room((int64_t)n_tok * h->hidden);
    p.q_lat = room((int64_t)n_tok * (h->q_lora + h->hidden));
    p.latent = room((int64_t)n_tok * 512);
    p.k_rope = room((int64_t)n_tok * 64);
    p.chosen = malloc((size_t)square);
    memset(p.chosen, 1, (size_t)square);
    *out = (naive){.n_tok = n_tok};
    out->logits = room((int64_t)n_tok * h->vocab);
    out->draft = room((int64_t)n_tok * h->vocab);
    out->hidden = room((int64_t)n_tok * h->hidden);
    out->g = room((int64_t)n_tok * h->hidden);
    out->chosen = malloc((size_t)(square * h->n_layer));
    for (int32_t t = 0; t < n_tok; t++) {
        embed(w, token[t], p.x + (int64_t)t * h->hidden);
    }
    for (int32_t i = 0; i < h->n_layer; i++) {
        one_layer(&p, &w->layer[i]);
        memcpy(out->chosen + i * square, p.chosen, (size_t)square);
    }
    finish(&p, w->norm, out->hidden, out->logits);
    if (h->n_mtp > 0) {
        const wt_layer *l = &w->layer[h->n_layer];
        draft_input(&p, l, out->hidden, token);
        one_layer(&p, l);
        finish(&p, l->head_norm, out->g, out->draft);
    }
    out->gap = p.gap;
    free(p.x);
    free(p.in);
    free(p.q_lat);
    free(p.latent);
    free(p.k_rope);
    free(p.chosen);
}

void naive_free(naive *n)
{
    free(n->logits);
    free(n->hidden);
    free(n->draft);
    free(n->g);
    free(n->chosen);
}
