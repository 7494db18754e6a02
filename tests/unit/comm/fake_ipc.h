/* fake_ipc.h - memory of fake devices that processes of a test share, in place of CUDA IPC: files in memory, found by
 * other processes through /proc. As CUDA does, it names whole units only and gives a process no second view of its own. */
#ifndef TESTS_FAKE_IPC_H
#define TESTS_FAKE_IPC_H

#include <stdbool.h>
#include "dev/dev.h"

typedef struct fake_ipc_state {
    bool dies_exporting, dies_importing; /* the process ends there, as by a signal */
    bool refuses;                        /* import fails */
    int let_go_ms;                       /* how long letting go of a block takes */
    int n_mapped;                        /* blocks of other processes */
    int n_early;                         /* own blocks that were freed while others had them mapped */
} fake_ipc_state;

extern fake_ipc_state fake_ipc;

/* Zero bytes; NULL where the size is not a multiple of DEV_SHARED_UNIT. */
void *fake_ipc_alloc(size_t bytes);
/* Whether it was such a block. */
bool fake_ipc_free(void *p);
/* Whether p is memory of another process. */
bool fake_ipc_is_mapped(const void *p);

#endif
