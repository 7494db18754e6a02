/* test_attn_fold.c: the order of merges that kern/x86/attn_fold.h asks for is the tree of kern/attn.h,
 * also when merges happen later, a window of segments at a time, in few nodes that are used again.
 * A node holds a hash of the expression it stands for, so any other order gives another value. */
#include "unit/unit.h"

#include "base/rng.h"
#include "kern/x86/attn_fold.h"
#include "kern/x86/attn_keys.h"

enum { MAX_NODE = 12, MAX_OP = 64 };

static uint64_t mix(uint64_t a, uint64_t b)
{
    return rng_u64(a, b, 1);
}

/* 0 is the identity. */
static uint64_t join(uint64_t a, uint64_t b)
{
    return a == 0 || b == 0 ? a + b : mix(a, b);
}

static uint64_t leaf(int32_t lane, int32_t segment)
{
    return mix((uint64_t)lane + 100, (uint64_t)segment + 100);
}

/* The tree as the contract words it. */
static uint64_t wanted(const int32_t *n_segment, int32_t n_lane)
{
    uint64_t lane[8] = {0};
    for (int32_t j = 0; j < n_lane; j++) {
        for (int32_t s = 0; s < n_segment[j]; s++) {
            lane[j] = join(lane[j], leaf(j, s));
        }
    }
    for (int32_t half = n_lane / 2; half > 0; half /= 2) {
        for (int32_t j = 0; j < half; j++) {
            lane[j] = join(lane[j], lane[j + half]);
        }
    }
    return lane[0];
}

typedef struct machine {
    fold f;
    int32_t free[MAX_NODE];
    int32_t n_node;
    uint64_t node[MAX_NODE];
    fold_op late[MAX_OP]; /* merges that wait for the end of the window */
    int32_t n_late;
} machine;

static void merge_late(machine *m)
{
    for (int32_t i = 0; i < m->n_late; i++) {
        m->node[m->late[i].a] = join(m->node[m->late[i].a], m->node[m->late[i].b]);
    }
    m->n_late = 0;
    fold_reclaim(&m->f, m->n_node);
}

static void take_ops(machine *m, const fold_ops *ops)
{
    for (int32_t i = 0; i < ops->n; i++) {
        if (m->f.keep) {
            assert_true(m->n_late < MAX_OP);
            m->late[m->n_late++] = ops->op[i];
        } else {
            m->node[ops->op[i].a] = join(m->node[ops->op[i].a], m->node[ops->op[i].b]);
        }
    }
}

/* One block; in windows, it begins with whatever an earlier block left of one. */
static uint64_t block(machine *m, const int32_t *n_segment, int32_t n_lane)
{
    fold_ops ops;
    fold_begin(&m->f, n_lane);
    for (int32_t i = 0; i < n_lane; i++) {
        const int32_t lane = key_lane(n_lane, i);
        for (int32_t s = 0; s < n_segment[lane]; s++) {
            if (m->f.keep && m->f.n_free == 0) {
                merge_late(m);
            }
            assert_true(m->f.n_free > 0);
            const int32_t node = fold_take(&m->f);
            m->node[node] = leaf(lane, s);
            fold_segment(&m->f, node, &ops);
            take_ops(m, &ops);
        }
        fold_lane_end(&m->f, &ops);
        take_ops(m, &ops);
    }
    const int32_t root = fold_end(&m->f);
    for (int32_t i = 0; i < m->n_late; i++) { /* the window's merges, without ending it */
        m->node[m->late[i].a] = join(m->node[m->late[i].a], m->node[m->late[i].b]);
    }
    m->n_late = 0;
    const uint64_t result = root == FOLD_NONE ? 0 : m->node[root];
    fold_give(&m->f, root);
    return result;
}

static void tree_of_merges(void **state)
{
    (void)state;
    rng r = rng_init(5, 0);
    for (int32_t k = 0; k < 4000; k++) {
        const bool keep = k % 2 != 0;
        /* five nodes do at once; a window needs one to compute into besides those in use */
        machine m = {.n_node = keep ? (int32_t)rng_next_range(&r, 6, MAX_NODE) : 5};
        m.f.free = m.free;
        m.f.keep = keep;
        fold_begin(&m.f, 1);
        fold_reclaim(&m.f, m.n_node);
        for (int32_t b = 0; b < 5; b++) {
            const int32_t n_lane = 1 << rng_next_below(&r, 4);
            int32_t n_segment[8];
            for (int32_t j = 0; j < n_lane; j++) {
                n_segment[j] = (int32_t)rng_next_below(&r, 4) * (int32_t)rng_next_below(&r, 4);
            }
            const uint64_t got = block(&m, n_segment, n_lane);
            if (got != wanted(n_segment, n_lane)) {
                fail_msg("case %d, block %d: %d lanes, %d nodes: another order", k, b, n_lane,
                         m.n_node);
            }
        }
        assert_true(keep || m.f.n_free == m.n_node);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(tree_of_merges)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
