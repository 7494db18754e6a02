/* comm/sum.c: the sum over ranks, in an order fixed by the number of ranks.
 *
 * n = 1, 2, 4, 8: level by level, a[r] += a[r + half] for r < half, half = n/2, n/4, ... 1; else
 * a[0] + a[1] + a[2] + ... . Blocks keep the additions of a level in registers or the nearest
 * cache; every element sees the same operations in the same order wherever it lies in the array,
 * and nothing here may be reassociated (no fast-math). */
#include <string.h>
#include "comm/impl.h"

enum { BLOCK = 128 };

static void add(float *restrict a, const float *restrict b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        a[i] += b[i];
    }
}

static void sum_tree(float *dst, const float *const *src, int32_t n_rank, size_t at, size_t n)
{
    float acc[4][BLOCK];
    int32_t half = n_rank / 2;
    for (int32_t r = 0; r < half; r++) {
        memcpy(acc[r], src[r] + at, n * sizeof(float));
        add(acc[r], src[r + half] + at, n);
    }
    for (half /= 2; half > 0; half /= 2) {
        for (int32_t r = 0; r < half; r++) {
            add(acc[r], acc[r + half], n);
        }
    }
    memcpy(dst + at, acc[0], n * sizeof(float));
}

static void sum_in_order(float *dst, const float *const *src, int32_t n_rank, size_t at, size_t n)
{
    float acc[BLOCK];
    memcpy(acc, src[0] + at, n * sizeof(float));
    for (int32_t r = 1; r < n_rank; r++) {
        add(acc, src[r] + at, n);
    }
    memcpy(dst + at, acc, n * sizeof(float));
}

void comm_sum(float *dst, const float *const *src, int32_t n_rank, size_t n)
{
    const bool tree = n_rank == 2 || n_rank == 4 || n_rank == 8;
    for (size_t at = 0; at < n; at += BLOCK) {
        const size_t len = n - at < BLOCK ? n - at : BLOCK;
        if (tree) {
            sum_tree(dst, src, n_rank, at, len);
        } else {
            sum_in_order(dst, src, n_rank, at, len);
        }
    }
}
