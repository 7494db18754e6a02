/* seed_tokenizer.c: writes the seeds of fuzz_tokenizer into the folder it is given. */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "unit/text/tiny.h"

static kvs_status seed(const char *dir, const char *name, char kind, const char *a, const char *b,
                       const char *text, kvs_error *err)
{
    char path[512];
    textbuf x;
    buf_init(&x);
    buf_char(&x, kind);
    buf_text(&x, a);
    buf_text(&x, "\xFE");
    buf_text(&x, b);
    buf_text(&x, "\xFE");
    buf_text(&x, text);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    const kvs_status st = file_write_all(path, x.data, x.n, err);
    buf_fini(&x);
    return st;
}

static const char k_text[] =
    "  if (x) { return \"abcab\"; }\r\n\xE4\xB8\x80\xF0\x9F\x98\x80 12345 <x>bc";

int main(int argc, char **argv)
{
    kvs_error err;
    textbuf json;
    if (argc != 2) {
        fprintf(stderr, "use: seed_tokenizer FOLDER\n");
        return 2;
    }
    const char *dir = argv[1];
    const tiny what = {
        .added = "[{\"id\": 300, \"content\": \"<x>\", \"special\": true, \"rstrip\": true}]"};
    buf_init(&json);
    tiny_json(&json, &what);
    const bool bad =
        seed(dir, "file", 0, buf_str(&json), "{\"bos_token\": \"<x>\", \"add_bos_token\": true}",
             k_text, &err) != KVS_OK ||
        seed(dir, "regex_glm", 1,
             "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
             "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
             "", k_text, &err) != KVS_OK ||
        seed(dir, "regex_class", 1,
             "[!\"#%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|^\\u4e00$|a{2,3}?", "", k_text,
             &err) != KVS_OK ||
        seed(dir, "added", 2,
             "[{\"id\": 300, \"content\": \"<x>\", \"lstrip\": true}, {\"id\": 301, \"content\": "
             "\"<x>b\", "
             "\"single_word\": true, \"normalized\": true}]",
             "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"s\"}}, "
             "{\"Sequence\": {\"id\": \"A\"}}], \"special_tokens\": {\"s\": {\"ids\": [7]}}}",
             k_text, &err) != KVS_OK ||
        seed(dir, "merges", 3,
             ", \"ab\": 256, \"abc\": 257, \"cab\": 258, \"\xC4\xA0\xC4\xA0\": 259",
             "[\"a b\", [\"ab\", \"c\"], \"\xC4\xA0 \xC4\xA0\"]", k_text, &err) != KVS_OK ||
        seed(dir, "text", 4, "", "", "a\xC3\xC3\xA9\xF0\x9F\x98 \xED\xA0\x80 abcbc", &err) !=
            KVS_OK;
    buf_fini(&json);
    if (bad) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    return 0;
}
