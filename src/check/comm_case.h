/* check/comm_case.h: one case of `kvspan check --comm`, as each rank of it sees it; private to
 * check_comm.c, comm_data.c and comm_fault.c. */
#ifndef KVS_CHECK_COMM_CASE_H
#define KVS_CHECK_COMM_CASE_H

#include <stdbool.h>
#include "base/err.h"
#include "comm/comm.h"

/* Rows that are not one of the collectives. */
enum { CASE_HANDSHAKE = COMM_N_OP, CASE_AGREE, CASE_N_OP };

/* What is moved. */
typedef enum case_size {
    SIZE_ZERO,
    SIZE_ONE,
    SIZE_ODD,
    SIZE_LARGE,
    SIZE_IN_PLACE,
    SIZE_UNEVEN, /* ranks own different amounts, some nothing */
    SIZE_N
} case_size;

/* What goes wrong on one rank, or on none. */
typedef enum case_fault {
    CASE_SOUND,
    CASE_SLOW,   /* late by less than the time-out: no failure */
    CASE_ORDER,  /* the ranks come in reverse, one by one: no failure */
    CASE_LATE,   /* late by more than the time-out */
    CASE_STALL,  /* stops for good */
    CASE_DIE,    /* its thread ends inside the call */
    CASE_DROP,   /* skips the call, then goes on */
    CASE_BYTES,  /* calls with another size */
    CASE_OP,     /* calls another operation */
    CASE_CLOSE,  /* closes its end instead */
    CASE_ABORT,  /* ends the group instead */
    CASE_NULL,   /* calls with a buffer that is NULL, or a root that does not exist */
    CASE_VALUE,  /* handshake: another value */
    CASE_NAME,   /* handshake: another field */
    CASE_COUNT,  /* handshake: a field less */
    CASE_STATUS, /* agree: its own work failed */
    CASE_N_FAULT
} case_fault;

/* Plain data: gathered from MPI processes as bytes. */
typedef struct case_verdict {
    uint64_t n_call;
    uint64_t bytes;   /* sent */
    double ms;        /* in the call of the fault */
    int32_t failed;   /* the call of the fault failed */
    char wrong[160];  /* the first thing that was; empty: the rank passes */
    char reason[176]; /* why the group ended, as this rank was told */
} case_verdict;

typedef struct comm_case {
    int32_t op;
    case_size size;
    case_fault fault;
    int32_t victim; /* rank that has the fault */
    uint64_t seed;
    bool quick;
    int32_t timeout_ms; /* of late ranks */
    comm *c;            /* NULL once this rank has closed it */
    int32_t rank;
    int32_t n;
    case_verdict v;
} comm_case;

/* A time-out that no sound run reaches. */
enum { PATIENT_MS = 120000 };

const char *case_op_name(int32_t op);
const char *case_size_name(case_size size);
const char *case_fault_name(case_fault fault);

/* Notes what was wrong unless something is noted already. */
void case_wrong(comm_case *k, const char *fmt, ...) ERR_PRINTF(2, 3);

/* Whether the op has cases of that size. */
bool data_has(int32_t op, case_size size);
/* Runs k->op over the sizes of k->size and compares with the simulation. */
void data_run(comm_case *k);

/* Whether the op can have that fault on a group of n; *why says why not. */
bool fault_has(int32_t op, case_fault fault, const char *transport, int32_t n, const char **why);
void fault_run(comm_case *k);
/* Whether all ranks were told the same, and it names the rank and what it did. Writes what was
 * wrong into v[0].wrong. */
void fault_compare(const comm_case *k, case_verdict *v);

#endif
