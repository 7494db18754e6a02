/* log.h: what the library says while it works, and to whom.
 *
 * Every line has a level and a subsystem. Lines above the level set for their subsystem cost a load
 * and a compare. A line that could repeat for every token is limited to one per second and place;
 * the next one says how many were left out. Errors of a call are not logged: they are in its
 * kvs_error.
 *
 * Until kvs_log_set is called, lines go to standard error, one write each; the levels come from
 * KVS_LOG when it is set and are `warn` otherwise. Settings are per process. */
#ifndef KVSPAN_LOG_H
#define KVSPAN_LOG_H

#include "kvspan/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef enum kvs_log_level {
    KVS_LOG_OFF = 0,
    KVS_LOG_ERROR = 1,
    KVS_LOG_WARN = 2,
    KVS_LOG_INFO = 3,
    KVS_LOG_DEBUG = 4
} kvs_log_level;

/* X(name, word) for every subsystem. */
#define KVS_LOG_SYS_LIST(X)                                                                        \
    X(CORE, "core")                                                                                \
    X(LOAD, "load")                                                                                \
    X(KV, "kv")                                                                                    \
    X(COMM, "comm")                                                                                \
    X(KERN, "kern")                                                                                \
    X(DCP, "dcp")                                                                                  \
    X(SCHED, "sched")                                                                              \
    X(HTTP, "http")

typedef enum kvs_log_sys {
#define KVS_LOG_SYS_ENUM(name, word) KVS_LOG_##name,
    KVS_LOG_SYS_LIST(KVS_LOG_SYS_ENUM)
#undef KVS_LOG_SYS_ENUM
        KVS_LOG_N_SYS
} kvs_log_sys;

/* fn gets finished text without a newline, valid during the call, from any thread but never from
 * two at once. A line that fn itself causes is dropped. fn NULL silences the library. */
typedef struct kvs_logger {
    void (*fn)(void *ctx, kvs_log_level level, kvs_log_sys sys, const char *text);
    void *ctx;
} kvs_logger;

/* Sends lines to *logger (copied; ctx is kept until the next call), or to standard error again when
 * logger is NULL. When it returns the logger before is no longer in use; so it must not be called
 * from inside a logger.
 * Threads: any. */
void kvs_log_set(const kvs_logger *logger);

/* Sets levels from "LEVEL[,SUBSYSTEM=LEVEL...]", where LEVEL is off, error, warn, info or debug; a
 * level without a subsystem is for all of them and comes first. KVS_INVALID changes nothing.
 * Threads: any. */
kvs_status kvs_log_levels(const char *spec, kvs_error *err);

/* The words used in specs and lines ("warn", "kv"); "?" for values outside the lists.
 * Threads: any. */
const char *kvs_log_level_name(kvs_log_level level);
const char *kvs_log_sys_name(kvs_log_sys sys);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
