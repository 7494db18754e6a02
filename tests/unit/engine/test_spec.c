/* Speculation over the fake forward pass: which rows, positions and tokens every pass holds, and that the answer
 * is the one without it. The fake checks the contents of both caches at every call. */
#include <math.h>

#include "base/rng.h"
#include "world.h"

/* What the model says greedily: the answer to a prompt by walking states, without an engine. */
static int32_t walk(const int32_t *prompt, int64_t n_prompt, int32_t vocab, int32_t eos,
                    int32_t max_new, int32_t *out)
{
    uint64_t state = fake_state(prompt, n_prompt);
    int32_t n = 0;
    while (n < max_new) {
        int32_t best = 0;
        for (int32_t v = 1; v < vocab; v++) {
            best = fake_logit(state, v) > fake_logit(state, best) ? v : best;
        }
        out[n++] = best;
        if (best == eos) {
            break;
        }
        state = fake_next(state, best);
    }
    return n;
}

static void same_answer(const answer *a, const int32_t *want, int32_t n_want, const char *what)
{
    if (a->n != n_want || memcmp(a->token, want, (size_t)n_want * sizeof *want) != 0) {
        fail_msg("%s: %d tokens, want %d", what, a->n, n_want);
    }
}

static void any_k_chunk_and_length_give_the_walked_answer(void **state)
{
    (void)state;
    static const int32_t lens[] = {1, 2, 63, 64, 65, 127, 128, 129, 200};
    static const int32_t chunks[] = {1, 64, 100, 256};
    static const int32_t accuracy[] = {0, 60, 100};
    static int32_t prompt[256], want[WORLD_OUT];
    for (size_t i = 0; i < UNIT_COUNT(lens); i++) {
        const int32_t n = lens[i];
        world_prompt(prompt, n, 29, (uint64_t)i);
        kvs_request r = kvs_request_default();
        r.prompt = prompt;
        r.n_prompt = n;
        r.max_new = 70;
        const int32_t n_want = walk(prompt, n, 29, 28, 70, want);
        uint64_t digest = 0;
        for (int32_t mtp = 0; mtp <= KVS_MAX_DRAFTS; mtp++) {
            world_cfg c = world_default();
            c.mtp = mtp;
            c.share = mtp % 2 == 0;
            c.chunk = chunks[(i + (size_t)mtp) % UNIT_COUNT(chunks)];
            fake.accuracy = accuracy[mtp % 3];
            fake_n_prompt = n;
            const answer a = world_answer(c, &r);
            fake_n_prompt = 0;
            char what[80];
            snprintf(what, sizeof what, "prompt %d, mtp %d, chunk %d", n, mtp, c.chunk);
            same_answer(&a, want, n_want, what);
            assert_int_equal(a.end, want[n_want - 1] == 28 ? KVS_FINISH_STOP : KVS_FINISH_LENGTH);
            assert_int_equal(a.done, n);
            assert_int_equal(a.n_progress, 1 + (n + c.chunk - 1) / c.chunk);
            digest = mtp == 0 ? a.digest : digest;
            assert_true(a.digest == digest);
        }
    }
}

/* The digest is XXH3-64 of the rows that the tokens were drawn from. */
static void digest_is_the_hash_of_the_emitted_rows(void **state)
{
    (void)state;
    int32_t prompt[5];
    world_prompt(prompt, 5, 29, 3);
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = 5;
    r.max_new = 9;
    r.ignore_eos = 1;
    world_cfg c = world_default();
    c.mtp = 3;
    const answer a = world_answer(c, &r);
    assert_int_equal(a.n, 9);
    static float rows[9][29];
    uint64_t s = fake_state(prompt, 5);
    for (int32_t i = 0; i < 9; i++) {
        for (int32_t v = 0; v < 29; v++) {
            rows[i][v] = fake_logit(s, v);
        }
        s = fake_next(s, a.token[i]);
    }
    assert_true(a.digest == hash_xx64(rows, sizeof rows));
}

static void passes_hold_the_rows_of_the_drawing(void **state)
{
    (void)state;
    int32_t prompt[10];
    world_prompt(prompt, 10, 29, 8);
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = 10;
    r.max_new = 9;
    r.ignore_eos = 1;
    world_cfg c = world_default();
    c.mtp = 3;
    c.chunk = 4;
    c.share = true;
    fake.log = true;
    fake.accuracy = 100;
    fake_log[0] = '\0';
    world_answer(c, &r);
    /* chunks of 4, 4, 2; the last pair of the prompt waits for the first token. Nine tokens: one from the
     * prompt, four from each of two verifications; then nothing is left to do. */
    assert_string_equal(fake_log, "S 0+4;D 0+4;S 4+4;D 4+4;S 8+2;D 8+1;"
                                  "D 9+1;R 10+1;R 11+1;S 10+4;"
                                  "D 10+4;R 14+1;R 15+1;S 14+4;");
    fake_log[0] = '\0';
    fake.accuracy = 0;
    r.max_new = 5;
    c.share = false;
    world_answer(c, &r);
    /* Every draft is wrong: one token a step, rows written again; fewer drafts near the limit. */
    assert_string_equal(fake_log, "S 0+4;D 0+4;S 4+4;D 4+4;S 8+2;D 8+1;"
                                  "D 9+1;D 10+1;D 11+1;S 10+4;"
                                  "D 10+1;D 11+1;S 11+3;"
                                  "D 11+1;S 12+2;"
                                  "S 13+1;");
    fake.log = false;
}

static void a_request_without_room_for_drafts_makes_no_pass(void **state)
{
    (void)state;
    int32_t prompt[70];
    world_prompt(prompt, 70, 29, 8);
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = 70;
    r.ignore_eos = 1;
    world_cfg c = world_default();
    c.mtp = 2;
    for (int32_t n = 1; n <= 3; n++) {
        r.max_new = n;
        fake_n_draft = 0;
        assert_int_equal(world_answer(c, &r).n, n);
        assert_true((fake_n_draft > 0) == (n == 3));
    }
}

static void an_end_token_inside_an_accepted_run_is_the_last(void **state)
{
    (void)state;
    int32_t prompt[20], want[WORLD_OUT];
    world_prompt(prompt, 20, 29, 4);
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = 20;
    r.max_new = 60;
    r.ignore_eos = 1;
    fake.accuracy = 100;
    const int32_t n_all = walk(prompt, 20, 29, -1, 60, want);
    assert_int_equal(n_all, 60);
    for (int32_t cut = 0; cut < 12; cut++) {
        int32_t first = 0;
        while (want[first] != want[cut]) {
            first++;
        }
        r.stop = &want[cut];
        r.n_stop = 1;
        for (int32_t mtp = 0; mtp <= 7; mtp += 7) {
            world_cfg c = world_default();
            c.mtp = mtp;
            const answer a = world_answer(c, &r);
            same_answer(&a, want, first + 1, "stop id");
            assert_int_equal(a.end, KVS_FINISH_STOP);
        }
    }
}

static void limits_end_an_answer_and_say_which(void **state)
{
    (void)state;
    static int32_t prompt[256];
    world_prompt(prompt, 250, 29, 2);
    for (int32_t mtp = 0; mtp <= 7; mtp++) {
        for (int32_t ctx = 129; ctx <= 140; ctx++) {
            world_cfg c = world_default();
            c.mtp = mtp;
            c.ctx = ctx;
            fake.accuracy = 80;
            kvs_request r = kvs_request_default();
            r.prompt = prompt;
            r.n_prompt = 128;
            r.ignore_eos = 1;
            answer a = world_answer(c, &r);
            assert_int_equal(a.end, KVS_FINISH_CONTEXT);
            assert_int_equal(a.n, ctx - 128);
            r.max_new = ctx - 128;
            a = world_answer(c, &r);
            assert_int_equal(a.end, KVS_FINISH_LENGTH);
            assert_int_equal(a.n, ctx - 128);
            r.max_new++;
            assert_int_equal(world_answer(c, &r).end, KVS_FINISH_CONTEXT);
        }
    }
}

/* ---- sampled requests ------------------------------------------------------------------------- */

static void seeds_repeat_and_do_not_depend_on_speculation(void **state)
{
    (void)state;
    int32_t prompt[40];
    world_prompt(prompt, 40, 29, 6);
    answer first[4];
    for (uint64_t seed = 0; seed < 4; seed++) {
        kvs_request r = kvs_request_default();
        r.prompt = prompt;
        r.n_prompt = 40;
        r.max_new = 60;
        r.ignore_eos = 1;
        r.temp = 1.3;
        r.top_p = 0.95;
        r.top_k = 20;
        r.repeat_penalty = 1.1;
        r.seed = seed / 2;
        r.stream = seed % 2;
        first[seed] = world_answer(world_default(), &r);
        for (int32_t mtp = 1; mtp <= 7; mtp += 2) {
            world_cfg c = world_default();
            c.mtp = mtp;
            c.chunk = 7;
            fake.accuracy = 90;
            const answer a = world_answer(c, &r);
            same_answer(&a, first[seed].token, 60, "sampled");
            assert_true(a.digest == first[seed].digest);
        }
        for (uint64_t i = 0; i < seed; i++) {
            assert_true(memcmp(first[seed].token, first[i].token, 60 * sizeof(int32_t)) != 0);
        }
    }
}

/* Pairs of tokens that a verified run emits, against their exact probabilities. Five tokens, so 25 pairs and 24
 * degrees of freedom; 60 is passed by chance once in 15,000 runs. */
static void speculation_leaves_the_distribution_unchanged(void **state)
{
    (void)state;
    enum { V = 5, RUNS = 4000 };
    const int32_t prompt[3] = {1, 4, 2};
    fake.spread = 3.0;
    fake.accuracy = 70;
    double p[V][V];
    const uint64_t s0 = fake_state(prompt, 3);
    for (int32_t a = 0; a < V; a++) {
        const uint64_t s1 = fake_next(s0, a);
        double z0 = 0, z1 = 0;
        for (int32_t v = 0; v < V; v++) {
            z0 += exp((double)fake_logit(s0, v) / 0.8);
            z1 += exp((double)fake_logit(s1, v) / 0.8);
        }
        for (int32_t b = 0; b < V; b++) {
            p[a][b] = exp((double)fake_logit(s0, a) / 0.8) / z0 *
                      exp((double)fake_logit(s1, b) / 0.8) / z1;
        }
    }
    int32_t count[V][V] = {{0}};
    world_cfg c = world_default();
    c.vocab = V;
    c.n_eos = 0;
    c.mtp = 2;
    c.max_seqs = 8;
    static world w;
    static answer got[RUNS];
    memset(got, 0, sizeof got);
    world_open(&w, c);
    for (int32_t base = 0; base < RUNS; base += 500) {
        for (int32_t i = base; i < base + 500; i++) {
            kvs_request r = kvs_request_default();
            r.prompt = prompt;
            r.n_prompt = 3;
            r.max_new = 5;
            r.temp = 0.8;
            r.seed = 11;
            r.stream = (uint64_t)i;
            world_submit(&w, &r);
        }
        assert_int_equal(world_run(&w, got, RUNS, NULL), KVS_IDLE);
    }
    assert_true(w.l.n.n_accept[0] > 100 && w.l.n.n_accept[0] < w.l.n.n_draft[0] - 100);
    world_close(&w);
    for (int32_t i = 0; i < RUNS; i++) {
        count[got[i].token[0]][got[i].token[1]]++;
    }
    double chi = 0.0;
    for (int32_t a = 0; a < V; a++) {
        for (int32_t b = 0; b < V; b++) {
            const double want = RUNS * p[a][b];
            chi += (count[a][b] - want) * (count[a][b] - want) / want;
        }
    }
    fake.spread = 8.0;
    if (!(chi < 60.0)) {
        fail_msg("chi-square %.1f", chi);
    }
}

static void acceptance_is_counted_by_position(void **state)
{
    (void)state;
    int32_t prompt[9];
    world_prompt(prompt, 9, 29, 1);
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = 9;
    r.max_new = 41;
    r.ignore_eos = 1;
    static world w;
    answer a = {0};
    world_cfg c = world_default();
    c.mtp = 3;
    fake.accuracy = 100;
    world_open(&w, c);
    world_submit(&w, &r);
    assert_int_equal(world_run(&w, &a, 1, NULL), KVS_IDLE);
    const loop_counts *n = &w.l.n;
    assert_int_equal(n->n_prefill, 9);
    assert_int_equal(n->n_output, 41);
    assert_int_equal(n->n_decode, 40);
    assert_int_equal(n->n_verify, 10);
    for (int32_t j = 0; j < 3; j++) {
        assert_int_equal(n->n_draft[j], 10);
        assert_int_equal(n->n_accept[j], 10);
    }
    assert_int_equal(n->n_draft[3], 0);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_k_chunk_and_length_give_the_walked_answer),
        cmocka_unit_test(digest_is_the_hash_of_the_emitted_rows),
        cmocka_unit_test(passes_hold_the_rows_of_the_drawing),
        cmocka_unit_test(a_request_without_room_for_drafts_makes_no_pass),
        cmocka_unit_test(an_end_token_inside_an_accepted_run_is_the_last),
        cmocka_unit_test(limits_end_an_answer_and_say_which),
        cmocka_unit_test(seeds_repeat_and_do_not_depend_on_speculation),
        cmocka_unit_test(speculation_leaves_the_distribution_unchanged),
        cmocka_unit_test(acceptance_is_counted_by_position),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
