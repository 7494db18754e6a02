/* check/comm_data.c: what the collectives move, sum and count, against a naive simulation.
 *
 * Every rank can compute what every rank sends, so it knows what it must receive without asking
 * anybody. Buffers lie between red zones; inputs must stay as they were. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "base/rng.h"
#include "check/comm_case.h"

enum { ZONE = 64, ZONE_BYTE = 0xA5, MAX_N = 64 };

/* ---- buffers ----------------------------------------------------------------------------------- */

static unsigned char *buf_new(comm_case *k, size_t bytes)
{
    unsigned char *p = mem_alloc(bytes + 2 * ZONE, 0);
    if (p == NULL) {
        case_wrong(k, "no memory for %zu bytes", bytes);
        comm_abort(k->c, "no memory for the check");
        return NULL;
    }
    memset(p, ZONE_BYTE, bytes + 2 * ZONE);
    return p + ZONE;
}

static void buf_free(comm_case *k, unsigned char *p, size_t bytes, const char *name)
{
    if (p == NULL) {
        return;
    }
    for (size_t i = 0; i < ZONE; i++) {
        if (p[bytes + i] != ZONE_BYTE || *(p - 1 - i) != ZONE_BYTE) {
            case_wrong(k, "%s wrote outside of %s", comm_op_name(k->op), name);
        }
    }
    mem_free(p - ZONE);
}

/* ---- what each rank sends ---------------------------------------------------------------------- */

static uint64_t stream_of(int32_t from, int32_t to)
{
    return (uint64_t)from * MAX_N + (uint64_t)to;
}

static void fill(const comm_case *k, unsigned char *p, size_t bytes, int32_t from, int32_t to)
{
    for (size_t i = 0; i < bytes; i += 8) {
        const uint64_t w = rng_u64(k->seed + bytes, stream_of(from, to), i);
        memcpy(p + i, &w, bytes - i < 8 ? bytes - i : 8);
    }
}

/* Compares n bytes of a message of `bytes`. */
static void expect(comm_case *k, const unsigned char *p, size_t n, size_t bytes, int32_t from,
                   int32_t to, const char *name)
{
    for (size_t i = 0; i < n; i += 8) {
        const uint64_t w = rng_u64(k->seed + bytes, stream_of(from, to), i);
        if (memcmp(p + i, &w, n - i < 8 ? n - i : 8) != 0) {
            case_wrong(k, "%s of %zu bytes: %s from rank %d to %d differs near byte %zu",
                       comm_op_name(k->op), bytes, name, from, to, i);
            return;
        }
    }
}

/* Element i of rank r's operand: magnitudes over 9 decades, so that another order shows; ranks
 * with an empty shard bring zeros where sizes are uneven. */
static float term(const comm_case *k, int32_t r, size_t i)
{
    if (k->size == SIZE_UNEVEN && r % 3 == 1) {
        return 0.0F;
    }
    const uint64_t x = rng_u64(k->seed, stream_of(r, 0) + 1000000, i);
    const float m = (float)((double)(x >> 40) * 0x1p-24 - 0.5);
    return m * (float)(UINT64_C(1) << (x & 31));
}

/* The tree of the contract read from its root: the ranks that are r modulo h. */
static float tree(const float *x, int32_t n, int32_t r, int32_t h)
{
    return h == n ? x[r] : tree(x, n, r, 2 * h) + tree(x, n, r + h, 2 * h);
}

static float expected_sum(const comm_case *k, size_t i)
{
    float x[MAX_N] = {0};
    for (int32_t r = 0; r < k->n; r++) {
        x[r] = term(k, r, i);
    }
    if (k->n == 1 || k->n == 2 || k->n == 4 || k->n == 8) {
        return tree(x, k->n, 0, 1);
    }
    float s = x[0];
    for (int32_t r = 1; r < k->n; r++) {
        s += x[r];
    }
    return s;
}

static void expect_sums(comm_case *k, const float *got, size_t first, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const float want = expected_sum(k, first + i);
        if (memcmp(&got[i], &want, sizeof want) != 0) {
            case_wrong(k, "%s: element %zu is %.9g, the fixed order gives %.9g",
                       comm_op_name(k->op), first + i, (double)got[i], (double)want);
            return;
        }
    }
}

/* ---- counters ---------------------------------------------------------------------------------- */

/* Checks that one more call of k->op sent and received exactly so much. */
static void expect_count(comm_case *k, const comm_stats *before, uint64_t sent, uint64_t received)
{
    const comm_stats *now = comm_counters(k->c);
    const int32_t op = k->op;
    const uint64_t s = now->bytes_sent[op] - before->bytes_sent[op];
    const uint64_t r = now->bytes_received[op] - before->bytes_received[op];
    if (s != sent || r != received || now->n_call[op] - before->n_call[op] != 1) {
        case_wrong(k, "%s counts %llu bytes sent and %llu received, not %llu and %llu",
                   comm_op_name(op), (unsigned long long)s, (unsigned long long)r,
                   (unsigned long long)sent, (unsigned long long)received);
    }
    k->v.n_call++;
    k->v.bytes += s;
}

static void expect_ok(comm_case *k, kvs_status st, const kvs_error *err)
{
    if (st != KVS_OK) {
        case_wrong(k, "%s: %.120s", comm_op_name(k->op), err->text);
    }
}

/* ---- one call ---------------------------------------------------------------------------------- */

static void gather(comm_case *k, size_t bytes, bool in_place)
{
    kvs_error err = {0};
    const comm_stats before = *comm_counters(k->c);
    const size_t n = (size_t)k->n;
    unsigned char *recv = buf_new(k, bytes * n);
    unsigned char *own = buf_new(k, bytes);
    if (recv != NULL && own != NULL) {
        unsigned char *send = in_place ? recv + (size_t)k->rank * bytes : own;
        fill(k, send, bytes, k->rank, 0);
        expect_ok(k, comm_all_gather(k->c, send, recv, bytes, &err), &err);
        for (int32_t r = 0; r < k->n; r++) {
            expect(k, recv + (size_t)r * bytes, bytes, bytes, r, 0, "recv");
        }
        expect(k, send, bytes, bytes, k->rank, 0, "send");
        expect_count(k, &before, bytes * (n - 1), bytes * (n - 1));
    }
    buf_free(k, recv, bytes * n, "recv");
    buf_free(k, own, bytes, "send");
}

static void to_all(comm_case *k, size_t bytes)
{
    kvs_error err = {0};
    const comm_stats before = *comm_counters(k->c);
    const size_t n = (size_t)k->n;
    unsigned char *send = buf_new(k, bytes * n);
    unsigned char *recv = buf_new(k, bytes * n);
    if (send != NULL && recv != NULL) {
        for (int32_t r = 0; r < k->n; r++) {
            fill(k, send + (size_t)r * bytes, bytes, k->rank, r);
        }
        expect_ok(k, comm_all_to_all(k->c, send, recv, bytes, &err), &err);
        for (int32_t r = 0; r < k->n; r++) {
            expect(k, recv + (size_t)r * bytes, bytes, bytes, r, k->rank, "recv");
            expect(k, send + (size_t)r * bytes, bytes, bytes, k->rank, r, "send");
        }
        expect_count(k, &before, bytes * (n - 1), bytes * (n - 1));
    }
    buf_free(k, send, bytes * n, "send");
    buf_free(k, recv, bytes * n, "recv");
}

static void broadcast(comm_case *k, size_t bytes, int32_t root)
{
    kvs_error err = {0};
    const comm_stats before = *comm_counters(k->c);
    unsigned char *buf = buf_new(k, bytes);
    if (buf != NULL) {
        const bool is_root = k->rank == root;
        if (is_root) {
            fill(k, buf, bytes, root, 0);
        }
        expect_ok(k, comm_broadcast(k->c, buf, bytes, root, &err), &err);
        expect(k, buf, bytes, bytes, root, 0, "buf");
        expect_count(k, &before, is_root ? bytes * (size_t)(k->n - 1) : 0, is_root ? 0 : bytes);
    }
    buf_free(k, buf, bytes, "buf");
}

static void scatter(comm_case *k, size_t m, bool in_place)
{
    kvs_error err = {0};
    const comm_stats before = *comm_counters(k->c);
    const size_t n = (size_t)k->n;
    unsigned char *a = buf_new(k, 4 * m * n);
    unsigned char *b = buf_new(k, 4 * m);
    if (a != NULL && b != NULL) {
        float *send = (float *)(void *)a;
        const size_t first = (size_t)k->rank * m;
        for (size_t i = 0; i < m * n; i++) {
            send[i] = term(k, k->rank, i);
        }
        float *recv = in_place ? send + first : (float *)(void *)b;
        expect_ok(k, comm_reduce_scatter(k->c, send, recv, m, &err), &err);
        expect_sums(k, recv, first, m);
        for (size_t i = 0; i < m * n; i++) {
            const float want = term(k, k->rank, i);
            if (!(in_place && i >= first && i < first + m) && memcmp(&send[i], &want, 4) != 0) {
                case_wrong(k, "reduce_scatter changed element %zu of send", i);
                break;
            }
        }
        expect_count(k, &before, 4 * m * (n - 1), 4 * m * (n - 1));
    }
    buf_free(k, a, 4 * m * n, "send");
    buf_free(k, b, 4 * m, "recv");
}

static void reduce(comm_case *k, size_t m)
{
    kvs_error err = {0};
    const comm_stats before = *comm_counters(k->c);
    unsigned char *a = buf_new(k, 4 * m);
    if (a != NULL) {
        float *buf = (float *)(void *)a;
        for (size_t i = 0; i < m; i++) {
            buf[i] = term(k, k->rank, i);
        }
        expect_ok(k, comm_all_reduce(k->c, buf, m, &err), &err);
        expect_sums(k, buf, 0, m);
        /* The own block by its definition: from m*r/n to m*(r+1)/n, both rounded down. */
        const size_t n = (size_t)k->n;
        const size_t r = (size_t)k->rank;
        const size_t own = m * (r + 1) / n - m * r / n;
        const uint64_t bytes = 4 * (m - own) + 4 * own * (n - 1);
        expect_count(k, &before, bytes, bytes);
    }
    buf_free(k, a, 4 * m, "buf");
}

static void barrier(comm_case *k)
{
    kvs_error err = {0};
    const comm_stats before = *comm_counters(k->c);
    expect_ok(k, comm_barrier(k->c, &err), &err);
    expect_count(k, &before, 0, 0);
}

/* Colours by residue, order reversed: who is in the group and where, and that it works. */
static void split(comm_case *k, int32_t n_colour)
{
    kvs_error err = {0};
    const comm_stats before = *comm_counters(k->c);
    comm *sub = NULL;
    expect_ok(k, comm_split(k->c, k->rank % n_colour - 1, -k->rank, &sub, &err), &err);
    expect_count(k, &before, 32 * (uint64_t)(k->n - 1), 32 * (uint64_t)(k->n - 1));
    if (sub == NULL) {
        return;
    }
    int32_t want[MAX_N];
    int32_t got[MAX_N];
    int32_t n = 0;
    for (int32_t r = k->n - 1; r >= 0; r--) {
        if (r % n_colour == k->rank % n_colour) {
            want[n++] = r;
        }
    }
    const int32_t rank = comm_rank(sub);
    if (comm_size(sub) != n || rank < 0 || rank >= n || want[rank] != k->rank) {
        case_wrong(k, "split gives rank %d of %d", rank, comm_size(sub));
        comm_abort(sub, "the split is wrong");
    }
    if (comm_all_gather(sub, &k->rank, got, sizeof got[0], &err) != KVS_OK) {
        case_wrong(k, "all_gather in the new group: %.100s", err.text);
    } else if (memcmp(got, want, (size_t)n * sizeof got[0]) != 0) {
        case_wrong(k, "the new group has other members, or in another order");
    }
    comm_close(sub);
}

/* ---- uneven shards ----------------------------------------------------------------------------- */

static size_t shard(int32_t from, int32_t to)
{
    return (size_t)((from * 31 + to * 17 + 5) % 7 * 41); /* some are 0 */
}

/* Lengths first, then all shards padded to the longest: how a group moves what it owns unevenly. */
static void uneven(comm_case *k)
{
    kvs_error err = {0};
    const bool all = k->op == COMM_OP_ALL_TO_ALL;
    const size_t n = (size_t)k->n;
    uint64_t mine[MAX_N];
    uint64_t theirs[MAX_N];
    size_t room = 0;
    for (int32_t r = 0; r < k->n; r++) {
        mine[r] = shard(k->rank, all ? r : 0);
        for (int32_t s = 0; s < k->n; s++) {
            const size_t len = shard(r, all ? s : 0);
            room = len > room ? len : room;
        }
    }
    expect_ok(k,
              all ? comm_all_to_all(k->c, mine, theirs, sizeof mine[0], &err)
                  : comm_all_gather(k->c, mine, theirs, sizeof mine[0], &err),
              &err);
    const comm_stats before = *comm_counters(k->c);
    unsigned char *send = buf_new(k, room * n);
    unsigned char *recv = buf_new(k, room * n);
    if (send != NULL && recv != NULL) {
        for (int32_t r = 0; r < k->n; r++) {
            fill(k, send + (size_t)r * room, (size_t)mine[r], k->rank, all ? r : 0);
        }
        expect_ok(k,
                  all ? comm_all_to_all(k->c, send, recv, room, &err)
                      : comm_all_gather(k->c, send, recv, room, &err),
                  &err);
        for (int32_t r = 0; r < k->n; r++) {
            const int32_t to = all ? k->rank : 0;
            if (theirs[r] != shard(r, to)) {
                case_wrong(k, "rank %d's length arrived as %llu, not %zu", r,
                           (unsigned long long)theirs[r], shard(r, to));
                break;
            }
            expect(k, recv + (size_t)r * room, shard(r, to), shard(r, to), r, to, "recv");
        }
        expect_count(k, &before, room * (n - 1), room * (n - 1));
    }
    buf_free(k, send, room * n, "send");
    buf_free(k, recv, room * n, "recv");
}

/* ---- sizes ------------------------------------------------------------------------------------- */

bool data_has(int32_t op, case_size size)
{
    if (op == COMM_OP_BARRIER) {
        return size == SIZE_ZERO;
    }
    if (op == COMM_OP_SPLIT) {
        return size == SIZE_ONE || size == SIZE_UNEVEN;
    }
    if (size == SIZE_IN_PLACE) {
        return op == COMM_OP_ALL_GATHER || op == COMM_OP_REDUCE_SCATTER;
    }
    return op < COMM_N_OP && size < SIZE_N;
}

static void run_size(comm_case *k, size_t size)
{
    const bool in_place = k->size == SIZE_IN_PLACE;
    switch (k->op) {
    case COMM_OP_ALL_GATHER:
        gather(k, size, in_place);
        break;
    case COMM_OP_ALL_TO_ALL:
        to_all(k, size);
        break;
    case COMM_OP_REDUCE_SCATTER:
        scatter(k, size, in_place);
        break;
    case COMM_OP_ALL_REDUCE:
        reduce(k, size);
        break;
    case COMM_OP_BROADCAST:
        for (int32_t root = 0; root < k->n; root++) {
            broadcast(k, size, root);
        }
        break;
    case COMM_OP_BARRIER:
        barrier(k);
        break;
    default:
        split(k, 1);
        break;
    }
}

static void run_uneven(comm_case *k)
{
    switch (k->op) {
    case COMM_OP_ALL_GATHER:
    case COMM_OP_ALL_TO_ALL:
        uneven(k);
        break;
    case COMM_OP_BROADCAST:
        for (int32_t root = 0; root < k->n; root++) {
            broadcast(k, shard(root, root), root);
        }
        break;
    case COMM_OP_SPLIT:
        for (int32_t n = 2; n <= k->n + 1; n++) {
            split(k, n);
        }
        break;
    default:
        /* Blocks of 0 and 1 elements, and ranks that bring nothing. */
        for (size_t m = 0; m <= (size_t)k->n + 2; m++) {
            run_size(k, m);
        }
        break;
    }
}

void data_run(comm_case *k)
{
    static const size_t odd[] = {3, 13, 509, 4097, 20011};
    const bool sums = k->op == COMM_OP_REDUCE_SCATTER || k->op == COMM_OP_ALL_REDUCE;
    const size_t large = k->quick ? 40009 : (1 << 20) + 3;
    switch (k->size) {
    case SIZE_ZERO:
    case SIZE_ONE:
        run_size(k, k->size == SIZE_ONE);
        break;
    case SIZE_ODD:
    case SIZE_IN_PLACE:
        for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
            run_size(k, odd[i]);
        }
        break;
    case SIZE_LARGE:
        run_size(k, sums ? large / 8 : large);
        break;
    default:
        run_uneven(k);
        break;
    }
}
