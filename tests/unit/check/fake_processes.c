/* fake_processes.c - see fake_processes.h. A message lies in the cells as it is; its head, which is stored last, is the
 * flag. */
#include "unit/check/fake_processes.h"

#include <signal.h>
#include <string.h>
#include "base/clock.h"
#include "unit/check/fake_cuda.h"
#include "unit/comm/fake_ipc.h"

static int is_between_processes(const wire *w)
{
    const int32_t other = w->rank == 0 ? w->n_rank - 1 : 0;
    return fake_ipc_is_mapped(w->area[other]);
}

static wire_control *control(const wire *w, int32_t rank)
{
    return (wire_control *)(void *)w->area[rank];
}

static wire_head *head(const wire *w, uint32_t epoch, int32_t at, int32_t from)
{
    return (wire_head *)(void *)(w->area[at] + wire_head_at(w->n_rank, epoch, from));
}

static uint8_t *cells(const wire *w, uint32_t epoch, int32_t at, int32_t from)
{
    return w->area[at] + wire_cell_at(w->n_rank, w->n_cell, epoch, from);
}

static uint64_t fault_of(const wire *w)
{
    return __atomic_load_n(&control(w, w->rank)->fault, __ATOMIC_ACQUIRE);
}

static int fail(const wire *w, wire_fault code, int32_t about, uint32_t epoch)
{
    const uint64_t f = WIRE_FAULT(code, about, w->rank, epoch);
    for (int32_t k = 0; k < w->n_rank; k++) { /* the own one first */
        uint64_t sound = 0;
        wire_control *c = control(w, (w->rank + k) % w->n_rank);
        if (!__atomic_compare_exchange_n(&c->fault, &sound, f, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) && k == 0) {
            break;
        }
    }
    return 0;
}

static void send_head(const wire *w, uint32_t epoch, int32_t to, wire_head h)
{
    wire_head *at = head(w, epoch, to, w->rank);
    at->what = h.what;
    at->n_row = h.n_row;
    at->words = h.words;
    __atomic_store_n(&at->epoch, epoch, __ATOMIC_RELEASE);
}

/* Whether every message of this exchange has come, and is what the own one is. */
static int receive(const wire *w, uint32_t epoch, wire_head mine)
{
    const int64_t limit = fake.limit_ms > 0 ? (int64_t)fake.limit_ms * 1000000 : (int64_t)w->limit_ns;
    const int64_t until = clock_ns() + limit;
    for (int32_t p = 0; p < w->n_rank; p++) {
        const wire_head *h = head(w, epoch, w->rank, p);
        while (__atomic_load_n(&h->epoch, __ATOMIC_ACQUIRE) != epoch) {
            const struct timespec t = {.tv_sec = 0, .tv_nsec = 20000};
            if (fault_of(w) != 0) {
                return 0;
            }
            if (clock_ns() > until) {
                return fail(w, WIRE_LATE, p, epoch);
            }
            nanosleep(&t, NULL);
        }
        if (!fake.deaf && (h->what != mine.what || h->n_row != mine.n_row || h->words != mine.words)) {
            return fail(w, WIRE_MISMATCH, p, epoch);
        }
    }
    return fault_of(w) == 0;
}

static uint32_t begin(const wire *w)
{
    static int32_t n;
    if (++n == fake.dies_at) {
        raise(SIGKILL);
    }
    return fault_of(w) == 0 ? wire_epoch(control(w, w->rank)->done) : 0;
}

/* ---- messages ------------------------------------------------------------------------------------ */

static void pack(const exchange_args *a, int32_t to, uint8_t *at)
{
    for (int32_t k = 0; k < a->n_part; k++) {
        const exchange_part *p = &a->part[k];
        for (int32_t row = 0; row < a->n_row; row++, at += p->bytes) {
            memcpy(at, (const uint8_t *)p->src + to * p->src_rank + row * p->src_row, (size_t)p->bytes);
        }
    }
}

static void unpack(const exchange_args *a, int32_t from, const uint8_t *at)
{
    for (int32_t k = 0; k < a->n_part; k++) {
        const exchange_part *p = &a->part[k];
        for (int32_t row = 0; row < a->n_row; row++, at += p->bytes) {
            memcpy((uint8_t *)p->dst + from * p->dst_rank + row * p->dst_row, at, (size_t)p->bytes);
        }
    }
}

int fake_process_exchange(const exchange_args *a, dev_queue *q)
{
    const wire *w = &a->w;
    if (!is_between_processes(w)) {
        return 0;
    }
    if (exchange_refuses(a) != NULL) {
        dev_queue_fail(q, KVS_UNSUPPORTED, exchange_refuses(a));
        return 1;
    }
    const wire_head h = {(uint32_t)a->op, (uint32_t)a->n_row, (uint32_t)(exchange_bytes(a) / 4), 0};
    const uint32_t epoch = begin(w);
    for (int32_t p = 0; p < w->n_rank && epoch > 0; p++) {
        pack(a, p, cells(w, epoch, p, w->rank));
        send_head(w, epoch, p, h);
    }
    if (epoch > 0 && receive(w, epoch, h)) {
        for (int32_t p = 0; p < w->n_rank; p++) {
            unpack(a, p, cells(w, epoch, w->rank, p));
        }
        if (fake.wrong && a->n_part > 0 && a->n_row > 0) {
            ((uint8_t *)a->part[0].dst)[3] ^= 1;
        }
        control(w, w->rank)->done += WIRE_TURN;
    }
    return 1;
}

/* ---- partials ------------------------------------------------------------------------------------ */

static void pack_heads(const exchange_merge_args *a, int32_t to, float *at)
{
    const int32_t local = a->n_head / a->w.n_rank;
    const size_t row_values = (size_t)local * 512;
    for (int32_t row = 0; row < a->n_row; row++, at += row_values) {
        memcpy(at, a->part + row * a->part_row + (int64_t)to * local * 512, row_values * sizeof *at);
    }
    for (int32_t row = 0; row < a->n_row; row++, at += local) {
        memcpy(at, a->part_lse + row * a->lse_row + to * local, (size_t)local * sizeof *at);
    }
}

static void merge(const exchange_merge_args *a, uint32_t epoch, dev_queue *q)
{
    const float *out_in[WIRE_MAX_RANK];
    const float *lse_in[WIRE_MAX_RANK];
    const int32_t local = a->n_head / a->w.n_rank;
    for (int32_t p = 0; p < a->w.n_rank; p++) {
        out_in[p] = (const float *)(const void *)cells(&a->w, epoch, a->w.rank, p);
        lse_in[p] = out_in[p] + (int64_t)a->n_row * local * 512;
    }
    fake_merge(a, out_in, (int64_t)local * 512, lse_in, local, q);
}

int fake_process_merge(const exchange_merge_args *a, dev_queue *q)
{
    const wire *w = &a->w;
    if (!is_between_processes(w)) {
        return 0;
    }
    if (exchange_merge_refuses(a) != NULL) {
        dev_queue_fail(q, KVS_UNSUPPORTED, exchange_merge_refuses(a));
        return 1;
    }
    const wire_head h = {EXCHANGE_PARTIAL, (uint32_t)a->n_row, (uint32_t)(exchange_merge_bytes(a) / 4), 0};
    const uint32_t epoch = begin(w);
    for (int32_t p = 0; p < w->n_rank && epoch > 0; p++) {
        pack_heads(a, p, (float *)(void *)cells(w, epoch, p, w->rank));
        send_head(w, epoch, p, h);
    }
    if (epoch > 0 && receive(w, epoch, h)) {
        merge(a, epoch, q);
        control(w, w->rank)->done += WIRE_TURN;
    }
    return 1;
}
