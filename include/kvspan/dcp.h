/* kvspan/dcp.h - MLA and DeepSeek sparse attention over a KV cache sharded by token position.
 *
 * For engine authors: caches, plan, write, select, attend, merge. Applications use engine.h.
 *
 * The picture. A TP group of `tp` ranks holds the attention heads; consecutive runs of `dcp` ranks form a
 * DCP group. The ranks of a DCP group share one KV cache, cut by token position: rank r of N stores the
 * positions p with (p / interleave) mod N == r. Every rank runs the same calls:
 *
 *     kvs_dcp_open                        once, collective: checks the set-up, compares it between ranks
 *     kvs_cache_create / kvs_cache_map    this rank's shard of all layers
 *     per step:
 *       kvs_dcp_plan                      host integers: lengths, slots, bounds (all checked)
 *       per layer:
 *         kvs_dcp_write                   cache rows of the step's tokens that this rank owns
 *         kvs_dcp_write_index             their index keys (layers that have an indexer)
 *         kvs_dcp_select                  collective: the global top-k, kept in the handle as local slots
 *         kvs_dcp_attend                  collective: q exchange, local attention, partial exchange, merge
 *       kvs_dcp_finish                    the step's counters and deferred errors
 *
 * Numbers. docs/numbers.md is the contract. In short: queries are bf16 (f32 with f32 rows), scores and
 * outputs accumulate in f32, LSE is the natural log, the identity of a merge is (0, -inf), selection is by
 * larger score then lower position. With exchange a2a and the same tp, interleave, formats and kernel
 * variants, outputs, LSE and selected sets are the same bits for dcp 1, 2, 4 and 8, for any batch
 * composition and any number of threads.
 *
 * Collective calls. "Collective" means: every rank of the DCP group calls it, in the same order, with the
 * same plan. A rank that cannot go on ends the group (kvspan/comm.h): nothing hangs.
 *
 * Memory. Nothing is allocated between kvs_dcp_open and kvs_dcp_close except what kvs_dcp_open made room
 * for; workspaces depend on max_rows, heads and topk, never on the length of the context.
 *
 * Threads: a kvs_dcp, its comm and the caches it is used with belong to one rank and are used by one thread
 * at a time unless a function says otherwise.
 */
#ifndef KVSPAN_DCP_H
#define KVSPAN_DCP_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/comm.h"
#include "kvspan/config.h"
#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct kvs_dcp kvs_dcp;
typedef struct kvs_cache kvs_cache;
typedef struct kvs_pages kvs_pages;

/* ------------------------------------------------------------------------------------------------------
 * Caches: one rank's shard of the latent rows and index keys of every layer.
 */

typedef struct kvs_cache_config {
    size_t struct_size;
    kvs_kv_format kv;          /* default fp8_ds_mla where n_index_layer > 0, else bf16               */
    kvs_index_format index_kv; /* default f32 with f32 rows, else fp8                                 */
    kvs_scale_rule scale_rule; /* default pow2; exact: fp8_ds_mla only                                */
    int32_t hadamard;          /* 1: index keys are stored Hadamard-rotated (a bit in the format tag) */
    int32_t n_layer;           /* layers with latent rows, 1..1024                                    */
    int32_t n_index_layer;     /* layers with index keys, 0..n_layer                                  */
    int32_t dcp, interleave, rank; /* rank in the DCP group; dcp default 1, interleave default 1      */
    int64_t n_page;            /* pages of 64 tokens in this rank's pool, 1 .. 2^31 / 64 - 1          */
    const float *k_scale;      /* [n_layer] for kv = fp8, NULL: 1.0; NaN, inf, 0 and negative are refused;
                                  ignored for other formats (info.k_scale_ignored says so)            */
    int32_t kernel_level;      /* 1: allow dcp 3, 5, 6, 7 (equal to tolerance, not to the bit)        */
} kvs_cache_config;

static inline kvs_cache_config kvs_cache_config_default(void)
{
    kvs_cache_config c;
    c.struct_size = sizeof(c);
    c.kv = KVS_KV_AUTO;
    c.index_kv = KVS_INDEX_AUTO;
    c.scale_rule = KVS_SCALE_AUTO;
    c.hadamard = 0;
    c.n_layer = 1;
    c.n_index_layer = 0;
    c.dcp = 0;
    c.interleave = 0;
    c.rank = 0;
    c.n_page = 0;
    c.k_scale = NULL;
    c.kernel_level = 0;
    return c;
}

/* Where a caller's own memory holds one layer. Slot s (page s / 64, offset s % 64):
 * latent row at kv + page * page_stride + offset * row_stride; index page at index + page * index_stride.
 * Strides may be much larger than what they step over, as where the layers share a pool. */
typedef struct kvs_cache_layer {
    void *kv;
    int64_t page_stride, row_stride; /* bytes; row_stride >= the format's row, page_stride >= 63 *
                                        row_stride + row                                              */
    void *index;                     /* NULL for layers without index keys                            */
    int64_t index_stride;            /* bytes, >= the format's page                                   */
} kvs_cache_layer;

/* Allocates a cache in its own zeroed mapping. On failure *out is NULL. Threads: any. */
kvs_status kvs_cache_create(kvs_cache **out, const kvs_cache_config *cfg, kvs_error *err);

/* A cache over the caller's memory, kept by the caller until kvs_cache_free. layers: [n_layer], read until the
 * call returns; the first n_index_layer layers that have `index` set are index layers 0, 1, ...; their number
 * must be n_index_layer. Rows of f32 and bf16 must be 4- and 2-byte aligned, index pages 4-byte, strides
 * included. `tag` must be the tag of the cache's formats as kvs_cache_tag reports it (what the writer of that
 * memory recorded), or 0 for fresh memory; a different layout is refused with both named. Threads: any. */
kvs_status kvs_cache_map(kvs_cache **out, const kvs_cache_config *cfg, const kvs_cache_layer *layers,
                         uint64_t tag, kvs_error *err);

void kvs_cache_free(kvs_cache *c);

/* Row format, index format, page size and Hadamard bit in one number: equal iff layouts are equal. */
uint64_t kvs_cache_tag(const kvs_cache *c);

/* What is stored and what was met while writing. bytes_* are this rank's. */
typedef struct kvs_cache_info {
    int64_t bytes_latent, bytes_index;
    int64_t row_bytes, index_page_bytes;
    uint64_t n_row_written, n_index_written;
    uint64_t n_nan;       /* NaN values written */
    uint64_t n_saturated; /* values that met the e4m3 limit */
    uint64_t n_bad_slot;  /* slots outside the pool, never written to */
    int32_t k_scale_ignored; /* 1: k_scale was given for a format without one */
} kvs_cache_info;
void kvs_cache_get_info(const kvs_cache *c, kvs_cache_info *info);

/* ------------------------------------------------------------------------------------------------------
 * Pages and block tables: a small allocator for engines that have none. Every rank of a DCP group makes the
 * same calls and so holds the same page ids; one entry of a block table covers kvs_span tokens.
 */

/* Tokens covered by one block-table entry: 64 * dcp; 0 for a dcp outside 1..8. */
int64_t kvs_span(int32_t dcp);
/* Entries of a block table for sequences of up to max_len tokens: the same on every rank. 0 for a dcp
 * outside 1..8 or a max_len below 1. */
int64_t kvs_table_width(int32_t dcp, int64_t max_len);

kvs_status kvs_pages_new(kvs_pages **out, int64_t n_page, kvs_error *err);
void kvs_pages_free(kvs_pages *p);
int64_t kvs_pages_available(const kvs_pages *p);
/* Makes table[0 .. need) hold pages for a sequence of new_len tokens that holds *n_have entries; takes the
 * lowest free ids. All or nothing: KVS_LIMIT (how many are missing) leaves everything as it was. */
kvs_status kvs_pages_extend(kvs_pages *p, int32_t dcp, int32_t *table, int64_t table_width,
                            int64_t *n_have, int64_t new_len, kvs_error *err);
/* Gives entries [n_keep, *n_have) back and sets them to -1. */
kvs_status kvs_pages_truncate(kvs_pages *p, int32_t *table, int64_t *n_have, int64_t n_keep,
                              kvs_error *err);
/* One more owner for the first n entries (a shared prefix); each owner truncates on its own. */
kvs_status kvs_pages_share(kvs_pages *p, const int32_t *table, int64_t n, kvs_error *err);

/* ------------------------------------------------------------------------------------------------------
 * The attention context of one rank.
 */

typedef struct kvs_dcp_config {
    size_t struct_size;
    int32_t tp;            /* ranks that share the heads; default: the comm's size                     */
    int32_t dcp;           /* DCP size, divides tp; default 1                                          */
    int32_t interleave;    /* 1, 2, 4, ... 64; default 1                                               */
    int32_t n_head;        /* attention heads of the whole TP group, divisible by tp                   */
    int32_t n_index_head;  /* 1..64, replicated on every rank; 0: no indexer                           */
    int32_t topk;          /* 1..32768; 0: no sparse attention                                         */
    float softmax_scale;   /* > 0, finite: a property of the model, no default                         */
    kvs_kv_format kv;      /* must be the caches'                                                      */
    kvs_index_format index_kv;
    kvs_exchange exchange; /* default a2a                                                              */
    int32_t q_fp8;         /* 1: quantise queries to e4m3, one scale per (token, head); kv = fp8 only  */
    int32_t max_rows;      /* tokens of one step, default 256                                          */
    int32_t max_reqs;      /* requests of one step, default 64                                         */
    int64_t max_len;       /* longest sequence, default 131072, below 2^31                             */
    int32_t threads;       /* workers of this rank, the caller included; default 1                     */
    int32_t kernel_level;  /* 1: allow dcp 3, 5, 6, 7 (equal to tolerance, not to the bit)             */
    int32_t trace;         /* 1: keep the whole selected set for kvs_dcp_selection                     */
    const char *cpu;       /* cap: "ref", "avx2", "avx512", "avx512bf16"; NULL: KVS_CPU, else best     */
    const char *kernels;   /* "op=variant,..."; NULL: none                                             */
    const char *model_tag; /* any text that must be equal on all ranks, e.g. a model hash; may be NULL */
    const struct kvs_cache *cache; /* this rank's shard, compared with the other ranks': formats, layers, */
                           /* scale rule, k_scale, Hadamard; read by kvs_dcp_open only. NULL: not compared */
    int32_t forms;         /* bits 1 << KVS_ATTEND_DENSE, ...: the forms that will be called; others are   */
                           /* refused and take no memory. 0: all                                       */
    int32_t q_ready;       /* 1: queries come as they are computed with, f32 with f32 rows, else bf16;  */
                           /* others are refused, and there is no room to convert them. Not with q_fp8  */
} kvs_dcp_config;

static inline kvs_dcp_config kvs_dcp_config_default(void)
{
    kvs_dcp_config c;
    c.struct_size = sizeof(c);
    c.tp = 0;
    c.dcp = 0;
    c.interleave = 0;
    c.n_head = 0;
    c.n_index_head = 0;
    c.topk = 0;
    c.softmax_scale = 0.0f;
    c.kv = KVS_KV_AUTO;
    c.index_kv = KVS_INDEX_AUTO;
    c.exchange = KVS_EXCHANGE_AUTO;
    c.q_fp8 = 0;
    c.max_rows = 0;
    c.max_reqs = 0;
    c.max_len = 0;
    c.threads = 0;
    c.kernel_level = 0;
    c.trace = 0;
    c.cpu = NULL;
    c.kernels = NULL;
    c.model_tag = NULL;
    c.cache = NULL;
    c.forms = 0;
    c.q_ready = 0;
    return c;
}

/* Checks the set-up, compares it with the other ranks', takes the rank's place in its DCP group and makes
 * every workspace. `world` has tp ranks and stays the caller's; it must outlive the handle. Collective over
 * world. On failure *out is NULL on every rank and the message names the field. */
kvs_status kvs_dcp_open(kvs_dcp **out, const kvs_dcp_config *cfg, kvs_comm *world, kvs_error *err);
/* NULL is fine. Not collective. */
void kvs_dcp_close(kvs_dcp *d);

int32_t kvs_dcp_rank(const kvs_dcp *d);   /* rank in the DCP group                                     */
int32_t kvs_dcp_heads(const kvs_dcp *d);  /* heads of this rank: n_head / tp                           */
int64_t kvs_dcp_workspace_bytes(const kvs_dcp *d);
/* "op=variant,..." as chosen. Valid until close. */
const char *kvs_dcp_kernels(const kvs_dcp *d);

/* One step's tokens: request i brings q_len[i] new tokens (0 is allowed) and is seq_len[i] tokens long with
 * them, so its tokens stand at positions seq_len - q_len .. seq_len - 1. Decode, MTP verification and
 * prefill rows mix freely. Token t of the step is row t of every [n_row, ...] buffer below, requests in
 * order. Arrays are read until kvs_dcp_plan returns, tables included. */
typedef struct kvs_batch {
    int32_t n_req;
    const int32_t *q_len;    /* [n_req]                                                                */
    const int64_t *seq_len;  /* [n_req] >= q_len                                                       */
    const int32_t *table;    /* [n_req, table_stride] page ids, the same on every rank                 */
    int64_t table_stride;    /* elements                                                               */
    int64_t n_page;          /* pages of the pool the tables point into                                */
} kvs_batch;

/* Works out lengths, local bounds, slots and tables of a step. Every id that the sequences reach is
 * checked against the pool. No communication; all ranks plan the same batch. On failure the former plan
 * stays. */
kvs_status kvs_dcp_plan(kvs_dcp *d, const kvs_batch *batch, kvs_error *err);

/* Writes the rows that this rank owns. latent: [n_row, 512], rope: [n_row, 64], of `type`, dense. */
kvs_status kvs_dcp_write(kvs_dcp *d, kvs_cache *c, int32_t layer, const void *latent, const void *rope,
                         kvs_dtype type, kvs_error *err);
/* key: [n_row, 128]. `index_layer` counts layers with index keys from 0. */
kvs_status kvs_dcp_write_index(kvs_dcp *d, kvs_cache *c, int32_t index_layer, const void *key,
                               kvs_dtype type, kvs_error *err);

/* Scores every key that each row may see, on the shard, and agrees with the group on the topk best: larger
 * score, then lower position. q: [n_row, n_index_head, 128]; w: [n_row, n_index_head] f32 head weights
 * before the factors dim^-1/2 and heads^-1/2. The set stays in the handle until the next select, selection
 * or plan; layers that share it just attend. Collective. */
kvs_status kvs_dcp_select(kvs_dcp *d, const kvs_cache *c, int32_t index_layer, const void *q,
                          kvs_dtype type, const float *w, kvs_error *err);
/* Takes a selection made elsewhere: [n_row, stride] global positions in any order, -1 for none, at most
 * topk per row; the same on every rank. Ids at or past the row's bound are masked and reported by
 * kvs_dcp_finish. No communication. */
kvs_status kvs_dcp_set_selection(kvs_dcp *d, const int32_t *ids, int64_t stride, kvs_error *err);
/* The selected positions of the last kvs_dcp_select, ascending, -1 behind: ids [n_row, topk], count [n_row].
 * Needs trace. No communication. */
kvs_status kvs_dcp_selection(const kvs_dcp *d, int32_t *ids, int32_t *count, kvs_error *err);

typedef enum kvs_attend {
    KVS_ATTEND_DENSE = 1,  /* every key up to the row's own                                            */
    KVS_ATTEND_SPARSE = 2, /* the selected ones                                                        */
    KVS_ATTEND_CONTEXT = 3 /* every key, moved block by block to every rank instead of moving queries: for long
                              prompt chunks. Fixed blocks of 512 positions folded in order: the same bits
                              for every dcp, equal to DENSE to tolerance                               */
} kvs_attend;

/* Absorbed attention of the step's rows over the whole group's cache.
 * q: [n_row, kvs_dcp_heads, 576] of q_type (latent 512, rope 64), dense; f32 is rounded to bf16 unless rows
 * are f32. out: [n_row, kvs_dcp_heads, 512] of out_type. lse: [n_row, kvs_dcp_heads] f32 or NULL; a row
 * with no key gives (0, -inf). Collective. */
kvs_status kvs_dcp_attend(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how, const void *q,
                          kvs_dtype q_type, void *out, kvs_dtype out_type, float *lse, kvs_error *err);

/* This rank's partial alone, for engines with their own exchange: q: [n_row, heads, 576] of all
 * heads = dcp * kvs_dcp_heads heads of the group, out: [n_row, heads, 512] f32 normalised, lse: [n_row, heads].
 * how: DENSE or SPARSE. No communication. Combine the ranks' partials with kvs_merge. */
kvs_status kvs_dcp_attend_local(kvs_dcp *d, const kvs_cache *c, int32_t layer, kvs_attend how,
                                const void *q, kvs_dtype q_type, float *out, float *lse,
                                kvs_error *err);

/* Merges n_part partials of [n_row, n_head, dim] f32 with lse [n_row, n_head] (dense, natural log). n_part
 * 1, 2, 4, 8: the tree (p, p + n/2), (p, p + n/4), ...; other counts: in order. An lse of NaN or +inf counts
 * as -inf. dim: a multiple of 16. lse may be NULL. Threads: any. */
kvs_status kvs_merge(int32_t n_part, const float *const *out_in, const float *const *lse_in,
                     int32_t n_row, int32_t n_head, int32_t dim, void *out, kvs_dtype out_type,
                     float *lse, kvs_error *err);

/* What a step did on this rank. */
typedef struct kvs_step_info {
    uint64_t n_row_read;      /* cache rows of this rank's shard fetched by attention                  */
    uint64_t n_key_attended;  /* (row, key) pairs                                                      */
    uint64_t n_key_scored;    /* (row, key) pairs                                                      */
    uint64_t n_bad_id;        /* ids masked                                                            */
    uint64_t n_nan;           /* NaN results or inputs masked                                          */
    uint64_t bytes_q, bytes_partial, bytes_select, bytes_context; /* sent to other ranks               */
} kvs_step_info;

/* Ends a step: fills info (may be NULL), resets the counters, and returns the first deferred error:
 * KVS_INVALID where ids were masked, KVS_INTERNAL for a kernel failure. The outputs stay usable. */
kvs_status kvs_dcp_finish(kvs_dcp *d, kvs_step_info *info, kvs_error *err);

/* ------------------------------------------------------------------------------------------------------
 * Snapshots: a sequence's cache in a file, rows in position order, readable at any DCP size.
 */

enum { KVS_SNAPSHOT_MAX_LAYER = 247 };

typedef struct kvs_snapshot_info {
    kvs_kv_format kv;
    kvs_index_format index_kv;
    int32_t hadamard;
    int32_t n_layer, n_index_layer;
    int32_t writer_dcp, writer_interleave;
    int64_t n_token;
    uint64_t model_hash[2];
    uint64_t token_hash[2]; /* XXH3-128 of the token ids, low half first; 0: none recorded           */
    float k_scale[KVS_SNAPSHOT_MAX_LAYER]; /* [n_layer] what a cache of fp8 rows must be opened with; 1 with other rows */
} kvs_snapshot_info;

/* Writes the first n_token tokens of a sequence (0 is allowed): token ids [n_token] (may be NULL: none
 * recorded), the block table, every layer; at most 247 layers, those with rows and those with index keys
 * counted together. model_hash may be NULL: 0. Collective over the DCP group `comm`, whose ranks give the same
 * arguments; rank 0 writes. The file appears whole or not at all, and every rank returns the same status. The
 * format is docs/snapshot-format.md. */
kvs_status kvs_snapshot_write(const char *path, kvs_comm *comm, const kvs_cache *c, const int32_t *table,
                              int64_t table_width, int64_t n_token, const int32_t *tokens,
                              const uint64_t model_hash[2], kvs_error *err);
/* Reads and checks the header. No communication. */
kvs_status kvs_snapshot_stat(const char *path, kvs_snapshot_info *info, kvs_error *err);
/* Reads a snapshot into this rank's shard through `table` (pages for n_token tokens). Formats, layers and
 * k_scale must be the cache's; model_hash must be equal when given. tokens [cap] receives the token ids when
 * not NULL. Every page's checksum is checked; on any failure nothing may be assumed of the target pages. The
 * counters of kvs_cache_get_info do not move. No communication: each rank reads. */
kvs_status kvs_snapshot_read(const char *path, kvs_cache *c, const int32_t *table, int64_t table_width,
                             const uint64_t *model_hash, int32_t *tokens, int64_t cap,
                             kvs_error *err);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
