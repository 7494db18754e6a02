/* none.c - the list of CUDA variants of a build without CUDA. */
#include "kern/cuda/cuda.h"

const kern_variant *cuda_variants(int32_t *n)
{
    *n = 0;
    return NULL;
}
