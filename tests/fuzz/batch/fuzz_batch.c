/* fuzz_batch.c - any batch either plans or is refused; a plan names only rows that exist.
 *
 * The input is a batch: request count, lengths and a block table. After a success every slot lies in the
 * pool, every row of one owner is written exactly once, and attention over the planned step (reference
 * kernels, tiny cache) reads nothing outside its memory: the sanitizers watch. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "dcp/dcp.h"
#include "kvspan/kvspan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_REQ = 4, WIDTH = 4, N_PAGE = 5, MAX_ROWS = 8, MAX_LEN = 200 };

static kvs_comm *g_comm; /* never closed: they live as long as the process */
static kvs_dcp *g_dcp;
static kvs_cache *g_cache;

static void open_once(void)
{
    kvs_error err;
    kvs_dcp_config dc = kvs_dcp_config_default();
    dc.n_head = 1;
    dc.n_index_head = 4;
    dc.topk = 5;
    dc.softmax_scale = 0.1f;
    dc.max_rows = MAX_ROWS;
    dc.max_reqs = MAX_REQ;
    dc.max_len = MAX_LEN;
    dc.cpu = "avx2";
    kvs_cache_config cc = kvs_cache_config_default();
    cc.n_index_layer = 1;
    cc.n_page = N_PAGE;
    if (kvs_comm_open_self(&g_comm, NULL, &err) < 0 || kvs_dcp_open(&g_dcp, &dc, g_comm, &err) < 0 ||
        kvs_cache_create(&g_cache, &cc, &err) < 0) {
        abort();
    }
}

/* Little-endian numbers from the input; 0 once it is used up. */
typedef struct cursor {
    const uint8_t *p;
    size_t left;
} cursor;

static int64_t take(cursor *c, size_t bytes)
{
    uint64_t x = 0;
    for (size_t i = 0; i < bytes && c->left > 0; i++, c->left--) {
        x |= (uint64_t)*c->p++ << (8 * i);
    }
    const int shift = 64 - 8 * (int)bytes;
    return (int64_t)(x << shift) >> shift;
}

static void run_step(int32_t rows)
{
    static float latent[MAX_ROWS][512], rope[MAX_ROWS][64], key[MAX_ROWS][128];
    static float q[MAX_ROWS][1][576], iq[MAX_ROWS][4][128], w[MAX_ROWS][4];
    static float out[MAX_ROWS][1][512];
    kvs_error err;
    for (int32_t t = 0; t < rows; t++) {
        w[t][t % 4] = 1.0f;
        iq[t][t % 4][t] = key[t][t] = latent[t][t] = q[t][0][t] = 1.0f;
    }
    if (kvs_dcp_write(g_dcp, g_cache, 0, latent, rope, KVS_DTYPE_F32, &err) < 0 ||
        kvs_dcp_write_index(g_dcp, g_cache, 0, key, KVS_DTYPE_F32, &err) < 0 ||
        kvs_dcp_select(g_dcp, g_cache, 0, iq, KVS_DTYPE_F32, &w[0][0], &err) < 0 ||
        kvs_dcp_attend(g_dcp, g_cache, 0, KVS_ATTEND_SPARSE, q, KVS_DTYPE_F32, out, KVS_DTYPE_F32,
                       NULL, &err) < 0 ||
        kvs_dcp_attend(g_dcp, g_cache, 0, KVS_ATTEND_DENSE, q, KVS_DTYPE_F32, out, KVS_DTYPE_F32,
                       NULL, &err) < 0 ||
        kvs_dcp_finish(g_dcp, NULL, &err) < 0) {
        abort();
    }
}

static void check_plan(void)
{
    const dcp_plan *p = &g_dcp->plan;
    for (int32_t t = 0; t < p->n_row; t++) {
        const int64_t slot = p->slot[t];
        if (slot < 0 || slot >= (int64_t)N_PAGE * KVS_PAGE_TOKENS || p->bound[t] < 1 ||
            p->bound[t] > MAX_LEN || p->row_req[t] < 0 || p->row_req[t] >= p->n_req) {
            abort();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!g_dcp) {
        open_once();
    }
    cursor c = {data, size};
    int32_t q_len[MAX_REQ + 1];
    int64_t seq_len[MAX_REQ + 1];
    int32_t table[(MAX_REQ + 1) * WIDTH];
    kvs_batch b;
    memset(&b, 0, sizeof b);
    b.n_req = (int32_t)take(&c, 1);
    b.n_page = take(&c, 1) == 0 ? take(&c, 8) : N_PAGE;
    b.table_stride = take(&c, 1) % (WIDTH + 1);
    const int wide = (int)take(&c, 1) & 1;
    for (int i = 0; i <= MAX_REQ; i++) {
        q_len[i] = (int32_t)take(&c, wide ? 4 : 1);
        seq_len[i] = take(&c, wide ? 8 : 1);
    }
    for (int i = 0; i < (MAX_REQ + 1) * WIDTH; i++) {
        table[i] = (int32_t)take(&c, wide ? 4 : 1);
    }
    b.q_len = q_len;
    b.seq_len = seq_len;
    b.table = table;
    kvs_error err;
    if (kvs_dcp_plan(g_dcp, &b, &err) < 0) {
        return 0;
    }
    if (b.n_page <= N_PAGE) {
        check_plan();
        run_step(g_dcp->plan.n_row);
    }
    return 0;
}
