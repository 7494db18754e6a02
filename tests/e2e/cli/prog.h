/* prog.h: runs the program under test and keeps what it said. */
#ifndef E2E_PROG_H
#define E2E_PROG_H

#include <signal.h>

#include "unit/unit.h"

typedef struct prog {
    int code;  /* exit code; 128 + signal where it was killed */
    char *out; /* standard output, NUL-terminated */
    char *err; /* standard error */
} prog;

/* The path of the program: the one argument of the test, which prog_init takes. */
extern const char *prog_path;
void prog_init(int argc, char **argv);

/* Runs prog_path with the words of a list that ends in NULL. Variables KVS_* of the test's own
 * environment are removed first; env ("KVS_X=1", may be NULL) is added. */
prog prog_run(const char *env, const char *const *words);
void prog_free(prog *p);

/* Starts it, sends `sig` after ms milliseconds, and waits. */
prog prog_run_signal(const char *const *words, int sig, int ms);

#define RUN(...)          prog_run(NULL, (const char *const[]){__VA_ARGS__, NULL})
#define RUN_ENV(env, ...) prog_run((env), (const char *const[]){__VA_ARGS__, NULL})

/* Demands the exit code and a part of the last line on standard error, which starts "kvspan: ";
 * NULL: that nothing was said there. Frees p. */
void prog_expect(prog p, int code, const char *says);

/* The content of a file, NULL where there is none. For free. */
char *prog_read(const char *path);

#endif
