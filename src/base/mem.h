/* mem.h: the one place that allocates.
 *
 * Heap blocks are aligned (64 bytes unless asked for more) and counted. mem_alloc(0) gives a block
 * of its own, so NULL always means failure. Memory is not cleared, except by mem_calloc.
 *
 * Pages (mem_map_pages) are a mapping of their own, zero at first, backed by memory when touched. A
 * rank's cache lies in one, so that a test may mprotect it.
 *
 * For tests: mem_fail_after makes one later allocation fail; mem_guard_begin marks a stretch in
 * which this thread must not allocate; mem_poison fills what is handed out with 0xFF (NaN in every
 * float format of the project, -1 in every integer). All three are off by default.
 *
 * Every function may be called by any thread at any time, except the arena's, which belongs to one
 * thread at a time. */
#ifndef BASE_MEM_H
#define BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvspan/status.h"

enum { MEM_ALIGN = 64 };

/* n bytes at an address divisible by align (a power of two; 0 means MEM_ALIGN; less is raised to
 * it). NULL when there is no memory, when align is no power of two, or when n + align overflows. */
void *mem_alloc(size_t n, size_t align);

/* mem_alloc(n * size, align) with the product checked: NULL when it overflows. */
void *mem_alloc_array(size_t n, size_t size, size_t align);

/* n * size zero bytes at MEM_ALIGN; NULL also when the product overflows. */
void *mem_calloc(size_t n, size_t size);

/* Resizes a block and keeps its alignment and its first min(old, n) bytes. On failure returns NULL
 * and the old block stays valid. mem_realloc(NULL, n) is mem_alloc(n, 0). */
void *mem_realloc(void *p, size_t n);

/* Frees a block of the functions above; NULL is fine. */
void mem_free(void *p);

/* The size a block was asked for. */
size_t mem_size(const void *p);

/* A private anonymous mapping of at least `bytes` (rounded up to whole pages), zero-filled, readable
 * and writable, reserved but not committed. huge != 0 aligns it to 2 MiB and asks the kernel for
 * huge pages, which it may refuse silently. NULL with err filled on failure. bytes 0 is invalid. */
void *mem_map_pages(size_t bytes, int huge, kvs_error *err);

/* Unmaps a mapping of mem_map_pages; `bytes` is what was asked for. NULL is fine. */
void mem_unmap_pages(void *p, size_t bytes);

/* The size of a page of the machine, and `bytes` rounded up to it. */
size_t mem_page_size(void);
size_t mem_page_round(size_t bytes);

typedef struct mem_stats {
    int64_t live_bytes;  /* heap and pages asked for and not given back      */
    int64_t peak_bytes;  /* the largest live_bytes since the last peak reset */
    int64_t n_live;      /* blocks and mappings not given back               */
    int64_t n_alloc;     /* allocations since the process began              */
    int64_t n_violation; /* allocations inside a guard, by any thread        */
} mem_stats;

/* A snapshot; the fields are each exact but not taken at one instant. */
mem_stats mem_stats_get(void);

/* Makes the peak equal to what lives now. */
void mem_peak_reset(void);

/* The n-th allocation from now (1 = the next one, by any thread) fails, and no other. 0 disarms. */
void mem_fail_after(int64_t n);

/* Whether the failure armed last has happened. */
bool mem_fail_fired(void);

/* Between begin and end the calling thread must not allocate, resize or map. Guards nest. end
 * returns how many times this thread did since the outermost begin. The pool carries the guard of
 * its caller over to the workers; their violations appear in mem_stats only. */
void mem_guard_begin(void);
int64_t mem_guard_end(void);
bool mem_guard_active(void);

/* Fill fresh heap blocks with 0xFF (not mem_calloc, not pages). */
void mem_poison(bool on);

/* A bump allocator over one block of fixed capacity and fixed address. */
typedef struct arena {
    unsigned char *base;
    size_t cap;
    size_t used;
    size_t peak;
    bool owned;
} arena;

/* Takes a block of cap bytes from mem_alloc. On failure *a is empty and needs no fini. */
kvs_status arena_init(arena *a, size_t cap, kvs_error *err);

/* Uses the caller's block, which must outlive the arena. */
void arena_init_with(arena *a, void *base, size_t cap);

/* n bytes at an address divisible by align (0 means MEM_ALIGN); NULL when they do not fit, and then
 * nothing has changed. n 0 gives a valid address of no bytes. */
void *arena_alloc(arena *a, size_t n, size_t align);

/* Gives everything back at once, or everything taken after a mark (a value of a->used). */
void arena_reset(arena *a);
void arena_rewind(arena *a, size_t mark);
void arena_fini(arena *a);

#endif
