/* x86/index_score_amx.c - indexer scores for AMX: products of e4m3 keys in tiles (tile.h), 16 keys by 16 lanes of
 * heads; f32 keys through FMA.
 *
 * A panel is what a tile takes as its columns and unpacked keys are what it takes as rows, so this differs from
 * AVX-512 BF16 in how sums are formed only. Lanes without a head need no mask: query and weight are 0 there, and
 * e4m3 has no infinity that would make a NaN of it.
 */
#define SIMD_LANES 16
#define SCORE_BF16 1
#include "kern/x86/index_score_pairs.h"
#include "kern/x86/tile.h"

enum {
    KEYS = 2 * TILE, /* worked on together */
    MAX_VEC = SCORE_MAX_HEAD / L
};

_Static_assert(SCORE_CHUNK % KEYS == 0 && SCORE_PART % TILE == 0, "whole tiles of keys");

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
                            .n_step = KVS_INDEX_DIM / 2 / TILE,
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

/* The lanes of several rows, each by itself, n keys. */
static void weigh_rows(const score_panel *p, int32_t n, float *sum)
{
    for (int32_t z = 0; z < p->lanes; z += L) {
        const vf weight = vf_loadu(p->w + z);
        for (int32_t k = 0; k < n; k++) {
            float *at = sum + k * p->lanes + z;
            vf_storeu(at, vf_mul(vf_max(vf_zero(), vf_loadu(at)), weight));
        }
    }
}

static void sums_rows(const score_panel *p, const float *key, int32_t n, float *sum)
{
    int32_t k = 0;
    for (; k + TILE < n; k += KEYS) {
        tile_keys(p, key + (int64_t)k * p->n_cell, 2, sum + k * p->lanes);
    }
    if (k < n) {
        tile_keys(p, key + (int64_t)k * p->n_cell, 1, sum + k * p->lanes);
    }
    weigh_rows(p, n, sum);
}

static void score_tiles(const score_panel *p, const float *key, int32_t fmt, int32_t n, float *sum)
{
    if (fmt == KVS_INDEX_F32) {
        score_sums(p, key, fmt, n, sum);
        return;
    }
    tile_begin();
    if (p->row_lanes != 0) {
        sums_rows(p, key, n, sum);
    } else {
        sums_alone(p, key, n, sum);
    }
    tile_end();
}

static const score_isa g_isa = {
    .lanes = L,
    .fp8_cells = KVS_INDEX_DIM / 2,
    .w_factor = 1.0f,
    .block = score_block,
    .unpack = score_unpack,
    .transpose = score_transpose,
    .sums = score_tiles,
    .finish = score_finish,
    .finish_row = score_finish_row,
};

static void index_score_simd(const index_score_args *a, dev_queue *q)
{
    index_score_run(&g_isa, a, q);
}

static size_t index_score_scratch_simd(const index_score_args *a, const dev_queue *q)
{
    return index_score_scratch_run(&g_isa, a, q);
}

void INDEX_X86_AMX(index_score_apply)(kern_table *t)
{
    t->index_score = index_score_simd;
    t->index_score_scratch = index_score_scratch_simd;
}
