/* kern/ref/ref.h - the reference variants: the definition of every op, and what they share.
 *
 * Plain C, one thread, sums in double where something is summed, tables of no kind. A reference
 * does what the contract in kern/<family>.h says and nothing else; speed is the business of the
 * other variants. Every result depends on IEEE operations alone: exp and log are written out here,
 * so that two hosts with different libm agree.
 *
 * Included by kern/ref/ and kern.c only.
 */
#ifndef KVS_KERN_REF_H
#define KVS_KERN_REF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kern/exp.h"
#include "kern/kern.h"
#include "num/fmt.h"
#include "shard/shard.h"

/* One apply function per op: sets the op's slots in the table. */
#define REF_DECLARE_APPLY(op) void ref_apply_##op(kern_table *t);
KERN_OP_LIST(REF_DECLARE_APPLY)
#undef REF_DECLARE_APPLY

/* Element i of a buffer of bf16 or f32. */
static inline float ref_load(const void *p, int32_t type, int64_t i)
{
    return type == KVS_DTYPE_BF16 ? bf16_to_f32(((const bf16 *)p)[i]) : ((const float *)p)[i];
}

static inline void ref_count(uint64_t *counter, uint64_t n)
{
    if (counter != NULL) {
        *counter += n;
    }
}

/* Slot of local index l of a request whose table row is `table` (NULL: no such request), or
 * negative. */
static inline int64_t ref_slot(const int32_t *table, int32_t width, int64_t n_slot, int64_t l)
{
    return table == NULL ? SHARD_BAD_SLOT
                         : shard_slot_checked(table, width, n_slot, (kvs_local){l}).v;
}

/* e^x for x <= 1, within 1 ulp of double; 0 below -700. */
static inline double ref_exp(double x)
{
    if (x < -700.0) {
        return 0.0;
    }
    const double n = floor(x * 0x1.71547652b82fep+0 + 0.5);
    const double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
    double p = 1.0;
    for (int i = 13; i >= 1; i--) {
        p = 1.0 + p * r / i;
    }
    const uint64_t bits = (uint64_t)((int64_t)n + 1023) << 52;
    double scale = 0.0;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

/* ln x for a normal f32 value range, near the precision of double: one step of Newton after klog.
 */
static inline double ref_log(double x)
{
    const double y = (double)klog((float)x);
    const double t = x * ref_exp(-y) - 1.0;
    return y + (t - 0.5 * t * t);
}

#endif
