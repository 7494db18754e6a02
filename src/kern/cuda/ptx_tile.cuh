/* kern/cuda/ptx_tile.cuh - more machine instructions of sm_90a, beside ptx.cuh: tensor copies, and products whose
 * operands are tiles of shared memory, a transposed one among them. As there, each function is one
 * instruction.
 */
#ifndef KVS_KERN_CUDA_PTX_TILE_CUH
#define KVS_KERN_CUDA_PTX_TILE_CUH

#include "kern/cuda/ptx.cuh"

/* ---- copies -------------------------------------------------------------------------------- */

/* The box at (x, y, z) of a tensor map to shared memory by the copy engine; `bar` counts its bytes. */
__device__ __forceinline__ void copy_box(uint32_t dst, const void *map, int x, int y, int z,
                                         uint32_t bar)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
                 : "memory");
}

/* Whether the phase of this parity has ended. */
__device__ __forceinline__ bool mbar_test(uint32_t bar, uint32_t parity)
{
    uint32_t r;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(r)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return r;
}

/* ---- clusters ------------------------------------------------------------------------------- */

/* Place of this block in its cluster. */
__device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

/* All threads of all blocks of the cluster. */
__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
}

/* copy_bulk to the same place of every block whose bit is in `blocks`, and to the same barrier there. */
__device__ __forceinline__ void copy_bulk_all(uint32_t dst, const void *src, uint32_t bytes,
                                              uint32_t bar, uint16_t blocks)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar), "h"(blocks)
                 : "memory");
}

/* mbar_arrive on the barrier of that place in block `rank` of the cluster. */
__device__ __forceinline__ void mbar_arrive_at(uint32_t bar, uint32_t rank)
{
    asm volatile("{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [at];\n}\n" ::"r"(bar),
                 "r"(rank)
                 : "memory");
}

/* The address, from all blocks of the cluster, of `at` in block `rank`. */
__device__ __forceinline__ uint32_t cluster_address(uint32_t at, uint32_t rank)
{
    uint32_t a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(at), "r"(rank));
    return a;
}

/* From a cluster_address. */
__device__ __forceinline__ float ldc_f(uint32_t at)
{
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ float4 ldc_f4(uint32_t at)
{
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* ---- barriers of some warps ------------------------------------------------------------------ */

__device__ __forceinline__ void bar_arrive(int bar, int n)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(bar), "r"(n) : "memory");
}

__device__ __forceinline__ void bar_sync(int bar, int n)
{
    asm volatile("bar.sync %0, %1;" ::"r"(bar), "r"(n) : "memory");
}

/* ---- products -------------------------------------------------------------------------------- */

/* A transposed B operand: tiles [k][64 values], rows of 128 bytes swizzled as those of wgmma_tile, tiles of the next
 * 64 columns 8192 bytes further, the product's columns along the row. 2048 bytes further for each 16 of k. */
__device__ __forceinline__ uint64_t wgmma_tile_trans(uint32_t at)
{
    return (uint64_t)((at & 0x3ffffu) >> 4) | (uint64_t)(8192 >> 4) << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}

#define TILE_D8(i)                                                                                 \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define TILE_D32(i) TILE_D8(i), TILE_D8(i + 8), TILE_D8(i + 16), TILE_D8(i + 24)

/* d[64 x 64] (+)= a[64 x 16] b[64 x 16]^T of bf16, both wgmma_tile. add: 0 starts a sum. */
__device__ __forceinline__ void wgmma_ss64(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
                 "%30, %31}, %32, %33, p, 1, 1, 0, 0;\n}\n"
                 : TILE_D32(0)
                 : "l"(a), "l"(b), "r"(add));
}

/* The same with 128 rows of b. */
__device__ __forceinline__ void wgmma_ss128(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1, 0, 0;\n}\n"
                 : TILE_D32(0), TILE_D32(32)
                 : "l"(a), "l"(b), "r"(add));
}

/* d[64 x 256] += a[64 x 16] b[16 x 256] of bf16: a in registers in the fragment order of mma.m16n8k16, b of
 * wgmma_tile_trans. */
__device__ __forceinline__ void wgmma_rs256_trans(float (&d)[128], const uint32_t *a, uint64_t b)
{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "
        "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "
        "%125, %126, %127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
        : TILE_D32(0), TILE_D32(32), TILE_D32(64), TILE_D32(96)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* The same for 128 columns, which begin at element AT of a thread's part of d; b as for these. */
template <int AT, int N>
__device__ __forceinline__ void wgmma_rs128_trans(float (&d)[N], const uint32_t *a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
                 : TILE_D32(AT), TILE_D32(AT + 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef TILE_D32
#undef TILE_D8

#endif
