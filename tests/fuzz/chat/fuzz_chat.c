/* fuzz_chat.c - any answer of a model can be taken apart, and what came out of it can stand in a prompt.
 *
 * The first byte chooses family and settings, the rest is the answer. Every call found has a name and a
 * JSON object of arguments; content and reasoning are no longer than the answer; the parts rendered as a
 * past turn are accepted. */
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvspan/kvspan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void render(kvs_chat_family f, const kvs_chat_answer *a)
{
    int32_t n;
    const kvs_chat_call *calls = kvs_chat_answer_calls(a, &n);
    const kvs_chat_message m[] = {
        {KVS_CHAT_USER, "q", NULL, NULL, 0},
        {KVS_CHAT_ASSISTANT, kvs_chat_answer_content(a), kvs_chat_answer_reasoning(a), calls, n},
    };
    kvs_chat_config c = kvs_chat_config_default();
    c.family = f;
    kvs_chat_prompt *p = NULL;
    if (kvs_chat_render(&p, &c, m, 2, NULL) != KVS_OK) {
        abort();
    }
    kvs_chat_prompt_free(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1) {
        return 0;
    }
    static const char tools[] = "[{\"name\":\"f\",\"parameters\":{\"properties\":{\"a\":{\"type\":"
                                "\"string\"}}}}]";
    const kvs_chat_family f = (kvs_chat_family)(KVS_CHAT_V2 + data[0] % 7);
    const char *text = (const char *)data + 1;
    const size_t n = size - 1;
    kvs_chat_answer *a = NULL;
    if (kvs_chat_parse(&a, f, data[0] >> 6 & 1, data[0] >> 7 ? tools : NULL, text, n, NULL) !=
        KVS_OK) {
        abort();
    }
    if (strlen(kvs_chat_answer_content(a)) + strlen(kvs_chat_answer_reasoning(a)) > n) {
        abort();
    }
    int32_t n_call;
    const kvs_chat_call *calls = kvs_chat_answer_calls(a, &n_call);
    for (int32_t i = 0; i < n_call; i++) {
        json_t *o = json_loads(calls[i].arguments, 0, NULL);
        if (calls[i].name[0] == '\0' || !json_is_object(o)) {
            abort();
        }
        json_decref(o);
    }
    render(f, a);
    kvs_chat_answer_free(a);
    return 0;
}
