/* text/utf8.c - one character at a time, and a fast walk over what is all ASCII. */
#include "text/utf8.h"

#include <string.h>

/* Bytes that follow a lead byte, 0 where it cannot lead, and the range of the second byte. */
static size_t lead(unsigned char b, unsigned char *lo, unsigned char *hi)
{
    *lo = 0x80;
    *hi = 0xBF;
    if (b < 0xC2 || b > 0xF4) {
        return 0;
    }
    if (b < 0xE0) {
        return 1;
    }
    if (b < 0xF0) {
        *lo = b == 0xE0 ? 0xA0 : 0x80; /* no overlong forms */
        *hi = b == 0xED ? 0x9F : 0xBF; /* no surrogates     */
        return 2;
    }
    *lo = b == 0xF0 ? 0x90 : 0x80;
    *hi = b == 0xF4 ? 0x8F : 0xBF; /* nothing past U+10FFFF */
    return 3;
}

utf8_kind utf8_next(const char *s, size_t n, size_t *len)
{
    const unsigned char *u = (const unsigned char *)s;
    *len = 1;
    if (u[0] < 0x80) {
        return UTF8_CHAR;
    }
    unsigned char lo = 0;
    unsigned char hi = 0;
    const size_t more = lead(u[0], &lo, &hi);
    if (more == 0) {
        return UTF8_BAD;
    }
    size_t i = 1;
    while (i <= more && i < n && u[i] >= lo && u[i] <= hi) {
        lo = 0x80;
        hi = 0xBF;
        i++;
    }
    *len = i;
    if (i > more) {
        return UTF8_CHAR;
    }
    return i == n ? UTF8_PART : UTF8_BAD;
}

uint32_t utf8_value(const char *s, size_t len)
{
    const unsigned char *u = (const unsigned char *)s;
    if (len == 1) {
        return u[0];
    }
    uint32_t c = u[0] & (0x7Fu >> len);
    for (size_t i = 1; i < len; i++) {
        c = c << 6 | (u[i] & 0x3Fu);
    }
    return c;
}

/* The length of the head of s that is ASCII, in steps of eight bytes. */
static size_t ascii_run(const char *s, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t w = 0;
        memcpy(&w, s + i, sizeof w);
        if ((w & UINT64_C(0x8080808080808080)) != 0) {
            break;
        }
    }
    return i;
}

/* The length of the longest valid head. */
static size_t valid_run(const char *s, size_t n)
{
    size_t i = 0;
    while (i < n) {
        i += ascii_run(s + i, n - i);
        size_t len = 0;
        if (i < n && utf8_next(s + i, n - i, &len) != UTF8_CHAR) {
            break;
        }
        i += len;
    }
    return i;
}

bool utf8_valid(const char *s, size_t n)
{
    return valid_run(s, n) == n;
}

void utf8_repair(textbuf *b, const char *s, size_t n)
{
    size_t i = 0;
    while (i < n) {
        const size_t good = valid_run(s + i, n - i);
        buf_add(b, s + i, good);
        i += good;
        if (i < n) {
            size_t len = 0;
            (void)utf8_next(s + i, n - i, &len);
            buf_add(b, UTF8_REPLACEMENT, UTF8_REPLACEMENT_LEN);
            i += len;
        }
    }
}

bool utf8_is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}
