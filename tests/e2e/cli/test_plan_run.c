/* kvspan plan against the memory that kvspan run has taken: the process's peak, over prompts that fill the context
 * and reach past a chunk, lies within a tenth of what was planned. Weights are equal to the byte. */
#include "prog.h"

#include <jansson.h>
#include <unistd.h>

static const char *k_random, *k_needle;

enum { MAX_WORD = 32 };

static int64_t at(const json_t *root, const char *a, const char *b)
{
    const json_t *v = json_object_get(root, a);
    v = b != NULL ? json_object_get(v, b) : v;
    if (!json_is_integer(v)) {
        fail_msg("no number %s %s", a, b != NULL ? b : "");
    }
    return json_integer_value(v);
}

/* The JSON of `kvspan COMMAND -m model --json - ...` with two lists of options. */
static json_t *told(const char *command, const char *model, const char *const *own,
                    const char *const *both)
{
    const char *word[MAX_WORD] = {command, "-m", model, "--json", "-"};
    int n = 5;
    for (const char *const *list = own; list != NULL; list = list == own ? both : NULL) {
        for (int i = 0; list[i] != NULL; i++) {
            assert_true(n < MAX_WORD - 1);
            word[n++] = list[i];
        }
    }
    prog p = prog_run(NULL, word);
    if (p.code != 0) {
        fail_msg("%s: exit code %d: %s", command, p.code, p.err);
    }
    json_t *root = json_loads(p.out, 0, NULL);
    assert_non_null(root);
    prog_free(&p);
    return root;
}

/* The first n bytes of the text that comes with the needle model, in a file of its own. */
static void write_prompt(char *path, size_t n)
{
    char from[512];
    snprintf(from, sizeof from, "%s/text.txt", k_needle);
    char *text = prog_read(from);
    assert_non_null(text);
    assert_true(strlen(text) > n);
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, n), n);
    close(fd);
    free(text);
}

/* ctx: what the prompt of n bytes nearly fills. */
static void compare(const char *model, size_t n, const char *ctx, const char *tp,
                    const char *const *both)
{
    char path[] = "/tmp/kvspan-memory-XXXXXX";
    write_prompt(path, n);
    const char *const run_own[] = {"-f", path,           "-n",   "4",  "--ctx",
                                   ctx,  "--ignore-eos", "--tp", tp,   NULL};
    const char *const plan_own[] = {"--ctx", ctx, "--tp", tp, "--gpus", tp, NULL};
    json_t *run = told("run", model, run_own, both);
    json_t *plan = told("plan", model, plan_own, both);
    unlink(path);
    const int64_t room = strtoll(ctx, NULL, 10) - at(run, "prompt_tokens", NULL);
    assert_in_range(room, 4, 128);
    assert_true(at(run, "prompt_tokens", NULL) > at(run, "chunk", NULL));
    assert_int_equal(at(run, "weight_bytes", NULL), at(plan, "process_bytes", "weights"));
    const int64_t total = at(plan, "process_bytes", "total");
    const int64_t peak = at(run, "peak_rss_bytes", NULL);
    const double share = (double)peak / (double)total;
    if (!(share > 0.9 && share < 1.1)) {
        fail_msg("%s, tp %s: a peak of %.1f MB, planned %.1f MB: weights %.1f, workspaces %.1f, "
                 "messages %.1f, cache %.1f",
                 model, tp, (double)peak / 1e6, (double)total / 1e6,
                 (double)at(plan, "process_bytes", "weights") / 1e6,
                 (double)at(plan, "process_bytes", "workspace") / 1e6,
                 (double)at(plan, "process_bytes", "messages") / 1e6,
                 (double)at(plan, "process_bytes", "cache") / 1e6);
    }
    json_decref(run);
    json_decref(plan);
}

#define OPTIONS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void the_needle_model_takes_what_is_planned(void **state)
{
    (void)state;
    compare(k_needle, 10000, "2560", "1", OPTIONS("--threads", "2"));
}

static void ranks_and_drafts_take_what_is_planned(void **state)
{
    (void)state;
    compare(k_random, 5400, "2560", "1", OPTIONS("--threads", "1"));
    compare(k_random, 5400, "2560", "1", OPTIONS("--threads", "1", "--kv", "f32", "--chunk", "1500"));
    compare(k_random, 5400, "2560", "2", OPTIONS("--threads", "1", "--dcp", "2", "--chunk", "600"));
    compare(k_random, 5400, "2560", "2",
            OPTIONS("--threads", "1", "--ep", "1", "--mtp", "3", "--chunk", "1500"));
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        return 2;
    }
    k_random = argv[2];
    k_needle = argv[3];
    prog_init(2, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_needle_model_takes_what_is_planned),
        cmocka_unit_test(ranks_and_drafts_take_what_is_planned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
