/* The tiny checkpoints and the expected results belong together: a generator that writes other bytes
 * than those the results were made from is noticed here, and not as a wrong model. */
#include "unit/unit.h"

#include "oracle/golden.h"
#include "oracle/mkmodel.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef struct expected {
    const char *variant, *dtype;
    int shards;
    const char *file;
    uint64_t hash;
} expected;

/* XXH3-64 of files that tools/oracle/make_tiny.py writes to the same byte. */
static const expected files[] = {
    {"glm52", "bf16", 1, "config.json", UINT64_C(0x48E6DBF2F7D3A17A)},
    {"glm52", "bf16", 1, "model.safetensors", UINT64_C(0xC5303E9943D446B1)},
    {"glm5", "bf16", 1, "config.json", UINT64_C(0xBC36C1BB4AE2E8F0)},
    {"glm5", "bf16", 1, "model.safetensors", UINT64_C(0x6CD01243FF0E519E)},
    {"v32", "bf16", 1, "config.json", UINT64_C(0x86FF475E4235A693)},
    {"v32", "bf16", 1, "model.safetensors", UINT64_C(0xDE65B8F07BFACC4D)},
    {"v3", "bf16", 1, "config.json", UINT64_C(0xE4880B53509412D8)},
    {"v3", "bf16", 1, "model.safetensors", UINT64_C(0x1C87599DEBE429F4)},
    {"v2", "bf16", 1, "config.json", UINT64_C(0xDECE7EF1207FFD1F)},
    {"v2", "bf16", 1, "model.safetensors", UINT64_C(0x05A2D5ACD4EA09A1)},
    {"k2", "bf16", 1, "config.json", UINT64_C(0x23232EDC907FEEED)},
    {"k2", "bf16", 1, "model.safetensors", UINT64_C(0xD3AC531AAAAAA89A)},
    {"moonlight", "bf16", 1, "config.json", UINT64_C(0x4C06C84D830AE971)},
    {"moonlight", "bf16", 1, "model.safetensors", UINT64_C(0xE58706A9263F5943)},
    {"glm47", "bf16", 1, "config.json", UINT64_C(0x0886285BE1C57E16)},
    {"glm47", "bf16", 1, "model.safetensors", UINT64_C(0xCF82121343CA38FA)},
    {"v32", "fp8", 3, "config.json", UINT64_C(0xAD69B7E168AE1DA4)},
    {"v32", "fp8", 3, "model.safetensors.index.json", UINT64_C(0xB6DF5D93092AD22A)},
    {"v32", "fp8", 3, "model-00001-of-00003.safetensors", UINT64_C(0x2B2F833929523F33)},
    {"v32", "fp8", 3, "model-00002-of-00003.safetensors", UINT64_C(0xA7FC285DE8652C76)},
    {"v32", "fp8", 3, "model-00003-of-00003.safetensors", UINT64_C(0x3322E7F393BF5EE9)},
    {"v2", "fp8", 3, "config.json", UINT64_C(0x6953ABD01CFA086A)},
    {"v2", "fp8", 3, "model.safetensors.index.json", UINT64_C(0x91DBA81434A9B5B6)},
    {"v2", "fp8", 3, "model-00001-of-00003.safetensors", UINT64_C(0x77FB85E0338511CF)},
    {"v2", "fp8", 3, "model-00002-of-00003.safetensors", UINT64_C(0x512287C9C98B6B2F)},
    {"v2", "fp8", 3, "model-00003-of-00003.safetensors", UINT64_C(0xDCFE1893F7C8FF38)},
    {"k2", "f32", 1, "config.json", UINT64_C(0xEFC6D2F901CBA437)},
    {"k2", "f32", 1, "model.safetensors", UINT64_C(0x24DA43C1C1A62977)},
};

static uint64_t hash_of(const char *dir, const char *file, int64_t *bytes)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, file);
    FILE *const f = fopen(path, "rb");
    assert_non_null(f);
    XXH3_state_t *const s = XXH3_createState();
    XXH3_64bits_reset(s);
    static uint8_t buf[1 << 16];
    *bytes = 0;
    for (size_t n = fread(buf, 1, sizeof buf, f); n > 0; n = fread(buf, 1, sizeof buf, f)) {
        XXH3_64bits_update(s, buf, n);
        *bytes += (int64_t)n;
    }
    fclose(f);
    const uint64_t h = XXH3_64bits_digest(s);
    XXH3_freeState(s);
    return h;
}

static int same_model(const expected *a, const expected *b)
{
    return a->shards == b->shards && strcmp(a->variant, b->variant) == 0 &&
           strcmp(a->dtype, b->dtype) == 0;
}

static void test_files_are_those_of_the_results(void **state)
{
    (void)state;
    char dir[256], msg[256];
    int wrong = 0;
    for (size_t i = 0; i < UNIT_COUNT(files); i++) {
        const expected *const e = &files[i];
        if (i == 0 || !same_model(e, e - 1)) {
            if (mkmodel_temp(e->variant, e->dtype, e->shards, dir, sizeof dir, msg, sizeof msg) !=
                0)
                fail_msg("%s", msg);
        }
        int64_t bytes;
        const uint64_t h = hash_of(dir, e->file, &bytes);
        if (h != e->hash) {
            print_error("%s %s %s (%lld bytes): 0x%016llX\n", e->variant, e->dtype, e->file,
                        (long long)bytes, (unsigned long long)h);
            wrong++;
        }
        if (i + 1 == UNIT_COUNT(files) || !same_model(e, e + 1))
            mkmodel_remove(dir);
    }
    assert_int_equal(wrong, 0);
}

static void test_a_shard_more_or_less_carries_the_same_data(void **state)
{
    (void)state;
    char dir[256], msg[256], name[320];
    int64_t data[2] = {0, 0};
    for (int k = 0; k < 2; k++) {
        const int shards = k == 0 ? 1 : 4;
        if (mkmodel_temp("v2", "fp8", shards, dir, sizeof dir, msg, sizeof msg) != 0)
            fail_msg("%s", msg);
        for (int i = 0; i < shards; i++) {
            snprintf(name, sizeof name, "%s/model-%05d-of-%05d.safetensors", dir, i + 1, shards);
            if (shards == 1)
                snprintf(name, sizeof name, "%s/model.safetensors", dir);
            FILE *const f = fopen(name, "rb");
            assert_non_null(f);
            uint64_t head;
            assert_int_equal(fread(&head, sizeof head, 1, f), 1);
            assert_int_equal(head % 8, 0);
            assert_int_equal(fseek(f, 0, SEEK_END), 0);
            data[k] += ftell(f) - 8 - (long)head;
            fclose(f);
        }
        mkmodel_remove(dir);
    }
    assert_true(data[0] > 5 * 1000 * 1000);
    assert_int_equal(data[0], data[1]);
}

static void test_every_variant_has_results_for_its_tokens(void **state)
{
    (void)state;
    char msg[256];
    for (int i = 0; mkmodel_variants[i] != NULL; i++) {
        golden *const g = golden_open(mkmodel_variants[i], msg, sizeof msg);
        if (g == NULL)
            fail_msg("%s", msg);
        const golden_array tokens = golden_get(g, "tokens");
        assert_int_equal(tokens.n, 317);
        int32_t own[317];
        assert_int_equal(mkmodel_tokens(mkmodel_variants[i], 256, 317, own), 0);
        assert_memory_equal(tokens.i32, own, sizeof own);
        const golden_array logits = golden_get(g, "hf.logits.300");
        assert_int_equal(logits.type, 0);
        assert_int_equal(logits.n_dim, 2);
        assert_int_equal(logits.dim[0], 18);
        assert_int_equal(logits.dim[1], 256);
        assert_int_equal(golden_get(g, "hf.logits.301").n_dim, -1);
        golden_close(g);
    }
}

static void test_mistakes_are_named(void **state)
{
    (void)state;
    char msg[256];
    assert_int_equal(mkmodel_write("v4", "f32", 1, "/tmp", msg, sizeof msg), -1);
    assert_string_equal(msg, "v4 is no variant");
    assert_int_equal(mkmodel_write("v3", "int4", 1, "/tmp", msg, sizeof msg), -1);
    assert_string_equal(msg, "int4 is none of f32, bf16, fp8");
    assert_int_equal(mkmodel_write("v3", "f32", 0, "/tmp", msg, sizeof msg), -1);
    assert_int_equal(mkmodel_write("v3", "f32", 1, "/nowhere/at/all", msg, sizeof msg), -1);
    assert_non_null(strstr(msg, "/nowhere/at/all/config.json"));
    assert_int_equal(mkmodel_tokens("v4", 256, 1, NULL), -1);
    assert_null(golden_open("v4", msg, sizeof msg));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_files_are_those_of_the_results),
        cmocka_unit_test(test_a_shard_more_or_less_carries_the_same_data),
        cmocka_unit_test(test_every_variant_has_results_for_its_tokens),
        cmocka_unit_test(test_mistakes_are_named),
    };
    return cmocka_run_group_tests_name("tiny", tests, NULL, NULL);
}
