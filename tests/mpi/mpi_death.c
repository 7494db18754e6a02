/* A rank of an MPI job that dies: run by death.cmake, which reads what the others print.
 *     mpi_death HOW: rank 2 of the job
 *         between   leaves by _exit before its next call
 *         inside    leaves by _exit where it should have entered a call
 *         killed    gets a signal while all exchange large segments
 * The others must print one line, "rank R: STATUS MESSAGE", and end by themselves. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "comm/comm.h"
#include "comm/fault.h"
#include "kvspan/log.h"

enum { VICTIM = 2, TIMEOUT_MS = 1500, LARGE = 6 << 20 };

static void leave(void *ctx)
{
    (void)ctx;
    _exit(0);
}

static void *kill_soon(void *arg)
{
    (void)arg;
    const struct timespec t = {.tv_nsec = 60000000};
    nanosleep(&t, NULL);
    raise(SIGKILL);
    return NULL;
}

static kvs_status calls(comm *c, const char *how, kvs_error *err)
{
    kvs_status st = KVS_OK;
    for (int i = 0; i < 3 && st == KVS_OK; i++) {
        st = comm_barrier(c, err);
    }
    const bool victim = comm_rank(c) == VICTIM;
    if (st == KVS_OK && victim && strcmp(how, "between") == 0) {
        leave(NULL);
    }
    const comm_fault f = {.kind = COMM_FAULT_DIE, .call = 4, .die = leave};
    if (st == KVS_OK && victim && strcmp(how, "inside") == 0 &&
        comm_fault_wrap(c, &f, err) == NULL) {
        return err->code;
    }
    if (strcmp(how, "killed") != 0) {
        return st == KVS_OK ? comm_barrier(c, err) : st;
    }
    pthread_t t;
    if (victim && pthread_create(&t, NULL, kill_soon, NULL) != 0) {
        return KVS_INTERNAL;
    }
    char *send = calloc(1, LARGE);
    char *recv = calloc((size_t)comm_size(c), LARGE);
    while (st == KVS_OK && send != NULL && recv != NULL) {
        st = comm_all_gather(c, send, recv, LARGE, err);
    }
    free(send);
    free(recv);
    return st;
}

int main(int argc, char **argv)
{
    const comm_config cfg = {.timeout_ms = TIMEOUT_MS};
    kvs_error err = {0};
    comm *c = NULL;
    kvs_log_set(&(kvs_logger){0});
    if (argc != 2 || comm_mpi_open(&c, &cfg, &err) != KVS_OK) {
        fprintf(stderr, "mpi_death: %s\n", err.text);
        return 2;
    }
    const int32_t rank = comm_rank(c);
    const kvs_status st = calls(c, argv[1], &err);
    printf("rank %d: %s %s\n", rank, kvs_status_name(st), err.text);
    fflush(stdout);
    comm_close(c);
    return 0;
}
