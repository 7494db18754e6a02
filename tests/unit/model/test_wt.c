/* Weights of a folder: the elements of every matrix are the checkpoint's, whatever the storage, the number of files
 * and the form of the experts; the absorbed matrices are the heads of kv_b; slices read what the whole reads. */
#include "unit/unit.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <unistd.h>

#include "base/mem.h"
#include "model/weights.h"
#include "model/wt.h"
#include "unit/model/ckpt.h"

static char s_dir[64];

static int make_dir(void **state)
{
    (void)state;
    snprintf(s_dir, sizeof s_dir, "/tmp/kvspan-wt-XXXXXX");
    return mkdtemp(s_dir) == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    ckpt_remove(s_dir);
    return 0;
}

static wt *open_dir(int with_mtp)
{
    wt *w = NULL;
    kvs_error err = {.code = KVS_OK};
    if (wt_open(&w, s_dir, with_mtp, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    return w;
}

/* Element (o, i) by the words of gemm.h. */
static double mat_at(const gemm_mat *m, int64_t o, int64_t i)
{
    const int64_t at = o * m->stride + i;
    if (m->type == GEMM_F32) {
        assert_int_equal((uintptr_t)m->data % 4, 0);
        return ((const float *)m->data)[at];
    }
    if (m->type == GEMM_BF16) {
        assert_int_equal((uintptr_t)m->data % 2, 0);
        const uint32_t u = (uint32_t)((const uint16_t *)m->data)[at] << 16;
        float x;
        memcpy(&x, &u, sizeof x);
        return x;
    }
    assert_int_equal(m->type, GEMM_FP8);
    assert_int_equal((uintptr_t)m->scale % 4, 0);
    return ckpt_e4m3(((const uint8_t *)m->data)[at]) *
           (double)m->scale[(m->row0 + o) / 128 * m->scale_stride + (m->col0 + i) / 128];
}

typedef struct where {
    const ckpt *c;
    const char *prefix;
    int layer;
} where;

static const char *full_name(const where *at, const char *suffix)
{
    static char name[200];
    if (at->layer < 0) {
        snprintf(name, sizeof name, "%s%s", at->prefix, suffix);
    } else {
        snprintf(name, sizeof name, "%smodel.layers.%d.%s", at->prefix, at->layer, suffix);
    }
    return name;
}

/* m is rows [r0, r0 + n_out) of the e-th matrix of the tensor: a third of the elements of each row, others in the
 * next. */
static void same_rows(const where *at, const char *suffix, int64_t e, int64_t r0, const gemm_mat *m,
                      int64_t n_out, int64_t n_in)
{
    const char *name = full_name(at, suffix);
    assert_int_equal(m->n_out, n_out);
    assert_int_equal(m->n_in, n_in);
    for (int64_t o = 0; o < n_out; o++) {
        for (int64_t i = o % 3; i < n_in; i += 3) {
            const double want = ckpt_at(at->c, name, e, r0 + o, i);
            if (mat_at(m, o, i) != want) {
                fail_msg("%s[%" PRId64 "](%" PRId64 ", %" PRId64 "): %g, not %g", name, e, o, i,
                         mat_at(m, o, i), want);
            }
        }
    }
}

static void same_mat(const where *at, const char *suffix, const gemm_mat *m, int64_t n_out,
                     int64_t n_in)
{
    same_rows(at, suffix, 0, 0, m, n_out, n_in);
}

static void same_vec(const where *at, const char *suffix, const float *v, int64_t n)
{
    assert_non_null(v);
    for (int64_t i = 0; i < n; i++) {
        assert_true((double)v[i] == ckpt_at(at->c, full_name(at, suffix), 0, 0, i));
    }
}

static void same_ffn(const where *at, const char *place, const wt_ffn *f, int64_t inter)
{
    char suffix[64];
    snprintf(suffix, sizeof suffix, "%s.gate_proj.weight", place);
    same_mat(at, suffix, &f->gate, inter, CKPT_HIDDEN);
    snprintf(suffix, sizeof suffix, "%s.up_proj.weight", place);
    same_mat(at, suffix, &f->up, inter, CKPT_HIDDEN);
    snprintf(suffix, sizeof suffix, "%s.down_proj.weight", place);
    same_mat(at, suffix, &f->down, CKPT_HIDDEN, inter);
}

static void same_moe(const where *at, const ckpt_spec *s, const wt_layer *l)
{
    const int moe = ckpt_moe(s);
    assert_int_equal(l->n_expert, CKPT_EXPERT);
    assert_int_equal(l->ffn.gate.n_out, 0);
    same_mat(at, "mlp.gate.weight", &l->router, CKPT_EXPERT, CKPT_HIDDEN);
    if (!s->softmax) {
        same_vec(at, "mlp.gate.e_score_correction_bias", l->router_bias, CKPT_EXPERT);
    } else {
        assert_null(l->router_bias);
    }
    same_ffn(at, "mlp.shared_experts", &l->shared, CKPT_SHARED * moe);
    for (int e = 0; e < CKPT_EXPERT; e++) {
        if (s->fused) {
            same_rows(at, "mlp.experts.gate_up_proj", e, 0, &l->expert[e].gate, moe, CKPT_HIDDEN);
            same_rows(at, "mlp.experts.gate_up_proj", e, moe, &l->expert[e].up, moe, CKPT_HIDDEN);
            same_rows(at, "mlp.experts.down_proj", e, 0, &l->expert[e].down, CKPT_HIDDEN, moe);
        } else {
            char place[40];
            snprintf(place, sizeof place, "mlp.experts.%d", e);
            same_ffn(at, place, &l->expert[e], moe);
        }
    }
}

/* Nearest bf16 of a positive or negative value that is far from its ends: by scaling the mantissa to 8 bits. */
static double to_bf16(double x)
{
    int e = 0;
    const double m = frexp((double)(float)x, &e);
    return ldexp(nearbyint(ldexp(m, 8)), e - 8);
}

static void same_absorbed(const where *at, const wt_layer *l)
{
    const char *name = full_name(at, "self_attn.kv_b_proj.weight");
    const bool fp8 = l->kv_b.type == GEMM_FP8;
    const int per_head = CKPT_NOPE + CKPT_V;
    const int32_t type = l->kv_b.type == GEMM_F32 ? GEMM_F32 : GEMM_BF16;
    assert_int_equal(l->uk.type, type);
    assert_int_equal(l->uv.type, type);
    assert_int_equal(l->uk.n_out, CKPT_KV_LORA);
    assert_int_equal(l->uk.n_in, CKPT_NOPE);
    assert_int_equal(l->uv.n_out, CKPT_V);
    assert_int_equal(l->uv.n_in, CKPT_KV_LORA);
    for (int64_t h = 0; h < CKPT_HEAD; h++) {
        gemm_mat uk = l->uk;
        gemm_mat uv = l->uv;
        const int64_t size = type == GEMM_F32 ? 4 : 2;
        uk.data = (const char *)uk.data + h * l->uk_head * size;
        uv.data = (const char *)uv.data + h * l->uv_head * size;
        for (int64_t c = 0; c < CKPT_KV_LORA; c++) {
            for (int64_t r = 0; r < per_head; r++) {
                double want = ckpt_at(at->c, name, 0, h * per_head + r, c);
                want = fp8 ? to_bf16(want) : want;
                const double got =
                    r < CKPT_NOPE ? mat_at(&uk, c, r) : mat_at(&uv, r - CKPT_NOPE, c);
                assert_true(got == want);
            }
        }
    }
}

static void same_attention(const where *at, const ckpt_spec *s, const wt_layer *l)
{
    const int q_rows = CKPT_HEAD * (CKPT_NOPE + CKPT_ROPE);
    same_vec(at, "input_layernorm.weight", l->attn_norm, CKPT_HIDDEN);
    same_vec(at, "post_attention_layernorm.weight", l->ffn_norm, CKPT_HIDDEN);
    if (!s->no_q_lora) {
        assert_int_equal(l->q.n_out, 0);
        same_mat(at, "self_attn.q_a_proj.weight", &l->q_a, CKPT_Q_LORA, CKPT_HIDDEN);
        same_vec(at, "self_attn.q_a_layernorm.weight", l->q_norm, CKPT_Q_LORA);
        same_mat(at, "self_attn.q_b_proj.weight", &l->q_b, q_rows, CKPT_Q_LORA);
    } else {
        assert_int_equal(l->q_a.n_out, 0);
        same_mat(at, "self_attn.q_proj.weight", &l->q, q_rows, CKPT_HIDDEN);
    }
    same_mat(at, "self_attn.kv_a_proj_with_mqa.weight", &l->kv_a, CKPT_KV_LORA + CKPT_ROPE,
             CKPT_HIDDEN);
    same_vec(at, "self_attn.kv_a_layernorm.weight", l->kv_norm, CKPT_KV_LORA);
    same_mat(at, "self_attn.kv_b_proj.weight", &l->kv_b, CKPT_HEAD * (CKPT_NOPE + CKPT_V),
             CKPT_KV_LORA);
    same_mat(at, "self_attn.o_proj.weight", &l->o, CKPT_HIDDEN, CKPT_HEAD * CKPT_V);
    same_absorbed(at, l);
}

static void same_indexer(const where *at, const wt_layer *l)
{
    same_mat(at, "self_attn.indexer.wq_b.weight", &l->iq, CKPT_INDEX_HEAD * CKPT_INDEX_DIM,
             CKPT_Q_LORA);
    same_mat(at, "self_attn.indexer.wk.weight", &l->ik, CKPT_INDEX_DIM, CKPT_HIDDEN);
    same_mat(at, "self_attn.indexer.weights_proj.weight", &l->iw, CKPT_INDEX_HEAD, CKPT_HIDDEN);
    same_vec(at, "self_attn.indexer.k_norm.weight", l->ik_norm, CKPT_INDEX_DIM);
    same_vec(at, "self_attn.indexer.k_norm.bias", l->ik_bias, CKPT_INDEX_DIM);
}

static void same_layer(const where *at, const ckpt_spec *s, const wt_layer *l)
{
    const bool draft = at->layer >= CKPT_LAYER;
    same_attention(at, s, l);
    const bool index = s->index && (draft || at->layer % 2 == 0);
    assert_int_equal(l->has_index, index);
    if (index) {
        same_indexer(at, l);
    } else {
        assert_int_equal(l->iq.n_out, 0);
    }
    if (at->layer == 0) {
        assert_int_equal(l->n_expert, 0);
        same_ffn(at, "mlp", &l->ffn, CKPT_INTER);
    } else {
        same_moe(at, s, l);
    }
    if (draft) {
        same_vec(at, "enorm.weight", l->enorm, CKPT_HIDDEN);
        same_vec(at, "hnorm.weight", l->hnorm, CKPT_HIDDEN);
        same_vec(at, "shared_head.norm.weight", l->head_norm, CKPT_HIDDEN);
        same_mat(at, "eh_proj.weight", &l->eh, CKPT_HIDDEN, 2 * CKPT_HIDDEN);
    } else {
        assert_null(l->enorm);
    }
}

static void same_model(const ckpt *c, const ckpt_spec *s, const wt *w)
{
    where at = {c, s->prefix, -1};
    same_mat(&at, "model.embed_tokens.weight", &w->embed, CKPT_VOCAB, CKPT_HIDDEN);
    same_mat(&at, s->tied ? "model.embed_tokens.weight" : "lm_head.weight", &w->head, CKPT_VOCAB,
             CKPT_HIDDEN);
    same_vec(&at, "model.norm.weight", w->norm, CKPT_HIDDEN);
    for (at.layer = 0; at.layer < CKPT_LAYER + s->mtp; at.layer++) {
        same_layer(&at, s, &w->layer[at.layer]);
    }
}

/* Elements of everything but scales and router biases, as the files have them. */
static int64_t count_elements(const ckpt *c)
{
    int64_t n = 0;
    for (int i = 0; i < c->n; i++) {
        int64_t elements = 1;
        for (int d = 0; d < c->t[i].n_dim; d++) {
            elements *= c->t[i].dim[d];
        }
        const bool counted =
            strstr(c->t[i].name, "scale") == NULL && strstr(c->t[i].name, "correction") == NULL;
        n += counted ? elements : 0;
    }
    return n;
}

static void check_form(const ckpt_spec *s, int n_shard, int pad)
{
    ckpt *c = ckpt_new(s);
    ckpt_write(c, s_dir, n_shard, pad);
    wt *w = open_dir(s->mtp);
    same_model(c, s, w);
    assert_int_equal(w->n_param, count_elements(c));
    assert_null(w->k_scale);
    wt_close(w);
    ckpt_free(c);
}

#define SPEC(type, ...) (&(const ckpt_spec){.dtype = (type), __VA_ARGS__})

static void a_bf16_model_is_read_from_one_file(void **state)
{
    (void)state;
    check_form(SPEC("BF16", .index = true, .mtp = true), 1, 0);
}

static void an_fp8_model_is_read_with_scales_in_other_shards(void **state)
{
    (void)state;
    check_form(SPEC("F8_E4M3", .index = true, .mtp = true), 3, 0);
}

static void an_f32_model_is_read(void **state)
{
    (void)state;
    check_form(SPEC("F32", .index = true), 1, 0);
}

static void a_model_without_query_latent_and_bias_is_read(void **state)
{
    (void)state;
    check_form(SPEC("BF16", .no_q_lora = true, .softmax = true), 1, 0);
}

static void sigmoid_routing_goes_without_query_latent_too(void **state)
{
    (void)state;
    check_form(SPEC("BF16", .no_q_lora = true), 1, 0);
}

static void a_dense_attention_model_with_drafts_and_tied_head_is_read(void **state)
{
    (void)state;
    check_form(SPEC("BF16", .mtp = true, .tied = true), 2, 0);
}

static void fused_experts_are_cut_into_gate_up_and_down(void **state)
{
    (void)state;
    check_form(SPEC("BF16", .fused = true), 1, 0);
}

/* Up's scales follow gate's in each expert's part. */
static void fused_fp8_experts_keep_the_scales_of_their_rows(void **state)
{
    (void)state;
    check_form(SPEC("F8_E4M3", .fused = true, .index = true, .moe = 128), 2, 0);
}

static void a_wrapper_is_read_under_its_prefix_past_other_towers(void **state)
{
    (void)state;
    const ckpt_spec *s = SPEC("F8_E4M3", .prefix = "language_model.");
    ckpt *c = ckpt_new(s);
    ckpt_add(c, "vision_tower.patch_embed.weight", "BF16", 3, 5, 0);
    ckpt_add(c, "mm_projector.linear.weight", "F16", 3, 5, 0);
    ckpt_write(c, s_dir, 2, 0);
    wt *w = open_dir(1);
    same_model(c, s, w);
    wt_close(w);
    ckpt_free(c);
}

static void data_that_is_not_aligned_is_copied(void **state)
{
    (void)state;
    const ckpt_spec *s = SPEC("F8_E4M3", .index = false);
    ckpt *c = ckpt_new(s);
    int64_t owned[2];
    for (int pad = 0; pad < 2; pad++) {
        ckpt_write(c, s_dir, 1, pad);
        wt *w = open_dir(0);
        same_model(c, s, w);
        owned[pad] = w->bytes_owned;
        wt_close(w);
    }
    assert_true(owned[1] > owned[0]);
    ckpt_free(c);
}

static void shards_that_are_not_aligned_are_copied_too(void **state)
{
    (void)state;
    check_form(SPEC("F32", .index = false), 2, 3);
}

static void draft_layers_stay_out_where_they_are_not_wanted(void **state)
{
    (void)state;
    const ckpt_spec *s = SPEC("F8_E4M3", .mtp = true, .index = true);
    ckpt *c = ckpt_new(s);
    ckpt_add(c, "model.layers.4.embed_tokens.weight", "BF16", CKPT_VOCAB, CKPT_HIDDEN, 0);
    ckpt_add(c, "model.layers.4.shared_head.head.weight", "BF16", CKPT_VOCAB, CKPT_HIDDEN, 0);
    ckpt_add(c, "model.layers.2.self_attn.rotary_emb.inv_freq", "F32", 4, 0, 0);
    ckpt_add(c, "model.layers.2.self_attn.v_scale", "F32", 1, 0, 0);
    ckpt_write(c, s_dir, 1, 0);
    wt *with = open_dir(1);
    same_model(c, s, with);
    wt *without = open_dir(0);
    assert_int_equal(without->h.n_mtp, 1);
    static const wt_layer zero;
    assert_memory_equal(&without->layer[CKPT_LAYER], &zero, sizeof zero);
    assert_int_equal(with->n_param - without->n_param, weights_params(&with->h, WEIGHTS_MTP));
    assert_int_equal(without->n_param, weights_params(&with->h, WEIGHTS_MAIN));
    assert_memory_equal(with->hash, without->hash, sizeof with->hash);
    wt_close(without);
    wt_close(with);
    /* a file without them opens too, unless they are asked for */
    for (int i = c->n; i-- > 0;) {
        if (strncmp(c->t[i].name, "model.layers.4.", 15) == 0) {
            ckpt_drop(c, i);
        }
    }
    ckpt_write(c, s_dir, 1, 0);
    wt_close(open_dir(0));
    wt *w = NULL;
    kvs_error err = {.code = KVS_OK};
    assert_int_equal(wt_open(&w, s_dir, 1, &err), KVS_FORMAT);
    assert_non_null(strstr(err.text, "model.layers.4.input_layernorm.weight is missing"));
    ckpt_free(c);
}

static void the_head_of_a_tied_model_is_skipped_where_it_is_stored(void **state)
{
    (void)state;
    const ckpt_spec *s = SPEC("BF16", .tied = true);
    ckpt *c = ckpt_new(s);
    ckpt_add(c, "lm_head.weight", "BF16", CKPT_VOCAB, CKPT_HIDDEN, 0);
    ckpt_write(c, s_dir, 1, 0);
    wt *w = open_dir(0);
    same_model(c, s, w);
    assert_ptr_equal(w->head.data, w->embed.data);
    wt_close(w);
    ckpt_free(c);
}

static void scales_of_cached_rows_come_per_layer_under_their_names(void **state)
{
    (void)state;
    const ckpt_spec *s = SPEC("BF16", .mtp = true);
    ckpt *c = ckpt_new(s);
    float x = 0.5f;
    memcpy(c->t[ckpt_add(c, "model.layers.1.self_attn.k_scale", "F32", 0, 0, 0)].data, &x, 4);
    x = 3.0f;
    memcpy(c->t[ckpt_add(c, "model.layers.3.self_attn.attn.k_scale", "F32", 1, 0, 0)].data, &x, 4);
    static const unsigned char two[2] = {0x00, 0x40}; /* bf16 */
    memcpy(c->t[ckpt_add(c, "model.layers.4.self_attn.kv_scale", "BF16", 0, 0, 0)].data, two, 2);
    ckpt_write(c, s_dir, 1, 0);
    wt *w = open_dir(1);
    static const float want[5] = {1.0f, 0.5f, 1.0f, 3.0f, 2.0f};
    assert_memory_equal(w->k_scale, want, sizeof want);
    wt_close(w);
    ckpt_free(c);
}

/* ---- slices and shares ----------------------------------------------------------------------- */

static void slices_read_what_the_whole_reads(void **state)
{
    (void)state;
    const char *const dtype[] = {"BF16", "F32", "F8_E4M3"};
    for (size_t k = 0; k < UNIT_COUNT(dtype); k++) {
        ckpt *c = ckpt_new(SPEC(dtype[k], .index = false));
        ckpt_write(c, s_dir, 1, 0);
        wt *w = open_dir(0);
        const gemm_mat *m = &w->layer[1].kv_b; /* [276, 140] */
        const gemm_mat rows = wt_rows(m, 92, 200);
        const gemm_mat both = wt_cols(&rows, 100, 139);
        const gemm_mat inner = wt_rows(&both, 30, 108);
        assert_int_equal(rows.n_out, 108);
        assert_int_equal(both.n_in, 39);
        assert_int_equal(inner.n_out, 78);
        for (int o = 0; o < 108; o++) {
            for (int i = 0; i < 140; i++) {
                assert_true(mat_at(&rows, o, i) == mat_at(m, 92 + o, i));
            }
            for (int i = 0; i < 39; i++) {
                assert_true(mat_at(&both, o, i) == mat_at(m, 92 + o, 100 + i));
            }
        }
        for (int o = 0; o < 78; o++) {
            for (int i = 0; i < 39; i++) {
                assert_true(mat_at(&inner, o, i) == mat_at(m, 122 + o, 100 + i));
            }
        }
        const gemm_mat none = wt_rows(m, 276, 276);
        assert_int_equal(none.n_out, 0);
        const gemm_mat absent = wt_rows(&w->layer[1].iq, 0, 0);
        assert_null(absent.data);
        wt_close(w);
        ckpt_free(c);
    }
}

static void shares_cover_every_unit_once(void **state)
{
    (void)state;
    for (int32_t n = 0; n <= 40; n++) {
        for (int32_t tp = 1; tp <= 16; tp++) {
            int32_t at = 0;
            for (int32_t r = 0; r < tp; r++) {
                const wt_range s = wt_share(n, tp, r);
                assert_int_equal(s.begin, at);
                assert_in_range(s.end - s.begin, n / tp, (n + tp - 1) / tp);
                at = s.end;
            }
            assert_int_equal(at, n);
        }
    }
    const wt_range last = wt_share(1 << 24, 65536, 65535);
    assert_int_equal(last.begin, (1 << 24) - 256);
    assert_int_equal(last.end, 1 << 24);
}

/* ---- identity -------------------------------------------------------------------------------- */

static void hash_of(const ckpt *c, uint64_t hash[2])
{
    ckpt_write(c, s_dir, 1, 0);
    wt *w = open_dir(0);
    memcpy(hash, w->hash, sizeof w->hash);
    wt_close(w);
}

static void the_hash_tells_config_headers_and_data_but_not_spelling(void **state)
{
    (void)state;
    ckpt *c = ckpt_new(SPEC("BF16", .index = false));
    uint64_t first[2];
    uint64_t next[2];
    hash_of(c, first);
    assert_true(first[0] != 0 && first[1] != 0);
    /* spaces and the order of keys */
    char text[sizeof c->config];
    snprintf(text, sizeof text, "%s", c->config);
    char *end = strrchr(text, '}');
    snprintf(end, sizeof text - (size_t)(end - text), " ,\n\"aa\" : false}");
    snprintf(c->config, sizeof c->config, "%s", text);
    hash_of(c, next);
    assert_memory_not_equal(first, next, sizeof first); /* a key more */
    snprintf(c->config, sizeof c->config, "{\"aa\":false,%.*s}", (int)(end - text - 1), text + 1);
    uint64_t moved[2];
    hash_of(c, moved);
    assert_memory_equal(next, moved, sizeof next);
    /* a bit in the middle of any tensor, but for all experts past the first */
    static const struct {
        const char *name;
        bool seen;
    } flip[] = {{"model.norm.weight", true},
                {"model.layers.3.self_attn.o_proj.weight", true},
                {"model.layers.1.mlp.experts.0.up_proj.weight", true},
                {"model.layers.1.mlp.experts.1.up_proj.weight", false},
                {"model.layers.1.mlp.shared_experts.up_proj.weight", true}};
    for (size_t i = 0; i < UNIT_COUNT(flip); i++) {
        ckpt_tensor *t = &c->t[ckpt_find(c, flip[i].name)];
        t->data[t->bytes / 2] ^= 1;
        hash_of(c, moved);
        assert_int_equal(memcmp(next, moved, sizeof next) != 0, flip[i].seen);
        t->data[t->bytes / 2] ^= 1;
    }
    const ckpt_tensor swap = c->t[5];
    c->t[5] = c->t[6];
    c->t[6] = swap;
    hash_of(c, moved);
    assert_memory_not_equal(next, moved, sizeof next);
    ckpt_free(c);
}

static void every_failed_allocation_is_an_error_that_leaves_nothing(void **state)
{
    (void)state;
    ckpt *c = ckpt_new(SPEC("F8_E4M3", .index = true, .mtp = true));
    ckpt_write(c, s_dir, 3, 1);
    for (int64_t n = 1;; n = n < 40 ? n + 1 : n + 19) {
        const mem_stats before = mem_stats_get();
        mem_fail_after(n);
        wt *w = (wt *)1;
        kvs_error err = {.code = KVS_OK};
        const kvs_status st = wt_open(&w, s_dir, 1, &err);
        const bool fired = mem_fail_fired();
        mem_fail_after(0);
        if (!fired) {
            assert_int_equal(st, KVS_OK);
            wt_close(w);
            assert_int_equal(mem_stats_get().n_live, before.n_live);
            assert_true(n > 100);
            break;
        }
        assert_int_equal(st, KVS_NOMEM);
        assert_null(w);
        assert_true(strlen(err.text) > 10);
        assert_int_equal(mem_stats_get().n_live, before.n_live);
        assert_int_equal(mem_stats_get().live_bytes, before.live_bytes);
    }
    ckpt_free(c);
}

int main(void)
{
#define IN_DIR(f) cmocka_unit_test_setup_teardown(f, make_dir, remove_dir)
    const struct CMUnitTest tests[] = {
        IN_DIR(a_bf16_model_is_read_from_one_file),
        IN_DIR(an_fp8_model_is_read_with_scales_in_other_shards),
        IN_DIR(an_f32_model_is_read),
        IN_DIR(a_model_without_query_latent_and_bias_is_read),
        IN_DIR(sigmoid_routing_goes_without_query_latent_too),
        IN_DIR(a_dense_attention_model_with_drafts_and_tied_head_is_read),
        IN_DIR(fused_experts_are_cut_into_gate_up_and_down),
        IN_DIR(fused_fp8_experts_keep_the_scales_of_their_rows),
        IN_DIR(a_wrapper_is_read_under_its_prefix_past_other_towers),
        IN_DIR(data_that_is_not_aligned_is_copied),
        IN_DIR(shards_that_are_not_aligned_are_copied_too),
        IN_DIR(draft_layers_stay_out_where_they_are_not_wanted),
        IN_DIR(the_head_of_a_tied_model_is_skipped_where_it_is_stored),
        IN_DIR(scales_of_cached_rows_come_per_layer_under_their_names),
        IN_DIR(slices_read_what_the_whole_reads),
        cmocka_unit_test(shares_cover_every_unit_once),
        IN_DIR(the_hash_tells_config_headers_and_data_but_not_spelling),
        IN_DIR(every_failed_allocation_is_an_error_that_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
