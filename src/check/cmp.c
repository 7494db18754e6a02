/* cmp.c - comparison of what an op left with what the oracle wants.
 *
 * Three classes. EXACT: integers, sets, cache bytes, dequantised values. ULP: elementwise results.
 * BOUND: reductions of K terms, |got - want| <= c * sqrt(K) * u * sum|terms| + half an ulp of the
 * output type; each op says beside its compare function where its c and u come from.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "check/check.h"

void cmp_fail(check_result *r, const char *fmt, ...)
{
    if (r->n_bad++ == 0) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(r->first, sizeof r->first, fmt, ap);
        va_end(ap);
    }
}

static void fail_at(check_result *r, coord at, const char *text)
{
    char where[96];
    int n = snprintf(where, sizeof where, "%s[%lld", at.what, (long long)at.row);
    if (at.head >= 0) {
        n += snprintf(where + n, sizeof where - (size_t)n, ", %lld", (long long)at.head);
    }
    if (at.dim >= 0) {
        n += snprintf(where + n, sizeof where - (size_t)n, ", %lld", (long long)at.dim);
    }
    cmp_fail(r, "%s]: %s", where, text);
}

/* Half an ulp of x in the type; 0 where x has no exponent (an infinity or NaN is compared as such). */
double half_ulp_f32(double x)
{
    const double a = fabs(x);
    if (!isfinite(a)) {
        return 0.0;
    }
    return a < 0x1p-126 ? 0x1p-150 : ldexp(1.0, ilogb(a) - 24);
}

double half_ulp_bf16(double x)
{
    const double a = fabs(x);
    if (!isfinite(a)) {
        return 0.0;
    }
    return a < 0x1p-126 ? 0x1p-134 : ldexp(1.0, ilogb(a) - 8);
}

/* The selftest's value: the first float past want + tol, or the last one inside. */
static float planted(double want, double tol, int over)
{
    float edge = (float)(want + tol);
    while ((double)edge - want <= tol) {
        edge = nextafterf(edge, INFINITY);
    }
    if (!over) {
        while ((double)edge - want > tol) {
            edge = nextafterf(edge, -INFINITY);
        }
    }
    return edge;
}

void cmp_near(check_result *r, coord at, float got, double want, double tol)
{
    char text[96];
    if (r->plant > 0 && isfinite(want) && --r->plant == 0) {
        got = planted(want, tol, r->plant_over);
    }
    if (isnan(got) || isnan(want) || isinf(got) || isinf(want)) {
        const int same = isnan(got) ? isnan(want) : (double)got == want;
        if (!same) {
            snprintf(text, sizeof text, "got %g, want %g", (double)got, want);
            fail_at(r, at, text);
        }
        return;
    }
    const double error = fabs((double)got - want);
    if (error <= tol) {
        if (error > 0.0 && error / tol > r->worst) {
            r->worst = error / tol;
        }
        return;
    }
    r->worst = fmax(r->worst, tol > 0.0 ? error / tol : INFINITY);
    snprintf(text, sizeof text, "got %.9g, want %.9g, off by %.3g, bound %.3g", (double)got, want,
             error, tol);
    fail_at(r, at, text);
}

void cmp_ratio(check_result *r, coord at, double error, double tol)
{
    char text[96];
    if (error <= tol) {
        r->worst = error > 0.0 ? fmax(r->worst, error / tol) : r->worst;
        return;
    }
    r->worst = fmax(r->worst, tol > 0.0 ? error / tol : INFINITY);
    snprintf(text, sizeof text, "%.3g, bound %.3g", error, tol);
    fail_at(r, at, text);
}

void cmp_bits(check_result *r, coord at, float got, float want)
{
    if (memcmp(&got, &want, sizeof got) != 0) {
        char text[96];
        snprintf(text, sizeof text, "got %.9g, want the bits of %.9g", (double)got, (double)want);
        fail_at(r, at, text);
    }
}

void cmp_i64(check_result *r, coord at, int64_t got, int64_t want)
{
    if (got != want) {
        char text[96];
        snprintf(text, sizeof text, "got %lld, want %lld", (long long)got, (long long)want);
        fail_at(r, at, text);
    }
}

void cmp_bytes(check_result *r, coord at, const void *got, const void *want, size_t n)
{
    const uint8_t *g = got;
    const uint8_t *w = want;
    if (memcmp(g, w, n) == 0) {
        return;
    }
    size_t i = 0;
    while (g[i] == w[i]) {
        i++;
    }
    char text[96];
    snprintf(text, sizeof text, "byte %zu: got 0x%02x, want 0x%02x", i, g[i], w[i]);
    fail_at(r, at, text);
}
