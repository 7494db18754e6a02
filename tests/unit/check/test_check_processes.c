/* The check of exchanges between devices by several processes, over fake devices: right ones pass, whatever one
 * process finds wrong is told by the one that reports, and a process that ends is named. */
#include "unit/unit.h"

#include <stdlib.h>
#include "base/clock.h"
#include "comm/nccl.h"
#include "kvspan/check.h"
#include "unit/check/fake_cuda.h"
#include "unit/comm/processes.h"

enum { MAX_FAIL = 64, TIMEOUT_MS = 400 };

/* The linker puts these in place of comm_tcp_open: the least that processes said they wait for each other, ms. */
static int32_t g_patience = INT32_MAX;
kvs_status __real_comm_tcp_open(comm **out, const char *address, int32_t rank, int32_t size, const comm_config *cfg,
                                kvs_error *err);
kvs_status __wrap_comm_tcp_open(comm **out, const char *address, int32_t rank, int32_t size, const comm_config *cfg,
                                kvs_error *err);
kvs_status __wrap_comm_tcp_open(comm **out, const char *address, int32_t rank, int32_t size, const comm_config *cfg,
                                kvs_error *err)
{
    g_patience = cfg->timeout_ms < g_patience ? cfg->timeout_ms : g_patience;
    return __real_comm_tcp_open(out, address, rank, size, cfg, err);
}

/* The same of NCCL: how often a process closed it when its host communicator had ended, so that it was aborted. */
static comm *g_nccl_host;
static int g_aborted;
kvs_status __real_nccl_open(nccl **out, comm *host, int32_t device, kvs_error *err);
kvs_status __wrap_nccl_open(nccl **out, comm *host, int32_t device, kvs_error *err);
kvs_status __wrap_nccl_open(nccl **out, comm *host, int32_t device, kvs_error *err)
{
    g_nccl_host = host;
    return __real_nccl_open(out, host, device, err);
}

void __real_nccl_close(nccl *c);
void __wrap_nccl_close(nccl *c);
void __wrap_nccl_close(nccl *c)
{
    g_aborted += comm_failed(g_nccl_host);
    __real_nccl_close(c);
}

typedef struct rows {
    int n_line, n_pass, n_skip, n_fail;
    char skip[320];
    char fail[MAX_FAIL][320];
} rows;

static void on_line(void *ctx, const char *text)
{
    rows *r = ctx;
    r->n_line++;
    r->n_pass += strstr(text, " pass ") != NULL;
    if (strstr(text, " skip ") != NULL) {
        r->n_skip++;
        snprintf(r->skip, sizeof r->skip, "%.300s", text);
    }
    if (strstr(text, " FAIL ") != NULL) {
        snprintf(r->fail[r->n_fail % MAX_FAIL], sizeof r->fail[0], "%.300s", text);
        r->n_fail++;
    }
}

static int reset(void **state)
{
    (void)state;
    memset(&fake, 0, sizeof fake);
    fake.replays = 1;
    return 0;
}

static kvs_check_config config(rank_job *job, const char *address, rows *r, kvs_check_result *total)
{
    kvs_check_config c = kvs_check_config_default();
    memset(r, 0, sizeof *r);
    c.comm = 1;
    c.quick = 1;
    c.device = "cuda";
    c.timeout_ms = TIMEOUT_MS;
    c.rendezvous = address;
    c.rank = job->rank;
    c.n_rank = job->n;
    c.line = on_line;
    c.ctx = r;
    c.result = total;
    return c;
}

static kvs_status check(rank_job *job, const char *address, rows *r, kvs_check_result *total)
{
    const kvs_check_config c = config(job, address, r, total);
    return kvs_check_run(&c, &job->err);
}

static int failures_with(const rows *r, const char *a, const char *b)
{
    int n = 0;
    for (int i = 0; i < r->n_fail && i < MAX_FAIL; i++) {
        n += strstr(r->fail[i], a) != NULL && strstr(r->fail[i], b) != NULL;
    }
    return n;
}

static void passes(rank_job *job, const char *address)
{
    const int *devices = job->ctx;
    rows r;
    kvs_check_result total;
    fake.device = job->rank % *devices;
    EXPECT_OK(job, check(job, address, &r, &total));
    /* 2 contents x (4 messages + 2 merges), a graph, 6 faults; 4 of NCCL where each has a device */
    const int all = *devices >= job->n;
    EXPECT(job, total.n_passed == 2 * 6 + 1 + 6 + 4 * all && total.n_failed == 0 && total.n_skipped == !all);
    EXPECT(job, fake.n_open == 0);
    EXPECT(job, g_aborted == 3 * all); /* after each fault, the victim's too */
    if (job->rank != 0) {
        EXPECT(job, r.n_line == 1); /* the sum */
        return;
    }
    EXPECT(job, r.n_pass == 19 + 4 * all && r.n_skip == !all);
    EXPECT(job, all || strstr(r.skip, *devices == 1 ? " have 1 device; NCCL's ranks have one each"
                                                     : "3 processes have 2 devices; NCCL's") != NULL);
}

static void right_exchanges_pass(void **state)
{
    (void)state;
    for (int32_t n = 2; n <= 3; n++) {
        int one = 1;
        processes_fork(n, -1, passes, &one);
        for (int devices = 2; devices <= n; devices++) {
            processes_fork(n, -1, passes, &devices);
        }
    }
}

static void finds_a_wrong_byte(rank_job *job, const char *address)
{
    rows r;
    kvs_check_result total;
    fake.wrong = job->rank == 1;
    EXPECT_FAIL(job, check(job, address, &r, &total), KVS_INTERNAL, "rows failed; the first: op=queries");
    if (job->rank == 0) {
        EXPECT(job, failures_with(&r, "op=queries transport=p2p over=tcp n=2 devices=1", "rank 1, part 0, byte 3") == 2);
        EXPECT(job, failures_with(&r, "op=pieces", "rank 1, part 0, byte 3") == 2);
        EXPECT(job, failures_with(&r, "op=partials", "rank 1: out, byte 5") == 4);
        EXPECT(job, failures_with(&r, "op=graph", "byte 3") == 1);
        EXPECT(job, failures_with(&r, "op=barrier", "") == 0);
    }
}

static void a_wrong_byte_of_one_process_is_told(void **state)
{
    (void)state;
    processes_fork(2, -1, finds_a_wrong_byte, NULL);
}

static void does_not_compare(rank_job *job, const char *address)
{
    rows r;
    kvs_check_result total;
    fake.deaf = 1;
    EXPECT_FAIL(job, check(job, address, &r, &total), KVS_INTERNAL, "3 of 19 rows failed");
    if (job->rank == 0) {
        EXPECT(job, failures_with(&r, "fault=rows", "was told KVS_OK") == 1);
        EXPECT(job, failures_with(&r, "fault=width", "was told KVS_OK") == 1);
        EXPECT(job, failures_with(&r, "fault=op", "was told KVS_OK") == 1);
    }
}

static void ranks_that_are_not_compared_are_told(void **state)
{
    (void)state;
    processes_fork(2, -1, does_not_compare, NULL);
}

static void is_left(rank_job *job, const char *address)
{
    rows r;
    kvs_check_result total;
    fake.dies_at = job->rank == 1 ? 60 : 0;
    fake.limit_ms = 500;
    const int64_t begin = clock_ns();
    EXPECT_FAIL(job, check(job, address, &r, &total), KVS_PEER, "rank 1");
    EXPECT(job, clock_ns() - begin < INT64_C(20000000000));
}

static void a_process_that_ends_is_named(void **state)
{
    (void)state;
    processes_fork(3, 1, is_left, NULL);
}

/* Memory that the last process lacks: of a message, of a graph's and of a fault's. */
static void has_no_memory(rank_job *job, const char *address)
{
    const size_t *bytes = job->ctx;
    char told[128];
    rows r;
    kvs_check_result total;
    const bool lacks = job->rank == job->n - 1;
    fake.full = lacks ? *bytes : 0;
    snprintf(told, sizeof told, "%sthe device has no %zu bytes left for rank 2", lacks ? "" : "rank 2 ended the group: ",
             *bytes);
    const int64_t begin = clock_ns();
    EXPECT_FAIL(job, check(job, address, &r, &total), lacks ? KVS_NOMEM : KVS_PEER, told);
    EXPECT(job, clock_ns() - begin < INT64_C(7000000000));
    EXPECT(job, r.n_fail == 0);
}

static void a_process_without_memory_is_told_at_once(void **state)
{
    (void)state;
    static const size_t list[] = {3 * 1152 + 16, 16 * 1152 + 16, 2 * 1152 * 4};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        size_t bytes = list[i];
        processes_fork(3, -1, has_no_memory, &bytes);
    }
}

static void has_no_device(rank_job *job, const char *address)
{
    rows r;
    kvs_check_result total;
    fake.absent = job->rank == 1;
    EXPECT(job, check(job, address, &r, &total) < 0);
    EXPECT(job, strstr(job->err.text, "no CUDA device here") != NULL);
}

static void a_process_without_a_device_is_said(void **state)
{
    (void)state;
    processes_fork(2, -1, has_no_device, NULL);
}

/* What the last process asks for that the others do not, and what all are told. */
typedef struct other {
    uint64_t seed;
    int32_t quick, timeout_ms;
    const char *device;
    const char *told;
} other;

static void asks_for_another(rank_job *job, const char *address)
{
    const other *o = job->ctx;
    rows r;
    kvs_check_result total;
    kvs_check_config c = config(job, address, &r, &total);
    if (job->rank == job->n - 1) {
        c.seed = o->seed;
        c.quick = o->quick;
        c.timeout_ms = o->timeout_ms;
        c.device = o->device;
    }
    EXPECT_FAIL(job, kvs_check_run(&c, &job->err), KVS_INVALID, o->told);
    EXPECT(job, r.n_pass == 0 && r.n_fail == 0);
}

static void processes_that_check_different_things_are_refused(void **state)
{
    (void)state;
    static const other list[] = {
        {7, 1, TIMEOUT_MS, "cuda", "check --seed is \"0\" on rank 0 and \"7\" on rank 2"},
        {0, 0, TIMEOUT_MS, "cuda", "check --quick is \"yes\" on rank 0 and \"no\" on rank 2"},
        {0, 1, 500, "cuda", "check --timeout is \"400 ms\" on rank 0 and \"500 ms\" on rank 2"},
        {7, 0, 500, "cpu", "check --device is \"cuda\" on rank 0 and \"cpu\" on rank 2"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        other o = list[i];
        processes_fork(3, -1, asks_for_another, &o);
    }
}

/* Ended before a rank is late; what a process would wait for it is seen. */
static void is_patient(rank_job *job, const char *address)
{
    const int32_t *timeout_ms = job->ctx;
    rows r;
    kvs_check_result total;
    kvs_check_config c = config(job, address, &r, &total);
    c.timeout_ms = *timeout_ms;
    fake.full = 3 * 1152 + 16;
    EXPECT(job, kvs_check_run(&c, &job->err) < 0);
    EXPECT(job, g_patience > *timeout_ms || g_patience == INT32_MAX);
    EXPECT(job, g_patience < INT32_MAX || *timeout_ms > INT32_MAX / 3);
}

static void processes_outwait_a_late_rank(void **state)
{
    (void)state;
    static const int32_t list[] = {TIMEOUT_MS, 40000, 3600000, INT32_MAX};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        int32_t timeout_ms = list[i];
        processes_fork(2, -1, is_patient, &timeout_ms);
    }
}

/* One of the processes that mpirun has started. Once: MPI does not begin again after its last group. */
static int run_under_mpi(const char *rank, const char *n)
{
    rank_job job = {.rank = (int32_t)strtol(rank, NULL, 10), .n = (int32_t)strtol(n, NULL, 10)};
    int devices = job.n;
    (void)reset(NULL);
    job.ctx = &devices;
    passes(&job, NULL);
    if (job.note[0] != '\0') {
        fprintf(stderr, "%s\n", job.note);
    }
    return job.note[0] != '\0';
}

int main(void)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (rank != NULL) {
        return run_under_mpi(rank, getenv("OMPI_COMM_WORLD_SIZE"));
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(right_exchanges_pass, reset),
        cmocka_unit_test_setup(a_wrong_byte_of_one_process_is_told, reset),
        cmocka_unit_test_setup(ranks_that_are_not_compared_are_told, reset),
        cmocka_unit_test_setup(a_process_that_ends_is_named, reset),
        cmocka_unit_test_setup(a_process_without_memory_is_told_at_once, reset),
        cmocka_unit_test_setup(a_process_without_a_device_is_said, reset),
        cmocka_unit_test_setup(processes_that_check_different_things_are_refused, reset),
        cmocka_unit_test_setup(processes_outwait_a_late_rank, reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
