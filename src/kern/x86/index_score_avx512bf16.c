/* x86/index_score_avx512bf16.c - indexer scores for AVX-512 with bf16 products; f32 keys through FMA. */
#define SIMD_LANES 16
#define SCORE_BF16 1
#include "kern/x86/index_score_pairs.h"

static const score_isa g_isa = {
    .lanes = L,
    .fp8_cells = KVS_INDEX_DIM / 2,
    .w_factor = 1.0f,
    .block = score_block,
    .unpack = score_unpack,
    .transpose = score_transpose,
    .sums = score_sums,
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

void INDEX_X86_AVX512(index_score_apply)(kern_table *t)
{
    t->index_score = index_score_simd;
    t->index_score_scratch = index_score_scratch_simd;
}
