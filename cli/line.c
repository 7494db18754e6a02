/* cli/line.c - a line from a terminal. With libedit it can be edited and former ones come back; without
 * it the terminal's own editing is all there is. What is typed is echoed on standard error, so that
 * standard output holds answers only. */
#include "cli/run.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#ifdef KVS_LIBEDIT
#include <histedit.h>
#endif

enum { HISTORY = 500 };

struct line_reader {
    const char *prompt;
    char *text;
    size_t cap;
#ifdef KVS_LIBEDIT
    EditLine *el;
    History *history;
#endif
};

#ifdef KVS_LIBEDIT

static char *prompt_of(EditLine *el)
{
    line_reader *l = NULL;
    el_get(el, EL_CLIENTDATA, &l);
    return (char *)(uintptr_t)l->prompt;
}

static void open_editor(line_reader *l)
{
    l->el = el_init("kvspan", stdin, stderr, stderr);
    l->history = history_init();
    if (l->el == NULL || l->history == NULL) {
        return;
    }
    HistEvent ev;
    history(l->history, &ev, H_SETSIZE, HISTORY);
    history(l->history, &ev, H_SETUNIQUE, 1);
    el_set(l->el, EL_CLIENTDATA, l);
    el_set(l->el, EL_PROMPT, prompt_of);
    el_set(l->el, EL_EDITOR, "emacs");
    el_set(l->el, EL_HIST, history, l->history);
    el_set(l->el, EL_BIND, "^[[A", "ed-prev-history", NULL);
    el_set(l->el, EL_BIND, "^[[B", "ed-next-history", NULL);
    el_source(l->el, NULL);
}

static const char *edit_line(line_reader *l, int *n)
{
    el_set(l->el, EL_PREP_TERM, 1); /* or keys typed at once behind the prompt are lost */
    const char *s = el_gets(l->el, n);
    if (s != NULL && *n > 1) {
        HistEvent ev;
        history(l->history, &ev, H_ENTER, s);
    }
    return s;
}

#endif

line_reader *line_open(const char *prompt)
{
    line_reader *l = calloc(1, sizeof *l);
    if (l == NULL) {
        return NULL;
    }
    l->prompt = prompt;
#ifdef KVS_LIBEDIT
    open_editor(l);
#endif
    return l;
}

static const char *plain_line(line_reader *l, int *n)
{
    fputs(l->prompt, stderr);
    fflush(stderr);
    const ssize_t k = getline(&l->text, &l->cap, stdin);
    *n = (int)k;
    return k > 0 ? l->text : NULL;
}

const char *line_read(line_reader *l, bool *interrupted)
{
    int n = 0;
    errno = 0;
    *interrupted = false;
    cli_read_begin();
#ifdef KVS_LIBEDIT
    const char *s = l->el != NULL && l->history != NULL ? edit_line(l, &n) : plain_line(l, &n);
#else
    const char *s = plain_line(l, &n);
#endif
    const int why = errno;
    cli_read_end();
    if (s == NULL || n <= 0) {
        *interrupted = why == EINTR || cli_interrupted();
        clearerr(stdin);
        return NULL;
    }
    char *copy = strndup(s, (size_t)n);
    free(l->text);
    l->text = copy;
    l->cap = copy != NULL ? (size_t)n + 1 : 0;
    if (copy != NULL) {
        copy[strcspn(copy, "\r\n")] = '\0';
    }
    return copy;
}

void line_close(line_reader *l)
{
    if (l == NULL) {
        return;
    }
#ifdef KVS_LIBEDIT
    if (l->history != NULL) {
        history_end(l->history);
    }
    if (l->el != NULL) {
        el_end(l->el);
    }
#endif
    free(l->text);
    free(l);
}
