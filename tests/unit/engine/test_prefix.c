/* Prefixes taken over from sequences that ended or run: how many positions, that the answer is the one of a prompt
 * read whole, and which sequence goes when place or pages are short. The fake checks both caches at every call. */
#include "base/mem.h"
#include "world.h"

enum { LONG = 1400, ASKS = 8 };

static world w;
static answer got[ASKS];
static int32_t n_ask;

static void begin(world_cfg c)
{
    memset(got, 0, sizeof got);
    n_ask = 0;
    world_open(&w, c);
}

static world_cfg cfg(int32_t seqs, int32_t mtp)
{
    world_cfg c = world_default();
    c.ctx = LONG;
    c.max_seqs = seqs;
    c.mtp = mtp;
    c.n_eos = 0;
    return c;
}

static kvs_request request(const int32_t *prompt, int64_t n, int64_t max_new)
{
    kvs_request r = kvs_request_default();
    r.prompt = prompt;
    r.n_prompt = n;
    r.max_new = max_new;
    return r;
}

/* Runs a request to its end and returns how many positions it did not read; the answer is that of an engine that
 * has read nothing before. */
static int64_t ask(const int32_t *prompt, int64_t n, int64_t max_new)
{
    const kvs_request r = request(prompt, n, max_new);
    const loop_counts before = w.l.n;
    kvs_error err = {0};
    assert_int_equal(world_submit(&w, &r), n_ask + 1);
    if (world_run(&w, got, ASKS, &err) != KVS_IDLE) {
        fail_msg("%s", err.text);
    }
    const answer *a = &got[n_ask++];
    const int64_t reused = (int64_t)(w.l.n.n_reused - before.n_reused);
    assert_int_equal(w.l.n.n_prefill - before.n_prefill, n - reused);
    assert_int_equal(a->reused, reused);
    assert_int_equal(a->done, n);
    assert_int_equal(a->end, KVS_FINISH_LENGTH);
    world_cfg c = world_default();
    c.ctx = LONG;
    c.chunk = LONG;
    c.n_eos = 0;
    const answer alone = world_answer(c, &r);
    assert_int_equal(a->n, alone.n);
    assert_memory_equal(a->token, alone.token, (size_t)a->n * sizeof(int32_t));
    assert_true(a->digest == alone.digest);
    return reused;
}

static int32_t n_kept(void)
{
    int32_t n = 0;
    for (int32_t i = 0; i < w.c.max_seqs; i++) {
        n += w.l.kept[i] != NULL;
    }
    return n;
}

/* Prompt number `which`; they differ from the first token on. */
static void text(int32_t *token, int64_t n, int32_t which)
{
    world_prompt(token, n, 28, (uint64_t)which);
    token[0] = which;
}

/* ---- how much ----------------------------------------------------------------------------------- */

/* A request of n1 tokens and an answer, then one of n2 tokens of which the first `common` are those of the first
 * sequence. One token a step, so draft rows reach to three before the end of the sequence: the pass before the
 * last verification knows the token before the last two. */
typedef struct pair {
    int64_t n1, answer, n2, common;
    int64_t plain, drafts;               /* reused                                              */
    int64_t prompt_plain, prompt_drafts; /* where rows of answers are not those of prompts      */
} pair;

static const pair pairs[] = {
    {1024, 5, 1024, 1024, 512, 512, 512, 512},     /* the same again: its last token is read      */
    {1025, 5, 1025, 1025, 1024, 1024, 1024, 1024}, /*                                             */
    {1024, 5, 1029, 1029, 1024, 1024, 1024, 512},  /* draft row 1023 came with the answer         */
    {1100, 5, 1150, 1024, 1024, 512, 1024, 512},   /* draft row 1023 belongs to the token at 1024 */
    {1100, 5, 1150, 1025, 1024, 1024, 1024, 1024}, /*                                             */
    {1100, 5, 1150, 1023, 512, 512, 512, 512},     /*                                             */
    {1100, 5, 700, 700, 512, 512, 512, 512},       /* a part of the first one                     */
    {1100, 5, 513, 513, 512, 512, 512, 512},       /*                                             */
    {1100, 5, 512, 512, 0, 0, 0, 0},               /*                                             */
    {1100, 5, 1100, 0, 0, 0, 0, 0},                /* nothing in common                           */
    {300, 5, 300, 300, 0, 0, 0, 0},                /*                                             */
    {500, 12, 530, 512, 0, 0, 0, 0},               /* 511 rows                                    */
    {500, 13, 530, 513, 512, 0, 0, 0},             /* 512 rows, 510 of drafts                     */
    {500, 14, 530, 514, 512, 0, 0, 0},             /*                                             */
    {500, 15, 530, 515, 512, 512, 0, 0},           /*                                             */
    {600, 500, 1150, 1100, 1024, 1024, 512, 512},  /* most of it an answer                        */
};

typedef struct cell {
    int32_t tp, dcp, mtp, seqs, chunk;
    bool share, keep_prompt;
} cell;

static void run_pair(const pair *p, const cell *k)
{
    static int32_t first[LONG], second[LONG];
    world_cfg c = cfg(k->seqs, k->mtp);
    c.tp = k->tp;
    c.dcp = k->dcp;
    c.chunk = k->chunk;
    c.share = k->share;
    c.keep_prompt = k->keep_prompt;
    begin(c);
    text(first, p->n1, 1);
    text(second, p->n2, 2);
    assert_int_equal(ask(first, p->n1, p->answer), 0);
    memcpy(first + p->n1, got[0].token, (size_t)p->answer * sizeof *first);
    memcpy(second, first, (size_t)p->common * sizeof *second);
    if (p->common < p->n2 && p->common < p->n1 + p->answer) {
        second[p->common] = (first[p->common] + 1) % 29;
    }
    const int64_t plain = k->keep_prompt ? p->prompt_plain : p->plain;
    const int64_t drafts = k->keep_prompt ? p->prompt_drafts : p->drafts;
    const int64_t want = k->mtp > 0 ? drafts : plain;
    const int64_t reused = ask(second, p->n2, 9);
    if (reused != want) {
        fail_msg("%d + %d, then %d with %d in common, mtp %d: %d reused, want %d", (int)p->n1,
                 (int)p->answer, (int)p->n2, (int)p->common, k->mtp, (int)reused, (int)want);
    }
    world_close(&w);
}

static void a_common_prefix_is_read_once(void **state)
{
    (void)state;
    static const cell cells[] = {{1, 1, 0, 1, 64, false, false},
                                 {1, 1, 3, 1, 100, false, false},
                                 {1, 1, 0, 2, 700, false, true},
                                 {1, 1, 4, 1, 333, false, true}};
    fake.accuracy = 0;
    for (size_t i = 0; i < UNIT_COUNT(pairs); i++) {
        for (size_t k = 0; k < UNIT_COUNT(cells); k++) {
            run_pair(&pairs[i], &cells[k]);
        }
    }
}

static void every_dcp_size_reuses_the_same(void **state)
{
    (void)state;
    static const cell cells[] = {{2, 2, 0, 1, 300, false, false},
                                 {4, 4, 7, 3, 512, true, false},
                                 {8, 8, 0, 1, 1000, false, false},
                                 {8, 8, 2, 2, 257, true, false}};
    static const int32_t some[] = {0, 3, 4, 14};
    fake.accuracy = 0;
    for (size_t i = 0; i < UNIT_COUNT(some); i++) {
        for (size_t k = 0; k < UNIT_COUNT(cells); k++) {
            run_pair(&pairs[some[i]], &cells[k]);
        }
    }
}

/* A request too short for drafts has no rows of them. */
static void draft_rows_that_were_never_made_are_not_reused(void **state)
{
    (void)state;
    static int32_t prompt[LONG];
    fake.accuracy = 80;
    begin(cfg(1, 3));
    text(prompt, 1100, 1);
    assert_int_equal(ask(prompt, 1100, 2), 0);
    assert_int_equal(ask(prompt, 1100, 2), 1024);
    assert_int_equal(ask(prompt, 1100, 20), 0);
    assert_int_equal(ask(prompt, 1100, 2), 1024);
    assert_int_equal(ask(prompt, 700, 20), 512); /* of what the third one made */
    world_close(&w);
}

static void a_conversation_reads_each_turn_once(void **state)
{
    (void)state;
    static int32_t talk[LONG];
    static const int64_t turn[] = {600, 40, 300, 10, 1}, reused[] = {0, 512, 512, 512, 1024};
    fake.accuracy = 70;
    for (int32_t mtp = 0; mtp <= 4; mtp += 4) {
        begin(cfg(2, mtp));
        int64_t n = 0;
        for (int32_t i = 0; i < 5; i++) {
            text(talk + n, turn[i], i);
            n += turn[i];
            assert_int_equal(ask(talk, n, 25), reused[i]);
            assert_int_equal(n_kept(), 1); /* each one carries the former on */
            memcpy(talk + n, got[i].token, 25 * sizeof *talk);
            n += 25;
        }
        world_close(&w);
    }
}

/* ---- who stays ---------------------------------------------------------------------------------- */

static void the_sequence_unused_for_longest_gives_its_place(void **state)
{
    (void)state;
    static int32_t a[LONG], b[LONG], c[LONG];
    text(a, 600, 1);
    text(b, 600, 2);
    text(c, 600, 3);
    begin(cfg(2, 0));
    assert_int_equal(ask(a, 600, 3), 0);
    assert_int_equal(ask(b, 600, 3), 0);
    assert_int_equal(n_kept(), 2);
    assert_int_equal(ask(a, 600, 3), 512); /* its own place */
    assert_int_equal(n_kept(), 2);
    assert_int_equal(ask(c, 600, 3), 0); /* that of b */
    assert_int_equal(ask(a, 600, 3), 512);
    assert_int_equal(ask(b, 600, 3), 0); /* that of c */
    assert_int_equal(ask(c, 600, 3), 0); /* that of a */
    assert_int_equal(ask(b, 600, 3), 512);
    world_close(&w);
}

/* Two that begin alike and go on differently both stay, while there is place. */
static void a_branch_leaves_the_other_one_kept(void **state)
{
    (void)state;
    static int32_t a[LONG], b[LONG], c[LONG];
    text(a, 1300, 1);
    text(b, 1300, 2);
    text(c, 600, 3);
    memcpy(b, a, 520 * sizeof *a);
    begin(cfg(2, 0));
    assert_int_equal(ask(a, 1300, 3), 0);
    assert_int_equal(ask(b, 1300, 3), 512);
    assert_int_equal(ask(a, 1300, 3), 1024);
    assert_int_equal(ask(b, 1300, 3), 1024);
    assert_int_equal(ask(c, 600, 3), 0); /* the place of a; b holds pages of it */
    assert_int_equal(ask(b, 1300, 3), 1024);
    assert_int_equal(ask(a, 600, 3), 512);
    world_close(&w);
}

static void a_sequence_whose_prefix_is_taken_counts_as_used(void **state)
{
    (void)state;
    static int32_t a[LONG], b[LONG], c[LONG], d[LONG];
    text(a, 1300, 1);
    text(b, 600, 2);
    text(c, 600, 3);
    text(d, 600, 4);
    memcpy(c, a, 520 * sizeof *a);
    begin(cfg(3, 0));
    assert_int_equal(ask(a, 1300, 3), 0);
    assert_int_equal(ask(b, 600, 3), 0);
    assert_int_equal(ask(c, 600, 3), 512);
    assert_int_equal(n_kept(), 3);
    assert_int_equal(ask(d, 600, 3), 0); /* the place of b */
    assert_int_equal(ask(a, 1300, 3), 1024);
    assert_int_equal(ask(b, 600, 3), 0);
    world_close(&w);
}

static void kept_pages_go_where_a_request_needs_them(void **state)
{
    (void)state;
    static int32_t a[LONG], b[LONG], c[LONG];
    text(a, 600, 1);
    text(b, 600, 2);
    text(c, 1390, 3);
    world_cfg g = cfg(4, 0);
    g.n_page = 30;
    begin(g);
    assert_int_equal(ask(a, 600, 3), 0);
    assert_int_equal(ask(b, 600, 3), 0); /* 10 pages each */
    assert_int_equal(ask(c, 700, 3), 0); /* 11: a goes */
    assert_int_equal(n_kept(), 2);
    assert_int_equal(ask(b, 600, 3), 512);
    assert_int_equal(ask(c, 1390, 9), 512); /* 22 of them, 8 its own already: b goes */
    assert_int_equal(n_kept(), 1);
    assert_int_equal(ask(a, 1000, 3), 0); /* its 16: c goes */
    assert_int_equal(n_kept(), 1);
    assert_int_equal(w.l.n.page_peak <= 30, 1);
    world_close(&w);
}

static void requests_at_once_read_a_common_prompt_once(void **state)
{
    (void)state;
    static int32_t prompt[LONG];
    text(prompt, 700, 1);
    fake.accuracy = 60;
    for (int32_t mtp = 0; mtp <= 3; mtp += 3) {
        answer alone[3];
        kvs_request r = request(prompt, 700, 30);
        r.temp = 1.2;
        for (int32_t i = 0; i < 3; i++) {
            r.stream = (uint64_t)i;
            world_cfg c = cfg(1, 0);
            alone[i] = world_answer(c, &r);
        }
        begin(cfg(3, mtp));
        for (int32_t i = 0; i < 3; i++) {
            r.stream = (uint64_t)i;
            world_submit(&w, &r);
        }
        assert_int_equal(world_run(&w, got, 3, NULL), KVS_IDLE);
        assert_int_equal(w.l.n.n_prefill, 700 + 2 * 188);
        assert_int_equal(w.l.n.n_reused, 2 * 512);
        for (int32_t i = 0; i < 3; i++) {
            assert_memory_equal(got[i].token, alone[i].token, 30 * sizeof(int32_t));
            assert_true(got[i].digest == alone[i].digest);
        }
        assert_true(got[0].token[3] != got[1].token[3] || got[0].token[4] != got[1].token[4]);
        world_close(&w);
    }
}

/* ---- ends --------------------------------------------------------------------------------------- */

static void a_cancelled_request_keeps_what_it_has_read(void **state)
{
    (void)state;
    static int32_t prompt[LONG];
    text(prompt, 1100, 1);
    fake.accuracy = 100;
    for (int32_t mtp = 0; mtp <= 2; mtp += 2) {
        world_cfg c = cfg(1, mtp);
        c.chunk = 100;
        begin(c);
        const kvs_request r = request(prompt, 1100, 50);
        world_submit(&w, &r);
        for (int32_t i = 0; i < 7; i++) {
            assert_int_equal(loop_step(&w.l, NULL), KVS_OK);
        }
        queue_cancel(&w.q, w.l.run, 1, 1);
        assert_int_equal(world_run(&w, got, ASKS, NULL), KVS_IDLE);
        assert_int_equal(got[0].end, KVS_FINISH_INTERRUPTED);
        assert_int_equal(got[0].done, 700);
        queue_cancel(&w.q, w.l.run, 1, 1); /* it has ended: nothing happens */
        n_ask = 1;
        assert_int_equal(ask(prompt, 1100, 50), 512);
        world_submit(&w, &r); /* now in the middle of its answer */
        for (int32_t i = 0; i < 5; i++) {
            assert_int_equal(loop_step(&w.l, NULL), KVS_OK);
        }
        queue_cancel(&w.q, w.l.run, 1, 3);
        assert_int_equal(world_run(&w, got, ASKS, NULL), KVS_IDLE);
        assert_int_equal(got[2].end, KVS_FINISH_INTERRUPTED);
        assert_true(got[2].n > 0 && got[2].n < 50);
        n_ask = 3;
        assert_int_equal(ask(prompt, 1100, 50), 1024);
        world_close(&w);
    }
}

static void a_failed_request_is_not_kept(void **state)
{
    (void)state;
    static int32_t prompt[LONG];
    text(prompt, 700, 1);
    world_cfg c = cfg(1, 0);
    c.vocab = 30;
    prompt[699] = 29;
    fake.nan_after = 29;
    begin(c);
    const kvs_request r = request(prompt, 700, 5);
    world_submit(&w, &r);
    assert_int_equal(world_run(&w, got, ASKS, NULL), KVS_IDLE);
    fake.nan_after = -1;
    assert_int_equal(got[0].end, -1);
    assert_int_equal(n_kept(), 0);
    assert_int_equal(pages_available(w.l.pages), w.l.n_page);
    world_close(&w);
}

static void reuse_can_be_turned_off(void **state)
{
    (void)state;
    static int32_t prompt[LONG];
    text(prompt, 700, 1);
    world_cfg c = cfg(3, 0);
    c.no_reuse = true;
    begin(c);
    assert_int_equal(ask(prompt, 700, 5), 0);
    assert_int_equal(ask(prompt, 700, 5), 0);
    assert_int_equal(n_kept(), 0);
    assert_int_equal(pages_available(w.l.pages), w.l.n_page);
    const kvs_request r = request(prompt, 700, 5); /* nor of each other */
    world_submit(&w, &r);
    world_submit(&w, &r);
    assert_int_equal(world_run(&w, got, ASKS, NULL), KVS_IDLE);
    assert_int_equal(w.l.n.n_reused, 0);
    world_close(&w);
}

static void taking_a_prefix_over_allocates_nothing(void **state)
{
    (void)state;
    static int32_t a[LONG], b[LONG];
    text(a, 700, 1);
    text(b, 700, 2);
    memcpy(b, a, 600 * sizeof *a);
    begin(cfg(2, 2));
    kvs_request r = request(a, 700, 5);
    world_submit(&w, &r);
    r.prompt = b;
    world_submit(&w, &r);
    world_submit(&w, &r);
    kvs_status st = KVS_OK;
    while (st == KVS_OK) {
        mem_guard_begin();
        st = loop_step(&w.l, NULL);
        assert_int_equal(mem_guard_end(), 0);
        world_poll(&w, got, ASKS);
    }
    assert_int_equal(st, KVS_IDLE);
    assert_int_equal(w.l.n.n_reused, 1024);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_common_prefix_is_read_once),
        cmocka_unit_test(every_dcp_size_reuses_the_same),
        cmocka_unit_test(draft_rows_that_were_never_made_are_not_reused),
        cmocka_unit_test(a_conversation_reads_each_turn_once),
        cmocka_unit_test(the_sequence_unused_for_longest_gives_its_place),
        cmocka_unit_test(a_branch_leaves_the_other_one_kept),
        cmocka_unit_test(a_sequence_whose_prefix_is_taken_counts_as_used),
        cmocka_unit_test(kept_pages_go_where_a_request_needs_them),
        cmocka_unit_test(requests_at_once_read_a_common_prompt_once),
        cmocka_unit_test(a_cancelled_request_keeps_what_it_has_read),
        cmocka_unit_test(a_failed_request_is_not_kept),
        cmocka_unit_test(reuse_can_be_turned_off),
        cmocka_unit_test(taking_a_prefix_over_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
