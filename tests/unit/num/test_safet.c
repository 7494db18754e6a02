/* Safetensors: what a good file holds is found, and every way in which a header can lie about its file is refused with
 * the file and the tensor named, without a read outside it; an index decides which shard a tensor is from and cannot
 * name a file outside its folder. */
#include "unit/unit.h"

#include <sys/stat.h>
#include <unistd.h>

#include "num/safet.h"

/* ---- files in memory ------------------------------------------------------------------------- */

typedef struct image {
    unsigned char *data; /* exactly n bytes, so that a sanitizer sees a read past them */
    size_t n;
} image;

/* A file that says its header has `claim` bytes, then the header, then n_data bytes 0, 1, 2, ... */
static image image_make(uint64_t claim, const char *header, size_t n_data)
{
    const size_t n_header = strlen(header);
    image m = {.n = 8 + n_header + n_data};
    m.data = malloc(m.n);
    assert_non_null(m.data);
    for (int i = 0; i < 8; i++) {
        m.data[i] = (unsigned char)(claim >> (8 * i));
    }
    memcpy(m.data + 8, header, n_header);
    for (size_t i = 0; i < n_data; i++) {
        m.data[8 + n_header + i] = (unsigned char)i;
    }
    return m;
}

static image image_of(const char *header, size_t n_data)
{
    return image_make(strlen(header), header, n_data);
}

/* Opening must end with st and name every one of the words. */
static void refuse(image m, kvs_status want, const char *word_a, const char *word_b)
{
    safet *s = (safet *)1;
    kvs_error err = {.code = KVS_OK};
    const kvs_status st = safet_open_memory(&s, "part.safetensors", m.data, m.n, &err);
    if (st != want || strstr(err.text, word_a) == NULL || strstr(err.text, word_b) == NULL ||
        strstr(err.text, "part.safetensors") == NULL) {
        fail_msg("%.200s: %s \"%s\"", (const char *)m.data + 8, kvs_status_name(st), err.text);
    }
    assert_null(s);
    free(m.data);
}

#define T(name, dtype, shape, begin, end)                                                          \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end   \
    "]}"

/* b before a in the data, after it in the names; a zero-sized tensor, a scalar, padding behind the header. */
static const char k_good[] =
    "{\"__metadata__\":{\"format\":\"pt\"}," T("b", "BF16", "[2,3]", "0", "12") "," T(
        "a", "F32", "[2]", "12", "20") "," T("zero", "F32", "[4,0,5]", "20",
                                             "20") "," T("scalar", "U8", "[]", "20", "21") "}   ";

static void tensors_are_found_with_type_shape_and_place(void **state)
{
    (void)state;
    const image m = image_of(k_good, 21);
    safet *s = NULL;
    assert_int_equal(safet_open_memory(&s, "one", m.data, m.n, NULL), KVS_OK);
    assert_int_equal(safet_count(s), 4);
    static const char *const order[] = {"a", "b", "scalar", "zero"};
    for (int64_t i = 0; i < 4; i++) {
        assert_string_equal(safet_at(s, i)->name, order[i]);
        assert_ptr_equal(safet_find(s, order[i]), safet_at(s, i));
        assert_int_equal(safet_index(s, safet_at(s, i)), i);
    }
    const safet_tensor *b = safet_find(s, "b");
    assert_int_equal(b->type, SAFET_BF16);
    assert_int_equal(b->n_dim, 2);
    assert_int_equal(b->dim[0], 2);
    assert_int_equal(b->dim[1], 3);
    assert_int_equal(b->bytes, 12);
    assert_int_equal(b->data[0], 0);
    assert_int_equal(safet_find(s, "a")->data[0], 12);
    assert_int_equal(safet_find(s, "scalar")->data[0], 20);
    assert_int_equal(safet_find(s, "scalar")->n_dim, 0);
    assert_int_equal(safet_find(s, "zero")->bytes, 0);
    assert_null(safet_find(s, "c"));
    assert_null(safet_find(s, ""));
    assert_int_equal(safet_n_file(s), 1);
    assert_string_equal(safet_file_name(s, 0), "one");
    size_t n = 0;
    assert_memory_equal(safet_header(s, 0, &n), k_good, sizeof k_good - 1);
    assert_int_equal(n, sizeof k_good - 1);
    safet_close(s);
    free(m.data);
    const image none = image_of("{}", 0);
    assert_int_equal(safet_open_memory(&s, "none", none.data, none.n, NULL), KVS_OK);
    assert_int_equal(safet_count(s), 0);
    assert_null(safet_find(s, "a"));
    safet_close(s);
    free(none.data);
    safet_close(NULL);
}

static void every_type_has_its_size(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int bytes;
        safet_type type;
    } t[] = {
        {"BOOL", 1, SAFET_BOOL},       {"U8", 1, SAFET_U8},           {"I8", 1, SAFET_I8},
        {"F8_E4M3", 1, SAFET_F8_E4M3}, {"F8_E5M2", 1, SAFET_F8_E5M2}, {"F8_E8M0", 1, SAFET_F8_E8M0},
        {"U16", 2, SAFET_U16},         {"I16", 2, SAFET_I16},         {"F16", 2, SAFET_F16},
        {"BF16", 2, SAFET_BF16},       {"U32", 4, SAFET_U32},         {"I32", 4, SAFET_I32},
        {"F32", 4, SAFET_F32},         {"U64", 8, SAFET_U64},         {"I64", 8, SAFET_I64},
        {"F64", 8, SAFET_F64},
    };
    for (size_t i = 0; i < UNIT_COUNT(t); i++) {
        char header[128];
        snprintf(header, sizeof header,
                 "{\"x\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%d]}}", t[i].name,
                 3 * t[i].bytes);
        const image m = image_of(header, (size_t)(3 * t[i].bytes));
        safet *s = NULL;
        assert_int_equal(safet_open_memory(&s, "x", m.data, m.n, NULL), KVS_OK);
        assert_int_equal(safet_find(s, "x")->type, t[i].type);
        assert_string_equal(safet_type_name(t[i].type), t[i].name);
        assert_int_equal(safet_type_bytes(t[i].type), t[i].bytes);
        safet_close(s);
        free(m.data);
    }
    assert_int_equal(safet_type_bytes((safet_type)0), 0);
    assert_string_equal(safet_type_name((safet_type)99), "?");
}

static void a_header_length_that_the_file_cannot_have_is_refused(void **state)
{
    (void)state;
    const size_t n = strlen(k_good);
    static const uint64_t huge[] = {UINT64_C(1) << 63, UINT64_MAX, UINT64_MAX - 7,
                                    (UINT64_C(1) << 63) - 8};
    for (size_t i = 0; i < UNIT_COUNT(huge); i++) {
        refuse(image_make(huge[i], k_good, 21), KVS_FORMAT, "header of", "file of");
    }
    refuse(image_make(0, k_good, 21), KVS_FORMAT, "header of 0 bytes", "");
    refuse(image_make(1, k_good, 21), KVS_FORMAT, "header of 1 bytes", "");
    refuse(image_make(8 + n + 21, k_good, 21), KVS_FORMAT, "header of", ""); /* the file's size */
    refuse(image_make(n + 22, k_good, 21), KVS_FORMAT, "header of", "");
    refuse(image_make(n + 21, k_good, 21), KVS_FORMAT, "header", ""); /* data read as JSON */
    refuse(image_make(n - 4, k_good, 21), KVS_FORMAT, "header", "");
    for (size_t cut = 0; cut < 8; cut++) {
        image m = image_of("{}", 0);
        m.n = cut;
        refuse(m, KVS_FORMAT, "starts with 8", "");
    }
}

static void every_cut_of_a_file_is_refused(void **state)
{
    (void)state;
    const size_t whole = 8 + strlen(k_good) + 21;
    for (size_t n = 8; n < whole; n++) {
        const image m = image_of(k_good, 21);
        image cut = {.data = malloc(n), .n = n};
        assert_non_null(cut.data);
        memcpy(cut.data, m.data, n);
        free(m.data);
        refuse(cut, KVS_FORMAT, "", "");
    }
}

static void offsets_that_lie_are_refused_by_tensor(void **state)
{
    (void)state;
    static const struct {
        const char *header, *word;
    } bad[] = {
        {"{" T("bad", "U8", "[4]", "8", "4") "}", "data_offsets 8..4"},
        {"{" T("bad", "U8", "[4]", "-4", "0") "}", "data_offsets -4..0"},
        {"{" T("bad", "U8", "[4]", "9223372036854775804", "9223372036854775807") "}",
         "data_offsets"},
        {"{" T("bad", "U8", "[4]", "9223372036854775807", "3") "}", "data_offsets"},
        {"{" T("bad", "U8", "[4]", "-9223372036854775808", "9223372036854775807") "}",
         "data_offsets"},
        {"{" T("bad", "U8", "[17]", "0", "17") "}", "data_offsets 0..17: the file has 0..16"},
        {"{" T("bad", "U8", "[15]", "0", "16") "}", "takes 15 bytes, its offsets span 16"},
        {"{" T("bad", "BF16", "[16]", "0", "16") "}", "takes 32 bytes"},
        {"{" T("bad", "U8", "[16]", "0.0", "16") "}", "no pair of integers"},
        {"{\"bad\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0]}}", "no pair"},
        {"{\"bad\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,8,16]}}", "no pair"},
        {"{\"bad\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":{}}}", "no pair"},
    };
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        refuse(image_of(bad[i].header, 16), KVS_FORMAT, "tensor bad", bad[i].word);
    }
    /* one past the integers: the parser refuses it, with its place */
    refuse(image_of("{" T("bad", "U8", "[4]", "9223372036854775808", "4") "}", 16), KVS_FORMAT,
           "header", "integer");
}

static void shapes_and_types_that_lie_are_refused_by_tensor(void **state)
{
    (void)state;
    static const struct {
        const char *header, *word;
        kvs_status st;
    } bad[] = {
        {"{" T("bad", "F32", "[4294967296,4294967296]", "0", "16") "}", "overflows", KVS_FORMAT},
        {"{" T("bad", "F32", "[2305843009213693952,2]", "0", "16") "}", "overflows", KVS_FORMAT},
        {"{" T("bad", "F32", "[4611686018427387905,0]", "0", "16") "}", "overflows", KVS_FORMAT},
        {"{" T("bad", "F32", "[4611686018427387904,4611686018427387904]", "0", "0") "}",
         "overflows", KVS_FORMAT},
        {"{" T("bad", "U8", "[-16]", "0", "16") "}", "shape[0]", KVS_FORMAT},
        {"{" T("bad", "U8", "[-4,-4]", "0", "16") "}", "shape[0]", KVS_FORMAT},
        {"{" T("bad", "U8", "[16.0]", "0", "16") "}", "shape[0]", KVS_FORMAT},
        {"{" T("bad", "U8", "[1,1,1,1,1,1,1,1,16]", "0", "16") "}", "9 dimensions", KVS_FORMAT},
        {"{" T("bad", "U8", "16", "0", "16") "}", "no list", KVS_FORMAT},
        {"{" T("bad", "F4", "[16]", "0", "16") "}", "dtype F4 is unknown", KVS_UNSUPPORTED},
        {"{" T("bad", "", "[16]", "0", "16") "}", "is unknown", KVS_UNSUPPORTED},
        {"{\"bad\":{\"dtype\":7,\"shape\":[16],\"data_offsets\":[0,16]}}", "dtype", KVS_FORMAT},
        {"{\"bad\":{\"type\":\"U8\",\"shape\":[16],\"data_offsets\":[0,16]}}", "dtype", KVS_FORMAT},
        {"{\"bad\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,16],\"x\":0}}", "4 keys",
         KVS_FORMAT},
        {"{\"bad\":{\"dtype\":\"U8\",\"data_offsets\":[0,16]}}", "2 keys", KVS_FORMAT},
        {"{\"bad\":[1,2,3]}", "no object", KVS_FORMAT},
        {"{\"bad\":null}", "no object", KVS_FORMAT},
    };
    for (size_t i = 0; i < UNIT_COUNT(bad); i++) {
        refuse(image_of(bad[i].header, 16), bad[i].st, "tensor bad", bad[i].word);
    }
}

static void tensors_must_cover_the_data_once(void **state)
{
    (void)state;
    refuse(image_of("{" T("x", "U8", "[8]", "0", "8") "," T("y", "U8", "[9]", "7", "16") "}", 16),
           KVS_FORMAT, "tensor y", "overlaps tensor x");
    refuse(
        image_of("{" T("x", "U8", "[16]", "0", "16") "," T("y", "U8", "[16]", "0", "16") "}", 16),
        KVS_FORMAT, "overlaps tensor", "");
    refuse(image_of("{" T("x", "U8", "[16]", "0", "16") "," T("y", "U8", "[4]", "4", "8") "}", 16),
           KVS_FORMAT, "tensor y", "overlaps tensor x");
    refuse(image_of("{" T("x", "U8", "[8]", "0", "8") "," T("y", "U8", "[7]", "9", "16") "}", 16),
           KVS_FORMAT, "tensor y", "1 bytes before it");
    refuse(image_of("{" T("x", "U8", "[12]", "4", "16") "}", 16), KVS_FORMAT, "tensor x",
           "4 bytes before it");
    refuse(image_of("{" T("x", "U8", "[12]", "0", "12") "}", 16), KVS_FORMAT, "4 bytes at its end",
           "");
    refuse(image_of("{}", 1), KVS_FORMAT, "1 bytes at its end", "");
}

static void headers_that_are_no_list_of_tensors_are_refused(void **state)
{
    (void)state;
    refuse(image_of("{" T("x", "U8", "[8]", "0", "8") "," T("x", "U8", "[8]", "8", "16") "}", 16),
           KVS_FORMAT, "duplicate", "x");
    refuse(image_of("[1,2]", 16), KVS_FORMAT, "no object", "");
    refuse(image_of("{,}", 16), KVS_FORMAT, "header", "");
    refuse(image_of("{\"__metadata__\":[]," T("x", "U8", "[16]", "0", "16") "}", 16), KVS_FORMAT,
           "__metadata__", "");
    refuse(image_of("{\"__metadata__\":{\"a\":1}," T("x", "U8", "[16]", "0", "16") "}", 16),
           KVS_FORMAT, "__metadata__", "");
    refuse(image_of("{" T("", "U8", "[16]", "0", "16") "}", 16), KVS_FORMAT, "0 bytes", "");
    refuse(image_of("{" T("a\\u001b[2J", "U8", "[16]", "0", "16") "}", 16), KVS_FORMAT,
           "control character", "");
    char header[600];
    char name[300];
    memset(name, 'n', sizeof name);
    name[256] = '\0';
    snprintf(header, sizeof header,
             "{\"%s\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,16]}}", name);
    refuse(image_of(header, 16), KVS_FORMAT, "256 bytes", "");
    /* nested far deeper than the stack would bear */
    enum { DEEP = 100000 };
    char *deep = malloc(DEEP + 8);
    assert_non_null(deep);
    memcpy(deep, "{\"x\":", 5);
    memset(deep + 5, '[', DEEP);
    deep[5 + DEEP] = '\0';
    refuse(image_of(deep, 0), KVS_FORMAT, "header", "");
    free(deep);
}

/* ---- folders --------------------------------------------------------------------------------- */

static char s_dir[64];

static int make_dir(void **state)
{
    (void)state;
    snprintf(s_dir, sizeof s_dir, "/tmp/kvspan-safet-XXXXXX");
    return mkdtemp(s_dir) == NULL;
}

static const char *in_dir(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", s_dir, name);
    return path;
}

static int remove_dir(void **state)
{
    (void)state;
    static const char *const name[] = {"model.safetensors", "model.safetensors.index.json",
                                       "s1.safetensors", "s2.safetensors", "s3.safetensors"};
    for (size_t i = 0; i < UNIT_COUNT(name); i++) {
        unlink(in_dir(name[i]));
    }
    return rmdir(s_dir);
}

static void put(const char *name, const void *data, size_t n)
{
    FILE *f = fopen(in_dir(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

static void put_image(const char *name, image m)
{
    put(name, m.data, m.n);
    free(m.data);
}

static void put_index(const char *map)
{
    char text[512];
    snprintf(text, sizeof text, "{\"metadata\":{\"total_size\":16},\"weight_map\":%s}", map);
    put("model.safetensors.index.json", text, strlen(text));
}

static void refuse_dir(kvs_status want, const char *word_a, const char *word_b)
{
    safet *s = (safet *)1;
    kvs_error err = {.code = KVS_OK};
    const kvs_status st = safet_open(&s, s_dir, &err);
    if (st != want || strstr(err.text, word_a) == NULL || strstr(err.text, word_b) == NULL) {
        fail_msg("%s \"%s\"", kvs_status_name(st), err.text);
    }
    assert_null(s);
}

static void a_folder_holds_one_file_or_an_index_with_shards(void **state)
{
    (void)state;
    refuse_dir(KVS_IO, "neither model.safetensors nor", "model.safetensors.index.json");
    put_image("model.safetensors", image_of(k_good, 21));
    safet *s = NULL;
    assert_int_equal(safet_open(&s, s_dir, NULL), KVS_OK);
    assert_int_equal(safet_count(s), 4);
    assert_int_equal(safet_find(s, "a")->data[1], 13);
    safet_close(s);
    put_index("{\"a\":\"s1.safetensors\"}");
    refuse_dir(KVS_FORMAT, "both", "model.safetensors.index.json");
}

/* y lies in both shards, stray in none of the index: the index decides. */
static void put_shards(void)
{
    put_image("s1.safetensors",
              image_of("{" T("x", "U8", "[4]", "0", "4") "," T("y", "U8", "[4]", "4", "8") "}", 8));
    put_image("s2.safetensors",
              image_of("{" T("y", "U8", "[2]", "0", "2") "," T(
                           "stray", "U8", "[2]", "2", "4") "," T("z", "U8", "[4]", "4", "8") "}",
                       8));
}

static void the_index_decides_which_shard_a_tensor_is_from(void **state)
{
    (void)state;
    put_shards();
    put_index("{\"z\":\"s2.safetensors\",\"y\":\"s2.safetensors\",\"x\":\"s1.safetensors\"}");
    safet *s = NULL;
    assert_int_equal(safet_open(&s, s_dir, NULL), KVS_OK);
    assert_int_equal(safet_n_file(s), 2);
    assert_string_equal(safet_file_name(s, 0), "s1.safetensors");
    assert_int_equal(safet_count(s), 3);
    assert_int_equal(safet_find(s, "y")->bytes, 2);
    assert_int_equal(safet_find(s, "y")->file, 1);
    assert_int_equal(safet_find(s, "x")->file, 0);
    assert_null(safet_find(s, "stray"));
    safet_close(s);
}

static void an_index_that_lies_is_refused_by_name(void **state)
{
    (void)state;
    put_shards();
    put_index("{\"x\":\"s1.safetensors\",\"gone\":\"s2.safetensors\"}");
    refuse_dir(KVS_FORMAT, "tensor gone is not in s2.safetensors", "");
    put_index("{\"x\":\"s2.safetensors\",\"z\":\"s2.safetensors\"}");
    refuse_dir(KVS_FORMAT, "tensor x is not in s2.safetensors", "");
    put_index("{\"x\":\"s1.safetensors\",\"z\":\"s3.safetensors\"}");
    refuse_dir(KVS_IO, "s3.safetensors", "");
    static const char *const name[] = {"\"/etc/passwd.safetensors\"",
                                       "\"../s1.safetensors\"",
                                       "\"sub/s1.safetensors\"",
                                       "\".safetensors\"",
                                       "\"config.json\"",
                                       "\"\"",
                                       "7",
                                       "null"};
    for (size_t i = 0; i < UNIT_COUNT(name); i++) {
        char map[128];
        snprintf(map, sizeof map, "{\"x\":\"s1.safetensors\",\"evil\":%s}", name[i]);
        put_index(map);
        refuse_dir(KVS_FORMAT, "tensor evil", "shard");
    }
    put_index("{}");
    refuse_dir(KVS_FORMAT, "weight_map", "");
    put_index("[]");
    refuse_dir(KVS_FORMAT, "weight_map", "");
    put_index("{\"x\":\"s1.safetensors\",\"x\":\"s2.safetensors\"}");
    refuse_dir(KVS_FORMAT, "duplicate", "model.safetensors.index.json");
    put("model.safetensors.index.json", "{\"weight_map\"", 13);
    refuse_dir(KVS_FORMAT, "model.safetensors.index.json line 1", "");
}

static void a_shard_that_was_cut_names_itself(void **state)
{
    (void)state;
    put_shards();
    put_index("{\"x\":\"s1.safetensors\",\"z\":\"s2.safetensors\"}");
    static const off_t size[] = {0, 7, 20, 150};
    for (size_t i = 0; i < UNIT_COUNT(size); i++) {
        put_shards();
        struct stat st;
        assert_int_equal(stat(in_dir("s2.safetensors"), &st), 0);
        assert_true(size[i] < st.st_size);
        assert_int_equal(truncate(in_dir("s2.safetensors"), size[i]), 0);
        refuse_dir(KVS_FORMAT, "s2.safetensors", "");
        put_shards();
        assert_int_equal(truncate(in_dir("s2.safetensors"), st.st_size - 1), 0);
        refuse_dir(KVS_FORMAT, "s2.safetensors: tensor z", "4..8");
    }
}

int main(void)
{
#define IN_DIR(f) cmocka_unit_test_setup_teardown(f, make_dir, remove_dir)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_are_found_with_type_shape_and_place),
        cmocka_unit_test(every_type_has_its_size),
        cmocka_unit_test(a_header_length_that_the_file_cannot_have_is_refused),
        cmocka_unit_test(every_cut_of_a_file_is_refused),
        cmocka_unit_test(offsets_that_lie_are_refused_by_tensor),
        cmocka_unit_test(shapes_and_types_that_lie_are_refused_by_tensor),
        cmocka_unit_test(tensors_must_cover_the_data_once),
        cmocka_unit_test(headers_that_are_no_list_of_tensors_are_refused),
        IN_DIR(a_folder_holds_one_file_or_an_index_with_shards),
        IN_DIR(the_index_decides_which_shard_a_tensor_is_from),
        IN_DIR(an_index_that_lies_is_refused_by_name),
        IN_DIR(a_shard_that_was_cut_names_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
