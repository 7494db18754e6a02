/* exchange_args.c - what exchanges take and how large their messages are: the same in every build. */
#include <string.h>

#include "kern/exchange.h"
#include "kvspan/config.h"

enum {
    UNIT_WORDS = KVS_LATENT_DIM + 1, /* a head's values and its LSE */
    UNIT_LSE = 4,                    /* cells of an LSE, which may go four times: works of a head where there are not ... */
    UNIT_MANY = 2048,                /* ... more than so many heads to all peers */
    UNIT_CELLS = KVS_LATENT_DIM * 4 / WIRE_CELL + UNIT_LSE
};

const char *exchange_op_name(int32_t op)
{
    static const char *const name[EXCHANGE_N_OP] = {"barrier", "queries", "partials", "candidates",
                                                    "exchange"};
    return op >= 0 && op < EXCHANGE_N_OP ? name[op] : "?";
}

static int64_t cdiv(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

int64_t exchange_bytes(const exchange_args *a)
{
    int64_t n = 0;
    for (int32_t i = 0; i < a->n_part; i++) {
        n += (int64_t)a->n_row * a->part[i].bytes;
    }
    return n;
}

int64_t exchange_merge_bytes(const exchange_merge_args *a)
{
    return (int64_t)a->n_row * (a->n_head / a->w.n_rank) * UNIT_WORDS * (int64_t)sizeof(float);
}

int32_t exchange_merge_works(int32_t n_row, int32_t n_head, int32_t n_rank)
{
    const int64_t peers = n_rank > 1 ? n_rank - 1 : 1;
    return (int64_t)n_row * (n_head / n_rank) * peers <= UNIT_MANY ? UNIT_LSE : 1;
}

/* Every part of a message begins a cell. */
uint32_t exchange_cells_for(int64_t bytes)
{
    return (uint32_t)(cdiv(bytes, WIRE_CELL) + cdiv(bytes, UNIT_WORDS * 4) * UNIT_LSE + EXCHANGE_MAX_PART);
}

static int is_group(const wire *w)
{
    return w->n_rank >= 1 && w->n_rank <= WIRE_MAX_RANK && w->rank >= 0 && w->rank < w->n_rank;
}

static int words_only(int64_t a, int64_t b, int64_t c, int64_t d)
{
    return ((a | b | c | d) & 3) == 0;
}

const char *exchange_refuses(const exchange_args *a)
{
    int64_t cells = 0;
    if (!is_group(&a->w)) {
        return "exchange: a group has 1 to 8 ranks, numbered from 0";
    }
    if (a->op < 0 || a->op >= EXCHANGE_N_OP || a->n_row < 0 || a->n_part < 0 || a->n_part > EXCHANGE_MAX_PART) {
        return "exchange: op, rows or parts are out of range (at most 4 parts)";
    }
    for (int32_t i = 0; i < a->n_part; i++) {
        const exchange_part *p = &a->part[i];
        if (p->bytes <= 0 || !words_only(p->bytes, p->src_rank, p->src_row, 0) ||
            !words_only(p->dst_rank, p->dst_row, (int64_t)(uintptr_t)p->src,
                        (int64_t)(uintptr_t)p->dst)) {
            return "exchange: widths, addresses and strides are multiples of 4 bytes, widths not 0";
        }
        if ((int64_t)a->n_row * p->bytes > INT32_MAX) {
            return "exchange: a part is 2 GiB or more: send fewer rows at a time";
        }
        cells += cdiv((int64_t)a->n_row * p->bytes, WIRE_CELL);
    }
    return cells <= (int64_t)a->w.n_cell
               ? NULL
               : "exchange: the message is larger than the group was opened for: send fewer rows at a time";
}

const char *exchange_merge_refuses(const exchange_merge_args *a)
{
    if (!is_group(&a->w) || a->n_row < 0) {
        return "exchange_merge: a group has 1 to 8 ranks, numbered from 0; rows are out of range";
    }
    if (a->n_head < a->w.n_rank || a->n_head % a->w.n_rank != 0) {
        return "exchange_merge: heads are a multiple of the ranks";
    }
    const int64_t unit = a->out_type == KVS_DTYPE_BF16 ? 8 : 4; /* elements of 16 bytes */
    if ((((uintptr_t)a->part | (uintptr_t)a->out) & 15u) != 0 || a->part_row % 4 != 0 ||
        a->out_row % unit != 0) {
        return "exchange_merge: rows lie at multiples of 16 bytes";
    }
    const int64_t bytes = exchange_merge_bytes(a);
    if (bytes > INT32_MAX) {
        return "exchange_merge: 2 GiB or more to a peer: send fewer rows at a time";
    }
    const int64_t units = (int64_t)a->n_row * (a->n_head / a->w.n_rank);
    return units * UNIT_CELLS <= (int64_t)a->w.n_cell
               ? NULL
               : "exchange_merge: the message is larger than the group was opened for: send fewer rows at a "
                 "time";
}

const char *attn_send_refuses(const attn_args *a, const wire *w, int32_t deterministic)
{
    if (!deterministic && (a->fmt != KVS_KV_FP8_DS_MLA || a->slots == NULL)) {
        return "attn_send: by default rows of fp8_ds_mla by lists of slots are sent as they are made; else let the merge "
               "send (exchange_merge, not sent), or take the deterministic mode";
    }
    if (a->out_type == KVS_DTYPE_BF16) {
        return "attn_send: f32 results are sent";
    }
    if (a->out_stride_head != KVS_LATENT_DIM) {
        return "attn_send: heads of results lie one behind the other, where the merge reads the own ones";
    }
    exchange_merge_args m;
    memset(&m, 0, sizeof m);
    m.w = *w;
    m.n_row = a->n_row;
    m.n_head = a->n_head;
    m.part = a->out;
    m.part_row = a->out_stride_row;
    return exchange_merge_refuses(&m);
}
