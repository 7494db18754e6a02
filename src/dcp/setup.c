/* dcp/setup.c - from a config to a set-up with every default resolved and every field checked. */
#include <math.h>
#include <string.h>
#include "base/cpu.h"
#include "base/err.h"
#include "base/knob.h"
#include "dcp/dcp.h"
#include "num/kvfmt.h"
#include "shard/topo.h"

kvs_status dcp_features(const char *cpu, uint32_t *features, kvs_error *err)
{
    uint32_t mask = 0;
    TRY(cpu_parse_level(cpu ? cpu : knob_env("cpu"), &mask, err));
    *features = cpu_features() & mask;
    return KVS_OK;
}

static int32_t or_default(int32_t value, int32_t def)
{
    return value == 0 ? def : value;
}

static kvs_status check_range(const char *what, int64_t value, int64_t lo, int64_t hi, kvs_error *err)
{
    if (value < lo || value > hi)
        return err_set(err, KVS_INVALID, "%s %lld: use %lld to %lld", what, (long long)value,
                       (long long)lo, (long long)hi);
    return KVS_OK;
}

static kvs_status resolve_ranks(dcp_setup *s, const kvs_dcp_config *cfg, int32_t world_size,
                                kvs_error *err)
{
    s->tp = or_default(cfg->tp, world_size);
    if (s->tp != world_size)
        return err_set(err, KVS_INVALID, "tp %d: the communicator has %d ranks; open it with %d", s->tp,
                       world_size, s->tp);
    const topo_config tc = {
        .tp = s->tp,
        .dcp = cfg->dcp,
        .interleave = cfg->interleave,
        .heads = cfg->n_head,
        .max_context = cfg->max_len == 0 ? 131072 : cfg->max_len,
        .kernel_level = cfg->kernel_level,
    };
    TRY(check_range("n_head", cfg->n_head, 1, 4096, err));
    topo t;
    TRY(topo_init(&t, &tc, err));
    s->dcp = t.dcp;
    s->interleave = t.interleave;
    s->n_head = t.heads;
    s->head_local = t.heads_local;
    s->head_group = t.heads_gathered;
    s->max_len = t.max_context;
    s->kernel_level = cfg->kernel_level;
    if (s->head_group > KVS_MAX_HEADS)
        return err_set(err, KVS_UNSUPPORTED,
                       "n_head %d over tp %d with dcp %d gives %d heads in one kernel call, more than %d; "
                       "use tp %d",
                       s->n_head, s->tp, s->dcp, s->head_group, KVS_MAX_HEADS,
                       (int32_t)shard_cdiv((int64_t)s->n_head * s->dcp, KVS_MAX_HEADS));
    return KVS_OK;
}

static kvs_status resolve_formats(dcp_setup *s, const kvs_dcp_config *cfg, kvs_error *err)
{
    kv_layout l = {.kv = cfg->kv, .index = cfg->index_kv, .hadamard = 0};
    TRY(kv_layout_resolve(cfg->n_index_head > 0, &l, err));
    s->fmt = (int32_t)l.kv;
    s->index_fmt = (int32_t)l.index;
    s->exchange = cfg->exchange == KVS_EXCHANGE_AUTO ? KVS_EXCHANGE_A2A : (int32_t)cfg->exchange;
    TRY(check_range("exchange", s->exchange, KVS_EXCHANGE_A2A, KVS_EXCHANGE_AG_RS, err));
    s->q_fp8 = cfg->q_fp8;
    TRY(check_range("q_fp8", s->q_fp8, 0, 1, err));
    if (s->q_fp8 && s->fmt != KVS_KV_FP8)
        return err_set(err, KVS_UNSUPPORTED,
                       "q_fp8 with %s rows: fp8 queries go with fp8 rows only; use kv fp8 or q_fp8 0",
                       kv_fmt_name(s->fmt));
    return KVS_OK;
}

/* What will be called, which is what there must be room for. */
static kvs_status resolve_calls(dcp_setup *s, const kvs_dcp_config *cfg, kvs_error *err)
{
    s->forms = or_default(cfg->forms, DCP_ALL_FORMS);
    if ((s->forms & ~(DCP_ALL_FORMS | DCP_BLOCKS)) != 0)
        return err_set(err, KVS_INVALID,
                       "forms %d: use 0 (all) or the sum of DENSE %d, SPARSE %d, CONTEXT %d", s->forms,
                       1 << KVS_ATTEND_DENSE, 1 << KVS_ATTEND_SPARSE, 1 << KVS_ATTEND_CONTEXT);
    s->q_ready = cfg->q_ready;
    TRY(check_range("q_ready", s->q_ready, 0, 1, err));
    if (s->q_ready && s->q_fp8)
        return err_set(err, KVS_INVALID,
                       "q_ready 1 with q_fp8 1: e4m3 queries are made from others here; use q_ready 0");
    return KVS_OK;
}

kvs_status dcp_setup_resolve(dcp_setup *s, const kvs_dcp_config *cfg, int32_t world_size,
                             kvs_error *err)
{
    memset(s, 0, sizeof *s);
    TRY(resolve_ranks(s, cfg, world_size, err));
    TRY(resolve_formats(s, cfg, err));
    s->n_index_head = cfg->n_index_head;
    TRY(check_range("n_index_head", s->n_index_head, 0, 64, err));
    s->topk = cfg->topk;
    TRY(check_range("topk", s->topk, 0, KVS_MAX_TOPK, err));
    if (s->n_index_head > 0 && s->topk == 0)
        return err_set(err, KVS_INVALID, "n_index_head %d with topk 0: an indexer needs topk 1 to %d",
                       s->n_index_head, KVS_MAX_TOPK);
    s->softmax_scale = cfg->softmax_scale;
    if (!(s->softmax_scale > 0.0f) || !isfinite(s->softmax_scale))
        return err_set(err, KVS_INVALID,
                       "softmax_scale %g: a finite number above 0 is needed, for example "
                       "(nope + rope)^-1/2",
                       (double)s->softmax_scale);
    TRY(resolve_calls(s, cfg, err));
    s->trace = cfg->trace;
    TRY(check_range("trace", s->trace, 0, 1, err));
    s->max_rows = or_default(cfg->max_rows, 256);
    TRY(check_range("max_rows", s->max_rows, 1, 1 << 20, err));
    s->max_reqs = or_default(cfg->max_reqs, 64);
    TRY(check_range("max_reqs", s->max_reqs, 1, 1 << 16, err));
    s->threads = or_default(cfg->threads, 1);
    return check_range("threads", s->threads, 1, POOL_MAX_THREAD, err);
}
