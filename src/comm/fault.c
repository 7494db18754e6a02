/* comm/fault.c: one call of a rank goes wrong; all others pass straight through. */
#include "comm/fault.h"
#include <time.h>
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/impl.h"

struct comm_fault_state {
    comm_fault f;
};

const char *comm_fault_name(comm_fault_kind kind)
{
    static const char *const name[COMM_N_FAULT] = {"delay", "drop", "bytes", "op", "stall", "die"};
    return kind >= 0 && kind < COMM_N_FAULT ? name[kind] : "?";
}

comm *comm_fault_wrap(comm *inner, const comm_fault *f, kvs_error *err)
{
    if (f->call == 0 || f->ms < 0 || (f->kind == COMM_FAULT_DIE && f->die == NULL)) {
        err_set(
            err, KVS_INVALID,
            "fault %s of call %llu: calls count from 1, ms is not negative, die needs a function",
            comm_fault_name(f->kind), (unsigned long long)f->call);
        return NULL;
    }
    if (inner->fault != NULL) {
        err_set(err, KVS_INVALID, "rank %d has a fault already; one is the limit", inner->rank);
        return NULL;
    }
    inner->fault = mem_alloc(sizeof *inner->fault, 0);
    if (inner->fault == NULL) {
        err_set(err, KVS_NOMEM, "no memory for a fault");
        return NULL;
    }
    inner->fault->f = *f;
    return inner;
}

static void nap(int64_t ns)
{
    const struct timespec t = {.tv_sec = ns / INT64_C(1000000000),
                               .tv_nsec = ns % INT64_C(1000000000)};
    (void)nanosleep(&t, NULL);
}

static kvs_status stall(comm *c, int32_t ms)
{
    const int64_t until = clock_ns() + (int64_t)ms * INT64_C(1000000);
    while (!comm_failed(c)) {
        if (clock_ns() >= until) {
            return comm_fail(c, "rank %d has stood still for %d ms", c->rank, ms);
        }
        nap(INT64_C(1000000));
        if (c->transport->poll != NULL) {
            c->transport->poll(c);
        }
    }
    return KVS_PEER;
}

/* Every segment one byte shorter; an empty one stays, and the stated size is off by one anyway. */
static void shrink(comm *c, comm_head *head)
{
    for (int32_t p = 0; p < c->size; p++) {
        c->out[p].bytes -= c->out[p].bytes > 0;
    }
    head->bytes = head->bytes > 0 ? head->bytes - 1 : 1;
}

kvs_status comm_fault_exchange(comm *c, const comm_head *head, bool first, kvs_error *err)
{
    const comm_fault *f = &c->fault->f;
    if (head->number != f->call || (!first && f->kind != COMM_FAULT_DROP)) {
        return c->transport->exchange(c, head, first, err);
    }
    comm_head other = *head;
    switch (f->kind) {
    case COMM_FAULT_DELAY:
        nap((int64_t)f->ms * INT64_C(1000000));
        break;
    case COMM_FAULT_DROP:
        return KVS_IDLE;
    case COMM_FAULT_BYTES:
        shrink(c, &other);
        break;
    case COMM_FAULT_OP:
        other.op = (other.op + 1) % COMM_N_OP;
        break;
    case COMM_FAULT_STALL:
        return stall(c, f->ms);
    case COMM_FAULT_DIE:
        f->die(f->ctx);
        return err_set(err, KVS_INTERNAL, "a fault's die function has returned");
    case COMM_N_FAULT:
        break;
    }
    return c->transport->exchange(c, &other, first, err);
}
