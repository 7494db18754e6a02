/* text/bpe.c - merging the symbols of a pre-token. */
#include "text/bpe.h"

#include <assert.h>
#include <string.h>

#include "base/err.h"
#include "base/hash.h"
#include "base/mem.h"

static_assert(sizeof(bpe_word) == 64, "a remembered pre-token fills a cache line");

kvs_status bpe_run_init(bpe_run *r, const vocab *v, bool ignore_merges, size_t n_byte,
                        kvs_error *err)
{
    memset(r, 0, sizeof *r);
    size_t n_word = 16;
    while (n_word < BPE_WORDS_MAX && n_word < n_byte / 8) {
        n_word *= 2;
    }
    r->v = v;
    r->ignore_merges = ignore_merges;
    r->word = mem_calloc(n_word, sizeof *r->word);
    if (r->word == NULL) {
        return err_set(err, KVS_NOMEM, "tokenizer: no memory for %zu words", n_word);
    }
    r->word_mask = n_word - 1;
    return KVS_OK;
}

void bpe_run_fini(bpe_run *r)
{
    mem_free(r->word);
    mem_free(r->sym);
    mem_free(r->heap);
    memset(r, 0, sizeof *r);
}

/* One symbol per byte that has a piece. */
static size_t first_symbols(const vocab *v, const char *s, size_t n, int32_t *sym)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        const int32_t id = v->byte_id[(unsigned char)s[i]];
        if (id >= 0) {
            sym[k++] = id;
        }
    }
    return k;
}

void bpe_encode_short(const bpe_run *r, const char *s, size_t n, id_sink *out)
{
    int32_t sym[BPE_SHORT_MAX];
    int32_t to[BPE_SHORT_MAX];    /* what symbol i and the one after it become */
    uint32_t rank[BPE_SHORT_MAX]; /* of that merge */
    size_t k = first_symbols(r->v, s, n, sym);
    for (size_t i = 0; i + 1 < k; i++) {
        rank[i] = vocab_rank(r->v, sym[i], sym[i + 1], &to[i]);
    }
    for (;;) {
        uint32_t best = VOCAB_NO_RANK;
        size_t at = 0;
        for (size_t i = 0; i + 1 < k; i++) {
            if (rank[i] < best) {
                best = rank[i];
                at = i;
            }
        }
        if (best == VOCAB_NO_RANK) {
            break;
        }
        sym[at] = to[at];
        k--;
        for (size_t i = at + 1; i < k; i++) {
            sym[i] = sym[i + 1];
            rank[i] = rank[i + 1]; /* the last one is stale and out of use */
            to[i] = to[i + 1];
        }
        if (at + 1 < k) {
            rank[at] = vocab_rank(r->v, sym[at], sym[at + 1], &to[at]);
        }
        if (at > 0) {
            rank[at - 1] = vocab_rank(r->v, sym[at - 1], sym[at], &to[at - 1]);
        }
    }
    for (size_t i = 0; i < k; i++) {
        sink_add(out, sym[i]);
    }
}

/* A binary heap of numbers, the smallest on top. */
static void heap_up(uint64_t *h, size_t i)
{
    const uint64_t x = h[i];
    while (i > 0 && h[(i - 1) / 2] > x) {
        h[i] = h[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h[i] = x;
}

static void heap_down(uint64_t *h, size_t n, size_t i)
{
    const uint64_t x = h[i];
    for (size_t c = 2 * i + 1; c < n; c = 2 * i + 1) {
        c += c + 1 < n && h[c + 1] < h[c];
        if (h[c] >= x) {
            break;
        }
        h[i] = h[c];
        i = c;
    }
    h[i] = x;
}

static kvs_status reserve(bpe_run *r, size_t n, kvs_error *err)
{
    if (n <= r->cap) {
        return KVS_OK;
    }
    mem_free(r->sym);
    mem_free(r->heap);
    r->cap = 0;
    r->sym = mem_alloc_array(3 * n, sizeof *r->sym, 0);
    r->heap = mem_alloc_array(2 * n, sizeof *r->heap, 0);
    if (r->sym == NULL || r->heap == NULL) {
        return err_set(err, KVS_NOMEM, "tokenizer: no memory for a word of %zu bytes", n);
    }
    r->cap = n;
    return KVS_OK;
}

/* Puts the pair that begins at symbol i on the heap, if it merges. */
static size_t push_pair(const bpe_run *r, const int32_t *sym, int32_t i, int32_t j, size_t n_heap)
{
    int32_t to = 0;
    const uint32_t rank = vocab_rank(r->v, sym[i], sym[j], &to);
    if (rank == VOCAB_NO_RANK) {
        return n_heap;
    }
    r->heap[n_heap] = (uint64_t)rank << 32 | (uint32_t)i;
    heap_up(r->heap, n_heap);
    return n_heap + 1;
}

/* The heap holds at most one entry per pair at first and grows by at most one per merge, so 2n
 * suffices. An entry whose pair has changed since is stale: its rank is not the pair's. */
kvs_status bpe_encode_long(bpe_run *r, const char *s, size_t n, id_sink *out, kvs_error *err)
{
    TRY(reserve(r, n, err));
    int32_t *sym = r->sym;
    int32_t *next = sym + n; /* -1: none */
    int32_t *prev = next + n;
    const int32_t k = (int32_t)first_symbols(r->v, s, n, sym);
    size_t n_heap = 0;
    for (int32_t i = 0; i < k; i++) {
        next[i] = i + 1 < k ? i + 1 : -1;
        prev[i] = i - 1;
    }
    for (int32_t i = 0; i + 1 < k; i++) {
        n_heap = push_pair(r, sym, i, i + 1, n_heap);
    }
    while (n_heap > 0) {
        const int32_t i = (int32_t)(uint32_t)r->heap[0];
        const uint32_t rank = (uint32_t)(r->heap[0] >> 32);
        r->heap[0] = r->heap[--n_heap];
        if (n_heap > 1) {
            heap_down(r->heap, n_heap, 0);
        }
        int32_t to = 0;
        const int32_t j = sym[i] >= 0 ? next[i] : -1;
        if (j < 0 || vocab_rank(r->v, sym[i], sym[j], &to) != rank) {
            continue;
        }
        sym[i] = to;
        sym[j] = -1;
        next[i] = next[j];
        if (next[i] >= 0) {
            prev[next[i]] = i;
            n_heap = push_pair(r, sym, i, next[i], n_heap);
        }
        if (prev[i] >= 0) {
            n_heap = push_pair(r, sym, prev[i], i, n_heap);
        }
    }
    for (int32_t i = k > 0 ? 0 : -1; i >= 0; i = next[i]) {
        sink_add(out, sym[i]);
    }
    return KVS_OK;
}

static void add_all(id_sink *out, const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        sink_add(out, ids[i]);
    }
}

/* A short pre-token by way of the table. */
static void encode_word(bpe_run *r, const char *s, size_t n, uint64_t hash, id_sink *out)
{
    /* The table of the vocabulary uses the low bits of the hash. */
    bpe_word *w = &r->word[(size_t)(hash >> 40) & r->word_mask];
    if (w->hash != hash || w->n_byte != n || memcmp(w->bytes, s, n) != 0) {
        int32_t ids[BPE_WORD_BYTES];
        id_sink own = {ids, BPE_WORD_BYTES, 0};
        bpe_encode_short(r, s, n, &own);
        if (own.n > BPE_WORD_IDS) {
            add_all(out, ids, own.n);
            return;
        }
        w->hash = hash;
        w->n_byte = (uint8_t)n;
        w->n_id = (uint8_t)own.n;
        memcpy(w->bytes, s, n);
        memcpy(w->ids, ids, own.n * sizeof *ids);
    }
    add_all(out, w->ids, w->n_id);
}

kvs_status bpe_encode(bpe_run *r, const char *s, size_t n, id_sink *out, kvs_error *err)
{
    if (n == 0) {
        return KVS_OK;
    }
    if (n == 1) {
        const int32_t id = r->v->byte_id[(unsigned char)s[0]];
        if (id >= 0) {
            sink_add(out, id);
        }
        return KVS_OK;
    }
    const uint64_t hash = n <= r->v->max_len || n <= BPE_WORD_BYTES ? hash_xx64(s, n) : 0;
    if (r->ignore_merges && n <= r->v->max_len) {
        const int32_t id = vocab_find_hashed(r->v, s, n, hash);
        if (id >= 0) {
            sink_add(out, id);
            return KVS_OK;
        }
    }
    if (n <= BPE_WORD_BYTES) {
        encode_word(r, s, n, hash, out);
    } else if (n <= BPE_SHORT_MAX) {
        bpe_encode_short(r, s, n, out);
    } else {
        return bpe_encode_long(r, s, n, out, err);
    }
    return KVS_OK;
}
