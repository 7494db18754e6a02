/* check/comm_cuda.h: `kvspan check --comm --device cuda`: exchanges between CUDA devices.
 *
 * Ranks lie on the devices the process sees in turn, so that one device is enough to run all of it; more
 * ranks than devices share them. Where several processes call it together (check_comm.h), each is a rank, on the next
 * device that it sees for each process of its host before it, and the one of rank 0 reports. Peer memory (kern/exchange.h over comm/p2p.h): every message, form and
 * number of ranks against a simulation on the host, partials against the reference's merge, results that attention sends (by
 * the ranks of one process) against those that a merge does, messages in graphs that are replayed, and each fault a rank can
 * have. NCCL where each rank can have a device and there is NCCL. */
#ifndef KVS_CHECK_COMM_CUDA_H
#define KVS_CHECK_COMM_CUDA_H

#include <stdbool.h>
#include "base/err.h"
#include "base/rng.h"
#include "check/check_comm.h"
#include "comm/p2p.h"
#include "kern/exchange.h"

/* As check_comm_run. */
kvs_status check_comm_cuda(const check_comm_config *cfg, kvs_error *err);

/* ---- private to comm_cuda*.c, comm_nccl.c and benches of exchanges ------------------------------------------------------ */

enum {
    GPU_POISON = 0xA5,
    GPU_TIMEOUT_MS = 300,     /* of ranks that are late on purpose */
    GPU_PATIENT_MS = 30000,   /* of ranks that are not */
    GPU_JOB_PATIENT_MS = 10000, /* the same of processes, of which one may have been ended */
    GPU_MAX_BLOCK = 512,
    GPU_REPS = 4,  /* of an exchange of few rows */
    GPU_LOCAL = 3  /* heads of a rank whose partials are merged */
};

typedef struct gpu_run {
    const check_comm_config *cfg;
    check_comm_totals totals;
    comm *job;        /* of the processes that check together; NULL: this one is alone */
    int32_t device;   /* of this process in a job */
    int32_t n_device; /* that there are; in a job, that its processes have */
    int32_t n_sm;     /* of the first */
    int32_t timeout_ms; /* of ranks that are late on purpose */
    uint64_t n_case;
    char first[320]; /* failed row */
} gpu_run;

/* Hands a line over; in a job, rank 0 does. */
void gpu_line(gpu_run *r, const char *line);
/* Formats a row, counts it and hands it over; wrong NULL or empty: it passed; skip: it was left out. */
void gpu_row(gpu_run *r, const char *what, const char *wrong, const char *tail);
void gpu_skip(gpu_run *r, const char *what, const char *why);

/* "transport=p2p n=2 devices=1", and in a job over what. */
void gpu_group_text(const gpu_run *r, int32_t n, int32_t devices, char *text, size_t cap);

/* A group of ranks, each with a queue of its own. In a job it has one of them, and functions that are asked to do
 * something for another do nothing. */
typedef struct gpu_world {
    p2p *g;
    comm *host;   /* of a job; NULL: all ranks are here */
    int32_t here; /* the rank of a job's process */
    int32_t n;
    int32_t device[WIRE_MAX_RANK];
    dev_queue queue[WIRE_MAX_RANK];
    void *block[GPU_MAX_BLOCK];
    int32_t block_rank[GPU_MAX_BLOCK];
    int32_t n_block;
} gpu_world;

/* spread: rank r on device r modulo their number; else all on device 0. max_bytes: of a message. */
kvs_status gpu_open(gpu_world *w, int32_t n, int32_t n_device, bool spread, int64_t max_bytes,
                    int32_t timeout_ms, kvs_error *err);
/* The same for the ranks of a job. */
kvs_status gpu_open_job(gpu_world *w, const gpu_run *r, int64_t max_bytes, int32_t timeout_ms, kvs_error *err);
void gpu_close(gpu_world *w);
/* Closes it after st. In a job a failure ends the others' group and the job first, with its reason: they may be waiting
 * in a kernel or for what this process has to say, and do not fail with it. */
void gpu_end(gpu_world *w, const gpu_run *r, kvs_status st, const kvs_error *err);
bool gpu_is_here(const gpu_world *w, int32_t rank);
/* Memory of a rank's device that goes with the world; NULL for a rank that is not here. */
kvs_status gpu_alloc(gpu_world *w, int32_t rank, size_t bytes, void **out, kvs_error *err);
void gpu_put(gpu_world *w, int32_t rank, void *dst, const void *src, size_t bytes);
void gpu_get(gpu_world *w, int32_t rank, void *dst, const void *src, size_t bytes);
void gpu_fill(gpu_world *w, int32_t rank, void *dst, int byte, size_t bytes);
/* Frees its blocks from the one of this number on. */
void gpu_free_from(gpu_world *w, int32_t block);
/* Why the group of a rank that is here has ended; nothing while it is sound. */
void gpu_check_sound(gpu_world *w, char *wrong, size_t cap);

/* What messages hold: words of which each differs from exchange to exchange, or many of the cells that a wire has
 * a meaning of its own for. */
typedef enum gpu_content { GPU_WORDS, GPU_RESERVED, GPU_N_CONTENT } gpu_content;
uint64_t gpu_next_word(uint64_t x);
void gpu_fill_words(void *dst, size_t bytes, gpu_content kind, uint64_t seed);

/* Enqueues what ranks do: those that share a device by one launch, on the queue of the first of them; or
 * (alone) each on its own. skip: a rank that does not come; -1: all come. */
void gpu_exchange(gpu_world *w, const exchange_args *a, int32_t skip, bool alone);
void gpu_merge(gpu_world *w, const exchange_merge_args *a);
/* The launch that rank `lead` is the first of, where there is one. */
int32_t gpu_ranks_led_by(gpu_world *w, int32_t lead, int32_t *list); /* how many; list: [WIRE_MAX_RANK] */
void gpu_exchange_led_by(gpu_world *w, const exchange_args *a, int32_t lead);
void gpu_merge_led_by(gpu_world *w, const exchange_merge_args *a, int32_t lead);
/* Records what `enqueue` does, led by each rank, into a graph per rank, one after the other (a thread records
 * one at a time); graphs of ranks that lead nothing are empty. */
kvs_status gpu_record(gpu_world *w, void (*enqueue)(gpu_world *w, int32_t lead, void *ctx), void *ctx,
                      dev_graph *g, kvs_error *err);
void gpu_launch(gpu_world *w, const dev_graph *g, int32_t rank);
/* Waits for all queues. */
kvs_status gpu_sync(gpu_world *w, kvs_error *err);

/* Opens the job that the process belongs to, if any, finds its device and says what it is. */
kvs_status gpu_job_open(gpu_run *r, dev_cuda_info *info, kvs_error *err);
/* Between the processes of a job, nothing without one: the first text that is not empty becomes that of all; all have
 * come; the largest time. */
kvs_status gpu_share(const gpu_run *r, char *text, size_t cap, kvs_error *err);
kvs_status gpu_meet(const gpu_run *r, kvs_error *err);
kvs_status gpu_slowest(const gpu_run *r, double *ms, kvs_error *err);

kvs_status gpu_check_data(gpu_run *r, int32_t n, bool spread, kvs_error *err);
kvs_status gpu_check_partials(gpu_run *run, gpu_world *w, gpu_content kind, int32_t n_row, int32_t type, char *wrong,
                              size_t cap, kvs_error *err);
kvs_status gpu_check_graph(gpu_run *r, int32_t n, bool spread, kvs_error *err);
kvs_status gpu_check_sent(gpu_run *r, kvs_error *err);
kvs_status gpu_check_faults(gpu_run *r, int32_t n, kvs_error *err);
/* What the processes of a job check. */
kvs_status gpu_check_job(gpu_run *r, kvs_error *err);
kvs_status gpu_check_nccl(gpu_run *r, kvs_error *err);

#endif
