/* check/comm_cuda_world.c: rows of the check of exchanges, and worlds of ranks on devices: what they hold, what is sent,
 * and who launches for whom. */
#include <stdio.h>
#include <string.h>
#include "check/comm_cuda.h"

enum { ROW = 512 };

/* ---- rows -------------------------------------------------------------------------------------- */

void gpu_line(gpu_run *r, const char *line)
{
    if (r->cfg->line != NULL && (r->job == NULL || comm_rank(r->job) == 0)) {
        r->cfg->line(r->cfg->ctx, line);
    }
}

void gpu_row(gpu_run *r, const char *what, const char *wrong, const char *tail)
{
    char row[ROW];
    const bool bad = wrong != NULL && wrong[0] != '\0';
    snprintf(row, sizeof row, "%s %s %s%s%.200s", what, bad ? "FAIL" : "pass", tail,
             bad ? " wrong: " : "", bad ? wrong : "");
    if (!bad) {
        r->totals.n_passed++;
    } else if (r->totals.n_failed++ == 0) {
        snprintf(r->first, sizeof r->first, "%.*s", (int)sizeof r->first - 1, row);
    }
    gpu_line(r, row);
}

void gpu_skip(gpu_run *r, const char *what, const char *why)
{
    char row[ROW];
    snprintf(row, sizeof row, "%s skip \"%.300s\"", what, why);
    r->totals.n_skipped++;
    gpu_line(r, row);
}

void gpu_group_text(const gpu_run *r, int32_t n, int32_t devices, char *text, size_t cap)
{
    snprintf(text, cap, "transport=p2p%s%s n=%d devices=%d", r->job != NULL ? " over=" : "",
             r->job != NULL ? comm_transport(r->job) : "", (int)n, (int)devices);
}

/* ---- worlds ------------------------------------------------------------------------------------ */

kvs_status gpu_open(gpu_world *w, int32_t n, int32_t n_device, bool spread, int64_t max_bytes,
                    int32_t timeout_ms, kvs_error *err)
{
    memset(w, 0, sizeof *w);
    w->n = n;
    for (int32_t i = 0; i < n; i++) {
        w->device[i] = spread ? i % n_device : 0;
    }
    const p2p_config cfg = {
        .n_rank = n,
        .device = w->device,
        .n_cell = exchange_cells_for(max_bytes),
        .timeout_ms = timeout_ms,
        .op_name = exchange_op_name,
    };
    kvs_status st = p2p_open(&w->g, &cfg, err);
    for (int32_t i = 0; i < n && st == KVS_OK; i++) {
        st = p2p_use(w->g, i, err);
        st = st == KVS_OK ? dev_queue_open_cuda(&w->queue[i], err) : st;
    }
    if (st < 0) {
        gpu_close(w);
    }
    return st;
}

bool gpu_is_here(const gpu_world *w, int32_t rank)
{
    return w->host == NULL || rank == w->here;
}

/* Whether the rank is here; its device is the thread's then. */
static bool use(const gpu_world *w, int32_t rank)
{
    return gpu_is_here(w, rank) && p2p_use(w->g, rank, NULL) == KVS_OK;
}

void gpu_close(gpu_world *w)
{
    for (int32_t i = 0; i < w->n && w->g != NULL; i++) {
        if (w->queue[i].stream != NULL && use(w, i)) {
            dev_queue_close(&w->queue[i]);
        }
    }
    gpu_free_from(w, 0);
    p2p_close(w->g);
    comm_close(w->host);
    memset(w, 0, sizeof *w);
}

void gpu_end(gpu_world *w, const gpu_run *r, kvs_status st, const kvs_error *err)
{
    if (st < 0 && r->job != NULL) {
        const char *why = err != NULL ? err->text : kvs_status_name(st);
        p2p_abort(w->g, w->here, why);
        comm_abort(r->job, why);
    }
    if (st != KVS_DEVICE) {
        gpu_close(w);
    }
}

kvs_status gpu_alloc(gpu_world *w, int32_t rank, size_t bytes, void **out, kvs_error *err)
{
    *out = NULL;
    if (!gpu_is_here(w, rank)) {
        return KVS_OK;
    }
    TRY(p2p_use(w->g, rank, err));
    *out = w->n_block < GPU_MAX_BLOCK ? dev_cuda.alloc(bytes) : NULL;
    if (*out == NULL) {
        return err_set(err, KVS_NOMEM, "the device has no %zu bytes left for rank %d", bytes, (int)rank);
    }
    w->block_rank[w->n_block] = rank;
    w->block[w->n_block++] = *out;
    return KVS_OK;
}

void gpu_put(gpu_world *w, int32_t rank, void *dst, const void *src, size_t bytes)
{
    if (use(w, rank)) {
        dev_cuda.put(dst, src, bytes);
    }
}

void gpu_get(gpu_world *w, int32_t rank, void *dst, const void *src, size_t bytes)
{
    if (use(w, rank)) {
        dev_cuda.get(dst, src, bytes);
    }
}

void gpu_fill(gpu_world *w, int32_t rank, void *dst, int byte, size_t bytes)
{
    if (use(w, rank)) {
        dev_cuda.fill(dst, byte, bytes);
    }
}

void gpu_free_from(gpu_world *w, int32_t block)
{
    while (w->n_block > block) {
        w->n_block--;
        if (use(w, w->block_rank[w->n_block])) {
            dev_cuda.free(w->block[w->n_block]);
        }
    }
}

void gpu_check_sound(gpu_world *w, char *wrong, size_t cap)
{
    for (int32_t r = 0; r < w->n && wrong[0] == '\0'; r++) {
        kvs_error why;
        if (gpu_is_here(w, r) && p2p_check(w->g, r, &why) < 0) {
            snprintf(wrong, cap, "rank %d: %.150s", (int)r, why.text);
        }
    }
}

/* ---- content ----------------------------------------------------------------------------------- */

uint64_t gpu_next_word(uint64_t x)
{
    return x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
}

/* Eight bytes: half of the cells are empty ones, a quarter are marks. */
static uint64_t reserved_word(uint64_t x, size_t at)
{
    const uint64_t empty = UINT64_C(0xF6F6F6F6F6F6F6F6);
    const uint64_t pick = gpu_next_word(x ^ (uint64_t)at / WIRE_CELL) >> 62;
    if (pick == 3) {
        return gpu_next_word(x + at);
    }
    return empty + (pick == 2 && at % WIRE_CELL != 0 ? UINT64_C(1) << 32 : 0);
}

void gpu_fill_words(void *dst, size_t bytes, gpu_content kind, uint64_t seed)
{
    uint64_t x = seed;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        x = gpu_next_word(x);
        const uint64_t v = kind == GPU_WORDS ? x : reserved_word(seed, i);
        memcpy((uint8_t *)dst + i, &v, 8);
    }
}

/* ---- launches ---------------------------------------------------------------------------------- */

/* The ranks, from rank i on, that a launch for rank i serves; false: an earlier launch does. */
static bool ranks_of_launch(const gpu_world *w, int32_t i, int32_t skip, bool alone, int32_t *list, int32_t *n)
{
    *n = 0;
    if (i == skip || !gpu_is_here(w, i)) {
        return false;
    }
    for (int32_t k = 0; k < i && !alone; k++) {
        if (k != skip && gpu_is_here(w, k) && w->device[k] == w->device[i]) {
            return false;
        }
    }
    for (int32_t k = i; k < w->n && (k == i || !alone); k++) {
        if (k != skip && gpu_is_here(w, k) && w->device[k] == w->device[i]) {
            list[(*n)++] = k;
        }
    }
    return p2p_use(w->g, i, NULL) == KVS_OK;
}

int32_t gpu_ranks_led_by(gpu_world *w, int32_t lead, int32_t *list)
{
    int32_t n;
    return ranks_of_launch(w, lead, -1, false, list, &n) ? n : 0;
}

static void exchange_led_by(gpu_world *w, const exchange_args *a, int32_t lead, int32_t skip, bool alone)
{
    exchange_args some[WIRE_MAX_RANK];
    int32_t list[WIRE_MAX_RANK];
    int32_t n;
    if (ranks_of_launch(w, lead, skip, alone, list, &n)) {
        for (int32_t k = 0; k < n; k++) {
            some[k] = a[list[k]];
        }
        exchange_sm90(some, n, &w->queue[lead]);
    }
}

void gpu_merge_led_by(gpu_world *w, const exchange_merge_args *a, int32_t lead)
{
    exchange_merge_args some[WIRE_MAX_RANK];
    int32_t list[WIRE_MAX_RANK];
    int32_t n;
    if (ranks_of_launch(w, lead, -1, false, list, &n)) {
        for (int32_t k = 0; k < n; k++) {
            some[k] = a[list[k]];
        }
        exchange_merge_sm90(some, n, &w->queue[lead]);
    }
}

void gpu_exchange(gpu_world *w, const exchange_args *a, int32_t skip, bool alone)
{
    for (int32_t i = 0; i < w->n; i++) {
        exchange_led_by(w, a, i, skip, alone);
    }
}

void gpu_merge(gpu_world *w, const exchange_merge_args *a)
{
    for (int32_t i = 0; i < w->n; i++) {
        gpu_merge_led_by(w, a, i);
    }
}

kvs_status gpu_record(gpu_world *w, void (*enqueue)(gpu_world *w, int32_t lead, void *ctx), void *ctx,
                      dev_graph *g, kvs_error *err)
{
    for (int32_t i = 0; i < w->n; i++) {
        if (!gpu_is_here(w, i)) {
            continue;
        }
        TRY(p2p_use(w->g, i, err));
        TRY(dev_capture_begin(&w->queue[i], err));
        enqueue(w, i, ctx);
        TRY(dev_capture_end(&w->queue[i], &g[i], err));
        TRY(dev_queue_check(&w->queue[i], err));
    }
    return KVS_OK;
}

void gpu_exchange_led_by(gpu_world *w, const exchange_args *a, int32_t lead)
{
    exchange_led_by(w, a, lead, -1, false);
}

void gpu_launch(gpu_world *w, const dev_graph *g, int32_t rank)
{
    if (g[rank].n_node > 0 && use(w, rank)) {
        dev_graph_launch(&g[rank], &w->queue[rank]);
    }
}

kvs_status gpu_sync(gpu_world *w, kvs_error *err)
{
    kvs_status st = KVS_OK;
    for (int32_t i = 0; i < w->n; i++) {
        if (!gpu_is_here(w, i)) {
            continue;
        }
        TRY(p2p_use(w->g, i, err));
        dev_queue_sync(&w->queue[i]);
        const kvs_status one = dev_queue_check(&w->queue[i], err);
        st = st == KVS_OK ? one : st;
    }
    return st;
}
