/* snap.c - moves a sequence's rows between the shards of a DCP group and a snapshot file.
 *
 * Writing is collective. First the ranks agree that every one's arguments are sound and that those
 * which must be equal are. Then, by chunks of the same positions on every rank, the rows that each
 * rank owns travel to rank 0, which puts them in position order, hashes the pages and writes them.
 * Every chunk carries a status word; once rank 0's says that writing failed, all ranks leave after
 * that chunk. At the end they agree on how rank 0 fared. Staging is a few MB, whatever the length.
 *
 * Reading is local: a rank reads every page, checks its hash and keeps the rows it owns.
 *
 * Cache memory is copied as bytes, never converted. A row is one item: all bytes of a latent row,
 * or an index key with its scale, which lie apart in a page and must move together.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"
#include "kv/snap.h"
#include "kv/table.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files hold the host's bytes");

enum {
    CHUNK_PAGES = 4, /* pages of each rank that travel together                            */
    READ_PAGES = 16, /* pages of the file that are read together                           */
    STATUS_BYTES = 8 /* in front of the rows of a chunk                                    */
};

/* What may wait for the disk at once: the ranks' time-out must cover the last sync. */
static const int64_t SYNC_BYTES = INT64_C(64) << 20;

/* ---- items ---------------------------------------------------------------------------------- */

/* A layer's items: i counts layers of rows, then layers of index keys. */
typedef struct item_kind {
    bool index;
    int32_t i;         /* layer among its kind                                             */
    int64_t bytes;     /* of an item: row, or key and scale                                */
    int64_t key_bytes; /* index: the key alone                                             */
} item_kind;

static item_kind kind_of(const kvs_cache *c, int32_t i)
{
    if (i < c->n_layer) {
        return (item_kind){.index = false, .i = i, .bytes = cache_row_bytes(c)};
    }
    const int64_t key = index_key_bytes(c->index_fmt);
    const int64_t scale = c->index_fmt == KVS_INDEX_FP8 ? (int64_t)sizeof(float) : 0;
    return (item_kind){.index = true, .i = i - c->n_layer, .bytes = key + scale, .key_bytes = key};
}

/* Item `off` of an index page, or of a dense page of rows. */
static void item_get(item_kind k, const uint8_t *page, int32_t off, uint8_t *item)
{
    if (!k.index) {
        memcpy(item, page + off * k.bytes, (size_t)k.bytes);
        return;
    }
    memcpy(item, page + off * k.key_bytes, (size_t)k.key_bytes);
    memcpy(item + k.key_bytes, page + index_scale_at(off), (size_t)(k.bytes - k.key_bytes));
}

static void item_put(item_kind k, uint8_t *page, int32_t off, const uint8_t *item)
{
    if (!k.index) {
        memcpy(page + off * k.bytes, item, (size_t)k.bytes);
        return;
    }
    memcpy(page + off * k.key_bytes, item, (size_t)k.key_bytes);
    memcpy(page + index_scale_at(off), item + k.key_bytes, (size_t)(k.bytes - k.key_bytes));
}

static void cache_get(const kvs_cache *c, item_kind k, int64_t slot, uint8_t *item)
{
    if (k.index) {
        item_get(k, cache_index_page(c, k.i, slot / KVS_PAGE_TOKENS),
                 (int32_t)(slot % KVS_PAGE_TOKENS), item);
        return;
    }
    memcpy(item, cache_row(c, k.i, slot), (size_t)k.bytes);
}

static void cache_put(const kvs_cache *c, item_kind k, int64_t slot, const uint8_t *item)
{
    if (k.index) {
        item_put(k, cache_index_page(c, k.i, slot / KVS_PAGE_TOKENS),
                 (int32_t)(slot % KVS_PAGE_TOKENS), item);
        return;
    }
    memcpy(cache_row(c, k.i, slot), item, (size_t)k.bytes);
}

/* ---- writing: the agreement ----------------------------------------------------------------- */

typedef struct write_args {
    const char *path;
    const kvs_cache *c;
    const int32_t *table;
    int64_t width;
    int64_t n_token;
    const int32_t *tokens;
    const uint64_t *model_hash;
} write_args;

static kvs_status check_tokens(const int32_t *tokens, int64_t first, int64_t n, kvs_status code,
                               kvs_error *err)
{
    for (int64_t t = 0; t < n; t++) {
        if (tokens[t] < 0) {
            return err_set(err, code, "token id %d at position %" PRId64 ": ids are 0 or more",
                           (int)tokens[t], first + t);
        }
    }
    return KVS_OK;
}

static kvs_status check_write(const write_args *a, const comm *cm, kvs_error *err)
{
    const kvs_cache *c = a->c;
    if (a->path == NULL || c == NULL) {
        return err_set(err, KVS_INVALID, "%s is NULL", a->path == NULL ? "path" : "cache");
    }
    if (comm_size(cm) != c->geom.n || comm_rank(cm) != c->geom.rank) {
        return err_set(err, KVS_INVALID,
                       "rank %d of %d ranks, the cache is rank %d of dcp %d: give the comm of its "
                       "DCP group",
                       (int)comm_rank(cm), (int)comm_size(cm), (int)c->geom.rank, (int)c->geom.n);
    }
    if (c->n_layer + c->n_index_layer > SNAP_MAX_ENTRY) {
        return err_set(err, KVS_LIMIT,
                       "%d layers of rows and %d of index keys: a snapshot holds %d in all",
                       (int)c->n_layer, (int)c->n_index_layer, SNAP_MAX_ENTRY);
    }
    if (a->n_token > INT32_MAX) {
        return err_set(err, KVS_INVALID, "n_token %" PRId64 ": a sequence has at most 2^31 - 1",
                       a->n_token);
    }
    TRY(table_check(c->geom, a->table, a->width, a->n_token, c->n_page, "snapshot", err));
    return a->tokens == NULL ? KVS_OK : check_tokens(a->tokens, 0, a->n_token, KVS_INVALID, err);
}

static uint64_t hash_k_scale(const kvs_cache *c)
{
    hash_state h;
    hash_init64(&h);
    for (int32_t i = 0; i < c->n_layer; i++) {
        hash_add64(&h, &c->layer[i].k_scale, sizeof c->layer[i].k_scale);
    }
    return hash_get64(&h);
}

/* Refuses on every rank when an argument that must be the same on all of them is not. Long ones are
 * compared by their hash. */
static kvs_status compare_args(const write_args *a, comm *cm, kvs_error *err)
{
    enum { N = 9 };
    const kvs_cache *c = a->c;
    const int64_t entries = shard_table_width(c->geom, a->n_token);
    const uint64_t value[N] = {
        c->tag,
        (uint64_t)c->n_layer,
        (uint64_t)c->n_index_layer,
        (uint64_t)c->geom.i,
        hash_k_scale(c),
        (uint64_t)a->n_token,
        hash_xx64(a->table, (size_t)entries * sizeof *a->table),
        a->tokens == NULL ? 0 : hash_xx64(a->tokens, (size_t)a->n_token * sizeof *a->tokens),
        a->model_hash == NULL ? 0 : hash_xx64(a->model_hash, 2 * sizeof *a->model_hash),
    };
    static const char *const name[N] = {
        "snapshot cache tag",   "snapshot layers",    "snapshot index layers",
        "snapshot interleave",  "snapshot k_scale",   "snapshot n_token",
        "snapshot block table", "snapshot token ids", "snapshot model hash",
    };
    char text[N][24];
    comm_field field[N];
    for (int32_t i = 0; i < N; i++) {
        const bool number = i == 1 || i == 2 || i == 3 || i == 5;
        snprintf(text[i], sizeof text[i], number ? "%" PRIu64 : "0x%" PRIx64, value[i]);
        field[i] = (comm_field){.name = name[i], .value = text[i]};
    }
    return comm_handshake(cm, field, N, err);
}

/* ---- writing: the chunks -------------------------------------------------------------------- */

typedef struct writer {
    const write_args *a;
    comm *cm;
    snap_head head;
    int64_t rows;      /* of each rank in a chunk                                          */
    int64_t msg_bytes; /* of each rank's part of the largest chunk                         */
    uint8_t *send;     /* [msg_bytes]                                                      */
    uint8_t *recv;     /* [n, msg_bytes]                                                   */
    uint8_t *pages;    /* rank 0: the pages of a chunk, each with its hash                 */
    file_replace out;  /* rank 0                                                           */
    bool begun;
    int64_t unsynced;  /* bytes written since the last sync                                */
    kvs_status status; /* rank 0: how the file fares; own.text says why                    */
    kvs_error own;
} writer;

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static void fill_head(writer *w)
{
    const write_args *a = w->a;
    const kvs_cache *c = a->c;
    snap_head *h = &w->head;
    h->layout = (kv_layout){.kv = (kvs_kv_format)c->fmt,
                            .index = (kvs_index_format)c->index_fmt,
                            .hadamard = c->hadamard};
    h->n_layer = c->n_layer;
    h->n_index_layer = c->n_index_layer;
    h->dcp = c->geom.n;
    h->interleave = c->geom.i;
    h->n_token = a->n_token;
    for (int32_t i = 0; i < c->n_layer; i++) {
        h->layer[i].k_scale = c->layer[i].k_scale;
    }
    for (int32_t i = 0; i < c->n_index_layer; i++) {
        h->layer[c->n_layer + i].of_layer = c->index_layer[i].of_layer;
    }
    if (a->model_hash != NULL) {
        memcpy(h->model_hash, a->model_hash, sizeof h->model_hash);
    }
    if (a->tokens != NULL) {
        const hash128 t = hash_xx128(a->tokens, (size_t)a->n_token * sizeof *a->tokens);
        h->token_hash[0] = t.lo;
        h->token_hash[1] = t.hi;
    }
    snap_head_place(h, a->tokens != NULL);
}

static kvs_status writer_init(writer *w, kvs_error *err)
{
    const kvs_cache *c = w->a->c;
    const int64_t item = max64(cache_row_bytes(c), kind_of(c, c->n_layer).bytes);
    const int64_t page = max64(kv_page_bytes(c->fmt), cache_index_page_bytes(c));
    const int64_t most = (int64_t)CHUNK_PAGES * KVS_PAGE_TOKENS;
    const int64_t held = shard_len_max(c->geom, w->a->n_token);
    fill_head(w);
    w->rows = held < most ? held : most;
    w->msg_bytes = STATUS_BYTES + w->rows * item;
    w->send = mem_alloc((size_t)w->msg_bytes, 0);
    w->recv = mem_alloc((size_t)(w->msg_bytes * c->geom.n), 0);
    bool whole = w->send != NULL && w->recv != NULL;
    if (c->geom.rank == 0) {
        const int64_t n_page = CHUNK_PAGES * c->geom.n;
        const int64_t n = n_page < snap_n_page(&w->head) ? n_page : snap_n_page(&w->head);
        w->pages = mem_alloc((size_t)(n * (page + SNAP_PAGE_HASH_BYTES)), 0);
        whole = whole && w->pages != NULL;
    }
    return whole ? KVS_OK
                 : err_set(err, KVS_NOMEM, "no memory to stage a snapshot: %" PRId64 " bytes",
                           w->msg_bytes * (c->geom.n + 1));
}

static void writer_fini(writer *w)
{
    if (w->begun) {
        file_replace_abort(&w->out);
    }
    mem_free(w->send);
    mem_free(w->recv);
    mem_free(w->pages);
}

/* Rank 0: the file, its header and the token ids. */
static kvs_status begin_file(writer *w, kvs_error *err)
{
    uint8_t head[SNAP_HEADER_BYTES];
    TRY(file_replace_begin(&w->out, w->a->path, err));
    w->begun = true;
    snap_head_encode(&w->head, head);
    TRY(file_pwrite(&w->out.f, head, sizeof head, 0, err));
    if (w->a->tokens == NULL) {
        return KVS_OK;
    }
    return file_pwrite(&w->out.f, w->a->tokens, (size_t)w->a->n_token * sizeof *w->a->tokens,
                       w->head.token_at, err);
}

/* Rank 0: the pages of positions [p0, p1), whose items lie rank by rank in recv. */
static kvs_status put_pages(writer *w, int32_t section, item_kind k, int64_t p0, int64_t p1,
                            int64_t msg, kvs_error *err)
{
    const int64_t page_bytes = snap_page_bytes(&w->head, section);
    const int64_t step = page_bytes + SNAP_PAGE_HASH_BYTES;
    const int64_t n_page = shard_cdiv(p1 - p0, KVS_PAGE_TOKENS);
    shard_geom g = w->a->c->geom;
    if ((p1 - p0) % KVS_PAGE_TOKENS != 0) {
        memset(w->pages + (n_page - 1) * step, 0, (size_t)page_bytes);
    }
    for (int64_t p = p0; p < p1; p++) {
        const kvs_pos pos = {p};
        g.rank = shard_owner(g, pos);
        const int64_t item = shard_local(g, pos).v - shard_len(g, p0);
        item_put(k, w->pages + (p - p0) / KVS_PAGE_TOKENS * step,
                 (int32_t)((p - p0) % KVS_PAGE_TOKENS),
                 w->recv + g.rank * msg + STATUS_BYTES + item * k.bytes);
    }
    for (int64_t i = 0; i < n_page; i++) {
        const uint64_t hash = hash_xx64(w->pages + i * step, (size_t)page_bytes);
        memcpy(w->pages + i * step + page_bytes, &hash, sizeof hash);
    }
    TRY(file_pwrite(&w->out.f, w->pages, (size_t)(n_page * step),
                    w->head.layer[section].at + p0 / KVS_PAGE_TOKENS * step, err));
    w->unsynced += n_page * step;
    if (w->unsynced >= SYNC_BYTES) {
        w->unsynced = 0;
        if (fdatasync(w->out.f.fd) != 0) {
            return err_set(err, KVS_IO, "%s: cannot sync: %s", w->out.f.path,
                           strerrordesc_np(errno));
        }
    }
    return KVS_OK;
}

/* One chunk of one section. *stop: rank 0 cannot write; every rank learns it from the same word. */
static kvs_status move_chunk(writer *w, int32_t section, int64_t p0, int64_t p1, bool *stop,
                             kvs_error *err)
{
    const kvs_cache *c = w->a->c;
    const item_kind k = kind_of(c, section);
    const int64_t msg = STATUS_BYTES + w->rows * k.bytes;
    const int64_t l0 = shard_len(c->geom, p0);
    const int64_t l1 = shard_len(c->geom, p1);
    const int64_t status = w->status;
    memcpy(w->send, &status, sizeof status);
    for (int64_t l = l0; l < l1; l++) {
        const kvs_local at = {l};
        cache_get(c, k, shard_slot(w->a->table, at).v, w->send + STATUS_BYTES + (l - l0) * k.bytes);
    }
    /* Items that the last chunk lacks. */
    memset(w->send + STATUS_BYTES + (l1 - l0) * k.bytes, 0,
           (size_t)((w->rows - (l1 - l0)) * k.bytes));
    TRY(comm_all_gather(w->cm, w->send, w->recv, (size_t)msg, err));
    int64_t of_rank_0;
    memcpy(&of_rank_0, w->recv, sizeof of_rank_0);
    *stop = of_rank_0 != KVS_OK;
    if (c->geom.rank == 0 && !*stop) {
        w->status = put_pages(w, section, k, p0, p1, msg, &w->own);
    }
    return KVS_OK;
}

static kvs_status move_all(writer *w, kvs_error *err)
{
    const kvs_cache *c = w->a->c;
    const int64_t chunk = (int64_t)CHUNK_PAGES * shard_span(c->geom);
    bool stop = false;
    for (int32_t i = 0; i < c->n_layer + c->n_index_layer && !stop; i++) {
        for (int64_t p0 = 0; p0 < w->a->n_token && !stop; p0 += chunk) {
            const int64_t p1 = p0 + chunk < w->a->n_token ? p0 + chunk : w->a->n_token;
            TRY(move_chunk(w, i, p0, p1, &stop, err));
        }
    }
    return KVS_OK;
}

kvs_status snap_write(const char *path, comm *cm, const kvs_cache *c, const int32_t *table,
                      int64_t width, int64_t n_token, const int32_t *tokens,
                      const uint64_t *model_hash, kvs_error *err)
{
    const write_args a = {path, c, table, width, n_token, tokens, model_hash};
    writer w = {.a = &a, .cm = cm, .status = KVS_OK};
    kvs_status st = check_write(&a, cm, &w.own);
    if (st == KVS_OK) {
        st = writer_init(&w, &w.own);
    }
    TRY_GOTO(comm_agree(cm, st, &w.own), out);
    TRY_GOTO(compare_args(&a, cm, &w.own), out);
    const bool writes = c->geom.rank == 0;
    if (writes) {
        w.status = begin_file(&w, &w.own);
    }
    TRY_GOTO(move_all(&w, &w.own), out);
    if (writes && w.status == KVS_OK) {
        w.begun = false;
        w.status = file_replace_commit(&w.out, &w.own);
    }
    st = comm_agree(cm, w.status, &w.own);
out:
    if (st != KVS_OK && err != NULL) {
        *err = w.own;
    }
    writer_fini(&w);
    return st;
}

/* ---- reading -------------------------------------------------------------------------------- */

static kvs_status open_head(file *f, const char *path, snap_head *h, kvs_error *err)
{
    uint8_t head[SNAP_HEADER_BYTES];
    int64_t bytes = 0;
    kvs_status st = KVS_OK;
    TRY(file_open(f, path, err));
    TRY_GOTO(file_size(f, &bytes, err), fail);
    if (bytes < SNAP_HEADER_BYTES) {
        st = err_set(err, KVS_FORMAT, "%s: %" PRId64 " bytes are less than a snapshot's header, %d",
                     path, bytes, SNAP_HEADER_BYTES);
        err_at(err, bytes);
        goto fail;
    }
    TRY_GOTO(file_pread(f, head, sizeof head, 0, err), fail);
    st = snap_head_parse(h, head, bytes, err);
    if (st != KVS_OK) {
        err_prefix(err, "%s", path);
        goto fail;
    }
    return KVS_OK;
fail:
    file_close(f);
    return st;
}

kvs_status snap_stat(const char *path, kvs_snapshot_info *info, kvs_error *err)
{
    file f;
    snap_head h;
    TRY(open_head(&f, path, &h, err));
    file_close(&f);
    *info = (kvs_snapshot_info){
        .kv = h.layout.kv,
        .index_kv = h.layout.index,
        .hadamard = h.layout.hadamard,
        .n_layer = h.n_layer,
        .n_index_layer = h.n_index_layer,
        .writer_dcp = h.dcp,
        .writer_interleave = h.interleave,
        .n_token = h.n_token,
        .model_hash = {h.model_hash[0], h.model_hash[1]},
        .token_hash = {h.token_hash[0], h.token_hash[1]},
    };
    for (int32_t i = 0; i < h.n_layer; i++) {
        info->k_scale[i] = h.layer[i].k_scale;
    }
    return KVS_OK;
}

static kvs_status match_layers(const snap_head *h, const kvs_cache *c, kvs_error *err)
{
    const uint64_t tag = cache_tag(h->layout);
    TRY(cache_tag_check(tag,
                        (kv_layout){.kv = (kvs_kv_format)c->fmt,
                                    .index = (kvs_index_format)c->index_fmt,
                                    .hadamard = c->hadamard},
                        err));
    if (h->n_layer != c->n_layer || h->n_index_layer != c->n_index_layer) {
        return err_set(
            err, KVS_INVALID,
            "the snapshot has %d layers of rows and %d of index keys, the cache %d and %d",
            (int)h->n_layer, (int)h->n_index_layer, (int)c->n_layer, (int)c->n_index_layer);
    }
    for (int32_t i = 0; i < c->n_layer; i++) {
        if (f32_bits(h->layer[i].k_scale) != f32_bits(c->layer[i].k_scale)) {
            return err_set(
                err, KVS_INVALID,
                "layer %d: rows were written with k_scale %.9g, the cache has %.9g: open "
                "it with the writer's",
                (int)i, (double)h->layer[i].k_scale, (double)c->layer[i].k_scale);
        }
    }
    for (int32_t i = 0; i < c->n_index_layer; i++) {
        const int32_t theirs = h->layer[c->n_layer + i].of_layer;
        const int32_t ours = c->index_layer[i].of_layer;
        if (theirs >= 0 && ours >= 0 && theirs != ours) {
            return err_set(
                err, KVS_INVALID,
                "index keys %d belong to layer %d in the snapshot and to layer %d in the "
                "cache",
                (int)i, (int)theirs, (int)ours);
        }
    }
    return KVS_OK;
}

typedef struct reader {
    file f;
    snap_head head;
    kvs_cache *c;
    const int32_t *table;
    uint8_t *buf;
    int64_t buf_bytes;
} reader;

/* Reads the token ids in pieces, checks their hash, and keeps them where `tokens` is given. */
static kvs_status read_tokens(reader *r, int32_t *tokens, kvs_error *err)
{
    const snap_head *h = &r->head;
    const int64_t piece = r->buf_bytes / (int64_t)sizeof(int32_t);
    hash_state s;
    hash_init128(&s);
    for (int64_t t = 0; t < h->n_token; t += piece) {
        const int64_t n = t + piece < h->n_token ? piece : h->n_token - t;
        const size_t bytes = (size_t)n * sizeof(int32_t);
        TRY(file_pread(&r->f, r->buf, bytes, h->token_at + t * (int64_t)sizeof(int32_t), err));
        hash_add128(&s, r->buf, bytes);
        if (check_tokens((const int32_t *)(const void *)r->buf, t, n, KVS_FORMAT, err) != KVS_OK) {
            err_prefix(err, "%s", r->f.path);
            return KVS_FORMAT;
        }
        if (tokens != NULL) {
            memcpy(tokens + t, r->buf, bytes);
        }
    }
    const hash128 got = hash_get128(&s);
    if (got.lo != h->token_hash[0] || got.hi != h->token_hash[1]) {
        const kvs_status st =
            err_set(err, KVS_FORMAT,
                    "%s: the token ids do not have their hash: the file is damaged; write it again",
                    r->f.path);
        err_at(err, h->token_at);
        return st;
    }
    return KVS_OK;
}

/* Checks a page that lies at `page` and keeps this rank's items of it. */
static kvs_status take_page(reader *r, int32_t section, item_kind k, int64_t i_page,
                            const uint8_t *page, kvs_error *err)
{
    const snap_head *h = &r->head;
    const int64_t page_bytes = snap_page_bytes(h, section);
    const shard_geom g = r->c->geom;
    uint64_t want;
    memcpy(&want, page + page_bytes, sizeof want);
    if (hash_xx64(page, (size_t)page_bytes) != want) {
        const kvs_status st =
            err_set(err, KVS_FORMAT,
                    "%s: page %" PRId64
                    " of %s %d does not have its checksum: the file is damaged; write it again",
                    r->f.path, i_page, k.index ? "index keys" : "layer", (int)k.i);
        err_at(err, h->layer[section].at + i_page * (page_bytes + SNAP_PAGE_HASH_BYTES));
        return st;
    }
    const int64_t p0 = i_page * KVS_PAGE_TOKENS;
    const int64_t end = p0 + KVS_PAGE_TOKENS;
    const int64_t p1 = end < h->n_token ? end : h->n_token;
    uint8_t item[KV_ROW_BYTES_F32];
    for (int64_t l = shard_len(g, p0); l < shard_len(g, p1); l++) {
        const kvs_local at = {l};
        item_get(k, page, (int32_t)(shard_pos(g, at).v - p0), item);
        cache_put(r->c, k, shard_slot(r->table, at).v, item);
    }
    return KVS_OK;
}

static kvs_status read_section(reader *r, int32_t section, kvs_error *err)
{
    const item_kind k = kind_of(r->c, section);
    const int64_t step = snap_page_bytes(&r->head, section) + SNAP_PAGE_HASH_BYTES;
    const int64_t n_page = snap_n_page(&r->head);
    const int64_t batch = r->buf_bytes / step;
    for (int64_t i = 0; i < n_page; i += batch) {
        const int64_t n = i + batch < n_page ? batch : n_page - i;
        TRY(file_pread(&r->f, r->buf, (size_t)(n * step), r->head.layer[section].at + i * step,
                       err));
        for (int64_t j = 0; j < n; j++) {
            TRY(take_page(r, section, k, i + j, r->buf + j * step, err));
        }
    }
    return KVS_OK;
}

static kvs_status check_read(const reader *r, int64_t width, const uint64_t *model_hash,
                             const int32_t *tokens, int64_t cap, kvs_error *err)
{
    const snap_head *h = &r->head;
    TRY(match_layers(h, r->c, err));
    if (model_hash != NULL &&
        (model_hash[0] != h->model_hash[0] || model_hash[1] != h->model_hash[1])) {
        return err_set(err, KVS_INVALID,
                       "the snapshot is of model %016" PRIx64 "%016" PRIx64 ", not of %016" PRIx64
                       "%016" PRIx64,
                       h->model_hash[1], h->model_hash[0], model_hash[1], model_hash[0]);
    }
    if (tokens != NULL && h->token_at == 0) {
        return err_set(err, KVS_INVALID, "the snapshot holds no token ids: pass tokens = NULL");
    }
    if (tokens != NULL && cap < h->n_token) {
        return err_set(err, KVS_LIMIT, "%" PRId64 " token ids do not fit a buffer of %" PRId64,
                       h->n_token, cap);
    }
    return table_check(r->c->geom, r->table, width, h->n_token, r->c->n_page, "snapshot", err);
}

kvs_status snap_read(const char *path, kvs_cache *c, const int32_t *table, int64_t width,
                     const uint64_t *model_hash, int32_t *tokens, int64_t cap, kvs_error *err)
{
    reader r = {.c = c, .table = table};
    TRY(open_head(&r.f, path, &r.head, err));
    kvs_status st = check_read(&r, width, model_hash, tokens, cap, err);
    if (st != KVS_OK) {
        err_prefix(err, "%s", path);
    }
    const int64_t n_page = snap_n_page(&r.head);
    const int64_t page = max64(kv_page_bytes(c->fmt), cache_index_page_bytes(c));
    if (st == KVS_OK && n_page > 0) {
        r.buf_bytes = (n_page < READ_PAGES ? n_page : READ_PAGES) * (page + SNAP_PAGE_HASH_BYTES);
        r.buf = mem_alloc((size_t)r.buf_bytes, 0);
        if (r.buf == NULL) {
            st = err_set(err, KVS_NOMEM, "no memory for %" PRId64 " bytes of pages", r.buf_bytes);
        }
    }
    if (st == KVS_OK && r.head.token_at != 0) {
        st = read_tokens(&r, tokens, err);
    }
    for (int32_t i = 0; st == KVS_OK && i < c->n_layer + c->n_index_layer; i++) {
        st = read_section(&r, i, err);
    }
    mem_free(r.buf);
    file_close(&r.f);
    return st;
}
