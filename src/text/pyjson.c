/* text/pyjson.c - see pyjson.h.
 *
 * jansson's own writer differs in numbers (17 digits always) and in what it escapes, and a prompt has to
 * have the bytes that the model was trained on. Depth is bounded by jansson's reader (2048). */
#include "text/pyjson.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add_string(textbuf *b, const char *s, size_t n)
{
    buf_char(b, '"');
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)s[i];
        static const char from[] = "\"\\\n\r\t\b\f";
        static const char to[] = "\"\\nrtbf";
        const char *p = c != '\0' ? strchr(from, c) : NULL;
        if (p != NULL) {
            buf_char(b, '\\');
            buf_char(b, to[p - from]);
        } else if (c < 0x20) {
            buf_printf(b, "\\u%04x", c);
        } else {
            buf_char(b, (char)c);
        }
    }
    buf_char(b, '"');
}

/* The shortest digits that read back as x, in Python's choice between 1e-05 and 0.0001. jansson holds
 * finite numbers only. */
static void add_real(textbuf *b, double x)
{
    char s[40];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(s, sizeof s, "%.*e", digits - 1, x);
        if (strtod(s, NULL) == x) {
            break;
        }
    }
    char *e = strchr(s, 'e');
    const long exponent = strtol(e + 1, NULL, 10);
    const int digits = (int)(e - s) - (s[0] == '-') - (memchr(s, '.', (size_t)(e - s)) != NULL);
    if (exponent < -4 || exponent >= 16) {
        buf_text(b, s); /* C and Python agree here: at least two digits of exponent */
        return;
    }
    const int decimals = digits - 1 - (int)exponent;
    buf_printf(b, "%.*f", decimals > 1 ? decimals : 1, x);
}

static void add_object(textbuf *b, const json_t *v)
{
    const char *between = "";
    buf_char(b, '{');
    /* jansson's iterators take a pointer to non-const and leave the object as it is. */
    json_t *o = (json_t *)(uintptr_t)v;
    for (void *it = json_object_iter(o); it != NULL; it = json_object_iter_next(o, it)) {
        const char *key = json_object_iter_key(it);
        buf_text(b, between);
        add_string(b, key, strlen(key));
        buf_text(b, ": ");
        pyjson_add(b, json_object_iter_value(it));
        between = ", ";
    }
    buf_char(b, '}');
}

void pyjson_add(textbuf *b, const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        add_object(b, v);
        break;
    case JSON_ARRAY:
        buf_char(b, '[');
        for (size_t i = 0; i < json_array_size(v); i++) {
            buf_text(b, i > 0 ? ", " : "");
            pyjson_add(b, json_array_get(v, i));
        }
        buf_char(b, ']');
        break;
    case JSON_STRING:
        add_string(b, json_string_value(v), json_string_length(v));
        break;
    case JSON_INTEGER:
        buf_printf(b, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
        break;
    case JSON_REAL:
        add_real(b, json_real_value(v));
        break;
    case JSON_TRUE:
        buf_text(b, "true");
        break;
    case JSON_FALSE:
        buf_text(b, "false");
        break;
    default:
        buf_text(b, "null");
        break;
    }
}
