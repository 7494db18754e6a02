/* log.h: writing log lines from inside the library; include/kvspan/log.h says where they go.
 *
 *     LOG(WARN, KV, "pool of %lld pages is full", n);
 *     LOG_RATE(WARN, COMM, "rank %d is late", r);      at most one a second from this place
 *
 * The arguments are evaluated only when the line is wanted. No allocation; a line is cut at 1000
 * bytes. */
#ifndef BASE_LOG_H
#define BASE_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "kvspan/log.h"

/* Whether a line of that level and subsystem would go anywhere. */
bool log_wants(kvs_log_level level, kvs_log_sys sys);

void log_write(kvs_log_level level, kvs_log_sys sys, const char *fmt, ...) ERR_PRINTF(3, 4);

/* One place's memory of when it last spoke. Zero at first. */
typedef struct log_gate {
    atomic_int_fast64_t next_ns; /* silent before this time */
    atomic_int_fast64_t n_dropped;
} log_gate;

/* Whether the place may speak at t_ns; *n_dropped is how often it was held back since. */
bool log_gate_open(log_gate *g, int64_t t_ns, int64_t *n_dropped);

/* log_write behind a gate, on the monotonic clock; appends how many lines were left out. */
void log_write_rate(log_gate *g, kvs_log_level level, kvs_log_sys sys, const char *fmt, ...)
    ERR_PRINTF(4, 5);

#define LOG(level, sys, ...)                                                                       \
    do {                                                                                           \
        if (log_wants(KVS_LOG_##level, KVS_LOG_##sys)) {                                           \
            log_write(KVS_LOG_##level, KVS_LOG_##sys, __VA_ARGS__);                                \
        }                                                                                          \
    } while (0)

#define LOG_RATE(level, sys, ...)                                                                  \
    do {                                                                                           \
        if (log_wants(KVS_LOG_##level, KVS_LOG_##sys)) {                                           \
            static log_gate log_gate_here;                                                         \
            log_write_rate(&log_gate_here, KVS_LOG_##level, KVS_LOG_##sys, __VA_ARGS__);           \
        }                                                                                          \
    } while (0)

#endif
