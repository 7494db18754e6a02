/* topo.c - the rules of a set-up, which of them a configuration breaks, and the nearest repair.
 *
 * topo_broken is the one statement of the rules, as a set of bits; the search for the nearest
 * setting tries values of one field against it, so that a proposal is never refused by a rule that
 * held. */
#include "shard/topo.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"

typedef enum rule {
    RULE_DCP_RANGE,
    RULE_DCP_SAME_BITS,
    RULE_TP_RANGE,
    RULE_DCP_DIVIDES_TP,
    RULE_RANK_RANGE,
    RULE_INTERLEAVE_DIVIDES_PAGE,
    RULE_HEADS_RANGE,
    RULE_TP_DIVIDES_HEADS,
    RULE_HEADS_GATHERED,
    RULE_CONTEXT_RANGE,
    N_RULE
} rule;

static_assert((int)N_RULE == (int)TOPO_N_RULE, "every rule has room in the caller's list");

enum { MAX_TP_TRIED = 1024 };

static topo_config resolve(const topo_config *cfg)
{
    topo_config c = *cfg;
    c.dcp = c.dcp == 0 ? 1 : c.dcp;
    c.tp = c.tp == 0 ? c.dcp : c.tp;
    c.interleave = c.interleave == 0 ? 1 : c.interleave;
    return c;
}

static uint32_t bit(rule r, int broken)
{
    return broken ? UINT32_C(1) << r : 0;
}

static int64_t heads_gathered(const topo_config *c)
{
    return (int64_t)(c->heads / c->tp) * c->dcp;
}

static uint32_t topo_broken(const topo_config *cfg)
{
    const topo_config c = resolve(cfg);
    const int dcp_exists = c.dcp >= 1 && c.dcp <= KVS_MAX_RANKS;
    const int dcp_allowed = dcp_exists && (cfg->kernel_level || KVS_LANES % c.dcp == 0);
    const int page_filled = c.interleave >= 1 && KVS_PAGE_TOKENS % c.interleave == 0;
    uint32_t m =
        bit(RULE_DCP_RANGE, !dcp_exists) | bit(RULE_DCP_SAME_BITS, dcp_exists && !dcp_allowed) |
        bit(RULE_INTERLEAVE_DIVIDES_PAGE, !page_filled) | bit(RULE_HEADS_RANGE, c.heads < 0) |
        bit(RULE_CONTEXT_RANGE, c.max_context < 0 || c.max_context > TOPO_MAX_CONTEXT);
    if (cfg->tp == 0 && !dcp_allowed) {
        return m; /* tp would be a value that nobody asked for */
    }
    if (c.tp < 1) {
        return m | bit(RULE_TP_RANGE, 1);
    }
    m |= bit(RULE_DCP_DIVIDES_TP, dcp_exists && c.tp % c.dcp != 0);
    m |= bit(RULE_RANK_RANGE, c.rank < 0 || c.rank >= c.tp);
    if (c.heads > 0) {
        const int even = c.heads % c.tp == 0;
        m |= bit(RULE_TP_DIVIDES_HEADS, !even);
        m |= bit(RULE_HEADS_GATHERED, even && dcp_exists && heads_gathered(&c) > KVS_MAX_HEADS);
    }
    return m;
}

/* ---- the nearest setting that works ---------------------------------------------------------- */

typedef enum field { FIELD_DCP, FIELD_TP, FIELD_RANK, FIELD_INTERLEAVE, FIELD_HEADS } field;

static const char *const field_name[] = {"dcp", "tp", "rank", "interleave", "heads"};

static int32_t *field_of(topo_config *c, field f)
{
    switch (f) {
    case FIELD_DCP:
        return &c->dcp;
    case FIELD_TP:
        return &c->tp;
    case FIELD_RANK:
        return &c->rank;
    case FIELD_INTERLEAVE:
        return &c->interleave;
    default:
        return &c->heads;
    }
}

static int64_t distance(int64_t a, int64_t b)
{
    return a < b ? b - a : a - b;
}

/* Among lo..hi the value of the field closest to what it is (the larger of two) that repairs rule r
 * and breaks none that holds; written as "dcp 4", or "" where there is none. */
static int find_nearest(const topo_config *cfg, rule r, field f, int32_t lo, int32_t hi, char *text,
                        size_t cap)
{
    const uint32_t allowed = topo_broken(cfg) & ~bit(r, 1);
    topo_config at = resolve(cfg);
    const int32_t now = *field_of(&at, f);
    topo_config trial = *cfg;
    int found = 0;
    int32_t best = 0;
    for (int32_t v = lo; v <= hi; v++) {
        *field_of(&trial, f) = v;
        const int nearer = !found || distance(v, now) <= distance(best, now);
        if (nearer && (topo_broken(&trial) & ~allowed) == 0) {
            found = 1;
            best = v;
        }
    }
    if (found) {
        snprintf(text, cap, "%s %d", field_name[f], (int)best);
    } else {
        text[0] = '\0';
    }
    return found;
}

/* The same with tp changed and dcp 1: what is left where neither alone helps. */
static void find_nearest_alone(const topo_config *cfg, rule r, char *text, size_t cap)
{
    topo_config one = *cfg;
    one.dcp = 1;
    const uint32_t allowed = topo_broken(cfg) & ~bit(r, 1);
    const int32_t now = resolve(cfg).tp;
    int32_t best = 0;
    for (int32_t v = 1; v <= MAX_TP_TRIED; v++) {
        one.tp = v;
        const int nearer = best == 0 || distance(v, now) <= distance(best, now);
        if (nearer && (topo_broken(&one) & ~allowed) == 0) {
            best = v;
        }
    }
    text[0] = '\0';
    if (best > 0) {
        snprintf(text, cap, "tp %d, dcp 1", (int)best);
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */

#define SAY(field, ...) snprintf((field), sizeof(field), __VA_ARGS__)

/* The value and the reason, and the setting to change, of each rule. */
static void explain_ranks(const topo_config *cfg, const topo_config *c, rule r, topo_refusal *out)
{
    char *near = out->nearest;
    const size_t cap = sizeof out->nearest;
    switch (r) {
    case RULE_DCP_RANGE:
        out->rule = "dcp_range";
        SAY(out->value, "dcp %d", (int)c->dcp);
        SAY(out->why, "a DCP group has 1 to %d ranks", KVS_MAX_RANKS);
        find_nearest(cfg, r, FIELD_DCP, 1, KVS_MAX_RANKS, near, cap);
        break;
    case RULE_DCP_SAME_BITS:
        out->rule = "dcp_same_bits";
        out->status = KVS_UNSUPPORTED;
        SAY(out->value, "dcp %d", (int)c->dcp);
        SAY(out->why, "the same bits come from 1, 2, 4 and 8 only; others exist at kernel level");
        find_nearest(cfg, r, FIELD_DCP, 1, KVS_MAX_RANKS, near, cap);
        break;
    case RULE_TP_RANGE:
        out->rule = "tp_range";
        SAY(out->value, "tp %d", (int)c->tp);
        SAY(out->why, "a TP group has at least one rank");
        find_nearest(cfg, r, FIELD_TP, 1, MAX_TP_TRIED, near, cap);
        break;
    case RULE_DCP_DIVIDES_TP:
        out->rule = "dcp_divides_tp";
        SAY(out->value, "dcp %d, tp %d", (int)c->dcp, (int)c->tp);
        SAY(out->why, "DCP groups are equal runs of ranks of the TP group");
        find_nearest(cfg, r, FIELD_DCP, 1, KVS_MAX_RANKS, near, cap);
        break;
    default:
        out->rule = "rank_range";
        SAY(out->value, "rank %d, tp %d", (int)c->rank, (int)c->tp);
        SAY(out->why, "ranks of the TP group are numbered from 0 to tp - 1");
        find_nearest(cfg, r, FIELD_RANK, c->rank < 0 ? 0 : c->tp - 1, c->rank < 0 ? 0 : c->tp - 1,
                     near, cap);
        break;
    }
}

static void explain_sizes(const topo_config *cfg, const topo_config *c, rule r, topo_refusal *out)
{
    char *near = out->nearest;
    const size_t cap = sizeof out->nearest;
    switch (r) {
    case RULE_INTERLEAVE_DIVIDES_PAGE:
        out->rule = "interleave_divides_page";
        SAY(out->value, "interleave %d", (int)c->interleave);
        SAY(out->why, "a page of %d tokens holds whole runs: 1, 2, 4, 8, 16, 32 or 64",
            KVS_PAGE_TOKENS);
        find_nearest(cfg, r, FIELD_INTERLEAVE, 1, KVS_PAGE_TOKENS, near, cap);
        break;
    case RULE_HEADS_RANGE:
        out->rule = "heads_range";
        SAY(out->value, "heads %d", (int)c->heads);
        SAY(out->why, "a model has at least one attention head");
        find_nearest(cfg, r, FIELD_HEADS, 1, MAX_TP_TRIED, near, cap);
        break;
    case RULE_TP_DIVIDES_HEADS:
        out->rule = "tp_divides_heads";
        SAY(out->value, "heads %d, tp %d", (int)c->heads, (int)c->tp);
        SAY(out->why, "every rank of the TP group holds the same number of heads");
        if (!find_nearest(cfg, r, FIELD_TP, 1, MAX_TP_TRIED, near, cap)) {
            find_nearest_alone(cfg, r, near, cap);
        }
        break;
    case RULE_HEADS_GATHERED:
        out->rule = "heads_gathered";
        SAY(out->value, "heads %d, tp %d, dcp %d", (int)c->heads, (int)c->tp, (int)c->dcp);
        SAY(out->why, "a DCP group gathers dcp * heads / tp = %lld heads, kernels take %d",
            (long long)heads_gathered(c), KVS_MAX_HEADS);
        if (!find_nearest(cfg, r, FIELD_DCP, 1, KVS_MAX_RANKS, near, cap)) {
            if (!find_nearest(cfg, r, FIELD_TP, 1, MAX_TP_TRIED, near, cap)) {
                find_nearest_alone(cfg, r, near, cap);
            }
        }
        break;
    default:
        out->rule = "context_range";
        SAY(out->value, "max context %lld", (long long)c->max_context);
        SAY(out->why, "positions are 32-bit: a context has 1 to 2^31 - 1 tokens");
        SAY(out->nearest, "max context %d", c->max_context < 0 ? 1 : TOPO_MAX_CONTEXT);
        break;
    }
}

int32_t topo_check(const topo_config *cfg, topo_refusal out[TOPO_N_RULE])
{
    const uint32_t broken = topo_broken(cfg);
    const topo_config c = resolve(cfg);
    int32_t n = 0;
    for (rule r = RULE_DCP_RANGE; r < N_RULE; r++) {
        if ((broken & bit(r, 1)) == 0) {
            continue;
        }
        topo_refusal *f = &out[n++];
        memset(f, 0, sizeof *f);
        f->status = KVS_INVALID;
        if (r <= RULE_RANK_RANGE) {
            explain_ranks(cfg, &c, r, f);
        } else {
            explain_sizes(cfg, &c, r, f);
        }
    }
    return n;
}

void topo_refusal_text(const topo_refusal *r, char *text, size_t cap)
{
    const char *use = r->nearest[0] != '\0' ? "; use " : "";
    snprintf(text, cap, "%s: %s%s%s", r->value, r->why, use, r->nearest);
}

topo topo_at(const topo *t, int32_t rank)
{
    topo r = *t;
    r.rank = rank;
    r.i_group = rank / t->dcp;
    r.group_rank = rank % t->dcp;
    r.geom.rank = r.group_rank;
    return r;
}

kvs_status topo_init(topo *out, const topo_config *cfg, kvs_error *err)
{
    topo_refusal list[TOPO_N_RULE];
    if (topo_check(cfg, list) > 0) {
        char text[224];
        topo_refusal_text(&list[0], text, sizeof text);
        return err_set(err, list[0].status, "%s", text);
    }
    const topo_config c = resolve(cfg);
    topo t;
    memset(&t, 0, sizeof t);
    t.tp = c.tp;
    t.dcp = c.dcp;
    t.interleave = c.interleave;
    t.n_group = c.tp / c.dcp;
    t.heads = c.heads;
    t.heads_local = c.heads / c.tp;
    t.heads_gathered = c.dcp * t.heads_local;
    t.max_context = c.max_context;
    t.geom.n = c.dcp;
    t.geom.i = c.interleave;
    t.table_width = shard_table_width(t.geom, c.max_context);
    *out = topo_at(&t, c.rank);
    return KVS_OK;
}
