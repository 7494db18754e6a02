/* cases.c: the collectives against values computed from their definition. */
#include "cases.h"
#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "base/rng.h"

static const size_t g_bytes[] = {0, 1, 3, 64, 1000, 4097, 200001};
enum { N_BYTES = 7, N_FLOATS = 7 };
static const size_t g_floats[] = {0, 1, 3, 7, 129, 1000, 9001};

/* A cheap hash, so that wrong data shows however it is shifted or swapped. */
static uint64_t mix(uint64_t salt, uint64_t stream, uint64_t i)
{
    uint64_t x = salt * UINT64_C(0x9E3779B97F4A7C15) + stream * UINT64_C(0xC2B2AE3D27D4EB4F) + i;
    x ^= x >> 31;
    x *= UINT64_C(0xBF58476D1CE4E5B9);
    x ^= x >> 29;
    x *= UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 32;
}

/* What `from` sends to `to` in round `salt`. */
static void fill(unsigned char *p, size_t bytes, int32_t from, int32_t to, uint64_t salt)
{
    const uint64_t stream = (uint64_t)from * 64 + (uint64_t)to;
    for (size_t i = 0; i < bytes; i += 8) {
        const uint64_t w = mix(salt, stream, i);
        memcpy(p + i, &w, bytes - i < 8 ? bytes - i : 8);
    }
}

static bool holds(const unsigned char *p, size_t bytes, int32_t from, int32_t to, uint64_t salt)
{
    const uint64_t stream = (uint64_t)from * 64 + (uint64_t)to;
    for (size_t i = 0; i < bytes; i += 8) {
        const uint64_t w = mix(salt, stream, i);
        if (memcmp(p + i, &w, bytes - i < 8 ? bytes - i : 8) != 0) {
            return false;
        }
    }
    return true;
}

static unsigned char *poisoned(size_t bytes)
{
    unsigned char *p = malloc(bytes + 1);
    memset(p, 0xA5, bytes + 1);
    return p;
}

/* Of widely different magnitudes, so that any other order of additions shows. */
static float term(int32_t rank, size_t i, uint64_t salt)
{
    const uint64_t x = mix(salt, (uint64_t)rank + 5000, i);
    const float m = (float)((double)(x >> 40) * 0x1p-24 - 0.5);
    float scale = 1.0F;
    for (uint64_t k = x & 15; k > 0; k--) {
        scale *= 4.0F;
    }
    return m * scale;
}

/* The tree of the contract, from its root down: the ranks congruent to r modulo h. */
static float tree(const float *x, int32_t n, int32_t r, int32_t h)
{
    return h == n ? x[r] : tree(x, n, r, 2 * h) + tree(x, n, r + h, 2 * h);
}

static float expected_sum(int32_t n, size_t i, uint64_t salt)
{
    float x[RANKS_MAX] = {0};
    for (int32_t r = 0; r < n; r++) {
        x[r] = term(r, i, salt);
    }
    if (n == 1 || n == 2 || n == 4 || n == 8) {
        return tree(x, n, 0, 1);
    }
    float s = x[0];
    for (int32_t r = 1; r < n; r++) {
        s += x[r];
    }
    return s;
}

static bool same_bits(float a, float b)
{
    uint32_t x;
    uint32_t y;
    memcpy(&x, &a, 4);
    memcpy(&y, &b, 4);
    return x == y;
}

/* ---- moving bytes ---------------------------------------------------------------------------- */

void case_all_gather(rank_job *job)
{
    for (int k = 0; k < N_BYTES; k++) {
        const size_t bytes = g_bytes[k];
        for (int in_place = 0; in_place < 2; in_place++) {
            const uint64_t salt = (uint64_t)(10 * k + in_place);
            unsigned char *all = poisoned(bytes * (size_t)job->n);
            unsigned char *own = poisoned(bytes);
            unsigned char *send = in_place ? all + (size_t)job->rank * bytes : own;
            fill(send, bytes, job->rank, 0, salt);
            EXPECT_OK(job, comm_all_gather(job->c, bytes > 0 ? send : NULL, bytes > 0 ? all : NULL,
                                           bytes, &job->err));
            for (int32_t r = 0; r < job->n; r++) {
                EXPECT(job, holds(all + (size_t)r * bytes, bytes, r, 0, salt));
            }
            EXPECT(job, all[bytes * (size_t)job->n] == 0xA5);
            EXPECT(job, in_place || holds(own, bytes, job->rank, 0, salt));
            free(all);
            free(own);
        }
    }
}

void case_all_to_all(rank_job *job)
{
    for (int k = 0; k < N_BYTES; k++) {
        const size_t bytes = g_bytes[k];
        unsigned char *send = poisoned(bytes * (size_t)job->n);
        unsigned char *recv = poisoned(bytes * (size_t)job->n);
        for (int32_t r = 0; r < job->n; r++) {
            fill(send + (size_t)r * bytes, bytes, job->rank, r, (uint64_t)k);
        }
        EXPECT_OK(job, comm_all_to_all(job->c, send, recv, bytes, &job->err));
        for (int32_t r = 0; r < job->n; r++) {
            EXPECT(job, holds(recv + (size_t)r * bytes, bytes, r, job->rank, (uint64_t)k));
            EXPECT(job, holds(send + (size_t)r * bytes, bytes, job->rank, r, (uint64_t)k));
        }
        EXPECT(job, recv[bytes * (size_t)job->n] == 0xA5);
        free(send);
        free(recv);
    }
}

void case_broadcast(rank_job *job)
{
    for (int k = 0; k < N_BYTES; k++) {
        for (int32_t root = 0; root < job->n; root++) {
            const uint64_t salt = (uint64_t)(100 + k * 10 + root);
            unsigned char *buf = poisoned(g_bytes[k]);
            if (job->rank == root) {
                fill(buf, g_bytes[k], root, 0, salt);
            }
            EXPECT_OK(job, comm_broadcast(job->c, buf, g_bytes[k], root, &job->err));
            EXPECT(job, holds(buf, g_bytes[k], root, 0, salt));
            EXPECT(job, buf[g_bytes[k]] == 0xA5);
            free(buf);
        }
    }
}

/* ---- sums ------------------------------------------------------------------------------------ */

void case_reduce_scatter(rank_job *job)
{
    const size_t n = (size_t)job->n;
    for (int k = 0; k < N_FLOATS; k++) {
        for (int in_place = 0; in_place < 2; in_place++) {
            const size_t m = g_floats[k];
            float *send = malloc((m * n + 1) * sizeof(float));
            float *own = malloc((m + 1) * sizeof(float));
            for (size_t i = 0; i < m * n; i++) {
                send[i] = term(job->rank, i, (uint64_t)k);
            }
            float *recv = in_place ? send + (size_t)job->rank * m : own;
            EXPECT_OK(job, comm_reduce_scatter(job->c, send, recv, m, &job->err));
            for (size_t i = 0; i < m; i++) {
                const size_t at = (size_t)job->rank * m + i;
                EXPECT(job, same_bits(recv[i], expected_sum(job->n, at, (uint64_t)k)));
            }
            free(send);
            free(own);
        }
    }
}

void case_all_reduce(rank_job *job)
{
    for (int k = 0; k < N_FLOATS; k++) {
        const size_t m = g_floats[k];
        float *buf = malloc((m + 1) * sizeof(float));
        for (size_t i = 0; i < m; i++) {
            buf[i] = term(job->rank, i, (uint64_t)k);
        }
        buf[m] = 42.0F;
        EXPECT_OK(job, comm_all_reduce(job->c, buf, m, &job->err));
        for (size_t i = 0; i < m; i++) {
            EXPECT(job, same_bits(buf[i], expected_sum(job->n, i, (uint64_t)k)));
        }
        EXPECT(job, same_bits(buf[m], 42.0F));
        free(buf);
    }
}

/* Sums of integers are exact, so every rank's term must be in, each once. */
void case_exact_sum(rank_job *job)
{
    float x[5];
    for (int i = 0; i < 5; i++) {
        x[i] = (float)((1 << job->rank) * (i + 1));
    }
    EXPECT_OK(job, comm_all_reduce(job->c, x, 5, &job->err));
    for (int i = 0; i < 5; i++) {
        EXPECT(job, same_bits(x[i], (float)(((1 << job->n) - 1) * (i + 1))));
    }
}

/* ---- many calls ------------------------------------------------------------------------------ */

/* A fast rank may run ahead into the next call; staging must not be overwritten under a slow
 * reader. Sizes vary so that staging grows while it is in use. */
void case_stress(rank_job *job)
{
    enum { ROUNDS = 400, MAX = 3000 };
    unsigned char *send = malloc((size_t)MAX * RANKS_MAX);
    unsigned char *recv = malloc((size_t)MAX * RANKS_MAX);
    for (uint64_t k = 0; k < ROUNDS && job->note[0] == '\0'; k++) {
        const size_t bytes = (size_t)rng_below(7, 1, k, k < 100 ? 1 + 30 * k : MAX);
        if (rng_below(7, 2 + (uint64_t)job->rank, k, 10) == 0) {
            sleep_ms(1);
        }
        if (k % 3 == 0) {
            for (int32_t r = 0; r < job->n; r++) {
                fill(send + (size_t)r * bytes, bytes, job->rank, r, k);
            }
            EXPECT_OK(job, comm_all_to_all(job->c, send, recv, bytes, &job->err));
            for (int32_t r = 0; r < job->n; r++) {
                EXPECT(job, holds(recv + (size_t)r * bytes, bytes, r, job->rank, k));
            }
        } else {
            fill(send, bytes, job->rank, 0, k);
            EXPECT_OK(job, comm_all_gather(job->c, send, recv, bytes, &job->err));
            memset(send, 0, bytes);
            for (int32_t r = 0; r < job->n; r++) {
                EXPECT(job, holds(recv + (size_t)r * bytes, bytes, r, 0, k));
            }
        }
    }
    free(send);
    free(recv);
}

static void warm_calls(rank_job *job, float *a, float *b, comm *sub)
{
    for (size_t m = 1; m <= 512; m *= 8) {
        EXPECT_OK(job, comm_all_gather(job->c, a, b, 4 * m, &job->err));
        EXPECT_OK(job, comm_all_to_all(job->c, a, b, 4 * m, &job->err));
        EXPECT_OK(job, comm_reduce_scatter(job->c, a, b, m, &job->err));
        EXPECT_OK(job, comm_all_reduce(job->c, a, m, &job->err));
        EXPECT_OK(job, comm_broadcast(job->c, a, 4 * m, job->n - 1, &job->err));
        EXPECT_OK(job, comm_all_reduce(sub, a, m, &job->err));
    }
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
}

/* Each op on a group of its own: the second call of a size must not allocate. */
static void second_calls(rank_job *job, float *a, float *b)
{
    for (int op = 0; op < 5; op++) {
        comm *sub = NULL;
        EXPECT_OK(job, comm_split(job->c, 0, 0, &sub, &job->err));
        for (int k = 0; k < 4 && sub != NULL; k++) {
            kvs_status st = KVS_OK;
            mem_guard_begin();
            switch (op) {
            case 0:
                st = comm_all_gather(sub, a, b, 400, &job->err);
                break;
            case 1:
                st = comm_all_to_all(sub, a, b, 400, &job->err);
                break;
            case 2:
                st = comm_reduce_scatter(sub, a, b, 100, &job->err);
                break;
            case 3:
                st = comm_all_reduce(sub, a, 100, &job->err);
                break;
            default:
                st = comm_broadcast(sub, a, 400, 0, &job->err);
                break;
            }
            const int64_t n = mem_guard_end();
            EXPECT(job, st == KVS_OK);
            EXPECT(job, k == 0 || n == 0);
        }
        comm_close(sub);
    }
}

void case_no_alloc(rank_job *job)
{
    float *a = calloc(512 * RANKS_MAX, sizeof(float));
    float *b = calloc(512 * RANKS_MAX, sizeof(float));
    comm *sub = NULL;
    second_calls(job, a, b);
    EXPECT_OK(job, comm_split(job->c, job->rank % 2, 0, &sub, &job->err));
    if (sub != NULL) {
        warm_calls(job, a, b, sub);
        mem_guard_begin();
        warm_calls(job, a, b, sub);
        warm_calls(job, a, b, sub);
        EXPECT(job, mem_guard_end() == 0);
    }
    comm_close(sub);
    free(a);
    free(b);
}

/* ---- counters -------------------------------------------------------------------------------- */

void case_counters(rank_job *job)
{
    enum { B = 24, M = 11 };
    unsigned char a[B * RANKS_MAX] = {0};
    unsigned char b[B * RANKS_MAX];
    float f[M * RANKS_MAX] = {0};
    float g[M];
    comm *sub = NULL;
    EXPECT_OK(job, comm_all_gather(job->c, a, b, B, &job->err));
    EXPECT_OK(job, comm_all_gather(job->c, a, b, B - 1, &job->err));
    EXPECT_OK(job, comm_all_to_all(job->c, a, b, B, &job->err));
    EXPECT_OK(job, comm_reduce_scatter(job->c, f, g, M, &job->err));
    EXPECT_OK(job, comm_all_reduce(job->c, f, M, &job->err));
    EXPECT_OK(job, comm_broadcast(job->c, a, B, 0, &job->err));
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    EXPECT_OK(job, comm_split(job->c, 0, 0, &sub, &job->err));

    const comm_stats *s = comm_counters(job->c);
    const uint64_t peers = (uint64_t)job->n - 1;
    const uint64_t root = job->rank == 0;
    /* M elements over n ranks, the cut points rounded down. */
    const uint64_t own = (uint64_t)(M * (job->rank + 1) / job->n - M * job->rank / job->n);
    const uint64_t reduce = 4 * (M - own) + 4 * own * peers;
    const uint64_t sent[COMM_N_OP] = {
        [COMM_OP_ALL_GATHER] = (2 * B - 1) * peers, [COMM_OP_ALL_TO_ALL] = B * peers,
        [COMM_OP_REDUCE_SCATTER] = 4 * M * peers,   [COMM_OP_ALL_REDUCE] = reduce,
        [COMM_OP_BROADCAST] = root * B * peers,     [COMM_OP_SPLIT] = 32 * peers,
    };
    for (int op = 0; op < COMM_N_OP; op++) {
        const uint64_t received = op == COMM_OP_BROADCAST ? (1 - root) * B * (peers > 0) : sent[op];
        EXPECT(job, s->n_call[op] == (op == COMM_OP_ALL_GATHER ? 2 : 1));
        EXPECT(job, s->bytes_sent[op] == sent[op]);
        EXPECT(job, s->bytes_received[op] == received);
    }
    EXPECT(job, sub != NULL && comm_counters(sub)->n_call[COMM_OP_BARRIER] == 0);
    comm_close(sub);
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* 4 or 8 ranks in fours, reversed by the key, then each as 2 x 2; closed parent first or child first. */
void case_split(rank_job *job)
{
    const bool parent_first = *(const bool *)job->ctx;
    comm *half = NULL;
    comm *pair = NULL;
    EXPECT_OK(job, comm_split(job->c, job->rank / 4, -job->rank, &half, &job->err));
    if (half == NULL) {
        return;
    }
    EXPECT(job, comm_size(half) == 4 && comm_rank(half) == 3 - job->rank % 4);
    EXPECT_OK(job, comm_split(half, comm_rank(half) % 2 == 0 ? INT32_MIN : 7, 0, &pair, &job->err));
    if (pair == NULL) {
        return;
    }
    EXPECT(job, comm_size(pair) == 2 && comm_rank(pair) == comm_rank(half) / 2);

    int32_t all[8] = {0};
    EXPECT_OK(job, comm_all_gather(half, &job->rank, all, sizeof all[0], &job->err));
    for (int32_t r = 0; r < 4; r++) {
        EXPECT(job, all[r] == job->rank / 4 * 4 + 3 - r);
    }
    EXPECT_OK(job, comm_all_gather(pair, &job->rank, all, sizeof all[0], &job->err));
    for (int32_t r = 0; r < 2; r++) {
        const int32_t in_half = comm_rank(half) % 2 + 2 * r;
        EXPECT(job, all[r] == job->rank / 4 * 4 + 3 - in_half);
    }
    if (parent_first) {
        comm_close(job->c);
        job->c = NULL;
        comm_close(half);
        EXPECT_OK(job, comm_barrier(pair, &job->err));
        comm_close(pair);
    } else {
        comm_close(pair);
        comm_close(half);
        EXPECT_OK(job, comm_barrier(job->c, &job->err));
    }
}

/* Groups of different sizes, one of them a single rank; the same rank in several groups. */
void case_uneven_split(rank_job *job)
{
    comm *a = NULL;
    comm *b = NULL;
    EXPECT_OK(job, comm_split(job->c, job->rank == 2, 0, &a, &job->err));
    EXPECT_OK(job, comm_split(job->c, job->rank < 3, 0, &b, &job->err));
    if (a == NULL || b == NULL) {
        return;
    }
    EXPECT(job, comm_size(a) == (job->rank == 2 ? 1 : job->n - 1));
    EXPECT(job, comm_size(b) == (job->rank < 3 ? 3 : job->n - 3));
    for (int k = 0; k < 50; k++) {
        float x = 1;
        EXPECT_OK(job, comm_all_reduce(k % 2 ? a : b, &x, 1, &job->err));
        EXPECT(job, same_bits(x, (float)comm_size(k % 2 ? a : b)));
    }
    comm_close(a);
    comm_close(b);
}
