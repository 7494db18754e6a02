/* What callers get wrong is refused with what, which value and what would work; nothing is lost; nothing
 * leaks when memory runs out; a step allocates nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "kvspan/kvspan.h"

typedef struct fixture {
    kvs_comm *comm;
    kvs_dcp *d;
    kvs_cache *c;
    int32_t table[4];
} fixture;

static kvs_dcp_config good_config(void)
{
    kvs_dcp_config dc = kvs_dcp_config_default();
    dc.n_head = 4;
    dc.n_index_head = 4;
    dc.topk = 16;
    dc.softmax_scale = 0.125f;
    dc.max_rows = 8;
    dc.max_reqs = 2;
    dc.max_len = 256;
    dc.trace = 1;
    return dc;
}

static kvs_cache_config good_cache(void)
{
    kvs_cache_config cc = kvs_cache_config_default();
    cc.n_layer = 2;
    cc.n_index_layer = 1;
    cc.n_page = 4;
    return cc;
}

static int setup(void **state)
{
    static fixture f;
    memset(&f, 0, sizeof f);
    kvs_error err;
    const kvs_dcp_config dc = good_config();
    const kvs_cache_config cc = good_cache();
    assert_int_equal(kvs_comm_open_self(&f.comm, NULL, &err), KVS_OK);
    if (kvs_dcp_open(&f.d, &dc, f.comm, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(kvs_cache_create(&f.c, &cc, &err), KVS_OK);
    for (int i = 0; i < 4; i++) {
        f.table[i] = 3 - i;
    }
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    kvs_dcp_close(f->d);
    kvs_cache_free(f->c);
    kvs_comm_close(f->comm);
    return 0;
}

static void has(const kvs_error *err, const char *part)
{
    if (strstr(err->text, part) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err->text, part);
    }
}

static void refuse_open(fixture *f, const kvs_dcp_config *dc, const char *a, const char *b)
{
    kvs_error err;
    kvs_dcp *d = (kvs_dcp *)f;
    assert_true(kvs_dcp_open(&d, dc, f->comm, &err) < 0);
    assert_null(d);
    has(&err, a);
    has(&err, b);
}

static void test_open_refusals(void **state)
{
    fixture *f = *state;
    kvs_dcp_config dc = good_config();
    dc.tp = 4;
    refuse_open(f, &dc, "tp 4", "1 ranks");
    dc = good_config();
    dc.dcp = 2;
    refuse_open(f, &dc, "dcp 2", "use");
    dc = good_config();
    dc.interleave = 3;
    refuse_open(f, &dc, "interleave 3", "use");
    dc = good_config();
    dc.n_head = 0;
    refuse_open(f, &dc, "n_head 0", "1 to");
    dc = good_config();
    dc.n_head = 129;
    refuse_open(f, &dc, "129", "128");
    dc = good_config();
    dc.softmax_scale = 0.0f;
    refuse_open(f, &dc, "softmax_scale 0", "above 0");
    dc.softmax_scale = -1.0f;
    refuse_open(f, &dc, "softmax_scale -1", "above 0");
    dc.softmax_scale = (float)__builtin_nan("");
    refuse_open(f, &dc, "softmax_scale", "above 0");
    dc = good_config();
    dc.topk = 0;
    refuse_open(f, &dc, "topk 0", "1 to");
    dc.topk = 32769;
    refuse_open(f, &dc, "topk 32769", "32768");
    dc = good_config();
    dc.n_index_head = 65;
    refuse_open(f, &dc, "n_index_head 65", "64");
    dc = good_config();
    dc.kv = KVS_KV_FP8;
    refuse_open(f, &dc, "fp8", "fp8_ds_mla");
    dc = good_config();
    dc.q_fp8 = 1;
    refuse_open(f, &dc, "q_fp8", "use");
    dc = good_config();
    dc.max_len = INT64_C(1) << 31;
    refuse_open(f, &dc, "2147483648", "use");
    dc = good_config();
    dc.cpu = "sse9";
    refuse_open(f, &dc, "sse9", "avx2");
    dc = good_config();
    dc.kernels = "attn=fastest";
    refuse_open(f, &dc, "fastest", "ref");
    dc = good_config();
    dc.threads = -1;
    refuse_open(f, &dc, "threads -1", "1 to");
    dc = good_config();
    dc.struct_size = 3;
    refuse_open(f, &dc, "struct_size 3", "default");
    kvs_error err;
    kvs_dcp *d = NULL;
    assert_int_equal(kvs_dcp_open(&d, NULL, f->comm, &err), KVS_INVALID);
    assert_int_equal(kvs_dcp_open(&d, &dc, NULL, &err), KVS_INVALID);
    assert_int_equal(kvs_dcp_open(NULL, &dc, f->comm, &err), KVS_INVALID);
    kvs_dcp_close(NULL);
}

static kvs_batch batch_of(const fixture *f, const int32_t *q_len, const int64_t *seq_len)
{
    const kvs_batch b = {.n_req = 1,
                         .q_len = q_len,
                         .seq_len = seq_len,
                         .table = f->table,
                         .table_stride = 4,
                         .n_page = 4};
    return b;
}

static void test_plan_refusals(void **state)
{
    fixture *f = *state;
    kvs_error err;
    int32_t q = 1;
    int64_t len = 256;
    kvs_batch b = batch_of(f, &q, &len);
    assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_OK);
    len = 257;
    assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_LIMIT);
    has(&err, "257");
    has(&err, "256");
    len = 5;
    q = 6;
    assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_INVALID);
    has(&err, "seq_len 5");
    q = -1;
    assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_INVALID);
    has(&err, "q_len -1");
    q = 9;
    len = 100;
    assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_LIMIT);
    has(&err, "max_rows 8");
    q = 1;
    b.n_req = 3;
    assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_LIMIT);
    has(&err, "max_reqs 2");
    b = batch_of(f, &q, &len);
    b.table_stride = 1;
    assert_true(kvs_dcp_plan(f->d, &b, &err) < 0); /* 100 tokens need 2 entries */
    b = batch_of(f, &q, &len);
    b.n_page = 3; /* the table names page 3 */
    assert_true(kvs_dcp_plan(f->d, &b, &err) < 0);
    has(&err, "3");
    f->table[1] = -1;
    b = batch_of(f, &q, &len);
    assert_true(kvs_dcp_plan(f->d, &b, &err) < 0);
    f->table[1] = 2;
    b.seq_len = NULL;
    assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_INVALID);
    assert_int_equal(kvs_dcp_plan(f->d, NULL, &err), KVS_INVALID);
}

typedef struct data {
    float latent[8][512], rope[8][64], key[8][128];
    float q[8][4][576], iq[8][4][128], w[8][4], out[8][4][512], lse[8][4];
    int32_t ids[8][16], count[8];
} data;

static void make_data(data *x)
{
    memset(x, 0, sizeof *x);
    float *p = &x->latent[0][0];
    for (size_t i = 0; i < offsetof(data, out) / sizeof(float); i++) {
        p[i] = (float)((i * 2654435761u >> 20) % 2001) / 1000.0f - 1.0f;
    }
}

/* A whole step; stops at the first failure. */
static kvs_status whole_step(fixture *f, data *x, kvs_error *err)
{
    const int32_t q = 8;
    const int64_t len = 8;
    const kvs_batch b = batch_of(f, &q, &len);
    kvs_status st = kvs_dcp_plan(f->d, &b, err);
    st = st < 0 ? st : kvs_dcp_write(f->d, f->c, 0, x->latent, x->rope, KVS_DTYPE_F32, err);
    st = st < 0 ? st : kvs_dcp_write_index(f->d, f->c, 0, x->key, KVS_DTYPE_F32, err);
    st = st < 0 ? st : kvs_dcp_select(f->d, f->c, 0, x->iq, KVS_DTYPE_F32, &x->w[0][0], err);
    st = st < 0 ? st
                : kvs_dcp_attend(f->d, f->c, 0, KVS_ATTEND_SPARSE, x->q, KVS_DTYPE_F32, x->out,
                                 KVS_DTYPE_F32, &x->lse[0][0], err);
    st = st < 0 ? st
                : kvs_dcp_attend(f->d, f->c, 0, KVS_ATTEND_DENSE, x->q, KVS_DTYPE_F32, x->out,
                                 KVS_DTYPE_F32, &x->lse[0][0], err);
    st = st < 0 ? st
                : kvs_dcp_attend(f->d, f->c, 0, KVS_ATTEND_CONTEXT, x->q, KVS_DTYPE_F32, x->out,
                                 KVS_DTYPE_F32, &x->lse[0][0], err);
    st = st < 0 ? st : kvs_dcp_selection(f->d, &x->ids[0][0], x->count, err);
    return st < 0 ? st : kvs_dcp_finish(f->d, NULL, err);
}

static void test_call_refusals(void **state)
{
    fixture *f = *state;
    kvs_error err;
    data *x = malloc(sizeof *x);
    make_data(x);
    assert_int_equal(whole_step(f, x, &err), KVS_OK);
    assert_int_equal(kvs_dcp_write(f->d, f->c, 2, x->latent, x->rope, KVS_DTYPE_F32, &err),
                     KVS_INVALID);
    has(&err, "layer 2");
    assert_int_equal(kvs_dcp_write(f->d, f->c, -1, x->latent, x->rope, KVS_DTYPE_F32, &err),
                     KVS_INVALID);
    has(&err, "layer -1");
    assert_int_equal(kvs_dcp_write(f->d, f->c, 0, x->latent, x->rope, KVS_DTYPE_AUTO, &err),
                     KVS_INVALID);
    assert_int_equal(kvs_dcp_write(f->d, f->c, 0, NULL, x->rope, KVS_DTYPE_F32, &err), KVS_INVALID);
    has(&err, "latent");
    assert_int_equal(kvs_dcp_write_index(f->d, f->c, 1, x->key, KVS_DTYPE_F32, &err), KVS_INVALID);
    has(&err, "index layer 1");
    assert_int_equal(kvs_dcp_attend(f->d, f->c, 0, (kvs_attend)9, x->q, KVS_DTYPE_F32, x->out,
                                    KVS_DTYPE_F32, NULL, &err),
                     KVS_INVALID);
    assert_int_equal(kvs_dcp_attend_local(f->d, f->c, 0, KVS_ATTEND_CONTEXT, x->q, KVS_DTYPE_F32,
                                          &x->out[0][0][0], &x->lse[0][0], &err),
                     KVS_INVALID);
    assert_int_equal(kvs_dcp_set_selection(f->d, &x->ids[0][0], 17, &err), KVS_INVALID);
    has(&err, "topk 16");
    /* a new plan drops the selection, also one of as many rows */
    const int32_t rows[] = {8, 1};
    const int64_t len = 9;
    for (int i = 0; i < 2; i++) {
        const kvs_batch b = batch_of(f, &rows[i], &len);
        assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_OK);
        assert_int_equal(kvs_dcp_attend(f->d, f->c, 0, KVS_ATTEND_SPARSE, x->q, KVS_DTYPE_F32,
                                        x->out, KVS_DTYPE_F32, NULL, &err),
                         KVS_INVALID);
        has(&err, "selection");
        assert_int_equal(kvs_dcp_selection(f->d, &x->ids[0][0], x->count, &err), KVS_INVALID);
    }
    /* a cache of another shape */
    kvs_cache_config cc = good_cache();
    cc.kv = KVS_KV_BF16;
    kvs_cache *other = NULL;
    assert_int_equal(kvs_cache_create(&other, &cc, &err), KVS_OK);
    assert_int_equal(kvs_dcp_write(f->d, other, 0, x->latent, x->rope, KVS_DTYPE_F32, &err),
                     KVS_INVALID);
    has(&err, "bf16");
    has(&err, "fp8_ds_mla");
    kvs_cache_free(other);
    free(x);
}

/* Ids past the row's bound, repeated or negative are masked; the step ends with a message and its outputs
 * stay usable. */
static void test_bad_ids_are_reported(void **state)
{
    fixture *f = *state;
    kvs_error err;
    data *x = malloc(sizeof *x);
    make_data(x);
    assert_int_equal(whole_step(f, x, &err), KVS_OK);
    const int32_t q = 1;
    const int64_t len = 5;
    const kvs_batch b = batch_of(f, &q, &len);
    assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_OK);
    const int32_t ids[6] = {4, 0, 2000000000, 5, -1, 2};
    const int32_t good[6] = {0, 2, 4, -1, -1, -1};
    float want[4][512];
    assert_int_equal(kvs_dcp_set_selection(f->d, good, 6, &err), KVS_OK);
    assert_int_equal(kvs_dcp_attend(f->d, f->c, 0, KVS_ATTEND_SPARSE, x->q, KVS_DTYPE_F32, want,
                                    KVS_DTYPE_F32, NULL, &err),
                     KVS_OK);
    assert_int_equal(kvs_dcp_finish(f->d, NULL, &err), KVS_OK);
    assert_int_equal(kvs_dcp_set_selection(f->d, ids, 6, &err), KVS_OK);
    assert_int_equal(kvs_dcp_attend(f->d, f->c, 0, KVS_ATTEND_SPARSE, x->q, KVS_DTYPE_F32, x->out,
                                    KVS_DTYPE_F32, NULL, &err),
                     KVS_OK);
    kvs_step_info info;
    assert_int_equal(kvs_dcp_finish(f->d, &info, &err), KVS_INVALID);
    has(&err, "2 ids");
    assert_int_equal(info.n_bad_id, 2);
    assert_int_equal(info.n_key_attended, 3);
    assert_memory_equal(x->out, want, sizeof want);
    /* counters start anew */
    assert_int_equal(kvs_dcp_finish(f->d, &info, &err), KVS_OK);
    assert_int_equal(info.n_bad_id, 0);
    free(x);
}

static void test_step_allocates_nothing(void **state)
{
    fixture *f = *state;
    kvs_error err;
    data *x = malloc(sizeof *x);
    make_data(x);
    assert_int_equal(whole_step(f, x, &err), KVS_OK);
    mem_guard_begin();
    const kvs_status st = whole_step(f, x, &err);
    assert_int_equal(mem_guard_end(), 0);
    assert_int_equal(st, KVS_OK);
    free(x);
}

/* A handle for some forms and for queries in its own type takes less memory, refuses the rest by name, and gives
 * the same bytes. */
static void test_what_is_not_called_takes_no_memory(void **state)
{
    fixture *f = *state;
    kvs_error err;
    static uint16_t q[8][4][576];
    data *x = malloc(sizeof *x);
    data *y = malloc(sizeof *y);
    make_data(x);
    make_data(y);
    for (int i = 0; i < 8 * 4 * 576; i++) {
        q[i / (4 * 576)][i / 576 % 4][i % 576] = (uint16_t)(0x3F00 + i * 37 % 0x180);
    }
    const int32_t n = 8;
    const int64_t len = 8;
    const kvs_batch b = batch_of(f, &n, &len);
    const int64_t all = kvs_dcp_workspace_bytes(f->d);
    assert_int_equal(whole_step(f, x, &err), KVS_OK);
    assert_int_equal(kvs_dcp_plan(f->d, &b, &err), KVS_OK);
    assert_int_equal(kvs_dcp_attend(f->d, f->c, 0, KVS_ATTEND_DENSE, q, KVS_DTYPE_BF16, x->out,
                                    KVS_DTYPE_BF16, &x->lse[0][0], &err),
                     KVS_OK);
    kvs_dcp_config dc = good_config();
    dc.forms = 1 << KVS_ATTEND_DENSE;
    dc.q_ready = 1;
    kvs_dcp *d = NULL;
    assert_int_equal(kvs_dcp_open(&d, &dc, f->comm, &err), KVS_OK);
    assert_true(kvs_dcp_workspace_bytes(d) < all - 2 * 8 * 4 * 576 * 2 - 512 * 576 * 2);
    assert_int_equal(kvs_dcp_plan(d, &b, &err), KVS_OK);
    assert_int_equal(kvs_dcp_attend(d, f->c, 0, KVS_ATTEND_DENSE, q, KVS_DTYPE_BF16, y->out,
                                    KVS_DTYPE_BF16, &y->lse[0][0], &err),
                     KVS_OK);
    assert_memory_equal(x->out, y->out, 8 * 4 * 512 * 2);
    assert_memory_equal(x->lse, y->lse, sizeof x->lse);
    assert_int_equal(kvs_dcp_attend(d, f->c, 0, KVS_ATTEND_CONTEXT, q, KVS_DTYPE_BF16, y->out,
                                    KVS_DTYPE_F32, NULL, &err),
                     KVS_INVALID);
    has(&err, "attend 3");
    has(&err, "forms");
    assert_int_equal(kvs_dcp_attend(d, f->c, 0, KVS_ATTEND_SPARSE, q, KVS_DTYPE_BF16, y->out,
                                    KVS_DTYPE_F32, NULL, &err),
                     KVS_INVALID);
    has(&err, "attend 2");
    assert_int_equal(kvs_dcp_attend(d, f->c, 0, KVS_ATTEND_DENSE, x->q, KVS_DTYPE_F32, y->out,
                                    KVS_DTYPE_F32, NULL, &err),
                     KVS_INVALID);
    has(&err, "KVS_DTYPE_BF16");
    kvs_dcp_close(d);
    dc.forms = 1;
    refuse_open(f, &dc, "forms 1", "use");
    dc.forms = 0;
    dc.q_ready = 2;
    refuse_open(f, &dc, "q_ready 2", "use");
    dc.q_ready = 1;
    dc.n_index_head = 0;
    dc.kv = KVS_KV_FP8;
    dc.q_fp8 = 1;
    refuse_open(f, &dc, "q_ready 1", "use q_ready 0");
    free(x);
    free(y);
}

/* Every allocation of opening a handle fails once: an error, nothing left behind. Where memory ran out
 * inside a collective the group has ended, as the communicator's contract says. */
static void test_open_without_memory(void **state)
{
    fixture *f = *state;
    kvs_error err;
    kvs_dcp_config dc = good_config();
    dc.threads = 2;
    kvs_dcp *d = NULL;
    int64_t n = 0;
    for (n = 1;; n++) {
        const mem_stats before = mem_stats_get();
        mem_fail_after(n);
        const kvs_status st = kvs_dcp_open(&d, &dc, f->comm, &err);
        const bool fired = mem_fail_fired();
        mem_fail_after(0);
        if (st == KVS_OK) {
            kvs_dcp_close(d);
            assert_false(fired);
            break;
        }
        assert_null(d);
        assert_true(st == KVS_NOMEM || st == KVS_PEER);
        assert_int_equal(mem_stats_get().n_live, before.n_live);
        assert_int_equal(mem_stats_get().live_bytes, before.live_bytes);
        if (st == KVS_PEER) {
            kvs_comm_close(f->comm);
            assert_int_equal(kvs_comm_open_self(&f->comm, NULL, &err), KVS_OK);
        }
    }
    assert_true(n > 20);
}

/* The partial of one rank, merged with the library's merge, is the attention. */
static void test_local_partials_merge(void **state)
{
    fixture *f = *state;
    kvs_error err;
    data *x = malloc(sizeof *x);
    make_data(x);
    assert_int_equal(whole_step(f, x, &err), KVS_OK);
    static float part[8][4][512];
    static float none[8][4][512];
    static float lse[8][4];
    static float no_lse[8][4];
    assert_int_equal(kvs_dcp_attend_local(f->d, f->c, 0, KVS_ATTEND_DENSE, x->q, KVS_DTYPE_F32,
                                          &part[0][0][0], &lse[0][0], &err),
                     KVS_OK);
    assert_int_equal(kvs_dcp_attend(f->d, f->c, 0, KVS_ATTEND_DENSE, x->q, KVS_DTYPE_F32, x->out,
                                    KVS_DTYPE_F32, &x->lse[0][0], &err),
                     KVS_OK);
    memset(none, 0xFF, sizeof none); /* NaN behind the identity is never read */
    for (int i = 0; i < 32; i++) {
        no_lse[i / 4][i % 4] = -(float)__builtin_inf();
    }
    const float *outs[2] = {&none[0][0][0], &part[0][0][0]};
    const float *lses[2] = {&no_lse[0][0], &lse[0][0]};
    static float merged[8][4][512];
    static float merged_lse[8][4];
    assert_int_equal(kvs_merge(2, outs, lses, 8, 4, 512, merged, KVS_DTYPE_F32, &merged_lse[0][0],
                               &err),
                     KVS_OK);
    assert_memory_equal(merged, x->out, sizeof merged);
    assert_memory_equal(merged_lse, x->lse, sizeof merged_lse);
    assert_int_equal(kvs_merge(0, outs, lses, 8, 4, 512, merged, KVS_DTYPE_F32, NULL, &err),
                     KVS_INVALID);
    assert_int_equal(kvs_merge(2, outs, lses, 8, 4, 500, merged, KVS_DTYPE_F32, NULL, &err),
                     KVS_INVALID);
    has(&err, "multiple of 16");
    free(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_open_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_plan_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_call_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bad_ids_are_reported, setup, teardown),
        cmocka_unit_test_setup_teardown(test_step_allocates_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_not_called_takes_no_memory, setup, teardown),
        cmocka_unit_test_setup_teardown(test_open_without_memory, setup, teardown),
        cmocka_unit_test_setup_teardown(test_local_partials_merge, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
