/* engine/rank.c - commands packed, sent, checked and run. */
#include "engine/rank.h"

#include <inttypes.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"

enum { WAIT_MS = INT32_MAX }; /* for the next command */

/* ---- buffers --------------------------------------------------------------------------------- */

static size_t padded(size_t n)
{
    return (n + 63) / 64 * 64;
}

/* Lays the arrays of w out in `block`, each on a line of its own; NULL only adds up. */
static size_t lay_out(rank_work *w, const rank_limits *l, unsigned char *block)
{
    const size_t reqs = (size_t)l->max_reqs;
    const struct {
        void **at;
        size_t bytes;
    } part[] = {
        {(void **)&w->seq_len, reqs * sizeof *w->seq_len},
        {(void **)&w->q_len, reqs * sizeof *w->q_len},
        {(void **)&w->n_prompt, reqs * sizeof *w->n_prompt},
        {(void **)&w->slot, reqs * sizeof *w->slot},
        {(void **)&w->from, reqs * sizeof *w->from},
        {(void **)&w->token, (size_t)l->max_rows * sizeof *w->token},
        {(void **)&w->logit_row, (size_t)l->max_logits * sizeof *w->logit_row},
        {(void **)&w->table, reqs * (size_t)l->width * sizeof *w->table},
    };
    size_t n = 0;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        if (block != NULL) {
            *part[i].at = block + n;
        }
        n += padded(part[i].bytes);
    }
    return n;
}

/* Makes every buffer of r, or with r NULL only adds up their bytes; -1 without memory. */
static int64_t make_buffers(rank *r, const rank_limits *l, int32_t hidden, int32_t vocab)
{
    rank none;
    rank *to = r != NULL ? r : &none;
    const size_t reqs = (size_t)l->max_reqs;
    const size_t drafting = l->mtp > 0 ? reqs : 0;
    const size_t row = (size_t)hidden * sizeof(float);
    const size_t logits = (size_t)vocab * sizeof(float);
    const size_t pack = lay_out(&(rank_work){0}, l, NULL);
    const struct {
        void **at;
        size_t n, bytes;
    } part[] = {
        {(void **)&to->block, 1, pack},
        {(void **)&to->pack, 1, pack},
        {(void **)&to->logits, (size_t)l->max_logits, logits},
        {(void **)&to->draft_logits, drafting, logits},
        {(void **)&to->pend, drafting * RANK_PEND_ROWS, row},
        {(void **)&to->chain, drafting * RANK_PEND_ROWS, row},
        {(void **)&to->hid, l->mtp > 0 ? (size_t)l->max_rows : 0, row},
        {(void **)&to->keep_row, drafting, sizeof *to->keep_row},
    };
    int64_t n = 0;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        if (r != NULL && part[i].n > 0) {
            *part[i].at = mem_alloc_array(part[i].n, part[i].bytes, 0);
            if (*part[i].at == NULL) {
                return -1;
            }
        }
        n += (int64_t)(part[i].n * part[i].bytes);
    }
    return n;
}

int64_t rank_bytes(const rank_limits *lim, int32_t hidden, int32_t vocab)
{
    return make_buffers(NULL, lim, hidden, vocab);
}

kvs_status rank_open(rank *r, const wt *w, const fwd_config *cfg, const rank_limits *lim,
                     comm *world, kvs_error *err)
{
    *r = (rank){.world = world,
                .lim = *lim,
                .hidden = w->h.hidden,
                .vocab = w->h.vocab,
                .n_page = cfg->n_page};
    kvs_error mine = {0};
    kvs_status st = KVS_OK;
    if (make_buffers(r, lim, r->hidden, r->vocab) < 0) {
        st = err_set(&mine, KVS_NOMEM, "rank %d: no memory for the step's buffers of %d rows",
                     (int)comm_rank(world), (int)lim->max_rows);
    } else {
        memset(r->block, 0, lay_out(&r->w, lim, r->block));
        st = fwd_open(&r->f, w, cfg, world, &mine);
    }
    if (st < 0) {
        comm_abort(world, mine.text);
        rank_close(r);
        if (err != NULL) {
            *err = mine;
        }
        return st;
    }
    return KVS_OK;
}

void rank_close(rank *r)
{
    fwd_close(r->f);
    mem_free(r->block);
    mem_free(r->pack);
    mem_free(r->logits);
    mem_free(r->draft_logits);
    mem_free(r->pend);
    mem_free(r->chain);
    mem_free(r->hid);
    mem_free(r->keep_row);
    *r = (rank){0};
}

/* ---- commands on their way ------------------------------------------------------------------- */

/* Copies the arrays of w to (out) or from (in) the packed form; returns its size. */
static size_t pack_arrays(rank_work *w, unsigned char *pack, bool out)
{
    const rank_cmd *c = &w->c;
    const struct {
        void *at;
        size_t bytes;
    } part[] = {
        {w->seq_len, (size_t)c->n_req * sizeof *w->seq_len},
        {w->q_len, (size_t)c->n_req * sizeof *w->q_len},
        {w->n_prompt, (size_t)c->n_req * sizeof *w->n_prompt},
        {w->slot, (size_t)c->n_req * sizeof *w->slot},
        {w->from, (size_t)c->n_req * sizeof *w->from},
        {w->token, (size_t)c->n_row * sizeof *w->token},
        {w->logit_row, (size_t)c->n_logit * sizeof *w->logit_row},
        {w->table, (size_t)c->n_req * (size_t)c->stride * sizeof *w->table},
    };
    size_t n = 0;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        if (pack != NULL && out) {
            memcpy(pack + n, part[i].at, part[i].bytes);
        } else if (pack != NULL) {
            memcpy(part[i].at, pack + n, part[i].bytes);
        }
        n += part[i].bytes;
    }
    return n;
}

static kvs_status check_head(const rank *r, kvs_error *err)
{
    const rank_cmd *c = &r->w.c;
    const rank_limits *l = &r->lim;
    const bool ok = c->op >= RANK_STEP && c->op <= RANK_END && c->n_req >= 0 &&
                    c->n_req <= l->max_reqs && c->n_row >= 0 && c->n_row <= l->max_rows &&
                    c->n_logit >= 0 && c->n_logit <= l->max_logits && c->stride >= 0 &&
                    c->stride <= l->width;
    return ok ? KVS_OK
              : err_set(err, KVS_INTERNAL,
                        "command %d of %d requests, %d rows, %d logits, %" PRId64
                        " table entries is past the limits",
                        (int)c->op, (int)c->n_req, (int)c->n_row, (int)c->n_logit, c->stride);
}

rank_work *rank_begin(rank *r, rank_op op, int64_t stride)
{
    r->w.c = (rank_cmd){.op = (int32_t)op, .stride = stride};
    return &r->w;
}

/* ---- commands at work ------------------------------------------------------------------------ */

static kvs_batch batch_of(const rank *r)
{
    const rank_work *w = &r->w;
    return (kvs_batch){.n_req = w->c.n_req,
                       .q_len = w->q_len,
                       .seq_len = w->seq_len,
                       .table = w->table,
                       .table_stride = w->c.stride,
                       .n_page = r->n_page};
}

static void copy_rows(const rank *r, float *dst, const float *src, int64_t n)
{
    memcpy(dst, src, (size_t)n * (size_t)r->hidden * sizeof(float));
}

/* The rows whose draft pass comes later. */
static void keep_hidden(rank *r)
{
    const rank_work *w = &r->w;
    const float *main = fwd_hidden(r->f);
    int64_t row = 0;
    for (int32_t i = 0; i < w->c.n_req; i++) {
        const int64_t n = w->q_len[i] - w->from[i];
        copy_rows(r, r->pend + (int64_t)w->slot[i] * RANK_PEND_ROWS * r->hidden,
                  main + (row + w->from[i]) * r->hidden, n);
        row += w->q_len[i];
    }
}

static kvs_status run_step(rank *r, kvs_error *err)
{
    const rank_work *w = &r->w;
    const kvs_batch b = batch_of(r);
    TRY(fwd_step(r->f, &b, w->n_prompt, w->token, w->logit_row, w->c.n_logit, r->logits, err));
    if (r->lim.mtp > 0) {
        keep_hidden(r);
    }
    return KVS_OK;
}

static void gather_hidden(rank *r)
{
    const rank_work *w = &r->w;
    int64_t row = 0;
    for (int32_t i = 0; i < w->c.n_req; i++) {
        const float *src = w->c.source == RANK_MAIN ? fwd_hidden(r->f) : r->chain;
        int64_t at = w->from[i];
        if (w->c.source == RANK_PEND) {
            src = r->pend;
            at = (int64_t)w->slot[i] * RANK_PEND_ROWS;
        }
        copy_rows(r, r->hid + row * r->hidden, src + at * r->hidden, w->q_len[i]);
        row += w->q_len[i];
    }
}

static kvs_status run_draft(rank *r, kvs_error *err)
{
    const rank_work *w = &r->w;
    const kvs_batch b = batch_of(r);
    gather_hidden(r);
    TRY(fwd_draft(r->f, 0, &b, w->n_prompt, w->token, r->hid, w->c.reuse, w->logit_row,
                  w->c.n_logit, r->draft_logits, w->c.chain != 0 ? r->chain : NULL, err));
    if (w->c.keep == 0) {
        return KVS_OK;
    }
    int32_t row = 0;
    for (int32_t i = 0; i < w->c.n_req; i++) {
        row += w->q_len[i];
        r->keep_row[i] = row - 1;
    }
    return fwd_draft_keep(r->f, r->keep_row, w->c.n_req, err);
}

static kvs_status run(rank *r, kvs_error *err)
{
    return r->w.c.op == RANK_STEP ? run_step(r, err) : run_draft(r, err);
}

/* Ends the group with the message of what failed here, whose status is st. */
static kvs_status give_up(rank *r, kvs_status st, const kvs_error *mine, kvs_error *err)
{
    comm_abort(r->world, mine->text);
    if (err != NULL) {
        *err = *mine;
    }
    return st;
}

static kvs_status send(rank *r, kvs_error *err)
{
    if (comm_size(r->world) == 1) {
        return KVS_OK;
    }
    TRY(comm_broadcast(r->world, &r->w.c, sizeof r->w.c, 0, err));
    if (r->w.c.op == RANK_END) {
        return KVS_OK;
    }
    return comm_broadcast(r->world, r->pack, pack_arrays(&r->w, r->pack, true), 0, err);
}

kvs_status rank_send(rank *r, kvs_error *err)
{
    kvs_error mine = {0};
    kvs_status st = check_head(r, &mine);
    if (st == KVS_OK) {
        st = send(r, &mine);
    }
    if (st == KVS_OK) {
        st = run(r, &mine);
    }
    return st < 0 ? give_up(r, st, &mine, err) : KVS_OK;
}

kvs_status rank_send_end(rank *r, kvs_error *err)
{
    rank_begin(r, RANK_END, 0);
    return send(r, err);
}

static kvs_status receive(rank *r, kvs_error *err)
{
    comm_set_timeout(r->world, WAIT_MS);
    const kvs_status st = comm_broadcast(r->world, &r->w.c, sizeof r->w.c, 0, err);
    comm_set_timeout(r->world, r->lim.timeout_ms);
    TRY(st);
    TRY(check_head(r, err));
    if (r->w.c.op == RANK_END) {
        return KVS_OK;
    }
    TRY(comm_broadcast(r->world, r->pack, pack_arrays(&r->w, NULL, true), 0, err));
    pack_arrays(&r->w, r->pack, false);
    return KVS_OK;
}

kvs_status rank_follow(rank *r, kvs_error *err)
{
    for (;;) {
        kvs_error mine = {0};
        kvs_status st = receive(r, &mine);
        if (st == KVS_OK && r->w.c.op == RANK_END) {
            return KVS_OK;
        }
        if (st == KVS_OK) {
            st = run(r, &mine);
        }
        if (st < 0) {
            return give_up(r, st, &mine, err);
        }
    }
}
