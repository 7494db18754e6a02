/* kern/gemm.h - contract of products with a weight matrix: y = x W^T (one to thousands of rows of x).
 *
 * A weight is stored [n_out, n_in], inner dimension contiguous, in its checkpoint's own type and is dequantised
 * in the kernel. What a product multiplies:
 *   f32   x f32 with w f32
 *   bf16  x bf16 with w bf16
 *   fp8   x bf16 with bf16_rne(f32(e4m3 code) * scale), one f32 scale per 128 x 128 block of the WHOLE tensor;
 *         a slice says where it starts in it
 * Products accumulate in f32 (the reference: double, rounded to f32 once); y is f32.
 *
 * Row invariance: an output depends on its row of x and its row of w only. It does not depend on how many rows
 * or outputs share the call, on where the slice starts, on threads: the order along n_in is fixed per variant,
 * and matrix-vector and matrix-matrix forms share it. A code of NaN in w makes its output NaN.
 *
 * Read by the C compiler and by nvcc.
 */
#ifndef KVS_KERN_GEMM_H
#define KVS_KERN_GEMM_H

#include <stddef.h>
#include <stdint.h>
#include "dev/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GEMM_BLOCK = 128 };

typedef enum gemm_type { GEMM_F32 = 1, GEMM_BF16 = 2, GEMM_FP8 = 3 } gemm_type;

/* A weight matrix, or rows and columns of one. */
typedef struct gemm_mat {
    const void *data;     /* its first element; bf16 and f32 aligned to their size                     */
    int64_t stride;       /* elements from one output row to the next, >= n_in                         */
    const float *scale;   /* fp8: [ceil(out/128), ceil(in/128)] of the whole tensor                    */
    int64_t scale_stride; /* floats per row of scale                                                   */
    int32_t row0, col0;   /* fp8: position in the whole tensor: element (o, i) has the scale
                             scale[(row0 + o) / 128 * scale_stride + (col0 + i) / 128]                 */
    int32_t n_out, n_in;  /* n_out >= 0, n_in >= 1                                                     */
    int32_t type;         /* gemm_type                                                                 */
} gemm_mat;

typedef struct gemm_args {
    gemm_mat w;
    int32_t n_row;        /* rows of x, >= 0                                                           */
    const void *x;        /* [n_row, n_in] f32 where w is f32, else bf16                               */
    int64_t x_stride;     /* elements, >= n_in                                                         */
    float *y;             /* [n_row, n_out] f32                                                        */
    int64_t y_stride;     /* elements, >= n_out                                                        */

    /* n_batch products of the same shape (heads): product b uses w.data + b * w_batch, x + b * x_batch and
     * y + b * y_batch, all in elements. f32 and bf16 weights only where n_batch > 1. */
    int32_t n_batch;      /* >= 1                                                                      */
    int64_t w_batch, x_batch, y_batch;

    void *scratch;        /* gemm_scratch bytes, 64-byte aligned                                       */
    size_t scratch_bytes;
} gemm_args;

typedef void (*gemm_fn)(const gemm_args *a, dev_queue *q);
/* Bytes of scratch for these args on this queue; grows with n_in and workers, not with n_out; bounded. For args
 * whose n_row is smaller it is never larger. */
typedef size_t (*gemm_scratch_fn)(const gemm_args *a, const dev_queue *q);

#ifdef __cplusplus
}
#endif
#endif
