/* num/trig.h - sine and cosine of an angle, the same bits on every host.
 *
 * libm differs between hosts, and rope angles reach 2^31 radians, so this is written out: a reduction by
 * pi/2 in two parts with fused multiply-adds, then Taylor polynomials in double. For |x| <= 2^31 that is an
 * f32 (any position times any frequency) the results are within 2^-52 of the true ones: rounded to f32 they
 * are within 0.51 units in the last place, except below 1e-7 in magnitude, where 2^-52 bounds the error.
 *
 * Why two parts suffice: n = round(x * 2/pi) < 2^31 and the high part has 53 bits, so x - n * high is a multiple
 * of 2^-52 below 1 and exact in the fused operation; the low part then adds what is left of n * pi/2 with one
 * rounding.
 */
#ifndef KVS_NUM_TRIG_H
#define KVS_NUM_TRIG_H

#include <math.h>
#include <stdint.h>

#define TRIG_TWO_OVER_PI 0x1.45f306dc9c883p-1
#define TRIG_HALF_PI_HI 0x1.921fb54442d18p+0
#define TRIG_HALF_PI_LO 0x1.1a62633145c07p-54
#define TRIG_MAGIC 0x1.8p+52 /* adding it rounds to an integer, nearest even */

/* x is finite and |x| <= 2^31. */
static inline void trig_sincos(double x, double *sine, double *cosine)
{
    const double n = (x * TRIG_TWO_OVER_PI + TRIG_MAGIC) - TRIG_MAGIC;
    const double r = fma(-n, TRIG_HALF_PI_LO, fma(-n, TRIG_HALF_PI_HI, x));
    const double z = r * r;
    /* |r| <= pi/4 and a little: the first terms left out are below 2^-54 */
    double s = -1.0 / 1307674368000.0;
    s = s * z + 1.0 / 6227020800.0;
    s = s * z - 1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z - 1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z - 1.0 / 6.0;
    s = s * z * r + r;
    double c = 1.0 / 20922789888000.0;
    c = c * z - 1.0 / 87178291200.0;
    c = c * z + 1.0 / 479001600.0;
    c = c * z - 1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z - 1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    c = c * z - 0.5;
    c = c * z + 1.0;
    const int64_t quadrant = (int64_t)n & 3;
    const double a = (quadrant & 1) != 0 ? c : s;
    const double b = (quadrant & 1) != 0 ? s : c;
    *sine = (quadrant & 2) != 0 ? -a : a;
    *cosine = quadrant == 1 || quadrant == 2 ? -b : b;
}

#endif
