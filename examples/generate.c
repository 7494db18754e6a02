/* generate: a model's answer to a text.
 *
 *     generate MODEL TEXT [DCP]
 *
 * Opens a tokenizer and an engine whose cache is shared by DCP ranks (threads of this process), submits the text's
 * ids, and writes the answer as its tokens come. Ends with 0 when there was an answer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvspan/kvspan.h>

static int failed(const char *what, const kvs_error *err)
{
    fprintf(stderr, "generate: %s: %s\n", what, err->text);
    return 1;
}

/* Writes the text that an id completes. */
static void show(kvs_detok *d, int32_t token)
{
    char text[4096];
    size_t n = 0;
    if (kvs_detok_push(d, token, text, sizeof text, &n, NULL) == KVS_OK) {
        fwrite(text, 1, n, stdout);
        fflush(stdout);
    }
}

/* Steps until nothing is left to do. */
static int generate(kvs_engine *e, kvs_detok *d)
{
    kvs_error err;
    kvs_status st = KVS_OK;
    int n_token = 0;
    while (st == KVS_OK) {
        kvs_event ev[8];
        st = kvs_engine_step(e, &err);
        for (int32_t n = 0; (n = kvs_engine_poll(e, ev, 8)) > 0;) {
            for (int32_t i = 0; i < n; i++) {
                if (ev[i].kind == KVS_EVENT_TOKEN && !ev[i].is_end) {
                    n_token++;
                    show(d, ev[i].token);
                } else if (ev[i].kind == KVS_EVENT_FINISH) {
                    printf("\n[%s after %d tokens]\n", kvs_finish_name(ev[i].reason), n_token);
                } else if (ev[i].kind == KVS_EVENT_ERROR) {
                    return failed("request", &ev[i].error);
                }
            }
        }
    }
    return st < 0 ? failed("step", &err) : n_token == 0;
}

static int answer(kvs_engine *e, const kvs_tokenizer *t, const char *text)
{
    kvs_error err;
    kvs_detok *d = NULL;
    size_t n = kvs_tokens_bound(strlen(text));
    int32_t *ids = malloc(n * sizeof *ids);
    kvs_request r = kvs_request_default();
    uint64_t number = 0;
    int code = 1;
    if (ids == NULL) {
        fputs("generate: no memory\n", stderr);
    } else if (kvs_tokens_encode(t, text, strlen(text), KVS_ENCODE_TEMPLATE, ids, n, &n, &err) <
               0) {
        code = failed("tokenizer", &err);
    } else if (kvs_detok_new(&d, t, 1, &err) < 0) {
        code = failed("tokenizer", &err);
    } else {
        r.prompt = ids;
        r.n_prompt = (int64_t)n;
        r.max_new = 32;
        code =
            kvs_engine_submit(e, &r, &number, &err) < 0 ? failed("request", &err) : generate(e, d);
    }
    kvs_detok_free(d);
    free(ids);
    return code;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: generate MODEL TEXT [DCP]\n");
        return 2;
    }
    kvs_error err;
    kvs_tokenizer *t = NULL;
    kvs_engine *e = NULL;
    kvs_engine_config c = kvs_engine_config_default();
    c.model_dir = argv[1];
    c.dcp = argc > 3 ? (int32_t)strtol(argv[3], NULL, 10) : 1;
    int code = 1;
    if (kvs_tokenizer_open(&t, c.model_dir, &err) < 0 || kvs_engine_open(&e, &c, &err) < 0) {
        code = failed(c.model_dir, &err);
    } else {
        code = answer(e, t, argv[2]);
    }
    kvs_engine_close(e);
    kvs_tokenizer_close(t);
    return code;
}
