/* case_attn_big.c - attention where 16 or 32 bits end: more rows than a grid has blocks in y, and slots
 * whose bytes lie past 2^31 and 2^32. For devices; the reference sits these out. */
#include "check/case_attn.h"

void attn_many_rows(check_case *k, int32_t index)
{
    /* heads, lanes, I (0: far), requests, rows, -, topk, percent of -1 */
    const attn_shape s = {1, 1, 1, 65537, 1, {0}, 3, 20};
    attn_new(k, &s, index == 0 ? KVS_KV_FP8_DS_MLA : KVS_KV_BF16);
    attn_fill(k);
    attn_finish(k);
}

void attn_far_slots(check_case *k, int32_t index)
{
    static const attn_shape shapes[] = {
        {16, 1, 0, 1, 3, {0}, 200, 10},
        {128, 8, 0, 2, 1, {0}, 300, 60},
        {64, 2, 0, 1, 2, {0}, 65, 0},
    };
    attn_new(k, &shapes[index / 2 % 3], index % 2 == 0 ? KVS_KV_FP8_DS_MLA : KVS_KV_BF16);
    attn_fill(k);
    attn_finish(k);
}
