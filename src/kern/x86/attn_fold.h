/* kern/x86/attn_fold.h - in which order the partial results of a block are merged.
 *
 * Results of segments arrive lane by lane, lanes in the order of key_lane. Segments of a lane are folded
 * in order; lanes pair up like the carries of a binary counter, which gives the tree (j, j + n/2),
 * (j, j + n/4), ... with the lower lane as operand a. A fold knows nodes by number only and says which
 * merges are due; whoever runs it performs them at once or keeps them as a programme.
 *
 * Live at any time: log2(n_lane) finished subtrees, the lane's sum so far, the segment being computed.
 */
#ifndef KERN_X86_ATTN_FOLD_H
#define KERN_X86_ATTN_FOLD_H

#include <stdbool.h>
#include <stdint.h>

enum { FOLD_DEPTH = 4, FOLD_NONE = -1 /* an empty lane or subtree: the identity */ };

/* Node a = merge(a, b); b is dead afterwards. */
typedef struct fold_op {
    int32_t a, b;
} fold_op;

typedef struct fold_ops {
    fold_op op[FOLD_DEPTH];
    int32_t n;
} fold_ops;

typedef struct fold {
    int32_t *free; /* nodes to take                                                   */
    int32_t n_free;
    bool keep; /* dead nodes stay taken until fold_reclaim: merges happen later   */
    int32_t n_lane, n_lane_done;
    int32_t lane; /* the current lane's sum so far, or none                          */
    int32_t tree[FOLD_DEPTH];
    int32_t n_tree;
} fold;

static inline void fold_begin(fold *f, int32_t n_lane)
{
    f->n_lane = n_lane;
    f->n_lane_done = 0;
    f->lane = FOLD_NONE;
    f->n_tree = 0;
}

static inline int32_t fold_take(fold *f)
{
    return f->free[--f->n_free];
}

static inline void fold_give(fold *f, int32_t node)
{
    if (!f->keep && node != FOLD_NONE) {
        f->free[f->n_free++] = node;
    }
}

/* The merge of a and b, either of which may be none. */
static inline int32_t fold_join(fold *f, int32_t a, int32_t b, fold_ops *ops)
{
    if (a == FOLD_NONE || b == FOLD_NONE) {
        return a == FOLD_NONE ? b : a;
    }
    ops->op[ops->n++] = (fold_op){.a = a, .b = b};
    fold_give(f, b);
    return a;
}

/* The next segment of the current lane is in `node`. */
static inline void fold_segment(fold *f, int32_t node, fold_ops *ops)
{
    ops->n = 0;
    f->lane = fold_join(f, f->lane, node, ops);
}

static inline void fold_lane_end(fold *f, fold_ops *ops)
{
    ops->n = 0;
    int32_t node = f->lane;
    f->lane = FOLD_NONE;
    f->n_lane_done++;
    for (int32_t i = f->n_lane_done; i % 2 == 0; i /= 2) {
        node = fold_join(f, f->tree[--f->n_tree], node, ops);
    }
    f->tree[f->n_tree++] = node;
}

/* The result when every lane has ended, or none. The caller gives it back. */
static inline int32_t fold_end(fold *f)
{
    f->n_tree = 0;
    return f->tree[0];
}

/* Frees all of n_node nodes but those in use. The merges due so far have happened. */
static inline void fold_reclaim(fold *f, int32_t n_node)
{
    f->n_free = 0;
    for (int32_t i = 0; i < n_node; i++) {
        bool live = i == f->lane;
        for (int32_t j = 0; j < f->n_tree; j++) {
            live = live || i == f->tree[j];
        }
        if (!live) {
            f->free[f->n_free++] = i;
        }
    }
}

#endif
