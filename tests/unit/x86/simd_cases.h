/* simd_cases.h: the cases of simd_cases.c for each kind of vector. */
#ifndef SIMD_CASES_H
#define SIMD_CASES_H

void simd_cases_avx2(void);
void simd_cases_emulate(void); /* 16 lanes as pairs of AVX2 vectors */
void simd_cases_avx512(void);  /* needs AVX-512 with BF16           */

#endif
