/* Processes that meet at an address and are connected by TCP: the collectives and their faults as between
 * threads and MPI processes, ranks that die, and what may go wrong while they meet. */
#include "unit/unit.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "cases.h"
#include "comm/tcp_mesh.h"
#include "kvspan/log.h"
#include "processes.h"

static void run(int32_t n, rank_fn fn, void *ctx)
{
    const comm_config cfg = test_config(LONG_MS);
    processes_run(n, &cfg, fn, ctx);
}

/* ---- collectives ------------------------------------------------------------------------------- */

static void all_cases(rank_job *job)
{
    static const rank_fn cases[] = {case_all_gather,     case_all_to_all, case_broadcast,
                                    case_reduce_scatter, case_all_reduce, case_exact_sum,
                                    case_no_alloc};
    EXPECT(job, strcmp(comm_transport(job->c), "tcp") == 0);
    for (size_t i = 0; i < UNIT_COUNT(cases); i++) {
        cases[i](job);
    }
}

static void collectives_are_right_for_every_number_of_ranks(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 8; n++) {
        run(n, all_cases, NULL);
        run(n, case_counters, NULL);
    }
}

static void many_calls_of_changing_size(void **state)
{
    (void)state;
    run(3, case_stress, NULL);
    run(8, case_stress, NULL);
}

static void groups_of_groups_close_in_any_order(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        bool parent_first = i == 1;
        run(8, case_split, &parent_first);
    }
    run(7, case_uneven_split, NULL);
}

static void large_segments_arrive_whole(void **state)
{
    (void)state;
    run(3, case_large, NULL);
}

static void ranks_agree_on_their_start(void **state)
{
    (void)state;
    run(4, case_handshake, NULL);
}

/* Two groups per rank, each used by a thread of its own. */
typedef struct second {
    comm *c;
    int32_t rank;
    kvs_status st;
    float sum;
} second;

static void *second_main(void *arg)
{
    second *s = arg;
    for (int k = 0; k < 200 && s->st == KVS_OK; k++) {
        float x = (float)(k * s->rank);
        if ((k * 7 + s->rank * 3) % 11 == 0) {
            sleep_ms(1);
        }
        s->st = comm_all_reduce(s->c, &x, 1, NULL);
        s->sum += x;
    }
    return NULL;
}

static void two_groups_rank(rank_job *job)
{
    second s[2] = {{.c = job->c, .rank = job->rank}, {.rank = job->rank}};
    pthread_t t[2];
    EXPECT_OK(job, comm_split(job->c, 0, -job->rank, &s[1].c, &job->err));
    for (int i = 0; i < 2; i++) {
        EXPECT(job, pthread_create(&t[i], NULL, second_main, &s[i]) == 0);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(t[i], NULL);
        EXPECT(job, s[i].st == KVS_OK);
        EXPECT(job, s[i].sum == 199 * 200 / 2 * (0 + 1 + 2)); /* exact */
    }
    comm_close(s[1].c);
}

static void two_groups_are_used_at_once(void **state)
{
    (void)state;
    run(3, two_groups_rank, NULL);
}

/* ---- faults ------------------------------------------------------------------------------------ */

static void fault_rank(rank_job *job)
{
    fault_case *k = job->ctx;
    case_fault(job);
    EXPECT(job, atomic_load(&k->n_named) == 1);
}

static void run_fault(int32_t n, comm_fault_kind kind, int32_t rank, int32_t op)
{
    fault_case k = {
        .op = op,
        .rank = rank,
        .fault = {.kind = kind, .call = 2, .ms = kind == COMM_FAULT_STALL ? LONG_MS : DELAY_MS},
    };
    fault_want(&k);
    run(n, fault_rank, &k);
}

static void ranks_that_disagree_are_named(void **state)
{
    (void)state;
    static const comm_fault_kind kinds[] = {COMM_FAULT_DROP, COMM_FAULT_BYTES, COMM_FAULT_OP};
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        for (int i = 0; i < 3; i++) {
            run_fault(4, kinds[i], 3, op);
        }
        run_fault(2, kinds[op % 3], 0, op);
    }
}

static void a_rank_that_stands_still_is_named(void **state)
{
    (void)state;
    run_fault(4, COMM_FAULT_STALL, 0, COMM_OP_ALL_REDUCE);
    run_fault(3, COMM_FAULT_STALL, 2, COMM_OP_SPLIT);
}

static void slow_ranks_are_fine(void **state)
{
    (void)state;
    run(4, case_slow, NULL);
}

static void sizes_are_compared_even_without_the_check(void **state)
{
    (void)state;
    comm_config cfg = test_config(LONG_MS);
    cfg.no_check = true;
    processes_run(3, &cfg, case_unchecked, NULL);
}

static void closing_ends_those_who_wait(void **state)
{
    (void)state;
    run(3, case_leaving, NULL);
}

static void an_abort_in_a_child_ends_the_family(void **state)
{
    (void)state;
    run(4, case_aborted, NULL);
}

/* ---- ranks that die ---------------------------------------------------------------------------- */

enum { LARGE = 6 << 20 };

static void *kill_soon(void *arg)
{
    (void)arg;
    sleep_ms(40);
    raise(SIGKILL);
    return NULL;
}

/* Long before any time-out, all others know who is gone: in a call, and in a group it is no member of. */
static void dying(rank_job *job, const char *address)
{
    const bool inside = *(const bool *)job->ctx;
    const comm_config cfg = test_config(LONG_MS);
    comm *pair = NULL;
    EXPECT_OK(job, comm_tcp_open(&job->c, address, job->rank, job->n, &cfg, &job->err));
    EXPECT_OK(job, comm_split(job->c, job->rank / 2, 0, &pair, &job->err));
    if (job->c == NULL || pair == NULL) {
        return;
    }
    if (job->rank == 2 && !inside) {
        _exit(0);
    }
    char *send = calloc(1, LARGE);
    char *recv = calloc((size_t)job->n, LARGE);
    pthread_t t;
    if (job->rank == 2) {
        EXPECT(job, pthread_create(&t, NULL, kill_soon, NULL) == 0);
    }
    const int64_t begin = clock_ns();
    kvs_status st = KVS_OK;
    while (st == KVS_OK && send != NULL && recv != NULL) {
        st = inside ? comm_all_gather(job->c, send, recv, LARGE, &job->err)
                    : comm_barrier(job->rank < 2 ? pair : job->c, &job->err);
    }
    EXPECT(job, st == KVS_PEER);
    EXPECT(job, rank_says(job, "rank 2 is gone"));
    EXPECT(job, clock_ns() - begin < LONG_MS / 2 * INT64_C(1000000));
    case_ended(job, "rank 2 is gone");
    comm_close(pair);
    free(send);
    free(recv);
}

static void a_rank_that_dies_is_named_at_once(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        bool inside = i == 1;
        processes_fork(4, 2, dying, &inside);
    }
}

/* ---- meeting ----------------------------------------------------------------------------------- */

/* A connection to the address, or to a port of this host. */
static int visitor(const char *address, uint16_t port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    a.sin_port = htons(address != NULL ? (uint16_t)atoi(strrchr(address, ':') + 1) : port);
    for (;;) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        struct sockaddr_in own = {.sin_port = a.sin_port};
        socklen_t n = sizeof own;
        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0 &&
            getsockname(fd, (struct sockaddr *)&own, &n) == 0 && own.sin_port != a.sin_port) {
            return fd; /* and not of the socket to itself */
        }
        close(fd);
        sleep_ms(1);
    }
}

static void open_rank(rank_job *job, const char *address, int32_t rank, int32_t n, int32_t timeout_ms)
{
    const comm_config cfg = test_config(timeout_ms);
    EXPECT_OK(job, comm_tcp_open(&job->c, address, rank, n, &cfg, &job->err));
    if (job->c != NULL) {
        EXPECT_OK(job, comm_barrier(job->c, &job->err));
    }
}

static void refused_rank(rank_job *job, const char *address, int32_t rank, int32_t n, int32_t timeout_ms,
                         kvs_status want, const char *text)
{
    const comm_config cfg = test_config(timeout_ms);
    comm *c = (comm *)&cfg;
    memset(&job->err, 0, sizeof job->err);
    EXPECT_FAIL(job, comm_tcp_open(&c, address, rank, n, &cfg, &job->err), want, text);
    EXPECT(job, c == NULL);
}

static void missing(rank_job *job, const char *address)
{
    if (job->rank != 1 && job->rank != 3) {
        refused_rank(job, address, job->rank, 5, 400, KVS_PEER, "ranks 1, 3 have not come within 400 ms");
    }
}

static void who_has_not_come_is_named_to_all(void **state)
{
    (void)state;
    processes_fork(5, -1, missing, NULL);
}

static void alone(rank_job *job, const char *address)
{
    refused_rank(job, address, 1, 2, 100, KVS_PEER, "rank 1 has not met rank 0 at 127.0.0.1:");
    EXPECT(job, rank_says(job, "within 100 ms: Connection refused"));
}

static void a_missing_rank_0_is_said(void **state)
{
    (void)state;
    processes_fork(1, -1, alone, NULL);
}

/* Ranks come in any order, rank 0 last. */
static void in_turn(rank_job *job, const char *address)
{
    sleep_ms(40 * (job->n - job->rank));
    open_rank(job, address, job->rank, job->n, LONG_MS);
}

static void ranks_may_come_before_rank_0(void **state)
{
    (void)state;
    processes_fork(4, -1, in_turn, NULL);
}

/* Waits until rank 0 listens, by which time its own ranks have not all come. */
static void wait_for_rank_0(const char *address)
{
    close(visitor(address, 0));
}

/* What the processes of a test share. */
typedef struct shared {
    atomic_int n_twice;
} shared;

typedef struct twin {
    const char *address;
    shared *s;
    comm *c;
    kvs_status st;
    kvs_error err;
} twin;

static void *twin_main(void *arg)
{
    twin *t = arg;
    const comm_config cfg = test_config(LONG_MS);
    t->st = comm_tcp_open(&t->c, t->address, 1, 3, &cfg, &t->err);
    atomic_fetch_add(&t->s->n_twice, t->st == KVS_INVALID);
    return NULL;
}

/* Two threads come as rank 1: one of them is refused while the other waits for rank 2. */
static void twins(rank_job *job, const char *address)
{
    twin t[2] = {{.address = address, .s = job->ctx}, {.address = address, .s = job->ctx}};
    pthread_t thread[2];
    for (int i = 0; i < 2; i++) {
        EXPECT(job, pthread_create(&thread[i], NULL, twin_main, &t[i]) == 0);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(thread[i], NULL);
    }
    const int first = t[0].st == KVS_OK ? 0 : 1;
    EXPECT(job, t[first].st == KVS_OK && t[1 - first].st == KVS_INVALID);
    EXPECT(job, strcmp(t[1 - first].err.text, "rank 1 was started twice") == 0);
    job->c = t[first].c;
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
}

/* The process of rank 2 tries what does not fit, before it comes as it should. */
static void strange(rank_job *job, const char *address)
{
    shared *s = job->ctx;
    if (job->rank == 1) {
        twins(job, address);
        return;
    }
    if (job->rank == 2) {
        wait_for_rank_0(address);
        refused_rank(job, address, 2, 4, LONG_MS, KVS_INVALID,
                     "rank 2 was told of 4 ranks, rank 0 of 3: start all with the same number");
        refused_rank(job, address, 0, 3, LONG_MS, KVS_INVALID, "rank 0 started twice");
        while (atomic_load(&s->n_twice) == 0) {
            sleep_ms(1);
        }
    }
    open_rank(job, address, job->rank, job->n, LONG_MS);
}

static void who_does_not_fit_is_told_and_the_others_meet(void **state)
{
    (void)state;
    shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(s != MAP_FAILED);
    processes_fork(3, -1, strange, s);
    munmap(s, sizeof *s);
}

/* What was turned away is told to those who came, when time is over. */
static void turned_away(rank_job *job, const char *address)
{
    if (job->rank == 1) {
        wait_for_rank_0(address);
        refused_rank(job, address, 1, 3, LONG_MS, KVS_INVALID, "of 3 ranks, rank 0 of 2");
    } else {
        refused_rank(job, address, 0, 2, 500, KVS_PEER,
                     "rank 1 has not come within 500 ms; turned away: rank 1 was told of 3 ranks");
    }
}

static void who_was_turned_away_is_named_in_the_end(void **state)
{
    (void)state;
    processes_fork(2, -1, turned_away, NULL);
}

/* Half a hello, noise, nothing at all, many of each. */
static void noisy(rank_job *job, const char *address)
{
    enum { VISITORS = 100 };
    int fd[VISITORS];
    if (job->rank == 1) {
        char noise[200];
        for (int i = 0; i < VISITORS; i++) {
            fd[i] = visitor(address, 0);
            memset(noise, 0x21 + i, sizeof noise);
            const size_t n = i % 4 == 0 ? 0 : i % 4 == 1 ? 5 : i % 4 == 2 ? 24 : sizeof noise;
            EXPECT(job, n == 0 || send(fd[i], noise, n, MSG_NOSIGNAL) == (ssize_t)n);
        }
        open_rank(job, address, 1, 2, LONG_MS);
        for (int i = 0; i < VISITORS; i++) {
            close(fd[i]);
        }
    } else {
        open_rank(job, address, 0, 2, LONG_MS);
    }
}

static void noise_at_the_port_does_no_harm(void **state)
{
    (void)state;
    processes_fork(2, -1, noisy, NULL);
}

/* The listener that a rank keeps: who calls there without the family's key is no member of a split. */
static void noisy_split(rank_job *job, const char *address)
{
    open_rank(job, address, job->rank, job->n, LONG_MS);
    if (job->c == NULL) {
        return;
    }
    tcp_mesh *m = job->c->family->impl;
    if (job->rank == 1) {
        for (int i = 0; i < 60; i++) { /* more than rank 0 keeps */
            const join j = {.magic = UINT64_C(0x4B5653206A6F696E), .key = m->key + 1,
                            .group = TCP_GROUP_FIRST, .rank = 1};
            const int fd = visitor(NULL, tcp_addr_port(&m->addr[0]));
            EXPECT(job, send(fd, &j, i % 2 == 0 ? sizeof j : 7, MSG_NOSIGNAL) > 0);
            if (i < 50) {
                close(fd);
            }
        }
    }
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    for (int i = 0; i < 3; i++) {
        comm *half = NULL;
        int32_t all[2] = {-1, -1};
        EXPECT_OK(job, comm_split(job->c, 0, -job->rank, &half, &job->err));
        if (half != NULL) {
            EXPECT_OK(job, comm_all_gather(half, &job->rank, all, sizeof all[0], &job->err));
        }
        EXPECT(job, all[0] == 1 && all[1] == 0);
        comm_close(half);
    }
}

static void strangers_do_not_join_a_group(void **state)
{
    (void)state;
    processes_fork(2, -1, noisy_split, NULL);
}

/* One address, group after group and groups side by side. */
static void again(rank_job *job, const char *address)
{
    const comm_config cfg = test_config(LONG_MS);
    comm *c[12] = {NULL};
    for (int i = 0; i < 12; i++) {
        EXPECT_OK(job, comm_tcp_open(&c[i], address, job->rank, job->n, &cfg, &job->err));
        if (i % 3 == 2) {
            comm_close(c[i - 1]);
            c[i - 1] = NULL;
        }
    }
    for (int i = 0; i < 12; i++) {
        if (c[i] != NULL) {
            EXPECT_OK(job, comm_barrier(c[i], &job->err));
            comm_close(c[i]);
        }
    }
}

static void groups_meet_at_one_address_again_and_again(void **state)
{
    (void)state;
    processes_fork(3, -1, again, NULL);
}

static void refused(const char *address, int32_t rank, int32_t size, const char *text)
{
    const comm_config cfg = test_config(100);
    comm *c = (comm *)&cfg;
    kvs_error err = {0};
    assert_int_equal(comm_tcp_open(&c, address, rank, size, &cfg, &err), KVS_INVALID);
    assert_null(c);
    if (strstr(err.text, text) == NULL) {
        fail_msg("\"%s\" lacks \"%s\"", err.text, text);
    }
}

static void what_is_no_address_or_rank_is_refused(void **state)
{
    (void)state;
    static const char *const wrong[] = {
        "",          "tcp://",          "127.0.0.1:4000", "tcp://127.0.0.1",    "tcp://:4000",
        "tcp://h:0", "tcp://h:65536",   "tcp://h:4x",     "tcp://h:",           "tcp://[::1:4000",
        "tcp://[]:4", "tcp://h:123456", "udp://h:4000",   "tcp://127.0.0.1:-1"};
    for (size_t i = 0; i < UNIT_COUNT(wrong); i++) {
        refused(wrong[i], 0, 2, "is no address: use tcp://HOST:PORT");
    }
    refused(NULL, 0, 2, "is no address");
    refused("tcp://a-host-that-is-not.invalid:4000", 0, 2, "has no address");
    refused("tcp://192.0.2.1:4000", 0, 2, "give an address of the host of rank 0");
    refused("tcp://127.0.0.1:4000", 2, 2, "rank 2 of 2: use rank 0 to 1");
    refused("tcp://127.0.0.1:4000", -1, 2, "rank -1 of 2: use rank 0 to 1");
    refused("tcp://127.0.0.1:4000", 0, 0, "rank 0 of 0: use 1 to 256 ranks");
    refused("tcp://127.0.0.1:4000", 0, 257, "rank 0 of 257: use 1 to 256 ranks");
}

/* Every allocation of both ends of a group fails once: an error, or none; nothing is left. */
static void starved(rank_job *job, const char *address)
{
    const comm_config cfg = test_config(300);
    bool fired = true;
    for (int64_t k = 1; fired && k < 60; k++) {
        comm *c = NULL;
        const int64_t before = mem_stats_get().n_live;
        mem_fail_after(k);
        const kvs_status st = comm_tcp_open(&c, address, 0, 1, &cfg, &job->err);
        fired = mem_fail_fired();
        mem_fail_after(0);
        EXPECT(job, st == (fired ? KVS_NOMEM : KVS_OK) && (c != NULL) == (st == KVS_OK));
        comm_close(c);
        EXPECT(job, mem_stats_get().n_live == before);
    }
    EXPECT(job, !fired);
}

static void opening_survives_failing_allocations(void **state)
{
    (void)state;
    processes_fork(1, -1, starved, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_are_right_for_every_number_of_ranks),
        cmocka_unit_test(many_calls_of_changing_size),
        cmocka_unit_test(groups_of_groups_close_in_any_order),
        cmocka_unit_test(large_segments_arrive_whole),
        cmocka_unit_test(ranks_agree_on_their_start),
        cmocka_unit_test(two_groups_are_used_at_once),
        cmocka_unit_test(ranks_that_disagree_are_named),
        cmocka_unit_test(a_rank_that_stands_still_is_named),
        cmocka_unit_test(slow_ranks_are_fine),
        cmocka_unit_test(sizes_are_compared_even_without_the_check),
        cmocka_unit_test(closing_ends_those_who_wait),
        cmocka_unit_test(an_abort_in_a_child_ends_the_family),
        cmocka_unit_test(a_rank_that_dies_is_named_at_once),
        cmocka_unit_test(who_has_not_come_is_named_to_all),
        cmocka_unit_test(a_missing_rank_0_is_said),
        cmocka_unit_test(ranks_may_come_before_rank_0),
        cmocka_unit_test(who_does_not_fit_is_told_and_the_others_meet),
        cmocka_unit_test(who_was_turned_away_is_named_in_the_end),
        cmocka_unit_test(noise_at_the_port_does_no_harm),
        cmocka_unit_test(strangers_do_not_join_a_group),
        cmocka_unit_test(groups_meet_at_one_address_again_and_again),
        cmocka_unit_test(what_is_no_address_or_rank_is_refused),
        cmocka_unit_test(opening_survives_failing_allocations),
    };
    kvs_log_set(&(kvs_logger){0}); /* failures here are on purpose */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
