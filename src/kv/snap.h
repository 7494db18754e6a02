/* kv/snap.h - snapshots: a sequence's cache in a file that any DCP size can read.
 *
 * The bytes are docs/snapshot-format.md. A file is a 4096-byte header, the token ids, then one
 * section per layer: rows (or index keys) in position order in pages of 64 tokens, each page
 * followed by its XXH3-64. snap_head.c is the header alone, as pure functions of bytes, which are
 * untrusted until snap_head_parse has returned KVS_OK. snap.c moves the pages.
 *
 * A header that parses satisfies: (1) the formats go together; (2) the sections lie in the file,
 * touch each other without overlap or gap, and end where the file ends; (3) every number is in its
 * stated range, so that sizes made from them do not overflow.
 */
#ifndef KVS_KV_SNAP_H
#define KVS_KV_SNAP_H

#include <stdbool.h>

#include "comm/comm.h"
#include "kv/cache.h"
#include "num/kvfmt.h"

enum {
    SNAP_HEADER_BYTES = 4096,
    SNAP_VERSION = 1,
    SNAP_ENTRY_AT = 128,   /* byte of the first layer entry                  */
    SNAP_ENTRY_BYTES = 16,
    SNAP_MAX_ENTRY = 247,  /* layers with rows + layers with keys            */
    SNAP_HASH_AT = 4088,
    SNAP_PAGE_HASH_BYTES = 8
};

typedef struct snap_layer {
    int64_t at;       /* byte of its section                                                     */
    float k_scale;    /* of rows in fp8, else 1                                                  */
    int32_t of_layer; /* of index keys: the layer of rows they belong to, -1 not recorded        */
} snap_layer;

typedef struct snap_head {
    kv_layout layout;
    int32_t n_layer, n_index_layer;
    int32_t dcp, interleave; /* the writer's                                                     */
    int64_t n_token;
    int64_t token_at; /* byte of the token ids; 0: none recorded                                 */
    int64_t file_bytes;
    uint64_t model_hash[2];
    uint64_t token_hash[2];
    snap_layer layer[SNAP_MAX_ENTRY]; /* [n_layer] of rows, then [n_index_layer] of index keys   */
} snap_head;

/* Pages of every section, and the bytes of one page of section i without its hash. */
int64_t snap_n_page(const snap_head *h);
int64_t snap_page_bytes(const snap_head *h, int32_t i);

/* Fills the offsets and file_bytes of a header whose other fields are set. */
void snap_head_place(snap_head *h, bool with_tokens);
void snap_head_encode(const snap_head *h, uint8_t out[SNAP_HEADER_BYTES]);
/* file_bytes: the real size of the file. KVS_FORMAT, KVS_UNSUPPORTED for another version; err's
 * position is the byte that was refused. */
kvs_status snap_head_parse(snap_head *h, const uint8_t in[SNAP_HEADER_BYTES], int64_t file_bytes,
                           kvs_error *err);

/* As kvs_snapshot_* in kvspan/dcp.h. Of snap_write, every argument but `comm` may be wrong, on any
 * rank: the ranks agree on one outcome, and return the same status. */
kvs_status snap_write(const char *path, comm *cm, const kvs_cache *c, const int32_t *table,
                      int64_t width, int64_t n_token, const int32_t *tokens,
                      const uint64_t *model_hash, kvs_error *err);
kvs_status snap_stat(const char *path, kvs_snapshot_info *info, kvs_error *err);
kvs_status snap_read(const char *path, kvs_cache *c, const int32_t *table, int64_t width,
                     const uint64_t *model_hash, int32_t *tokens, int64_t cap, kvs_error *err);

#endif
