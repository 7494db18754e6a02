/* status.h: what every call of kvspan may answer, and the error a call fills.
 *
 * A function that can fail returns kvs_status: 0 or a positive value when it did its work, a
 * negative one when it did not. Most take a last argument `kvs_error *err`, which may be NULL. When
 * it is given and the call fails, it holds the code, a text that names the value and what would
 * work, the place in the library that refused, and for files and other parsed input the byte
 * offset. The message lies in the caller's struct: there is no global, no thread-local, and nothing
 * to free. A call that succeeds leaves *err as it was.
 *
 * This header compiles as C11 and C++17 and includes nothing of the library. */
#ifndef KVSPAN_STATUS_H
#define KVSPAN_STATUS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* X(name, value, text) for every status. */
#define KVS_STATUS_LIST(X)                                                                         \
    X(OK, 0, "success")                                                                            \
    X(IDLE, 1, "nothing to do")                                                                    \
    X(INVALID, -1, "invalid argument")                                                             \
    X(NOMEM, -2, "out of memory")                                                                  \
    X(NODEV, -3, "no usable device")                                                               \
    X(IO, -4, "read or write failed")                                                              \
    X(FORMAT, -5, "malformed file")                                                                \
    X(UNSUPPORTED, -6, "valid but not supported")                                                  \
    X(LIMIT, -7, "a stated limit was exceeded")                                                    \
    X(BUSY, -8, "try again later")                                                                 \
    X(CANCELLED, -9, "cancelled")                                                                  \
    X(PEER, -10, "another rank failed")                                                            \
    X(DEVICE, -11, "device error")                                                                 \
    X(INTERNAL, -12, "bug in this library")

typedef enum kvs_status {
#define KVS_STATUS_ENUM(name, value, text) KVS_##name = value,
    KVS_STATUS_LIST(KVS_STATUS_ENUM)
#undef KVS_STATUS_ENUM
} kvs_status;

typedef struct kvs_error {
    kvs_status code;
    int32_t line;     /* line in `file` that refused                                             */
    const char *file; /* file name without folder, static storage; NULL where unknown            */
    int64_t pos;      /* byte offset into the parsed input, -1 where there is none               */
    char text[232];   /* NUL-terminated; what, which value, what would work; cut if it is longer */
} kvs_error;

/* The name ("KVS_INVALID") and the text ("invalid argument") of a status, in static storage.
 * A value outside the list gives "KVS_?" and "unknown status".
 * Threads: any. */
const char *kvs_status_name(kvs_status status);
const char *kvs_status_text(kvs_status status);

/* The version of the library that runs, "major.minor.patch", in static storage.
 * Threads: any. */
const char *kvs_version(void);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
