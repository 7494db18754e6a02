/* check/roof.h - the ceilings of this machine, measured here and now: memory bandwidth and the
 * rate of multiply-adds, with as many threads as a case uses.
 *
 * A measurement is the best of a few short windows: what the machine can do when it is left
 * alone. The best value ever seen of each kind and thread count is kept, so that a caller can
 * tell when the machine has become slower (other work, heat) and the shares of that moment
 * flatter.
 *
 * Rates of arithmetic come from independent chains that touch no memory; each verifies its
 * result. A loop that is not there for this build or not allowed by the features measures 0. */
#ifndef CHECK_ROOF_H
#define CHECK_ROOF_H

#include <stddef.h>
#include <stdint.h>

#include "base/pool.h"
#include "kvspan/status.h"

/* X(constant, name, whether it counts bytes) */
#define ROOF_LIST(X)                                                                               \
    X(READ, "read", 1)                                                                             \
    X(COPY, "copy", 1)             /* read and written */                                          \
    X(FMA_REF, "fma_ref", 0)       /* plain C, f32 */                                              \
    X(FMA_AVX2, "fma_avx2", 0)     /* f32 */                                                       \
    X(FMA_AVX512, "fma_avx512", 0) /* f32 */                                                       \
    X(DOT_BF16, "dot_bf16", 0)     /* pairs of bf16 into f32 */                                    \
    X(TILE_BF16, "tile_bf16", 0)   /* the same in tiles of AMX */

typedef enum roof_kind {
#define ROOF_ENUM(constant, name, is_bytes) ROOF_##constant,
    ROOF_LIST(ROOF_ENUM)
#undef ROOF_ENUM
        ROOF_N_KIND
} roof_kind;

enum { ROOF_N_WINDOW = 5, ROOF_MAX_SEEN = 64 };

typedef struct roof_value {
    double best;                  /* per second: the best window of this measurement              */
    double window[ROOF_N_WINDOW]; /* seconds                                                      */
    double work;                  /* bytes or operations of one window                            */
    double best_seen;             /* the largest `best` of this kind and thread count so far      */
} roof_value;

typedef struct roof {
    uint8_t *mem;
    size_t bytes;
    uint32_t features;
    int32_t n_seen;
    struct {
        roof_kind kind;
        int32_t n_thread;
        double best;
    } seen[ROOF_MAX_SEEN];
} roof;

/* Maps `bytes` (a multiple of 2 MiB, at least 64 MiB) and touches them. features: base/cpu.h. */
kvs_status roof_open(roof *r, size_t bytes, uint32_t features, kvs_error *err);
void roof_close(roof *r);

/* The value is 0 where this kind cannot be measured. */
kvs_status roof_measure(roof *r, roof_kind kind, pool *p, roof_value *v, kvs_error *err);

const char *roof_name(roof_kind kind);
int roof_is_bytes(roof_kind kind);
/* What bounds the arithmetic of a kernel variant ("ref", "avx2", "avx512", "avx512bf16", "amx"). f32: over f32 values,
 * which the last two multiply by the fma of AVX-512: their own instructions take bf16 alone. */
roof_kind roof_of_variant(const char *variant, int f32);

/* ---- loops of one instruction set; each file has its own flags ------------------------------ */

/* Runs n steps of its chains; *flops gets the operations done. Returns 0 when the result is not
 * what it must be. n < 2^20. */
typedef int (*roof_loop_fn)(int64_t n, double *flops);
int roof_fma_avx2(int64_t n, double *flops);
int roof_fma_avx512(int64_t n, double *flops);
int roof_dot_avx512bf16(int64_t n, double *flops);
int roof_tile_amx(int64_t n, double *flops);

/* Reads n bytes (a multiple of 4096) and returns their exclusive or in 64-bit words. */
uint64_t roof_read_avx2(const uint8_t *p, size_t n);
uint64_t roof_read_avx512(const uint8_t *p, size_t n);
/* Copies n bytes (a multiple of 4096, aligned to 64) past the caches. */
void roof_copy_avx2(uint8_t *to, const uint8_t *from, size_t n);
void roof_copy_avx512(uint8_t *to, const uint8_t *from, size_t n);

#endif
