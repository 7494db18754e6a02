/* fuzz_snapshot.c - a file of any bytes is refused with a message or read; nothing else happens.
 *
 * Each input is tried as it is, and once more with the checksums that its bytes should have, so that
 * what lies behind them is reached. A header that parses must keep its promises: counts in range and
 * sections inside the file. What it describes is then read into a cache of its own formats, at a DCP
 * size and rank taken from the input. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/hash.h"
#include "kv/snap.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_PAGE = 40 };

static int fd = -1;
static char path[40];

static void store(const uint8_t *data, size_t size)
{
    if (fd < 0) {
        fd = memfd_create("snapshot", 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) {
        abort();
    }
}

static void check_head(const snap_head *h, int64_t size)
{
    const int32_t n = h->n_layer + h->n_index_layer;
    if (h->n_layer < 1 || n > SNAP_MAX_ENTRY || h->n_token < 0 || h->n_token > INT32_MAX) {
        abort();
    }
    int64_t total = SNAP_HEADER_BYTES + (h->token_at != 0 ? 4 * h->n_token : 0);
    for (int32_t i = 0; i < n; i++) {
        const int64_t bytes = snap_n_page(h) * (snap_page_bytes(h, i) + SNAP_PAGE_HASH_BYTES);
        if (h->layer[i].at < SNAP_HEADER_BYTES || h->layer[i].at + bytes > size) {
            abort();
        }
        total += bytes;
    }
    if (total != size) {
        abort();
    }
}

/* A refusal says why; success leaves the ids that the file holds. */
static void read_into_cache(const snap_head *h, const uint8_t *data)
{
    static const int32_t sizes[4] = {1, 2, 4, 8};
    const int32_t dcp = sizes[data[64] & 3];
    const int32_t rank = (data[64] >> 2) % dcp;
    float scale[SNAP_MAX_ENTRY];
    for (int32_t i = 0; i < h->n_layer; i++) {
        scale[i] = h->layer[i].k_scale;
    }
    kvs_cache_config cfg = kvs_cache_config_default();
    cfg.kv = h->layout.kv;
    cfg.index_kv = h->layout.index;
    cfg.hadamard = h->layout.hadamard;
    cfg.n_layer = h->n_layer;
    cfg.n_index_layer = h->n_index_layer;
    cfg.dcp = dcp;
    cfg.rank = rank;
    cfg.interleave = 1 << (data[65] % 7);
    cfg.n_page = MAX_PAGE;
    cfg.k_scale = h->layout.kv == KVS_KV_FP8 ? scale : NULL;
    kvs_cache *c = NULL;
    kvs_error err = {0};
    if (cache_create(&c, &cfg, &err) != KVS_OK) {
        fprintf(stderr, "a header that parses must suit a cache: %s\n", err.text);
        abort();
    }
    int32_t table[MAX_PAGE];
    for (int32_t b = 0; b < MAX_PAGE; b++) {
        table[b] = MAX_PAGE - 1 - b;
    }
    const bool ids = h->token_at != 0;
    int32_t *tokens = malloc((size_t)h->n_token * sizeof *tokens + 1);
    const kvs_status st =
        snap_read(path, c, table, MAX_PAGE, h->model_hash, ids ? tokens : NULL, h->n_token, &err);
    if ((st != KVS_OK && err.text[0] == '\0') ||
        (st == KVS_OK && ids &&
         memcmp(tokens, data + h->token_at, (size_t)h->n_token * sizeof *tokens) != 0)) {
        abort();
    }
    free(tokens);
    cache_free(c);
}

static void try_file(const uint8_t *data, size_t size)
{
    kvs_snapshot_info info;
    snap_head h;
    kvs_error err = {0};
    store(data, size);
    const kvs_status st = snap_stat(path, &info, &err);
    if (st != KVS_OK) {
        if (err.text[0] == '\0' || (st != KVS_FORMAT && st != KVS_UNSUPPORTED)) {
            abort();
        }
        return;
    }
    if (snap_head_parse(&h, data, (int64_t)size, &err) != KVS_OK || info.n_token != h.n_token) {
        abort();
    }
    check_head(&h, (int64_t)size);
    if (h.n_token <= 64 * MAX_PAGE) {
        read_into_cache(&h, data);
    }
}

/* Gives header, ids and pages the checksums that belong to their bytes. */
static void repair(uint8_t *data, size_t size)
{
    snap_head h;
    uint64_t hash = hash_xx64(data, SNAP_HASH_AT);
    memcpy(data + SNAP_HASH_AT, &hash, sizeof hash);
    if (snap_head_parse(&h, data, (int64_t)size, NULL) != KVS_OK) {
        return;
    }
    for (int32_t i = 0; i < h.n_layer + h.n_index_layer; i++) {
        const size_t bytes = (size_t)snap_page_bytes(&h, i);
        uint8_t *page = data + h.layer[i].at;
        for (int64_t p = 0; p < snap_n_page(&h); p++, page += bytes + SNAP_PAGE_HASH_BYTES) {
            hash = hash_xx64(page, bytes);
            memcpy(page + bytes, &hash, sizeof hash);
        }
    }
    if (h.token_at != 0) {
        const hash128 t = hash_xx128(data + h.token_at, 4 * (size_t)h.n_token);
        memcpy(data + 80, &t.lo, sizeof t.lo);
        memcpy(data + 88, &t.hi, sizeof t.hi);
        hash = hash_xx64(data, SNAP_HASH_AT);
        memcpy(data + SNAP_HASH_AT, &hash, sizeof hash);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    try_file(data, size);
    if (size >= SNAP_HEADER_BYTES) {
        uint8_t *copy = malloc(size);
        memcpy(copy, data, size);
        repair(copy, size);
        try_file(copy, size);
        free(copy);
    }
    return 0;
}
