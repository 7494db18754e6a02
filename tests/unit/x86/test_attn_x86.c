/* test_attn_x86.c: attention kernels of the x86 instruction sets against float64, and the same bits for
 * any company a row is in. AVX-512 kernels run emulated, and on the hardware where it is. */
#include "unit/unit.h"

#include <math.h>

#include "attn_problem.h"
#include "base/cpu.h"
#include "base/pool.h"
#include "kern/exp.h"
#include "kern/x86/attn_x86.h"
#include "unit/tile_trap.h"

extern const attn_isa attn_isa_avx512_emulated;
extern const attn_isa attn_isa_avx512bf16_emulated;
extern const attn_isa attn_isa_amx_emulated;

typedef struct variant {
    const char *name;
    uint32_t need;
    attn_kernels k;
    double p_unit; /* of rows that are not f32 */
} variant;

static const variant g_variants[] = {
    {"avx2", CPU_NEED_AVX2, {&attn_isa_avx2, &attn_isa_avx2}, 0.0},
    {"avx512 emulated", CPU_NEED_AVX2, {&attn_isa_avx512_emulated, &attn_isa_avx512_emulated}, 0.0},
    {"avx512bf16 emulated",
     CPU_NEED_AVX2,
     {&attn_isa_avx512_emulated, &attn_isa_avx512bf16_emulated},
     0x1p-8},
    {"amx emulated",
     CPU_NEED_AVX2,
     {&attn_isa_avx512_emulated, &attn_isa_amx_emulated},
     0x1p-8},
    {"avx512", CPU_NEED_AVX512, {&attn_isa_avx512, &attn_isa_avx512}, 0.0},
    {"avx512bf16", CPU_NEED_AVX512BF16, {&attn_isa_avx512, &attn_isa_avx512bf16}, 0x1p-8},
    {"amx", CPU_NEED_AMX, {&attn_isa_avx512, &attn_isa_amx}, 0x1p-8},
};

/* Under valgrind a few small cases have to do. */
static bool slow(void)
{
    return UNIT_TSAN || unit_valgrind();
}

enum { RED = 16 }; /* floats behind each output that must stay as they were */

typedef struct result {
    float *out, *lse;
    attn_stats stats;
    size_t n_out, n_lse;
} result;

static void result_free(result *r)
{
    free(r->out);
    free(r->lse);
}

static void *room(size_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes > 0 ? bytes : 64) != 0) {
        abort();
    }
    memset(p, 0xff, bytes);
    return p;
}

static bool untouched(const float *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &p[i], sizeof u);
        if (u != UINT32_MAX) {
            return false;
        }
    }
    return true;
}

/* Runs `a` with its own output of strides 512 + 4 and a head more per row. */
static result run_args(const variant *v, attn_args a, int n_worker)
{
    pool *p = NULL;
    dev_queue q;
    kvs_error err;
    assert_int_equal(pool_open(&p, n_worker, NULL), KVS_OK);
    dev_queue_init(&q, p);
    a.out_stride_head = 512 + 4;
    a.out_stride_row = a.out_stride_head * (a.n_head + 1);
    result r = {.n_out = (size_t)(a.out_stride_row * a.n_row),
                .n_lse = (size_t)(a.n_row * a.n_head)};
    r.out = room((r.n_out + RED) * sizeof(float));
    r.lse = room((r.n_lse + RED) * sizeof(float));
    a.out = r.out;
    a.lse = r.lse;
    a.stats = &r.stats;
    a.scratch_bytes = attn_x86_scratch(&a, &q);
    a.scratch = room(a.scratch_bytes + 64);
    attn_x86_run(&v->k, &a, &q);
    assert_int_equal(dev_queue_check(&q, &err), KVS_OK);
    assert_true(untouched((float *)((uint8_t *)a.scratch + a.scratch_bytes), 16));
    free(a.scratch);
    pool_close(p);
    for (int32_t i = 0; i < a.n_row; i++) {
        const float *row = r.out + i * a.out_stride_row;
        for (int32_t h = 0; h < a.n_head; h++) {
            assert_true(untouched(row + h * a.out_stride_head + 512, 4));
        }
        assert_true(untouched(row + a.n_head * a.out_stride_head, 512 + 4));
    }
    assert_true(untouched(r.out + r.n_out, RED) && untouched(r.lse + r.n_lse, RED));
    return r;
}

static const float *out_of(const result *r, const attn_args *a, int32_t row, int32_t head)
{
    return r->out + ((int64_t)row * (a->n_head + 1) + head) * (512 + 4);
}

static void need_equal(const char *what, const float *x, const float *y, size_t n)
{
    if (memcmp(x, y, n * sizeof *x) != 0) {
        fail_msg("%s: the bits differ", what);
    }
}

static void need_same(const char *what, const attn_args *a, const result *x, const result *y)
{
    need_equal(what, x->lse, y->lse, x->n_lse);
    for (int32_t i = 0; i < a->n_row; i++) {
        for (int32_t h = 0; h < a->n_head; h++) {
            need_equal(what, out_of(x, a, i, h), out_of(y, a, i, h), 512);
        }
    }
}

/* Values, counters, and the same bits for 1, 2 and 5 workers. */
static void check_made(const variant *v, problem p)
{
    const problem_spec spec = p.spec;
    const bool pairs = v->p_unit > 0.0 && spec.fmt != KVS_KV_F32;
    result r = run_args(v, p.a, 1);
    uint64_t n_key = 0;
    uint64_t n_bad = 0;
    int32_t *slot = room((size_t)spec.n_key * sizeof *slot);
    for (int32_t i = 0; i < spec.n_row; i++) {
        int32_t lane_n[8];
        n_key += (uint64_t)problem_keys(&p, i, slot, lane_n, &n_bad);
        for (int32_t h = 0; h<spec.n_head; h += spec.n_head> 8 ? 7 : 1) {
            char msg[160];
            if (!problem_check(&p, i, h, out_of(&r, &p.a, i, h), r.lse[i * spec.n_head + h],
                               pairs ? v->p_unit : 0.0, msg, sizeof msg)) {
                fail_msg("%s, format %d, seed %llu: %s", v->name, spec.fmt,
                         (unsigned long long)spec.seed, msg);
            }
        }
    }
    free(slot);
    assert_int_equal(r.stats.n_key, n_key);
    assert_int_equal(r.stats.n_bad_id, n_bad);
    assert_int_equal(r.stats.n_nan, 0);
    assert_true(r.stats.n_fetched <= n_key);
    for (int n_worker = 2; n_worker <= 5; n_worker += 3) {
        result other = run_args(v, p.a, n_worker);
        need_same("workers", &p.a, &r, &other);
        assert_memory_equal(&r.stats, &other.stats, sizeof r.stats);
        result_free(&other);
    }
    result_free(&r);
    problem_free(&p);
}

static void check_problem(const variant *v, problem_spec spec)
{
    check_made(v, problem_make(spec));
}

/* ---- values ---------------------------------------------------------------------------------- */

static const int32_t g_formats[] = {KVS_KV_F32, KVS_KV_BF16, KVS_KV_FP8, KVS_KV_FP8_DS_MLA};

static void values_of_lists(const variant *v)
{
    const int32_t heads[] = {1, 7, 16, 33, 128};
    uint64_t seed = 1;
    for (size_t f = 0; f < UNIT_COUNT(g_formats); f++) {
        for (size_t i = slow() ? f : 0; i < UNIT_COUNT(heads); i += slow() ? 5 : 1, seed++) {
            check_problem(v, (problem_spec){.fmt = g_formats[f],
                                            .list = true,
                                            .n_row = heads[i] > 64 ? 1 : 3,
                                            .n_head = heads[i],
                                            .n_lane = 1 << seed % 4,
                                            .n_key = (int32_t)(40 + seed * 37 % 260),
                                            .none = 0.3,
                                            .bad = 0.02,
                                            .odd_scales = seed % 3 == 0,
                                            .row_pad = seed % 2 ? 16 : 0,
                                            .q_size = seed % 4 == 0 ? 1.0f : 0.2f,
                                            .seed = seed});
        }
    }
}

static void values_of_tables(const variant *v)
{
    const int32_t heads[] = {5, 16, 24, 128};
    uint64_t seed = 100;
    for (size_t f = 0; f < UNIT_COUNT(g_formats); f++) {
        for (size_t i = slow() ? f : 0; i < UNIT_COUNT(heads); i += slow() ? 4 : 1, seed++) {
            check_problem(v, (problem_spec){.fmt = g_formats[f],
                                            .list = false,
                                            .n_row = heads[i] > 64 ? 2 : 7,
                                            .n_head = heads[i],
                                            .n_lane = 1 << seed % 4,
                                            .interleave = 1 << seed * 5 % 7,
                                            .n_key = (int32_t)(30 + seed * 53 % 400),
                                            .bad = seed % 3 == 0 ? 0.2 : 0.0,
                                            .odd_scales = seed % 2 == 0,
                                            .n_req = heads[i] > 64 ? 1 : 3,
                                            .ragged = true,
                                            .row_pad = seed % 2 ? 0 : 4,
                                            .q_size = 0.2f,
                                            .seed = seed});
        }
    }
}

/* More keys than a segment in a lane, and more items than a window. */
static void values_of_segments(const variant *v)
{
    if (slow()) {
        return;
    }
    problem_spec s = {.fmt = KVS_KV_FP8_DS_MLA,
                      .list = true,
                      .n_row = 1,
                      .n_head = 3,
                      .n_lane = 1,
                      .n_key = 2 * 2048 + 77,
                      .q_size = 0.2f,
                      .seed = 200};
    check_problem(v, s);
    s.list = false;
    s.fmt = KVS_KV_BF16;
    s.n_lane = 2;
    s.interleave = 4;
    s.n_req = 1;
    s.n_row = 2;
    s.n_key = 4 * 2048 + 300;
    check_problem(v, s);
    s.bad = 0.1;
    s.ragged = true;
    check_problem(v, s);
}

/* With several workers, 32 items are computed before they are folded: here the first 32 end behind the
 * first segment of the first of three in a lane, the next behind some lanes of a block. */
static void values_of_windows(const variant *v)
{
    if (slow()) {
        return;
    }
    problem p = problem_make((problem_spec){.fmt = KVS_KV_BF16,
                                            .list = true,
                                            .n_row = 8,
                                            .n_head = 2,
                                            .n_lane = 8,
                                            .n_key = 2 * 2048 + 5 + 7 * 3,
                                            .q_size = 0.2f,
                                            .seed = 250});
    for (int32_t i = 0; i < 8 * 8; i++) {
        p.lane_count[i] = 3;
    }
    p.lane_count[3] = 0;
    p.lane_count[4 * 8] = 2 * 2048 + 5;
    check_made(v, p);
}

/* ---- the same bits --------------------------------------------------------------------------- */

static attn_args one_row(const attn_args *a, int32_t row, int32_t h0, int32_t n_head)
{
    attn_args b = *a;
    const int64_t size = a->q_type == KVS_DTYPE_F32 ? 4 : 2;
    const int64_t at = row * a->q_stride_row + h0 * a->q_stride_head;
    b.q = (const uint8_t *)a->q + at * size;
    b.n_row = 1;
    b.n_head = n_head;
    b.q_scale = a->q_scale != NULL ? a->q_scale + (int64_t)row * a->n_head + h0 : NULL;
    if (a->slots != NULL) {
        b.slots = a->slots + row * a->slots_stride;
        b.lane_count = a->lane_count + (int64_t)row * a->n_lane;
    } else {
        b.row_req = a->row_req + row;
        b.kv_len = a->kv_len + row;
    }
    return b;
}

/* Each row alone, its heads in two parts, gives what it gives among others. */
static void alone(const variant *v, problem_spec spec)
{
    problem p = problem_make(spec);
    result r = run_args(v, p.a, 2);
    for (int32_t i = 0; i < spec.n_row; i++) {
        const int32_t half = spec.n_head / 2;
        for (int32_t part = 0; part < 2; part++) {
            const int32_t h0 = part ? half : 0;
            const int32_t n = part ? spec.n_head - half : half;
            const attn_args b = one_row(&p.a, i, h0, n);
            result s = run_args(v, b, 1);
            need_equal("lse alone", r.lse + i * spec.n_head + h0, s.lse, (size_t)n);
            for (int32_t h = 0; h < n; h++) {
                need_equal("out alone", out_of(&r, &p.a, i, h0 + h), out_of(&s, &b, 0, h), 512);
            }
            result_free(&s);
        }
    }
    result_free(&r);
    problem_free(&p);
}

static void company(const variant *v)
{
    problem_spec s = {.list = false,
                      .n_row = 9,
                      .n_head = 10,
                      .n_lane = 2,
                      .interleave = 1,
                      .n_key = 260,
                      .n_req = 2,
                      .ragged = true,
                      .q_size = 0.3f,
                      .seed = 300};
    for (size_t f = 0; f < UNIT_COUNT(g_formats); f++, s.seed++) {
        s.fmt = g_formats[f];
        alone(v, s);
        if (slow()) {
            return;
        }
    }
    s.n_head = 32;
    s.n_row = 5;
    s.interleave = 16;
    alone(v, s);
    s.list = true;
    s.none = 0.5;
    alone(v, s);
}

/* The list of every `n`-th lane, from `first`: what rank `first` of n would be given. */
static attn_args lanes_of(const attn_args *a, int32_t n, int32_t first, int32_t *slots,
                          int32_t *count)
{
    attn_args b = *a;
    b.n_lane = a->n_lane / n;
    b.slots = slots;
    b.lane_count = count;
    for (int32_t i = 0; i < a->n_row; i++) {
        const int32_t *from = a->slots + i * a->slots_stride;
        int32_t *to = slots + i * a->slots_stride;
        for (int32_t j = 0; j < a->n_lane; j++) {
            const int32_t c = a->lane_count[i * a->n_lane + j];
            if (j % n == first) {
                memcpy(to, from, (size_t)c * sizeof *to);
                count[i * b.n_lane + j / n] = c;
                to += c;
            }
            from += c;
        }
    }
    return b;
}

/* Eight lanes in one call, and in two and four calls merged by hand, are the same tree. */
static void shards(const variant *v)
{
    for (uint64_t seed = 400; seed < (slow() ? 402 : 404); seed++) {
        problem p = problem_make((problem_spec){.fmt = g_formats[seed % 4],
                                                .list = true,
                                                .n_row = 2,
                                                .n_head = 9,
                                                .n_lane = 8,
                                                .n_key = seed == 401 ? 12 : 300,
                                                .none = 0.2,
                                                .q_size = 0.3f,
                                                .seed = seed});
        result whole = run_args(v, p.a, 1);
        for (int32_t n = 2; n <= 8; n *= 2) {
            result part[8];
            int32_t *slots = room((size_t)(p.a.n_row * p.a.slots_stride) * sizeof *slots);
            int32_t count[16];
            for (int32_t i = 0; i < n; i++) {
                const attn_args b = lanes_of(&p.a, n, i, slots, count);
                part[i] = run_args(v, b, 2);
            }
            for (int32_t half = n / 2; half > 0; half /= 2) {
                for (int32_t i = 0; i < half; i++) {
                    for (size_t x = 0; x < whole.n_lse; x++) {
                        const merge_weight w =
                            merge_node_weights(part[i].lse[x], part[i + half].lse[x]);
                        const int32_t row = (int32_t)x / p.a.n_head;
                        const int32_t head = (int32_t)x % p.a.n_head;
                        float *to = part[i].out + (out_of(&whole, &p.a, row, head) - whole.out);
                        const float *from = part[i + half].out + (to - part[i].out);
                        for (int32_t d = 0; d < 512; d++) {
                            to[d] = merge_node_value(w, to[d], from[d]);
                        }
                        part[i].lse[x] = w.lse;
                    }
                }
            }
            need_same("shards", &p.a, &whole, &part[0]);
            for (int32_t i = 0; i < n; i++) {
                result_free(&part[i]);
            }
            free(slots);
        }
        result_free(&whole);
        problem_free(&p);
    }
}

/* ---- what must not be ------------------------------------------------------------------------ */

/* NaN in one key of three rows of a request that attend 101, 100 and 104 keys: it ruins the rows that
 * attend the key, in that lane, is counted, and never leaves the op; the others keep their bits. Key 102
 * shares a pair of the product with the last key of the first row. */
static void nan_key(const variant *v, int32_t fmt, int32_t key, uint64_t n_ruined)
{
    problem p = problem_make((problem_spec){.fmt = fmt,
                                            .list = false,
                                            .n_row = 3,
                                            .n_head = 6,
                                            .n_lane = 2,
                                            .interleave = 1,
                                            .n_key = 130,
                                            .n_req = 1,
                                            .q_size = 0.2f,
                                            .seed = 500});
    p.kv_len[0] = 101;
    p.kv_len[1] = 100;
    p.kv_len[2] = 104;
    result before = run_args(v, p.a, 1);
    const int64_t slot = p.table[key / 64] * 64 + key % 64;
    uint8_t *at = p.kv + slot / 64 * p.a.page_stride + slot % 64 * p.a.row_stride;
    memset(at, 0xff, 4); /* NaN in every format, value 0 */
    result after = run_args(v, p.a, 2);
    assert_int_equal(after.stats.n_nan, n_ruined * 6);
    for (int32_t x = 0; x < 18; x++) {
        const float *old = out_of(&before, &p.a, x / 6, x % 6);
        const float *new = out_of(&after, &p.a, x / 6, x % 6);
        for (int32_t d = 0; d < 512; d++) {
            assert_true(isfinite(new[d]));
        }
        /* the other lane is whole, so every row has a result */
        assert_true(isfinite(after.lse[x]));
        if (p.kv_len[x / 6] > key) {
            assert_true(before.lse[x] != after.lse[x]);
        } else {
            assert_true(before.lse[x] == after.lse[x]);
            need_equal("not attended", old, new, 512);
        }
    }
    result_free(&before);
    result_free(&after);
    problem_free(&p);
}

static void nan_keys(const variant *v)
{
    for (size_t f = 0; f < UNIT_COUNT(g_formats); f++) {
        nan_key(v, g_formats[f], 100, 2);
        nan_key(v, g_formats[f], 102, 1);
    }
}

static problem small(uint64_t seed)
{
    return problem_make((problem_spec){.fmt = KVS_KV_F32,
                                       .list = true,
                                       .n_row = 2,
                                       .n_head = 3,
                                       .n_lane = 1,
                                       .n_key = 5,
                                       .q_size = 0.2f,
                                       .seed = seed});
}

/* Infinities: +inf scores and results that are not finite count, scores of -inf weigh nothing. */
static void infinities(const variant *v)
{
    problem p = small(600);
    float *q = p.q;
    const float big = 3e38f;
    for (int32_t s = 0; s < p.a.n_slot; s++) {
        float *row = (float *)(void *)(p.kv + s / 64 * p.a.page_stride + s % 64 * p.a.row_stride);
        row[575] = big;
    }
    q[575] = big;                          /* head 0 of row 0: every score is +inf */
    q[p.a.q_stride_head + 575] = -big;     /* head 1: -inf                         */
    q[2 * p.a.q_stride_head + 575] = 0.0f; /* head 2: as it was                    */
    for (int32_t h = 0; h < 3; h++) {
        q[p.a.q_stride_row + h * p.a.q_stride_head + 575] = 0.0f;
    }
    result r = run_args(v, p.a, 1);
    assert_int_equal(r.stats.n_nan, 1);
    assert_true(r.lse[0] == -INFINITY && r.lse[1] == -INFINITY);
    for (int32_t d = 0; d < 512; d++) {
        assert_true(out_of(&r, &p.a, 0, 0)[d] == 0.0f && out_of(&r, &p.a, 0, 1)[d] == 0.0f);
    }
    for (int32_t x = 2; x < 6; x++) {
        assert_true(isfinite(r.lse[x]));
    }
    result_free(&r);
    /* an infinite value of weight 0 makes the result NaN: counted, not passed on */
    for (int32_t s = 0; s < p.a.n_slot; s++) {
        float *row = (float *)(void *)(p.kv + s / 64 * p.a.page_stride + s % 64 * p.a.row_stride);
        row[575] = 1.0f;
    }
    const int32_t s = p.slots[2];
    float *row = (float *)(void *)(p.kv + s / 64 * p.a.page_stride + s % 64 * p.a.row_stride);
    row[7] = INFINITY;
    q[575] = 0.0f;
    q[7] = -1.0f;
    r = run_args(v, p.a, 1);
    assert_true(r.lse[0] == -INFINITY && out_of(&r, &p.a, 0, 0)[7] == 0.0f);
    assert_true(r.stats.n_nan >= 1);
    result_free(&r);
    problem_free(&p);
}

/* The last of those with bf16 rows, which other kernels take than f32. */
static void infinities_of_bf16(const variant *v)
{
    problem p = problem_make((problem_spec){.fmt = KVS_KV_BF16,
                                            .list = true,
                                            .n_row = 2,
                                            .n_head = 3,
                                            .n_lane = 2,
                                            .n_key = 5,
                                            .q_size = 0.2f,
                                            .seed = 650});
    const int32_t s = p.slots[2];
    uint8_t *row = p.kv + s / 64 * p.a.page_stride + s % 64 * p.a.row_stride;
    const uint16_t inf = 0x7F80;
    const uint16_t minus_one = 0xBF80;
    memcpy(row + 2 * 7, &inf, sizeof inf);
    for (int32_t h = 0; h < 2; h++) {
        memcpy((uint8_t *)p.q + 2 * (h * p.a.q_stride_head + 7), &minus_one, sizeof minus_one);
    }
    result r = run_args(v, p.a, 1);
    assert_true(r.stats.n_nan >= 2);
    for (int32_t h = 0; h < 2; h++) {
        assert_true(isfinite(r.lse[h]) || r.lse[h] == -INFINITY);
        for (int32_t d = 0; d < 512; d++) {
            assert_true(isfinite(out_of(&r, &p.a, 0, h)[d]));
        }
    }
    result_free(&r);
    problem_free(&p);
}

/* Rows without keys, among rows with some, in every way of having none. */
static void nothing_attended(const variant *v)
{
    problem p = problem_make((problem_spec){.fmt = KVS_KV_BF16,
                                            .list = true,
                                            .n_row = 4,
                                            .n_head = 17,
                                            .n_lane = 4,
                                            .n_key = 90,
                                            .q_size = 0.2f,
                                            .seed = 700});
    for (int32_t k = 0; k < 90; k++) {
        p.slots[k] = -1;
    }
    for (int32_t j = 0; j < 4; j++) {
        p.lane_count[2 * 4 + j] = 0;
    }
    result r = run_args(v, p.a, 2);
    for (int32_t i = 0; i < 4; i++) {
        for (int32_t h = 0; h < 17; h++) {
            const bool none = i % 2 == 0;
            assert_true(none == (r.lse[i * 17 + h] == -INFINITY));
            for (int32_t d = 0; d < 512; d++) {
                assert_true(isfinite(out_of(&r, &p.a, i, h)[d]));
                assert_true(!none || out_of(&r, &p.a, i, h)[d] == 0.0f);
            }
        }
    }
    result_free(&r);
    attn_args a = p.a;
    a.n_row = 0;
    r = run_args(v, a, 2);
    assert_int_equal(r.stats.n_key, 0);
    result_free(&r);
    problem_free(&p);
}

/* A request that does not exist, bounds past the table: every such key is a bad id. */
static void bounds_past_the_table(const variant *v)
{
    problem p = problem_make((problem_spec){.fmt = KVS_KV_FP8,
                                            .list = false,
                                            .n_row = 3,
                                            .n_head = 4,
                                            .n_lane = 8,
                                            .interleave = 2,
                                            .n_key = 128,
                                            .n_req = 3,
                                            .q_size = 0.2f,
                                            .seed = 800});
    p.row_req[0] = 7;
    p.row_req[2] = -1;
    p.kv_len[0] = 1000000007;
    p.kv_len[1] = INT32_MAX;
    p.kv_len[2] = 5;
    for (int32_t s = 0; s < p.a.n_slot; s++) {
        memset(p.kv + s / 64 * p.a.page_stride + s % 64 * p.a.row_stride, 0x30, 576);
    }
    for (int n_worker = 1; n_worker <= 2; n_worker++) {
        result r = run_args(v, p.a, n_worker);
        assert_int_equal(r.stats.n_key, 128);
        assert_int_equal(r.stats.n_bad_id, 1000000007 + (uint64_t)(INT32_MAX - 128) + 5);
        assert_true(r.lse[0] == -INFINITY && isfinite(r.lse[4]) && r.lse[8] == -INFINITY);
        result_free(&r);
    }
    problem_free(&p);
}

/* One key is attended, so the result is its value: every e4m3 code under scales from one end to the
 * other, powers of two and odd ones. The query is 0: no score overflows. */
static void every_code(const variant *v)
{
    const int exps[] = {-126, -120, -117, -100, -8, 0, 60, 119, 120, 127};
    problem p = problem_make((problem_spec){.fmt = KVS_KV_FP8_DS_MLA,
                                            .list = true,
                                            .n_row = 1,
                                            .n_head = 1,
                                            .n_lane = 1,
                                            .n_key = 1,
                                            .q_size = 0.0f,
                                            .seed = 901});
    uint8_t *at = p.kv + p.slots[0] / 64 * p.a.page_stride + p.slots[0] % 64 * p.a.row_stride;
    for (size_t e = 0; e < 2 * UNIT_COUNT(exps); e++) {
        for (int t = 0; t < 4; t++) {
            const float s =
                ldexpf(e % 2 ? 1.7f : 1.0f, exps[(e / 2 + (size_t)t) % UNIT_COUNT(exps)]);
            memcpy(at + 512 + 4 * t, &s, sizeof s);
        }
        for (int32_t d = 0; d < 512; d++) {
            at[d] = (uint8_t)(d * 5 + d / 256);
            at[d] = isfinite(problem_value(&p, p.slots[0], d)) ? at[d] : 0x81;
        }
        result r = run_args(v, p.a, 1);
        for (int32_t d = 0; d < 512; d++) {
            double want = problem_value(&p, p.slots[0], d);
            /* pair products read subnormal values as 0 */
            want = v->p_unit > 0.0 && fabs(want) < 0x1p-126 ? 0.0 : want;
            if ((double)out_of(&r, &p.a, 0, 0)[d] != want) {
                fail_msg("%s: value %d, code %02x: %a, want %a", v->name, d, at[d],
                         (double)out_of(&r, &p.a, 0, 0)[d], want);
            }
        }
        result_free(&r);
    }
    problem_free(&p);
}

/* Too little scratch is refused, not overrun. */
static void short_scratch(const variant *v)
{
    problem p = small(950);
    dev_queue q;
    kvs_error err;
    float out[2 * 3 * 512], lse[6];
    attn_args a = p.a;
    dev_queue_init(&q, NULL);
    a.out = out;
    a.lse = lse;
    a.out_stride_head = 512;
    a.out_stride_row = 3 * 512;
    a.scratch_bytes = attn_x86_scratch(&a, &q) - 1;
    a.scratch = room(a.scratch_bytes);
    attn_x86_run(&v->k, &a, &q);
    assert_int_equal(dev_queue_check(&q, &err), KVS_INVALID);
    a.n_row = 1 << 20;
    assert_int_equal(attn_x86_scratch(&a, &q), a.scratch_bytes + 1);
    free(a.scratch);
    problem_free(&p);
}

#ifdef TILE_TRAP
/* The AMX variant alone, whose tiles are instructions here. */
static bool worth_it(size_t i)
{
    return strcmp(g_variants[i].name, "amx emulated") == 0;
}
#else
/* Valgrind is slow, and what it looks for does not depend on the width of a float vector. */
static bool worth_it(size_t i)
{
    return !slow() || i == 0 || i == 2;
}
#endif

static void for_variants(void (*fn)(const variant *v))
{
#ifdef TILE_TRAP
    tile_trap_install();
#endif
    for (size_t i = 0; i < UNIT_COUNT(g_variants); i++) {
        if (worth_it(i) && cpu_has(cpu_features(), g_variants[i].need)) {
            fn(&g_variants[i]);
        }
    }
}

#define CASE(name)                                                                                 \
    static void test_##name(void **state)                                                          \
    {                                                                                              \
        (void)state;                                                                               \
        for_variants(name);                                                                        \
    }

CASE(values_of_lists)
CASE(values_of_tables)
CASE(values_of_segments)
CASE(values_of_windows)
CASE(company)
CASE(shards)
CASE(nan_keys)
CASE(infinities)
CASE(infinities_of_bf16)
CASE(nothing_attended)
CASE(bounds_past_the_table)
CASE(every_code)
CASE(short_scratch)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values_of_lists),
        cmocka_unit_test(test_values_of_tables),
        cmocka_unit_test(test_values_of_segments),
        cmocka_unit_test(test_values_of_windows),
        cmocka_unit_test(test_company),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_nan_keys),
        cmocka_unit_test(test_infinities),
        cmocka_unit_test(test_infinities_of_bf16),
        cmocka_unit_test(test_nothing_attended),
        cmocka_unit_test(test_bounds_past_the_table),
        cmocka_unit_test(test_every_code),
        cmocka_unit_test(test_short_scratch),
    };
#ifdef TILE_TRAP
    /* a trap is a thousand times slower than an instruction: one case shows it */
    cmocka_set_test_filter("test_values_of_w*");
#endif
    return cmocka_run_group_tests(tests, NULL, NULL);
}
