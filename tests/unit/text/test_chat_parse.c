/* Answers taken apart, and every prompt's own calls read back. */
#include "unit/unit.h"

#include <jansson.h>

#include "base/rng.h"
#include "kvspan/chat.h"
#include "text/chat.h"

#define BAR "\uff5c"

typedef struct want {
    const char *reasoning, *content;
    int32_t n_call;
    const char *name[3], *args[3];
} want;

static void check(kvs_chat_family f, int thinks, const char *tools, const char *text, const want *w)
{
    kvs_chat_answer *a = NULL;
    kvs_error err;
    if (kvs_chat_parse(&a, f, thinks, tools, text, strlen(text), &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    assert_string_equal(kvs_chat_answer_reasoning(a), w->reasoning);
    assert_string_equal(kvs_chat_answer_content(a), w->content);
    int32_t n;
    const kvs_chat_call *c = kvs_chat_answer_calls(a, &n);
    assert_int_equal(n, w->n_call);
    for (int32_t i = 0; i < n; i++) {
        assert_string_equal(c[i].name, w->name[i]);
        assert_string_equal(c[i].arguments, w->args[i]);
    }
    kvs_chat_answer_free(a);
}

#define CHECK(f, thinks, tools, text, ...) check(f, thinks, tools, text, &(want){__VA_ARGS__})

static void reasoning_and_content(void **state)
{
    (void)state;
    CHECK(KVS_CHAT_GLM5, 1, NULL, "hm\nso</think>\n\nYes.<|user|>", "hm\nso", "Yes.", 0, {0}, {0});
    CHECK(KVS_CHAT_GLM52, 0, NULL, "<think>hm</think>Yes.", "hm", "Yes.", 0, {0}, {0});
    CHECK(KVS_CHAT_GLM5, 0, NULL, "Yes </think> no", "", "Yes </think> no", 0, {0}, {0});
    CHECK(KVS_CHAT_V31, 1, NULL, "never ends", "never ends", "", 0, {0}, {0});
    CHECK(KVS_CHAT_V3, 0, NULL, "a<" BAR "end\u2581of\u2581sentence" BAR ">", "", "a", 0, {0}, {0});
    CHECK(KVS_CHAT_V3, 0, NULL, "", "", "", 0, {0}, {0});
    CHECK(KVS_CHAT_V3, 0, NULL, "<tool_call>f</tool_call>", "", "<tool_call>f</tool_call>", 0, {0},
          {0});
}

static void glm_calls(void **state)
{
    (void)state;
    const char *tools =
        "[{\"name\":\"f\",\"parameters\":{\"properties\":{\"id\":{\"type\":\"string\"},"
        "\"n\":{\"type\":\"integer\"}}}}]";
    const char *text =
        "ok\n<tool_call>f\n<arg_key>id</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>"
        "<arg_value>12</arg_value><arg_key>t</arg_key><arg_value>a "
        "\"b\"\n</arg_value></tool_call>\n"
        "<tool_call>g</tool_call><|observation|>";
    CHECK(KVS_CHAT_GLM5, 0, tools, text, "", "ok", 2, {"f", "g"},
          {"{\"id\": \"12\", \"n\": 12, \"t\": \"a \\\"b\\\"\\n\"}", "{}"});
    /* without a schema what reads as JSON is JSON */
    CHECK(KVS_CHAT_GLM5, 0, NULL,
          "<tool_call>f<arg_key>id</arg_key><arg_value>12</arg_value></tool_call>", "", "", 1,
          {"f"}, {"{\"id\": 12}"});
}

static void what_is_no_call_stays_content(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "<tool_call>",
        "<tool_call>f",
        "<tool_call></tool_call>",
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>",
        "<tool_call>f<arg_key>a</arg_key>junk<arg_value>1</arg_value></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>\xff</arg_value></tool_call>",
    };
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        CHECK(KVS_CHAT_GLM5, 0, NULL, bad[i], "", bad[i], 0, {0}, {0});
    }
#define TOOL(x) "<" BAR "tool\u2581" x BAR ">"
    static const char *const bad31[] = {
        TOOL("calls\u2581begin"),
        TOOL("calls\u2581begin") TOOL("call\u2581begin") "f" TOOL("sep") "{}" TOOL("call\u2581end"),
        TOOL("calls\u2581begin") TOOL("call\u2581begin") "f" TOOL("sep") "[]" TOOL("call\u2581end")
            TOOL("calls\u2581end"),
    };
    for (size_t i = 0; i < UNIT_COUNT(bad31); i++) {
        CHECK(KVS_CHAT_V31, 0, NULL, bad31[i], "", bad31[i], 0, {0}, {0});
    }
}

/* Calls of random names and values, rendered and read back. */
static void calls_come_back_from_their_own_prompt(void **state)
{
    (void)state;
    static const char *const values[] = {
        "1",  "-0.5", "\"text\"", "\"\\u00e9\\n<x>\"", "true", "null", "[1, {\"a\": \"b\"}]",
        "{}", "\"\"", "1e+20"};
    static const kvs_chat_family families[] = {KVS_CHAT_V31, KVS_CHAT_V32, KVS_CHAT_GLM5,
                                               KVS_CHAT_GLM52};
    rng r = rng_init(11, 0);
    for (int round = 0; round < 300; round++) {
        const kvs_chat_family f = families[rng_next(&r) % 4];
        char args[3][512];
        char name[3][16];
        kvs_chat_call call[3];
        const int32_t n = 1 + (int32_t)(rng_next(&r) % 3);
        for (int32_t i = 0; i < n; i++) {
            size_t at = (size_t)snprintf(args[i], sizeof args[i], "{");
            const int k = (int)(rng_next(&r) % 4);
            for (int j = 0; j < k; j++) {
                at += (size_t)snprintf(args[i] + at, sizeof args[i] - at, "%s\"k%d\": %s",
                                       j > 0 ? ", " : "", j,
                                       values[rng_next(&r) % UNIT_COUNT(values)]);
            }
            snprintf(args[i] + at, sizeof args[i] - at, "}");
            snprintf(name[i], sizeof name[i], "fn_%d", (int)(rng_next(&r) % 100));
            call[i] = (kvs_chat_call){name[i], args[i]};
        }
        const kvs_chat_message m[] = {{KVS_CHAT_USER, "q", NULL, NULL, 0},
                                      {KVS_CHAT_ASSISTANT, "I look", "why", call, n}};
        kvs_chat_config c = kvs_chat_config_default();
        c.family = f;
        c.no_prompt = 1;
        kvs_chat_prompt *p = NULL;
        assert_int_equal(kvs_chat_render(&p, &c, m, 2, NULL), KVS_OK);
        const char *text = kvs_chat_prompt_text(p, NULL);
        const char *answer = strstr(text, f == KVS_CHAT_V31 ? "</think>" : "<think>");
        assert_non_null(answer);
        kvs_chat_answer *a = NULL;
        assert_int_equal(kvs_chat_parse(&a, f, 0, NULL, answer, strlen(answer), NULL), KVS_OK);
        assert_string_equal(kvs_chat_answer_content(a), "I look");
        assert_string_equal(kvs_chat_answer_reasoning(a), f == KVS_CHAT_V31 ? "" : "why");
        int32_t got;
        const kvs_chat_call *b = kvs_chat_answer_calls(a, &got);
        assert_int_equal(got, n);
        for (int32_t i = 0; i < n; i++) {
            json_t *x = json_loads(b[i].arguments, 0, NULL), *y = json_loads(args[i], 0, NULL);
            assert_non_null(x);
            assert_string_equal(b[i].name, name[i]);
            if (!json_equal(x, y)) {
                fail_msg("round %d: %s became %s", round, args[i], b[i].arguments);
            }
            json_decref(x);
            json_decref(y);
        }
        kvs_chat_answer_free(a);
        kvs_chat_prompt_free(p);
    }
}

/* Any bytes: no crash, and nothing is invented. Openings without an end in their thousands stay cheap. */
static void hostile_answers(void **state)
{
    (void)state;
    static const char *const parts[] = {"<tool_call>",
                                        "</tool_call>",
                                        "<arg_key>",
                                        "</arg_key>",
                                        "<arg_value>",
                                        "</arg_value>",
                                        "<think>",
                                        "</think>",
                                        "f",
                                        "\xff\xfe",
                                        "<" BAR "DSML" BAR,
                                        "function_calls>",
                                        "invoke name=\"f\">",
                                        "</" BAR "DSML" BAR "invoke>",
                                        "<" BAR "tool\u2581call\u2581begin" BAR ">",
                                        "\"",
                                        "{",
                                        "}"};
    rng r = rng_init(12, 0);
    for (int round = 0; round < 2000; round++) {
        char text[1024] = "";
        for (int k = (int)(rng_next(&r) % 24); k > 0; k--) {
            strcat(text, parts[rng_next(&r) % UNIT_COUNT(parts)]);
        }
        for (int f = KVS_CHAT_V2; f <= KVS_CHAT_GLM52; f++) {
            kvs_chat_answer *a = NULL;
            assert_int_equal(kvs_chat_parse(&a, (kvs_chat_family)f, (int)(round & 1), NULL, text,
                                            strlen(text), NULL),
                             KVS_OK);
            assert_true(strlen(kvs_chat_answer_content(a)) <= strlen(text));
            kvs_chat_answer_free(a);
        }
    }
    const size_t n = (size_t)11 << 18;
    char *big = malloc(n + 1);
    for (size_t i = 0; i < n; i += 11) {
        memcpy(big + i, "<tool_call>", 11);
    }
    kvs_chat_answer *a = NULL;
    assert_int_equal(kvs_chat_parse(&a, KVS_CHAT_GLM5, 0, NULL, big, n, NULL), KVS_OK);
    assert_int_equal(strlen(kvs_chat_answer_content(a)), n);
    kvs_chat_answer_free(a);
    free(big);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reasoning_and_content),
        cmocka_unit_test(glm_calls),
        cmocka_unit_test(what_is_no_call_stays_content),
        cmocka_unit_test(calls_come_back_from_their_own_prompt),
        cmocka_unit_test(hostile_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
