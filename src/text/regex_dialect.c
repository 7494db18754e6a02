/* text/regex_dialect.c - from Oniguruma's Ruby syntax to PCRE2.
 *
 *   taken as it is    literals, . | ^ $ (at lines), * + ? {n} {n,} {n,m}, lazy and possessive forms,
 *                     (?: (?= (?! (?<= (?<! (?> (?i: (?-i:, (?i) at the start, \A \z, \r \n \t \f \a
 *                     \e, escaped punctuation, \p{Lu} and other general categories
 *   rewritten         \s \S to White_Space, \d \D to Nd, \v to U+000B, \uHHHH and \xHH to \x{..},
 *                     other \p{Name} to the script of that name, ( to (?:, a lone { } ] to itself
 *   refused by name   all else
 */
#include "text/regex.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "text/utf8.h"

typedef struct scan {
    const char *s;
    size_t n;
    size_t i;
    textbuf *out;
    kvs_error *err;
} scan;

static const char k_categories[][3] = {
    "C",  "Cc", "Cf", "Cn", "Co", "Cs", "L",  "Ll", "Lm", "Lo", "Lt", "Lu", "M",
    "Mc", "Me", "Mn", "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Pe", "Pf", "Pi",
    "Po", "Ps", "S",  "Sc", "Sk", "Sm", "So", "Z",  "Zl", "Zp", "Zs",
};

static char at(const scan *c, size_t k)
{
    return c->i + k < c->n ? c->s[c->i + k] : '\0';
}

static bool is_digit(char b)
{
    return b >= '0' && b <= '9';
}

static bool is_letter(char b)
{
    return (b >= 'a' && b <= 'z') || (b >= 'A' && b <= 'Z');
}

static bool is_hex(char b)
{
    return is_digit(b) || (b >= 'a' && b <= 'f') || (b >= 'A' && b <= 'F');
}

/* Refuses the construct of n bytes that the scan stands on. */
static kvs_status refuse(const scan *c, size_t n, const char *why)
{
    const size_t left = c->n - c->i;
    const kvs_status st = err_set(c->err, KVS_UNSUPPORTED, "\"%.*s\" at byte %zu: %s",
                                  (int)(n < left ? n : left), c->s + c->i, c->i, why);
    err_at(c->err, (int64_t)c->i);
    return st;
}

/* Copies n bytes and goes past them. */
static void copy(scan *c, size_t n)
{
    buf_add(c->out, c->s + c->i, n);
    c->i += n;
}

static void put(scan *c, size_t n, const char *text)
{
    buf_text(c->out, text);
    c->i += n;
}

/* \p{Name}, \p{^Name}, \P{Name}; the scan stands on the backslash. */
static kvs_status property(scan *c)
{
    size_t k = 3 + (at(c, 3) == '^');
    const size_t from = k;
    while (is_letter(at(c, k)) || at(c, k) == '_') {
        k++;
    }
    const size_t len = k - from;
    if (at(c, 2) != '{' || at(c, k) != '}' || len == 0 || len > 40) {
        return refuse(c, k + 1, "a property is written \\p{Name}");
    }
    bool category = false;
    for (size_t i = 0; i < sizeof k_categories / sizeof *k_categories; i++) {
        category = category || (strlen(k_categories[i]) == len &&
                                memcmp(k_categories[i], c->s + c->i + from, len) == 0);
    }
    buf_printf(c->out, "\\%c{%s%s%.*s}", at(c, 1), from == 4 ? "^" : "",
               category ? "" : "sc:", (int)len, c->s + c->i + from);
    c->i += k + 1;
    return KVS_OK;
}

/* \xHH, \x{H..}, \uHHHH. */
static kvs_status code_point(scan *c)
{
    const bool brace = at(c, 1) == 'x' && at(c, 2) == '{';
    const size_t from = brace ? 3 : 2;
    const size_t want = brace ? 8 : at(c, 1) == 'u' ? 4 : 2;
    size_t k = from;
    while (k - from < want && is_hex(at(c, k))) {
        k++;
    }
    const size_t len = k - from;
    char digits[9];
    snprintf(digits, sizeof digits, "%.*s", (int)len, c->s + c->i + from);
    const unsigned long value = strtoul(digits, NULL, 16);
    if (len == 0 || (brace ? at(c, k) != '}' : len != want) || value > 0x10FFFF ||
        (value >= 0xD800 && value <= 0xDFFF) || (at(c, 1) == 'x' && !brace && value > 0x7F)) {
        return refuse(c, k + brace, "no code point of Unicode");
    }
    buf_printf(c->out, "\\x{%lx}", value);
    c->i += k + brace;
    return KVS_OK;
}

static kvs_status escape(scan *c, bool in_class)
{
    const char e = at(c, 1);
    if (c->i + 1 >= c->n) {
        return refuse(c, 1, "nothing follows the backslash");
    }
    switch (e) {
    case 's':
        put(c, 2, "\\p{White_Space}");
        return KVS_OK;
    case 'S':
        put(c, 2, "\\P{White_Space}");
        return KVS_OK;
    case 'd':
        put(c, 2, "\\p{Nd}");
        return KVS_OK;
    case 'D':
        put(c, 2, "\\P{Nd}");
        return KVS_OK;
    case 'v':
        put(c, 2, "\\x{b}");
        return KVS_OK;
    case 'r':
    case 'n':
    case 't':
    case 'f':
    case 'a':
    case 'e':
        copy(c, 2);
        return KVS_OK;
    case 'p':
    case 'P':
        return property(c);
    case 'x':
    case 'u':
        return code_point(c);
    default:
        break;
    }
    if (!in_class && (e == 'A' || e == 'z')) {
        copy(c, 2);
        return KVS_OK;
    }
    if (is_letter(e) || is_digit(e) || (!in_class && (e == '`' || e == '\''))) {
        return refuse(c, 2, "this escape is not supported");
    }
    if ((unsigned char)e >= 0x80 || (unsigned char)e <= 0x20 || e == 0x7F) {
        c->i++; /* a backslash before such a character says nothing */
        return KVS_OK;
    }
    copy(c, 2);
    return KVS_OK;
}

static kvs_status class_of(scan *c)
{
    copy(c, 1);
    if (at(c, 0) == '^') {
        copy(c, 1);
    }
    if (at(c, 0) == ']') {
        return refuse(c, 1, "an empty class");
    }
    while (c->i < c->n && at(c, 0) != ']') {
        if (at(c, 0) == '[') {
            return refuse(c, 8, "a class in a class is not supported");
        }
        if (at(c, 0) == '&' && at(c, 1) == '&') {
            return refuse(c, 2, "the intersection of classes is not supported");
        }
        if (at(c, 0) == '\\') {
            TRY(escape(c, true));
        } else {
            copy(c, 1);
        }
    }
    if (c->i == c->n) {
        return refuse(c, 0, "the class does not end");
    }
    copy(c, 1);
    return KVS_OK;
}

static kvs_status group(scan *c)
{
    static const char *const taken[] = {"(?:",  "(?=",  "(?!",  "(?>",
                                        "(?<=", "(?<!", "(?i:", "(?-i:"};
    if (at(c, 1) != '?') {
        put(c, 1, "(?:"); /* nothing refers to a group */
        return KVS_OK;
    }
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        const size_t len = strlen(taken[i]);
        if (len <= c->n - c->i && memcmp(c->s + c->i, taken[i], len) == 0) {
            copy(c, len);
            return KVS_OK;
        }
    }
    if (c->i == 0 && c->n >= 4 && memcmp(c->s, "(?i)", 4) == 0) {
        copy(c, 4);
        return KVS_OK;
    }
    return refuse(c, 6, "this group is not supported");
}

/* {n}, {n,}, {n,m} count; any other { is a character, except {,n}, which the two read differently. */
static kvs_status interval(scan *c)
{
    size_t k = 1;
    while (is_digit(at(c, k))) {
        k++;
    }
    const bool low = k > 1;
    const bool comma = at(c, k) == ',';
    k += comma;
    const size_t high = k;
    while (is_digit(at(c, k))) {
        k++;
    }
    if (at(c, k) != '}' || (!low && k == high)) {
        put(c, 1, "\\{");
        return KVS_OK;
    }
    if (!low || at(c, k + 1) == '+' || (!comma && at(c, k + 1) == '?')) {
        return refuse(c, k + 2, "this repetition is not supported");
    }
    copy(c, k + 1);
    return KVS_OK;
}

static kvs_status finish(const textbuf *out, kvs_error *err)
{
    return out->failed ? err_set(err, KVS_NOMEM, "no memory for a regular expression") : KVS_OK;
}

kvs_status regex_translate(textbuf *out, const char *src, size_t n, kvs_error *err)
{
    scan c = {src, n, 0, out, err};
    if (n > REGEX_SOURCE_MAX) {
        return err_set(err, KVS_LIMIT, "%zu bytes: at most %d", n, REGEX_SOURCE_MAX);
    }
    while (c.i < n) {
        switch (src[c.i]) {
        case '\\':
            TRY(escape(&c, false));
            break;
        case '[':
            TRY(class_of(&c));
            break;
        case '(':
            TRY(group(&c));
            break;
        case '{':
            TRY(interval(&c));
            break;
        case ']':
        case '}':
            buf_char(out, '\\');
            copy(&c, 1);
            break;
        default:
            copy(&c, 1);
        }
    }
    return finish(out, err);
}
