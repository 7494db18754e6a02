/* file.h: files, read and written whole or not at all.
 *
 * Every failure names the path, what was tried and the system's reason. Offsets are 64-bit. A short
 * read is an error that says at which offset the file ends (KVS_FORMAT, since a file that is too
 * short is malformed); all other failures are KVS_IO. Interrupted calls are repeated. */
#ifndef BASE_FILE_H
#define BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspan/status.h"

typedef struct file {
    int fd;
    char *path; /* for messages */
} file;

/* An open file for reading. On failure *f is closed and needs no file_close. */
kvs_status file_open(file *f, const char *path, kvs_error *err);
void file_close(file *f);

/* The size in bytes; refuses what has none (a pipe, a folder). */
kvs_status file_size(const file *f, int64_t *bytes, kvs_error *err);

/* Exactly n bytes from or to an offset. */
kvs_status file_pread(const file *f, void *buf, size_t n, int64_t off, kvs_error *err);
kvs_status file_pwrite(const file *f, const void *buf, size_t n, int64_t off, kvs_error *err);

/* The whole file in a block for mem_free, followed by a NUL that *n does not count. A file larger
 * than limit is KVS_LIMIT. Pipes work; a named one that nobody writes to is empty. On failure *data is NULL. */
kvs_status file_read_all(const char *path, size_t limit, char **data, size_t *n, kvs_error *err);

/* A read-only mapping of a whole file; an empty file gives data NULL and n 0. */
typedef struct file_map {
    const unsigned char *data;
    size_t n;
} file_map;

kvs_status file_map_open(file_map *m, const char *path, kvs_error *err);
void file_map_close(file_map *m);

/* Hints, which change no content and cannot fail. Scattered: a touched page is read alone, where the system would
 * otherwise read far ahead of it; until it is switched off. Want: bytes [off, off + n) will be needed soon, begin to
 * read them. */
void file_map_scattered(const file_map *m, bool on);
void file_map_want(const file_map *m, size_t off, size_t n);

/* `bytes` of zeros backed by a sparse file without a name, in folder dir, or in memory when dir is
 * NULL: only what is written takes space. Writable; shared with children of a fork. */
kvs_status file_map_sparse(void **p, const char *dir, size_t bytes, kvs_error *err);
void file_unmap_sparse(void *p, size_t bytes);

/* Replaces a regular file in one step, or makes it: write to `f` (a new file beside the target), then commit; a
 * folder, a device or a pipe is refused. Before the
 * commit has returned KVS_OK the target is what it was; after it, the new content is on disk under
 * the name. After abort, or a commit that failed, the target is what it was and nothing is left
 * behind; except when only the sync of the folder failed: then the new content is in place, but a
 * power cut may undo it. */
typedef struct file_replace {
    file f;
    char *target;
} file_replace;

kvs_status file_replace_begin(file_replace *r, const char *path, kvs_error *err);
kvs_status file_replace_commit(file_replace *r, kvs_error *err);
void file_replace_abort(file_replace *r);

/* begin, write n bytes, commit. */
kvs_status file_write_all(const char *path, const void *data, size_t n, kvs_error *err);

#endif
