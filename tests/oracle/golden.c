/* golden.c: the reader of golden.h. Checks every length against the file, so that a damaged file is
 * a message and no crash. */
#include "oracle/golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ARRAYS = 1024, MAX_NAME = 64 };

typedef struct record {
    char name[MAX_NAME];
    golden_array array;
} record;

struct golden {
    int n;
    void *data[MAX_ARRAYS];
    record list[MAX_ARRAYS];
};

static int read_exact(FILE *f, void *out, size_t bytes)
{
    return fread(out, 1, bytes, f) == bytes ? 0 : -1;
}

/* 1: a record was read, 0: the file ended before it, -1: it is damaged. */
static int read_record(FILE *f, record *r, void **data)
{
    uint32_t len, type, n_dim;
    if (fread(&len, sizeof len, 1, f) != 1)
        return feof(f) ? 0 : -1;
    memset(r, 0, sizeof *r);
    if (len >= MAX_NAME || read_exact(f, r->name, len) != 0 ||
        read_exact(f, &type, sizeof type) != 0 || read_exact(f, &n_dim, sizeof n_dim) != 0 ||
        type > 1 || n_dim > 4)
        return -1;
    golden_array *const a = &r->array;
    a->type = (int)type;
    a->n_dim = (int)n_dim;
    a->n = 1;
    for (int i = 0; i < a->n_dim; i++) {
        if (read_exact(f, &a->dim[i], sizeof a->dim[i]) != 0 || a->dim[i] < 0 ||
            a->dim[i] > (INT64_C(1) << 24) / (a->n > 0 ? a->n : 1))
            return -1;
        a->n *= a->dim[i];
    }
    *data = malloc((size_t)a->n * 4 + 1);
    if (*data == NULL || read_exact(f, *data, (size_t)a->n * 4) != 0)
        return -1;
    a->f32 = type == 0 ? *data : NULL;
    a->i32 = type == 1 ? *data : NULL;
    return 1;
}

golden *golden_open(const char *name, char *msg, size_t cap)
{
    char path[4096], magic[8];
    snprintf(path, sizeof path, "%s/golden/%s.bin", ORACLE_DIR, name);
    FILE *const f = fopen(path, "rb");
    golden *const g = calloc(1, sizeof *g);
    int rc =
        f != NULL && g != NULL && read_exact(f, magic, 8) == 0 && memcmp(magic, "KVSGOLD1", 8) == 0
            ? 1
            : -1;
    while (rc == 1 && g->n < MAX_ARRAYS) {
        rc = read_record(f, &g->list[g->n], &g->data[g->n]);
        g->n += rc == 1 || g->data[g->n] != NULL;
    }
    if (f != NULL)
        fclose(f);
    if (rc == 0)
        return g;
    snprintf(msg, cap, "%s: missing or damaged", path);
    golden_close(g);
    return NULL;
}

void golden_close(golden *g)
{
    if (g == NULL)
        return;
    for (int i = 0; i < g->n; i++)
        free(g->data[i]);
    free(g);
}

golden_array golden_at(const golden *g, int i, const char **name)
{
    if (i >= g->n)
        return (golden_array){.n_dim = -1};
    *name = g->list[i].name;
    return g->list[i].array;
}

golden_array golden_get(const golden *g, const char *name)
{
    for (int i = 0; i < g->n; i++)
        if (strcmp(g->list[i].name, name) == 0)
            return g->list[i].array;
    return (golden_array){.n_dim = -1};
}
