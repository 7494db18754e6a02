/* check/comm_cuda.c: what right exchanges move, and graphs of them. */
#include "check/comm_cuda.h"
#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "check/check.h"
#include "kern/kern.h"

/* ---- messages ---------------------------------------------------------------------------------- */

typedef struct part_spec {
    int32_t bytes;
    int32_t pad;    /* bytes behind each row, on both sides */
    bool gather;    /* the same to all; else a piece of a row to each rank */
    bool interleave; /* the ranks' pieces of a row lie side by side at the receiver */
} part_spec;

typedef struct msg_spec {
    const char *name;
    exchange_op op;
    int32_t n_part;
    part_spec part[EXCHANGE_MAX_PART];
} msg_spec;

static const msg_spec k_msg[] = {
    {"barrier", EXCHANGE_BARRIER, 0, {{0, 0, false, false}}},
    {"queries", EXCHANGE_Q, 1, {{3 * 1152, 0, true, true}}},
    {"candidates", EXCHANGE_SELECT, 2, {{4 * 37, 4, true, false}, {4 * 37, 0, true, false}}},
    {"pieces",
     EXCHANGE_OTHER,
     4,
     {{20, 12, false, false}, {2048, 16, false, false}, {4, 0, false, true}, {576, 0, false, true}}},
};
enum { N_MSG = sizeof k_msg / sizeof *k_msg };

static int64_t src_row(const part_spec *p, int32_t n)
{
    return (p->gather ? p->bytes : n * p->bytes) + p->pad;
}

/* Sizes of both sides of a part. */
static size_t src_bytes(const part_spec *p, int32_t n, int32_t n_row)
{
    return (size_t)(n_row * src_row(p, n) + 16);
}

static size_t dst_bytes(const part_spec *p, int32_t n, int32_t n_row)
{
    return (size_t)((int64_t)n_row * n * (p->bytes + p->pad) + 16);
}

static int64_t dst_rank(const part_spec *p, int32_t n_row)
{
    return p->interleave ? p->bytes : (int64_t)n_row * (p->bytes + p->pad);
}

static int64_t dst_row(const part_spec *p, int32_t n)
{
    return (p->interleave ? n * p->bytes : p->bytes) + p->pad;
}

/* A message between all ranks: buffers on the devices and what was put into them. */
typedef struct message {
    const msg_spec *spec;
    int32_t n_row;
    gpu_content kind;
    exchange_args a[WIRE_MAX_RANK];
    uint8_t *src[WIRE_MAX_RANK][EXCHANGE_MAX_PART]; /* host */
} message;

static void message_free(message *m)
{
    for (int i = 0; i < WIRE_MAX_RANK; i++) {
        for (int k = 0; k < EXCHANGE_MAX_PART; k++) {
            mem_free(m->src[i][k]);
        }
    }
}

static kvs_status message_make(message *m, gpu_world *w, const msg_spec *spec, gpu_content kind, int32_t n_row,
                               kvs_error *err)
{
    memset(m, 0, sizeof *m);
    m->spec = spec;
    m->n_row = n_row;
    m->kind = kind;
    for (int32_t r = 0; r < w->n; r++) {
        exchange_args *a = &m->a[r];
        a->w = p2p_wire(w->g, r);
        a->op = (int32_t)spec->op;
        a->n_row = n_row;
        a->n_part = spec->n_part;
        for (int32_t k = 0; k < spec->n_part; k++) {
            const part_spec *p = &spec->part[k];
            void *src = NULL;
            TRY(gpu_alloc(w, r, src_bytes(p, w->n, n_row), &src, err));
            TRY(gpu_alloc(w, r, dst_bytes(p, w->n, n_row), &a->part[k].dst, err));
            m->src[r][k] = mem_alloc(src_bytes(p, w->n, n_row), 0);
            if (m->src[r][k] == NULL) {
                return err_set(err, KVS_NOMEM, "no memory for a message of the check");
            }
            a->part[k].src = src;
            a->part[k].bytes = p->bytes;
            a->part[k].src_rank = p->gather ? 0 : p->bytes;
            a->part[k].src_row = src_row(p, w->n);
            a->part[k].dst_rank = dst_rank(p, n_row);
            a->part[k].dst_row = dst_row(p, w->n);
        }
    }
    return KVS_OK;
}

/* New data everywhere, poison where it is to arrive. */
static void message_fill(message *m, gpu_world *w, uint64_t seed)
{
    for (int32_t r = 0; r < w->n; r++) {
        for (int32_t k = 0; k < m->spec->n_part; k++) {
            const size_t n = src_bytes(&m->spec->part[k], w->n, m->n_row);
            gpu_fill_words(m->src[r][k], n, m->kind, rng_u64(seed, (uint64_t)(r * EXCHANGE_MAX_PART + k), 0));
            gpu_put(w, r, (void *)(uintptr_t)m->a[r].part[k].src, m->src[r][k], n);
            gpu_fill(w, r, m->a[r].part[k].dst, GPU_POISON, dst_bytes(&m->spec->part[k], w->n, m->n_row));
        }
    }
}

/* What part k of rank r must hold now. */
static void expect_part(const message *m, int32_t n, int32_t r, int32_t k, uint8_t *want)
{
    const part_spec *p = &m->spec->part[k];
    memset(want, GPU_POISON, dst_bytes(p, n, m->n_row));
    for (int32_t from = 0; from < n; from++) {
        for (int32_t row = 0; row < m->n_row; row++) {
            memcpy(want + from * dst_rank(p, m->n_row) + row * dst_row(p, n),
                   m->src[from][k] + row * src_row(p, n) + (p->gather ? 0 : r * p->bytes),
                   (size_t)p->bytes);
        }
    }
}

static kvs_status message_compare(const message *m, gpu_world *w, char *wrong, size_t cap, kvs_error *err)
{
    for (int32_t r = 0; r < w->n; r++) {
        for (int32_t k = 0; k < m->spec->n_part && gpu_is_here(w, r) && wrong[0] == '\0'; k++) {
            const size_t n = dst_bytes(&m->spec->part[k], w->n, m->n_row);
            uint8_t *want = mem_alloc(n, 0);
            uint8_t *got = mem_alloc(n, 0);
            if (want == NULL || got == NULL) {
                mem_free(want);
                mem_free(got);
                return err_set(err, KVS_NOMEM, "no memory to compare a message");
            }
            expect_part(m, w->n, r, k, want);
            gpu_get(w, r, got, m->a[r].part[k].dst, n);
            for (size_t i = 0; i < n && wrong[0] == '\0'; i++) {
                if (got[i] != want[i]) {
                    snprintf(wrong, cap, "rank %d, part %d, byte %zu of %zu: %02x, want %02x", (int)r,
                             (int)k, i, n, got[i], want[i]);
                }
            }
            mem_free(want);
            mem_free(got);
        }
    }
    return KVS_OK;
}

static kvs_status run_message(gpu_run *run, gpu_world *w, const msg_spec *spec, gpu_content kind, int32_t n_row,
                              char *wrong, size_t cap, kvs_error *err)
{
    message m;
    const int32_t blocks = w->n_block;
    kvs_status st = message_make(&m, w, spec, kind, n_row, err);
    for (int rep = 0; rep < (n_row > 33 ? 1 : GPU_REPS) && st == KVS_OK && wrong[0] == '\0'; rep++) {
        message_fill(&m, w, run->cfg->seed + ++run->n_case);
        gpu_exchange(w, m.a, -1, false);
        st = gpu_sync(w, err);
        gpu_check_sound(w, wrong, cap);
        st = st == KVS_OK ? message_compare(&m, w, wrong, cap, err) : st;
        st = st == KVS_OK ? gpu_share(run, wrong, cap, err) : st;
    }
    message_free(&m);
    if (st != KVS_DEVICE) {
        gpu_free_from(w, blocks);
    }
    return st;
}

/* ---- graphs ------------------------------------------------------------------------------------ */

enum { N_GRAPH_MSG = 6, REPLAYS = 12 };

static void enqueue_messages(gpu_world *w, int32_t lead, void *ctx)
{
    const message *m = ctx;
    for (int i = 0; i < N_GRAPH_MSG; i++) {
        gpu_exchange_led_by(w, m[i].a, lead);
    }
}

/* A graph per device with several exchanges, each with buffers and a size of its own; replayed with new data, so
 * that a cell of an earlier replay that passed for a new one would show. */
static kvs_status replay(gpu_run *run, gpu_world *w, message *m, dev_graph *g, char *wrong, size_t cap,
                         kvs_error *err)
{
    TRY(gpu_record(w, enqueue_messages, m, g, err));
    for (int rep = 0; rep < REPLAYS && wrong[0] == '\0'; rep++) {
        for (int i = 0; i < N_GRAPH_MSG; i++) {
            message_fill(&m[i], w, run->cfg->seed + ++run->n_case);
        }
        for (int32_t d = 0; d < w->n; d++) {
            gpu_launch(w, g, d);
        }
        TRY(gpu_sync(w, err));
        gpu_check_sound(w, wrong, cap);
        for (int i = 0; i < N_GRAPH_MSG && wrong[0] == '\0'; i++) {
            TRY(message_compare(&m[i], w, wrong, cap, err));
        }
        TRY(gpu_share(run, wrong, cap, err));
    }
    return KVS_OK;
}

static kvs_status open_world(gpu_world *w, const gpu_run *run, int32_t n, bool spread, int64_t max_bytes,
                             kvs_error *err)
{
    return run->job != NULL ? gpu_open_job(w, run, max_bytes, GPU_JOB_PATIENT_MS, err)
                            : gpu_open(w, n, run->n_device, spread, max_bytes, GPU_PATIENT_MS, err);
}

kvs_status gpu_check_graph(gpu_run *run, int32_t n, bool spread, kvs_error *err)
{
    static const msg_spec spec = {"queries", EXCHANGE_Q, 1, {{16 * 1152, 0, true, true}}};
    static const int32_t rows[N_GRAPH_MSG] = {1, 24, 2, 90, 1, 4};
    gpu_world w;
    message m[N_GRAPH_MSG];
    dev_graph g[WIRE_MAX_RANK];
    char wrong[192] = "";
    char what[96];
    memset(m, 0, sizeof m);
    memset(g, 0, sizeof g);
    TRY(open_world(&w, run, n, spread, 90 * spec.part[0].bytes, err));
    kvs_status st = KVS_OK;
    for (int i = 0; i < N_GRAPH_MSG && st == KVS_OK; i++) {
        st = message_make(&m[i], &w, &spec, GPU_WORDS, rows[i], err);
    }
    const int32_t last = w.host != NULL ? w.here : n - 1;
    const uint32_t before = st == KVS_OK ? p2p_count(w.g, last) : 0;
    st = st == KVS_OK ? replay(run, &w, m, g, wrong, sizeof wrong, err) : st;
    if (st == KVS_OK && wrong[0] == '\0' &&
        p2p_count(w.g, last) - before != (uint32_t)(N_GRAPH_MSG * REPLAYS)) {
        snprintf(wrong, sizeof wrong, "%u exchanges counted, want %d", (unsigned)p2p_count(w.g, last),
                 N_GRAPH_MSG * REPLAYS);
    }
    st = st == KVS_OK ? gpu_share(run, wrong, sizeof wrong, err) : st;
    for (int i = 0; i < N_GRAPH_MSG; i++) {
        message_free(&m[i]);
    }
    for (int i = 0; i < WIRE_MAX_RANK; i++) {
        dev_graph_free(&g[i]);
    }
    gpu_end(&w, run, st, err);
    char group[64];
    gpu_group_text(run, n, spread && n > 1 ? run->n_device : 1, group, sizeof group);
    snprintf(what, sizeof what, "op=graph %s", group);
    if (st == KVS_OK) {
        gpu_row(run, what, wrong, "replays=12");
    }
    return st;
}

/* ---- the run ----------------------------------------------------------------------------------- */

static const int32_t k_rows[] = {0, 1, 7, 33};
enum { N_ROWS = sizeof k_rows / sizeof *k_rows, QUERIES = 1, MANY_QUERIES = 300 };

/* Rows of which a head is one work of a warp, and a warp has several: more than 2048 heads to all peers. */
static int32_t many_partials(int32_t n)
{
    return 2048 / (GPU_LOCAL * (n > 1 ? n - 1 : 1)) + 18;
}

/* A size more for some messages, of which a thread has several cells. */
static int32_t many_rows(int32_t n, int i)
{
    if (i == N_MSG && n > 1) {
        return many_partials(n);
    }
    return i == QUERIES && n == 2 ? MANY_QUERIES : 0;
}

static kvs_status run_kind(gpu_run *run, gpu_world *w, gpu_content kind, bool spread, kvs_error *err)
{
    static const char *const kind_name[GPU_N_CONTENT] = {"words", "reserved"};
    for (int i = 0; i < N_MSG + 2; i++) {
        char what[128];
        char wrong[192] = "";
        char tail[48];
        const int32_t type = i == N_MSG ? KVS_DTYPE_F32 : KVS_DTYPE_BF16;
        const int32_t many = kind == GPU_WORDS ? many_rows(w->n, i) : 0;
        char group[64];
        gpu_group_text(run, w->n, spread && w->n > 1 ? run->n_device : 1, group, sizeof group);
        snprintf(what, sizeof what, "op=%s %s content=%s",
                 i < N_MSG            ? k_msg[i].name
                 : type == KVS_DTYPE_F32 ? "partials_f32"
                                         : "partials_bf16",
                 group, kind_name[kind]);
        snprintf(tail, sizeof tail, "rows=0,1,7,33,%d", (int)many);
        for (int k = 0; k < N_ROWS + (many > 0); k++) {
            const int32_t rows = k < N_ROWS ? k_rows[k] : many;
            TRY(i < N_MSG ? run_message(run, w, &k_msg[i], kind, rows, wrong, sizeof wrong, err)
                          : gpu_check_partials(run, w, kind, rows, type, wrong, sizeof wrong, err));
        }
        tail[many > 0 ? strlen(tail) : strlen("rows=0,1,7,33")] = '\0';
        gpu_row(run, what, wrong, tail);
    }
    return KVS_OK;
}

kvs_status gpu_check_data(gpu_run *run, int32_t n, bool spread, kvs_error *err)
{
    gpu_world w;
    TRY(open_world(&w, run, n, spread, (int64_t)many_partials(n) * GPU_LOCAL * (KVS_LATENT_DIM + 1) * 4, err));
    kvs_status st = KVS_OK;
    for (int kind = 0; kind < GPU_N_CONTENT && st == KVS_OK; kind++) {
        st = run_kind(run, &w, (gpu_content)kind, spread, err);
    }
    gpu_end(&w, run, st, err);
    return st;
}

static kvs_status run_all(gpu_run *run, kvs_error *err)
{
    static const int32_t quick[] = {1, 2, 3, 8};
    static const int32_t full[] = {1, 2, 3, 4, 5, 6, 7, 8};
    const bool short_run = run->cfg->quick != 0;
    for (int i = 0; i < (short_run ? 4 : 8); i++) {
        const int32_t n = short_run ? quick[i] : full[i];
        TRY(gpu_check_data(run, n, true, err));
        if (run->n_device > 1 && n > 1 && !short_run) {
            TRY(gpu_check_data(run, n, false, err));
        }
    }
    TRY(gpu_check_graph(run, 2, true, err));
    TRY(gpu_check_graph(run, 4, true, err));
    TRY(gpu_check_sent(run, err));
    TRY(gpu_check_faults(run, 2, err));
    TRY(gpu_check_faults(run, 3, err));
    return gpu_check_nccl(run, err);
}

kvs_status check_comm_cuda(const check_comm_config *cfg, kvs_error *err)
{
    gpu_run run;
    dev_cuda_info info;
    memset(&run, 0, sizeof run);
    memset(&info, 0, sizeof info);
    run.cfg = cfg;
    run.timeout_ms = cfg->timeout_ms > 0 ? cfg->timeout_ms : GPU_TIMEOUT_MS;
    const kvs_log_level level = check_comm_log_off();
    kvs_status st = gpu_job_open(&run, &info, err);
    if (st == KVS_OK && run.job == NULL) {
        st = dev_cuda_open(0, &info, err);
        run.n_device = info.n_device < WIRE_MAX_RANK ? info.n_device : WIRE_MAX_RANK;
        run.n_sm = info.n_sm;
    }
    if (st == KVS_OK) {
        char text[192];
        check_describe_device(&info, text, sizeof text);
        gpu_line(&run, text);
        st = run.job != NULL ? gpu_check_job(&run, err) : run_all(&run, err);
    }
    comm_close(run.job);
    check_comm_log_on(level);
    if (cfg->totals != NULL) {
        *cfg->totals = run.totals;
    }
    TRY(st);
    return run.totals.n_failed == 0
               ? KVS_OK
               : err_set(err, KVS_INTERNAL, "check --comm: %lld of %lld rows failed; the first: %.200s",
                         (long long)run.totals.n_failed,
                         (long long)(run.totals.n_failed + run.totals.n_passed), run.first);
}
