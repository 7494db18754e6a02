/* cli/progress.c - a bar on standard error for runs that take a while, and Ctrl-C.
 *
 * The bar shows only where standard error is a terminal, after the first second, and is wiped
 * before anything else is printed. An interrupt sets a flag that long runs ask for between
 * steps; a second one ends the program at once. A read that begins just after an interrupt would not hear of it:
 * while a line is read, an interrupt is followed by alarms until the reader has noticed. */
#include "cli/cli.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BAR_WIDTH = 24 };

#define SHOW_AFTER_S 1.0
#define REDRAW_S     0.1

static volatile sig_atomic_t g_interrupted, g_reading;
static timer_t g_alarm; /* made once */
static bool g_has_alarm;

enum { ALARM_NS = 20000000 };

static void set_alarm(long ns)
{
    const struct itimerspec t = {.it_value.tv_nsec = ns, .it_interval.tv_nsec = ns};
    timer_settime(g_alarm, 0, &t, NULL);
}

static void on_interrupt(int sig)
{
    (void)sig;
    g_interrupted = 1;
    if (g_reading != 0) {
        const int keep = errno;
        set_alarm(ALARM_NS);
        errno = keep;
    }
}

static void on_alarm(int sig)
{
    (void)sig; /* the read has ended with EINTR */
}

void cli_read_begin(void)
{
    if (!g_has_alarm) {
        struct sigaction sa = {.sa_handler = on_alarm};
        sigemptyset(&sa.sa_mask);
        sigaction(SIGALRM, &sa, NULL);
        struct sigevent ev = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
        g_has_alarm = timer_create(CLOCK_MONOTONIC, &ev, &g_alarm) == 0;
    }
    g_reading = g_has_alarm;
    if (g_has_alarm && g_interrupted != 0) {
        set_alarm(ALARM_NS);
    }
}

void cli_read_end(void)
{
    g_reading = 0;
    if (g_has_alarm) {
        set_alarm(0);
    }
}

void cli_catch_interrupt(void)
{
    struct sigaction sa = {.sa_handler = on_interrupt};
    sigemptyset(&sa.sa_mask);
    sa.sa_flags = (int)(SA_RESETHAND | (unsigned)SA_RESTART);
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
}

void cli_rearm_interrupt(void)
{
    struct sigaction sa = {.sa_handler = on_interrupt};
    sigemptyset(&sa.sa_mask);
    sa.sa_flags = (int)SA_RESETHAND; /* a read that waits for a line ends */
    g_interrupted = 0;
    sigaction(SIGINT, &sa, NULL);
}

bool cli_interrupted(void)
{
    return g_interrupted != 0;
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void cli_progress_begin(cli_progress *p)
{
    *p = (cli_progress){.on = isatty(STDERR_FILENO) != 0, .start_s = now_s()};
}

void cli_progress_wipe(cli_progress *p)
{
    if (p->drawn) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
        p->drawn = false;
    }
}

void cli_progress_step(cli_progress *p, const char *what, int64_t done, int64_t total)
{
    const double now = now_s();
    if (!p->on || now - p->start_s < SHOW_AFTER_S || now - p->last_s < REDRAW_S) {
        return;
    }
    p->last_s = now;
    const double share = total > 0 ? (double)done / (double)total : 0.0;
    char bar[BAR_WIDTH + 1];
    const int full = (int)(share * BAR_WIDTH);
    memset(bar, '.', BAR_WIDTH);
    memset(bar, '#', (size_t)(full < 0 ? 0 : full > BAR_WIDTH ? BAR_WIDTH : full));
    bar[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r\033[K[%s] %3.0f %%  %.40s", bar, 100.0 * share, what);
    fflush(stderr);
    p->drawn = true;
}
