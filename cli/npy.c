/* cli/npy.c - an f32 array in NumPy's format 1.0: a header of fixed size, written again with the number of
 * rows when they are known, and little-endian values in C order. */
#include "cli/run.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HEADER = 128 };

static bool write_header(const npy *a)
{
    char h[HEADER];
    char text[HEADER];
    const int n = snprintf(text, sizeof text,
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (%lld, %d), }",
                           (long long)a->n_row, a->n_col);
    memcpy(h, "\x93NUMPY\x01\x00\x76\x00", 10); /* 0x76: 118 bytes follow */
    memset(h + 10, ' ', HEADER - 11);
    memcpy(h + 10, text, (size_t)n);
    h[HEADER - 1] = '\n';
    return fseek(a->f, 0, SEEK_SET) == 0 && fwrite(h, 1, HEADER, a->f) == HEADER;
}

static bool failed(npy *a, const char *what)
{
    cli_fail(CLI_FAILED, "%s: cannot %s: %s", a->path, what, strerror(errno));
    npy_drop(a);
    return false;
}

bool npy_open(npy *a, const char *path, int32_t n_col)
{
    *a = (npy){.path = path, .n_col = n_col};
    if (path == NULL) {
        return true;
    }
    if (strcmp(path, "-") == 0 || cli_is_special(path)) {
        cli_fail(CLI_FAILED,
                 "--logits %s: the number of rows is written last, in front of them: name a "
                 "regular file",
                 path);
        return false;
    }
    const size_t cap = strlen(path) + 32;
    a->temp = malloc(cap);
    if (a->temp == NULL) {
        return failed(a, "create");
    }
    snprintf(a->temp, cap, "%s.%ld.tmp", path, (long)getpid());
    a->f = fopen(a->temp, "wbx");
    if (a->f == NULL) {
        return failed(a, "create");
    }
    return write_header(a) ? true : failed(a, "write");
}

bool npy_row(npy *a, const float *row)
{
    if (a->f == NULL) {
        return true;
    }
    a->n_row++;
    const size_t n = (size_t)a->n_col;
    return fwrite(row, sizeof *row, n, a->f) == n ? true : failed(a, "write");
}

bool npy_commit(npy *a)
{
    if (a->f == NULL) {
        return true;
    }
    if (!write_header(a) || fflush(a->f) != 0) {
        return failed(a, "write");
    }
    const bool closed = fclose(a->f) == 0;
    a->f = NULL;
    if (!closed || rename(a->temp, a->path) != 0) {
        return failed(a, "write");
    }
    free(a->temp);
    a->temp = NULL;
    return true;
}

void npy_drop(npy *a)
{
    if (a->f != NULL) {
        fclose(a->f);
    }
    if (a->temp != NULL) {
        unlink(a->temp);
        free(a->temp);
    }
    *a = (npy){0};
}
