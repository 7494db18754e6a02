/* With q_fp8 every form of attention sees the quantised query: e4m3 values and one scale per token and head,
 * worked out here as x -> e4m3(x / s) * s with s a power of two. */
#include "unit/unit.h"

#include <math.h>

#include "kvspan/dcp.h"
#include "num/fmt.h"

enum { N_ROW = 7, HEADS = 3, LEN = 100 };

typedef struct result {
    float out[N_ROW][HEADS][512], lse[N_ROW][HEADS];
} result;

static kvs_error g_err;
static float g_q[N_ROW][HEADS][576];
static float g_rounded[N_ROW][HEADS][576]; /* what is left of it by the rule */

static void ok(kvs_status st)
{
    if (st != KVS_OK) {
        fail_msg("%s", g_err.text);
    }
}

static float noise(int64_t a, int64_t b)
{
    const uint64_t u = ((uint64_t)a * 1000003 + (uint64_t)b + 77) * UINT64_C(0x9E3779B97F4A7C15);
    return (float)(u >> 40) * 0x1p-23f - 1.0f;
}

/* Heads and rows of very different size, so that a scale shared by them would show. */
static void make_queries(void)
{
    for (int32_t row = 0; row < N_ROW; row++) {
        for (int32_t h = 0; h < HEADS; h++) {
            float *x = g_q[row][h];
            double amax = 0;
            for (int32_t i = 0; i < 576; i++) {
                x[i] = bf16_round(noise(row * HEADS + h, i) * ldexpf(1.0f, (row + 2 * h) % 5 - 2));
                amax = fmax(amax, fabs((double)x[i]));
            }
            const float s = (float)exp2(ceil(log2(fmax(amax / 448.0, 1e-4))));
            for (int32_t i = 0; i < 576; i++) {
                g_rounded[row][h][i] = e4m3_to_f32(e4m3_from_f32(x[i] / s)) * s;
            }
        }
    }
}

/* The step's rows with queries q, by attend of a form or (how 0) by attend_local. */
static void run(int32_t q_fp8, int32_t how, const float *q, kvs_dtype type, result *r)
{
    kvs_dcp_config dc = kvs_dcp_config_default();
    dc.kv = KVS_KV_FP8;
    dc.n_head = HEADS;
    dc.softmax_scale = 0.06f;
    dc.q_fp8 = q_fp8;
    dc.max_rows = LEN;
    dc.max_reqs = 1;
    dc.max_len = 128;
    kvs_cache_config cc = kvs_cache_config_default();
    cc.kv = KVS_KV_FP8;
    cc.n_page = 2;
    kvs_comm *comm = NULL;
    kvs_dcp *d = NULL;
    kvs_cache *c = NULL;
    ok(kvs_comm_open_self(&comm, NULL, &g_err));
    ok(kvs_dcp_open(&d, &dc, comm, &g_err));
    ok(kvs_cache_create(&c, &cc, &g_err));
    static float rows[LEN * 576];
    for (int32_t i = 0; i < LEN * 576; i++) {
        rows[i] = noise(i, -3);
    }
    static bf16 q_bf16[N_ROW * HEADS * 576];
    for (int32_t i = 0; i < N_ROW * HEADS * 576; i++) {
        q_bf16[i] = bf16_from_f32(q[i]);
    }
    const void *given = type == KVS_DTYPE_F32 ? (const void *)q : (const void *)q_bf16;
    const int64_t len = LEN;
    int32_t q_len = LEN;
    const int32_t table[2] = {1, 0};
    const kvs_batch b = {.n_req = 1,
                         .q_len = &q_len,
                         .seq_len = &len,
                         .table = table,
                         .table_stride = 2,
                         .n_page = 2};
    ok(kvs_dcp_plan(d, &b, &g_err));
    ok(kvs_dcp_write(d, c, 0, rows, rows + LEN * 512, KVS_DTYPE_F32, &g_err));
    q_len = N_ROW;
    ok(kvs_dcp_plan(d, &b, &g_err));
    memset(r, 0, sizeof *r);
    if (how == 0) {
        ok(kvs_dcp_attend_local(d, c, 0, KVS_ATTEND_DENSE, given, type, &r->out[0][0][0],
                                &r->lse[0][0], &g_err));
    } else {
        ok(kvs_dcp_attend(d, c, 0, (kvs_attend)how, given, type, r->out, KVS_DTYPE_F32,
                          &r->lse[0][0], &g_err));
    }
    ok(kvs_dcp_finish(d, NULL, &g_err));
    kvs_dcp_close(d);
    kvs_cache_free(c);
    kvs_comm_close(comm);
}

static double distance(const result *a, const result *b)
{
    double most = 0;
    for (int32_t i = 0; i < N_ROW; i++) {
        for (int32_t h = 0; h < HEADS; h++) {
            most = fmax(most, fabs((double)a->lse[i][h] - (double)b->lse[i][h]));
            for (int32_t d = 0; d < 512; d++) {
                most = fmax(most, fabs((double)a->out[i][h][d] - (double)b->out[i][h][d]));
            }
        }
    }
    return most;
}

/* q_fp8 gives what queries that were rounded beforehand give without it, and that is not what the
 * queries themselves give. */
static void every_form_quantises(void **state)
{
    (void)state;
    static const int32_t forms[] = {KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT, 0};
    static result with;
    static result rounded;
    static result plain;
    make_queries();
    for (size_t m = 0; m < UNIT_COUNT(forms); m++) {
        for (int32_t t = 0; t < 2; t++) {
            const kvs_dtype type = t == 0 ? KVS_DTYPE_BF16 : KVS_DTYPE_F32;
            run(1, forms[m], &g_q[0][0][0], type, &with);
            run(0, forms[m], &g_rounded[0][0][0], type, &rounded);
            run(0, forms[m], &g_q[0][0][0], type, &plain);
            if (!(distance(&with, &rounded) < 1e-5 && distance(&with, &plain) > 1e-3)) {
                fail_msg("form %d: %.3g from rounded queries, %.3g from plain ones", forms[m],
                         distance(&with, &rounded), distance(&with, &plain));
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_form_quantises)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
