#include "processes.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "base/mem.h"

void free_address(char address[ADDRESS])
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    close(fd);
    snprintf(address, ADDRESS, "tcp://127.0.0.1:%d", ntohs(a.sin_port));
}

static void child(rank_job *job, const char *address, process_fn fn)
{
    const int64_t before = mem_stats_get().n_live;
    fn(job, address);
    comm_close(job->c);
    EXPECT(job, mem_stats_get().n_live == before);
    _exit(0);
}

void processes_fork(int32_t n, int32_t dies, process_fn fn, void *ctx)
{
    char address[ADDRESS];
    pid_t pid[RANKS_MAX];
    char note[NOTE] = "";
    assert_in_range(n, 1, RANKS_MAX);
    free_address(address);
    rank_job *jobs = mmap(NULL, sizeof *jobs * RANKS_MAX, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(jobs != MAP_FAILED);
    fflush(NULL);
    for (int32_t r = 0; r < n; r++) {
        jobs[r] = (rank_job){.rank = r, .n = n, .ctx = ctx};
        pid[r] = fork();
        if (pid[r] == 0) {
            child(&jobs[r], address, fn);
        }
        assert_true(pid[r] > 0);
    }
    for (int32_t r = 0; r < n; r++) {
        int status = 0;
        assert_int_equal(waitpid(pid[r], &status, 0), pid[r]);
        if (r != dies && (!WIFEXITED(status) || WEXITSTATUS(status) != 0) && note[0] == '\0') {
            snprintf(note, sizeof note, "rank %d ended with status 0x%x", r, (unsigned)status);
        }
        if (note[0] == '\0') {
            memcpy(note, jobs[r].note, NOTE);
        }
    }
    munmap(jobs, sizeof *jobs * RANKS_MAX);
    if (note[0] != '\0') {
        fail_msg("%s", note);
    }
}

typedef struct opened {
    const comm_config *cfg;
    rank_fn fn;
    void *ctx;
} opened;

static void open_and_run(rank_job *job, const char *address)
{
    const opened *o = job->ctx;
    EXPECT_OK(job, comm_tcp_open(&job->c, address, job->rank, job->n, o->cfg, &job->err));
    if (job->c != NULL) {
        EXPECT(job, comm_rank(job->c) == job->rank && comm_size(job->c) == job->n);
        job->ctx = o->ctx;
        o->fn(job);
    }
}

void processes_run(int32_t n, const comm_config *cfg, rank_fn fn, void *ctx)
{
    opened o = {cfg, fn, ctx};
    processes_fork(n, -1, open_and_run, &o);
}
