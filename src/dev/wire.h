/* dev/wire.h - memory through which kernels of different ranks reach each other, and how it is laid out.
 *
 * Every rank of a group has one area in its own device's memory, of the same layout on all. Kernels of rank
 * s write what they send to rank d into slots of s in d's area, by plain stores; d reads its own memory
 * only. Exchanges are numbered from 1 (the epoch). An area has two sides, used in turn: exchange e lies on
 * side e mod 2. Since each exchange makes every rank hear from every other, a rank that sends e + 2 has
 * heard that all have finished e, so nobody reads what it overwrites.
 *
 * A slot holds one message in one of two forms that lie in memory of their own, because an epoch is only
 * known as such where nothing but epochs is ever written:
 *   lines   16 bytes: three words of the message and the epoch, stored and loaded as one access;
 *   chunks  up to WIRE_CHUNK bytes, and per chunk a flag that is set to the epoch after them.
 * Each message has a head, a line that says what it is, so that ranks which disagree find out.
 *
 * The control block belongs to the rank's kernels: how many exchanges they have finished, and the fault
 * that ended the group, whoever noticed it first. Epochs are 32 bits and never come round: past
 * WIRE_LAST_EPOCH kernels refuse, and comm/p2p.h renews the group in time.
 *
 * Read by the C compiler and by nvcc: plain declarations only.
 */
#ifndef KVS_DEV_WIRE_H
#define KVS_DEV_WIRE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    WIRE_MAX_RANK = 8,
    WIRE_LINE = 16,       /* bytes, of which WIRE_LINE_WORDS words are payload                      */
    WIRE_LINE_WORDS = 3,
    WIRE_CHUNK = 4160,    /* bytes: two heads of a partial, 2048 + 16 each, rounded up to 64        */
    WIRE_CHUNK_DATA = 4096, /* of plain messages                                                    */
    WIRE_TURN = 4096      /* the control block counts an exchange as so many; more than blocks of a kernel */
};

#define WIRE_LAST_EPOCH 0xFFFFFF00u

/* Why a group has ended; the codes of wire_control.fault. */
typedef enum wire_fault {
    WIRE_SOUND,
    WIRE_LATE,     /* rank `about` did not come in time                                             */
    WIRE_MISMATCH, /* rank `about` came with another message than rank `by`                         */
    WIRE_WORN,     /* no epoch is left                                                              */
    WIRE_ENDED     /* rank `by` ended the group from the host                                       */
} wire_fault;

/* A fault in 64 bits, so that the first one can be set by one compare-and-swap. */
#define WIRE_FAULT(code, about, by, epoch)                                                            \
    ((uint64_t)(uint32_t)(code) << 56 | (uint64_t)(uint32_t)(about) << 48 |                           \
     (uint64_t)(uint32_t)(by) << 40 | (uint64_t)(uint32_t)(epoch))

static inline int32_t wire_fault_code(uint64_t f)
{
    return (int32_t)(f >> 56);
}

static inline int32_t wire_fault_about(uint64_t f)
{
    return (int32_t)(f >> 48 & 0xFF);
}

static inline int32_t wire_fault_by(uint64_t f)
{
    return (int32_t)(f >> 40 & 0xFF);
}

static inline uint32_t wire_fault_epoch(uint64_t f)
{
    return (uint32_t)f;
}

typedef struct wire_control {
    uint64_t done;  /* exchanges finished x WIRE_TURN, plus blocks of the one under way that ended   */
    uint64_t fault; /* WIRE_FAULT; 0: sound                                                         */
} wire_control;

/* The first three words of a head; the fourth is the epoch. */
typedef struct wire_head {
    uint32_t what;  /* the op and form of the message                                               */
    uint32_t n_row;
    uint32_t words; /* from one rank to one peer                                                    */
    uint32_t epoch;
} wire_head;

/* What a kernel of one rank is given. */
typedef struct wire {
    int32_t rank, n_rank;
    uint32_t n_line;     /* lines of a slot                                                         */
    uint32_t n_chunk;    /* chunks of a slot                                                        */
    uint64_t limit_ns;   /* how long a kernel waits for its peers                                   */
    uint8_t *area[WIRE_MAX_RANK]; /* of every rank, as this rank's device reaches them              */
} wire;

/* ---- layout: offsets into an area ----------------------------------------------------------------- */

#ifdef __CUDACC__
#define WIRE_FN static __host__ __device__ inline
#else
#define WIRE_FN static inline
#endif

enum { WIRE_CONTROL_BYTES = 256 };

/* Slot of messages from rank `from` on the side of an epoch. */
WIRE_FN uint32_t wire_slot(int32_t n_rank, uint32_t epoch, int32_t from)
{
    return (epoch & 1u) * (uint32_t)n_rank + (uint32_t)from;
}

WIRE_FN size_t wire_head_at(int32_t n_rank, uint32_t epoch, int32_t from)
{
    return WIRE_CONTROL_BYTES + (size_t)wire_slot(n_rank, epoch, from) * WIRE_LINE;
}

WIRE_FN size_t wire_lines_begin(int32_t n_rank)
{
    return (WIRE_CONTROL_BYTES + (size_t)(2 * n_rank) * WIRE_LINE + 255) / 256 * 256;
}

WIRE_FN size_t wire_line_at(int32_t n_rank, uint32_t n_line, uint32_t epoch, int32_t from)
{
    return wire_lines_begin(n_rank) + (size_t)wire_slot(n_rank, epoch, from) * n_line * WIRE_LINE;
}

WIRE_FN size_t wire_flags_begin(int32_t n_rank, uint32_t n_line)
{
    return wire_line_at(n_rank, n_line, 1, n_rank);
}

WIRE_FN size_t wire_flag_at(int32_t n_rank, uint32_t n_line, uint32_t n_chunk, uint32_t epoch, int32_t from)
{
    return wire_flags_begin(n_rank, n_line) +
           (size_t)wire_slot(n_rank, epoch, from) * n_chunk * sizeof(uint32_t);
}

WIRE_FN size_t wire_chunks_begin(int32_t n_rank, uint32_t n_line, uint32_t n_chunk)
{
    return (wire_flag_at(n_rank, n_line, n_chunk, 1, n_rank) + 255) / 256 * 256;
}

WIRE_FN size_t wire_chunk_at(int32_t n_rank, uint32_t n_line, uint32_t n_chunk, uint32_t epoch, int32_t from)
{
    return wire_chunks_begin(n_rank, n_line, n_chunk) +
           (size_t)wire_slot(n_rank, epoch, from) * n_chunk * WIRE_CHUNK;
}

/* Bytes of an area. */
WIRE_FN size_t wire_area_bytes(int32_t n_rank, uint32_t n_line, uint32_t n_chunk)
{
    return wire_chunk_at(n_rank, n_line, n_chunk, 1, n_rank);
}

/* The epoch of the exchange that begins when `done` reads so; blocks of it that have ended change nothing. */
WIRE_FN uint32_t wire_epoch(uint64_t done)
{
    return (uint32_t)(done / WIRE_TURN) + 1;
}

#ifdef __cplusplus
}
#endif
#endif
