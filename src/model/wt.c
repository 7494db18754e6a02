/* model/wt.c - a folder's tensors bound to the places of the model, and what is said of them as a whole. */
#include "model/wt.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/hash.h"
#include "base/mem.h"
#include "model/weights.h"
#include "model/wt_impl.h"
#include "num/fmt.h"

/* ---- slices ---------------------------------------------------------------------------------- */

static const void *element_at(const gemm_mat *m, int64_t i)
{
    const int64_t size = m->type == GEMM_F32 ? 4 : m->type == GEMM_BF16 ? 2 : 1;
    return m->data != NULL ? (const unsigned char *)m->data + i * size : NULL;
}

gemm_mat wt_rows(const gemm_mat *m, int32_t begin, int32_t end)
{
    gemm_mat s = *m;
    if (m->n_out == 0) {
        return s;
    }
    s.data = element_at(m, begin * m->stride);
    s.row0 += begin;
    s.n_out = end - begin;
    return s;
}

gemm_mat wt_cols(const gemm_mat *m, int32_t begin, int32_t end)
{
    gemm_mat s = *m;
    s.data = element_at(m, begin);
    s.col0 += begin;
    s.n_in = end - begin;
    return s;
}

wt_range wt_share(int32_t n, int32_t tp, int32_t rank)
{
    return (wt_range){(int32_t)((int64_t)rank * n / tp), (int32_t)(((int64_t)rank + 1) * n / tp)};
}

/* ---- layers ---------------------------------------------------------------------------------- */

/* A vector that counts as parameters; a router's bias does not. */
static kvs_status bind_norm(wt_binder *b, int32_t layer, const char *suffix, int64_t n,
                            const float **v)
{
    TRY(wt_bind_vec(b, layer, suffix, n, v));
    b->w->n_param += n;
    return KVS_OK;
}

static kvs_status bind_attention(wt_binder *b, int32_t i, wt_layer *l)
{
    const hp *h = &b->w->h;
    const int64_t q_rows = (int64_t)h->n_head * (h->nope + h->rope);
    const int64_t kv_rows = (int64_t)h->n_head * (h->nope + h->v_dim);
    const safet_tensor *kv_b = wt_look(b, i, "self_attn.kv_b_proj.weight");
    if (kv_b != NULL) {
        safet_want(b->s, kv_b); /* all of it is read, for the absorbed form */
    }
    TRY(bind_norm(b, i, "input_layernorm.weight", h->hidden, &l->attn_norm));
    TRY(bind_norm(b, i, "post_attention_layernorm.weight", h->hidden, &l->ffn_norm));
    if (h->q_lora == 0) {
        TRY(wt_bind_mat(b, i, "self_attn.q_proj.weight", q_rows, h->hidden, WT_QUANT, &l->q));
    } else {
        TRY(wt_bind_mat(b, i, "self_attn.q_a_proj.weight", h->q_lora, h->hidden, WT_QUANT,
                        &l->q_a));
        TRY(bind_norm(b, i, "self_attn.q_a_layernorm.weight", h->q_lora, &l->q_norm));
        TRY(wt_bind_mat(b, i, "self_attn.q_b_proj.weight", q_rows, h->q_lora, WT_QUANT, &l->q_b));
    }
    TRY(wt_bind_mat(b, i, "self_attn.kv_a_proj_with_mqa.weight", (int64_t)h->kv_lora + h->rope,
                    h->hidden, WT_QUANT, &l->kv_a));
    TRY(bind_norm(b, i, "self_attn.kv_a_layernorm.weight", h->kv_lora, &l->kv_norm));
    TRY(wt_bind_mat(b, i, "self_attn.o_proj.weight", h->hidden, (int64_t)h->n_head * h->v_dim,
                    WT_QUANT, &l->o));
    TRY(wt_bind_mat(b, i, "self_attn.kv_b_proj.weight", kv_rows, h->kv_lora, WT_QUANT, &l->kv_b));
    return wt_absorb(b, l);
}

static kvs_status bind_indexer(wt_binder *b, int32_t i, wt_layer *l)
{
    const hp *h = &b->w->h;
    l->has_index = 1;
    TRY(wt_bind_mat(b, i, "self_attn.indexer.wq_b.weight", (int64_t)h->n_index_head * h->index_dim,
                    h->q_lora, WT_QUANT, &l->iq));
    TRY(wt_bind_mat(b, i, "self_attn.indexer.wk.weight", h->index_dim, h->hidden, WT_QUANT,
                    &l->ik));
    TRY(wt_bind_mat(b, i, "self_attn.indexer.weights_proj.weight", h->n_index_head, h->hidden,
                    WT_PLAIN, &l->iw));
    TRY(bind_norm(b, i, "self_attn.indexer.k_norm.weight", h->index_dim, &l->ik_norm));
    return bind_norm(b, i, "self_attn.indexer.k_norm.bias", h->index_dim, &l->ik_bias);
}

static kvs_status bind_ffn(wt_binder *b, int32_t i, const char *where, int64_t inter, wt_ffn *f)
{
    const int64_t hidden = b->w->h.hidden;
    char suffix[64];
    snprintf(suffix, sizeof suffix, "%s.gate_proj.weight", where);
    TRY(wt_bind_mat(b, i, suffix, inter, hidden, WT_QUANT, &f->gate));
    snprintf(suffix, sizeof suffix, "%s.up_proj.weight", where);
    TRY(wt_bind_mat(b, i, suffix, inter, hidden, WT_QUANT, &f->up));
    snprintf(suffix, sizeof suffix, "%s.down_proj.weight", where);
    return wt_bind_mat(b, i, suffix, hidden, inter, WT_QUANT, &f->down);
}

/* All experts of a layer in two tensors; gate's rows come first in each expert's part of one. */
static kvs_status bind_fused_experts(wt_binder *b, int32_t i, wt_ffn *e)
{
    const hp *h = &b->w->h;
    gemm_mat both;
    gemm_mat down;
    int64_t step[2];
    int64_t scale_step[2];
    TRY(wt_bind_fused(b, i, "mlp.experts.gate_up_proj", h->n_expert, 2 * (int64_t)h->moe_inter,
                      h->hidden, &both, &step[0], &scale_step[0]));
    if (both.type == GEMM_FP8 && h->moe_inter % GEMM_BLOCK != 0) {
        return err_set(
            b->err, KVS_UNSUPPORTED,
            "tensor %.120s: gate and up share a block of scales: moe_intermediate_size %d "
            "must be a multiple of %d, or the experts come one by one",
            b->name, h->moe_inter, GEMM_BLOCK);
    }
    TRY(wt_bind_fused(b, i, "mlp.experts.down_proj", h->n_expert, h->hidden, h->moe_inter, &down,
                      &step[1], &scale_step[1]));
    for (int32_t k = 0; k < h->n_expert; k++) {
        gemm_mat m = both;
        m.data = element_at(&both, k * step[0]);
        m.scale = both.scale != NULL ? both.scale + k * scale_step[0] : NULL;
        e[k].gate = wt_rows(&m, 0, h->moe_inter);
        e[k].up = wt_rows(&m, h->moe_inter, 2 * h->moe_inter);
        e[k].down = down;
        e[k].down.data = element_at(&down, k * step[1]);
        e[k].down.scale = down.scale != NULL ? down.scale + k * scale_step[1] : NULL;
    }
    return KVS_OK;
}

static kvs_status bind_moe(wt_binder *b, int32_t i, wt_layer *l)
{
    const hp *h = &b->w->h;
    l->n_expert = h->n_expert;
    TRY(wt_bind_mat(b, i, "mlp.gate.weight", h->n_expert, h->hidden, WT_PLAIN, &l->router));
    if (h->router_bias) {
        TRY(wt_bind_vec(b, i, "mlp.gate.e_score_correction_bias", h->n_expert, &l->router_bias));
    }
    if (h->n_shared > 0) {
        TRY(bind_ffn(b, i, "mlp.shared_experts", (int64_t)h->n_shared * h->moe_inter, &l->shared));
    }
    wt_ffn *e = wt_own(b, (size_t)h->n_expert * sizeof *e);
    if (e == NULL) {
        return KVS_NOMEM;
    }
    l->expert = e;
    if (wt_look(b, i, "mlp.experts.gate_up_proj") != NULL) {
        return bind_fused_experts(b, i, e);
    }
    for (int32_t k = 0; k < h->n_expert; k++) {
        char where[40];
        snprintf(where, sizeof where, "mlp.experts.%d", k);
        TRY(bind_ffn(b, i, where, h->moe_inter, &e[k]));
    }
    return KVS_OK;
}

static kvs_status bind_draft(wt_binder *b, int32_t i, wt_layer *l)
{
    const int64_t hidden = b->w->h.hidden;
    TRY(bind_norm(b, i, "enorm.weight", hidden, &l->enorm));
    TRY(bind_norm(b, i, "hnorm.weight", hidden, &l->hnorm));
    TRY(bind_norm(b, i, "shared_head.norm.weight", hidden, &l->head_norm));
    return wt_bind_mat(b, i, "eh_proj.weight", hidden, 2 * hidden, WT_QUANT, &l->eh);
}

static kvs_status bind_layer(wt_binder *b, int32_t i, wt_layer *l)
{
    const hp *h = &b->w->h;
    const bool draft = i >= h->n_layer;
    TRY(bind_attention(b, i, l));
    if (draft ? h->n_index_head > 0 : h->index_full[i] != 0) {
        TRY(bind_indexer(b, i, l));
    }
    if (draft) {
        TRY(bind_draft(b, i, l));
    }
    return h->n_expert == 0 || i < h->n_dense ? bind_ffn(b, i, "mlp", h->inter, &l->ffn)
                                              : bind_moe(b, i, l);
}

/* The scale of cached rows, under any of the names it goes by. */
static kvs_status bind_k_scales(wt_binder *b, int32_t n)
{
    static const char *const name[] = {"self_attn.k_scale", "self_attn.attn.k_scale",
                                       "self_attn.mla_attn.k_scale", "self_attn.kv_scale",
                                       "self_attn.k_proj.k_scale"};
    const int32_t n_all = b->w->h.n_layer + b->w->h.n_mtp;
    float *scale = NULL;
    for (int32_t i = 0; i < n; i++) {
        for (size_t k = 0; k < sizeof name / sizeof *name; k++) {
            if (wt_look(b, i, name[k]) == NULL) {
                continue;
            }
            if (scale == NULL) {
                scale = wt_own(b, (size_t)n_all * sizeof *scale);
                if (scale == NULL) {
                    return KVS_NOMEM;
                }
                for (int32_t j = 0; j < n_all; j++) {
                    scale[j] = 1.0f;
                }
                b->w->k_scale = scale;
            }
            TRY(wt_bind_scalar(b, i, name[k], &scale[i]));
            break;
        }
    }
    return KVS_OK;
}

/* ---- the rest of the files ------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end)
{
    const size_t n = strlen(text);
    const size_t m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* Whether a tensor that nothing uses is known to be of no use here. n: layers that are open. */
static bool skippable(const hp *h, const char *name, int32_t n)
{
    static const char *const end[] = {".rotary_emb.inv_freq", ".v_scale", ".q_scale",
                                      ".prob_scale"};
    const size_t n_prefix = strlen(h->prefix);
    if (strncmp(name, h->prefix, n_prefix) != 0) {
        return true; /* another tower of a wrapper */
    }
    name += n_prefix;
    if (h->tied && strcmp(name, "lm_head.weight") == 0) {
        return true;
    }
    static const char k_layers[] = "model.layers.";
    if (strncmp(name, k_layers, sizeof k_layers - 1) != 0) {
        return false;
    }
    char *rest = NULL;
    const long layer = strtol(name + sizeof k_layers - 1, &rest, 10);
    if (layer >= n && layer >= h->n_layer && layer < h->n_layer + h->n_mtp) {
        return true; /* a draft layer that is not open */
    }
    for (size_t i = 0; i < sizeof end / sizeof *end; i++) {
        if (ends_with(rest, end[i])) {
            return true;
        }
    }
    return layer >= h->n_layer && (strcmp(rest, ".embed_tokens.weight") == 0 ||
                                   strcmp(rest, ".shared_head.head.weight") == 0);
}

/* Adds up what is used and refuses what has no place. */
static kvs_status check_rest(wt_binder *b, int32_t n)
{
    const char *first = NULL;
    int64_t more = -1;
    for (int64_t i = 0; i < safet_count(b->s); i++) {
        const safet_tensor *t = safet_at(b->s, i);
        if (b->used[i]) {
            b->w->bytes_stored += t->bytes;
        } else if (!skippable(&b->w->h, t->name, n)) {
            first = first == NULL ? t->name : first;
            more++;
        }
    }
    if (first == NULL) {
        return KVS_OK;
    }
    if (more == 0) {
        return err_set(b->err, KVS_UNSUPPORTED,
                       "tensor %.100s has no place in the model that config.json describes", first);
    }
    return err_set(b->err, KVS_UNSUPPORTED,
                   "tensor %.100s and %" PRId64 " more have no place in the model that config.json "
                   "describes",
                   first, more);
}

/* Both count by the same rules, so a difference is a mistake of this library. */
static kvs_status check_count(const wt *w, bool with_mtp, kvs_error *err)
{
    const int64_t want =
        weights_params(&w->h, WEIGHTS_MAIN) + (with_mtp ? weights_params(&w->h, WEIGHTS_MTP) : 0);
    if (w->n_param != want) {
        return err_set(err, KVS_INTERNAL,
                       "%" PRId64 " parameters bound, %" PRId64 " in the inventory", w->n_param,
                       want);
    }
    return KVS_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Whether a tensor's data takes part in the hash: of the experts of a layer only the first does. */
static bool sampled(const char *name)
{
    static const char k_experts[] = ".mlp.experts.";
    const char *at = strstr(name, k_experts);
    if (at == NULL) {
        return true;
    }
    at += sizeof k_experts - 1;
    return at[0] < '0' || at[0] > '9' || strncmp(at, "0.", 2) == 0;
}

/* A page from the middle of each: models of one geometry differ in their data alone, and to read all of it would take
 * minutes. */
static void hash_samples(hash_state *h, const safet *s)
{
    enum { SAMPLE = 4096 };
    for (int64_t i = 0; i < safet_count(s); i++) {
        const safet_tensor *t = safet_at(s, i);
        if (sampled(t->name)) {
            const int64_t n = t->bytes < SAMPLE ? t->bytes : SAMPLE;
            hash_add128(h, t->data + (t->bytes - n) / 2, (size_t)n);
        }
    }
}

static void hash_files(wt *w)
{
    hash_state h;
    hash_init128(&h);
    for (int i = 0; i < 2; i++) {
        unsigned char le[8];
        for (int k = 0; k < 8; k++) {
            le[k] = (unsigned char)(w->h.config_hash[i] >> (8 * k));
        }
        hash_add128(&h, le, sizeof le);
    }
    const safet *files = w->store->files;
    for (int32_t i = 0; i < safet_n_file(files); i++) {
        size_t n = 0;
        const void *header = safet_header(files, i, &n);
        hash_add128(&h, header, n);
    }
    hash_samples(&h, files);
    const hash128 x = hash_get128(&h);
    w->hash[0] = x.lo;
    w->hash[1] = x.hi;
}

/* What opening reads of a large model is tens of thousands of small tensors between large ones: asked for all at once,
 * and without what lies around them. */
static void want_small(const safet *s)
{
    enum { SMALL = 256 << 10 };
    safet_scattered(s, true);
    for (int64_t i = 0; i < safet_count(s); i++) {
        if (safet_at(s, i)->bytes <= SMALL) {
            safet_want(s, safet_at(s, i));
        }
    }
}

static kvs_status bind_model(wt_binder *b, bool with_mtp)
{
    wt *w = b->w;
    const hp *h = &w->h;
    const int32_t n = h->n_layer + (with_mtp ? h->n_mtp : 0);
    for (int c = 0; c < 256; c++) {
        b->e4m3[c] = e4m3_to_f32((uint8_t)c);
    }
    TRY(wt_bind_mat(b, WT_TOP, "model.embed_tokens.weight", h->vocab, h->hidden, WT_PLAIN,
                    &w->embed));
    w->head = w->embed;
    if (!h->tied) {
        TRY(wt_bind_mat(b, WT_TOP, "lm_head.weight", h->vocab, h->hidden, WT_PLAIN, &w->head));
    }
    TRY(bind_norm(b, WT_TOP, "model.norm.weight", h->hidden, &w->norm));
    for (int32_t i = 0; i < n; i++) {
        TRY(bind_layer(b, i, &w->layer[i]));
    }
    TRY(bind_k_scales(b, n));
    TRY(check_rest(b, n));
    return check_count(w, with_mtp, b->err);
}

static kvs_status open_files(wt *w, const char *dir, bool with_mtp, kvs_error *err)
{
    w->store = mem_calloc(1, sizeof *w->store);
    w->layer = mem_calloc((size_t)w->h.n_layer + (size_t)w->h.n_mtp, sizeof *w->layer);
    wt_binder *b = mem_calloc(1, sizeof *b);
    kvs_status st = KVS_OK;
    if (w->store == NULL || w->layer == NULL || b == NULL) {
        st = err_set(err, KVS_NOMEM, "no memory for %d layers", w->h.n_layer);
        goto out;
    }
    b->w = w;
    b->err = err;
    TRY_GOTO(safet_open(&w->store->files, dir, err), out);
    b->s = w->store->files;
    b->used = mem_calloc((size_t)safet_count(b->s) + 1, 1);
    if (b->used == NULL) {
        st = err_set(err, KVS_NOMEM, "no memory for %" PRId64 " tensors", safet_count(b->s));
        goto out;
    }
    want_small(b->s);
    hash_files(w);
    st = bind_model(b, with_mtp);
    safet_scattered(b->s, false);
out:
    if (b != NULL) {
        mem_free(b->used);
    }
    mem_free(b);
    return st;
}

kvs_status wt_open(wt **out, const char *dir, int32_t with_mtp, kvs_error *err)
{
    *out = NULL;
    wt *w = mem_calloc(1, sizeof *w);
    if (w == NULL) {
        return err_set(err, KVS_NOMEM, "%.80s: no memory to read it", dir);
    }
    kvs_status st = hp_read(&w->h, dir, err);
    if (st >= 0) {
        st = hp_readable(&w->h, err);
        st = st >= 0 ? open_files(w, dir, with_mtp != 0, err) : st;
        if (st < 0) {
            err_prefix(err, "%.60s", dir);
        }
    }
    if (st < 0) {
        wt_close(w);
        return st;
    }
    *out = w;
    return KVS_OK;
}

void wt_close(wt *w)
{
    if (w == NULL) {
        return;
    }
    if (w->store != NULL) {
        safet_close(w->store->files);
        for (wt_block *block = w->store->block; block != NULL;) {
            wt_block *next = block->next;
            mem_free(block);
            block = next;
        }
    }
    mem_free(w->store);
    mem_free(w->layer);
    mem_free(w);
}
