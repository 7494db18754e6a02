/* Tile scales of fp8_ds_mla rows as every writer stores them and every reader undoes them: tiles of zeros,
 * of the smallest and of very large values, both scale rules, each variant of this machine writing and each
 * reading. A row that is the only key of its request is what attention gives back. */
#include "unit/unit.h"

#include <float.h>
#include <math.h>

#include "kv/cache.h"
#include "kvspan/dcp.h"

enum { N_LEVEL = 4, N_ROW = 8, DIM = 512, TILE = 128 };

static const char *const k_level[N_LEVEL] = {"ref", "avx2", "avx512", "avx512bf16"};
static const float k_amax[N_ROW] = {0.0f, 1e-30f, 1e-3f, 3.7f, 448.0f, 60000.0f, 1e-40f, 1.7e38f};

static kvs_error g_err;

static void ok(kvs_status st)
{
    if (st != KVS_OK) {
        fail_msg("%s", g_err.text);
    }
}

/* Tile t of row r has the largest magnitude k_amax[(r + t) % 8]; a tile of zeros has both signs. */
static void fill(float x[N_ROW][DIM])
{
    for (int32_t r = 0; r < N_ROW; r++) {
        for (int32_t i = 0; i < DIM; i++) {
            const float amax = k_amax[(r + i / TILE) % N_ROW];
            const float part = i % TILE == 77 ? 1.0f : ldexpf((float)(i % 61) / 61.0f, -(i % 13));
            x[r][i] = (i & 1 ? -amax : amax) * part;
        }
    }
}

static kvs_dcp *open_level(kvs_comm *comm, const char *cpu)
{
    kvs_dcp_config c = kvs_dcp_config_default();
    c.n_head = 2;
    c.softmax_scale = 1.0f;
    c.kv = KVS_KV_FP8_DS_MLA;
    c.max_rows = N_ROW;
    c.max_reqs = N_ROW;
    c.max_len = 64;
    c.cpu = cpu;
    kvs_dcp *d = NULL;
    ok(kvs_dcp_open(&d, &c, comm, &g_err));
    static const int32_t q_len[N_ROW] = {1, 1, 1, 1, 1, 1, 1, 1};
    static const int64_t len[N_ROW] = {1, 1, 1, 1, 1, 1, 1, 1};
    static const int32_t table[N_ROW] = {3, 1, 0, 2, 7, 5, 6, 4};
    const kvs_batch b = {.n_req = N_ROW,
                         .q_len = q_len,
                         .seq_len = len,
                         .table = table,
                         .table_stride = 1,
                         .n_page = N_ROW};
    ok(kvs_dcp_plan(d, &b, &g_err));
    return d;
}

/* Half the distance of e4m3 values around y. */
static double half_step(double y)
{
    int e = 0;
    frexp(y, &e);
    return y < 0x1p-6 ? 0x1p-10 : ldexp(1.0, e - 5);
}

static double scale_by_rule(kvs_scale_rule rule, double amax)
{
    const double s = amax / 448.0;
    return rule == KVS_SCALE_EXACT ? fmax(s, (double)FLT_MIN) : exp2(ceil(log2(fmax(s, 1e-4))));
}

/* The scales in memory. */
static void check_stored(const kvs_cache *c, kvs_scale_rule rule)
{
    static const int32_t page[N_ROW] = {3, 1, 0, 2, 7, 5, 6, 4};
    for (int32_t r = 0; r < N_ROW; r++) {
        for (int32_t t = 0; t < DIM / TILE; t++) {
            float s = 0.0f;
            memcpy(&s, cache_row(c, 0, 64 * page[r]) + 512 + 4 * t, sizeof s);
            const double want = scale_by_rule(rule, (double)k_amax[(r + t) % N_ROW]);
            int e = 0;
            if (rule == KVS_SCALE_POW2) {
                assert_true(frexpf(s, &e) == 0.5f);
                assert_true((double)s == want);
            } else {
                assert_true(fabs((double)s - want) <= want * 0x1p-24);
            }
        }
    }
}

static void check_read(float x[N_ROW][DIM], const float *out, kvs_scale_rule rule)
{
    for (int32_t r = 0; r < N_ROW; r++) {
        for (int32_t i = 0; i < DIM; i++) {
            const double s = scale_by_rule(rule, (double)k_amax[(r + i / TILE) % N_ROW]);
            const double want = (double)x[r][i];
            /* an arbitrary scale costs a rounding to bf16 too; bf16 products may flush denormals */
            const double tol =
                half_step(fabs(want) / s) * s * (1 + 1e-6) +
                (rule == KVS_SCALE_EXACT ? fabs(want) * 0x1p-8 + (double)FLT_MIN : 0.0);
            for (int32_t h = 0; h < 2; h++) {
                const double got = (double)out[((int64_t)r * 2 + h) * DIM + i];
                if (!(fabs(got - want) <= tol)) {
                    fail_msg("row %d, value %d: %.9g read of %.9g, tolerance %.3g", r, i, got, want,
                             tol);
                }
            }
        }
    }
}

static void every_reader_undoes_every_writer(void **state)
{
    (void)state;
    static const kvs_scale_rule rules[] = {KVS_SCALE_POW2, KVS_SCALE_EXACT};
    static const kvs_attend form[] = {KVS_ATTEND_DENSE, KVS_ATTEND_CONTEXT};
    static float x[N_ROW][DIM];
    static float rope[N_ROW][64];
    static float q[N_ROW][2][576];
    static float out[N_ROW][2][DIM];
    fill(x);
    kvs_comm *comm = NULL;
    ok(kvs_comm_open_self(&comm, NULL, &g_err));
    kvs_dcp *d[N_LEVEL];
    for (int32_t i = 0; i < N_LEVEL; i++) {
        d[i] = open_level(comm, k_level[i]);
    }
    for (size_t k = 0; k < UNIT_COUNT(rules); k++) {
        kvs_cache_config cc = kvs_cache_config_default();
        cc.kv = KVS_KV_FP8_DS_MLA;
        cc.scale_rule = rules[k];
        cc.n_page = N_ROW;
        for (int32_t w = 0; w < N_LEVEL; w++) {
            kvs_cache *c = NULL;
            ok(kvs_cache_create(&c, &cc, &g_err));
            memset(c->map, 0xFF, c->map_bytes);
            ok(kvs_dcp_write(d[w], c, 0, x, rope, KVS_DTYPE_F32, &g_err));
            check_stored(c, rules[k]);
            for (int32_t r = 0; r < 2 * N_LEVEL; r++) {
                ok(kvs_dcp_attend(d[r / 2], c, 0, form[r % 2], q, KVS_DTYPE_F32, out, KVS_DTYPE_F32,
                                  NULL, &g_err));
                check_read(x, &out[0][0][0], rules[k]);
            }
            kvs_cache_free(c);
        }
    }
    for (int32_t i = 0; i < N_LEVEL; i++) {
        kvs_dcp_close(d[i]);
    }
    kvs_comm_close(comm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_reader_undoes_every_writer)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
