/* knob.c: the rows, and how one value is read. */
#include "base/knob.h"

#include <ctype.h>
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

#define KV_WORDS   "f32|bf16|fp8|fp8_ds_mla"
#define MAX_LEN    INT64_C(2147483647)
#define MAX_THREAD 1024
#define MAX_GPUS   65536

/* clang-format off */
static const knob rows[] = {
    /* Common. */
    {.name = "device", .kind = KNOB_WORD, .arg = "D", .commands = KNOB_BENCH,
     .choices = "cpu|cuda", .def = "cpu",
     .help = "where the kernels run; cuda: the first GPU that CUDA_VISIBLE_DEVICES shows"},
    {.name = "device", .kind = KNOB_WORD, .arg = "D", .commands = KNOB_CHECK,
     .choices = "cpu|cuda", .def = "cpu",
     .help = "where the kernels run; cuda: the first visible GPU; with --comm all of them, or one for each process"},
    {.name = "device", .kind = KNOB_WORD, .arg = "D", .commands = KNOB_RUN, .choices = "cpu",
     .def = "cpu", .help = "where the kernels run"},
    {.name = "tp", .alias = "tensor-parallel-size", .kind = KNOB_INT, .arg = "N",
     .commands = KNOB_PLAN, .lo = 1, .hi = MAX_GPUS, .def_say = "the number of devices",
     .help = "ranks that share the heads; a multiple of the DCP size"},
    {.name = "tp", .alias = "tensor-parallel-size", .kind = KNOB_INT, .arg = "N",
     .commands = KNOB_BENCH | KNOB_RUN, .lo = 1, .hi = MAX_GPUS, .def_say = "the DCP size",
     .help = "ranks that share the heads; a multiple of the DCP size"},
    {.name = "dcp", .alias = "decode-context-parallel-size", .kind = KNOB_INT, .arg = "N",
     .commands = KNOB_PLAN | KNOB_RUN, .lo = 1, .hi = MAX_GPUS, .def = "1",
     .help = "ranks that share the KV cache by token position: 1, 2, 4 or 8"},
    {.name = "interleave", .kind = KNOB_INT, .arg = "I", .commands = KNOB_PLAN | KNOB_RUN, .lo = 1,
     .hi = 65536, .def = "1",
     .help = "consecutive positions that one rank owns: 1, 2, 4, ... 64"},
    {.name = "interleave", .kind = KNOB_INT, .arg = "I", .commands = KNOB_BENCH,
     .choices = "1|2|4|8|16|32|64", .def = "1",
     .help = "consecutive positions that one rank owns"},
    {.name = "threads", .kind = KNOB_INT, .arg = "T,...", .list = true, .commands = KNOB_BENCH,
     .lo = 1, .hi = MAX_THREAD, .def_say = "cores / ranks",
     .help = "worker threads per rank"},
    {.name = "threads", .kind = KNOB_INT, .arg = "T", .commands = KNOB_PLAN | KNOB_RUN, .lo = 1,
     .hi = MAX_THREAD, .def_say = "cores / ranks", .help = "worker threads per rank"},
    {.name = "kernels", .kind = KNOB_TEXT, .arg = "OP=VARIANT,...",
     .commands = KNOB_BENCH | KNOB_PLAN | KNOB_RUN,
     .def_say = "the best the machine runs",
     .help = "which variant of an op to use"},
    {.name = "cpu", .kind = KNOB_WORD, .arg = "LEVEL",
     .commands = KNOB_ALL,
     .choices = "ref|avx2|avx512|avx512bf16|amx", .def_say = "what the machine has",
     .help = "the highest instruction level to use"},
    {.name = "deterministic", .kind = KNOB_FLAG, .commands = KNOB_BENCH | KNOB_RUN,
     .help = "same bits for every DCP size; always so on cpu, and refuses what cannot promise it"},
    {.name = "exchange", .kind = KNOB_WORD, .arg = "FORM", .commands = KNOB_BENCH | KNOB_RUN,
     .choices = "a2a|ag_rs", .def = "a2a", .help = "how partial results travel"},
    {.name = "timeout", .kind = KNOB_REAL, .arg = "S", .commands = KNOB_BENCH | KNOB_RUN,
     .real_lo = 0.001, .real_hi = 86400, .def = "30",
     .help = "seconds a collective waits for its peers"},
    {.name = "timeout", .kind = KNOB_REAL, .arg = "S", .commands = KNOB_CHECK,
     .real_lo = 0.001, .real_hi = 86400, .def_say = "1, with --device cuda 0.3",
     .help = "with --comm: seconds a collective waits for a rank that is late on purpose"},
    {.name = "rendezvous", .kind = KNOB_TEXT, .arg = "tcp://HOST:PORT", .commands = KNOB_RUN,
     .help = "where the processes of a group meet; HOST is that of rank 0. Not needed under mpirun"},
    {.name = "rendezvous", .kind = KNOB_TEXT, .arg = "tcp://HOST:PORT", .commands = KNOB_CHECK,
     .help = "with --comm: where the processes to check meet; HOST is that of rank 0. Not needed under mpirun"},
    {.name = "rank", .kind = KNOB_INT, .arg = "R", .commands = KNOB_RUN, .lo = 0, .hi = 255, .def = "0",
     .help = "with --rendezvous: which process this is"},
    {.name = "rank", .kind = KNOB_INT, .arg = "R", .commands = KNOB_CHECK, .lo = 0, .hi = 7, .def = "0",
     .help = "with --rendezvous: which process this is"},
    {.name = "ranks", .kind = KNOB_INT, .arg = "N", .commands = KNOB_RUN, .lo = 1, .hi = 256, .def = "1",
     .help = "with --rendezvous: how many processes there are"},
    {.name = "ranks", .kind = KNOB_INT, .arg = "N", .commands = KNOB_CHECK, .lo = 1, .hi = 8, .def = "1",
     .help = "with --rendezvous: how many processes there are"},
    {.name = "seed", .kind = KNOB_INT, .arg = "S", .commands = KNOB_BENCH | KNOB_CHECK, .lo = 0,
     .hi = INT64_MAX, .def = "0", .help = "seed of all random data"},
    {.name = "seed", .kind = KNOB_INT, .arg = "S", .commands = KNOB_RUN, .lo = 0, .hi = INT64_MAX,
     .def = "0", .help = "seed of sampling; equal seeds give equal answers"},
    {.name = "log", .kind = KNOB_TEXT, .arg = "LEVEL[,SUBSYSTEM=LEVEL]", .commands = KNOB_ALL,
     .def = "warn", .help = "off, error, warn, info or debug"},
    {.name = "json", .kind = KNOB_TEXT, .arg = "FILE", .commands = KNOB_ALL,
     .help = "write the result as JSON; - is standard output"},

    /* bench */
    {.name = "batch", .kind = KNOB_INT, .arg = "N,...", .list = true, .commands = KNOB_BENCH,
     .lo = 1, .hi = 65536, .def_say = "the case's grid", .help = "requests in the batch"},
    {.name = "q", .kind = KNOB_INT, .arg = "N,...", .list = true, .commands = KNOB_BENCH, .lo = 1,
     .hi = 65536, .def_say = "the case's grid", .help = "query tokens per request"},
    {.name = "heads", .kind = KNOB_INT, .arg = "N,...", .list = true, .commands = KNOB_BENCH,
     .lo = 1, .hi = 128, .def_say = "the case's grid", .help = "query heads"},
    {.name = "len", .kind = KNOB_INT, .arg = "N,...", .list = true, .commands = KNOB_BENCH,
     .lo = 0, .hi = MAX_LEN, .def_say = "the case's grid", .help = "context length in tokens"},
    {.name = "topk", .kind = KNOB_INT, .arg = "K,...", .list = true, .commands = KNOB_BENCH,
     .lo = 0, .hi = 32768, .def_say = "the case's grid",
     .help = "keys selected per query token; 0: dense attention"},
    {.name = "dcp", .alias = "decode-context-parallel-size", .kind = KNOB_INT, .arg = "N,...",
     .list = true, .commands = KNOB_BENCH, .lo = 1, .hi = 8, .def_say = "the case's grid",
     .help = "ranks that share the KV cache"},
    {.name = "invalid", .kind = KNOB_REAL, .arg = "F,...", .list = true, .commands = KNOB_BENCH,
     .real_lo = 0, .real_hi = 1, .def_say = "the case's grid",
     .help = "share of selected ids that belong to other ranks"},
    {.name = "kv", .kind = KNOB_WORD, .arg = "FORMAT,...", .list = true, .commands = KNOB_BENCH,
     .choices = KV_WORDS, .def_say = "the case's grid", .help = "row formats of the cache"},
    {.name = "reps", .kind = KNOB_INT, .arg = "R", .commands = KNOB_BENCH, .lo = 1, .hi = 1000000,
     .def_say = "as many as fit the time", .help = "timed repetitions of each case"},
    {.name = "warm", .kind = KNOB_FLAG, .commands = KNOB_BENCH,
     .help = "time with data in the processor's caches"},
    {.name = "cold", .kind = KNOB_FLAG, .commands = KNOB_BENCH,
     .help = "time with rotated pools that no cache holds; the default"},
    {.name = "pool", .kind = KNOB_BYTES, .arg = "SIZE", .commands = KNOB_BENCH, .lo = 1 << 20,
     .hi = INT64_C(4) << 30, .def = "1GiB",
     .help = "least size of what is rotated; a small one stays in the caches"},
    {.name = "csv", .kind = KNOB_TEXT, .arg = "FILE", .commands = KNOB_BENCH | KNOB_CHECK,
     .help = "write the rows as CSV; - is standard output"},

    /* check */
    {.name = "op", .kind = KNOB_TEXT, .arg = "NAME", .commands = KNOB_CHECK, .def_say = "all",
     .help = "check this op only"},
    {.name = "variant", .kind = KNOB_TEXT, .arg = "V", .commands = KNOB_CHECK, .def_say = "all",
     .help = "check this variant only"},
    {.name = "comm", .kind = KNOB_FLAG, .commands = KNOB_CHECK,
     .help = "check the collectives of every transport, with faults"},
    {.name = "conformance", .kind = KNOB_FLAG, .commands = KNOB_CHECK,
     .help = "check the number contract"},
    {.name = "bench", .kind = KNOB_FLAG, .commands = KNOB_CHECK,
     .help = "time each variant and set it beside the machine's ceiling"},
    {.name = "selftest", .kind = KNOB_FLAG, .commands = KNOB_CHECK,
     .help = "plant faults and demand that each is reported"},
    {.name = "quick", .kind = KNOB_FLAG, .commands = KNOB_CHECK,
     .help = "fewer and smaller cases; under a minute"},

    /* plan */
    {.name = "preset", .kind = KNOB_TEXT, .arg = "NAME", .commands = KNOB_PLAN,
     .help = "a model that is known by name"},
    {.name = "model", .letter = 'm', .kind = KNOB_TEXT, .arg = "DIR", .commands = KNOB_PLAN,
     .help = "the folder of a model; only its config.json is read"},
    {.name = "model", .letter = 'm', .kind = KNOB_TEXT, .arg = "DIR", .commands = KNOB_BENCH | KNOB_RUN,
     .help = "the folder of a model: config.json, safetensors files, tokenizer.json"},
    {.name = "gpus", .kind = KNOB_INT, .arg = "N", .commands = KNOB_PLAN, .lo = 1,
     .hi = MAX_GPUS, .def_say = "the TP size, or 8", .help = "devices in all"},
    {.name = "mem", .kind = KNOB_BYTES, .arg = "SIZE", .commands = KNOB_PLAN, .lo = 1 << 20,
     .hi = INT64_C(1) << 50, .def = "141GB", .help = "memory of one device"},
    {.name = "util", .kind = KNOB_REAL, .arg = "F", .commands = KNOB_PLAN, .real_lo = 0.01,
     .real_hi = 1, .def = "0.92", .help = "share of the memory that may be used"},
    {.name = "weights", .kind = KNOB_WORD, .arg = "TYPE", .commands = KNOB_PLAN,
     .choices = "fp8|bf16", .def_say = "as the model is published",
     .help = "type of the weights"},
    {.name = "ep", .kind = KNOB_INT, .arg = "N", .commands = KNOB_PLAN | KNOB_RUN, .lo = 1, .hi = MAX_GPUS,
     .def_say = "the TP size", .help = "ranks that the experts are spread over"},
    {.name = "kv", .kind = KNOB_WORD, .arg = "FORMAT", .commands = KNOB_PLAN | KNOB_RUN,
     .choices = KV_WORDS, .def_say = "by the model", .help = "row format of the cache"},
    {.name = "index-kv", .kind = KNOB_WORD, .arg = "FORMAT", .commands = KNOB_PLAN | KNOB_RUN,
     .choices = "fp8|f32", .def_say = "f32 with f32 rows, else fp8",
     .help = "format of the index keys"},
    {.name = "ctx", .kind = KNOB_INT, .arg = "N", .commands = KNOB_PLAN, .lo = 1, .hi = MAX_LEN,
     .def_say = "the model's", .help = "context length to plan for"},
    {.name = "ctx", .kind = KNOB_INT, .arg = "N", .commands = KNOB_RUN, .lo = 2, .hi = MAX_LEN,
     .def_say = "the model's",
     .help = "context limit, prompt and answer; memory is taken as it fills"},
    {.name = "seqs", .kind = KNOB_INT, .arg = "N", .commands = KNOB_PLAN, .lo = 1, .hi = 65536,
     .def = "1", .help = "sequences of that length at once"},
    {.name = "mtp", .kind = KNOB_INT, .arg = "K", .commands = KNOB_PLAN | KNOB_BENCH | KNOB_RUN,
     .lo = 0, .hi = 7, .def = "0", .help = "draft tokens per step"},
    {.name = "chunk", .kind = KNOB_INT, .arg = "N", .commands = KNOB_PLAN | KNOB_RUN, .lo = 1,
     .hi = 1 << 20, .def = "2048", .help = "prompt tokens of one step"},

    /* run */
    {.name = "prompt", .letter = 'p', .kind = KNOB_TEXT, .arg = "TEXT", .commands = KNOB_RUN,
     .def_say = "standard input", .help = "the text to continue"},
    {.name = "file", .letter = 'f', .kind = KNOB_TEXT, .arg = "FILE", .commands = KNOB_RUN,
     .help = "a file with the text to continue; - is standard input"},
    {.name = "max-new", .letter = 'n', .kind = KNOB_INT, .arg = "N", .commands = KNOB_RUN,
     .lo = -1, .hi = MAX_LEN, .def = "256",
     .help = "new tokens at most; -1: until the model stops"},
    {.name = "chat", .kind = KNOB_FLAG, .commands = KNOB_RUN,
     .def_say = "on where the prompt is typed at a terminal",
     .help = "the prompt is a turn of a conversation, put into the model's own form"},
    {.name = "system", .kind = KNOB_TEXT, .arg = "TEXT", .commands = KNOB_RUN,
     .help = "with --chat: what the conversation begins with"},
    {.name = "think", .kind = KNOB_WORD, .arg = "WHEN", .commands = KNOB_RUN, .choices = "on|off",
     .def_say = "the model's", .help = "with --chat: whether the model reasons before it answers"},
    {.name = "reuse", .kind = KNOB_WORD, .arg = "WHEN", .commands = KNOB_RUN, .choices = "on|off",
     .def = "on", .help = "a turn of a conversation reads only what the cache does not hold yet"},
    {.name = "special", .kind = KNOB_FLAG, .commands = KNOB_RUN,
     .help = "special tokens that the prompt spells out are those tokens, not text"},
    {.name = "scale-rule", .kind = KNOB_WORD, .arg = "RULE", .commands = KNOB_RUN,
     .choices = "pow2|exact", .def = "pow2", .help = "how scales of cache rows are derived"},
    {.name = "hadamard", .kind = KNOB_FLAG, .commands = KNOB_RUN,
     .help = "index vectors are Hadamard-rotated"},
    {.name = "latent-eps", .kind = KNOB_REAL, .arg = "X", .commands = KNOB_RUN,
     .real_lo = 1e-12, .real_hi = 0.1, .def_say = "the model's",
     .help = "eps of the latent norms, to compare with other programs"},
    {.name = "temp", .kind = KNOB_REAL, .arg = "X", .commands = KNOB_RUN, .real_lo = 0,
     .real_hi = 1000, .def = "0", .help = "temperature of sampling; 0: the likeliest token"},
    {.name = "top-k", .kind = KNOB_INT, .arg = "K", .commands = KNOB_RUN, .lo = 0, .hi = INT32_MAX,
     .def = "0", .help = "sample among the K likeliest tokens; 0: all"},
    {.name = "top-p", .kind = KNOB_REAL, .arg = "P", .commands = KNOB_RUN, .real_lo = 1e-6,
     .real_hi = 1, .def = "1",
     .help = "sample among the fewest tokens whose probabilities reach P"},
    {.name = "min-p", .kind = KNOB_REAL, .arg = "P", .commands = KNOB_RUN, .real_lo = 0,
     .real_hi = 1, .def = "0",
     .help = "leave out tokens below that share of the likeliest one's probability"},
    {.name = "repeat-penalty", .kind = KNOB_REAL, .arg = "X", .commands = KNOB_RUN,
     .real_lo = 0.01, .real_hi = 100, .def = "1",
     .help = "above 1: tokens that occurred get less likely"},
    {.name = "stop", .kind = KNOB_TEXT, .arg = "TEXT", .repeat = true, .commands = KNOB_RUN,
     .help = "ends the answer where the text occurs; may be given several times"},
    {.name = "ignore-eos", .kind = KNOB_FLAG, .commands = KNOB_RUN,
     .help = "the model's end tokens do not end the answer"},
    {.name = "logprobs", .kind = KNOB_INT, .arg = "K", .commands = KNOB_RUN, .lo = 0, .hi = 20,
     .def = "0", .help = "log-probabilities of the K likeliest tokens go into the JSON"},
    {.name = "logits", .kind = KNOB_TEXT, .arg = "FILE.npy", .commands = KNOB_RUN,
     .help = "write the logits of the answer's tokens, f32 [tokens, vocabulary]"},
    {.name = "stats", .kind = KNOB_FLAG, .commands = KNOB_RUN,
     .help = "speeds, acceptance of drafts and memory, on standard error"},
    {.name = "trace-selection", .kind = KNOB_FLAG, .commands = KNOB_RUN,
     .help = "the positions each token of the answer attended, by layer, go into the JSON"},
    {.name = "locate", .kind = KNOB_TEXT, .arg = "TEXT", .commands = KNOB_RUN,
     .help = "say which layers attended that part of the prompt"},
    {.name = "selection-last", .kind = KNOB_FLAG, .commands = KNOB_RUN,
     .help = "an experiment: attend the last positions instead of the selected ones"},
};
/* clang-format on */

static const struct {
    const char *word;
    uint32_t bit;
} commands[] = {{"bench", KNOB_BENCH}, {"check", KNOB_CHECK}, {"plan", KNOB_PLAN}, {"run", KNOB_RUN}};

const knob *knob_at(size_t i)
{
    return i < sizeof rows / sizeof *rows ? &rows[i] : NULL;
}

const knob *knob_find(const char *name, uint32_t command)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const knob *k = &rows[i];
        const bool named =
            strcmp(k->name, name) == 0 || (k->alias != NULL && strcmp(k->alias, name) == 0);
        if (named && (command == 0 || (k->commands & command) != 0)) {
            return k;
        }
    }
    return NULL;
}

uint32_t knob_command(const char *word)
{
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(commands[i].word, word) == 0) {
            return commands[i].bit;
        }
    }
    return 0;
}

static bool is_choice(const char *choices, const char *s, size_t n)
{
    for (const char *p = choices;; p++) {
        const size_t len = strcspn(p, "|");
        if (len == n && memcmp(p, s, n) == 0) {
            return true;
        }
        p += len;
        if (*p == '\0') {
            return false;
        }
    }
}

/* Numbers are read in the C locale whatever the host has set. */
static double to_real(const char *s, char **end)
{
    const locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (c == (locale_t)0) {
        return strtod(s, end);
    }
    const double r = strtod_l(s, end, c);
    freelocale(c);
    return r;
}

static bool parse_flag(const char *s, int64_t *v)
{
    static const char *const words[] = {"0", "false", "no", "off", "1", "true", "yes", "on"};
    for (int i = 0; i < 8; i++) {
        if (strcmp(s, words[i]) == 0) {
            *v = i >= 4;
            return true;
        }
    }
    return false;
}

static bool parse_int(const knob *k, const char *s, int64_t *v)
{
    char *end = NULL;
    errno = 0;
    const long long x = strtoll(s, &end, 10);
    if (end == s || *end != '\0' || errno != 0 || isspace((unsigned char)s[0])) {
        return false;
    }
    *v = x;
    return k->choices != NULL || (x >= k->lo && x <= k->hi);
}

static bool parse_real(const knob *k, const char *s, double *v)
{
    char *end = NULL;
    const double x = to_real(s, &end);
    if (end == s || *end != '\0' || isspace((unsigned char)s[0])) {
        return false;
    }
    *v = x;
    return x >= k->real_lo && x <= k->real_hi; /* false for NaN */
}

static bool parse_bytes(const knob *k, const char *s, int64_t *v)
{
    static const struct {
        const char *unit;
        double scale;
    } units[] = {{"", 1},      {"B", 1},        {"kB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
                 {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
    char *end = NULL;
    const double x = to_real(s, &end);
    if (end == s || !isdigit((unsigned char)s[0])) {
        return false;
    }
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        const double bytes = x * units[i].scale;
        if (strcmp(end, units[i].unit) == 0 && bytes >= (double)k->lo && bytes <= (double)k->hi) {
            *v = (int64_t)bytes;
            return true;
        }
    }
    return false;
}

kvs_status knob_parse(const knob *k, const char *what, const char *s, size_t n, knob_value *v,
                      kvs_error *err)
{
    /* Numbers need a NUL behind them; none that long is valid. */
    char text[64] = "";
    const bool fits = n < sizeof text;
    if (fits) {
        memcpy(text, s, n);
    }
    bool ok = false;
    switch (k->kind) {
    case KNOB_FLAG:
        ok = fits && parse_flag(text, &v->i);
        break;
    case KNOB_INT:
        ok = fits && parse_int(k, text, &v->i);
        break;
    case KNOB_REAL:
        ok = fits && parse_real(k, text, &v->r);
        break;
    case KNOB_BYTES:
        ok = fits && parse_bytes(k, text, &v->i);
        break;
    case KNOB_TEXT:
    case KNOB_WORD:
        ok = n > 0;
        break;
    }
    if (ok && k->choices != NULL) {
        ok = is_choice(k->choices, s, n);
    }
    if (ok) {
        return KVS_OK;
    }
    char range[160];
    return err_set(err, KVS_INVALID, "%s \"%.*s\": use %s", what, n < 80 ? (int)n : 80, s,
                   knob_range(k, range, sizeof range));
}

char *knob_range(const knob *k, char *buf, size_t cap)
{
    if (k->choices != NULL) {
        size_t n = (size_t)snprintf(buf, cap, "%s", strchr(k->choices, '|') ? "one of " : "");
        for (const char *p = k->choices; *p != '\0' && n + 2 < cap; p++) {
            buf[n++] = *p == '|' ? ',' : *p;
            if (*p == '|') {
                buf[n++] = ' ';
            }
        }
        buf[n] = '\0';
        return buf;
    }
    switch (k->kind) {
    case KNOB_FLAG:
        snprintf(buf, cap, "1, 0, true, false, yes, no, on or off");
        break;
    case KNOB_INT:
        if (k->hi == INT64_MAX) {
            snprintf(buf, cap, "%lld or more", (long long)k->lo);
        } else {
            snprintf(buf, cap, "%lld..%lld", (long long)k->lo, (long long)k->hi);
        }
        break;
    case KNOB_REAL:
        snprintf(buf, cap, "%g..%g", k->real_lo, k->real_hi);
        break;
    case KNOB_BYTES:
        snprintf(buf, cap, "%lldMiB..%lldTiB, as 80GB or 80GiB", (long long)(k->lo >> 20),
                 (long long)(k->hi >> 40));
        break;
    case KNOB_TEXT:
    case KNOB_WORD:
        snprintf(buf, cap, "a text that is not empty");
        break;
    }
    return buf;
}

char *knob_env_name(const knob *k, char *buf, size_t cap)
{
    const int len = snprintf(buf, cap, "KVS_%s", k->name);
    for (int i = 4; i < len && (size_t)i < cap; i++) {
        buf[i] = buf[i] == '-' ? '_' : (char)toupper((unsigned char)buf[i]);
    }
    return buf;
}

const char *knob_getenv(const char *var)
{
    const char *v = getenv(var);
    return v != NULL && v[0] != '\0' ? v : NULL;
}

const char *knob_env(const char *name)
{
    const knob *k = knob_find(name, 0);
    char var[64];
    return k != NULL ? knob_getenv(knob_env_name(k, var, sizeof var)) : NULL;
}
