/* snapshot_reader.c - opens a snapshot that another process wrote, whatever its number of ranks.
 *
 *     snapshot_reader FILE
 *
 * Prints what the file holds, reads it into the caches of 2 ranks, and attends the whole context with a
 * fixed query of one head on each. Run `decode_step FILE` (4 ranks) first. */
#include <kvspan/kvspan.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_RANK = 2 };

typedef struct rank_arg {
    kvs_comm *comm;
    const char *path;
    kvs_snapshot_info info;
    kvs_status status;
    kvs_error err;
    float lse, first;
} rank_arg;

static kvs_status attend_all(rank_arg *a, kvs_dcp *d, kvs_cache *cache, const int32_t *table,
                             int64_t width, int64_t n_page, kvs_error *err)
{
    float q[KVS_ROW_DIM];
    float out[KVS_LATENT_DIM];
    for (int i = 0; i < KVS_ROW_DIM; i++)
        q[i] = 0.25f * (float)(i % 5 - 2);
    /* one row that ends where the stored sequence ends: nothing is written, it only looks */
    const int32_t q_len = 1;
    const kvs_batch batch = {.n_req = 1,
                             .q_len = &q_len,
                             .seq_len = &a->info.n_token,
                             .table = table,
                             .table_stride = width,
                             .n_page = n_page};
    kvs_status st = kvs_dcp_plan(d, &batch, err);
    if (st >= 0)
        st = kvs_dcp_attend(d, cache, 0, KVS_ATTEND_DENSE, q, KVS_DTYPE_F32, out, KVS_DTYPE_F32,
                            &a->lse, err);
    if (st >= 0)
        st = kvs_dcp_finish(d, NULL, err);
    a->first = out[0];
    return st;
}

static kvs_status rank_work(rank_arg *a, kvs_dcp **d, kvs_cache **cache, int32_t *table, int64_t width)
{
    kvs_error *err = &a->err;
    kvs_cache_config cc = kvs_cache_config_default();
    cc.kv = a->info.kv;
    cc.index_kv = a->info.index_kv;
    cc.hadamard = a->info.hadamard;
    cc.n_layer = a->info.n_layer;
    cc.n_index_layer = a->info.n_index_layer;
    cc.dcp = N_RANK;
    cc.rank = kvs_comm_rank(a->comm);
    cc.n_page = width;
    kvs_status st = kvs_cache_create(cache, &cc, err);
    for (int64_t i = 0; i < width; i++)
        table[i] = (int32_t)(width - 1 - i); /* any pages will do */
    if (st >= 0)
        st = kvs_snapshot_read(a->path, *cache, table, width, NULL, NULL, 0, err);
    kvs_dcp_config dc = kvs_dcp_config_default();
    dc.dcp = N_RANK;
    dc.n_head = N_RANK;
    dc.softmax_scale = 0.0625f;
    dc.kv = a->info.kv;
    dc.max_len = a->info.n_token;
    if (st >= 0)
        st = kvs_dcp_open(d, &dc, a->comm, err);
    if (st >= 0)
        st = attend_all(a, *d, *cache, table, width, width, err);
    return st;
}

static void *rank_main(void *arg)
{
    rank_arg *a = arg;
    kvs_dcp *d = NULL;
    kvs_cache *cache = NULL;
    const int64_t width = kvs_table_width(N_RANK, a->info.n_token);
    int32_t *table = calloc((size_t)width + 1, sizeof *table);
    a->status = table ? rank_work(a, &d, &cache, table, width) : KVS_NOMEM;
    kvs_dcp_close(d);
    kvs_cache_free(cache);
    kvs_comm_close(a->comm);
    free(table);
    return NULL;
}

int main(int argc, char **argv)
{
    kvs_error err;
    kvs_snapshot_info info;
    if (argc != 2) {
        fprintf(stderr, "usage: snapshot_reader FILE\n");
        return 2;
    }
    if (kvs_snapshot_stat(argv[1], &info, &err) < 0) {
        fprintf(stderr, "snapshot_reader: %s\n", err.text);
        return 3;
    }
    printf("%lld tokens, %d layers (%d with index keys), written by %d ranks with interleave %d\n",
           (long long)info.n_token, info.n_layer, info.n_index_layer, info.writer_dcp,
           info.writer_interleave);
    if (info.n_token == 0)
        return 0;
    kvs_comm *comm[N_RANK];
    rank_arg arg[N_RANK];
    pthread_t thread[N_RANK];
    if (kvs_comm_open_threads(comm, N_RANK, NULL, &err) < 0) {
        fprintf(stderr, "snapshot_reader: %s\n", err.text);
        return 1;
    }
    memset(arg, 0, sizeof arg);
    for (int r = 0; r < N_RANK; r++) {
        arg[r].comm = comm[r];
        arg[r].path = argv[1];
        arg[r].info = info;
        if (pthread_create(&thread[r], NULL, rank_main, &arg[r]) != 0)
            return 1;
    }
    int failed = 0;
    for (int r = 0; r < N_RANK; r++) {
        pthread_join(thread[r], NULL);
        if (arg[r].status < 0) {
            fprintf(stderr, "snapshot_reader: rank %d: %s\n", r, arg[r].err.text);
            failed = 1;
            continue;
        }
        printf("rank %d: lse %.6f, first value %.6f\n", r, (double)arg[r].lse, (double)arg[r].first);
    }
    return failed;
}
