/* Requests in company, over several ranks, cancelled, failing, past their limits. */
#include <math.h>

#include "base/mem.h"
#include "kvspan/log.h"
#include "world.h"

enum { N = 9 };

/* Nine different requests: lengths, limits, sampling. */
static kvs_request request(int32_t i, int32_t *prompt)
{
    static const int64_t lens[N] = {1, 64, 65, 130, 3, 127, 40, 20, 256};
    world_prompt(prompt, lens[i], 29, (uint64_t)i);
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = lens[i];
    r.max_new = 5 + 7 * i;
    r.temp = i % 2 == 0 ? 0.0 : 1.0;
    r.top_k = i % 3 == 0 ? 6 : 0;
    r.repeat_penalty = i % 4 == 0 ? 1.2 : 0.0;
    r.seed = (uint64_t)i;
    r.ignore_eos = i % 2;
    return r;
}

static void company_ranks_and_drafts_change_nothing(void **state)
{
    (void)state;
    static answer alone[N], got[N];
    static int32_t prompt[N][256];
    fake.accuracy = 75;
    for (int32_t i = 0; i < N; i++) {
        const kvs_request r = request(i, prompt[i]);
        alone[i] = world_answer(world_default(), &r);
    }
    static const struct {
        int32_t tp, dcp, mtp, seqs, chunk;
    } cell[] = {
        {1, 1, 0, 4, 64}, {1, 1, 3, 9, 50}, {4, 2, 2, 3, 64}, {8, 8, 7, 9, 128}, {2, 1, 5, 5, 1}};
    for (size_t k = 0; k < UNIT_COUNT(cell); k++) {
        world_cfg c = world_default();
        c.tp = cell[k].tp;
        c.dcp = cell[k].dcp;
        c.mtp = cell[k].mtp;
        c.max_seqs = cell[k].seqs;
        c.chunk = cell[k].chunk;
        c.share = k % 2 == 1;
        static world w;
        world_open(&w, c);
        memset(got, 0, sizeof got);
        for (int32_t i = 0; i < N; i++) {
            const kvs_request r = request(i, prompt[i]);
            world_submit(&w, &r);
        }
        kvs_error err = {0};
        if (world_run(&w, got, N, &err) != KVS_IDLE) {
            fail_msg("cell %d: %s", (int)k, err.text);
        }
        world_close(&w);
        for (int32_t r = 1; r < c.tp; r++) {
            assert_int_equal(w.followed[r], KVS_OK);
        }
        for (int32_t i = 0; i < N; i++) {
            assert_int_equal(got[i].n, alone[i].n);
            assert_memory_equal(got[i].token, alone[i].token, (size_t)got[i].n * sizeof(int32_t));
            assert_true(got[i].digest == alone[i].digest);
            assert_int_equal(got[i].end, alone[i].end);
        }
    }
}

static void a_cancelled_request_ends_and_gives_its_pages_back(void **state)
{
    (void)state;
    static answer got[4];
    static int32_t prompt[4][256];
    memset(got, 0, sizeof got);
    world_cfg c = world_default();
    c.mtp = 3;
    c.max_seqs = 2;
    c.chunk = 10;
    static world w;
    world_open(&w, c);
    for (int32_t i = 0; i < 4; i++) {
        world_prompt(prompt[i], 100, 29, 7);
        kvs_request r = kvs_request_default();
        r.prompt = prompt[i];
        r.n_prompt = i == 0 ? 20 : 100;
        r.max_new = 300;
        r.ignore_eos = 1;
        world_submit(&w, &r);
    }
    for (int32_t t = 0; t < 6; t++) { /* 1 decodes, 2 reads its prompt, 3 and 4 wait */
        assert_int_equal(loop_step(&w.l, NULL), KVS_OK);
        world_poll(&w, got, 4);
    }
    assert_true(got[0].n > 0 && got[1].done > 0 && got[1].done < 100 && got[2].total == 0);
    for (uint64_t id = 1; id <= 3; id++) {
        queue_cancel(&w.q, w.l.run, c.max_seqs, id);
    }
    queue_cancel(&w.q, w.l.run, c.max_seqs, 77);
    assert_int_equal(loop_step(&w.l, NULL), KVS_OK);
    world_poll(&w, got, 4);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(got[i].end, KVS_FINISH_INTERRUPTED);
    }
    assert_int_equal(world_run(&w, got, 4, NULL), KVS_IDLE);
    assert_int_equal(got[3].end, KVS_FINISH_LENGTH);
    assert_int_equal(got[3].n, 300);
    world_close(&w);
}

static void logits_that_are_no_numbers_fail_their_request_alone(void **state)
{
    (void)state;
    static answer got[N];
    static int32_t prompt[N][256];
    memset(got, 0, sizeof got);
    world_cfg c = world_default();
    c.max_seqs = 4;
    c.mtp = 2;
    c.vocab = 30; /* the prompts below use 29; the last token is the bad one */
    c.n_eos = 0;
    fake.nan_after = 29;
    static world w;
    world_open(&w, c);
    for (int32_t i = 0; i < N; i++) {
        kvs_request r = request(i, prompt[i]);
        if (i == 4) {
            prompt[i][r.n_prompt - 1] = 29;
        }
        r.top_k = 0;
        r.temp = 0.0;
        world_submit(&w, &r);
    }
    assert_int_equal(world_run(&w, got, N, NULL), KVS_IDLE);
    fake.nan_after = -1;
    int32_t n_failed = 0;
    for (int32_t i = 0; i < N; i++) {
        n_failed += got[i].end == -1;
        if (got[i].end == -1) {
            assert_non_null(strstr(got[i].error.text, "NaN"));
            assert_true(i == 4 || got[i].token[got[i].n - 1] == 29);
        }
    }
    assert_int_equal(got[4].end, -1);
    assert_true(n_failed < N);
    world_close(&w);
}

static void a_failing_rank_ends_the_engine_with_its_message(void **state)
{
    (void)state;
    static answer got[N];
    static int32_t prompt[N][256];
    for (int32_t bad = 0; bad < 3; bad++) {
        for (int32_t call = 1; call <= 9; call += 4) {
            memset(got, 0, sizeof got);
            world_cfg c = world_default();
            c.tp = 3;
            c.mtp = 2;
            c.max_seqs = 2;
            static world w;
            world_open(&w, c);
            for (int32_t i = 0; i < 3; i++) {
                const kvs_request r = request(i, prompt[i]);
                world_submit(&w, &r);
            }
            fake.fail_rank = bad;
            fake.fail_call = call;
            kvs_error err = {0};
            assert_true(world_run(&w, got, 3, &err) < 0);
            if (strstr(err.text, "the fake failed call") == NULL) {
                fail_msg("%s", err.text);
            }
            kvs_error again = {0};
            assert_true(loop_step(&w.l, &again) < 0);
            assert_string_equal(again.text, err.text);
            assert_int_equal(got[0].end, -1);
            world_close(&w); /* every follower has returned */
            fake.fail_rank = -1;
            for (int32_t r = 1; r < 3; r++) {
                assert_true(w.followed[r] < 0);
            }
        }
    }
}

static void a_pool_too_small_fails_the_request_that_needs_more(void **state)
{
    (void)state;
    static answer got[2];
    static int32_t prompt[2][256];
    memset(got, 0, sizeof got);
    world_cfg c = world_default();
    c.n_page = 3;
    c.max_seqs = 2;
    static world w;
    world_open(&w, c);
    for (int32_t i = 0; i < 2; i++) {
        world_prompt(prompt[i], 60, 29, 1);
        kvs_request r = kvs_request_default();
        r.prompt = prompt[i];
        r.n_prompt = 60;
        r.max_new = 100;
        r.ignore_eos = 1;
        world_submit(&w, &r);
    }
    assert_int_equal(world_run(&w, got, 2, NULL), KVS_IDLE);
    assert_int_equal(got[0].end, KVS_FINISH_LENGTH);
    assert_int_equal(got[1].end, -1);
    assert_non_null(strstr(got[1].error.text, "pages"));
    world_close(&w);
}

static void unpolled_events_hold_the_engine_up_and_none_is_lost(void **state)
{
    (void)state;
    static answer a[1];
    int32_t prompt[4];
    memset(a, 0, sizeof a);
    world_prompt(prompt, 4, 29, 1);
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = 4;
    r.max_new = 590;
    r.ignore_eos = 1;
    world_cfg c = world_default();
    static world w;
    world_open(&w, c);
    queue_fini(&w.q);
    assert_int_equal(queue_init(&w.q, loop_max_events(1) + 20, NULL), KVS_OK);
    world_submit(&w, &r);
    int32_t n_busy = 0;
    for (;;) {
        kvs_error err = {0};
        const kvs_status st = loop_step(&w.l, &err);
        if (st == KVS_BUSY) {
            n_busy++;
            world_poll(&w, a, 1);
        } else if (st == KVS_IDLE) {
            break;
        }
    }
    world_poll(&w, a, 1);
    assert_true(n_busy > 10);
    assert_int_equal(a[0].n, 590);
    assert_int_equal(a[0].end, KVS_FINISH_LENGTH);
    world_close(&w);
}

static void steps_allocate_nothing(void **state)
{
    (void)state;
    static answer a[1];
    static int32_t prompt[200];
    memset(a, 0, sizeof a);
    world_prompt(prompt, 200, 29, 1);
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = 200;
    r.max_new = 60;
    r.ignore_eos = 1;
    r.temp = 1.0;
    r.top_p = 0.9;
    r.repeat_penalty = 1.1;
    r.logprobs = 20;
    world_cfg c = world_default();
    c.mtp = 4;
    static world w;
    world_open(&w, c);
    world_submit(&w, &r);
    kvs_status st = KVS_OK;
    while (st == KVS_OK) {
        mem_guard_begin();
        st = loop_step(&w.l, NULL);
        assert_int_equal(mem_guard_end(), 0);
        world_poll(&w, a, 1);
    }
    assert_int_equal(st, KVS_IDLE);
    assert_int_equal(a[0].n, 60);
    world_close(&w);
}

/* ---- refusals of a request --------------------------------------------------------------------- */

static void refused(const kvs_request *r, kvs_status want, const char *says)
{
    wt w;
    fake_weights(&w, 29, 0, false);
    seq *s = NULL;
    kvs_error err = {0};
    assert_int_equal(seq_new(&s, r, &w.h, 100, 1, &err), want);
    assert_null(s);
    if (strstr(err.text, says) == NULL) {
        fail_msg("\"%s\" lacks \"%s\"", err.text, says);
    }
}

static void requests_are_refused_by_field_and_value(void **state)
{
    (void)state;
    static int32_t prompt[101];
    int32_t stop[17] = {0};
    kvs_request ok = kvs_request_default();
    ok.prompt = prompt;
    ok.n_prompt = 99;
    kvs_request r = ok;
    wt w;
    fake_weights(&w, 29, 0, false);
    seq *s = NULL;
    assert_int_equal(seq_new(&s, &r, &w.h, 100, 1, NULL), KVS_OK); /* room for one */
    assert_int_equal(s->limit, 100);
    seq_free(s);
    r.max_new = INT64_MAX;
    assert_int_equal(seq_new(&s, &r, &w.h, 100, 1, NULL), KVS_OK);
    assert_int_equal(s->limit, 100);
    seq_free(s);
#define REFUSED(field, value, status, says)                                                        \
    do {                                                                                           \
        r = ok;                                                                                    \
        r.field = (value);                                                                         \
        refused(&r, (status), (says));                                                             \
    } while (0)
    REFUSED(n_prompt, 0, KVS_INVALID, "empty");
    REFUSED(n_prompt, 100, KVS_LIMIT, "100 tokens and the context limit is 100");
    REFUSED(n_prompt, 101, KVS_LIMIT, "101 tokens");
    REFUSED(max_new, -1, KVS_INVALID, "max_new -1");
    REFUSED(temp, -0.5, KVS_INVALID, "temp -0.5");
    REFUSED(temp, NAN, KVS_INVALID, "temp nan");
    REFUSED(temp, INFINITY, KVS_INVALID, "temp inf");
    REFUSED(top_p, 1.5, KVS_INVALID, "top-p 1.5");
    REFUSED(top_p, NAN, KVS_INVALID, "top-p");
    REFUSED(min_p, -1, KVS_INVALID, "min-p -1");
    REFUSED(repeat_penalty, -1, KVS_INVALID, "repeat-penalty -1");
    REFUSED(top_k, -1, KVS_INVALID, "top-k -1");
    REFUSED(logprobs, 21, KVS_INVALID, "logprobs 21");
    REFUSED(n_stop, 17, KVS_INVALID, "n_stop 17");
    REFUSED(n_stop, 1, KVS_INVALID, "n_stop 1"); /* no ids behind it */
#undef REFUSED
    r = ok;
    r.stop = stop;
    r.n_stop = 2;
    stop[1] = 29;
    refused(&r, KVS_INVALID, "stop id 1 is 29: the vocabulary's ids are 0 to 28");
    prompt[98] = -1;
    refused(&ok, KVS_INVALID, "prompt token 98 is -1");
    prompt[98] = 0;
}

static void too_many_waiting_requests_are_told_to_come_back(void **state)
{
    (void)state;
    queue q;
    assert_int_equal(queue_init(&q, 4, NULL), KVS_OK);
    wt w;
    fake_weights(&w, 29, 0, false);
    const int32_t token = 3;
    kvs_request r = kvs_request_default();
    r.prompt = &token;
    r.n_prompt = 1;
    for (int32_t i = 0; i <= KVS_MAX_WAITING; i++) {
        seq *s = NULL;
        uint64_t id = 0;
        assert_int_equal(seq_new(&s, &r, &w.h, 8, 1, NULL), KVS_OK);
        const kvs_status st = queue_submit(&q, s, &id, NULL);
        assert_int_equal(st, i < KVS_MAX_WAITING ? KVS_OK : KVS_BUSY);
        if (st < 0) {
            seq_free(s);
        } else {
            assert_int_equal(id, i + 1);
        }
    }
    queue_fini(&q); /* frees those that wait */
}

int main(void)
{
    const kvs_logger silent = {0};
    kvs_log_set(&silent); /* groups end on purpose */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(company_ranks_and_drafts_change_nothing),
        cmocka_unit_test(a_cancelled_request_ends_and_gives_its_pages_back),
        cmocka_unit_test(logits_that_are_no_numbers_fail_their_request_alone),
        cmocka_unit_test(a_failing_rank_ends_the_engine_with_its_message),
        cmocka_unit_test(a_pool_too_small_fails_the_request_that_needs_more),
        cmocka_unit_test(unpolled_events_hold_the_engine_up_and_none_is_lost),
        cmocka_unit_test(steps_allocate_nothing),
        cmocka_unit_test(requests_are_refused_by_field_and_value),
        cmocka_unit_test(too_many_waiting_requests_are_told_to_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
