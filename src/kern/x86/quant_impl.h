/* kern/x86/quant_impl.h - queries rounded to e4m3 with a scale per head, for one instruction set.
 *
 * Included once by the file of an instruction set, after simd.h. Rounding is done on floats: to multiples
 * of 2^-9 below 2^-6, to three bits behind the first above. The bits are those of num/fmt.h.
 */
#ifndef KERN_X86_QUANT_IMPL_H
#define KERN_X86_QUANT_IMPL_H

#include "base/pool.h"
#include "kern/attn.h"
#include "num/fmt.h"

SIMD_FN vf query_load(const void *q, int32_t type, int64_t at)
{
    return type == KVS_DTYPE_F32 ? vf_loadu((const float *)q + at)
                                 : vf_loadu_bf16((const uint16_t *)q + at);
}

SIMD_FN vf magnitude(vf x)
{
    return vf_of_vi(vi_and(vi_of_vf(x), vi_set1(0x7fffffff)));
}

/* The e4m3 value nearest to x, ties to even, at most 448 in magnitude; NaN quiet, its payload dropped. */
SIMD_FN vf e4m3_nearest(vf x)
{
    const vi sign = vi_and(vi_of_vf(x), vi_set1(INT32_MIN));
    const vf mag = magnitude(x);
    const vi u = vi_of_vf(mag);
    const vi odd = vi_and(vi_srl(u, 20), vi_set1(1));
    const vi r = vi_and(vi_add(vi_add(u, odd), vi_set1(0x7ffff)), vi_set1(~0xfffff));
    const vf shift = vf_set1(16384.0f); /* its last place is 2^-9 */
    vf y = vf_select(vm_lt(mag, vf_set1(0x1p-6f)), vf_sub(vf_add(mag, shift), shift), vf_of_vi(r));
    y = vf_select(vm_lt(mag, vf_set1(E4M3_MAX)), y, vf_set1(E4M3_MAX));
    y = vf_select(vm_nan(x), vf_set_bits(0x7fc00000u), y);
    return vf_of_vi(vi_or(vi_of_vf(y), sign));
}

static void quant_task(void *ctx, int64_t i_task, int i_worker)
{
    const quant_q_args *a = ctx;
    (void)i_worker;
    const int64_t at = i_task / a->n_head * a->q_stride_row + i_task % a->n_head * a->q_stride_head;
    const vf inf = vf_set_bits(0x7f800000u);
    vf most = vf_zero();
    for (int32_t d = 0; d < KVS_ROW_DIM; d += SIMD_LANES) {
        const vf mag = magnitude(query_load(a->q, a->q_type, at + d));
        most = vf_max(vf_zero_where(vm_not(vm_lt(mag, inf)), mag), most);
    }
    _Alignas(64) float of_lane[SIMD_LANES];
    vf_store(of_lane, most);
    float amax = 0.0f;
    for (int32_t i = 0; i < SIMD_LANES; i++) {
        amax = of_lane[i] > amax ? of_lane[i] : amax;
    }
    const float s = scale_for(a->rule, amax);
    uint16_t *out = a->q_out + i_task * KVS_ROW_DIM;
    for (int32_t d = 0; d < KVS_ROW_DIM; d += SIMD_LANES) {
        const vf x = vf_div(query_load(a->q, a->q_type, at + d), vf_set1(s));
        vi_storeu_upper(out + d, vi_of_vf(e4m3_nearest(x)));
    }
    a->scale[i_task] = s;
}

static void quant_q_run(const quant_q_args *a, dev_queue *q)
{
    quant_q_args copy = *a;
    pool_run(q->pool, quant_task, &copy, (int64_t)a->n_row * a->n_head);
}

#endif
