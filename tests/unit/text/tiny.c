#include "unit/text/tiny.h"

#include <string.h>

#include "text/tokenizer.h"

/* Written from the published table of the alphabet, not from vocab.c: printable Latin-1 characters
 * stand for themselves, the rest are numbered from U+0100 on. */
void tiny_spell(unsigned char b, char out[3])
{
    static const char printable[] =
        "!\"#$%&'()*+,-./"
        "0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz"
        "{|}~";
    unsigned c = b;
    const int itself = (b != 0 && strchr(printable, b) != NULL) || (b > 0xA0 && b != 0xAD);
    if (!itself) {
        c = 0x100;
        for (unsigned k = 0; k < b; k++) {
            c += !((k != 0 && strchr(printable, (int)k) != NULL) || (k > 0xA0 && k != 0xAD));
        }
    }
    if (c < 0x80) {
        out[0] = (char)c;
        out[1] = '\0';
        return;
    }
    out[0] = (char)(0xC0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3F));
    out[2] = '\0';
}

static const char * or (const char *a, const char *b)
{
    return a != NULL ? a : b;
}

void tiny_json(textbuf *out, const tiny *what)
{
    static const char level[] = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                                "\"trim_offsets\": true, \"use_regex\": false}";
    buf_printf(out,
               "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, "
               "\"added_tokens\": %s, \"normalizer\": %s, \"pre_tokenizer\": %s, "
               "\"post_processor\": %s, \"decoder\": %s, \"model\": {%s\"vocab\": {",
               or (what->added, "[]"), or (what->normalizer, "null"), or (what->pre, level),
               or (what->post, "null"), or (what->decoder, level),
               or (what->options, "\"type\": \"BPE\", "));
    const char *comma = "";
    for (int b = 0; b < 256; b++) {
        char name[3];
        tiny_spell((unsigned char)b, name);
        if (what->skip_byte == 0 || b != what->skip_byte) {
            buf_printf(out, "%s\"%s%s\": %d", comma, b == '"' || b == '\\' ? "\\" : "", name, b);
            comma = ", ";
        }
    }
    buf_printf(out, "%s}, \"merges\": %s}}",
               or (what->vocab, ", \"ab\": 256, \"abc\": 257, \"bc\": 258"),
               or (what->merges, "[\"a b\", \"b c\", \"ab c\"]"));
}

kvs_status tiny_parse(kvs_tokenizer **t, const tiny *what, kvs_error *err)
{
    textbuf b;
    buf_init(&b);
    tiny_json(&b, what);
    const kvs_status st = tok_parse(t, b.data, b.n, what->config,
                                    what->config != NULL ? strlen(what->config) : 0, err);
    buf_fini(&b);
    return st;
}
