/* comm/fault.h: a rank that misbehaves on purpose, for tests and `kvspan check --comm`.
 *
 * A fault sits in front of one rank's transport, so what its peers see is what they would see of a
 * rank that is slow, skips a call, disagrees about one or is gone; the code under test is the code
 * that runs without faults. A rank has at most one fault. Groups split from it have none. */
#ifndef KVS_COMM_FAULT_H
#define KVS_COMM_FAULT_H

#include "comm/comm.h"

typedef enum comm_fault_kind {
    COMM_FAULT_DELAY, /* sleeps `ms`, then enters                                                  */
    COMM_FAULT_DROP, /* does not enter: returns KVS_OK, buffers untouched (comm_split: KVS_IDLE)  */
    COMM_FAULT_BYTES, /* enters with another size                                                  */
    COMM_FAULT_OP, /* enters as another operation                                               */
    COMM_FAULT_STALL, /* sits without entering until the group has ended here, at most `ms`, and
                         returns KVS_PEER                                                          */
    COMM_FAULT_DIE, /* calls die(ctx), which must not return (pthread_exit, _exit)               */
    COMM_N_FAULT
} comm_fault_kind;

typedef struct comm_fault {
    comm_fault_kind kind;
    uint64_t
        call; /* the call of this rank that it befalls, from 1                                */
    int32_t ms;
    void (*die)(void *ctx);
    void *ctx;
} comm_fault;

/* "delay", "drop", ... */
const char *comm_fault_name(comm_fault_kind kind);

/* Puts *f (copied) in front of `inner` and returns it, as a comm that misbehaves; NULL with err
 * filled on failure, `inner` then being as before. It is closed like any other. */
comm *comm_fault_wrap(comm *inner, const comm_fault *f, kvs_error *err);

#endif
