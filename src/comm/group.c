/* comm/group.c: set-up calls: a split into smaller groups, an agreement on success, the handshake.
 *
 * What they decide is a function of gathered data that every rank has, so all ranks decide alike. */
#include <assert.h>
#include <stdio.h>
#include <string.h>
#include "base/err.h"
#include "base/mem.h"
#include "comm/impl.h"

enum { MAX_HANDSHAKE = 1 << 20, SHOWN = 48 };

/* Gathers `bytes` <= COMM_META of every rank in c->meta; this rank's lie there already. */
static kvs_status gather_meta(comm *c, size_t bytes, bool first, kvs_error *err)
{
    for (int32_t p = 0; p < c->size; p++) {
        c->out[p] = (comm_out){c->meta + (size_t)c->rank * bytes, bytes};
        c->in[p] = (comm_in){c->meta + (size_t)p * bytes, bytes};
    }
    return comm_call_exchange(c, first, err);
}

/* ---- split ----------------------------------------------------------------------------------- */

typedef struct split_ask {
    int32_t colour;
    int32_t key;
    uint64_t offer;
} split_ask;

typedef struct split_answer {
    int64_t st;
    uint64_t token;
} split_answer;

static bool is_before(const split_ask *ask, int32_t a, int32_t b)
{
    return ask[a].key != ask[b].key ? ask[a].key < ask[b].key : a < b;
}

/* Fills members [size of c] with the ranks of this rank's colour in their new order. */
static comm_plan plan_of(const comm *c, const split_ask *ask, int32_t *members)
{
    comm_plan plan = {.members = members};
    for (int32_t r = 0; r < c->size; r++) {
        plan.offer = ask[r].offer > plan.offer ? ask[r].offer : plan.offer;
        if (ask[r].colour != ask[c->rank].colour) {
            continue;
        }
        int32_t i = plan.size++;
        for (; i > 0 && is_before(ask, r, members[i - 1]); i--) {
            members[i] = members[i - 1];
        }
        members[i] = r;
    }
    for (int32_t i = 0; i < plan.size; i++) {
        plan.rank = members[i] == c->rank ? i : plan.rank;
    }
    return plan;
}

/* Everything that may fail on this rank alone. On failure *child is NULL and nothing is left. */
static kvs_status make_child(comm *c, int32_t *members, comm_plan *plan, comm **child,
                             uint64_t *token, kvs_error *err)
{
    *plan = plan_of(c, (const split_ask *)(const void *)c->meta, members);
    comm *k = comm_new(c->transport, c->family, plan->rank, plan->size, &c->cfg);
    if (k == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a group of %d ranks", plan->size);
    }
    const kvs_status st = c->transport->split_prepare(c, k, plan, token, err);
    if (st < 0) {
        comm_discard(k);
        return st;
    }
    k->hook = c->hook;
    k->hook_ctx = c->hook_ctx;
    *child = k;
    return KVS_OK;
}

static int32_t first_failed(const comm *c, const split_answer *answer)
{
    for (int32_t r = 0; r < c->size; r++) {
        if (answer[r].st < 0) {
            return r;
        }
    }
    return -1;
}

/* The two exchanges of a split. *refused >= 0: that rank had no memory, as all ranks know. */
static kvs_status split_run(comm *c, split_ask ask, int32_t *members, comm **out,
                            split_answer *refused, int32_t *who, kvs_error *err)
{
    memcpy(c->meta + (size_t)c->rank * sizeof ask, &ask, sizeof ask);
    kvs_status st = gather_meta(c, sizeof ask, true, err);
    if (st != KVS_OK) {
        return st;
    }
    comm_plan plan;
    comm *child = NULL;
    split_answer mine = {0};
    mine.st = make_child(c, members, &plan, &child, &mine.token, NULL);
    memcpy(c->meta + (size_t)c->rank * sizeof mine, &mine, sizeof mine);
    st = gather_meta(c, sizeof mine, false, err);
    const split_answer *answer = (const split_answer *)(const void *)c->meta;
    *who = st < 0 ? -1 : first_failed(c, answer);
    if (st < 0 || *who >= 0) {
        if (child != NULL) {
            c->transport->split_cancel(child, mine.token, st < 0);
            comm_discard(child);
        }
        if (*who >= 0) {
            *refused = answer[*who];
        }
        return st;
    }
    c->transport->split_commit(child, answer[members[0]].token);
    *out = child;
    return KVS_OK;
}

kvs_status comm_split(comm *c, int32_t colour, int32_t key, comm **out, kvs_error *err)
{
    static_assert(sizeof(split_ask) + sizeof(split_answer) == 32, "as comm_stats promises");
    *out = NULL;
    TRY(comm_call_begin(c, COMM_OP_SPLIT, 0, 0, err));
    const split_ask ask = {colour, key, c->transport->split_offer(c)};
    split_answer refused = {0};
    int32_t who = -1;
    const kvs_status st = split_run(c, ask, c->members, out, &refused, &who, err);
    TRY(comm_call_end(c, st, err));
    if (who >= 0) {
        return err_set(err, (kvs_status)refused.st, "split: rank %d: %s", who,
                       kvs_status_text((kvs_status)refused.st));
    }
    return st;
}

/* ---- agreement ------------------------------------------------------------------------------- */

typedef struct verdict {
    int32_t st;
    char text[COMM_META - sizeof(int32_t)];
} verdict;

kvs_status comm_agree(comm *c, kvs_status mine, kvs_error *err)
{
    verdict v = {.st = mine};
    if (mine < 0) {
        snprintf(v.text, sizeof v.text, "%s",
                 err != NULL && err->code == mine ? err->text : kvs_status_text(mine));
    }
    verdict *all = (verdict *)(void *)c->meta;
    all[c->rank] = v;
    TRY(comm_all_gather(c, &all[c->rank], all, sizeof v, err));
    for (int32_t r = 0; r < c->size; r++) {
        if (all[r].st < 0) {
            return err_set(err, (kvs_status)all[r].st, "rank %d: %s", r, all[r].text);
        }
    }
    return KVS_OK;
}

/* ---- handshake ------------------------------------------------------------------------------- */

typedef struct shake_size {
    int64_t n_field;
    uint64_t bytes; /* of all names and values with their terminators */
} shake_size;

/* The fields as name, NUL, value, NUL, ...; dst NULL measures. KVS_INVALID for a missing text. */
static kvs_status pack(const comm_field *fields, int32_t n_field, unsigned char *dst, size_t *bytes,
                       kvs_error *err)
{
    if (n_field < 0 || (n_field > 0 && fields == NULL)) {
        return err_set(err, KVS_INVALID, "handshake: %d fields; give a list of 0 or more", n_field);
    }
    size_t at = 0;
    for (int32_t i = 0; i < n_field; i++) {
        const char *text[2] = {fields[i].name, fields[i].value};
        for (int k = 0; k < 2; k++) {
            if (text[k] == NULL) {
                return err_set(err, KVS_INVALID, "handshake: field %d has no %s", i,
                               k == 0 ? "name" : "value");
            }
            const size_t len = strlen(text[k]) + 1;
            if (len > MAX_HANDSHAKE - at) {
                return err_set(err, KVS_LIMIT, "handshake: over %d bytes at field %d \"%.*s\"",
                               MAX_HANDSHAKE, i, SHOWN, fields[i].name);
            }
            if (dst != NULL) {
                memcpy(dst + at, text[k], len);
            }
            at += len;
        }
    }
    *bytes = at;
    return KVS_OK;
}

static const char *next_text(const char *s)
{
    return s + strlen(s) + 1;
}

/* Compares rank r's packed fields with rank 0's, in order. */
static kvs_status compare(const char *a, int64_t n_a, const char *b, int64_t n_b, int32_t r,
                          kvs_error *err)
{
    const int64_t n = n_a < n_b ? n_a : n_b;
    for (int64_t i = 0; i < n; i++) {
        if (strcmp(a, b) != 0) {
            return err_set(err, KVS_INVALID,
                           "handshake: field %lld is \"%.*s\" on rank 0 and \"%.*s\" on rank %d; "
                           "start all ranks from one build",
                           (long long)i, SHOWN, a, SHOWN, b, r);
        }
        const char *name = a;
        a = next_text(a);
        b = next_text(b);
        if (strcmp(a, b) != 0) {
            return err_set(err, KVS_INVALID,
                           "handshake: %.*s is \"%.*s\" on rank 0 and \"%.*s\" on rank %d; start "
                           "all ranks with the same",
                           SHOWN, name, SHOWN, a, SHOWN, b, r);
        }
        a = next_text(a);
        b = next_text(b);
    }
    if (n_a != n_b) {
        return err_set(
            err, KVS_INVALID,
            "handshake: rank 0 has %lld fields and rank %d has %lld: \"%.*s\" is only on "
            "rank %d; start all ranks from one build",
            (long long)n_a, r, (long long)n_b, SHOWN, n_a > n_b ? a : b, n_a > n_b ? 0 : r);
    }
    return KVS_OK;
}

/* Gathers and compares the texts; every rank knows all sizes, [size of c]. */
static kvs_status gather_compare(comm *c, const comm_field *fields, int32_t n_field,
                                 const shake_size *size, kvs_error *err)
{
    size_t room = 0;
    for (int32_t r = 0; r < c->size; r++) {
        room = size[r].bytes > room ? (size_t)size[r].bytes : room;
    }
    unsigned char *all = mem_calloc((size_t)c->size, room + 2);
    if (all == NULL) {
        return comm_call_refuse(c, KVS_NOMEM, COMM_OP_ALL_GATHER,
                                "no memory for the handshake's texts", err);
    }
    unsigned char *mine = all + (size_t)c->rank * room;
    size_t bytes = 0;
    kvs_status st = pack(fields, n_field, mine, &bytes, err);
    if (st >= 0) {
        st = comm_all_gather(c, mine, all, room, err);
    }
    for (int32_t r = 1; r < c->size && st >= 0; r++) {
        st = compare((const char *)all, size[0].n_field, (const char *)all + (size_t)r * room,
                     size[r].n_field, r, err);
    }
    mem_free(all);
    return st;
}

kvs_status comm_handshake(comm *c, const comm_field *fields, int32_t n_field, kvs_error *err)
{
    kvs_error local = {0};
    size_t bytes = 0;
    kvs_status st = pack(fields, n_field, NULL, &bytes, &local);
    st = comm_agree(c, st, &local);
    if (st < 0) {
        if (err != NULL) {
            *err = local;
        }
        return st;
    }
    shake_size *all = (shake_size *)(void *)c->meta;
    all[c->rank] = (shake_size){n_field, bytes};
    const shake_size mine = all[c->rank];
    TRY(comm_all_gather(c, &mine, all, sizeof mine, err));
    return gather_compare(c, fields, n_field, all, err);
}
