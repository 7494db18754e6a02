/* err.h: how a function of the library reports failure.
 *
 * err_set fills the caller's kvs_error and returns the code, so that a refusal is one statement:
 *     return err_set(err, KVS_INVALID, "dcp %d: use 1, 2, 4 or 8", dcp);
 * `err` may be NULL everywhere. Nothing here prints, allocates or keeps state. A negative status is
 * a failure; KVS_OK and KVS_IDLE are not. */
#ifndef BASE_ERR_H
#define BASE_ERR_H

#include "kvspan/status.h"

#if defined(__GNUC__)
#define ERR_PRINTF(i_fmt, i_arg) __attribute__((format(printf, i_fmt, i_arg)))
#else
#define ERR_PRINTF(i_fmt, i_arg)
#endif

/* Fills *err with code, place, text and position -1; returns code. Text longer than the field is
 * cut and ends in "...". */
kvs_status err_set_at(kvs_error *err, const char *file, int line, kvs_status code, const char *fmt,
                      ...) ERR_PRINTF(5, 6);

#define err_set(err, code, ...) err_set_at((err), __FILE__, __LINE__, (code), __VA_ARGS__)

/* Adds the byte offset at which a parser stopped. */
void err_at(kvs_error *err, int64_t pos);

/* Puts "prefix: " before the text of an error that a callee filled; keeps its code and place. */
void err_prefix(kvs_error *err, const char *fmt, ...) ERR_PRINTF(2, 3);

/* Returns from the calling function when expr is a failure. */
#define TRY(expr)                                                                                  \
    do {                                                                                           \
        const kvs_status try_st = (expr);                                                          \
        if (try_st < 0) {                                                                          \
            return try_st;                                                                         \
        }                                                                                          \
    } while (0)

/* Stores expr in the local `kvs_status st` and jumps when it is a failure. */
#define TRY_GOTO(expr, label)                                                                      \
    do {                                                                                           \
        st = (expr);                                                                               \
        if (st < 0) {                                                                              \
            goto label;                                                                            \
        }                                                                                          \
    } while (0)

#endif
