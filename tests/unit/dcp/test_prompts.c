/* A prompt in steps of 128 tokens is the prompt in one step, to the bit, whatever the form, the format and
 * the DCP size: no workspace that is smaller than a prompt shows. */
#include "unit/unit.h"

#include "base/mem.h"
#include "world.h"

enum { CHUNK = 128 };

static scenario prompt(int64_t len, int64_t q_len)
{
    scenario s = scenario_default();
    s.n_req = 1;
    s.req_id[0] = 7;
    s.seq_len[0] = len;
    s.q_len[0] = (int32_t)q_len;
    return s;
}

/* Compares the rows of a prompt cut into chunks, at one DCP size, with those of `whole`. */
static void in_chunks(scenario s, int64_t len, const outcome *whole)
{
    for (int64_t at = 0; at < len; at += CHUNK) {
        const int64_t n = len - at < CHUNK ? len - at : CHUNK;
        s.seq_len[0] = at + n;
        s.q_len[0] = (int32_t)n;
        s.max_rows = CHUNK;
        outcome o;
        world_run(&s, &o);
        const int64_t first = at * s.n_head;
        const size_t pairs = (size_t)(n * s.n_head);
        if (memcmp(o.lse, whole->lse + first, pairs * sizeof(float)) != 0 ||
            memcmp(o.out, whole->out + first * 512, pairs * 512 * sizeof(float)) != 0) {
            fail_msg("form %d, format %d, dcp %d: rows %lld to %lld of %lld differ", (int)s.how,
                     (int)s.kv, s.dcp, (long long)at, (long long)(at + n), (long long)len);
        }
        outcome_fini(&o);
    }
}

/* Chunks at one DCP size against the whole prompt at dcp 1. */
static void run(int64_t len, kvs_attend how, kvs_kv_format kv, int32_t q_fp8, int32_t dcp)
{
    scenario s = prompt(len, len);
    s.how = how;
    s.kv = kv;
    s.q_fp8 = q_fp8;
    s.n_index_head = how == KVS_ATTEND_SPARSE ? 2 : 0;
    s.tp = dcp;
    s.n_head = s.tp;
    s.write_chunk = 100; /* the history of a chunk was written in other steps */
    outcome whole;
    world_run(&s, &whole);
    s.dcp = dcp;
    in_chunks(s, len, &whole);
    outcome_fini(&whole);
}

static void fp8_rows_of_300_tokens(void **state)
{
    (void)state;
    run(300, KVS_ATTEND_DENSE, KVS_KV_FP8, 0, 4);
    run(300, KVS_ATTEND_DENSE, KVS_KV_FP8, 1, 2);
    run(300, KVS_ATTEND_CONTEXT, KVS_KV_FP8, 0, 4);
    run(300, KVS_ATTEND_CONTEXT, KVS_KV_FP8, 1, 4);
}

static void prompts_around_a_chunk(void **state)
{
    (void)state;
    static const int64_t len[] = {129, 192, 257};
    for (size_t i = 0; i < UNIT_COUNT(len); i++) {
        run(len[i], KVS_ATTEND_CONTEXT, KVS_KV_BF16, 0, 2);
        run(len[i], KVS_ATTEND_SPARSE, KVS_KV_FP8_DS_MLA, 0, 2);
    }
    run(257, KVS_ATTEND_DENSE, KVS_KV_FP8_DS_MLA, 0, 2);
}

/* Past a block of the context form, 512 positions. */
static void a_prompt_of_600_tokens(void **state)
{
    (void)state;
    run(600, KVS_ATTEND_CONTEXT, KVS_KV_FP8_DS_MLA, 0, 2);
    run(600, KVS_ATTEND_SPARSE, KVS_KV_BF16, 0, 2);
}

int main(void)
{
    mem_poison(true);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8_rows_of_300_tokens),
        cmocka_unit_test(prompts_around_a_chunk),
        cmocka_unit_test(a_prompt_of_600_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
