/* fake_dev.h - CUDA devices made of host memory, in place of the library's, for tests of comm/p2p.c and
 * comm/nccl.c on any machine. */
#ifndef TESTS_FAKE_DEV_H
#define TESTS_FAKE_DEV_H

#include <stdbool.h>
#include "dev/dev.h"

enum { FAKE_DEVICES = 4 };

typedef struct fake_dev {
    bool apart;      /* devices do not reach each other */
    bool no_memory;
    bool busy;       /* queues are never done */
    int n_live;      /* blocks */
    int reach[FAKE_DEVICES][FAKE_DEVICES];
} fake_dev;

extern fake_dev fake;

#endif
