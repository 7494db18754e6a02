/* x86/localise.c - selected positions to slots without sorting what is sorted already.
 *
 * Selections arrive in ascending order nearly always. One pass keeps the ids that this rank owns and
 * notices whether they ascend; only if not, they are sorted by radix. A second pass finds slots and
 * lanes, a third deals the slots out to their lanes in order. Divisions by the interleave are shifts.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/pool.h"
#include "kern/x86/index_x86.h"
#include "shard/shard.h"

typedef struct localise_job {
    const localise_args *a;
    shard_geom g;
    int32_t n_lane;
    int32_t shift; /* log2 of the interleave */
    _Atomic uint64_t n_bad;
} localise_job;

/* A worker's memory, each [k]. */
typedef struct localise_work {
    int32_t *id;
    int32_t *other; /* the other half of a radix pass; then slots */
    int32_t *lane;
} localise_work;

static size_t array_bytes(const localise_args *a)
{
    return ((size_t)a->k * sizeof(int32_t) + 63) & ~(size_t)63;
}

static size_t localise_scratch_avx2(const localise_args *a, const dev_queue *q)
{
    const size_t n_worker = q != NULL && q->n_worker > 1 ? (size_t)q->n_worker : 1;
    return n_worker * 3 * array_bytes(a);
}

/* Whether entry i of a row is a candidate at all: not "none", and inside the cut where there is one. */
static bool is_candidate(const localise_args *a, int64_t row, int64_t i, int32_t id)
{
    if (id == -1 || a->cut_score == NULL) {
        return id != -1;
    }
    const float score = a->score[row * a->id_stride + i];
    const float cut = a->cut_score[row];
    return score > cut || (score == cut && id <= a->cut_id[row]);
}

/* The ids of the row that this rank owns, in the order they came; *sorted: they never descend. */
static int64_t collect(const localise_job *j, int64_t row, int32_t *own, bool *sorted, uint64_t *n_bad)
{
    const localise_args *a = j->a;
    const int32_t *id = a->id + row * a->id_stride;
    const int32_t bound = a->bound[row];
    const uint32_t n_rank = (uint32_t)j->g.n;
    int64_t n_in = a->count != NULL ? a->count[row] : a->k;
    n_in = n_in > a->k ? a->k : n_in;
    int64_t n = 0;
    int32_t last = -1;
    int32_t descents = 0;
    for (int64_t i = 0; i < n_in; i++) {
        const int32_t x = id[i];
        if (!is_candidate(a, row, i, x)) {
            continue;
        }
        if (x < 0 || x >= bound) {
            ++*n_bad;
            continue;
        }
        if (((uint32_t)x >> j->shift) % n_rank == (uint32_t)j->g.rank) {
            own[n++] = x;
            descents += x < last;
            last = x;
        }
    }
    *sorted = descents == 0;
    return n;
}

/* Sorts n ids >= 0; the result is in v. */
static void radix_sort(int32_t *v, int32_t *other, int64_t n)
{
    for (int32_t shift = 0; shift < 32; shift += 8) {
        int64_t at[257] = {0};
        for (int64_t i = 0; i < n; i++) {
            at[((uint32_t)v[i] >> shift & 0xFFu) + 1]++;
        }
        for (int32_t b = 0; b < 256; b++) {
            at[b + 1] += at[b];
        }
        for (int64_t i = 0; i < n; i++) {
            other[at[(uint32_t)v[i] >> shift & 0xFFu]++] = v[i];
        }
        memcpy(v, other, (size_t)n * sizeof *v);
    }
}

static void localise_task(void *ctx, int64_t row, int i_worker)
{
    localise_job *j = ctx;
    const localise_args *a = j->a;
    const size_t step = array_bytes(a);
    uint8_t *p = (uint8_t *)a->scratch + (size_t)i_worker * 3 * step;
    const localise_work w = {(int32_t *)(void *)p, (int32_t *)(void *)(p + step),
                             (int32_t *)(void *)(p + 2 * step)};
    const int32_t req = a->row_req[row];
    const int32_t *table = req >= 0 && req < a->n_req ? a->table + req * a->table_stride : NULL;
    uint64_t n_bad = 0;
    bool sorted = true;
    const int64_t n_own = collect(j, row, w.id, &sorted, &n_bad);
    if (!sorted) {
        radix_sort(w.id, w.other, n_own);
    }
    int32_t count[KVS_LANES] = {0};
    const uint32_t n_rank = (uint32_t)j->g.n;
    const uint32_t inside = (1u << j->shift) - 1u;
    int32_t last = -1;
    int64_t n = 0;
    for (int64_t i = 0; i < n_own; i++) {
        const uint32_t x = (uint32_t)w.id[i];
        const uint32_t turn = (x >> j->shift) / n_rank; /* complete rounds of all ranks */
        const kvs_local l = {(int64_t)turn << j->shift | (int64_t)(x & inside)};
        const int64_t slot = table != NULL ? shard_slot_checked(table, a->table_width, a->n_slot, l).v
                                           : SHARD_BAD_SLOT;
        if (w.id[i] == last || slot < 0 || slot > INT32_MAX) {
            n_bad++;
            continue;
        }
        last = w.id[i];
        w.other[n] = (int32_t)slot;
        w.lane[n] = (int32_t)(turn % (uint32_t)j->n_lane);
        count[w.lane[n++]]++;
    }
    int64_t at[KVS_LANES] = {0};
    for (int32_t l = 1; l < j->n_lane; l++) {
        at[l] = at[l - 1] + count[l - 1];
    }
    int32_t *slots = a->slots + row * a->slots_stride;
    for (int64_t i = 0; i < n; i++) {
        slots[at[w.lane[i]]++] = w.other[i];
    }
    for (int64_t i = n; i < a->k; i++) {
        slots[i] = -1;
    }
    memcpy(a->lane_count + row * j->n_lane, count, (size_t)j->n_lane * sizeof *count);
    atomic_fetch_add_explicit(&j->n_bad, n_bad, memory_order_relaxed);
}

static void localise_avx2(const localise_args *a, dev_queue *q)
{
    localise_job j = {.a = a, .g = {a->dcp, a->interleave, a->rank}};
    j.n_lane = shard_n_lane(j.g);
    while ((1 << j.shift) < a->interleave) {
        j.shift++;
    }
    pool_run(q != NULL ? q->pool : NULL, localise_task, &j, a->n_row);
    if (a->n_bad_id != NULL) {
        *a->n_bad_id += atomic_load(&j.n_bad);
    }
}

void localise_apply_avx2(kern_table *t)
{
    t->localise = localise_avx2;
    t->localise_scratch = localise_scratch_avx2;
}
