/* kern/x86/attn_node.h - results of segments: normalised, merged, written out.
 *
 * Included once by the file of an instruction set, after attn_load.h.
 */
#ifndef KERN_X86_ATTN_NODE_H
#define KERN_X86_ATTN_NODE_H

#include "kern/x86/attn_load.h"

/* o *= inv in the lanes of `ok`, 0 elsewhere. Returns the lanes in which a result is not finite. */
static vm scale_sums(float *o, vf inv, vm ok)
{
    const vm no = vm_not(ok);
    vf odd = vf_zero(); /* NaN where something was not finite */
    for (int32_t r = 0; r < VDIM; r++) {
        const vf x = vf_zero_where(no, vf_mul(vf_load(o + r * L), inv));
        odd = vf_fma(x, vf_zero(), odd);
        vf_store(o + r * L, x);
    }
    return vm_nan(odd);
}

static void finish(attn_work *w)
{
    float *lse = w->node + (int64_t)w->n_vec * VDIM * L;
    for (int32_t v = 0; v < w->n_vec; v++) {
        float *o = w->node + (int64_t)v * VDIM * L;
        const vf l = vf_load(w->l + v * L);
        const vm some = vm_lt(vf_zero(), l);
        vm bad = vm_nan(l);
        /* lanes without a sum: 1, so that no division by 0 and no log of 0 is formed */
        const vf sum = vf_select(some, l, vf_set1(1.0f));
        const vf value = vf_add(vf_load(w->m + v * L), vf_log(sum));
        vm ok = some;
        const vm odd = scale_sums(o, vf_div(vf_set1(1.0f), sum), ok);
        if (vm_any(odd)) {
            bad = vm_or(bad, odd);
            ok = vm_and(ok, vm_not(odd));
            scale_sums(o, vf_set1(1.0f), ok);
        }
        vf_store(lse + v * L, vf_select(ok, value, vf_neg_inf()));
        const vm mine = vm_range(v * L, 0, w->n_col);
        w->stats.n_nan += (uint64_t)__builtin_popcount(vm_bits(vm_and(bad, mine)));
    }
}

static void merge(float *a, const float *b, int32_t n_vec, int32_t v0, int32_t v1)
{
    float *lse_a = a + (int64_t)n_vec * VDIM * L;
    const float *lse_b = b + (int64_t)n_vec * VDIM * L;
    for (int32_t v = v0; v < v1; v++) {
        const vf_node n = vf_node_weights(vf_load(lse_a + v * L), vf_load(lse_b + v * L));
        float *x = a + (int64_t)v * VDIM * L;
        const float *y = b + (int64_t)v * VDIM * L;
        for (int32_t r = 0; r < VDIM; r++) {
            vf_store(x + r * L, vf_node_value(&n, vf_load(x + r * L), vf_load(y + r * L)));
        }
        vf_store(lse_a + v * L, n.lse);
    }
}

/* Eight columns from col of a node to their rows of a->out. */
static void emit_eight(const attn_args *a, int32_t row0, int32_t n_col, const float *node,
                       int32_t col)
{
    float *out[8];
    const int32_t n = n_col - col < 8 ? n_col - col : 8;
    for (int32_t j = 0; j < n; j++) {
        const int64_t row = row0 + (col + j) / a->n_head;
        const int64_t head = (col + j) % a->n_head;
        out[j] = a->out + row * a->out_stride_row + head * a->out_stride_head;
    }
    const float *o = node + (int64_t)(col / L) * VDIM * L + col % L;
    for (int32_t d = 0; d < VDIM; d += 8) {
        __m256 r[8];
        SIMD_UNROLL
        for (int32_t j = 0; j < 8; j++) {
            r[j] = _mm256_load_ps(o + (int64_t)row_of_value(d + j) * L);
        }
        transpose8(r);
        SIMD_UNROLL
        for (int32_t j = 0; j < 8; j++) {
            if (j < n) {
                _mm256_storeu_ps(out[j] + d, r[j]);
            }
        }
    }
}

static void emit(const attn_args *a, int32_t row0, int32_t n_row, const float *node, int32_t v0,
                 int32_t v1)
{
    const int32_t n_col = n_row * a->n_head;
    const int32_t n_vec = (n_col + L - 1) / L;
    const float *lse = node + (int64_t)n_vec * VDIM * L;
    const int32_t end = v1 * L < n_col ? v1 * L : n_col;
    for (int32_t col = v0 * L; col < end; col += 8) {
        emit_eight(a, row0, n_col, node, col);
    }
    memcpy(a->lse + (int64_t)row0 * a->n_head + v0 * L, lse + v0 * L,
           (size_t)(end - v0 * L) * sizeof *lse);
}

#endif
