/* shards.h: caches whose content is a function of (kind, layer, position), made and compared
 * without the code under test: tokens are dealt to ranks one by one, and bytes are placed by the
 * offsets of the number contract. */
#ifndef TESTS_SHARDS_H
#define TESTS_SHARDS_H

#include <stddef.h>
#include <stdint.h>
#include "kv/cache.h"

typedef struct shape {
    kvs_kv_format kv;
    kvs_index_format index;
    int32_t n_layer, n_index;
    int32_t hadamard;
} shape;

/* Bytes of a row, of a key, and of a page of keys, by the contract. */
int64_t shape_row(const shape *s);
int64_t shape_key(const shape *s);
int64_t shape_index_page(const shape *s);

/* A cache of rank `rank` of n, every byte of it 0xFF (NaN in every format). */
kvs_cache *shard_new(const shape *s, int32_t n, int32_t interleave, int32_t rank, int64_t n_page);

/* Writes what rank `rank` holds of a sequence of n_token through table. */
void shard_fill(kvs_cache *c, const shape *s, const int32_t *table, int64_t n_token);

/* The first byte where two caches of one shape differ, or -1. */
int64_t shard_differs(const kvs_cache *a, const kvs_cache *b);

/* The bytes of one token: a row, or (index) a key followed by its scale. Returns how many. */
int64_t token_item(const shape *s, int index, int32_t layer, int64_t pos, uint8_t *out);

/* Page p of a section as the format document lays it out, zero behind the last token; returns its
 * bytes. */
int64_t token_page(const shape *s, int index, int32_t layer, int64_t p, int64_t n_token,
                   uint8_t *out);

/* A block table: entry b is page order[b]; the same "shuffled" order for every width. */
void table_shuffled(int32_t *table, int64_t width, int64_t n_page, uint64_t seed);

/* A folder for a test's files, in memory where there is such a place; removed with its files. */
const char *test_dir(void);
void test_dir_remove(void);
int test_dir_files(void);
/* "<dir>/name", in one of a few static buffers. */
const char *test_path(const char *name);

uint8_t *file_bytes(const char *path, int64_t *n);
void file_put(const char *path, const uint8_t *data, int64_t n);

#endif
