/* text/regex.c - compiling and running by PCRE2.
 *
 * A search is done in windows of starting positions, and the clock is read between them and between
 * matches, so that a pattern that fails slowly at every position cannot hold the caller for long.
 * What one position may cost is bounded by PCRE2's match limit. Machine code that runs out of its
 * stack is not an error: the interpreter, which works on the heap, repeats that search. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/regex.h"

#include <inttypes.h>
#include <pcre2.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"

enum {
    WINDOW_BYTES = 1 << 16,
    CLOCK_EVERY = 256, /* searches between two looks at the clock */
    STACK_BYTES = 8 << 20,
    HEAP_KIB = 1 << 18
};

struct regex {
    pcre2_code *code;
    bool compiled;
    char name[48];
};

struct regex_run {
    pcre2_match_data *data;
    pcre2_match_context *ctx;
    pcre2_jit_stack *stack;
    int64_t deadline_ns;
    uint32_t n_search;
};

static void *get_memory(size_t n, void *unused)
{
    (void)unused;
    return mem_alloc(n, 0);
}

static void give_memory(void *p, void *unused)
{
    (void)unused;
    mem_free(p);
}

static kvs_status compile(regex *r, const textbuf *src, pcre2_compile_context *ctx, kvs_error *err)
{
    const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_USE_OFFSET_LIMIT |
                             PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE;
    int why = 0;
    size_t where = 0;
    pcre2_set_newline(ctx, PCRE2_NEWLINE_LF);
    pcre2_set_bsr(ctx, PCRE2_BSR_UNICODE);
    r->code = pcre2_compile((PCRE2_SPTR)buf_str(src), src->n, options, &why, &where, ctx);
    if (r->code == NULL) {
        char text[128] = "";
        pcre2_get_error_message(why, (PCRE2_UCHAR *)text, sizeof text);
        const bool memory = why == PCRE2_ERROR_HEAP_FAILED;
        return err_set(err, memory ? KVS_NOMEM : KVS_UNSUPPORTED, "PCRE2 says: %s", text);
    }
    /* Without machine code, where the system forbids it, everything is the same but slower. */
    r->compiled = pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE) == 0;
    return KVS_OK;
}

static kvs_status fill(regex *r, const char *src, size_t n, kvs_error *err)
{
    textbuf b;
    buf_init(&b);
    kvs_status st = regex_translate(&b, src, n, err);
    pcre2_general_context *general = NULL;
    pcre2_compile_context *ctx = NULL;
    if (st == KVS_OK) {
        general = pcre2_general_context_create(get_memory, give_memory, NULL);
        ctx = general != NULL ? pcre2_compile_context_create(general) : NULL;
        st = ctx != NULL ? compile(r, &b, ctx, err)
                         : err_set(err, KVS_NOMEM, "no memory for a regular expression");
    }
    pcre2_compile_context_free(ctx);
    pcre2_general_context_free(general);
    buf_fini(&b);
    return st;
}

kvs_status regex_new(regex **out, const char *name, const char *src, size_t n, kvs_error *err)
{
    *out = NULL;
    regex *r = mem_calloc(1, sizeof *r);
    if (r == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a regular expression");
    }
    snprintf(r->name, sizeof r->name, "%s", name);
    const kvs_status st = fill(r, src, n, err);
    if (st < 0) {
        err_prefix(err, "%s: regex", r->name);
        regex_free(r);
        return st;
    }
    *out = r;
    return KVS_OK;
}

kvs_status regex_new_word(regex **out, kvs_error *err)
{
    static const char src[] = "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]";
    *out = NULL;
    regex *r = mem_calloc(1, sizeof *r);
    int why = 0;
    size_t where = 0;
    if (r != NULL) {
        r->code = pcre2_compile((PCRE2_SPTR)src, sizeof src - 1,
                                PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &why, &where, NULL);
    }
    if (r == NULL || r->code == NULL) {
        mem_free(r);
        return err_set(err, KVS_NOMEM, "no memory for a regular expression");
    }
    *out = r;
    return KVS_OK;
}

void regex_free(regex *r)
{
    if (r != NULL) {
        pcre2_code_free(r->code);
        mem_free(r);
    }
}

bool regex_is_compiled(const regex *r)
{
    return r->compiled;
}

kvs_status regex_run_new(regex_run **out, size_t n_byte, kvs_error *err)
{
    *out = NULL;
    regex_run *run = mem_calloc(1, sizeof *run);
    pcre2_general_context *general =
        run != NULL ? pcre2_general_context_create(get_memory, give_memory, NULL) : NULL;
    if (general != NULL) {
        run->data = pcre2_match_data_create(1, general);
        run->ctx = pcre2_match_context_create(general);
        run->stack = pcre2_jit_stack_create(32 << 10, STACK_BYTES, general);
        pcre2_general_context_free(general);
    }
    /* No stack of its own is fine: machine code then has 32 KiB of this thread's. */
    if (run == NULL || run->data == NULL || run->ctx == NULL) {
        regex_run_free(run);
        return err_set(err, KVS_NOMEM, "tokenizer: no memory to match");
    }
    const int64_t mib = (int64_t)(n_byte >> 20);
    run->deadline_ns = clock_ns() + (10 + 2 * mib) * INT64_C(1000000000);
    pcre2_set_match_limit(run->ctx,
                          n_byte < 400000000 ? 10000000 + 8 * (uint32_t)n_byte : UINT32_MAX);
    pcre2_set_heap_limit(run->ctx, HEAP_KIB);
    pcre2_jit_stack_assign(run->ctx, NULL, run->stack);
    *out = run;
    return KVS_OK;
}

void regex_run_free(regex_run *run)
{
    if (run != NULL) {
        pcre2_jit_stack_free(run->stack);
        pcre2_match_context_free(run->ctx);
        pcre2_match_data_free(run->data);
        mem_free(run);
    }
}

void regex_run_set_deadline(regex_run *run, int64_t t_ns)
{
    run->deadline_ns = t_ns;
}

static kvs_status check_clock(const regex *r, const regex_run *run, kvs_error *err)
{
    if (clock_ns() < run->deadline_ns) {
        return KVS_OK;
    }
    return err_set(err, KVS_LIMIT, "%s: the regex takes too long on this text", r->name);
}

static int match(const regex *r, regex_run *run, const char *s, size_t n, size_t from)
{
    const PCRE2_SPTR text = (PCRE2_SPTR)s;
    if (r->compiled) {
        const int rc = pcre2_jit_match(r->code, text, n, from, 0, run->data, run->ctx);
        if (rc != PCRE2_ERROR_JIT_STACKLIMIT) {
            return rc;
        }
    }
    return pcre2_match(r->code, text, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, run->data,
                       run->ctx);
}

kvs_status regex_find(const regex *r, regex_run *run, const char *s, size_t n, size_t from,
                      size_t *begin, size_t *end, bool *found, kvs_error *err)
{
    *found = false;
    if (++run->n_search % CLOCK_EVERY == 0) {
        TRY(check_clock(r, run, err));
    }
    for (;;) {
        size_t next = n - from > WINDOW_BYTES ? from + WINDOW_BYTES : n;
        while (next < n && ((unsigned char)s[next] & 0xC0) == 0x80) {
            next++;
        }
        pcre2_set_offset_limit(run->ctx, next < n ? next - 1 : PCRE2_UNSET);
        const int rc = match(r, run, s, n, from);
        if (rc >= 0) {
            const PCRE2_SIZE *at = pcre2_get_ovector_pointer(run->data);
            *begin = at[0];
            *end = at[1];
            *found = true;
            return KVS_OK;
        }
        if (rc != PCRE2_ERROR_NOMATCH) {
            char text[128] = "";
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)text, sizeof text);
            return err_set(err, rc == PCRE2_ERROR_NOMEMORY ? KVS_NOMEM : KVS_LIMIT,
                           "%s: the regex on this text: PCRE2 says: %s", r->name, text);
        }
        if (next == n) {
            return KVS_OK;
        }
        TRY(check_clock(r, run, err));
        from = next;
    }
}

bool regex_begins(const regex *r, regex_run *run, const char *s, size_t n)
{
    pcre2_set_offset_limit(run->ctx, PCRE2_UNSET);
    return match(r, run, s, n, 0) >= 0;
}
