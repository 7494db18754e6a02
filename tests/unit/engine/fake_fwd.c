#include "fake_fwd.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/hash.h"

enum { HIDDEN = 4, MAX_REQ = 64 };

fake_model fake = {.seed = 1, .accuracy = 70, .spread = 8.0, .nan_after = -1, .fail_rank = -1};
char fake_log[FAKE_LOG];
int32_t fake_n_step, fake_n_draft;
int64_t fake_n_prompt;

typedef struct slot {
    bool written, chained;
    int32_t token;  /* main: the token; draft: the next token          */
    uint64_t state; /* draft: the hidden row's state, chained or not   */
} slot;

struct fwd {
    const wt *w;
    fwd_config c;
    comm *world;
    int64_t span;
    slot *main, *draft;
    float *hidden;
    int32_t n_call;
    int32_t kept[MAX_REQ]; /* first page of each request that a selection was kept for */
    int32_t n_kept;
    int32_t last_page[MAX_REQ], last_row[MAX_REQ], n_last; /* of the last pass with reuse 0 */
    int32_t n_row;
};

uint64_t fake_next(uint64_t state, int32_t token)
{
    const uint64_t in[3] = {state, (uint64_t)token, fake.seed};
    return hash_xx64(in, sizeof in);
}

float fake_logit(uint64_t state, int32_t v)
{
    const uint64_t in[3] = {state, (uint64_t)v, 99};
    return (float)((double)(hash_xx64(in, sizeof in) >> 40) * 0x1p-24 * fake.spread);
}

uint64_t fake_state(const int32_t *token, int64_t n)
{
    uint64_t s = 0;
    for (int64_t i = 0; i < n; i++) {
        s = fake_next(s, token[i]);
    }
    return s;
}

void fake_weights(wt *w, int32_t vocab, int32_t n_mtp, bool share)
{
    memset(w, 0, sizeof *w);
    w->h.vocab = vocab;
    w->h.hidden = HIDDEN;
    w->h.n_mtp = n_mtp;
    w->h.index_share_mtp = share;
}

static void put_state(float *h, uint64_t s)
{
    for (int i = 0; i < HIDDEN; i++) {
        h[i] = (float)(s >> (16 * i) & 0xFFFF);
    }
}

static uint64_t get_state(const float *h)
{
    uint64_t s = 0;
    for (int i = 0; i < HIDDEN; i++) {
        s |= (uint64_t)h[i] << (16 * i);
    }
    return s;
}

kvs_status fwd_open(fwd **out, const wt *w, const fwd_config *cfg, kvs_comm *world, kvs_error *err)
{
    (void)err;
    fwd *f = calloc(1, sizeof *f);
    f->w = w;
    f->c = *cfg;
    f->world = world;
    f->span = 64 * cfg->dcp;
    f->main = calloc((size_t)(cfg->n_page * f->span), sizeof *f->main);
    f->draft = calloc((size_t)(cfg->n_page * f->span), sizeof *f->draft);
    f->hidden = calloc((size_t)cfg->max_rows, HIDDEN * sizeof(float));
    *out = f;
    return comm_barrier(world, err);
}

void fwd_close(fwd *f)
{
    if (f != NULL) {
        free(f->main);
        free(f->draft);
        free(f->hidden);
        free(f);
    }
}

static void say(const fwd *f, const char *fmt, ...)
{
    if (!fake.log || comm_rank(f->world) != 0) {
        return;
    }
    const size_t n = strlen(fake_log);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(fake_log + n, sizeof fake_log - n, fmt, ap);
    va_end(ap);
}

/* Equal arguments on every rank; the limits of the config. */
static kvs_status check_call(fwd *f, const kvs_batch *b, const int32_t *token,
                             const int32_t *logit_row, int32_t n_logit, int32_t extra,
                             kvs_error *err)
{
    f->n_call++;
    if (fake.fail_rank == comm_rank(f->world) && fake.fail_call == f->n_call) {
        return err_set(err, KVS_DEVICE, "the fake failed call %d", f->n_call);
    }
    int32_t rows = 0;
    hash_state s;
    hash_init64(&s);
    for (int32_t i = 0; i < b->n_req; i++) {
        rows += b->q_len[i];
        const int64_t need = (b->seq_len[i] + f->span - 1) / f->span;
        if (b->seq_len[i] > f->c.max_len || need > b->table_stride || b->q_len[i] < 1) {
            return err_set(err, KVS_INTERNAL, "fake: request %d of %" PRId64 " tokens", i,
                           b->seq_len[i]);
        }
        for (int64_t p = 0; p < need; p++) {
            const int32_t page = b->table[i * b->table_stride + p];
            if (page < 0 || page >= f->c.n_page) {
                return err_set(err, KVS_INTERNAL, "fake: page %d", page);
            }
        }
        hash_add64(&s, b->table + i * b->table_stride, (size_t)need * 4);
    }
    bool ok = rows >= 1 && rows <= f->c.max_rows && b->n_req <= f->c.max_reqs &&
              n_logit <= f->c.max_logits && b->n_page == f->c.n_page;
    for (int32_t i = 0; i < n_logit; i++) {
        ok = ok && logit_row[i] < rows && (i == 0 || logit_row[i] > logit_row[i - 1]);
    }
    for (int32_t i = 0; ok && i < rows; i++) {
        ok = token[i] >= 0 && token[i] < f->w->h.vocab;
    }
    if (!ok) {
        return err_set(err, KVS_INTERNAL, "fake: %d rows, %d logits out of bounds", rows, n_logit);
    }
    f->n_row = rows;
    hash_add64(&s, b->q_len, (size_t)b->n_req * 4);
    hash_add64(&s, b->seq_len, (size_t)b->n_req * 8);
    hash_add64(&s, token, (size_t)rows * 4);
    hash_add64(&s, logit_row, (size_t)n_logit * 4);
    hash_add64(&s, &extra, sizeof extra);
    uint64_t mine = hash_get64(&s);
    uint64_t all[COMM_MAX_THREADS];
    TRY(comm_all_gather(f->world, &mine, all, sizeof mine, err));
    for (int32_t r = 0; r < comm_size(f->world); r++) {
        if (all[r] != mine) {
            return err_set(err, KVS_INTERNAL, "fake: rank %d calls something else", r);
        }
    }
    return KVS_OK;
}

static slot *at(const fwd *f, slot *pool, const kvs_batch *b, int32_t req, int64_t pos)
{
    const int32_t page = b->table[req * b->table_stride + pos / f->span];
    return &pool[page * f->span + pos % f->span];
}

/* The state after position pos, from the slots of the main cache. */
static kvs_status read_main(const fwd *f, const kvs_batch *b, int32_t req, int64_t pos,
                            uint64_t *state, kvs_error *err)
{
    *state = 0;
    for (int64_t p = 0; p <= pos; p++) {
        const slot *s = at(f, f->main, b, req, p);
        if (!s->written) {
            return err_set(err, KVS_INTERNAL, "fake: position %" PRId64 " was never written", p);
        }
        *state = fake_next(*state, s->token);
    }
    return KVS_OK;
}

/* Rows of one request are all of its prompt or none; which ones follows from fake_n_prompt. */
static kvs_status check_prompt(const fwd *f, const kvs_batch *b, const int32_t *n_prompt, int32_t is_draft,
                               kvs_error *err)
{
    (void)f;
    for (int32_t i = 0; i < b->n_req; i++) {
        if (fake_n_prompt == 0) {
            continue;
        }
        /* the draft of the prompt's last row needs the first generated token */
        const int64_t end = fake_n_prompt - is_draft;
        const int64_t first = b->seq_len[i] - b->q_len[i];
        const int32_t want = first < end ? b->q_len[i] : 0;
        if (b->seq_len[i] > end && first < end) {
            return err_set(err, KVS_INTERNAL, "fake: rows %" PRId64 " to %" PRId64 " cross the prompt's end",
                           first, b->seq_len[i]);
        }
        if (n_prompt[i] != want) {
            return err_set(err, KVS_INTERNAL, "fake: %d prompt rows of those from %" PRId64 ", not %d",
                           n_prompt[i], first, want);
        }
    }
    return KVS_OK;
}

kvs_status fwd_step(fwd *f, const kvs_batch *b, const int32_t *n_prompt, const int32_t *token,
                    const int32_t *logit_row, int32_t n_logit, float *logits, kvs_error *err)
{
    TRY(check_prompt(f, b, n_prompt, 0, err));
    TRY(check_call(f, b, token, logit_row, n_logit, -1, err));
    if (comm_rank(f->world) == 0) {
        fake_n_step++;
    }
    int32_t row = 0;
    for (int32_t i = 0; i < b->n_req; i++) {
        say(f, "S %" PRId64 "+%d;", b->seq_len[i] - b->q_len[i], b->q_len[i]);
        for (int32_t t = 0; t < b->q_len[i]; t++) {
            *at(f, f->main, b, i, b->seq_len[i] - b->q_len[i] + t) =
                (slot){.written = true, .token = token[row + t]};
        }
        row += b->q_len[i];
    }
    row = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < b->n_req; i++) {
        const int64_t p0 = b->seq_len[i] - b->q_len[i];
        uint64_t state = 0;
        TRY(read_main(f, b, i, p0, &state, err));
        for (int32_t t = 0; t < b->q_len[i]; t++, row++) {
            state = t > 0 ? fake_next(state, at(f, f->main, b, i, p0 + t)->token) : state;
            put_state(f->hidden + (int64_t)row * HIDDEN, state);
            if (n == n_logit || logit_row[n] != row) {
                continue;
            }
            for (int32_t v = 0; v < f->w->h.vocab; v++) {
                logits[(int64_t)n * f->w->h.vocab + v] =
                    token[row] == fake.nan_after ? NAN : fake_logit(state, v);
            }
            n++;
        }
    }
    return KVS_OK;
}

const float *fwd_hidden(const fwd *f)
{
    return f->hidden;
}

static void draft_logits(const fwd *f, uint64_t state, float *logits)
{
    const int32_t v = f->w->h.vocab;
    int32_t best = 0;
    for (int32_t i = 0; i < v; i++) {
        logits[i] = fake_logit(state, i);
        best = logits[i] > logits[best] ? i : best;
    }
    const uint64_t in[2] = {state, 77};
    if ((int32_t)(hash_xx64(in, sizeof in) % 100) >= fake.accuracy) {
        logits[(best + 1) % v] = (float)fake.spread + 1.0f;
    }
}

/* Before a pass with true rows from position p0: the slots before it hold what they must. */
static kvs_status check_draft(const fwd *f, const kvs_batch *b, int32_t i, int64_t p0,
                              kvs_error *err)
{
    uint64_t state = 0;
    for (int64_t p = 0; p < p0; p++) {
        const slot *d = at(f, f->draft, b, i, p);
        state = fake_next(state, at(f, f->main, b, i, p)->token);
        const int32_t next = at(f, f->main, b, i, p + 1)->token;
        if (!d->written || d->chained || d->state != state || d->token != next) {
            return err_set(err, KVS_INTERNAL,
                           "fake: draft slot %" PRId64 " before %" PRId64 ": %s, token %d, not %d",
                           p, p0, d->written ? d->chained ? "chained" : "true" : "empty", d->token,
                           next);
        }
    }
    return KVS_OK;
}

/* A pass over a row that no step has verified goes on from the slot before. */
static kvs_status check_chain(const fwd *f, const kvs_batch *b, int32_t i, int64_t p0,
                              uint64_t state, kvs_error *err)
{
    const slot *d = p0 > 0 ? at(f, f->draft, b, i, p0 - 1) : NULL;
    if (b->q_len[i] == 1 && d != NULL && d->written && fake_next(d->state, d->token) == state) {
        return KVS_OK;
    }
    return err_set(err, KVS_INTERNAL, "fake: the hidden rows from %" PRId64 " on are wrong", p0);
}

static kvs_status check_reuse(const fwd *f, const kvs_batch *b, kvs_error *err)
{
    if (!f->w->h.index_share_mtp || b->n_req > f->n_kept) {
        return err_set(err, KVS_INTERNAL, "fake: %d rows reuse %d kept selections", b->n_req,
                       f->n_kept);
    }
    for (int32_t i = 0; i < b->n_req; i++) {
        if (b->q_len[i] != 1 || b->table[i * b->table_stride] != f->kept[i]) {
            return err_set(err, KVS_INTERNAL, "fake: request %d is not the one kept", i);
        }
    }
    return KVS_OK;
}

kvs_status fwd_draft(fwd *f, int32_t mtp, const kvs_batch *b, const int32_t *n_prompt,
                     const int32_t *next_token, const float *hidden, int32_t reuse,
                     const int32_t *logit_row, int32_t n_logit, float *logits, float *g_out,
                     kvs_error *err)
{
    TRY(check_prompt(f, b, n_prompt, 1, err));
    TRY(check_call(f, b, next_token, logit_row, n_logit, reuse, err));
    if (comm_rank(f->world) == 0) {
        fake_n_draft++;
    }
    if (mtp != 0 || f->w->h.n_mtp == 0) {
        return err_set(err, KVS_INTERNAL, "fake: draft layer %d", mtp);
    }
    if (reuse != 0) {
        TRY(check_reuse(f, b, err));
    }
    f->n_last = reuse == 0 ? b->n_req : f->n_last;
    int32_t row = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < b->n_req; i++) {
        const int64_t p0 = b->seq_len[i] - b->q_len[i];
        say(f, "%s %" PRId64 "+%d;", reuse != 0 ? "R" : "D", p0, b->q_len[i]);
        uint64_t truth = 0;
        const uint64_t first = get_state(hidden + (int64_t)row * HIDDEN);
        const bool chained = read_main(f, b, i, p0, &truth, NULL) < 0 || first != truth;
        if (!chained) {
            TRY(check_draft(f, b, i, p0, err));
        } else {
            TRY(check_chain(f, b, i, p0, first, err));
        }
        for (int32_t t = 0; t < b->q_len[i]; t++, row++) {
            const uint64_t h = get_state(hidden + (int64_t)row * HIDDEN);
            if (!chained) {
                const slot *m = at(f, f->main, b, i, p0 + t);
                truth = t > 0 ? fake_next(truth, m->token) : truth;
                if (h != truth || !m->written) {
                    return err_set(err, KVS_INTERNAL, "fake: hidden row %d is of another position",
                                   t);
                }
            }
            *at(f, f->draft, b, i, p0 + t) =
                (slot){.written = true, .chained = chained, .token = next_token[row], .state = h};
            const uint64_t state = fake_next(h, next_token[row]);
            if (g_out != NULL) {
                put_state(g_out + (int64_t)row * HIDDEN, state);
            }
            if (n < n_logit && logit_row[n] == row) {
                draft_logits(f, state, logits + (int64_t)n++ * f->w->h.vocab);
            }
        }
        if (reuse == 0) {
            f->last_page[i] = b->table[i * b->table_stride];
            f->last_row[i] = row - 1;
        }
    }
    return KVS_OK;
}

kvs_status fwd_draft_keep(fwd *f, const int32_t *row, int32_t n, kvs_error *err)
{
    f->n_kept = n;
    for (int32_t i = 0; i < n; i++) {
        if (i >= f->n_last || row[i] != f->last_row[i]) {
            return err_set(err, KVS_INTERNAL, "fake: row %d of request %d is kept", row[i], i);
        }
        f->kept[i] = f->last_page[i];
    }
    return KVS_OK;
}

/* Layer 1 of 2 attends the row's own number and the one before. */
int32_t fwd_selection(const fwd *f, int32_t layer, int32_t row, int32_t *ids)
{
    if (f->c.trace == 0 || layer != 1 || row < 0 || row >= f->n_row) {
        return -1;
    }
    ids[0] = row;
    ids[1] = row + 1;
    return 2;
}

void fwd_get_info(const fwd *f, fwd_info *info)
{
    *info = (fwd_info){.cache_latent = f->c.n_page * 640,
                       .cache_index = f->c.n_page * 64,
                       .cache_draft = f->w->h.n_mtp > 0 ? f->c.n_page * 70 : 0,
                       .workspace = 1000,
                       .kernels = "fake=fake",
                       .transport = comm_transport(f->world),
                       .tp = comm_size(f->world),
                       .dcp = f->c.dcp,
                       .interleave = f->c.interleave,
                       .rank = comm_rank(f->world),
                       .kv = KVS_KV_BF16,
                       .index_kv = KVS_INDEX_FP8,
                       .exchange = KVS_EXCHANGE_A2A};
}

kvs_status fwd_bytes(const hp *h, const fwd_config *cfg, int32_t tp, fwd_memory *out, kvs_error *err)
{
    (void)h;
    (void)err;
    *out = (fwd_memory){
        .cache = cfg->n_page * 774, .workspace_most = 1000, .workspace_all = 1000 * (int64_t)tp};
    return KVS_OK;
}
