/* case_attn_mixed.c - the rows of a step that answers some requests and reads a chunk of another's prompt, in one
 * call: single rows, drafts with their bounds, a chunk whose rows attend one key more each, a request of nothing. */
#include "check/case_attn.h"

typedef struct mixed_part {
    int32_t rows;       /* of one request */
    int32_t len, grows; /* keys of its first row; how many more each next one attends */
} mixed_part;

enum { N_PART = 8, N_ROW = 56, TOPK = 700 };

static const mixed_part g_part[N_PART] = {{1, 700, 0}, {4, 333, 1},  {1, 0, 0}, {40, 20, 1},
                                          {2, 63, 2},  {1, 1090, 0}, {6, 1, 5}, {1, 64, 0}};

/* len entries over the lanes, as positions 0 .. len - 1 lie with an interleave of 1. */
static void share(int32_t *count, int32_t n_lane, int32_t len)
{
    for (int32_t lane = 0; lane < n_lane; lane++) {
        count[lane] = (len - lane + n_lane - 1) / n_lane;
    }
}

void attn_mixed(check_case *k, int32_t index)
{
    static const int32_t heads[] = {16, 128, 5, 64};
    const attn_shape lists = {heads[index / 2 % 4], 1 << (index / 2 % 4), 1, 1, N_ROW, {0}, TOPK, 5};
    const attn_shape tables = {lists.n_head, lists.n_lane, 1, N_PART, N_ROW / N_PART, {1090, -1}, 0, 0};
    attn_args *a = attn_new(k, index % 2 == 0 ? &lists : &tables, attn_fmt(index / 2 + index % 2));
    int32_t row = 0;
    for (int32_t i = 0; i < N_PART && !k->failed; i++) {
        for (int32_t t = 0; t < g_part[i].rows; t++, row++) {
            const int32_t len = g_part[i].len + t * g_part[i].grows;
            if (a->slots != NULL) {
                share((int32_t *)a->lane_count + (int64_t)row * a->n_lane, a->n_lane, len < TOPK ? len : TOPK);
            } else {
                ((int32_t *)a->row_req)[row] = i;
                ((int32_t *)a->kv_len)[row] = len;
            }
        }
    }
    attn_fill(k);
    attn_finish(k);
    ((attn_expect *)k->expect)->spread = 1;
}
