/* fake_processes.h - exchanges on fake devices between processes: launches that wait, through the memory of
 * fake_ipc.h. */
#ifndef FAKE_PROCESSES_H
#define FAKE_PROCESSES_H

#include "kern/exchange.h"

/* Whether the rank's peers are other processes; then its exchange has been made, or given up. */
int fake_process_exchange(const exchange_args *a, dev_queue *q);
int fake_process_merge(const exchange_merge_args *a, dev_queue *q);

/* The reference's merge of a rank's heads, for both kinds of fake exchanges (fake_exchange.c). out_in, lse_in:
 * [n_rank] partials, with their strides from row to row. */
void fake_merge(const exchange_merge_args *a, const float *const *out_in, int64_t out_row, const float *const *lse_in,
                int64_t lse_row, dev_queue *q);

#endif
