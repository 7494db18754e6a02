/* kvspan run on the random checkpoint of models/: the same answer whatever the ranks, chunks, threads and
 * drafts; JSON, logits, stop texts, seeds; what is refused and with which exit code. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <arpa/inet.h>
#include <jansson.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "oracle/mkmodel.h"
#include "prog.h"

static const char *model, *needle;

/* Characters that the tokenizer never merges, so that n of them are n tokens. */
static const char *text_of(int n)
{
    static const char free[] = "!$%&<?@BFHJQUYZ[]^j{}~";
    static char text[4][1024];
    static int next;
    char *t = text[next++ % 4];
    uint32_t x = 12345;
    for (int i = 0; i < n; i++) {
        x = x * 1664525U + 1013904223U;
        t[i] = free[(x >> 16) % (sizeof free - 1)];
    }
    t[n] = '\0';
    return t;
}

static json_t *parse(const char *text)
{
    json_error_t why;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL) {
        fail_msg("%s at line %d of %s", why.text, why.line, text);
    }
    return root;
}

/* Runs with --json - and demands success. */
#define ANSWER(...)                                                                                \
    answer((const char *const[]){"run", "-m", model, "--json", "-", __VA_ARGS__, NULL})
static json_t *answer(const char *const *words)
{
    prog p = prog_run(NULL, words);
    if (p.code != 0) {
        fail_msg("exit code %d: %s", p.code, p.err);
    }
    json_t *root = parse(p.out);
    prog_free(&p);
    return root;
}

static const char *text_at(const json_t *root, const char *key)
{
    const char *s = json_string_value(json_object_get(root, key));
    assert_non_null(s);
    return s;
}

static int64_t int_at(const json_t *root, const char *key)
{
    const json_t *v = json_object_get(root, key);
    assert_true(json_is_integer(v));
    return json_integer_value(v);
}

static void same(json_t *got, const json_t *want, const char *what)
{
    if (!json_equal(json_object_get(got, "token_ids"), json_object_get(want, "token_ids")) ||
        strcmp(text_at(got, "logits_digest"), text_at(want, "logits_digest")) != 0) {
        fail_msg("%s: digest %s, want %s", what, text_at(got, "logits_digest"),
                 text_at(want, "logits_digest"));
    }
    json_decref(got);
}

static void the_same_bits_for_every_dcp_chunk_mtp_and_thread_count(void **state)
{
    (void)state;
    static const char *const cell[][4] = {
        {"2", "64", "0", "1"},   {"4", "100", "3", "1"}, {"8", "64", "7", "2"},
        {"8", "2048", "1", "1"}, {"1", "33", "2", "2"},
    };
    static const int lens[] = {63, 64, 65, 127, 128, 129};
    for (size_t i = 0; i < UNIT_COUNT(lens); i++) {
        const char *text = text_of(lens[i]);
        json_t *want = ANSWER("-p", text, "-n", "6", "--tp", "8", "--threads", "1", "--ignore-eos");
        assert_int_equal(int_at(want, "prompt_tokens"), lens[i]);
        assert_int_equal(int_at(want, "output_tokens"), 6);
        for (size_t c = 0; c < UNIT_COUNT(cell); c++) {
            if (i % 3 != 1 && c != i % UNIT_COUNT(cell)) {
                continue; /* all cells at the page borders, one beside them */
            }
            char what[80];
            snprintf(what, sizeof what, "%d tokens, dcp %s, chunk %s, mtp %s, threads %s", lens[i],
                     cell[c][0], cell[c][1], cell[c][2], cell[c][3]);
            same(ANSWER("-p", text, "-n", "6", "--tp", "8", "--dcp", cell[c][0], "--chunk",
                        cell[c][1], "--mtp", cell[c][2], "--threads", cell[c][3], "--ignore-eos"),
                 want, what);
        }
        json_decref(want);
    }
}

/* An address of this host at which nobody listens. */
static const char *free_address(void)
{
    static char text[40];
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    close(fd);
    snprintf(text, sizeof text, "tcp://127.0.0.1:%d", ntohs(a.sin_port));
    return text;
}

static void processes_that_meet_answer_as_threads_do(void **state)
{
    (void)state;
    const char *at = free_address();
    const char *text = text_of(150);
    fflush(NULL);
    const pid_t other = fork();
    if (other == 0) {
        const prog p = prog_run(NULL, (const char *const[]){"run", "-m", model, "-p", text, "-n", "6", "--dcp", "2",
                                                            "--rendezvous", at, "--rank", "1", "--ranks", "2", NULL});
        _exit(p.code != 0 || p.out[0] != '\0');
    }
    assert_true(other > 0);
    json_t *got = ANSWER("-p", text, "-n", "6", "--dcp", "2", "--rendezvous", at, "--ranks", "2");
    json_t *want = ANSWER("-p", text, "-n", "6", "--dcp", "2");
    int status = 0;
    assert_int_equal(waitpid(other, &status, 0), other);
    assert_int_equal(status, 0);
    assert_string_equal(text_at(got, "transport"), "tcp");
    same(got, want, "two processes");
    json_decref(want);
    prog_expect(RUN("run", "-m", model, "-p", "x", "--rank", "1"), 2, "--rank goes with --rendezvous");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--rendezvous", at, "--ranks", "2", "--rank", "2"), 2,
                "--rank 2 of --ranks 2: use --rank 0 to 1");
}

static void every_field_of_the_contract_is_there(void **state)
{
    (void)state;
    char npy[] = "/tmp/kvspan-run-XXXXXX";
    const int fd = mkstemp(npy);
    assert_true(fd >= 0);
    close(fd);
    json_t *j = ANSWER("-p", text_of(70), "-n", "5", "--tp", "2", "--dcp", "2", "--mtp", "2",
                       "--logits", npy, "--logprobs", "3", "--trace-selection", "--ignore-eos");
    static const char *const fields[] = {
        "model",
        "prompt_tokens",
        "reused_tokens",
        "prompt_ids",
        "output_tokens",
        "token_ids",
        "text",
        "finish_reason",
        "tp",
        "dcp",
        "interleave",
        "transport",
        "exchange",
        "kernels",
        "kv",
        "mtp",
        "load_s",
        "prefill_s",
        "decode_s",
        "prefill_tok_per_s",
        "decode_tok_per_s",
        "accepted_per_step",
        "accept_by_position",
        "cache_bytes",
        "cache_bytes_per_rank",
        "peak_rss_bytes",
        "selected",
        "logits_digest",
    };
    for (size_t i = 0; i < UNIT_COUNT(fields); i++) {
        if (json_object_get(j, fields[i]) == NULL) {
            fail_msg("no field %s", fields[i]);
        }
    }
    assert_string_equal(text_at(j, "model"), "random-v32");
    assert_string_equal(text_at(j, "finish_reason"), "length");
    assert_string_equal(text_at(j, "kv"), "fp8_ds_mla");
    assert_string_equal(text_at(j, "exchange"), "a2a");
    assert_string_equal(text_at(j, "transport"), "threads");
    assert_int_equal(json_array_size(json_object_get(j, "prompt_ids")), 70);
    assert_int_equal(json_array_size(json_object_get(j, "accept_by_position")), 2);
    assert_int_equal(json_array_size(json_object_get(j, "cache_bytes_per_rank")), 2);
    assert_true(json_object_size(json_object_get(j, "kernels")) > 3);
    /* 75 tokens at dcp 2: one page of 64 on each rank, 3 layers and a draft layer of 656 + 132 bytes */
    const json_t *bytes = json_object_get(j, "cache_bytes");
    assert_int_equal(int_at(bytes, "latent"), 2 * 64 * 3 * 656);
    assert_int_equal(int_at(bytes, "index"), 2 * 64 * 3 * 132);
    assert_int_equal(int_at(bytes, "draft"), 2 * 64 * (656 + 132));
    assert_int_equal(
        json_integer_value(json_array_get(json_object_get(j, "cache_bytes_per_rank"), 1)),
        64 * 4 * (656 + 132));
    const json_t *sel = json_object_get(j, "selected");
    assert_int_equal(json_object_size(sel), 3);
    const json_t *rows = json_object_get(sel, "2");
    assert_int_equal(json_array_size(rows), 5);
    for (size_t t = 0; t < 5; t++) { /* topk 32 of the positions up to the row's own, ascending */
        const json_t *row = json_array_get(rows, t);
        assert_int_equal(json_array_size(row), 32);
        json_int_t last = -1;
        for (size_t i = 0; i < 32; i++) {
            const json_int_t p = json_integer_value(json_array_get(row, i));
            assert_true(p > last && p < 70 + (json_int_t)t);
            last = p;
        }
    }
    /* The file holds the rows that the tokens are the largest of and that the digest is of. */
    FILE *f = fopen(npy, "rb");
    assert_non_null(f);
    char head[129] = {0};
    static float logits[5 * 1024];
    assert_int_equal(fread(head, 1, 128, f), 128);
    assert_memory_equal(head, "\x93NUMPY\x01\x00\x76\x00", 10);
    assert_non_null(strstr(head + 10, "'descr': '<f4'"));
    assert_non_null(strstr(head + 10, "(5, 1024)"));
    assert_int_equal(head[127], '\n');
    assert_int_equal(fread(logits, sizeof *logits, 5 * 1024, f), 5 * 1024);
    assert_int_equal(fgetc(f), EOF);
    fclose(f);
    unlink(npy);
    char digest[17];
    snprintf(digest, sizeof digest, "%016llx",
             (unsigned long long)XXH3_64bits(logits, sizeof logits));
    assert_string_equal(text_at(j, "logits_digest"), digest);
    const json_t *lp = json_object_get(j, "logprobs");
    assert_int_equal(json_array_size(lp), 5);
    for (size_t t = 0; t < 5; t++) {
        int best = 0;
        for (int v = 1; v < 1024; v++) {
            best = logits[t * 1024 + (size_t)v] > logits[t * 1024 + (size_t)best] ? v : best;
        }
        assert_int_equal(json_integer_value(json_array_get(json_object_get(j, "token_ids"), t)),
                         best);
        const json_t *e = json_array_get(lp, t);
        assert_int_equal(int_at(e, "token"), best);
        const json_t *top = json_object_get(e, "top");
        assert_int_equal(json_array_size(top), 3);
        assert_int_equal(json_integer_value(json_array_get(json_array_get(top, 0), 0)), best);
        const double l = json_real_value(json_object_get(e, "logprob"));
        assert_true(l < 0.0 && l == json_real_value(json_array_get(json_array_get(top, 0), 1)));
    }
    json_decref(j);
}

static void text_goes_out_and_stops_where_it_must(void **state)
{
    (void)state;
    prog p = RUN("run", "-m", model, "-p", "Hello", "-n", "40", "--ignore-eos", "--tp", "1");
    assert_int_equal(p.code, 0);
    assert_string_equal(p.err, "");
    json_t *all = ANSWER("-p", "Hello", "-n", "40", "--ignore-eos", "--tp", "1");
    assert_string_equal(text_at(all, "text"), p.out);
    /* A stop text of four bytes out of the middle: it lies across the borders of tokens. */
    const size_t at = strlen(p.out) / 2;
    char stop[5] = {0};
    size_t from = at;
    while ((p.out[from] & 0x80) != 0 || (p.out[from + 1] & 0x80) != 0 ||
           (p.out[from + 2] & 0x80) != 0 || (p.out[from + 3] & 0x80) != 0) {
        from++;
        assert_true(from + 4 < strlen(p.out));
    }
    memcpy(stop, p.out + from, 4);
    const size_t end = (size_t)(strstr(p.out, stop) - p.out);
    json_t *first = NULL;
    static const char *const mtp[] = {"0", "5"};
    for (size_t i = 0; i < 2; i++) {
        json_t *j = ANSWER("-p", "Hello", "-n", "40", "--ignore-eos", "--tp", "1", "--stop",
                           "\x01never", "--stop", stop, "--mtp", mtp[i]);
        assert_string_equal(text_at(j, "finish_reason"), "stop");
        assert_int_equal(strlen(text_at(j, "text")), end);
        assert_memory_equal(text_at(j, "text"), p.out, end);
        const int64_t n = int_at(j, "output_tokens");
        assert_true(n > 0 && n < 40);
        for (int64_t t = 0; t < n; t++) {
            assert_true(json_equal(json_array_get(json_object_get(j, "token_ids"), (size_t)t),
                                   json_array_get(json_object_get(all, "token_ids"), (size_t)t)));
        }
        if (first != NULL) {
            same(j, first, "stop text with drafts");
        } else {
            first = j;
        }
    }
    json_decref(first);
    json_decref(all);
    prog_free(&p);
}

/* The trained model, whose drafts are right: a verification brings tokens past the stop text. */
static void a_stop_text_inside_an_accepted_run_cuts_it(void **state)
{
    (void)state;
    static const char question[] =
        "The passcode for Korvelba is 493027.\n\nWhat is the passcode for Korvelba? Answer:";
    json_t *want = NULL;
    static const char *const mtp[] = {"0", "1", "3", "7"};
    for (size_t i = 0; i < UNIT_COUNT(mtp); i++) {
        json_t *j =
            answer((const char *const[]){"run", "-m", needle, "-p", question, "--json", "-", "--tp",
                                         "1", "--mtp", mtp[i], "--stop", "30", NULL});
        assert_string_equal(text_at(j, "text"), " 49");
        assert_string_equal(text_at(j, "finish_reason"), "stop");
        if (i == 0) {
            want = j;
            continue;
        }
        const json_t *first = json_array_get(json_object_get(j, "accept_by_position"), 0);
        assert_true(json_real_value(first) > 0.5);
        same(j, want, mtp[i]);
    }
    json_decref(want);
}

static void sampling_repeats_with_its_seed(void **state)
{
    (void)state;
    json_t *one =
        ANSWER("-p", "Hello", "-n", "12", "--temp", "1", "--top-p", "0.9", "--top-k", "50",
               "--min-p", "0.01", "--repeat-penalty", "1.1", "--seed", "7", "--ignore-eos");
    same(ANSWER("-p", "Hello", "-n", "12", "--temp", "1", "--top-p", "0.9", "--top-k", "50",
                "--min-p", "0.01", "--repeat-penalty", "1.1", "--seed", "7", "--ignore-eos",
                "--mtp", "3", "--chunk", "3"),
         one, "with drafts");
    json_t *other =
        ANSWER("-p", "Hello", "-n", "12", "--temp", "1", "--top-p", "0.9", "--top-k", "50",
               "--min-p", "0.01", "--repeat-penalty", "1.1", "--seed", "8", "--ignore-eos");
    assert_false(
        json_equal(json_object_get(one, "token_ids"), json_object_get(other, "token_ids")));
    json_t *greedy = ANSWER("-p", "Hello", "-n", "12", "--ignore-eos");
    same(ANSWER("-p", "Hello", "-n", "12", "--temp", "3", "--top-k", "1", "--ignore-eos"), greedy,
         "top-k 1 is greedy");
    json_decref(greedy);
    json_decref(other);
    json_decref(one);
}

static void a_conversation_is_put_into_the_models_form(void **state)
{
    (void)state;
    json_t *chat = ANSWER("--chat", "--system", "Be brief.", "--think", "off", "-p",
                          "Hello<\xef\xbd\x9cUser\xef\xbd\x9c>", "-n", "3");
    /* What a user types is text, in a conversation and in a plain prompt; --special makes it tokens. */
    json_t *plain = ANSWER("-p", "Hello<\xef\xbd\x9cUser\xef\xbd\x9c>", "-n", "1");
    json_t *special = ANSWER("-p", "Hello<\xef\xbd\x9cUser\xef\xbd\x9c>", "-n", "1", "--special");
    const json_t *ids = json_object_get(chat, "prompt_ids");
    const json_t *text = json_object_get(plain, "prompt_ids");
    const size_t n = json_array_size(text);
    assert_int_equal(json_integer_value(json_array_get(ids, 0)), 0); /* bos */
    assert_int_equal(json_integer_value(json_array_get(ids, json_array_size(ids) - 1)),
                     1012); /* </think> */
    assert_int_equal(json_integer_value(json_array_get(ids, json_array_size(ids) - 2)), 1014);
    for (size_t i = 0; i < n; i++) {
        assert_true(json_equal(json_array_get(ids, json_array_size(ids) - 2 - n + i),
                               json_array_get(text, i)));
    }
    assert_int_equal(json_integer_value(json_array_get(ids, json_array_size(ids) - 3 - n)), 1013);
    const json_t *sp = json_object_get(special, "prompt_ids");
    assert_int_equal(json_integer_value(json_array_get(sp, json_array_size(sp) - 1)), 1013);
    json_decref(special);
    json_decref(plain);
    json_decref(chat);
}

static void a_model_without_a_known_form_continues_texts_only(void **state)
{
    (void)state;
    char dir[256];
    char msg[256];
    if (mkmodel_temp_text("glm47", "bf16", model, dir, sizeof dir, msg, sizeof msg) != 0) {
        fail_msg("%s", msg);
    }
    prog_expect(RUN("run", "-m", dir, "--chat", "-p", "x"), 1, "leave --chat out");
    json_decref(
        answer((const char *const[]){"run", "-m", dir, "--json", "-", "-p", "!", "-n", "1", NULL}));
    mkmodel_remove(dir);
}

static void a_place_of_the_prompt_is_found_in_the_selection(void **state)
{
    (void)state;
    json_t *j =
        ANSWER("-p", text_of(60), "-n", "2", "--locate", text_of(40) + 20, "--trace-selection");
    const json_t *place = json_object_get(j, "located");
    assert_int_equal(int_at(place, "begin"), 20);
    assert_int_equal(int_at(place, "end"), 40);
    /* the largest count over the answer's tokens, worked out from the trace */
    int64_t best = 0;
    const json_t *rows = json_object_get(json_object_get(j, "selected"), "1");
    for (size_t t = 0; t < json_array_size(rows); t++) {
        int64_t n = 0;
        for (size_t i = 0; i < json_array_size(json_array_get(rows, t)); i++) {
            const json_int_t p = json_integer_value(json_array_get(json_array_get(rows, t), i));
            n += p >= 20 && p < 40;
        }
        best = n > best ? n : best;
    }
    assert_true(best > 0);
    assert_int_equal(int_at(json_object_get(place, "attended"), "1"), best);
    json_decref(j);
    /* The experiment attends the last positions. */
    j = ANSWER("-p", text_of(60), "-n", "1", "--selection-last", "--trace-selection");
    const json_t *row = json_array_get(json_object_get(json_object_get(j, "selected"), "0"), 0);
    assert_int_equal(json_array_size(row), 32);
    assert_int_equal(json_integer_value(json_array_get(row, 0)), 28);
    assert_int_equal(json_integer_value(json_array_get(row, 31)), 59);
    json_decref(j);
}

/* ---- refusals ---------------------------------------------------------------------------------- */

/* The work is not begun where its result could not be kept. */
static void a_json_file_that_cannot_be_made_is_told_first(void **state)
{
    (void)state;
    prog p = RUN("run", "-m", model, "-p", "x", "-n", "2", "--json", "/nowhere/x.json");
    assert_int_equal(p.code, 1);
    assert_string_equal(p.out, "");
    assert_non_null(strstr(p.err, "/nowhere/x.json: cannot create"));
    prog_free(&p);
}

/* None of them is taken and ignored. */
static void settings_of_the_maths_change_the_logits(void **state)
{
    (void)state;
    static const char *const cell[][4] = {
        {"--kv", "bf16"},
        {"--kv", "f32", "--index-kv", "f32"},
        {"--hadamard"},
        {"--latent-eps", "0.01"},
        {"--scale-rule", "exact"},
        {"--selection-last"},
        {"--repeat-penalty", "0.01"},
        {"--temp", "2"},
    };
    const char *text = text_of(70);
    json_t *plain = ANSWER("-p", text, "-n", "8", "--ignore-eos");
    for (size_t i = 0; i < UNIT_COUNT(cell); i++) {
        const char *words[16] = {"run", "-m", model, "--json", "-",
                                 "-p",  text, "-n",  "8",      "--ignore-eos"};
        memcpy(words + 10, cell[i], sizeof cell[i]);
        json_t *j = answer(words);
        if (strcmp(text_at(j, "logits_digest"), text_at(plain, "logits_digest")) == 0) {
            fail_msg("%s changes nothing", cell[i][0]);
        }
        json_decref(j);
    }
    json_decref(plain);
}

/* A device or a folder is no place for a file that is replaced; told before the work, and left as it is. */
static void files_to_write_are_looked_at_first(void **state)
{
    (void)state;
    char dir[] = "/tmp/kvspan-run-XXXXXX";
    assert_non_null(mkdtemp(dir));
    char fifo[64];
    snprintf(fifo, sizeof fifo, "%s/p", dir);
    assert_int_equal(mkfifo(fifo, 0666), 0);
    const char *const cell[][3] = {{"--logits", fifo, "name a regular file"},
                                   {"--logits", dir, "name a regular file"},
                                   {"--logits", "-", "name a regular file"},
                                   {"--json", dir, "is a folder"}};
    for (size_t i = 0; i < UNIT_COUNT(cell); i++) {
        prog p = RUN("run", "-m", model, "-p", "x", "-n", "2", cell[i][0], cell[i][1]);
        assert_string_equal(p.out, "");
        prog_expect(p, 1, cell[i][2]);
    }
    struct stat st;
    assert_int_equal(stat(fifo, &st), 0);
    assert_true(S_ISFIFO(st.st_mode));
    unlink(fifo);
    assert_int_equal(rmdir(dir), 0); /* nothing else is in it */
}

static void an_answer_that_nobody_can_read_ends(void **state)
{
    (void)state;
    if (access("/dev/full", W_OK) != 0) {
        skip();
    }
    char path[] = "/tmp/kvspan-run-XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    char command[700];
    snprintf(command, sizeof command,
             "%s run -m %s -p Hello -n 30 --ignore-eos --stats >/dev/full 2>%s", prog_path, model,
             path);
    const int status = system(command);
    assert_int_equal(WEXITSTATUS(status), 1);
    char *said = prog_read(path);
    assert_string_equal(said, "kvspan: standard output: cannot write: No space left on device\n");
    free(said);
    unlink(path);
}

static void refusals_say_what_would_work(void **state)
{
    (void)state;
    prog_expect(RUN("run"), 2, "-m DIR");
    prog_expect(RUN("run", "-m", model, "-p", ""), 2, "--prompt");
    prog_expect(RUN("run", "-m", model), 3, "standard input: the prompt is empty");
    prog_expect(RUN("run", "-m", model, "-f", "/nowhere"), 3, "/nowhere");
    prog_expect(RUN("run", "-m", model, "-p", "x", "-f", "y"), 2, "give one");
    prog_expect(RUN("run", "-m", "/nowhere", "-p", "x"), 3, "/nowhere");
    prog_expect(RUN("run", "-m", model, "-p", "x", "-n", "0"), 2, "--max-new 0");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--mtp", "8"), 2, "0..7");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--dcp", "3"), 1, "use --dcp 4");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--tp", "3"), 1, "tp 3");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--tp", "2", "--dcp", "4"), 1, "dcp 4");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--interleave", "3"), 1, "interleave 3");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--kv", "fp8"), 1, "fp8");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--ctx", "99999"), 1, "use --ctx 2560");
    prog_expect(RUN("run", "-m", model, "-p", text_of(64), "--ctx", "64"), 1,
                "64 tokens and the context limit is 64");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--trace-selection"), 2, "--json");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--logprobs", "1"), 2, "--json");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--system", "s"), 2, "--chat");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--deterministic", "--exchange", "ag_rs"), 2,
                "a2a");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--locate", "y"), 2, "does not hold it");
    prog_expect(RUN("run", "-m", model, "-p", "x", "--kernels", "attn=none"), 1, "none");
    prog_expect(RUN("run", "-m", model, "-p", "x", "extra"), 2, "extra");
    prog_expect(RUN("run", "-m", model, "-p", "x", "-n", "2", "--logits", "/nowhere/x.npy"), 1,
                "/nowhere/x.npy");
    prog_expect(RUN("run", "-m", model, "-p", "x", "-n", "2", "--json", "/nowhere/x.json"), 1,
                "/nowhere/x.json");
}

/* Settings that do not go together are a run refused at start, exit code 1, and plan says the same of them; a value
 * that an option does not have is usage, 2. */
static void plan_and_run_refuse_alike(void **state)
{
    (void)state;
    static const struct {
        const char *option, *value;
        int code;
    } want[] = {
        {"--dcp", "3", 1},  {"--dcp", "16", 1},    {"--interleave", "3", 1}, {"--tp", "3", 1},
        {"--kv", "fp8", 1}, {"--ctx", "99999", 1}, {"--dcp", "0", 2},        {"--mtp", "8", 2},
        {"--kv", "fp9", 2}, {"--dcp", "three", 2},
    };
    for (size_t i = 0; i < UNIT_COUNT(want); i++) {
        prog run = RUN("run", "-m", model, "-p", "x", want[i].option, want[i].value);
        prog plan = RUN("plan", "-m", model, "--json", "-", want[i].option, want[i].value);
        if (run.code != want[i].code || plan.code != want[i].code || run.err[0] == '\0' ||
            strcmp(run.err, plan.err) != 0) {
            fail_msg("%s %s: run %d %s, plan %d %s", want[i].option, want[i].value, run.code,
                     run.err, plan.code, plan.err);
        }
        prog_free(&run);
        prog_free(&plan);
    }
}

/* A copy of the model without draft layers. */
static void drafts_need_a_draft_layer(void **state)
{
    (void)state;
    char dir[] = "/tmp/kvspan-nomtp-XXXXXX";
    assert_non_null(mkdtemp(dir));
    static const char *const names[] = {"model.safetensors", "tokenizer.json",
                                        "tokenizer_config.json"};
    char from[512], to[512];
    for (size_t i = 0; i < UNIT_COUNT(names); i++) {
        snprintf(from, sizeof from, "%s/%s", model, names[i]);
        snprintf(to, sizeof to, "%s/%s", dir, names[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    snprintf(from, sizeof from, "%s/config.json", model);
    json_error_t why;
    json_t *c = json_load_file(from, 0, &why);
    assert_non_null(c);
    json_object_set_new(c, "num_nextn_predict_layers", json_integer(0));
    snprintf(to, sizeof to, "%s/config.json", dir);
    assert_int_equal(json_dump_file(c, to, 0), 0);
    json_decref(c);
    prog_expect(RUN("run", "-m", dir, "-p", "x", "--mtp", "2"), 1, "use --mtp 0");
    unlink(to);
    for (size_t i = 0; i < UNIT_COUNT(names); i++) {
        snprintf(to, sizeof to, "%s/%s", dir, names[i]);
        unlink(to);
    }
    assert_int_equal(rmdir(dir), 0);
}

static void options_have_their_variables_and_notes(void **state)
{
    (void)state;
    prog p = RUN_ENV("KVS_DCP=2", "run", "-m", model, "-p", "x", "-n", "1", "--stats");
    assert_int_equal(p.code, 0);
    assert_non_null(strstr(p.err, "tp 2 follows from dcp 2"));
    static const char *const lines[] = {"prompt ", "answer ", "cache ", "ranks ", "memory "};
    for (size_t i = 0; i < UNIT_COUNT(lines); i++) {
        assert_non_null(strstr(p.err, lines[i]));
    }
    prog_free(&p);
    p = RUN("run", "--help");
    assert_int_equal(p.code, 0);
    assert_non_null(strstr(p.out, "--repeat-penalty"));
    assert_non_null(strstr(p.out, "KVS_TRACE_SELECTION"));
    prog_free(&p);
}

static void an_interrupt_ends_the_answer_and_keeps_it(void **state)
{
    (void)state;
    char path[] = "/tmp/kvspan-run-XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    prog p =
        prog_run_signal((const char *const[]){"run", "-m", model, "-p", "Hello", "-n", "-1",
                                              "--ignore-eos", "--json", path, "--cpu", "ref", NULL},
                        SIGINT, 1500);
    assert_int_equal(p.code, 130);
    char *text = prog_read(path);
    json_t *j = parse(text);
    assert_string_equal(text_at(j, "finish_reason"), "interrupted");
    assert_int_equal(json_array_size(json_object_get(j, "token_ids")), int_at(j, "output_tokens"));
    assert_string_equal(text_at(j, "text"), p.out);
    json_decref(j);
    free(text);
    prog_free(&p);
    unlink(path);
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: %s PROGRAM RANDOM_MODEL NEEDLE_MODEL\n", argv[0]);
        return 2;
    }
    prog_init(2, argv);
    model = argv[2];
    needle = argv[3];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_bits_for_every_dcp_chunk_mtp_and_thread_count),
        cmocka_unit_test(processes_that_meet_answer_as_threads_do),
        cmocka_unit_test(every_field_of_the_contract_is_there),
        cmocka_unit_test(text_goes_out_and_stops_where_it_must),
        cmocka_unit_test(a_stop_text_inside_an_accepted_run_cuts_it),
        cmocka_unit_test(sampling_repeats_with_its_seed),
        cmocka_unit_test(a_conversation_is_put_into_the_models_form),
        cmocka_unit_test(a_model_without_a_known_form_continues_texts_only),
        cmocka_unit_test(a_place_of_the_prompt_is_found_in_the_selection),
        cmocka_unit_test(a_json_file_that_cannot_be_made_is_told_first),
        cmocka_unit_test(settings_of_the_maths_change_the_logits),
        cmocka_unit_test(files_to_write_are_looked_at_first),
        cmocka_unit_test(an_answer_that_nobody_can_read_ends),
        cmocka_unit_test(refusals_say_what_would_work),
        cmocka_unit_test(plan_and_run_refuse_alike),
        cmocka_unit_test(drafts_need_a_draft_layer),
        cmocka_unit_test(options_have_their_variables_and_notes),
        cmocka_unit_test(an_interrupt_ends_the_answer_and_keeps_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
