/* Groups over peer memory whose ranks are processes, on devices made of host memory: what one writes the others see,
 * who is refused, and processes that end in the middle. */
#include "unit/unit.h"

#include <signal.h>
#include "base/clock.h"
#include "comm/p2p.h"
#include "kvspan/log.h"
#include "processes.h"
#include "unit/comm/fake_dev.h"
#include "unit/comm/fake_ipc.h"

enum { CELLS = 7, SHORT_MS = 2000 };

static const int32_t k_device[WIRE_MAX_RANK] = {0, 1, 2, 3};

static p2p_config config(int32_t n)
{
    const p2p_config c = {.n_rank = n, .device = k_device, .n_cell = CELLS, .timeout_ms = 50};
    return c;
}

static int setup(void **state)
{
    (void)state;
    memset(&fake, 0, sizeof fake);
    memset(&fake_ipc, 0, sizeof fake_ipc);
    return 0;
}

static void run(int32_t n, int32_t dies, process_fn fn, void *ctx)
{
    processes_fork(n, dies, fn, ctx);
}

static void meet(rank_job *job, const char *address)
{
    const comm_config cfg = test_config(SHORT_MS);
    EXPECT_OK(job, comm_tcp_open(&job->c, address, job->rank, job->n, &cfg, &job->err));
}

static void ends_with_nothing(rank_job *job)
{
    EXPECT(job, fake.n_live == 0);
    EXPECT(job, fake_ipc.n_mapped == 0);
    EXPECT(job, fake_ipc.n_early == 0);
}

/* ---- right ones ---------------------------------------------------------------------------------- */

static void fault_word(const wire *w, int32_t rank, uint64_t *fault)
{
    memcpy(fault, w->area[rank] + offsetof(wire_control, fault), sizeof *fault);
}

static void sees_what_the_others_write(rank_job *job, const char *address)
{
    const p2p_config c = config(job->n);
    const int32_t n = job->n;
    p2p *g = NULL;
    meet(job, address);
    EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    if (g == NULL) {
        return;
    }
    const wire w = p2p_wire(g, job->rank);
    EXPECT(job, w.rank == job->rank && w.n_rank == n && w.limit_ns == 50000000 && w.n_cell == CELLS);
    for (int32_t r = 0; r < n; r++) {
        EXPECT(job, w.area[r][wire_cell_at(n, CELLS, 1, n - 1)] == WIRE_EMPTY);
        EXPECT(job, fake_ipc_is_mapped(w.area[r]) == (r != job->rank));
    }
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    for (int32_t r = 0; r < n; r++) {
        w.area[r][wire_cell_at(n, CELLS, 1, job->rank)] = (uint8_t)(16 * r + job->rank);
    }
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    for (int32_t r = 0; r < n; r++) {
        EXPECT(job, w.area[job->rank][wire_cell_at(n, CELLS, 1, r)] == 16 * job->rank + r);
    }
    EXPECT_OK(job, p2p_check(g, job->rank, &job->err));
    EXPECT(job, p2p_count(g, job->rank) == 0);
    p2p_close(g);
    ends_with_nothing(job);
}

static void what_one_writes_the_others_see(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 4; n++) {
        run(n, -1, sees_what_the_others_write, NULL);
    }
}

static void is_renewed(rank_job *job, const char *address)
{
    const p2p_config c = config(job->n);
    const wire_control worn = {(uint64_t)1500000000u * WIRE_TURN, 0};
    p2p *g = NULL;
    meet(job, address);
    EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    uint8_t *own = p2p_wire(g, job->rank).area[job->rank];
    memcpy(own, &worn, sizeof worn);
    own[wire_cell_at(job->n, CELLS, 0, 0)] = 9;
    EXPECT(job, p2p_is_worn(p2p_count(g, job->rank)));
    EXPECT_OK(job, p2p_renew(g, &job->err));
    EXPECT(job, p2p_count(g, job->rank) == 0);
    EXPECT(job, own[wire_cell_at(job->n, CELLS, 0, 0)] == WIRE_EMPTY);
    p2p_close(g);
    ends_with_nothing(job);
}

static void a_worn_group_is_renewed(void **state)
{
    (void)state;
    run(3, -1, is_renewed, NULL);
}

/* Rank 1 is slow to let go; the others, which are not, keep their areas as long as it has them mapped. */
static void lets_go_late(rank_job *job, const char *address)
{
    const p2p_config c = config(job->n);
    p2p *g = NULL;
    meet(job, address);
    EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    fake_ipc.let_go_ms = job->rank == 1 ? 150 : 0;
    p2p_close(g);
    ends_with_nothing(job);
}

static void an_area_stays_until_all_have_let_go(void **state)
{
    (void)state;
    run(3, -1, lets_go_late, NULL);
}

/* ---- devices ------------------------------------------------------------------------------------- */

static void opens_its_only_device(rank_job *job, const char *address)
{
    static const int32_t first[WIRE_MAX_RANK] = {0};
    p2p_config c = config(job->n);
    p2p *g = NULL;
    c.device = first;
    fake.n_visible = 1;
    fake.visible[0] = 3 - job->rank;
    meet(job, address);
    EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    p2p_close(g);
    ends_with_nothing(job);
}

static void devices_of_one_number_may_be_different_ones(void **state)
{
    (void)state;
    run(3, -1, opens_its_only_device, NULL);
}

static void is_on_one_device(rank_job *job, const char *address)
{
    const bool *share = job->ctx;
    p2p_config c = config(job->n);
    p2p *g = NULL;
    c.share = *share;
    fake.n_visible = 3;
    for (int r = 0; r < 3; r++) {
        fake.visible[r] = r == 2 || job->rank == 2 ? 3 : r;
    }
    meet(job, address);
    if (*share) { /* ranks 0 and 1 are on devices 0 and 1, rank 2 on 3 */
        EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    } else {
        fake.visible[1] = 3; /* and now rank 1 too */
        EXPECT_FAIL(job, p2p_open_over(&g, job->c, &c, &job->err), KVS_UNSUPPORTED,
                    "ranks 1 and 2 are processes on one CUDA device");
        EXPECT(job, g == NULL);
        EXPECT_OK(job, comm_barrier(job->c, &job->err)); /* the host communicator lives on */
        c.share = true;
        EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    }
    p2p_close(g);
    ends_with_nothing(job);
}

static void devices_of_different_numbers_may_be_one(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        bool share = i == 1;
        run(3, -1, is_on_one_device, &share);
    }
}

/* ---- refusals ------------------------------------------------------------------------------------ */

typedef struct odd_one {
    uint32_t n_cell;
    int32_t timeout_ms, n_rank;
    bool share, far, no_memory, apart;
    kvs_status want;
    const char *text;
} odd_one;

/* Rank 1 is the odd one. */
static void is_refused(rank_job *job, const char *address)
{
    const odd_one *odd = job->ctx;
    p2p_config c = config(job->n);
    p2p *g = NULL;
    if (job->rank == 1) {
        c.n_cell = odd->n_cell != 0 ? odd->n_cell : c.n_cell;
        c.timeout_ms = odd->timeout_ms != 0 ? odd->timeout_ms : c.timeout_ms;
        c.n_rank = odd->n_rank != 0 ? odd->n_rank : c.n_rank;
        c.share = odd->share;
        fake.host = odd->far ? "there" : NULL;
        fake.no_memory = odd->no_memory;
        fake_ipc.refuses = odd->apart;
    }
    meet(job, address);
    EXPECT_FAIL(job, p2p_open_over(&g, job->c, &c, &job->err), odd->want, odd->text);
    EXPECT(job, g == NULL);
    ends_with_nothing(job);
    c = config(job->n);
    fake.host = NULL;
    fake.no_memory = false;
    fake_ipc.refuses = false;
    EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err)); /* the host communicator lives on */
    p2p_close(g);
    ends_with_nothing(job);
}

static void refused(odd_one odd)
{
    run(3, -1, is_refused, &odd);
}

static void ranks_that_differ_are_refused_by_name(void **state)
{
    (void)state;
    refused((odd_one){.n_cell = 9, .want = KVS_INVALID, .text = "p2p cells"});
    refused((odd_one){.n_cell = 9, .want = KVS_INVALID, .text = "rank 1"});
    refused((odd_one){.n_cell = 9, .want = KVS_INVALID, .text = "\"9\""});
    refused((odd_one){.n_cell = 9, .want = KVS_INVALID, .text = "\"7\""});
    refused((odd_one){.timeout_ms = 77, .want = KVS_INVALID, .text = "p2p time-out"});
    refused((odd_one){.timeout_ms = 77, .want = KVS_INVALID, .text = "\"77\""});
    refused((odd_one){.timeout_ms = -1, .want = KVS_INVALID, .text = "rank 1: p2p: time-out of -1 ms"});
    refused((odd_one){.n_rank = 2,
                      .want = KVS_INVALID,
                      .text = "rank 1: p2p: 2 ranks over a host communicator of 3"});
    refused((odd_one){.share = true, .want = KVS_INVALID, .text = "p2p share"});
}

static void what_cannot_be_reached_is_refused_by_name(void **state)
{
    (void)state;
    refused((odd_one){.far = true, .want = KVS_UNSUPPORTED, .text = "ranks 0 and 1 are on different hosts"});
    refused((odd_one){.no_memory = true, .want = KVS_NOMEM, .text = "rank 1: p2p: CUDA device 1 has no"});
    refused((odd_one){.apart = true, .want = KVS_UNSUPPORTED, .text = "rank 1: the CUDA device cannot reach"});
}

static void is_a_thread(rank_job *job)
{
    const p2p_config c = config(job->n);
    p2p *g = NULL;
    EXPECT_FAIL(job, p2p_open_over(&g, job->c, &c, &job->err), KVS_INVALID, "use p2p_open");
    EXPECT(job, g == NULL);
}

static void threads_are_refused(void **state)
{
    (void)state;
    const comm_config cfg = test_config(LONG_MS);
    ranks_run(2, &cfg, is_a_thread, NULL);
}

/* ---- processes that end -------------------------------------------------------------------------- */

typedef enum death { EXPORTING, IMPORTING, BEFORE } death;

/* Rank 1 ends while the group is opened. */
static void is_left_while_opening(rank_job *job, const char *address)
{
    const death *at = job->ctx;
    const p2p_config c = config(job->n);
    p2p *g = NULL;
    meet(job, address);
    if (job->rank == 1) {
        fake_ipc.dies_exporting = *at == EXPORTING;
        fake_ipc.dies_importing = *at == IMPORTING;
        if (*at == BEFORE) {
            raise(SIGKILL);
        }
    }
    fake_ipc.refuses = job->rank == 0; /* an area that is not mapped is no place for a reason */
    const int64_t begin = clock_ns();
    EXPECT_FAIL(job, p2p_open_over(&g, job->c, &c, &job->err), KVS_PEER, "rank 1");
    EXPECT(job, clock_ns() - begin < (int64_t)SHORT_MS * 2 * 1000000);
    EXPECT(job, g == NULL);
    EXPECT(job, fake_ipc.n_mapped == 0);
    EXPECT(job, fake.n_live == (*at == IMPORTING ? 1 : 0)); /* an area that others know is kept */
}

static void a_process_that_ends_while_opening_is_named(void **state)
{
    (void)state;
    for (int i = EXPORTING; i <= BEFORE; i++) {
        death at = (death)i;
        run(3, 1, is_left_while_opening, &at);
    }
}

/* What a kernel of rank 0 does that waits for rank 2 in vain. */
static void time_out(const wire *w)
{
    const wire_head mine = {1, 4, 288, 1};
    const uint64_t fault = WIRE_FAULT(WIRE_LATE, 2, 0, 1);
    memcpy(w->area[0] + wire_head_at(3, 1, 0), &mine, sizeof mine);
    memcpy(w->area[0] + wire_head_at(3, 1, 1), &mine, sizeof mine);
    for (int32_t r = 0; r < 3; r++) {
        memcpy(w->area[r] + offsetof(wire_control, fault), &fault, sizeof fault);
    }
}

/* Rank 2 ended, and rank 0 closes without looking: rank 1's kernels are told all the same. */
static void is_closed_without_a_look(rank_job *job, const char *address)
{
    const p2p_config c = config(job->n);
    p2p *g = NULL;
    uint64_t fault;
    meet(job, address);
    EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    if (job->rank == 2) {
        raise(SIGKILL);
    }
    EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER, "rank 2");
    if (job->rank == 1) {
        const wire w = p2p_wire(g, 1);
        sleep_ms(100);
        fault_word(&w, 1, &fault);
        EXPECT(job, wire_fault_code(fault) == WIRE_ENDED && wire_fault_by(fault) == 0);
    }
    p2p_close(g);
}

/* Rank 2 ends while the group is used. By kernels: rank 0's finds out; else the host communicator does. */
static void is_left_while_in_use(rank_job *job, const char *address)
{
    const bool *by_kernel = job->ctx;
    const p2p_config c = config(job->n);
    p2p *g = NULL;
    kvs_error again = {0};
    uint64_t fault;
    meet(job, address);
    EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    if (job->rank == 2) {
        raise(SIGKILL);
    }
    const wire w = p2p_wire(g, job->rank);
    if (*by_kernel) {
        if (job->rank == 0) {
            time_out(&w); /* the memory of the dead process is still there for those who have it mapped */
        }
        sleep_ms(100);
        EXPECT_FAIL(job, p2p_check(g, job->rank, &job->err), KVS_PEER,
                    "rank 2 more than 50 ms late for op 1 of 1152 bytes in 4 rows (exchange 1, seen by rank 0)");
        EXPECT(job, comm_failed(job->c));
        EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER, "rank 2");
    } else {
        EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER, "rank 2");
        EXPECT_FAIL(job, p2p_check(g, job->rank, &job->err), KVS_PEER, "rank 2");
        for (int32_t r = 0; r < 3; r++) { /* so kernels that are launched yet send nothing */
            fault_word(&w, r, &fault);
            EXPECT(job, wire_fault_code(fault) == WIRE_ENDED);
        }
    }
    EXPECT(job, p2p_check(g, job->rank, &again) == KVS_PEER);
    EXPECT(job, *by_kernel || strcmp(again.text, job->err.text) == 0);
    EXPECT(job, p2p_renew(g, NULL) == KVS_PEER);
    const int64_t begin = clock_ns();
    p2p_close(g);
    EXPECT(job, clock_ns() - begin < INT64_C(500000000));
    EXPECT(job, fake_ipc.n_mapped == 0);
    EXPECT(job, fake.n_live == 1); /* others may still write there */
}

static void a_process_that_ends_in_use_is_named(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        bool by_kernel = i == 1;
        run(3, 2, is_left_while_in_use, &by_kernel);
    }
    run(3, 2, is_closed_without_a_look, NULL);
}

/* Ranks end a group at once, each with a reason of its own: whatever a rank is told belongs together. */
static void aborts(rank_job *job, const char *address)
{
    const p2p_config c = config(job->n);
    p2p *g = NULL;
    char mine[48];
    char ok[3][64];
    meet(job, address);
    EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    snprintf(mine, sizeof mine, "cup %d is empty", job->rank);
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    if (job->rank < 2) {
        p2p_abort(g, job->rank, mine);
        EXPECT(job, comm_failed(job->c));
    } else {
        sleep_ms(50);
    }
    EXPECT(job, p2p_check(g, job->rank, &job->err) == KVS_PEER);
    for (int r = 0; r < 2; r++) {
        snprintf(ok[r], sizeof ok[r], "rank %d ended the group: cup %d is empty", r, r);
    }
    EXPECT(job, strcmp(job->err.text, ok[0]) == 0 || strcmp(job->err.text, ok[1]) == 0);
    p2p_close(g);
}

static void each_end_has_its_reason(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        run(3, -1, aborts, NULL);
    }
}

/* A kernel's fault is in the areas, which nobody has looked at, when the host ends the group: the fault stays its only
 * reason, for the kernels as for the host communicator. */
static void aborts_after_a_fault(rank_job *job, const char *address)
{
    static const char late[] =
        "rank 2 more than 50 ms late for op 1 of 1152 bytes in 4 rows (exchange 1, seen by rank 0)";
    const p2p_config c = config(job->n);
    p2p *g = NULL;
    meet(job, address);
    EXPECT_OK(job, p2p_open_over(&g, job->c, &c, &job->err));
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    if (job->rank == 1) {
        const wire w = p2p_wire(g, 1);
        time_out(&w);
        p2p_abort(g, 1, "out of coffee");
    }
    EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER, late);
    EXPECT_FAIL(job, p2p_check(g, job->rank, &job->err), KVS_PEER, late);
    p2p_close(g);
}

static void an_abort_leaves_the_reason_of_a_fault(void **state)
{
    (void)state;
    run(3, -1, aborts_after_a_fault, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(what_one_writes_the_others_see, setup),
        cmocka_unit_test_setup(a_worn_group_is_renewed, setup),
        cmocka_unit_test_setup(an_area_stays_until_all_have_let_go, setup),
        cmocka_unit_test_setup(devices_of_one_number_may_be_different_ones, setup),
        cmocka_unit_test_setup(devices_of_different_numbers_may_be_one, setup),
        cmocka_unit_test_setup(ranks_that_differ_are_refused_by_name, setup),
        cmocka_unit_test_setup(what_cannot_be_reached_is_refused_by_name, setup),
        cmocka_unit_test_setup(threads_are_refused, setup),
        cmocka_unit_test_setup(a_process_that_ends_while_opening_is_named, setup),
        cmocka_unit_test_setup(a_process_that_ends_in_use_is_named, setup),
        cmocka_unit_test_setup(each_end_has_its_reason, setup),
        cmocka_unit_test_setup(an_abort_leaves_the_reason_of_a_fault, setup),
    };
    (void)kvs_log_levels("comm=off", NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
