/* wrong_kernels.h: kernels that the checking tool must not pass. */
#ifndef WRONG_KERNELS_H
#define WRONG_KERNELS_H

#include "check/check.h"

typedef struct wrong_kernel {
    const char *name;
    check_filter only; /* the class that must notice, and within how many of its cases */
    kern_variant v;
} wrong_kernel;

/* All of them. */
const wrong_kernel *wrong_kernels(int32_t *n);

#endif
