/* x86/index_score_amx.c - indexer scores for AMX: products of e4m3 keys in tiles (tile.h), 16 keys by 16 lanes of
 * heads; f32 keys through FMA.
 *
 * A panel is what a tile takes as its columns and unpacked keys are what it takes as rows, so this differs from
 * AVX-512 BF16 in how sums are formed only. Lanes without a head need no mask: query and weight are 0 there, and
 * e4m3 has no infinity that would make a NaN of it.
 *
 * Of rows that share panels, a unit is 32 keys by one or two vectors of lanes. What tiles store is slow to be
 * read at once, so a unit's products become scores two units later, a part after each step of a product: the
 * tiles multiply meanwhile.
 */
#define SIMD_LANES 16
#define SCORE_BF16 1
#include "kern/x86/index_score_pairs.h"
#include "kern/x86/tile.h"

enum {
    MAX_VEC = SCORE_MAX_HEAD / L,
    STEPS = KVS_INDEX_DIM / 2 / TILE, /* of a product                                        */
    KEYS = 2 * TILE,                  /* worked on together                                  */
    NEAR = KVS_PAGE_TOKENS,           /* keys that stay in the first cache as panels pass by */
    RAW = KEYS * 2 * L,               /* products of a unit                                  */
    LATE = 2                          /* units between products and their scores             */
};

_Static_assert(SCORE_CHUNK % NEAR == 0 && NEAR % KEYS == 0, "whole tiles of keys");
_Static_assert((LATE + 1) * RAW <= SCORE_PART * SCORE_ROWS * 8, "the products of units fit");

/* raw[key * p->block + lane] of 16 nk keys with every vector of the panel. */
SIMD_FN void tile_keys(const score_panel *p, const float *key, const int nk, float *raw)
{
    const int32_t n_vec = p->block / L;
    for (int32_t z = 0; z < n_vec; z += 2) {
        const tile_job j = {.a = key,
                            .a_stride = p->n_cell,
                            .b = p->cell + z * L,
                            .b_stride = p->block,
                            .b_next = L,
                            .n_step = STEPS,
                            .c = raw + z * L,
                            .c_stride = p->block,
                            .c_next = L};
        if (z + 1 < n_vec) {
            tile_product(&j, nk, 2);
        } else {
            tile_product(&j, nk, 1);
        }
    }
}

/* Heads of one row: the vectors of a key in order, as score_group adds them. */
SIMD_FN void add_heads(const score_panel *p, const float *raw, int32_t n, const int nz, float *sum)
{
    vf weight[MAX_VEC];
    SIMD_UNROLL
    for (int z = 0; z < nz; z++) {
        weight[z] = vf_loadu(p->w + z * L);
    }
    for (int32_t k = 0; k < n; k++) {
        vf s = vf_zero();
        SIMD_UNROLL
        for (int z = 0; z < nz; z++) {
            const vf dot = vf_loadu(raw + (k * nz + z) * L);
            /* the second operand of max is the result where one is NaN: NaN stays */
            s = vf_fma(vf_max(vf_zero(), dot), weight[z], s);
        }
        vf_storeu(sum + k * L, s);
    }
}

static void sums_alone(const score_panel *p, const float *key, int32_t n, float *sum)
{
    _Alignas(64) float raw[KEYS * SCORE_MAX_HEAD];
    for (int32_t k = 0; k < n; k += KEYS) {
        const float *at = key + (int64_t)k * p->n_cell;
        float *to = sum + k * L;
        tile_keys(p, at, 2, raw);
        switch (p->block / L) {
        case 1:
            add_heads(p, raw, KEYS, 1, to);
            break;
        case 2:
            add_heads(p, raw, KEYS, 2, to);
            break;
        case 3:
            add_heads(p, raw, KEYS, 3, to);
            break;
        default:
            add_heads(p, raw, KEYS, 4, to);
            break;
        }
    }
}

/* Keys [key, key + KEYS) of a chunk times the vectors at `lane` and, where `two`, the next. */
typedef struct tile_unit {
    const score_panel *p;
    int32_t lane, key;
    int32_t two;
    int32_t n_part; /* parts of its scores; 0: there is no unit */
} tile_unit;

/* Part t of a unit's scores, from its products. */
typedef void (*part_fn)(const tile_unit *u, const float *raw, const float *scale, int32_t t);

/* Of 16 keys for one vector of lanes. */
static void part_4(const tile_unit *u, const float *raw, const float *scale, int32_t t)
{
    const int64_t half = (t & 1) * TILE;
    const int64_t next = (t >> 1) * L;
    finish_quads(u->p, u->lane + (int32_t)next, raw + half * 2 * L + next, 2 * L, scale,
                 u->key + (int32_t)half, vm_from_bits(0), 4, 0);
}

/* Of 16 keys for both vectors. */
static void part_8(const tile_unit *u, const float *raw, const float *scale, int32_t t)
{
    const int64_t half = t * TILE;
    finish_quads(u->p, u->lane, raw + half * 2 * L, 2 * L, scale, u->key + (int32_t)half,
                 vm_from_bits(0), 8, 0);
}

/* The last units, in the order in which they are multiplied. */
typedef struct tile_ring {
    const float *key, *scale; /* of the chunk                                 */
    float *raw;               /* [LATE + 1][KEYS][2 * L] products of u[0] ... */
    part_fn part;
    tile_unit u[LATE + 1];
    int32_t next; /* where the next goes: what is there was finished */
} tile_ring;

/* Products of u into raw, beside the parts of `old`. nb, 1 or 2: vectors. */
SIMD_FN void unit_multiply(const tile_ring *r, const tile_unit *u, float *raw, const tile_unit *old,
                           const float *old_raw, const int nb)
{
    const int64_t key_cells = KVS_INDEX_DIM / 2;
    const int64_t lane_cells = u->p->block;
    const float *a = r->key + u->key * key_cells;
    const float *b = u->p->cell + u->lane;
    tile_fence();
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int32_t t = 0; t < STEPS; t++) {
        TILE_LOAD(4, a, key_cells * 4);
        TILE_LOAD(6, b, lane_cells * 4);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(5, a + TILE * key_cells, key_cells * 4);
        TILE_DOT(2, 5, 6);
        if (nb == 2) {
            TILE_LOAD(7, b + L, lane_cells * 4);
            TILE_DOT(1, 4, 7);
            TILE_DOT(3, 5, 7);
        }
        a += TILE;
        b += TILE * lane_cells;
        if (t < old->n_part) {
            r->part(old, old_raw, r->scale, t);
        }
    }
    TILE_STORE(0, raw, 2 * L * 4);
    TILE_STORE(2, raw + TILE * 2 * L, 2 * L * 4);
    if (nb == 2) {
        TILE_STORE(1, raw + L, 2 * L * 4);
        TILE_STORE(3, raw + TILE * 2 * L + L, 2 * L * 4);
    }
    tile_fence();
}

static void ring_add(tile_ring *r, const score_panel *p, int32_t lane, int32_t key)
{
    const int32_t two = lane + L < p->lanes;
    tile_unit *u = &r->u[r->next];
    float *raw = r->raw + r->next * RAW;
    *u = (tile_unit){
        .p = p, .lane = lane, .key = key, .two = two, .n_part = two && p->row_lanes == 4 ? 4 : 2};
    r->next = r->next == LATE ? 0 : r->next + 1;
    const tile_unit *old = &r->u[r->next];
    const float *old_raw = r->raw + r->next * RAW;
    if (two) {
        unit_multiply(r, u, raw, old, old_raw, 2);
    } else {
        unit_multiply(r, u, raw, old, old_raw, 1);
    }
}

/* The scores of the last LATE units. */
static void ring_end(const tile_ring *r)
{
    for (int32_t i = 1; i <= LATE; i++) {
        const int32_t at = (r->next + i) % (LATE + 1);
        for (int32_t t = 0; t < r->u[at].n_part; t++) {
            r->part(&r->u[at], r->raw + at * RAW, r->scale, t);
        }
    }
}

/* A few keys at a time, all panels over them: keys are read from the first cache, panels pass by. */
static void tile_rows(const score_panel *p, int32_t n_panel, const float *key, int32_t fmt,
                      const float *scale, float *sum)
{
    if (fmt == KVS_INDEX_F32) {
        score_rows(p, n_panel, key, fmt, scale, sum);
        return;
    }
    tile_ring r = {
        .key = key, .scale = scale, .part = p->row_lanes == 4 ? part_4 : part_8, .raw = sum};
    for (int32_t at = 0; at < SCORE_CHUNK; at += NEAR) {
        for (int32_t i = 0; i < n_panel; i++) {
            const int32_t end = p[i].n_key < at + NEAR ? p[i].n_key : at + NEAR;
            for (int32_t lane = 0; lane < p[i].lanes; lane += 2 * L) {
                for (int32_t k = at; k < end; k += KEYS) {
                    ring_add(&r, &p[i], lane, k);
                }
            }
        }
    }
    ring_end(&r);
}

static void tile_sums(const score_panel *p, const float *key, int32_t fmt, int32_t n, float *sum)
{
    if (fmt == KVS_INDEX_F32) {
        score_sums(p, key, fmt, n, sum);
    } else {
        sums_alone(p, key, n, sum);
    }
}

static void begin_tiles(int32_t fmt)
{
    if (fmt != KVS_INDEX_F32) {
        tile_begin();
    }
}

static void end_tiles(int32_t fmt)
{
    if (fmt != KVS_INDEX_F32) {
        tile_end();
    }
}

static const score_isa g_isa = {SCORE_ISA_PAIRS, .begin = begin_tiles, .end = end_tiles,
                                .sums = tile_sums, .rows = tile_rows};

SCORE_VARIANT(INDEX_X86_AMX(index_score_apply), g_isa)
