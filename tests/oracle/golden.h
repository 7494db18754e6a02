/* golden.h: reads the expected results in tests/oracle/golden (made by tools/oracle/golden.py).
 *
 * A file is a container of named arrays, all little-endian: the eight bytes "KVSGOLD1", then until
 * the end of the file records of
 *     u32 length of the name, the name; u32 type (0: f32, 1: i32); u32 number of dimensions;
 *     u64 dimensions; the elements, row-major.
 * tests/oracle/README.md lists what the arrays mean. */
#ifndef ORACLE_GOLDEN_H
#define ORACLE_GOLDEN_H

#include <stddef.h>
#include <stdint.h>

typedef struct golden golden;

typedef struct golden_array {
    int type; /* 0: f32, 1: i32 */
    int n_dim;
    int64_t dim[4];
    int64_t n; /* elements */
    const float *f32;
    const int32_t *i32;
} golden_array;

/* Opens golden/NAME.bin of the source tree; NULL with a sentence in msg. */
golden *golden_open(const char *name, char *msg, size_t cap);
void golden_close(golden *g);

/* The array; its pointers live until golden_close. n is 0 where there is none of that name. */
golden_array golden_get(const golden *g, const char *name);

/* The i-th array and its name; n_dim is -1 past the last. */
golden_array golden_at(const golden *g, int i, const char **name);

#endif
