/* fake_processes.h - exchanges on fake devices between processes: launches that wait, through the memory of
 * fake_ipc.h. */
#ifndef FAKE_PROCESSES_H
#define FAKE_PROCESSES_H

#include "kern/exchange.h"

/* Whether the rank's peers are other processes; then its exchange has been made, or given up. */
int fake_process_exchange(const exchange_args *a, dev_queue *q);
int fake_process_merge(const exchange_merge_args *a, dev_queue *q);

#endif
