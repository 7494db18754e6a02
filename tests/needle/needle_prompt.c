/* needle_prompt: writes a long text with a fact hidden in it, and asks for the fact at the end.
 *
 *   needle_prompt --text FILE [--tokens N] [--depth PERCENT] [--seed N] [--distractors N]
 *
 * stdout: text of FILE from a random paragraph on (from the top again where it ends), cut at ends of
 * sentences; at such ends stand `The passcode for NAME is 123456.` for the wanted name and for the
 * distractors; the last line is `What is the passcode for NAME? Answer:` without a newline.
 * stderr: `answer 123456 name NAME at BYTE of BYTES depth PERCENT facts N`, BYTE being where the digits
 * start. The same arguments write the same bytes everywhere.
 *
 * --tokens is met within a few percent for models/needle: sizes in bytes go by TEXT_BYTES a token.
 * Depth 0 is before the first sentence; depth 100 still leaves TAIL_BYTES of text before the question,
 * so that the fact is never among the last 128 tokens. Names are three syllables of a list that
 * tools/needle/names.py shares; those for which 7a + 3b + 5c is a multiple of 8 were kept out of
 * training, and only those are used. Two fifths of the distractors differ from another name of the
 * text in one syllable.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"

enum { SYLLABLES = 48, TAIL_BYTES = 900, FACT_TOKENS = 19, MAX_FACTS = 4096, MAX_TOKENS = 1 << 24 };
static const double TEXT_BYTES =
    3.95; /* bytes of text a token                                    */

static const char *const syllable[SYLLABLES] = {
    "ba",  "bel", "bor", "cai", "dan", "del", "dor", "fal", "fen", "gar", "gil", "har",
    "hel", "ith", "jor", "kal", "kel", "kor", "lan", "lis", "lor", "mar", "mel", "mir",
    "nal", "nes", "nor", "oli", "pas", "pel", "qui", "ran", "rel", "ros", "sal", "sel",
    "tam", "ter", "tor", "ula", "van", "vel", "vir", "wen", "xan", "yor", "zan", "zel"};

typedef struct fact {
    int name[3];
    uint32_t
        code; /* 0..999999                                                                     */
    int64_t
        place; /* goes in at the first end of a sentence from this byte of the text on          */
    bool wanted;
} fact;

typedef struct options {
    const char *text;
    int64_t tokens;
    int64_t depth;
    int64_t seed;
    int64_t distractors;
} options;

typedef struct text {
    char *byte;
    int64_t n;
} text;

static int fail(const char *what, const char *value)
{
    fprintf(stderr, "needle_prompt: %s: %s\n", what, value);
    return 2;
}

static bool parse_int(const char *s, int64_t lo, int64_t hi, int64_t *out)
{
    char *end = NULL;
    const long long v = strtoll(s, &end, 10);
    *out = v;
    return end != s && *end == 0 && v >= lo && v <= hi;
}

static int parse(int argc, char **argv, options *o)
{
    const struct {
        const char *name;
        int64_t lo, hi, *out;
    } number[] = {{"--tokens", 600, MAX_TOKENS, &o->tokens},
                  {"--depth", 0, 100, &o->depth},
                  {"--seed", 0, INT64_MAX, &o->seed},
                  {"--distractors", 0, MAX_FACTS - 1, &o->distractors}};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc)
            return fail("no value", argv[i]);
        if (strcmp(argv[i], "--text") == 0) {
            o->text = argv[i + 1];
            continue;
        }
        size_t k = 0;
        while (k < sizeof number / sizeof number[0] && strcmp(argv[i], number[k].name) != 0)
            k++;
        if (k == sizeof number / sizeof number[0])
            return fail("no such option", argv[i]);
        if (!parse_int(argv[i + 1], number[k].lo, number[k].hi, number[k].out))
            return fail("not a number in range", argv[i + 1]);
    }
    return o->text ? 0 : fail("missing", "--text FILE");
}

/* Reads the whole file; the last byte becomes a newline. */
static int read_text(const char *path, text *t)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return fail("cannot open", path);
    const bool sized = fseek(f, 0, SEEK_END) == 0;
    const long n = sized ? ftell(f) : -1;
    if (n < 4096 || n > INT32_MAX) {
        fclose(f);
        return fail("not 4 KiB to 2 GiB of text", path);
    }
    rewind(f);
    t->n = n;
    t->byte = malloc((size_t)n);
    const bool whole = t->byte && fread(t->byte, 1, (size_t)n, f) == (size_t)n;
    fclose(f);
    if (!whole) {
        free(t->byte);
        return fail("cannot read", path);
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

static int by_place(const void *a, const void *b)
{
    const fact *x = a;
    const fact *y = b;
    if (x->place != y->place)
        return x->place < y->place ? -1 : 1;
    return (int)x->wanted -
           (int)y->wanted; /* one wanted fact: never equal where it matters       */
}

static int64_t draw_facts(const options *o, rng *r, int64_t body, fact *facts)
{
    const int64_t n = o->distractors + 1;
    for (int64_t i = 0; i < n; i++) {
        draw_name(r, facts, i, facts[i].name);
        facts[i].code = (uint32_t)rng_next_below(r, 1000000);
        facts[i].wanted = i == 0;
        facts[i].place = i == 0 ? body * o->depth / 100 : rng_next_range(r, 0, body);
    }
    qsort(facts, (size_t)n, sizeof facts[0], by_place);
    return n;
}

static void spell(const int name[3], char out[16])
{
    snprintf(out, 16, "%s%s%s", syllable[name[0]], syllable[name[1]], syllable[name[2]]);
    out[0] = (char)(out[0] - 'a' + 'A');
}

/* Bytes written so far and where the answer starts. */
typedef struct sink {
    int64_t n, answer_at;
} sink;

static void put(sink *s, const char *byte, int64_t n)
{
    fwrite(byte, 1, (size_t)n, stdout);
    s->n += n;
}

/* Inside a paragraph a fact starts with a space; between paragraphs it is one of its own. */
static void put_fact(sink *s, const fact *f, bool own)
{
    char name[16];
    char line[96];
    spell(f->name, name);
    const int n = snprintf(line, sizeof line, "%sThe passcode for %s is %06" PRIu32 ".%s",
                           own ? "" : " ", name, f->code, own ? "\n\n" : "");
    if (f->wanted)
        s->answer_at = s->n + n - (own ? 9 : 7);
    put(s, line, n);
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

static void write_prompt(const options *o, const text *t, rng *r, const fact *facts, int64_t n,
                         int64_t body)
{
    sink s = {0, 0};
    int64_t at = paragraph_after(t, (int64_t)rng_next_below(r, (uint64_t)t->n));
    int64_t done =
        0; /* bytes of text written                                                      */
    int64_t next =
        0; /* first fact not yet written                                                 */
    int64_t until = body;
    bool own = true;
    const fact *wanted = facts;
    while (next < n || done < until) {
        for (; next < n && facts[next].place <= done; next++) {
            put_fact(&s, &facts[next], own);
            wanted = facts[next].wanted ? &facts[next] : wanted;
            until = done + TAIL_BYTES > until ? done + TAIL_BYTES : until;
        }
        const int64_t size = sentence(t, at);
        put(&s, t->byte + at, size);
        own = t->byte[at + size - 1] == '\n';
        done += size;
        at += size;
        if (at >= t->n) {
            put(&s, "\n", own && t->byte[t->n - 2] != '\n');
            at = 0;
        }
    }
    char name[16];
    char line[64];
    spell(wanted->name, name);
    const int size = snprintf(line, sizeof line,
                              "%sWhat is the passcode for %s? Answer:", own ? "" : "\n\n", name);
    put(&s, line, size);
    fprintf(stderr,
            "answer %06" PRIu32 " name %s at %" PRId64 " of %" PRId64 " depth %" PRId64
            " facts %" PRId64 "\n",
            wanted->code, name, s.answer_at, s.n, o->depth, n);
}

int main(int argc, char **argv)
{
    options o = {.text = NULL, .tokens = 8192, .depth = 50, .seed = 1, .distractors = 60};
    const int bad = parse(argc, argv, &o);
    if (bad)
        return bad;
    const double room = (double)(o.tokens - FACT_TOKENS * (o.distractors + 1) - 20) * TEXT_BYTES;
    if (room < 2 * TAIL_BYTES)
        return fail("too few tokens for so many distractors",
                    "raise --tokens or lower --distractors");
    text t = {0};
    const int unread = read_text(o.text, &t);
    if (unread)
        return unread;
    fact *facts = calloc((size_t)o.distractors + 1, sizeof facts[0]);
    if (!facts) {
        free(t.byte);
        return fail("no memory for facts", "lower --distractors");
    }
    rng r = rng_init((uint64_t)o.seed, 0);
    const int64_t body = (int64_t)room - TAIL_BYTES;
    const int64_t n = draw_facts(&o, &r, body, facts);
    write_prompt(&o, &t, &r, facts, n, body);
    free(facts);
    free(t.byte);
    return fflush(stdout) == 0 ? 0 : fail("cannot write", "stdout");
}
