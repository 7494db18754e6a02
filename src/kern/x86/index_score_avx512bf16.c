/* x86/index_score_avx512bf16.c - indexer scores for AVX-512 with bf16 products; f32 keys through FMA. */
#define SIMD_LANES 16
#define SCORE_BF16 1
#include "kern/x86/index_score_pairs.h"

static const score_isa g_isa = {SCORE_ISA_PAIRS, .sums = score_sums, .rows = score_rows};

SCORE_VARIANT(INDEX_X86_AVX512(index_score_apply), g_isa)
