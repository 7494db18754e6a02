/* model/fwd_open.c - making and ending a rank's handle.
 *
 * Ranks agree before each collective part of the opening, so that a rank without memory or with other settings
 * ends the opening on all of them, with one message.
 */
#include <stdio.h>
#include <string.h>
#include "base/err.h"
#include "base/mem.h"
#include "model/fwd_impl.h"

/* Index layers count layers that have an indexer: the main model's, then the drafts'. */
static void number_index_layers(fwd *f)
{
    const hp *h = f->h;
    int32_t next = 0;
    int32_t source = -1;
    for (int32_t i = 0; i < h->n_layer + f->s.n_mtp; i++) {
        f->index_of[i] = f->w->layer[i].has_index ? next++ : -1;
        if (i < h->n_layer) {
            source = f->index_of[i] >= 0 ? f->index_of[i] : source;
            f->source_of[i] = source;
        }
    }
}

static int32_t drafts_of(const wt *w)
{
    return w->h.n_mtp > 0 && w->layer[w->h.n_layer].eh.n_out > 0 ? w->h.n_mtp : 0;
}

/* Everything that needs no other rank and no attention handle. */
static kvs_status begin(fwd *f, const wt *w, const fwd_config *cfg, kvs_comm *world, kvs_error *err)
{
    f->w = w;
    f->h = &w->h;
    f->cfg = *cfg;
    f->world = world;
    f->draft_rows = -1;
    TRY(fwd_shape_of(&f->s, f->h, cfg, comm_size(world), comm_rank(world), err));
    f->s.n_mtp = drafts_of(w);
    hp_inv_freq(f->h, f->inv_freq);
    number_index_layers(f);
    return KVS_OK;
}

/* Caches and the workspace, once the attention handle says what is resolved. */
static kvs_status make_memory(fwd *f, kvs_error *err)
{
    kvs_cache_config cc = fwd_cache_config(f->h, &f->cfg, &f->s);
    cc.rank = f->d->geom.rank;
    cc.kv = (kvs_kv_format)f->d->s.fmt;
    cc.index_kv = (kvs_index_format)f->d->s.index_fmt;
    cc.k_scale = f->w->k_scale;
    TRY(cache_create(&f->cache, &cc, err));
    fwd_sizes z;
    fwd_size_space(&z, f->h, &f->cfg, &f->s, &f->d->kern);
    f->block_bytes = fwd_place_space(&z, NULL, NULL);
    f->gemm_bytes = (size_t)z.gemm;
    f->heads_bytes = (size_t)z.h_scratch;
    f->block = mem_alloc((size_t)f->block_bytes, MEM_ALIGN);
    if (!f->block)
        return err_set(err, KVS_NOMEM, "workspace of %lld bytes; lower max_rows %d or max_logits %d",
                       (long long)f->block_bytes, f->cfg.max_rows, f->cfg.max_logits);
    fwd_place_space(&z, f->block, &f->b);
    return KVS_OK;
}

/* What must be equal on all ranks and is not the attention layer's own. */
static void tag_of(const fwd *f, char *tag, size_t cap)
{
    snprintf(tag, cap,
             "model %016llx%016llx ep %d mtp %d hadamard %d scale_rule %d latent_eps %a max_logits %d n_page %lld "
             "selection_last %d",
             (unsigned long long)f->w->hash[1], (unsigned long long)f->w->hash[0], f->cfg.ep, f->s.n_mtp,
             f->cfg.hadamard, (int)f->cfg.scale_rule, (double)f->s.latent_eps, f->cfg.max_logits,
             (long long)f->cfg.n_page, f->cfg.selection_last);
}

kvs_status fwd_open(fwd **out, const wt *w, const fwd_config *cfg, kvs_comm *world, kvs_error *err)
{
    *out = NULL;
    kvs_error why;
    memset(&why, 0, sizeof why);
    fwd *f = mem_calloc(1, sizeof *f);
    kvs_status st = f ? begin(f, w, cfg, world, &why)
                      : err_set(&why, KVS_NOMEM, "no memory for a forward pass");
    TRY_GOTO(comm_agree(world, st, &why), out);
    char tag[256];
    tag_of(f, tag, sizeof tag);
    kvs_dcp_config dc = fwd_dcp_config(f->h, cfg, f->s.tp);
    dc.model_tag = tag;
    TRY_GOTO(dcp_open(&f->d, &dc, world, &why), out);
    st = make_memory(f, &why);
    TRY_GOTO(comm_agree(world, st, &why), out);
    *out = f;
    return KVS_OK;
out:
    fwd_close(f);
    if (err)
        *err = why;
    return st;
}

void fwd_close(fwd *f)
{
    if (!f)
        return;
    mem_free(f->block);
    cache_free(f->cache);
    dcp_close(f->d);
    mem_free(f);
}

void fwd_get_info(const fwd *f, fwd_info *info)
{
    kvs_cache_info c;
    cache_get_info(f->cache, &c);
    const int32_t n_layer = f->h->n_layer + f->s.n_mtp;
    const int32_t n_index = f->cache->n_index_layer;
    const int64_t latent = c.bytes_latent / n_layer;
    const int64_t index = n_index > 0 ? c.bytes_index / n_index : 0;
    memset(info, 0, sizeof *info);
    info->cache_latent = latent * f->h->n_layer;
    info->cache_index = index * f->s.n_index;
    info->cache_draft = c.bytes_latent + c.bytes_index - info->cache_latent - info->cache_index;
    info->workspace = f->block_bytes + f->d->bytes.total;
    info->kernels = f->d->kernels;
    info->transport = comm_transport(f->world);
    info->tp = f->s.tp;
    info->dcp = f->d->s.dcp;
    info->interleave = f->d->s.interleave;
    info->rank = f->s.rank;
    info->kv = (kvs_kv_format)f->d->s.fmt;
    info->index_kv = (kvs_index_format)f->d->s.index_fmt;
    info->exchange = (kvs_exchange)f->d->s.exchange;
}
