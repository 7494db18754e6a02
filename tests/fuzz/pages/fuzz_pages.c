/* fuzz_pages.c - any order of extend, truncate and share keeps the page allocator whole.
 *
 * Four block tables over one small pool. A model beside it counts owners per page; after every operation the
 * free count agrees, no page is owned by two tables unless shared, and a refusal changes nothing. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvspan/kvspan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { N_PAGE = 13, N_TABLE = 4, WIDTH = 8 };

typedef struct model {
    int32_t table[N_TABLE][WIDTH];
    int64_t have[N_TABLE];
    int owners[N_PAGE];
} model;

static void recount(model *m)
{
    memset(m->owners, 0, sizeof m->owners);
    for (int t = 0; t < N_TABLE; t++) {
        for (int64_t i = 0; i < m->have[t]; i++) {
            const int32_t page = m->table[t][i];
            if (page < 0 || page >= N_PAGE) {
                abort();
            }
            m->owners[page]++;
        }
    }
}

static int64_t free_pages(const model *m)
{
    int64_t n = 0;
    for (int p = 0; p < N_PAGE; p++) {
        n += m->owners[p] == 0;
    }
    return n;
}

static void share(kvs_pages *pool, model *m, int from, int to)
{
    kvs_error err;
    if (from == to || m->have[to] != 0) {
        return;
    }
    if (kvs_pages_share(pool, m->table[from], m->have[from], &err) < 0) {
        abort();
    }
    memcpy(m->table[to], m->table[from], sizeof m->table[to]);
    m->have[to] = m->have[from];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    kvs_pages *pool = NULL;
    kvs_error err;
    if (kvs_pages_new(&pool, N_PAGE, &err) < 0) {
        return 0;
    }
    model m;
    memset(&m, 0, sizeof m);
    memset(m.table, 0xFF, sizeof m.table);
    for (size_t i = 0; i + 1 < size && i < 400; i += 2) {
        const int t = data[i] % N_TABLE;
        const int op = data[i] / N_TABLE % 3;
        const model before = m;
        kvs_status st = KVS_OK;
        if (op == 0) {
            st = kvs_pages_extend(pool, 2, m.table[t], WIDTH, &m.have[t],
                                  (int64_t)(int8_t)data[i + 1] * 11, &err);
        } else if (op == 1) {
            st = kvs_pages_truncate(pool, m.table[t], &m.have[t], (int8_t)data[i + 1] % (WIDTH + 2),
                                    &err);
        } else {
            share(pool, &m, t, data[i + 1] % N_TABLE);
        }
        if (st < 0 && memcmp(&before, &m, sizeof m) != 0) {
            abort();
        }
        recount(&m);
        if (free_pages(&m) != kvs_pages_available(pool)) {
            abort();
        }
    }
    kvs_pages_free(pool);
    return 0;
}
