/* decode_step.c - one sparse decode step over 4 ranks (threads) that share an FP8 cache.
 *
 *     decode_step [SNAPSHOT]
 *
 * Each rank: opens its end, makes its shard of the cache, writes a context of 1000 random tokens and the
 * index keys, selects the 128 best of them for the next token, attends them, and prints a checksum. With a
 * file name it then saves the cache as a snapshot, which snapshot_reader opens at any number of ranks.
 * Change N_RANK to 1, 2 or 8: every head gives the same bits, only spread over other ranks. */
#include <kvspan/kvspan.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_RANK = 4, N_HEAD = 16, N_INDEX_HEAD = 8, TOPK = 128, CONTEXT = 1000 };

typedef struct rank_arg {
    kvs_comm *comm;
    const char *snapshot;
    kvs_status status;
    kvs_error err;
    double sum;
    kvs_step_info info;
} rank_arg;

/* A number in [-1, 1) that depends on the arguments alone, so that every rank makes the same token. */
static float noise(uint64_t token, uint64_t what, uint64_t i)
{
    uint64_t x = token * 0x9E3779B97F4A7C15u + what * 0xBF58476D1CE4E5B9u + i * 0x94D049BB133111EBu;
    x ^= x >> 31;
    x *= 0xD6E8FEB86659FD93u;
    x ^= x >> 32;
    return (float)(x >> 40) / 8388608.0f - 1.0f;
}

typedef struct buffers {
    float latent[128][KVS_LATENT_DIM], rope[128][KVS_ROPE_DIM], key[128][KVS_INDEX_DIM];
    float q[N_HEAD][KVS_ROW_DIM], iq[N_INDEX_HEAD][KVS_INDEX_DIM], w[N_INDEX_HEAD];
    float out[N_HEAD][KVS_LATENT_DIM], lse[N_HEAD];
    int32_t table[64];
} buffers;

/* Writes tokens [first, first + n) of the sequence: every rank passes all of them, each stores its own. */
static kvs_status write_tokens(kvs_dcp *d, kvs_cache *cache, buffers *b, int64_t n_page,
                               int64_t first, int32_t n, kvs_error *err)
{
    const int64_t seq_len = first + n;
    const kvs_batch batch = {.n_req = 1,
                             .q_len = &n,
                             .seq_len = &seq_len,
                             .table = b->table,
                             .table_stride = 64,
                             .n_page = n_page};
    kvs_status st = kvs_dcp_plan(d, &batch, err);
    for (int32_t t = 0; t < n; t++) {
        for (int i = 0; i < KVS_LATENT_DIM; i++)
            b->latent[t][i] = noise((uint64_t)(first + t), 1, (uint64_t)i);
        for (int i = 0; i < KVS_ROPE_DIM; i++)
            b->rope[t][i] = noise((uint64_t)(first + t), 2, (uint64_t)i);
        for (int i = 0; i < KVS_INDEX_DIM; i++)
            b->key[t][i] = noise((uint64_t)(first + t), 3, (uint64_t)i);
    }
    if (st >= 0)
        st = kvs_dcp_write(d, cache, 0, b->latent, b->rope, KVS_DTYPE_F32, err);
    if (st >= 0)
        st = kvs_dcp_write_index(d, cache, 0, b->key, KVS_DTYPE_F32, err);
    return st;
}

static kvs_status decode(rank_arg *a, kvs_dcp *d, kvs_cache *cache, kvs_pages *pages, int64_t n_page,
                         buffers *b, kvs_error *err)
{
    int64_t have = 0;
    kvs_status st = kvs_pages_extend(pages, N_RANK, b->table, 64, &have, CONTEXT + 1, err);
    for (int64_t at = 0; st >= 0 && at < CONTEXT; at += 100)
        st = write_tokens(d, cache, b, n_page, at, 100, err);
    /* the step: one new token; its row is written first and it attends itself too */
    if (st >= 0)
        st = write_tokens(d, cache, b, n_page, CONTEXT, 1, err);
    const int32_t heads = kvs_dcp_heads(d);
    for (int32_t h = 0; h < heads; h++)
        for (int i = 0; i < KVS_ROW_DIM; i++)
            b->q[h][i] = noise(CONTEXT, 10 + (uint64_t)(kvs_dcp_rank(d) * heads + h), (uint64_t)i);
    for (int32_t h = 0; h < N_INDEX_HEAD; h++) {
        for (int i = 0; i < KVS_INDEX_DIM; i++)
            b->iq[h][i] = noise(CONTEXT, 100 + (uint64_t)h, (uint64_t)i);
        b->w[h] = noise(CONTEXT, 200, (uint64_t)h);
    }
    if (st >= 0)
        st = kvs_dcp_select(d, cache, 0, b->iq, KVS_DTYPE_F32, b->w, err);
    if (st >= 0)
        st = kvs_dcp_attend(d, cache, 0, KVS_ATTEND_SPARSE, b->q, KVS_DTYPE_F32, b->out,
                            KVS_DTYPE_F32, b->lse, err);
    if (st >= 0)
        st = kvs_dcp_finish(d, &a->info, err);
    for (int32_t h = 0; st >= 0 && h < heads; h++)
        for (int i = 0; i < KVS_LATENT_DIM; i++)
            a->sum += (double)b->out[h][i] * (1 + i % 7);
    if (st >= 0 && a->snapshot)
        st = kvs_snapshot_write(a->snapshot, a->comm, cache, b->table, 64, CONTEXT + 1, NULL, NULL,
                                err);
    return st;
}

static void *rank_main(void *arg)
{
    rank_arg *a = arg;
    kvs_error *err = &a->err;
    const int32_t rank = kvs_comm_rank(a->comm);
    const int64_t n_page = kvs_table_width(N_RANK, 4096);

    kvs_dcp_config dc = kvs_dcp_config_default();
    dc.dcp = N_RANK;
    dc.n_head = N_HEAD;
    dc.n_index_head = N_INDEX_HEAD;
    dc.topk = TOPK;
    dc.softmax_scale = 0.0625f;
    dc.kv = KVS_KV_FP8_DS_MLA;
    dc.max_rows = 128;
    dc.max_len = 4096;

    kvs_cache_config cc = kvs_cache_config_default();
    cc.kv = KVS_KV_FP8_DS_MLA;
    cc.n_index_layer = 1;
    cc.dcp = N_RANK;
    cc.rank = rank;
    cc.n_page = n_page;

    kvs_dcp *d = NULL;
    kvs_cache *cache = NULL;
    kvs_pages *pages = NULL;
    buffers *b = calloc(1, sizeof *b);
    kvs_status st = b ? KVS_OK : KVS_NOMEM;
    if (st >= 0)
        st = kvs_cache_create(&cache, &cc, err);
    if (st >= 0)
        st = kvs_pages_new(&pages, n_page, err);
    dc.cache = cache; /* so that ranks whose caches differ do not start */
    if (st >= 0)
        st = kvs_dcp_open(&d, &dc, a->comm, err);
    if (st >= 0)
        st = decode(a, d, cache, pages, n_page, b, err);
    a->status = st;
    kvs_dcp_close(d);
    kvs_pages_free(pages);
    kvs_cache_free(cache);
    kvs_comm_close(a->comm);
    free(b);
    return NULL;
}

int main(int argc, char **argv)
{
    kvs_comm *comm[N_RANK];
    rank_arg arg[N_RANK];
    pthread_t thread[N_RANK];
    kvs_error err;
    if (kvs_comm_open_threads(comm, N_RANK, NULL, &err) < 0) {
        fprintf(stderr, "decode_step: %s\n", err.text);
        return 1;
    }
    memset(arg, 0, sizeof arg);
    for (int r = 0; r < N_RANK; r++) {
        arg[r].comm = comm[r];
        arg[r].snapshot = argc > 1 ? argv[1] : NULL;
        if (pthread_create(&thread[r], NULL, rank_main, &arg[r]) != 0)
            return 1;
    }
    int failed = 0;
    for (int r = 0; r < N_RANK; r++) {
        pthread_join(thread[r], NULL);
        if (arg[r].status < 0) {
            fprintf(stderr, "decode_step: rank %d: %s\n", r, arg[r].err.text);
            failed = 1;
            continue;
        }
        printf("rank %d: %llu of %d selected rows are here, checksum of its heads %.6f\n", r,
               (unsigned long long)arg[r].info.n_row_read, TOPK, arg[r].sum);
    }
    return failed;
}
