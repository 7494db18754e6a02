/* engine/keep.c - sequences whose request has ended, kept for the prefix they may share with a later one.
 *
 * A place (slot) holds a running request, a kept sequence, or nothing; so at most max_seqs sequences have pages.
 * A request that begins looks for the longest prefix among the kept and the running sequences, token by token,
 * becomes one more owner of the pages that hold it and reads its prompt from there on. Pages are shared whole and
 * nobody writes into them again: a sequence writes rows at or past its n_fed (n_drafted) only, and what is shared
 * ends at or before those, at a multiple of KEEP_UNIT, which every span divides.
 *
 * Invariants: (1) kept[i] and run[i] are not both set; (2) of a kept sequence rows [0, n_fed) are those of its
 * tokens, and draft rows [0, n_drafted) too; (3) nothing is allocated; (4) a sequence that failed is never kept.
 */
#include <string.h>

#include "dcp/dcp.h"
#include "engine/loop.h"

/* Whole blocks of the context path. Every span divides it, so that each DCP size reuses the same positions. */
enum { KEEP_UNIT = DCP_CONTEXT_BLOCK };

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- what is kept ---------------------------------------------------------------------------- */

static void drop(loop *l, int32_t slot)
{
    seq *s = l->kept[slot];
    l->kept[slot] = NULL;
    pages_truncate(l->pages, s->table, &s->n_entry, 0, NULL);
    seq_free(s);
}

/* The one that was used longest ago, or -1. */
static int32_t oldest(const loop *l)
{
    int32_t best = -1;
    for (int32_t i = 0; i < l->max_seqs; i++) {
        if (l->kept[i] != NULL && (best < 0 || l->kept[i]->used < l->kept[best]->used)) {
            best = i;
        }
    }
    return best;
}

bool keep_evict(loop *l)
{
    const int32_t slot = oldest(l);
    if (slot >= 0) {
        drop(l, slot);
    }
    return slot >= 0;
}

void keep_drop(loop *l)
{
    while (keep_evict(l)) {
    }
}

/* Rows of k that another sequence may take over as rows of its prompt. */
static int64_t usable(const loop *l, const seq *k)
{
    return l->keep_prompt ? smaller(k->n_fed, k->n_prompt) : k->n_fed;
}

/* The same of the draft layer: the row of a prompt's last token was made with the answer's first one. */
static int64_t usable_drafts(const loop *l, const seq *k)
{
    return l->keep_prompt ? smaller(k->n_drafted, k->n_prompt - 1) : k->n_drafted;
}

bool keep_take(loop *l, seq *s)
{
    if (l->no_reuse || s->state == SEQ_WAITING) {
        return false;
    }
    if (s->state == SEQ_DECODE) {
        /* All but the last token have been fed, verified drafts among them. */
        s->n_fed = s->len - 1;
    }
    if (usable(l, s) < KEEP_UNIT) {
        return false;
    }
    s->used = ++l->clock;
    l->kept[s->slot] = s;
    return true;
}

/* ---- what is shared -------------------------------------------------------------------------- */

/* Positions of the prompt of s whose rows k has. The last token is always read, for its logits. Row p of the
 * draft layer belongs to the tokens at p and p + 1. */
static int64_t shareable(const loop *l, const seq *k, const seq *s)
{
    int64_t same = 0;
    while (same < smaller(k->len, s->n_prompt) && k->token[same] == s->token[same]) {
        same++;
    }
    int64_t n = smaller(smaller(same, usable(l, k)), s->n_prompt - 1);
    if (loop_drafts(l, s)) {
        n = smaller(n, smaller(same - 1, usable_drafts(l, k)));
    }
    return n > 0 ? n / KEEP_UNIT * KEEP_UNIT : 0;
}

static seq *best_match(const loop *l, const seq *s, int64_t *n)
{
    seq *best = NULL;
    *n = s->n_fed;
    for (int32_t i = 0; i < l->max_seqs; i++) {
        seq *k = l->kept[i] != NULL ? l->kept[i] : l->run[i];
        const int64_t m = k != NULL && k != s ? shareable(l, k, s) : 0;
        if (m > *n) {
            best = k;
            *n = m;
        }
    }
    return best;
}

/* Returns whose prefix it is; NULL: none is longer than what s has. */
static seq *share(loop *l, seq *s)
{
    int64_t n = 0;
    seq *k = l->no_reuse ? NULL : best_match(l, s, &n);
    const int64_t n_entry = k != NULL ? n / (KVS_PAGE_TOKENS * l->dcp) : 0;
    if (k == NULL || pages_share(l->pages, k->table, n_entry, NULL) < 0) {
        return NULL;
    }
    pages_truncate(l->pages, s->table, &s->n_entry, 0, NULL);
    memcpy(s->table, k->table, (size_t)n_entry * sizeof *s->table);
    s->n_entry = n_entry;
    s->n_reused = n;
    s->n_fed = n;
    s->n_drafted = loop_drafts(l, s) ? n : smaller(n - 1, k->n_drafted);
    k->used = ++l->clock;
    return k;
}

void keep_share(loop *l, seq *s)
{
    share(l, s);
}

int32_t keep_place(loop *l, seq *s)
{
    const seq *k = share(l, s);
    if (k != NULL && l->kept[k->slot] == k && usable(l, k) - s->n_reused < KEEP_UNIT) {
        const int32_t slot = k->slot; /* s has all of it that could be shared */
        drop(l, slot);
        return slot;
    }
    for (int32_t i = 0; i < l->max_seqs; i++) {
        if (l->run[i] == NULL && l->kept[i] == NULL) {
            return i;
        }
    }
    const int32_t slot = oldest(l);
    drop(l, slot);
    return slot;
}
