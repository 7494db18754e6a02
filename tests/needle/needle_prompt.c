/* needle_prompt: writes a long text with a fact hidden in it, and asks for the fact at the end.
 *
 *   needle_prompt --text FILE [--tokens N] [--depth PERCENT] [--seed N] [--distractors N]
 *
 * stdout: the text of haystack.h with one wanted fact; the last line is `What is the passcode for NAME? Answer:`
 * without a newline. stderr: `answer 123456 name NAME at BYTE of BYTES depth PERCENT facts N`, BYTE being where the
 * digits start. Depth 100 still leaves HAYSTACK_TAIL bytes of text before the question, so that the fact is never
 * among the last 128 tokens.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "haystack.h"

enum { MAX_FACTS = 4096, MAX_TOKENS = 1 << 24 };

static int fail(const char *what, const char *value)
{
    fprintf(stderr, "needle_prompt: %s: %s\n", what, value);
    return 2;
}

static int parse(int argc, char **argv, haystack_recipe *o)
{
    int64_t seed = (int64_t)o->seed;
    const struct {
        const char *name;
        int64_t lo, hi, *out;
    } number[] = {{"--tokens", 600, MAX_TOKENS, &o->tokens},
                  {"--depth", 0, 100, &o->depth[0]},
                  {"--seed", 0, INT64_MAX, &seed},
                  {"--distractors", 0, MAX_FACTS - 1, &o->distractors}};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc)
            return fail("no value", argv[i]);
        if (strcmp(argv[i], "--text") == 0) {
            o->file = argv[i + 1];
            continue;
        }
        size_t k = 0;
        while (k < sizeof number / sizeof number[0] && strcmp(argv[i], number[k].name) != 0)
            k++;
        if (k == sizeof number / sizeof number[0])
            return fail("no such option", argv[i]);
        if (!haystack_number(argv[i + 1], number[k].lo, number[k].hi, number[k].out))
            return fail("not a number in range", argv[i + 1]);
    }
    o->seed = (uint64_t)seed;
    return o->file ? 0 : fail("missing", "--text FILE");
}

int main(int argc, char **argv)
{
    haystack_recipe o = {.tokens = 8192,
                         .seed = 1,
                         .distractors = 60,
                         .tail = HAYSTACK_TAIL,
                         .n_wanted = 1,
                         .depth = {50}};
    haystack h = {0};
    char question[HAYSTACK_QUESTION];
    int bad = parse(argc, argv, &o);
    if (bad == 0)
        bad = haystack_make(&h, &o, "needle_prompt");
    if (bad)
        return bad;
    const int size = haystack_question(&h, 0, question);
    fwrite(h.byte, 1, (size_t)h.n, stdout);
    fwrite(question, 1, (size_t)size, stdout);
    fprintf(stderr,
            "answer %06" PRIu32 " name %s at %" PRId64 " of %" PRId64 " depth %" PRId64
            " facts %" PRId64 "\n",
            h.fact[0].code, h.fact[0].name, h.fact[0].answer_at, h.n + size, o.depth[0],
            o.distractors + 1);
    haystack_free(&h);
    return fflush(stdout) == 0 ? 0 : fail("cannot write", "stdout");
}
