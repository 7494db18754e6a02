/* ops_ref.c - norm, rope, act and route for any machine: the definition of each. */
#include "kern/ref/ops_loops.h"
#include "kern/ref/ref.h"

static void norm_ref(const norm_args *a, dev_queue *q)
{
    ops_norm(a, q);
}

static void rope_ref(const rope_args *a, dev_queue *q)
{
    ops_rope(a, q);
}

static void act_ref(const act_args *a, dev_queue *q)
{
    ops_act(a, q);
}

static void route_ref(const route_args *a, dev_queue *q)
{
    ops_route(a, q);
}

void ref_apply_norm(kern_table *t)
{
    t->norm = norm_ref;
}

void ref_apply_rope(kern_table *t)
{
    t->rope = rope_ref;
}

void ref_apply_act(kern_table *t)
{
    t->act = act_ref;
}

void ref_apply_route(kern_table *t)
{
    t->route = route_ref;
}
