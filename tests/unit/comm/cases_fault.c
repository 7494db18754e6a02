/* cases_fault.c: one rank misbehaves in one call; what every rank must then see. */
#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "cases.h"

enum { BYTES = 64, FLOATS = 16 };

/* One collective of each kind with small data; a split's group is closed at once. */
kvs_status case_call(comm *c, int32_t op, kvs_error *err)
{
    unsigned char a[BYTES * RANKS_MAX];
    unsigned char b[BYTES * RANKS_MAX];
    float f[FLOATS * RANKS_MAX];
    float g[FLOATS];
    memset(a, 7, sizeof a);
    memset(f, 0, sizeof f);
    switch (op) {
    case COMM_OP_ALL_GATHER:
        return comm_all_gather(c, a, b, BYTES, err);
    case COMM_OP_ALL_TO_ALL:
        return comm_all_to_all(c, a, b, BYTES, err);
    case COMM_OP_REDUCE_SCATTER:
        return comm_reduce_scatter(c, f, g, FLOATS, err);
    case COMM_OP_ALL_REDUCE:
        return comm_all_reduce(c, f, FLOATS, err);
    case COMM_OP_BROADCAST:
        return comm_broadcast(c, a, BYTES, 0, err);
    case COMM_OP_BARRIER:
        return comm_barrier(c, err);
    default: {
        comm *sub = NULL;
        const kvs_status st = comm_split(c, 0, 0, &sub, err);
        comm_close(sub);
        return st;
    }
    }
}

void case_ended(rank_job *job, const char *text)
{
    const int64_t begin = clock_ns();
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        memset(&job->err, 0, sizeof job->err);
        EXPECT_FAIL(job, case_call(job->c, op, &job->err), KVS_PEER, text);
    }
    const comm_field field = {"page", "64"};
    EXPECT_FAIL(job, comm_handshake(job->c, &field, 1, &job->err), KVS_PEER, text);
    EXPECT_FAIL(job, comm_agree(job->c, KVS_OK, &job->err), KVS_PEER, text);
    EXPECT(job, comm_failed(job->c));
    EXPECT(job, clock_ns() - begin < DEADLINE_MS * INT64_C(1000000));
}

static bool is_late(comm_fault_kind kind)
{
    return kind == COMM_FAULT_DELAY || kind == COMM_FAULT_STALL || kind == COMM_FAULT_DIE;
}

void fault_want(fault_case *k)
{
    if (is_late(k->fault.kind)) {
        snprintf(k->want, sizeof k->want, "rank %d more than %d ms late for %s", k->rank, LATE_MS,
                 comm_op_name(k->op));
        return;
    }
    const char *called = comm_op_name(k->op);
    if (k->fault.kind == COMM_FAULT_DROP) {
        called = "barrier (call 3)";
    } else if (k->fault.kind == COMM_FAULT_OP) {
        called = comm_op_name((k->op + 1) % COMM_N_OP);
    }
    /* Rank 0 is what the others are compared with, so the message names it second. */
    snprintf(k->want, sizeof k->want, k->rank == 0 ? ", rank %d %s" : "rank %d called %s", k->rank,
             called);
}

void case_fault(rank_job *job)
{
    fault_case *k = job->ctx;
    comm_set_timeout(job->c, LONG_MS);
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    comm_set_timeout(job->c, is_late(k->fault.kind) ? LATE_MS : LONG_MS);
    if (job->rank == k->rank) {
        EXPECT(job, comm_fault_wrap(job->c, &k->fault, &job->err) == job->c);
    }
    kvs_status st = case_call(job->c, k->op, &job->err);
    if (job->rank == k->rank && k->fault.kind == COMM_FAULT_DROP) {
        EXPECT(job, st == (k->op == COMM_OP_SPLIT ? KVS_IDLE : KVS_OK));
        st = comm_barrier(job->c, &job->err);
    }
    EXPECT(job, st == KVS_PEER);
    if (!rank_says(job, k->want)) {
        rank_note(job, __FILE__, __LINE__, "%s fault in %s: \"%s\" lacks \"%s\"",
                  comm_fault_name(k->fault.kind), comm_op_name(k->op), job->err.text, k->want);
    }
    atomic_fetch_add(&k->n_named, 1);
    case_ended(job, k->want);
}
