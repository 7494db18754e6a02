/* dev/wire.h - memory through which kernels of different ranks reach each other, and how it is laid out.
 *
 * Every rank of a group has one area in its own device's memory, of the same layout on all. Kernels of rank
 * s write what they send to rank d into slots of s in d's area, by plain stores; d reads its own memory
 * only. Exchanges are numbered from 1 (the epoch). An area has two sides, used in turn: exchange e lies on
 * side e mod 2. Since each exchange makes every rank hear from every other, a rank that sends e + 2 has
 * heard that all have finished e, so nobody reads what it overwrites.
 *
 * A slot is a row of cells of 16 bytes, each stored and loaded as one access. A cell that nothing has been sent to
 * is empty: every byte of it is WIRE_EMPTY. Whoever receives loads until it is not, and makes it empty again before
 * his exchange ends, hence before anyone can send to it again. So what arrives needs no flag and no order, and
 * nothing of an earlier exchange can pass for new. A cell whose content is not to be told from an empty one travels
 * as a mark instead, and the word of the cell among the escapes says, with the epoch, what it stands for.
 * Each message has a head, a cell with the epoch that says what it is, so that ranks which disagree find out.
 *
 * The control block belongs to the rank's kernels: how many exchanges they have finished, and the fault
 * that ended the group, whoever noticed it first. Epochs have 31 bits and never come round: past
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
    WIRE_CELL = 16,       /* bytes                                                                  */
    WIRE_EMPTY = 0xF6,    /* each byte of an empty cell                                             */
    WIRE_TURN = 4096      /* the control block counts an exchange as so many; more than blocks of a kernel */
};

#define WIRE_EMPTY_WORD 0xF6F6F6F6u
#define WIRE_MARK_WORD 0xF6F6F6F7u /* the last word of a mark; the others are those of an empty cell */
#define WIRE_LAST_EPOCH 0x7FFFFF00u

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

typedef struct wire_head {
    uint32_t what;  /* the op of the message                                                        */
    uint32_t n_row;
    uint32_t words; /* from one rank to one peer                                                    */
    uint32_t epoch;
} wire_head;

/* What a kernel of one rank is given. */
typedef struct wire {
    int32_t rank, n_rank;
    uint32_t n_cell;     /* of a slot                                                               */
    uint64_t limit_ns;   /* how long a kernel waits for its peers                                   */
    uint8_t *area[WIRE_MAX_RANK]; /* of every rank, as this rank's device reaches them              */
} wire;

/* ---- layout: offsets into an area ----------------------------------------------------------------- */

#ifdef __CUDACC__
#define WIRE_FN static __host__ __device__ inline
#else
#define WIRE_FN static inline
#endif

/* The control block: what kernels write, then for each rank the reason for which its host ended the group, there before
 * the fault that tells of it. */
enum {
    WIRE_REASON_AT = 128,
    WIRE_REASON_BYTES = 128,
    WIRE_CONTROL_BYTES = WIRE_REASON_AT + WIRE_MAX_RANK * WIRE_REASON_BYTES
};

static inline size_t wire_reason_at(int32_t by)
{
    return WIRE_REASON_AT + (size_t)by * WIRE_REASON_BYTES;
}

/* Whether a cell is empty or a mark. */
WIRE_FN int wire_is_reserved(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    return ((a ^ WIRE_EMPTY_WORD) | (b ^ WIRE_EMPTY_WORD) | (c ^ WIRE_EMPTY_WORD) | ((d ^ WIRE_EMPTY_WORD) & ~1u)) ==
           0;
}

/* What the word of a mark says: that the cell's content ended with this word. */
WIRE_FN uint32_t wire_escape_of(uint32_t epoch, uint32_t last_word)
{
    return epoch << 1 | (last_word & 1u);
}

/* Slot of messages from rank `from` on the side of an epoch. */
WIRE_FN uint32_t wire_slot(int32_t n_rank, uint32_t epoch, int32_t from)
{
    return (epoch & 1u) * (uint32_t)n_rank + (uint32_t)from;
}

WIRE_FN size_t wire_head_at(int32_t n_rank, uint32_t epoch, int32_t from)
{
    return WIRE_CONTROL_BYTES + (size_t)wire_slot(n_rank, epoch, from) * sizeof(wire_head);
}

/* A word for each cell of a slot. */
WIRE_FN size_t wire_escape_at(int32_t n_rank, uint32_t n_cell, uint32_t epoch, int32_t from)
{
    return WIRE_CONTROL_BYTES + (size_t)(2 * n_rank) * sizeof(wire_head) +
           (size_t)wire_slot(n_rank, epoch, from) * n_cell * sizeof(uint32_t);
}

/* All before is 0 in a new area, all behind is empty. */
WIRE_FN size_t wire_cells_begin(int32_t n_rank, uint32_t n_cell)
{
    return (wire_escape_at(n_rank, n_cell, 1, n_rank) + 255) / 256 * 256;
}

/* Bytes from the cells of a slot to those of the next: whole lines of 128 bytes, as a link carries them. */
WIRE_FN size_t wire_slot_bytes(uint32_t n_cell)
{
    return ((size_t)n_cell * WIRE_CELL + 127) / 128 * 128;
}

WIRE_FN size_t wire_cell_at(int32_t n_rank, uint32_t n_cell, uint32_t epoch, int32_t from)
{
    return wire_cells_begin(n_rank, n_cell) + (size_t)wire_slot(n_rank, epoch, from) * wire_slot_bytes(n_cell);
}

/* Bytes of an area. */
WIRE_FN size_t wire_area_bytes(int32_t n_rank, uint32_t n_cell)
{
    return wire_cell_at(n_rank, n_cell, 1, n_rank);
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
