/* log.c: levels, the logger in use, the default logger, rate limit.
 *
 * The lock serialises calls of the logger and its replacement. A thread that is inside the logger
 * is marked, so that a line caused by the logger is dropped instead of deadlocking. */
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/knob.h"

enum { LINE_CAP = 1000 };
#define GATE_NS INT64_C(1000000000)

static const char *const level_words[] = {"off", "error", "warn", "info", "debug"};
static const char *const sys_words[] = {
#define SYS_WORD(name, word) word,
    KVS_LOG_SYS_LIST(SYS_WORD)
#undef SYS_WORD
};
enum { N_LEVEL = sizeof level_words / sizeof *level_words };

static void write_stderr(void *ctx, kvs_log_level level, kvs_log_sys sys, const char *text);

static atomic_int g_level[KVS_LOG_N_SYS];
static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static kvs_logger g_logger = {write_stderr, NULL};
static _Thread_local bool t_inside;

const char *kvs_log_level_name(kvs_log_level level)
{
    return (unsigned)level < N_LEVEL ? level_words[level] : "?";
}

const char *kvs_log_sys_name(kvs_log_sys sys)
{
    return (unsigned)sys < KVS_LOG_N_SYS ? sys_words[sys] : "?";
}

static int find_word(const char *s, size_t n, const char *const *words, int n_word)
{
    for (int i = 0; i < n_word; i++) {
        if (strlen(words[i]) == n && memcmp(words[i], s, n) == 0) {
            return i;
        }
    }
    return -1;
}

static kvs_status parse_spec(const char *spec, int level[KVS_LOG_N_SYS], kvs_error *err)
{
    const char *p = spec;
    for (int i_item = 0;; i_item++) {
        const size_t n = strcspn(p, ",");
        const char *eq = memchr(p, '=', n);
        const char *word = eq != NULL ? eq + 1 : p;
        const int l = find_word(word, (size_t)(p + n - word), level_words, N_LEVEL);
        if (l < 0 || (eq == NULL && i_item > 0)) {
            return err_set(err, KVS_INVALID,
                           "log levels \"%s\": \"%.*s\" is not understood; use LEVEL or "
                           "LEVEL,SUBSYSTEM=LEVEL with off, error, warn, info, debug",
                           spec, (int)n, p);
        }
        const int sys = eq != NULL ? find_word(p, (size_t)(eq - p), sys_words, KVS_LOG_N_SYS) : -1;
        if (eq != NULL && sys < 0) {
            return err_set(err, KVS_INVALID,
                           "log levels \"%s\": no subsystem \"%.*s\"; there are core, load, kv, "
                           "comm, kern, dcp, sched, http",
                           spec, (int)(eq - p), p);
        }
        for (int s = 0; s < KVS_LOG_N_SYS; s++) {
            level[s] = sys < 0 || s == sys ? l : level[s];
        }
        if (p[n] == '\0') {
            return KVS_OK;
        }
        p += n + 1;
    }
}

static void start(void)
{
    int level[KVS_LOG_N_SYS];
    for (int s = 0; s < KVS_LOG_N_SYS; s++) {
        level[s] = KVS_LOG_WARN;
    }
    kvs_error err;
    const char *spec = knob_env("log");
    const bool bad = spec != NULL && parse_spec(spec, level, &err) < 0;
    for (int s = 0; s < KVS_LOG_N_SYS; s++) {
        atomic_store_explicit(&g_level[s], level[s], memory_order_relaxed);
    }
    if (bad) {
        write_stderr(NULL, KVS_LOG_WARN, KVS_LOG_CORE, err.text);
    }
}

kvs_status kvs_log_levels(const char *spec, kvs_error *err)
{
    pthread_once(&g_once, start);
    int level[KVS_LOG_N_SYS];
    for (int s = 0; s < KVS_LOG_N_SYS; s++) {
        level[s] = atomic_load_explicit(&g_level[s], memory_order_relaxed);
    }
    TRY(parse_spec(spec, level, err));
    for (int s = 0; s < KVS_LOG_N_SYS; s++) {
        atomic_store_explicit(&g_level[s], level[s], memory_order_relaxed);
    }
    return KVS_OK;
}

void kvs_log_set(const kvs_logger *logger)
{
    const kvs_logger standard = {write_stderr, NULL};
    pthread_mutex_lock(&g_lock);
    g_logger = logger != NULL ? *logger : standard;
    pthread_mutex_unlock(&g_lock);
}

/* Under systemd a line begins with its syslog priority in angle brackets. */
static void write_stderr(void *ctx, kvs_log_level level, kvs_log_sys sys, const char *text)
{
    static const int priority[] = {7, 3, 4, 6, 7};
    (void)ctx;
    char line[LINE_CAP + 64];
    char mark[8] = "";
    if (knob_getenv("JOURNAL_STREAM") != NULL) {
        snprintf(mark, sizeof mark, "<%d>", priority[level]);
    }
    const int n = snprintf(line, sizeof line, "%skvspan: %s: %s: %s\n", mark,
                           kvs_log_level_name(level), kvs_log_sys_name(sys), text);
    const size_t len = n < (int)sizeof line ? (size_t)n : sizeof line - 1;
    line[len - 1] = '\n';
    for (size_t done = 0; done < len;) {
        const ssize_t put = write(STDERR_FILENO, line + done, len - done);
        if (put <= 0) {
            return;
        }
        done += (size_t)put;
    }
}

bool log_wants(kvs_log_level level, kvs_log_sys sys)
{
    pthread_once(&g_once, start);
    return (int)level <= atomic_load_explicit(&g_level[sys], memory_order_relaxed);
}

static void deliver(kvs_log_level level, kvs_log_sys sys, const char *text)
{
    if (t_inside) {
        return;
    }
    pthread_mutex_lock(&g_lock);
    if (g_logger.fn != NULL) {
        t_inside = true;
        g_logger.fn(g_logger.ctx, level, sys, text);
        t_inside = false;
    }
    pthread_mutex_unlock(&g_lock);
}

static void format_line(char line[LINE_CAP], int64_t n_dropped, const char *fmt, va_list ap)
{
    const int n = vsnprintf(line, LINE_CAP, fmt, ap);
    if (n < 0) {
        line[0] = '\0';
        return;
    }
    /* Room for the note even when the text fills the line. */
    enum { NOTE_CAP = 48 };
    if (n_dropped > 0) {
        const size_t at = n < LINE_CAP - NOTE_CAP ? (size_t)n : LINE_CAP - NOTE_CAP;
        snprintf(line + at, LINE_CAP - at, " (%lld more like it)", (long long)n_dropped);
    }
}

void log_write(kvs_log_level level, kvs_log_sys sys, const char *fmt, ...)
{
    if (!log_wants(level, sys)) {
        return;
    }
    char line[LINE_CAP];
    va_list ap;
    va_start(ap, fmt);
    format_line(line, 0, fmt, ap);
    va_end(ap);
    deliver(level, sys, line);
}

bool log_gate_open(log_gate *g, int64_t t_ns, int64_t *n_dropped)
{
    int_fast64_t next = atomic_load_explicit(&g->next_ns, memory_order_relaxed);
    if (t_ns < next || !atomic_compare_exchange_strong(&g->next_ns, &next, t_ns + GATE_NS)) {
        atomic_fetch_add_explicit(&g->n_dropped, 1, memory_order_relaxed);
        return false;
    }
    *n_dropped = atomic_exchange_explicit(&g->n_dropped, 0, memory_order_relaxed);
    return true;
}

void log_write_rate(log_gate *g, kvs_log_level level, kvs_log_sys sys, const char *fmt, ...)
{
    int64_t n_dropped = 0;
    if (!log_wants(level, sys) || !log_gate_open(g, clock_ns(), &n_dropped)) {
        return;
    }
    char line[LINE_CAP];
    va_list ap;
    va_start(ap, fmt);
    format_line(line, n_dropped, fmt, ap);
    va_end(ap);
    deliver(level, sys, line);
}
