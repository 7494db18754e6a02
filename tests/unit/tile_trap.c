/* tile_trap.c - AMX on a processor without it: the tile instructions that the compiler made raise SIGILL, and
 * the handler does what the manual says they do (Intel SDM, volume 2; "Intel AMX" in volume 1).
 *
 * For tests whose kernels were compiled with TILE_REAL: vectors of 16 emulated, tiles not. So it sees
 * what plain C in place of the instructions cannot show: a configuration that is not in memory when it is
 * loaded, products of tiles whose shapes do not fit, registers used before or after. Each of these ends the
 * program, as it does on the hardware. One thing stays with the hardware: AMX itself, where this process has
 * asked for it.
 */
#include "unit/tile_trap.h"

#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

enum { N_TILE = 8, N_ROW = 16, ROW_BYTES = 64 };

typedef struct tile_state {
    int is_configured;
    uint8_t n_row[N_TILE];
    uint16_t row_bytes[N_TILE];
    uint8_t data[N_TILE][N_ROW][ROW_BYTES];
} tile_state;

static _Thread_local tile_state g_state;

_Noreturn static void fail(const char *what, int a, int b)
{
    char text[160];
    const int n = snprintf(text, sizeof text, "tile_trap: %s (%d, %d)\n", what, a, b);
    if (write(STDERR_FILENO, text, (size_t)n) == n) {
        _exit(1);
    }
    _exit(2);
}

/* ---- instructions ------------------------------------------------------------------------------ */

static void load_config(const uint8_t *m)
{
    tile_state *s = &g_state;
    memset(s, 0, sizeof *s);
    if (m[0] == 0) {
        return;
    }
    if (m[0] != 1 || m[1] != 0) {
        fail("palette or start row", m[0], m[1]);
    }
    for (int i = 2; i < 64; i++) {
        const int is_shape = (i >= 16 && i < 16 + 2 * N_TILE) || (i >= 48 && i < 48 + N_TILE);
        if (!is_shape && m[i] != 0) {
            fail("a reserved byte of the configuration is not 0", i, m[i]);
        }
    }
    for (int t = 0; t < N_TILE; t++) {
        memcpy(&s->row_bytes[t], m + 16 + 2 * t, 2);
        s->n_row[t] = m[48 + t];
        if (s->n_row[t] > N_ROW || s->row_bytes[t] > ROW_BYTES ||
            (s->n_row[t] == 0) != (s->row_bytes[t] == 0)) {
            fail("rows and bytes of a tile", s->n_row[t], s->row_bytes[t]);
        }
    }
    s->is_configured = 1;
}

static tile_state *used(int t)
{
    tile_state *s = &g_state;
    if (!s->is_configured || t < 0 || t >= N_TILE || s->n_row[t] == 0) {
        fail("a tile that is not configured", t, s->is_configured);
    }
    return s;
}

static void load(int t, const uint8_t *from, int64_t stride)
{
    tile_state *s = used(t);
    memset(s->data[t], 0, sizeof s->data[t]);
    for (int r = 0; r < s->n_row[t]; r++) {
        memcpy(s->data[t][r], from + r * stride, s->row_bytes[t]);
    }
}

static void store(int t, uint8_t *to, int64_t stride)
{
    const tile_state *s = used(t);
    for (int r = 0; r < s->n_row[t]; r++) {
        memcpy(to + r * stride, s->data[t][r], s->row_bytes[t]);
    }
}

static float flush(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

static float half_of(const uint8_t *cell, int odd)
{
    uint32_t bits = (uint32_t)(cell[2 * odd] | cell[2 * odd + 1] << 8) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return flush(f);
}

/* TDPBF16PS: even and odd products apart, from 0, then both onto what was there. Kernels that get here need
 * FMA, too. */
__attribute__((target("fma"))) static void dot_bf16(int c, int a, int b)
{
    tile_state *s = used(c);
    used(a);
    used(b);
    if (c == a || c == b || a == b) {
        fail("a product of a tile with itself", a, b);
    }
    if (s->n_row[c] != s->n_row[a] || s->row_bytes[c] != s->row_bytes[b] ||
        s->row_bytes[a] / 4 != s->n_row[b]) {
        fail("shapes of a product", s->row_bytes[a], s->n_row[b]);
    }
    for (int m = 0; m < s->n_row[c]; m++) {
        for (int n = 0; n < s->row_bytes[c] / 4; n++) {
            float sum[2] = {0.0f, 0.0f};
            for (int k = 0; k < s->n_row[b]; k++) {
                for (int odd = 0; odd < 2; odd++) {
                    sum[odd] = flush(fmaf(half_of(&s->data[a][m][4 * k], odd),
                                          half_of(&s->data[b][k][4 * n], odd), sum[odd]));
                }
            }
            float y;
            memcpy(&y, &s->data[c][m][4 * n], sizeof y);
            y = flush(flush(y) + flush(sum[0] + sum[1]));
            memcpy(&s->data[c][m][4 * n], &y, sizeof y);
        }
    }
}

/* ---- decoding ---------------------------------------------------------------------------------- */

static int64_t reg_of(const ucontext_t *u, int r)
{
    static const int at[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                               REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                               REG_R12, REG_R13, REG_R14, REG_R15};
    return u->uc_mcontext.gregs[at[r]];
}

/* A memory operand: its address, and the index register's value where it has one. */
typedef struct operand {
    uint8_t *at;
    int64_t index;
    int len; /* bytes of ModRM and what follows */
} operand;

static operand operand_of(const ucontext_t *u, const uint8_t *modrm, int more_index, int more_base,
                          int sums_index)
{
    const int mod = modrm[0] >> 6;
    operand o = {.len = 1};
    int base = (modrm[0] & 7) | more_base;
    int64_t at = 0;
    if ((modrm[0] & 7) == 4) {
        const uint8_t sib = modrm[1];
        const int index = (sib >> 3 & 7) | more_index;
        o.len = 2;
        base = (sib & 7) | more_base;
        if (index != 4) {
            o.index = reg_of(u, index) * (1 << (sib >> 6));
        }
    }
    if ((base & 7) == 5 && mod == 0) {
        fail("an address without a base", modrm[0], modrm[1]);
    }
    at = reg_of(u, base);
    if (mod == 1) {
        at += (int8_t)modrm[o.len];
        o.len += 1;
    } else if (mod == 2) {
        int32_t d;
        memcpy(&d, modrm + o.len, sizeof d);
        at += d;
        o.len += 4;
    }
    o.at = (uint8_t *)(uintptr_t)(at + (sums_index ? o.index : 0));
    return o;
}

enum { NP = 0, P66, PF3, PF2 };

static void on_sigill(int sig, siginfo_t *info, void *context)
{
    (void)sig;
    (void)info;
    ucontext_t *u = context;
    const uint8_t *p = (const uint8_t *)(uintptr_t)u->uc_mcontext.gregs[REG_RIP];
    /* C4, then RXB and the map, then W, vvvv, L and the prefix; registers are stored inverted */
    if (p[0] != 0xC4 || (p[1] & 0x1F) != 2 || (p[2] & 0x84) != 0) {
        fail("this processor lacks an instruction that is not of tiles", p[0], p[1]);
    }
    const int more_index = (p[1] & 0x40) != 0 ? 0 : 8;
    const int more_base = (p[1] & 0x20) != 0 ? 0 : 8;
    const int third = ~(p[2] >> 3) & 15;
    const int prefix = p[2] & 3;
    const uint8_t *modrm = p + 4;
    const int reg = modrm[0] >> 3 & 7;
    const int is_reg = modrm[0] >> 6 == 3;
    int len = 1;
    if (p[3] == 0x49 && prefix == NP && !is_reg) {
        const operand o = operand_of(u, modrm, more_index, more_base, 1);
        load_config(o.at);
        len = o.len;
    } else if (p[3] == 0x49 && prefix == NP && modrm[0] == 0xC0) {
        memset(&g_state, 0, sizeof g_state);
    } else if (p[3] == 0x49 && prefix == PF2 && is_reg) {
        memset(used(reg)->data[reg], 0, sizeof g_state.data[reg]);
    } else if (p[3] == 0x4B && (prefix == PF2 || prefix == PF3) && !is_reg && (modrm[0] & 7) == 4) {
        const operand o = operand_of(u, modrm, more_index, more_base, 0);
        if (prefix == PF2) {
            load(reg, o.at, o.index);
        } else {
            store(reg, o.at, o.index);
        }
        len = o.len;
    } else if (p[3] == 0x5C && prefix == PF3 && is_reg) {
        dot_bf16(reg, modrm[0] & 7, third);
    } else {
        fail("an instruction of tiles that is not known here", p[3], prefix);
    }
    u->uc_mcontext.gregs[REG_RIP] += 4 + len;
}

void tile_trap_install(void)
{
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_sigaction = on_sigill;
    a.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &a, NULL);
}
