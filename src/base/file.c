/* file.c: see file.h. */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/mem.h"

/* One system call moves at most this much (the kernel's own limit is just below 2 GiB). */
#define MAX_IO ((size_t)1 << 30)

static kvs_status io_error(kvs_error *err, const char *path, const char *what)
{
    const int e = errno;
    return err_set(err, KVS_IO, "%s: cannot %s: %s", path, what, strerrordesc_np(e));
}

static char *dup_text(const char *s, const char *tail)
{
    const size_t n = strlen(s);
    const size_t m = strlen(tail);
    char *copy = mem_alloc(n + m + 1, 0);
    if (copy != NULL) {
        memcpy(copy, s, n);
        memcpy(copy + n, tail, m + 1);
    }
    return copy;
}

static int open_retry(const char *path, int flags)
{
    int fd = -1;
    do {
        fd = open(path, flags | O_CLOEXEC, 0666);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

/* Opens for reading without waiting for the writer of a named pipe; reading waits as usual. */
static int open_read(const char *path)
{
    const int fd = open_retry(path, O_RDONLY | O_NONBLOCK);
    const int flags = fd >= 0 ? fcntl(fd, F_GETFL) : -1;
    if (flags >= 0) {
        (void)fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
    }
    return fd;
}

kvs_status file_open(file *f, const char *path, kvs_error *err)
{
    *f = (file){.fd = -1};
    char *copy = dup_text(path, "");
    if (copy == NULL) {
        return err_set(err, KVS_NOMEM, "%s: no memory to open it", path);
    }
    const int fd = open_read(path);
    if (fd < 0) {
        const kvs_status st = io_error(err, path, "open");
        mem_free(copy);
        return st;
    }
    *f = (file){.fd = fd, .path = copy};
    return KVS_OK;
}

void file_close(file *f)
{
    if (f->fd >= 0) {
        close(f->fd);
    }
    mem_free(f->path);
    *f = (file){.fd = -1};
}

kvs_status file_size(const file *f, int64_t *bytes, kvs_error *err)
{
    struct stat s;
    if (fstat(f->fd, &s) != 0) {
        return io_error(err, f->path, "find its size");
    }
    if (!S_ISREG(s.st_mode)) {
        return err_set(err, KVS_IO, "%s: not a regular file", f->path);
    }
    *bytes = s.st_size;
    return KVS_OK;
}

kvs_status file_pread(const file *f, void *buf, size_t n, int64_t off, kvs_error *err)
{
    size_t done = 0;
    while (done < n) {
        const size_t want = n - done < MAX_IO ? n - done : MAX_IO;
        const ssize_t got = pread(f->fd, (char *)buf + done, want, off + (int64_t)done);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return io_error(err, f->path, "read");
        }
        if (got == 0) {
            const int64_t end = off + (int64_t)done;
            const kvs_status st = err_set(err, KVS_FORMAT, "%s: ends at byte %lld, %zu bytes short",
                                          f->path, (long long)end, n - done);
            err_at(err, end);
            return st;
        }
        done += (size_t)got;
    }
    return KVS_OK;
}

kvs_status file_pwrite(const file *f, const void *buf, size_t n, int64_t off, kvs_error *err)
{
    size_t done = 0;
    while (done < n) {
        const size_t want = n - done < MAX_IO ? n - done : MAX_IO;
        const ssize_t put = pwrite(f->fd, (const char *)buf + done, want, off + (int64_t)done);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return io_error(err, f->path, "write");
        }
        done += (size_t)put;
    }
    return KVS_OK;
}

/* Reads up to cap bytes in sequence; fewer only at the end of the file. */
static ssize_t read_upto(int fd, char *buf, size_t cap)
{
    size_t done = 0;
    while (done < cap) {
        const size_t want = cap - done < MAX_IO ? cap - done : MAX_IO;
        const ssize_t got = read(fd, buf + done, want);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return -1;
        }
        if (got == 0) {
            break;
        }
        done += (size_t)got;
    }
    return (ssize_t)done;
}

static kvs_status read_open(const file *f, size_t limit, char **data, size_t *n, kvs_error *err)
{
    struct stat s;
    const int regular = fstat(f->fd, &s) == 0 && S_ISREG(s.st_mode);
    size_t cap = regular ? (size_t)s.st_size : (size_t)1 << 16;
    char *buf = NULL;
    size_t len = 0;
    for (;;) {
        cap = cap < limit ? cap : limit;
        /* One byte past cap tells "ends here" from "goes on"; it becomes the NUL. */
        char *grown = mem_realloc(buf, cap + 1);
        if (grown == NULL) {
            mem_free(buf);
            return err_set(err, KVS_NOMEM, "%s: no memory for %zu bytes", f->path, cap + 1);
        }
        buf = grown;
        const ssize_t got = read_upto(f->fd, buf + len, cap + 1 - len);
        if (got < 0) {
            const kvs_status st = io_error(err, f->path, "read");
            mem_free(buf);
            return st;
        }
        len += (size_t)got;
        if (len <= cap) {
            break;
        }
        if (cap == limit) {
            mem_free(buf);
            return err_set(err, KVS_LIMIT, "%s: larger than %zu bytes, the most accepted here",
                           f->path, limit);
        }
        cap = cap <= limit / 2 ? 2 * cap + 1 : limit;
    }
    buf[len] = '\0';
    *data = buf;
    *n = len;
    return KVS_OK;
}

kvs_status file_read_all(const char *path, size_t limit, char **data, size_t *n, kvs_error *err)
{
    *data = NULL;
    *n = 0;
    if (limit > PTRDIFF_MAX - 1) {
        limit = PTRDIFF_MAX - 1;
    }
    file f;
    TRY(file_open(&f, path, err));
    const kvs_status st = read_open(&f, limit, data, n, err);
    file_close(&f);
    return st;
}

kvs_status file_map_open(file_map *m, const char *path, kvs_error *err)
{
    *m = (file_map){0};
    file f;
    TRY(file_open(&f, path, err));
    int64_t bytes = 0;
    kvs_status st = file_size(&f, &bytes, err);
    if (st == KVS_OK && bytes > 0) {
        void *p = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, f.fd, 0);
        if (p == MAP_FAILED) {
            st = io_error(err, path, "map");
        } else {
            *m = (file_map){.data = p, .n = (size_t)bytes};
        }
    }
    file_close(&f);
    return st;
}

void file_map_close(file_map *m)
{
    if (m->data != NULL) {
        munmap((void *)(uintptr_t)m->data, m->n);
    }
    *m = (file_map){0};
}

void file_map_scattered(const file_map *m, bool on)
{
    if (m->data != NULL) {
        (void)madvise((void *)(uintptr_t)m->data, m->n, on ? MADV_RANDOM : MADV_NORMAL);
    }
}

void file_map_want(const file_map *m, size_t off, size_t n)
{
    if (m->data == NULL || n == 0 || off >= m->n) {
        return;
    }
    const size_t begin = off & ~(mem_page_size() - 1);
    const size_t end = n < m->n - off ? off + n : m->n;
    (void)madvise((void *)(uintptr_t)(m->data + begin), end - begin, MADV_WILLNEED);
}

kvs_status file_map_sparse(void **p, const char *dir, size_t bytes, kvs_error *err)
{
    *p = NULL;
    if (bytes == 0 || bytes > PTRDIFF_MAX) {
        return err_set(err, KVS_INVALID, "cannot map %zu bytes: ask for 1 to %zu", bytes,
                       (size_t)PTRDIFF_MAX);
    }
    const char *name = dir != NULL ? dir : "memory file";
    const int fd =
        dir != NULL ? open_retry(dir, O_TMPFILE | O_RDWR) : memfd_create("kvspan", MFD_CLOEXEC);
    if (fd < 0) {
        return io_error(err, name, "create a file without a name");
    }
    kvs_status st = KVS_OK;
    void *q = MAP_FAILED;
    if (ftruncate(fd, (off_t)bytes) != 0) {
        st = io_error(err, name, "grow the file");
    } else {
        q = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        st = q == MAP_FAILED ? io_error(err, name, "map") : KVS_OK;
    }
    close(fd);
    if (st == KVS_OK) {
        *p = q;
    }
    return st;
}

void file_unmap_sparse(void *p, size_t bytes)
{
    if (p != NULL) {
        munmap(p, bytes);
    }
}

/* A device or a pipe would lose its name to the new file. */
static bool is_replaceable(const char *path)
{
    struct stat st;
    return stat(path, &st) != 0 || S_ISREG(st.st_mode);
}

kvs_status file_replace_begin(file_replace *r, const char *path, kvs_error *err)
{
    static atomic_uint serial;
    *r = (file_replace){.f = {.fd = -1}};
    if (!is_replaceable(path)) {
        return err_set(err, KVS_IO, "%s: is there and no regular file; give another name", path);
    }
    char tail[48];
    snprintf(tail, sizeof tail, ".tmp-%ld-%u", (long)getpid(), atomic_fetch_add(&serial, 1));
    char *target = dup_text(path, "");
    char *temp = dup_text(path, tail);
    if (target == NULL || temp == NULL) {
        mem_free(target);
        mem_free(temp);
        return err_set(err, KVS_NOMEM, "%s: no memory to write it", path);
    }
    const int fd = open_retry(temp, O_RDWR | O_CREAT | O_EXCL);
    if (fd < 0) {
        const kvs_status st = io_error(err, temp, "create");
        mem_free(target);
        mem_free(temp);
        return st;
    }
    *r = (file_replace){.f = {.fd = fd, .path = temp}, .target = target};
    return KVS_OK;
}

/* The folder that holds the path, opened; -1 on failure. */
static int open_folder(const char *path, kvs_error *err)
{
    char *dir = dup_text(path, "");
    if (dir == NULL) {
        err_set(err, KVS_NOMEM, "%s: no memory to write it", path);
        return -1;
    }
    char *slash = strrchr(dir, '/');
    if (slash != NULL) {
        slash[slash == dir ? 1 : 0] = '\0';
    }
    const int fd = open_retry(slash != NULL ? dir : ".", O_RDONLY | O_DIRECTORY);
    mem_free(dir);
    if (fd < 0) {
        io_error(err, path, "open its folder");
    }
    return fd;
}

/* All that can be refused comes before the new name: what is left after it is one sync of the folder, which
 * makes the name durable. Some file systems cannot sync a folder and say EINVAL. */
kvs_status file_replace_commit(file_replace *r, kvs_error *err)
{
    kvs_error own = {0};
    kvs_error *say = err != NULL ? err : &own;
    kvs_status st = KVS_OK;
    const int folder = open_folder(r->target, say);
    if (folder < 0) {
        st = say->code;
    } else if (fsync(r->f.fd) != 0) {
        st = io_error(say, r->f.path, "sync");
    } else if (rename(r->f.path, r->target) != 0) {
        st = io_error(say, r->target, "rename the new file to it");
    }
    if (st < 0) {
        if (folder >= 0) {
            close(folder);
        }
        file_replace_abort(r);
        return st;
    }
    if (fsync(folder) != 0 && errno != EINVAL) {
        st = io_error(say, r->target, "sync its folder");
    }
    close(folder);
    file_close(&r->f);
    mem_free(r->target);
    r->target = NULL;
    return st;
}

void file_replace_abort(file_replace *r)
{
    if (r->f.path != NULL) {
        unlink(r->f.path);
    }
    file_close(&r->f);
    mem_free(r->target);
    r->target = NULL;
}

kvs_status file_write_all(const char *path, const void *data, size_t n, kvs_error *err)
{
    file_replace r;
    TRY(file_replace_begin(&r, path, err));
    const kvs_status st = file_pwrite(&r.f, data, n, 0, err);
    if (st < 0) {
        file_replace_abort(&r);
        return st;
    }
    return file_replace_commit(&r, err);
}
