/* kvspan run at a terminal: a conversation, Ctrl-C in an answer and at the prompt, Ctrl-D. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "oracle/mkmodel.h"
#include "prog.h"

static const char *model;

typedef struct term {
    int fd;
    pid_t pid;
    char out[1 << 16]; /* all it has written */
    size_t n, seen;    /* seen: what former waits have passed over */
} term;

static void term_open_model(term *t, const char *dir, const char *max_new, const char *cpu,
                            const char *system, const char *reuse)
{
    *t = (term){.fd = posix_openpt(O_RDWR | O_NOCTTY)};
    assert_true(t->fd >= 0);
    assert_int_equal(grantpt(t->fd), 0);
    assert_int_equal(unlockpt(t->fd), 0);
    t->pid = fork();
    assert_true(t->pid >= 0);
    if (t->pid == 0) {
        setsid();
        const int s = open(ptsname(t->fd), O_RDWR); /* becomes the controlling terminal */
        dup2(s, 0);
        dup2(s, 1);
        dup2(s, 2);
        setenv("TERM", "dumb", 1);
        execl(prog_path, "kvspan", "run", "-m", dir, "-n", max_new, "--ignore-eos", "--tp", "1",
              "--cpu", cpu, "--system", system, "--reuse", reuse, "--stats", (char *)NULL);
        _exit(99);
    }
}

static void term_open(term *t, const char *max_new, const char *cpu, const char *system,
                      const char *reuse)
{
    term_open_model(t, model, max_new, cpu, system, reuse);
}

/* Reads until `text` has come behind what was seen; the output up to it counts as seen. */
static void wait_for(term *t, const char *text)
{
    for (int ms = 0; ms < 60000;) {
        t->out[t->n] = '\0';
        const char *at = strstr(t->out + t->seen, text);
        if (at != NULL) {
            t->seen = (size_t)(at - t->out) + strlen(text);
            return;
        }
        struct pollfd p = {.fd = t->fd, .events = POLLIN};
        if (poll(&p, 1, 100) <= 0) {
            ms += 100;
            continue;
        }
        const ssize_t k = read(t->fd, t->out + t->n, sizeof t->out - 1 - t->n);
        if (k <= 0) {
            break;
        }
        for (ssize_t i = 0; i < k; i++) { /* NULs are no text */
            t->out[t->n + (size_t)i] =
                t->out[t->n + (size_t)i] == '\0' ? '?' : t->out[t->n + (size_t)i];
        }
        t->n += (size_t)k;
    }
    kill(t->pid, SIGKILL);
    fail_msg("no \"%s\" in \"%s\"", text, t->out + t->seen);
}

static void type(const term *t, const char *text)
{
    assert_int_equal(write(t->fd, text, strlen(text)), (ssize_t)strlen(text));
}

static void ends_with(term *t, int code)
{
    int status = 0;
    char rest[4096];
    struct pollfd p = {.fd = t->fd, .events = POLLIN};
    int ready = 0;
    while ((ready = poll(&p, 1, 30000)) > 0 && read(t->fd, rest, sizeof rest) > 0) {
    } /* EIO when the program has gone */
    if (ready <= 0) {
        kill(t->pid, SIGKILL);
    }
    while (waitpid(t->pid, &status, 0) < 0) {
        assert_int_equal(errno, EINTR);
    }
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), code);
    close(t->fd);
}

static void turns_follow_each_other_until_the_input_ends(void **state)
{
    (void)state;
    static term t;
    term_open(&t, "6", "ref", "Be brief.", "on");
    wait_for(&t, "Ctrl-D ends.");
    wait_for(&t, "> ");
    type(&t, "Hello\r");
    wait_for(&t, "\n");
    wait_for(&t, "\n> ");
    type(&t, "\r"); /* nothing: asked again */
    wait_for(&t, "> ");
    type(&t, "And again?\r");
    wait_for(&t, "\n> ");
    type(&t, "\x04");
    ends_with(&t, 0);
}

/* Reads up to `end` and returns what came before it, without what was seen. */
static const char *before(term *t, const char *end)
{
    static char text[sizeof t->out];
    const size_t from = t->seen;
    wait_for(t, end);
    const size_t n = t->seen - from;
    memcpy(text, t->out + from, n);
    text[n] = '\0';
    return text;
}

static void a_turn_reads_only_what_is_new(void **state)
{
    (void)state;
    static term t;
    char system[730]; /* some 550 tokens */
    for (size_t i = 0; i < sizeof system; i++) {
        system[i] = i % 7 == 6 ? ' ' : (char)('a' + (int)(i * i % 23));
    }
    system[sizeof system - 1] = '\0';
    for (int off = 0; off < 2; off++) {
        term_open(&t, "6", "avx512bf16", system, off ? "off" : "on");
        wait_for(&t, "Ctrl-D ends.");
        wait_for(&t, "> ");
        type(&t, "Hello\r");
        wait_for(&t, "\n");
        assert_null(strstr(before(&t, "\nmemory"), "in the cache")); /* before the last line */
        wait_for(&t, "\n> ");
        type(&t, "And again?\r");
        wait_for(&t, "\n");
        const char *second = before(&t, "\nmemory");
        assert_non_null(strstr(second, "prompt "));
        assert_true((strstr(second, "; 512 before them were in the cache") != NULL) == (off == 0));
        wait_for(&t, "\n> ");
        type(&t, "\x04");
        ends_with(&t, 0);
    }
}

static void an_interrupt_stops_the_answer_and_not_the_program(void **state)
{
    (void)state;
    static term t;
    term_open(&t, "2000", "ref", "Be brief.", "on");
    wait_for(&t, "Ctrl-D ends.");
    wait_for(&t, "> ");
    type(&t, "Hello\r");
    wait_for(&t, "\n");
    const struct timespec a_moment = {.tv_nsec = 400000000};
    nanosleep(&a_moment, NULL);
    type(&t, "\x03");
    wait_for(&t, "\n> ");
    type(&t, "half a line");
    wait_for(&t, "half a line");
    nanosleep(&a_moment, NULL);
    type(&t, "\x03"); /* at the prompt it drops the line */
    wait_for(&t, "> ");
    type(&t, "\x04");
    ends_with(&t, 0);
}

/* The moment between the prompt and the wait for a key is short: several tries. */
static void a_key_right_behind_the_prompt_counts(void **state)
{
    (void)state;
    static term t;
    for (int i = 0; i < 12; i++) {
        term_open(&t, "6", "ref", "Be brief.", "on");
        wait_for(&t, "\n> ");
        if (i % 2 == 0) {
            type(&t, "\x03");
            wait_for(&t, "> ");
        }
        type(&t, "\x04");
        ends_with(&t, 0);
    }
}

static void a_model_without_a_known_form_is_refused_before_the_first_turn(void **state)
{
    (void)state;
    static term t;
    char dir[256];
    char msg[256];
    if (mkmodel_temp_text("glm47", "bf16", model, dir, sizeof dir, msg, sizeof msg) != 0) {
        fail_msg("%s", msg);
    }
    term_open_model(&t, dir, "6", "ref", "Be brief.", "on");
    wait_for(&t, "standard input is a terminal: no form of conversation is known for");
    assert_null(strstr(t.out, "> ")); /* nothing was asked */
    ends_with(&t, 1);
    mkmodel_remove(dir);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s PROGRAM MODEL\n", argv[0]);
        return 2;
    }
    prog_init(2, argv);
    model = argv[2];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(turns_follow_each_other_until_the_input_ends),
        cmocka_unit_test(a_turn_reads_only_what_is_new),
        cmocka_unit_test(a_key_right_behind_the_prompt_counts),
        cmocka_unit_test(a_model_without_a_known_form_is_refused_before_the_first_turn),
        cmocka_unit_test(an_interrupt_stops_the_answer_and_not_the_program),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
