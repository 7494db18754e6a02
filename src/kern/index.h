/* kern/index.h - contracts of the DSA indexer: query quantisation, scores, top-k, candidate merge, and
 * the way from selected positions to cache slots.
 *
 * Score of query row m and key n: (sum_h max(0, q[m,h] . k[n]) * w[m,h]) * k_scale[n], f32. Accumulator
 * type and order are fixed per variant and depend neither on shard, row, batch nor on where the key lies. A
 * NaN in a key, a query or a weight makes the score NaN (max(0, NaN) is NaN here).
 *
 * Order of selection, everywhere: larger score first, then lower id. -0.0 equals +0.0; NaN and -inf are
 * never selected. Ids are int32 and ascend with position on every rank, so local and global order agree.
 *
 * Read by the C compiler and by nvcc.
 */
#ifndef KVS_KERN_INDEX_H
#define KVS_KERN_INDEX_H

#include <stddef.h>
#include <stdint.h>
#include "kvspan/config.h"
#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

/* index_quant: per (row, head) over 128 values: amax over the finite ones, s = the pow2 rule with floor
 * 1e-4 on amax / 448... (num/fmt.h: scale_index), q8 = e4m3(x / s); w_out = ((w * s) * 128^-1/2) * n_head^-1/2.
 * With q8 == NULL the query stays f32 (q_f32 filled) and s = 1. */
typedef struct index_quant_args {
    int32_t n_row, n_head;       /* n_head 1..64                                                     */
    const void *q;               /* [n_row, n_head, 128] bf16 or f32, dense                          */
    int32_t q_type;              /* kvs_dtype                                                        */
    const float *w;              /* [n_row, n_head] head weights before any factor                   */
    uint8_t *q8;                 /* [n_row, n_head, 128] e4m3; NULL with f32 keys                    */
    float *q_f32;                /* [n_row, n_head, 128]; NULL with fp8 keys                         */
    float *w_out;                /* [n_row, n_head]                                                  */
    uint64_t *n_nan;             /* NaN among q and w are added here; may be NULL                    */
} index_quant_args;
typedef void (*index_quant_fn)(const index_quant_args *a, dev_queue *q);

/* index_score: rows of one call may belong to several requests; keys come through the block table.
 * Row r gets scores of local indices [col_begin, min(col_end, kv_len[r])) at score[r * stride + (l -
 * col_begin)]. Entries of the row at and past its bound are set to -inf up to col_end. */
typedef struct index_score_args {
    int32_t n_row, n_head;       /* n_head 1..64                                                     */
    const void *q;               /* [n_row, n_head, 128] e4m3 with fp8 keys, f32 with f32 keys       */
    const float *w;              /* [n_row, n_head]                                                  */
    const uint8_t *keys;         /* page p starts at keys + p * page_stride                          */
    int32_t fmt;                 /* kvs_index_format                                                 */
    int64_t page_stride;         /* bytes                                                            */
    int64_t n_page;              /* ids outside [0, n_page): score -inf, counted                     */
    const int32_t *table;        /* [n_req, table_stride]                                            */
    int64_t table_stride;
    int32_t table_width;         /* local indices past 64 * table_width: score -inf, counted         */
    int32_t n_req;
    const int32_t *row_req;      /* [n_row], equal values adjacent                                   */
    const int32_t *kv_len;       /* [n_row] LOCAL bound                                              */
    int32_t col_begin, col_end;  /* local indices; col_begin a multiple of 64                        */
    float *score;                /* [n_row, score_stride]                                            */
    int64_t score_stride;        /* elements, >= col_end - col_begin                                 */
    uint64_t *n_bad_id;          /* may be NULL                                                      */
    uint64_t *n_key;             /* (row, key) pairs scored are added; may be NULL                   */
    void *scratch;               /* index_score_scratch bytes, 64-byte aligned                       */
    size_t scratch_bytes;
} index_score_args;
typedef void (*index_score_fn)(const index_score_args *a, dev_queue *q);
typedef size_t (*index_score_scratch_fn)(const index_score_args *a, const dev_queue *q);

/* topk: the k best of (a running list) u (a row of scores), ids of the row being id_base + column. The
 * list holds ids below id_base, ascending, and leaves ascending; start with count 0. Feeding a long row
 * in pieces gives the same list as feeding it whole. */
typedef struct topk_args {
    int32_t n_row, k;            /* k 1..32768                                                       */
    const float *score;          /* [n_row, score_stride]                                            */
    int64_t score_stride;
    const int32_t *n_col;        /* [n_row] columns of each row, may be 0                            */
    int32_t id_base;
    int32_t *list_id;            /* [n_row, k] in and out; what lies behind list_count has no meaning */
    float *list_score;           /* [n_row, k] in and out                                            */
    int32_t *list_count;         /* [n_row] in and out                                               */
    void *scratch;               /* topk_scratch bytes, 64-byte aligned                              */
    size_t scratch_bytes;
} topk_args;
typedef void (*topk_fn)(const topk_args *a, dev_queue *q);
typedef size_t (*topk_scratch_fn)(const topk_args *a, const dev_queue *q);

/* index_select: index_score and topk in one, without scores in memory: the k best keys of each row over
 * all of [0, kv_len[r]), as positions (shard_pos of dcp, interleave and rank), ascending, with -1 and 0
 * behind. The selection, the ties and the counters are those of index_score on the same machine followed
 * by topk; a score of zero comes out as +0 or -0. Scratch grows with the device and with n_row * k at
 * most, not with the context. */
typedef struct index_select_args {
    index_score_args in;         /* col_begin, col_end, score, score_stride and scratch are not read */
    int32_t k;                   /* 1..32768                                                         */
    int32_t dcp, interleave, rank;
    int32_t *list_id;            /* [n_row, k] out                                                   */
    float *list_score;           /* [n_row, k] out                                                   */
    int32_t *list_count;         /* [n_row] out                                                      */
    void *scratch;               /* index_select_scratch bytes, 64-byte aligned                      */
    size_t scratch_bytes;
} index_select_args;
typedef void (*index_select_fn)(const index_select_args *a, dev_queue *q);
typedef size_t (*index_select_scratch_fn)(const index_select_args *a, const dev_queue *q);

/* topk_merge: n_list candidate lists per row (ids distinct over all lists, each list ascending) -> the
 * worst member of the k best of their union. A candidate belongs to the set iff its score is larger than
 * cut_score or equal to it with an id <= cut_id. n_total = min(k, candidates); with n_total 0 the cut is
 * (+inf, -1). With all_id != NULL the set itself is written too, ascending, -1 behind. */
typedef struct topk_merge_args {
    int32_t n_row, n_list, k;
    const float *const *cand_score; /* [n_list] -> [n_row, cand_stride]                              */
    const int32_t *const *cand_id;  /* [n_list] -> [n_row, cand_stride]                              */
    const int32_t *const *cand_count; /* [n_list] -> [n_row]                                         */
    int64_t cand_stride;
    float *cut_score;            /* [n_row]                                                          */
    int32_t *cut_id;             /* [n_row]                                                          */
    int32_t *n_total;            /* [n_row]                                                          */
    int32_t *all_id;             /* [n_row, k] or NULL                                               */
    void *scratch;               /* topk_merge_scratch bytes, 64-byte aligned                        */
    size_t scratch_bytes;
} topk_merge_args;
typedef void (*topk_merge_fn)(const topk_merge_args *a, dev_queue *q);
typedef size_t (*topk_merge_scratch_fn)(const topk_merge_args *a, const dev_queue *q);

/* localise: global positions -> this rank's slots, lane-major, ascending in each lane. Input ids may come
 * in any order; -1 is none. With cut_score != NULL only candidates inside the cut (as in topk_merge) are
 * looked at. Bad ids are masked and counted: below -1 or at and past the bound on every rank; repeated
 * (each one after the first) or with a page outside the table or pool on the rank that owns them. */
typedef struct localise_args {
    int32_t n_row, k;
    const int32_t *id;           /* [n_row, id_stride] global positions                              */
    int64_t id_stride;
    const int32_t *count;        /* [n_row] entries of each row; NULL: k                             */
    const float *score;          /* [n_row, id_stride], with cut_score                               */
    const float *cut_score;      /* [n_row] or NULL                                                  */
    const int32_t *cut_id;       /* [n_row]                                                          */
    int32_t dcp, interleave, rank;
    const int32_t *table;        /* [n_req, table_stride]                                            */
    int64_t table_stride;
    int32_t table_width, n_req;
    int64_t n_slot;
    const int32_t *row_req;      /* [n_row]                                                          */
    const int32_t *bound;        /* [n_row] GLOBAL keys the row may attend; ids at or past it are bad */
    int32_t *slots;              /* [n_row, slots_stride], -1 behind the last up to k                */
    int64_t slots_stride;        /* >= k                                                             */
    int32_t *lane_count;         /* [n_row, 8 / dcp] ([n_row, 1] where dcp does not divide 8)        */
    uint64_t *n_bad_id;          /* may be NULL                                                      */
    void *scratch;
    size_t scratch_bytes;
} localise_args;
typedef void (*localise_fn)(const localise_args *a, dev_queue *q);
typedef size_t (*localise_scratch_fn)(const localise_args *a, const dev_queue *q);

#ifdef __cplusplus
}
#endif
#endif
