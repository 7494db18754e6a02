/* kern/x86/attn_amx.c - the kernels of attention in AMX: products of bf16 pairs in tiles, for rows of bf16 and
 * e4m3. With SIMD_EMULATE, for tests, they are named attn_isa_amx_emulated.
 *
 * Queries, keys and softmax are those of AVX-512 BF16. Nodes hold one column behind the other, so that finish, merge
 * and emit work column by column; a column without a result costs nothing.
 */
#define SIMD_LANES 16
#include "kern/x86/simd.h"

#define ATTN_BF16  1
#define ATTN_TILES 1
#include "kern/x86/attn_load.h"

/* o *= by; returns whether all is finite then. */
static int scale_column(float *o, float by)
{
    const vf f = vf_set1(by);
    vf odd = vf_zero(); /* NaN where something was not finite */
    for (int32_t r = 0; r < VDIM; r += L) {
        const vf x = vf_mul(vf_loadu(o + r), f);
        odd = vf_fma(x, vf_zero(), odd);
        vf_storeu(o + r, x);
    }
    return !vm_any(vm_nan(odd));
}

static void finish(attn_work *w)
{
    float *lse = w->node + (int64_t)w->n_vec * VDIM * L;
    for (int32_t v = 0; v < w->n_vec; v++) {
        const vf l = vf_load(w->l + v * L);
        const vm mine = vm_range(v * L, 0, w->n_col);
        const vm some = vm_and(vm_lt(vf_zero(), l), mine);
        uint32_t bad = vm_bits(vm_and(vm_nan(l), mine));
        /* lanes without a sum: 1, so that no division by 0 and no log of 0 is formed */
        const vf sum = vf_select(some, l, vf_set1(1.0f));
        float inv[L];
        vf_storeu(inv, vf_div(vf_set1(1.0f), sum));
        uint32_t ok = vm_bits(some);
        for (uint32_t left = ok; left != 0; left &= left - 1) {
            const int c = __builtin_ctz(left);
            if (!scale_column(w->node + ((int64_t)v * L + c) * VDIM, inv[c])) {
                bad |= 1u << c;
            }
        }
        ok &= ~bad;
        const vf value = vf_add(vf_load(w->m + v * L), vf_log(sum));
        vf_store(lse + v * L, vf_select(vm_from_bits(ok), value, vf_neg_inf()));
        w->stats.n_nan += (uint64_t)__builtin_popcount(bad);
    }
}

/* x = w_a x + w_b y, as vf_node_value. */
static void merge_column(float *x, const float *y, float w_a, float w_b)
{
    const vf a = vf_set1(w_a);
    const vf b = vf_set1(w_b);
    for (int32_t r = 0; r < VDIM; r += L) {
        vf_storeu(x + r, vf_fma(b, vf_loadu(y + r), vf_mul(a, vf_loadu(x + r))));
    }
}

/* The values of a column whose LSE is -inf are not read, so they need not be 0 before emit. */
static void merge(float *a, const float *b, int32_t n_vec, int32_t v0, int32_t v1)
{
    float *lse_a = a + (int64_t)n_vec * VDIM * L;
    const float *lse_b = b + (int64_t)n_vec * VDIM * L;
    for (int32_t v = v0; v < v1; v++) {
        const vf_node n = vf_node_weights(vf_load(lse_a + v * L), vf_load(lse_b + v * L));
        const uint32_t has_a = vm_bits(n.has_a);
        float w_a[L];
        float w_b[L];
        vf_storeu(w_a, n.w_a);
        vf_storeu(w_b, n.w_b);
        for (uint32_t left = vm_bits(n.has_b); left != 0; left &= left - 1) {
            const int c = __builtin_ctz(left);
            float *x = a + ((int64_t)v * L + c) * VDIM;
            const float *y = b + ((int64_t)v * L + c) * VDIM;
            if (has_a >> c & 1) {
                merge_column(x, y, w_a[c], w_b[c]);
            } else {
                memcpy(x, y, VDIM * sizeof *x);
            }
        }
        vf_store(lse_a + v * L, n.lse);
    }
}

/* A column in the order of pair_values -> in the order of values: fours of two vectors in turn. */
static void emit_column(const float *o, float *out)
{
    for (int32_t d = 0; d < VDIM; d += 2 * L) {
        SIMD_UNROLL
        for (int32_t i = 0; i < L; i += 4) {
            _mm_storeu_ps(out + d + 2 * i, _mm_loadu_ps(o + d + i));
            _mm_storeu_ps(out + d + 2 * i + 4, _mm_loadu_ps(o + d + L + i));
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
    for (int32_t col = v0 * L; col < end; col++) {
        const int64_t row = row0 + col / a->n_head;
        const int64_t head = col % a->n_head;
        float *out = a->out + row * a->out_stride_row + head * a->out_stride_head;
        if (lse[col] > -INFINITY) {
            emit_column(node + (int64_t)col * VDIM, out);
        } else {
            memset(out, 0, VDIM * sizeof *out);
        }
    }
    memcpy(a->lse + (int64_t)row0 * a->n_head + v0 * L, lse + v0 * L,
           (size_t)(end - v0 * L) * sizeof *lse);
}

#ifdef SIMD_EMULATE
extern const attn_isa attn_isa_amx_emulated;
const attn_isa attn_isa_amx_emulated = ATTN_ISA_TABLE;
#else
const attn_isa attn_isa_amx = ATTN_ISA_TABLE;
#endif
