#include "unit/unit.h"

#include <dirent.h>
#include <pthread.h>
#include <unistd.h>

#include "base/rng.h"
#include "unit/kv/shards.h"

int64_t shape_row(const shape *s)
{
    switch (s->kv) {
    case KVS_KV_F32:
        return 2304;
    case KVS_KV_BF16:
        return 1152;
    case KVS_KV_FP8:
        return 576;
    default:
        return 656;
    }
}

int64_t shape_key(const shape *s)
{
    return s->index == KVS_INDEX_F32 ? 512 : 128;
}

int64_t shape_index_page(const shape *s)
{
    return s->index == KVS_INDEX_F32 ? 32768 : 8448;
}

kvs_cache *shard_new(const shape *s, int32_t n, int32_t interleave, int32_t rank, int64_t n_page)
{
    static const float scale[8] = {0.5f, 1.0f, 3.0f, 0.25f, 0.125f, 7.0f, 2.0f, 9.0f};
    kvs_cache_config cfg = kvs_cache_config_default();
    cfg.kv = s->kv;
    cfg.index_kv = s->n_index > 0 ? s->index : KVS_INDEX_AUTO;
    cfg.hadamard = s->hadamard;
    cfg.n_layer = s->n_layer;
    cfg.n_index_layer = s->n_index;
    cfg.dcp = n;
    cfg.interleave = interleave;
    cfg.rank = rank;
    cfg.n_page = n_page;
    cfg.kernel_level = 1;
    cfg.k_scale = s->kv == KVS_KV_FP8 && s->n_layer <= 8 ? scale : NULL;
    kvs_cache *c = NULL;
    kvs_error err = {0};
    if (cache_create(&c, &cfg, &err) != KVS_OK) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    memset(c->map, 0xFF, c->map_bytes);
    return c;
}

enum { PLACES = 1 << 16 };

static uint64_t noise[(PLACES + 2304) / 8];

static void make_noise(void)
{
    for (size_t i = 0; i < UNIT_COUNT(noise); i++) {
        noise[i] = rng_u64(17, 0, i);
    }
}

/* An item is a piece of the noise, from a place that its name chooses. */
int64_t token_item(const shape *s, int index, int32_t layer, int64_t pos, uint8_t *out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_noise);
    const int64_t n = !index ? shape_row(s) : shape_key(s) + (s->index == KVS_INDEX_FP8 ? 4 : 0);
    const uint64_t at = rng_u64(18, (uint64_t)(2 * layer + (index != 0)), (uint64_t)pos) % PLACES;
    memcpy(out, (const uint8_t *)noise + at, (size_t)n);
    return n;
}

static void place(const shape *s, int index, uint8_t *page, int64_t off, const uint8_t *item)
{
    const int64_t key = shape_key(s);
    if (!index) {
        memcpy(page + off * shape_row(s), item, (size_t)shape_row(s));
        return;
    }
    memcpy(page + off * key, item, (size_t)key);
    if (s->index == KVS_INDEX_FP8) {
        memcpy(page + 8192 + 4 * off, item + key, 4);
    }
}

void shard_fill(kvs_cache *c, const shape *s, const int32_t *table, int64_t n_token)
{
    int64_t held[8] = {0};
    int32_t owner = 0;
    int32_t left = c->geom.i;
    uint8_t item[2304];
    for (int64_t p = 0; p < n_token; p++) {
        const int64_t page = table[held[owner] / 64];
        const int64_t off = held[owner] % 64;
        held[owner]++;
        for (int32_t i = 0; owner == c->geom.rank && i < s->n_layer + s->n_index; i++) {
            const int index = i >= s->n_layer;
            const int32_t layer = index ? i - s->n_layer : i;
            token_item(s, index, layer, p, item);
            uint8_t *base = index ? c->index_layer[layer].keys : c->layer[layer].kv;
            place(s, index, base + page * (index ? shape_index_page(s) : 64 * shape_row(s)), off,
                  item);
        }
        if (--left == 0) {
            left = c->geom.i;
            owner = (owner + 1) % c->geom.n;
        }
    }
}

int64_t shard_differs(const kvs_cache *a, const kvs_cache *b)
{
    const uint8_t *x = a->map;
    const uint8_t *y = b->map;
    if (a->map_bytes == b->map_bytes && memcmp(x, y, a->map_bytes) == 0) {
        return -1;
    }
    size_t i = 0;
    while (i < a->map_bytes && i < b->map_bytes && x[i] == y[i]) {
        i++;
    }
    return (int64_t)i;
}

int64_t token_page(const shape *s, int index, int32_t layer, int64_t p, int64_t n_token,
                   uint8_t *out)
{
    const int64_t bytes = index ? shape_index_page(s) : 64 * shape_row(s);
    uint8_t item[2304];
    memset(out, 0, (size_t)bytes);
    for (int64_t off = 0; off < 64 && 64 * p + off < n_token; off++) {
        token_item(s, index, layer, 64 * p + off, item);
        place(s, index, out, off, item);
    }
    return bytes;
}

void table_shuffled(int32_t *table, int64_t width, int64_t n_page, uint64_t seed)
{
    int32_t *order = malloc((size_t)n_page * sizeof *order);
    rng r = rng_init(seed, 99);
    for (int64_t i = 0; i < n_page; i++) {
        const int64_t j = rng_next_range(&r, 0, i);
        order[i] = order[j];
        order[j] = (int32_t)i;
    }
    memcpy(table, order, (size_t)width * sizeof *order);
    free(order);
}

static char dir[64];

const char *test_dir(void)
{
    if (dir[0] == '\0') {
        snprintf(dir, sizeof dir, "%s/kvspan-test-XXXXXX",
                 access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        if (mkdtemp(dir) == NULL) {
            perror(dir);
            abort();
        }
    }
    return dir;
}

const char *test_path(const char *name)
{
    static char text[4][512];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(text[turn], sizeof text[turn], "%s/%s", test_dir(), name);
    return text[turn];
}

static int each_file(int remove_it)
{
    DIR *d = opendir(test_dir());
    int n = 0;
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        if (e->d_name[0] == '.') {
            continue;
        }
        n++;
        if (remove_it) {
            unlink(test_path(e->d_name));
        }
    }
    closedir(d);
    return n;
}

int test_dir_files(void)
{
    return each_file(0);
}

void test_dir_remove(void)
{
    each_file(1);
    rmdir(dir);
    dir[0] = '\0';
}

uint8_t *file_bytes(const char *path, int64_t *n)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        *n = -1;
        return NULL;
    }
    fseek(f, 0, SEEK_END);
    *n = ftell(f);
    rewind(f);
    uint8_t *data = malloc(*n > 0 ? (size_t)*n : 1);
    if (fread(data, 1, (size_t)*n, f) != (size_t)*n) {
        abort();
    }
    fclose(f);
    return data;
}

void file_put(const char *path, const uint8_t *data, int64_t n)
{
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(data, 1, (size_t)n, f) != (size_t)n || fclose(f) != 0) {
        perror(path);
        abort();
    }
}
