/* check/roof_amx.c - the rate of products of bf16 pairs in tile registers. */
#include "check/roof.h"

#include <immintrin.h>

/* Four tiles of 16 x 16 sums; each step adds 16 pairs of 1 * 1 + 1 * 1 to every element: 32, exact. */
int roof_tile_amx(int64_t n, double *flops)
{
    _Alignas(64) struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t n_row[16];
    } config = {.palette = 1};
    _Alignas(64) uint16_t one[16 * 32];
    _Alignas(64) float sum[4][16 * 16];
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.n_row[i] = 16;
    }
    for (int i = 0; i < 16 * 32; i++) {
        one[i] = 0x3F80;
    }
    /* the intrinsics name a part of what they read as their operand, or nothing */
    __asm__ volatile("" ::"r"(one), "r"(&config) : "memory");
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, one, 64);
    _tile_loadd(5, one, 64);
    for (int64_t k = 0; k < n; k++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sum[0], 64);
    _tile_stored(1, sum[1], 64);
    _tile_stored(2, sum[2], 64);
    _tile_stored(3, sum[3], 64);
    _tile_release();
    __asm__ volatile("" ::"r"(sum) : "memory");
    int ok = 1;
    for (int i = 0; i < 4 * 16 * 16; i++) {
        ok = ok && sum[i / 256][i % 256] == 32.0f * (float)n;
    }
    *flops = (double)n * 4 * 16 * 16 * 32 * 2;
    return ok;
}
