/* haystack.c: draws the facts of a haystack and writes text and facts in the order of their places. */
#include "haystack.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"

enum { SYLLABLES = 48, FACT_TOKENS = 19, FACT_BYTES = 96 };
static const double TEXT_BYTES = 3.95; /* bytes of text a token */

static const char *const syllable[SYLLABLES] = {
    "ba",  "bel", "bor", "cai", "dan", "del", "dor", "fal", "fen", "gar", "gil", "har",
    "hel", "ith", "jor", "kal", "kel", "kor", "lan", "lis", "lor", "mar", "mel", "mir",
    "nal", "nes", "nor", "oli", "pas", "pel", "qui", "ran", "rel", "ros", "sal", "sel",
    "tam", "ter", "tor", "ula", "van", "vel", "vir", "wen", "xan", "yor", "zan", "zel"};

typedef struct fact {
    int name[3];
    uint32_t code;
    int32_t index; /* below n_wanted: that wanted fact */
    bool wanted;
    int64_t place; /* goes in at the first end of a sentence from this byte on */
} fact;

typedef struct text {
    char *byte;
    int64_t n;
} text;

static int fail(const char *program, const char *what, const char *value)
{
    fprintf(stderr, "%s: %s: %s\n", program, what, value);
    return 2;
}

bool haystack_number(const char *s, int64_t lo, int64_t hi, int64_t *out)
{
    char *end = NULL;
    const long long v = strtoll(s, &end, 10);
    *out = v;
    return end != s && *end == 0 && v >= lo && v <= hi;
}

/* Reads the whole file; the last byte becomes a newline. */
static int read_text(const char *program, const char *path, text *t)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return fail(program, "cannot open", path);
    const bool sized = fseek(f, 0, SEEK_END) == 0;
    const long n = sized ? ftell(f) : -1;
    if (n < 4096 || n > INT32_MAX) {
        fclose(f);
        return fail(program, "not 4 KiB to 2 GiB of text", path);
    }
    rewind(f);
    t->n = n;
    t->byte = malloc((size_t)n);
    const bool whole = t->byte && fread(t->byte, 1, (size_t)n, f) == (size_t)n;
    fclose(f);
    if (!whole) {
        free(t->byte);
        t->byte = NULL;
        return fail(program, "cannot read", path);
    }
    t->byte[n - 1] = '\n';
    return 0;
}

static bool held_out(const int name[3])
{
    return (7 * name[0] + 3 * name[1] + 5 * name[2]) % 8 == 0;
}

static bool known(const fact *facts, int64_t n, const int name[3])
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(facts[i].name, name, sizeof facts[i].name) == 0)
            return true;
    return false;
}

/* A held-out name that none of the n facts before has. */
static void draw_name(rng *r, const fact *facts, int64_t n, int name[3])
{
    do {
        for (int i = 0; i < 3; i++)
            name[i] = (int)rng_next_below(r, SYLLABLES);
        if (n > 0 && rng_next_below(r, 5) < 2) {
            memcpy(name, facts[rng_next_below(r, (uint64_t)n)].name, 3 * sizeof name[0]);
            name[rng_next_below(r, 3)] = (int)rng_next_below(r, SYLLABLES);
        }
    } while (!held_out(name) || known(facts, n, name));
}

/* Of facts at one place the wanted ones come last. */
static int by_place(const void *a, const void *b)
{
    const fact *x = a;
    const fact *y = b;
    if (x->place != y->place)
        return x->place < y->place ? -1 : 1;
    if (x->wanted != y->wanted)
        return x->wanted ? 1 : -1;
    return (x->index > y->index) - (x->index < y->index);
}

static void spell(const int name[3], char out[HAYSTACK_NAME])
{
    snprintf(out, HAYSTACK_NAME, "%s%s%s", syllable[name[0]], syllable[name[1]], syllable[name[2]]);
    out[0] = (char)(out[0] - 'a' + 'A');
}

static void draw_facts(const haystack_recipe *o, rng *r, int64_t body, fact *facts, haystack *h)
{
    const int64_t n = o->distractors + o->n_wanted;
    for (int64_t i = 0; i < n; i++) {
        draw_name(r, facts, i, facts[i].name);
        facts[i].code = (uint32_t)rng_next_below(r, 1000000);
        facts[i].index = (int32_t)i;
        facts[i].wanted = i < o->n_wanted;
        facts[i].place = facts[i].wanted ? body * o->depth[i] / 100 : rng_next_range(r, 0, body);
        if (facts[i].wanted) {
            spell(facts[i].name, h->fact[i].name);
            h->fact[i].code = facts[i].code;
        }
    }
    qsort(facts, (size_t)n, sizeof facts[0], by_place);
}

static void put(haystack *h, const char *byte, int64_t n)
{
    memcpy(h->byte + h->n, byte, (size_t)n);
    h->n += n;
}

/* Inside a paragraph a fact starts with a space; between paragraphs it is one of its own. */
static void put_fact(haystack *h, const fact *f, bool own)
{
    char name[HAYSTACK_NAME];
    char line[FACT_BYTES];
    spell(f->name, name);
    const int n = snprintf(line, sizeof line, "%sThe passcode for %s is %06" PRIu32 ".%s",
                           own ? "" : " ", name, f->code, own ? "\n\n" : "");
    if (f->wanted)
        h->fact[f->index].answer_at = h->n + n - (own ? 9 : 7);
    put(h, line, n);
}

/* Length of the sentence at byte `at`, its full stop and a paragraph's newlines included. */
static int64_t sentence(const text *t, int64_t at)
{
    for (int64_t i = at; i + 1 < t->n; i++) {
        if (t->byte[i] != '.' || (t->byte[i + 1] != ' ' && t->byte[i + 1] != '\n'))
            continue;
        int64_t end = i + 1;
        while (end < t->n && t->byte[end] == '\n')
            end++;
        return end - at;
    }
    return t->n - at;
}

static int64_t paragraph_after(const text *t, int64_t at)
{
    for (int64_t i = at; i + 2 < t->n; i++)
        if (t->byte[i] == '.' && t->byte[i + 1] == '\n' && t->byte[i + 2] == '\n')
            return i + 3 < t->n ? i + 3 : 0;
    return 0;
}

/* Bytes written are at most: the text up to `body` and `tail`, each with the rest of a sentence, and the facts. */
static int64_t room_for(const text *t, const haystack_recipe *o, int64_t body)
{
    int64_t longest = 0;
    for (int64_t at = 0; at < t->n;) {
        const int64_t size = sentence(t, at);
        longest = size > longest ? size : longest;
        at += size;
    }
    return body + o->tail + 3 * longest + (o->distractors + o->n_wanted) * FACT_BYTES +
           body / t->n + 64;
}

static void write_all(haystack *h, const haystack_recipe *o, const text *t, rng *r,
                      const fact *facts, int64_t body)
{
    const int64_t n = o->distractors + o->n_wanted;
    int64_t at = paragraph_after(t, (int64_t)rng_next_below(r, (uint64_t)t->n));
    int64_t done = 0; /* bytes of text written */
    int64_t next = 0; /* first fact not yet written */
    int64_t until = body;
    bool own = true;
    while (next < n || done < until) {
        for (; next < n && facts[next].place <= done; next++) {
            put_fact(h, &facts[next], own);
            if (done + o->tail > until)
                until = done + o->tail;
        }
        if (o->tail == 0 && next == n && done >= until)
            break; /* the question may follow a fact */
        const int64_t size = sentence(t, at);
        put(h, t->byte + at, size);
        own = t->byte[at + size - 1] == '\n';
        done += size;
        at += size;
        if (at >= t->n) {
            put(h, "\n", own && t->byte[t->n - 2] != '\n');
            at = 0;
        }
    }
    if (!own)
        put(h, "\n\n", 2);
}

int haystack_make(haystack *h, const haystack_recipe *o, const char *program)
{
    const int64_t n = o->distractors + o->n_wanted;
    const double room = (double)(o->tokens - FACT_TOKENS * n - 20) * TEXT_BYTES;
    memset(h, 0, sizeof *h);
    if (room < 2 * HAYSTACK_TAIL)
        return fail(program, "too few tokens for so many distractors",
                    "raise --tokens or lower --distractors");
    text t = {0};
    const int unread = read_text(program, o->file, &t);
    if (unread)
        return unread;
    const int64_t body = (int64_t)room - o->tail;
    fact *facts = calloc((size_t)n, sizeof facts[0]);
    h->byte = malloc((size_t)room_for(&t, o, body));
    const bool enough = facts && h->byte;
    if (enough) {
        rng r = rng_init(o->seed, 0);
        draw_facts(o, &r, body, facts, h);
        write_all(h, o, &t, &r, facts, body);
    }
    free(facts);
    free(t.byte);
    return enough ? 0 : fail(program, "no memory for the text", "lower --tokens");
}

void haystack_free(haystack *h)
{
    free(h->byte);
    h->byte = NULL;
}

int haystack_question(const haystack *h, int32_t wanted, char out[HAYSTACK_QUESTION])
{
    return snprintf(out, HAYSTACK_QUESTION,
                    "What is the passcode for %s? Answer:", h->fact[wanted].name);
}
