/* num/safet.h - the tensors of a model's safetensors files, mapped and found by name.
 *
 * A file is a u64 header length, a JSON header {name: {dtype, shape, data_offsets}} and the data. Nothing of it is
 * trusted: when a set has been opened, every tensor has a known type, a shape whose size is what its offsets span,
 * and lies inside its file; the tensors of a file cover its data without overlap, hole or trailing bytes; no name
 * occurs twice. What breaks this is refused with the file and the tensor named.
 *
 * A folder holds model.safetensors, or model.safetensors.index.json with the shards it names. The index decides: a
 * tensor that it does not list is not part of the model, one that it lists must be in the shard it names.
 *
 * Data is not read when opening and not checked; a file that is cut short afterwards faults when it is read.
 */
#ifndef KVS_NUM_SAFET_H
#define KVS_NUM_SAFET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspan/status.h"

enum { SAFET_MAX_DIM = 8, SAFET_MAX_NAME = 255, SAFET_MAX_FILE = 4096 };

typedef enum safet_type {
    SAFET_BOOL = 1,
    SAFET_U8,
    SAFET_I8,
    SAFET_F8_E4M3,
    SAFET_F8_E5M2,
    SAFET_F8_E8M0,
    SAFET_U16,
    SAFET_I16,
    SAFET_F16,
    SAFET_BF16,
    SAFET_U32,
    SAFET_I32,
    SAFET_F32,
    SAFET_U64,
    SAFET_I64,
    SAFET_F64
} safet_type;

typedef struct safet_tensor {
    const char *name;          /* 1..255 bytes, no control characters                    */
    const unsigned char *data; /* in the mapping; no alignment is promised               */
    int64_t bytes;
    int32_t file; /* index of its file                                      */
    safet_type type;
    int32_t n_dim; /* 0: a scalar                                            */
    int64_t dim[SAFET_MAX_DIM];
} safet_tensor;

typedef struct safet safet;

/* Opens the files of a folder. On failure *out is NULL. Threads: any. */
kvs_status safet_open(safet **out, const char *dir, kvs_error *err);
/* The same of one file's content, which must stay until close; `name` is for messages. */
kvs_status safet_open_memory(safet **out, const char *name, const void *data, size_t n,
                             kvs_error *err);
void safet_close(safet *s);

/* NULL where there is none of that name. */
const safet_tensor *safet_find(const safet *s, const char *name);
/* All of them in the order of their names: i in [0, n). */
int64_t safet_count(const safet *s);
const safet_tensor *safet_at(const safet *s, int64_t i);
/* The place of a tensor in that order. */
int64_t safet_index(const safet *s, const safet_tensor *t);

/* The files, in the order of their names. */
int32_t safet_n_file(const safet *s);
const char *safet_file_name(const safet *s, int32_t i_file);
/* Its JSON header. */
const void *safet_header(const safet *s, int32_t i_file, size_t *n);

/* Hints about what is read next, which change nothing: few places far apart (until it is switched off); a tensor. */
void safet_scattered(const safet *s, bool on);
void safet_want(const safet *s, const safet_tensor *t);

/* "BF16"; bytes of one element. */
const char *safet_type_name(safet_type t);
int32_t safet_type_bytes(safet_type t);

#endif
