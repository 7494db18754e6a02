/* fake_dev.h - CUDA devices made of host memory, in place of the library's, for tests of comm/p2p.c and
 * comm/nccl.c on any machine. */
#ifndef TESTS_FAKE_DEV_H
#define TESTS_FAKE_DEV_H

#include <stdbool.h>
#include "dev/dev.h"

/* Devices of the host; a process sees some of them, numbered from 0, as with CUDA_VISIBLE_DEVICES. */
enum { FAKE_DEVICES = 4 };

typedef struct fake_dev {
    bool apart;      /* devices do not reach each other */
    bool no_memory;
    bool busy;       /* queues are never done */
    int n_live;      /* blocks */
    int n_visible;   /* 0: all are visible, in their order */
    int visible[FAKE_DEVICES]; /* which of them each number is */
    const char *host; /* name of the host; NULL: "here" */
    int reach[FAKE_DEVICES][FAKE_DEVICES];
} fake_dev;

extern fake_dev fake;

#endif
