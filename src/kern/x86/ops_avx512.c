/* x86/ops_avx512.c - norm, rope, act and route for AVX-512: the reference's loops in wider vectors. */
#include "kern/ref/ops_loops.h"
#include "kern/x86/ops_x86.h"

static void norm_avx512(const norm_args *a, dev_queue *q)
{
    ops_norm(a, q);
}

void norm_apply_avx512(kern_table *t)
{
    t->norm = norm_avx512;
}

static void rope_avx512(const rope_args *a, dev_queue *q)
{
    ops_rope(a, q);
}

void rope_apply_avx512(kern_table *t)
{
    t->rope = rope_avx512;
}

static void act_avx512(const act_args *a, dev_queue *q)
{
    ops_act(a, q);
}

void act_apply_avx512(kern_table *t)
{
    t->act = act_avx512;
}

static void route_avx512(const route_args *a, dev_queue *q)
{
    ops_route(a, q);
}

void route_apply_avx512(kern_table *t)
{
    t->route = route_avx512;
}
