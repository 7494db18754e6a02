/* kern/cuda/ptx.cuh - the few machine instructions of sm_90a that CUDA C++ does not name: barriers in shared
 * memory, bulk copies, asynchronous matrix products, register budgets. Each function is one instruction
 * (or one and its predicate); who orders what is the caller's business and said where it is called.
 */
#ifndef KVS_KERN_CUDA_PTX_CUH
#define KVS_KERN_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t ptx_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- mbarrier ------------------------------------------------------------------------------ */

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

/* Makes initialised barriers visible to the copy engine. */
__device__ __forceinline__ void mbar_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbar_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* The same, and the phase does not end before that many bytes of copy_bulk have come. */
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

/* Waits until the phase of this parity has ended. */
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred p;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\nbra again;\ndone:\n}\n" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

/* ---- copies -------------------------------------------------------------------------------- */

/* 16 bytes from global to shared memory, zeros where `bytes` is 0. */
__device__ __forceinline__ void copy16(uint32_t dst, const void *src, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
                 : "memory");
}

/* Arrives on `bar` when all copy16 of this thread so far are done. */
__device__ __forceinline__ void copy16_arrive(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

/* `bytes` from global to shared memory by the copy engine, in pieces of 16; `bar` counts them (mbar_expect). */
__device__ __forceinline__ void copy_bulk(uint32_t dst, const void *src, uint32_t bytes,
                                          uint32_t bar)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(dst),
        "l"(src), "r"(bytes), "r"(bar)
        : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* Orders this thread's ordinary accesses to shared memory before what the copy engine and the matrix
 * units do after the next barrier. */
__device__ __forceinline__ void fence_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- shared memory, whole words ------------------------------------------------------------ */

__device__ __forceinline__ uint4 lds128(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}

__device__ __forceinline__ float2 lds_f2(uint32_t at)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
    return v;
}

__device__ __forceinline__ uint32_t lds32(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

__device__ __forceinline__ float lds_f(uint32_t at)
{
    return __uint_as_float(lds32(at));
}

__device__ __forceinline__ void sts32(uint32_t at, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

__device__ __forceinline__ void sts_f(uint32_t at, float v)
{
    sts32(at, __float_as_uint(v));
}

__device__ __forceinline__ void sts128(uint32_t at, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void sts_f2(uint32_t at, float a, float b)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void sts16(uint32_t at, uint16_t v)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(v) : "memory");
}

__device__ __forceinline__ void atoms_max(uint32_t at, int v)
{
    asm volatile("red.shared.max.s32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

/* Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8. */
__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ __forceinline__ void stmatrix4_trans(uint32_t at, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

/* ---- numbers ------------------------------------------------------------------------------- */

/* 2^x to about two units in the last place; what is subnormal is 0. */
__device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- groups of warps ----------------------------------------------------------------------- */

/* A barrier of N threads; BAR 0 is __syncthreads. */
template <int BAR, int N> __device__ __forceinline__ void named_barrier()
{
    asm volatile("bar.sync %0, %1;" ::"n"(BAR), "n"(N) : "memory");
}

/* The same, and whether `p` holds in any of them. */
template <int BAR, int N> __device__ __forceinline__ bool named_barrier_any(bool p)
{
    uint32_t r;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\n"
                 "bar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}\n"
                 : "=r"(r)
                 : "r"((uint32_t)p), "n"(BAR), "n"(N)
                 : "memory");
    return r;
}

/* A barrier of `n` threads, and whether `p` holds in all of them. */
__device__ __forceinline__ bool named_barrier_all(int bar, int n, bool p)
{
    uint32_t r;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\n"
                 "barrier.red.and.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}\n"
                 : "=r"(r)
                 : "r"(bar), "r"(n), "r"((uint32_t)p)
                 : "memory");
    return r;
}

template <int N> __device__ __forceinline__ void regs_take()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ __forceinline__ void regs_give()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- dependent launches -------------------------------------------------------------------- */

/* Waits for the kernels this launch depends on, their memory included. */
__device__ __forceinline__ void grid_wait()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* Lets a dependent launch start its prologue. */
__device__ __forceinline__ void grid_release()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- matrix products ----------------------------------------------------------------------- */

enum ptx_operand { OPERAND_F16, OPERAND_BF16, OPERAND_E4M3 };

/* An operand tile [rows][64 values of 16 bits or 128 of 8], rows of 128 bytes swizzled by 16-byte chunks (chunk c of
 * row r lies at c ^ (r & 7)), aligned to 1024 bytes, the product's k along the row. */
__device__ __forceinline__ uint64_t wgmma_tile(uint32_t at)
{
    return (uint64_t)((at & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}

__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Register arrays that a product in flight reads or writes: what is done to them in the text before and after
 * stays before and after. */
template <int N> __device__ __forceinline__ void regs_pin(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

template <int N> __device__ __forceinline__ void regs_pin(uint32_t (&a)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            asm volatile("" : "+r"(a[i][j])::"memory");
}

/* At most N groups of this warp group remain in flight. */
template <int N> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* d[64 x N] (+)= a[64 x K] b[N x K]^T, K = 16, or 32 of e4m3: a in registers in the fragment order of mma.m16n8k16
 * (k32), b a tile of wgmma_tile (32 bytes further for each step of K), d in the fragment order of mma, 8 columns after
 * 8. add: 0 starts a sum. */
template <int N, ptx_operand T>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                         int add);

#define WGMMA_D8(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_AB "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)

/* kind: the k of one step and the types; signs: of a and b, and with 16 bits 0, b not being transposed. */
#define WGMMA_8(kind, signs)                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n8" kind " {%0, %1, %2, %3}, "                   \
                 "{%4, %5, %6, %7}, %8, p, " signs ";\n}\n"                                        \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : WGMMA_AB)
#define WGMMA_16(kind, signs)                                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n16" kind " {"                                   \
                 "%0, %1, %2, %3, %4, %5, %6, %7}, "                                               \
                 "{%8, %9, %10, %11}, %12, p, " signs ";\n}\n"                                     \
                 : WGMMA_D8(0)                                                                     \
                 : WGMMA_AB)
#define WGMMA_32(kind, signs)                                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n32" kind " {"                                   \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "         \
                 "{%16, %17, %18, %19}, %20, p, " signs ";\n}\n"                                   \
                 : WGMMA_D8(0), WGMMA_D8(8)                                                        \
                 : WGMMA_AB)
#define WGMMA_64(kind, signs)                                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n64" kind " {"                                   \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "          \
                 "%30, %31}, "                                                                     \
                 "{%32, %33, %34, %35}, %36, p, " signs ";\n}\n"                                   \
                 : WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24)                            \
                 : WGMMA_AB)

#define WGMMA_RS(N, type, kind, signs)                                                             \
    template <>                                                                                    \
    __device__ __forceinline__ void wgmma_rs<N, type>(float(&d)[N / 2], const uint32_t(&a)[4],     \
                                                      uint64_t b, int add)                         \
    {                                                                                              \
        WGMMA_##N(kind, signs);                                                                    \
    }
WGMMA_RS(16, OPERAND_F16, "k16.f32.f16.f16", "1, 1, 0")
WGMMA_RS(32, OPERAND_F16, "k16.f32.f16.f16", "1, 1, 0")
WGMMA_RS(64, OPERAND_F16, "k16.f32.f16.f16", "1, 1, 0")
WGMMA_RS(16, OPERAND_BF16, "k16.f32.bf16.bf16", "1, 1, 0")
WGMMA_RS(32, OPERAND_BF16, "k16.f32.bf16.bf16", "1, 1, 0")
WGMMA_RS(64, OPERAND_BF16, "k16.f32.bf16.bf16", "1, 1, 0")
WGMMA_RS(8, OPERAND_E4M3, "k32.f32.e4m3.e4m3", "1, 1")
WGMMA_RS(16, OPERAND_E4M3, "k32.f32.e4m3.e4m3", "1, 1")
WGMMA_RS(32, OPERAND_E4M3, "k32.f32.e4m3.e4m3", "1, 1")
WGMMA_RS(64, OPERAND_E4M3, "k32.f32.e4m3.e4m3", "1, 1")
#undef WGMMA_RS
#undef WGMMA_64
#undef WGMMA_32
#undef WGMMA_16
#undef WGMMA_8
#undef WGMMA_AB
#undef WGMMA_D8

#endif
