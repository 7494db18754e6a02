/* golden.h: the files of tests/data/text, as tools/oracle/tokenizer_golden.py writes them. */
#ifndef UNIT_TEXT_GOLDEN_H
#define UNIT_TEXT_GOLDEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspan/text.h"

/* A file being read; running past its end fails the test. */
typedef struct reader {
    char *data;
    size_t n;
    size_t at;
} reader;

reader reader_open(const char *dir, const char *name);
void reader_close(reader *r);
uint32_t reader_u8(reader *r);
uint32_t reader_u16(reader *r);
uint32_t reader_u32(reader *r);
const char *reader_bytes(reader *r, size_t n);

/* The tokenizer of dir/name.json, a tokenizer_config.json beside it where config is given. */
kvs_tokenizer *golden_tokenizer(const char *dir, const char *name, const char *config);

/* The same with the first `from` in the file's text replaced by `to`. */
kvs_tokenizer *golden_tokenizer_with(const char *dir, const char *name, const char *from,
                                     const char *to);

#endif
