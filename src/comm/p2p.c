/* comm/p2p.c: areas of a group, who reaches whom, and what a fault says. */
#include "comm/p2p_impl.h"
#include <assert.h>
#include <stdio.h>
#include <string.h>
#include "comm/impl.h"

static_assert(sizeof(wire_control) <= WIRE_REASON_AT, "reasons lie behind what kernels write");

size_t p2p_area_bytes(const p2p_config *cfg)
{
    return wire_area_bytes(cfg->n_rank, cfg->n_cell);
}

kvs_status p2p_use(const p2p *g, int32_t rank, kvs_error *err)
{
    return dev_cuda_use(g->device[rank], err);
}

/* ---- life ------------------------------------------------------------------------------------ */

kvs_status p2p_check_config(const p2p_config *c, kvs_error *err)
{
    if (c->n_rank < 1 || c->n_rank > WIRE_MAX_RANK || c->device == NULL) {
        return err_set(err, KVS_INVALID, "p2p: %d ranks: use 1 to %d, with a device each", c->n_rank,
                       WIRE_MAX_RANK);
    }
    if (c->n_cell < 1) {
        return err_set(err, KVS_INVALID, "p2p: slots of 0 cells: use at least 1");
    }
    if (c->timeout_ms <= 0) {
        return err_set(err, KVS_INVALID, "p2p: time-out of %d ms: use 1 or more", c->timeout_ms);
    }
    return KVS_OK;
}

/* Devices of different ranks reach each other, both ways. */
static kvs_status connect(const p2p *g, kvs_error *err)
{
    for (int32_t a = 0; a < g->cfg.n_rank; a++) {
        for (int32_t b = 0; b < g->cfg.n_rank; b++) {
            if (g->device[a] != g->device[b]) {
                TRY(dev_cuda_reach(g->device[a], g->device[b], err));
            }
        }
    }
    return KVS_OK;
}

kvs_status p2p_wipe(const p2p *g, kvs_error *err)
{
    for (int32_t r = 0; r < g->cfg.n_rank; r++) {
        if (!p2p_is_here(g, r)) {
            continue;
        }
        TRY(p2p_use(g, r, err));
        const size_t cells = wire_cells_begin(g->cfg.n_rank, g->cfg.n_cell);
        dev_cuda.fill(g->area[r], 0, cells);
        dev_cuda.fill(g->area[r] + cells, WIRE_EMPTY, g->bytes - cells);
    }
    return KVS_OK;
}

kvs_status p2p_alloc_area(p2p *g, int32_t rank, size_t bytes, kvs_error *err)
{
    TRY(p2p_use(g, rank, err));
    g->area[rank] = dev_cuda.alloc(bytes);
    return g->area[rank] != NULL
               ? KVS_OK
               : err_set(err, KVS_NOMEM, "p2p: CUDA device %d has no %zu bytes left for the area of rank %d",
                         g->device[rank], bytes, rank);
}

static kvs_status open_areas(p2p *g, kvs_error *err)
{
    for (int32_t r = 0; r < g->cfg.n_rank; r++) {
        TRY(dev_cuda_open(g->device[r], NULL, err));
    }
    TRY(connect(g, err));
    for (int32_t r = 0; r < g->cfg.n_rank; r++) {
        TRY(p2p_alloc_area(g, r, g->bytes, err));
    }
    return p2p_wipe(g, err);
}

p2p *p2p_new(const p2p_config *cfg)
{
    p2p *g = mem_calloc(1, sizeof *g);
    if (g != NULL) {
        g->cfg = *cfg;
        memcpy(g->device, cfg->device, (size_t)cfg->n_rank * sizeof *g->device);
        g->cfg.device = g->device;
        g->bytes = p2p_area_bytes(cfg);
    }
    return g;
}

kvs_status p2p_open(p2p **out, const p2p_config *cfg, kvs_error *err)
{
    *out = NULL;
    TRY(p2p_check_config(cfg, err));
    p2p *g = p2p_new(cfg);
    if (g == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", cfg->n_rank);
    }
    const kvs_status st = open_areas(g, err);
    if (st < 0) {
        p2p_close(g);
        return st;
    }
    *out = g;
    return KVS_OK;
}

void p2p_close(p2p *g)
{
    if (g == NULL) {
        return;
    }
    const bool is_mine = p2p_let_go(g);
    for (int32_t r = 0; r < g->cfg.n_rank && is_mine; r++) {
        if (p2p_is_here(g, r) && g->area[r] != NULL && p2p_use(g, r, NULL) == KVS_OK) {
            dev_cuda.free(g->area[r]);
        }
    }
    mem_free(g);
}

wire p2p_wire(const p2p *g, int32_t rank)
{
    wire w;
    memset(&w, 0, sizeof w);
    w.rank = rank;
    w.n_rank = g->cfg.n_rank;
    w.n_cell = g->cfg.n_cell;
    w.limit_ns = (uint64_t)g->cfg.timeout_ms * UINT64_C(1000000);
    memcpy(w.area, g->area, sizeof w.area);
    return w;
}

/* ---- faults and epochs ----------------------------------------------------------------------- */

static kvs_status control_of(const p2p *g, int32_t rank, wire_control *c, kvs_error *err)
{
    TRY(p2p_use(g, rank, err));
    dev_cuda.get(c, g->area[rank], sizeof *c);
    return KVS_OK;
}

/* "queries of 73728 bytes in 16 rows" */
static void head_text(const p2p_config *cfg, const wire_head *h, char *text, size_t cap)
{
    const int32_t op = (int32_t)(h->what & 0xFF);
    char number[16];
    snprintf(number, sizeof number, "op %d", (int)op);
    snprintf(text, cap, "%s of %llu bytes in %u rows", cfg->op_name != NULL ? cfg->op_name(op) : number,
             (unsigned long long)h->words * 4, (unsigned)h->n_row);
}

/* Every rank whose head of this epoch `by` has not seen, or `about` when it has seen all. */
static void late_text(const p2p_config *cfg, uint64_t fault, const wire_head *seen, char *text,
                      size_t cap)
{
    size_t len = 0;
    int n = 0;
    text[0] = '\0';
    for (int32_t r = 0; r < cfg->n_rank && len < cap; r++) {
        if (r != wire_fault_by(fault) && seen[r].epoch != wire_fault_epoch(fault)) {
            len += (size_t)snprintf(text + len, cap - len, "%s%d", n++ > 0 ? ", " : "", r);
        }
    }
    if (n == 0) {
        snprintf(text, cap, "%d", (int)wire_fault_about(fault));
    }
}

void p2p_explain(const p2p_config *cfg, uint64_t fault, const wire_head *seen, const char *reason,
                 kvs_error *err)
{
    const int32_t about = wire_fault_about(fault);
    const int32_t by = wire_fault_by(fault);
    const unsigned epoch = wire_fault_epoch(fault);
    char a[96];
    char b[96];
    switch (wire_fault_code(fault)) {
    case WIRE_LATE:
        late_text(cfg, fault, seen, a, sizeof a);
        head_text(cfg, &seen[by], b, sizeof b);
        (void)err_set(err, KVS_PEER, "rank%s %s more than %d ms late for %s (exchange %u, seen by rank %d)",
                      strchr(a, ',') != NULL ? "s" : "", a, (int)cfg->timeout_ms, b, epoch, (int)by);
        break;
    case WIRE_MISMATCH:
        head_text(cfg, &seen[about], a, sizeof a);
        head_text(cfg, &seen[by], b, sizeof b);
        (void)err_set(err, KVS_PEER, "rank %d sent %s, rank %d %s (exchange %u)", (int)about, a, (int)by,
                      b, epoch);
        break;
    case WIRE_ENDED:
        (void)err_set(err, KVS_PEER, "rank %d ended the group: %s", (int)by, reason);
        break;
    default:
        (void)err_set(err, KVS_PEER, "the group has used up its %u exchanges: renew it in time",
                      (unsigned)WIRE_LAST_EPOCH);
    }
}

/* Ends what has not ended; areas that could not be mapped are left out. The host cannot compare and swap in the memory of a device: where two ranks, or the host
 * and a kernel, end a group at the same moment, areas may keep one or the other. Each is true, each has the reason that
 * belongs to it, since every rank has a place of its own for one, and p2p_check keeps to what it has said. */
static void end_all(const p2p *g, int32_t rank, const char *reason)
{
    wire_control c;
    const uint64_t fault = WIRE_FAULT(WIRE_ENDED, rank, rank, 0);
    char text[WIRE_REASON_BYTES];
    memset(text, 0, sizeof text);
    snprintf(text, sizeof text, "%s", reason);
    for (int32_t r = 0; r < g->cfg.n_rank; r++) {
        if (g->area[r] != NULL && control_of(g, r, &c, NULL) == KVS_OK && c.fault == 0) {
            dev_cuda.put(g->area[r] + wire_reason_at(rank), text, sizeof text);
            dev_cuda.put(g->area[r] + offsetof(wire_control, fault), &fault, sizeof fault);
        }
    }
    (void)p2p_use(g, rank, NULL);
}

/* Over processes, the group ends with its host communicator, and for its reason. */
static kvs_status check_host(const p2p *g, int32_t rank, kvs_error *why)
{
    if (g->host == NULL || !comm_failed(g->host)) {
        return KVS_OK;
    }
    const kvs_status st = comm_barrier(g->host, why);
    end_all(g, rank, why->text);
    return st;
}

/* What a fault in the rank's area says. */
static kvs_status explain(const p2p *g, int32_t rank, uint64_t fault, kvs_error *why)
{
    wire_head seen[WIRE_MAX_RANK];
    char reason[WIRE_REASON_BYTES];
    const int32_t by = wire_fault_by(fault);
    dev_cuda.get(reason, g->area[rank] + wire_reason_at(by), sizeof reason);
    reason[sizeof reason - 1] = '\0';
    TRY(p2p_use(g, by, why));
    memset(seen, 0, sizeof seen);
    if (g->area[by] != NULL) {
        dev_cuda.get(seen, g->area[by] + wire_head_at(g->cfg.n_rank, wire_fault_epoch(fault), 0),
                     (size_t)g->cfg.n_rank * sizeof *seen);
    }
    TRY(p2p_use(g, rank, why));
    p2p_explain(&g->cfg, fault, seen, reason, why);
    if (g->host != NULL) {
        (void)comm_fail(g->host, "%s", why->text);
    }
    return KVS_PEER;
}

kvs_status p2p_check(p2p *g, int32_t rank, kvs_error *err)
{
    wire_control c;
    kvs_error *told = &g->told[rank];
    if (told->code == KVS_OK) {
        TRY(control_of(g, rank, &c, err));
        const kvs_status st = c.fault != 0 ? explain(g, rank, c.fault, told) : check_host(g, rank, told);
        told->code = st;
    }
    if (told->code < 0 && err != NULL) {
        *err = *told;
    }
    return told->code;
}

void p2p_abort(p2p *g, int32_t rank, const char *reason)
{
    const char *text = reason != NULL && reason[0] != '\0' ? reason : "no reason given";
    if (g->host != NULL) {
        /* An end that is here already, a kernel's or the host's, becomes that of both. */
        (void)p2p_check(g, rank, NULL);
        if (comm_failed(g->host)) {
            return;
        }
    }
    end_all(g, rank, text);
    if (g->host != NULL) {
        comm_abort(g->host, text);
    }
}

uint32_t p2p_count(const p2p *g, int32_t rank)
{
    wire_control c;
    return control_of(g, rank, &c, NULL) == KVS_OK ? wire_epoch(c.done) - 1 : 0;
}

int p2p_is_worn(uint32_t count)
{
    return count >= WIRE_LAST_EPOCH / 2;
}

kvs_status p2p_renew(p2p *g, kvs_error *err)
{
    kvs_status st = KVS_OK;
    for (int32_t r = 0; r < g->cfg.n_rank && st == KVS_OK; r++) {
        st = p2p_is_here(g, r) ? p2p_check(g, r, err) : KVS_OK;
    }
    if (g->host == NULL) {
        return st < 0 ? st : p2p_wipe(g, err);
    }
    TRY(comm_agree(g->host, st, err)); /* the queues of all ranks are done */
    return comm_agree(g->host, p2p_wipe(g, err), err);
}
