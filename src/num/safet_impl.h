/* num/safet_impl.h - what safet.c (one file) and safet_index.c (a set of files) share. */
#ifndef KVS_NUM_SAFET_IMPL_H
#define KVS_NUM_SAFET_IMPL_H

#include "base/file.h"
#include "num/safet.h"

typedef struct safet_file {
    char *name; /* without its folder                        */
    const unsigned char *data;
    size_t n;
    size_t header; /* bytes of the JSON header, which starts at 8 */
    file_map map;  /* empty where the content is the caller's   */
} safet_file;

struct safet {
    safet_file *file;
    int32_t n_file, cap_file;
    safet_tensor *tensor;
    int64_t n_tensor, cap_tensor;
};

/* Adds the tensors of the file f, whose data and n are set. */
kvs_status safet_add_tensors(safet *s, int32_t f, kvs_error *err);
/* Sorts by name; refuses a name that occurs twice. */
kvs_status safet_sort(safet *s, kvs_error *err);
/* A new entry for a file with a copy of its name. */
kvs_status safet_add_file(safet *s, const char *name, kvs_error *err);

#endif
