#include "prog.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

const char *prog_path;

void prog_init(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s PROGRAM\n", argv[0]);
        exit(2);
    }
    prog_path = argv[1];
}

static char *read_fd(int fd)
{
    size_t n = 0;
    size_t cap = 1 << 16;
    char *text = malloc(cap);
    assert_non_null(text);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    for (;;) {
        if (n + 1 == cap) {
            cap *= 2;
            text = realloc(text, cap);
            assert_non_null(text);
        }
        const ssize_t k = read(fd, text + n, cap - 1 - n);
        assert_true(k >= 0);
        if (k == 0) {
            text[n] = '\0';
            return text;
        }
        n += (size_t)k;
    }
}

static int temp_file(void)
{
    char name[] = "/tmp/kvspan-prog-XXXXXX";
    const int fd = mkstemp(name);
    assert_true(fd >= 0);
    unlink(name);
    return fd;
}

static char **environment(const char *extra)
{
    size_t n = 0;
    while (environ[n] != NULL) {
        n++;
    }
    char **env = calloc(n + 2, sizeof *env);
    assert_non_null(env);
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        if (strncmp(environ[i], "KVS_", 4) != 0) {
            env[k++] = environ[i];
        }
    }
    env[k] = (char *)(uintptr_t)extra;
    return env;
}

static prog run(const char *env, const char *const *words, int sig, int ms)
{
    char *argv[40] = {(char *)(uintptr_t)prog_path};
    for (int i = 0; words[i] != NULL; i++) {
        assert_true(i < 38);
        argv[i + 1] = (char *)(uintptr_t)words[i];
    }
    const int out = temp_file();
    const int err = temp_file();
    posix_spawn_file_actions_t fa;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&fa, out, 1);
    posix_spawn_file_actions_adddup2(&fa, err, 2);
    char **e = environment(env);
    pid_t pid = 0;
    assert_int_equal(posix_spawn(&pid, prog_path, &fa, NULL, argv, e), 0);
    posix_spawn_file_actions_destroy(&fa);
    free(e);
    if (sig != 0) {
        const struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
        nanosleep(&t, NULL);
        kill(pid, sig);
    }
    int status = 0;
    while (waitpid(pid, &status, 0) < 0) {
        assert_int_equal(errno, EINTR);
    }
    const prog p = {
        .code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
        .out = read_fd(out),
        .err = read_fd(err),
    };
    close(out);
    close(err);
    return p;
}

prog prog_run(const char *env, const char *const *words)
{
    return run(env, words, 0, 0);
}

prog prog_run_signal(const char *const *words, int sig, int ms)
{
    return run(NULL, words, sig, ms);
}

void prog_free(prog *p)
{
    free(p->out);
    free(p->err);
    *p = (prog){0};
}

void prog_expect(prog p, int code, const char *says)
{
    const size_t n = strlen(p.err);
    const char *line = p.err + n;
    if (n > 0) {
        line--;
        while (line > p.err && line[-1] != '\n') {
            line--;
        }
    }
    const int ok = says == NULL ? n == 0
                                : n > 0 && p.err[n - 1] == '\n' && strstr(line, says) != NULL &&
                                      strncmp(line, "kvspan: ", 8) == 0;
    if (p.code != code || !ok) {
        fail_msg("exit code %d, want %d; standard error \"%s\", want \"%s\"", p.code, code, p.err,
                 says != NULL ? says : "");
    }
    prog_free(&p);
}

char *prog_read(const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return NULL;
    }
    char *text = read_fd(fd);
    close(fd);
    return text;
}
