/* fuzz_setup.c - any configuration of a cache or an attention handle is opened or refused with a message.
 *
 * Sizes are kept small where they would only cost memory; everything else is taken from the input. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvspan/kvspan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int64_t take(const uint8_t **p, size_t *left, size_t bytes)
{
    uint64_t x = 0;
    for (size_t i = 0; i < bytes && *left > 0; i++, (*left)--) {
        x |= (uint64_t) * (*p)++ << (8 * i);
    }
    const int shift = 64 - 8 * (int)bytes;
    return (int64_t)(x << shift) >> shift;
}

static void must_explain(const kvs_error *err, kvs_status st)
{
    if (err->code != st || strlen(err->text) < 10) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *p = data;
    size_t left = size;
    kvs_error err;
    memset(&err, 0, sizeof err);
    kvs_cache_config cc = kvs_cache_config_default();
    cc.kv = (kvs_kv_format)take(&p, &left, 1);
    cc.index_kv = (kvs_index_format)take(&p, &left, 1);
    cc.scale_rule = (kvs_scale_rule)take(&p, &left, 1);
    cc.hadamard = (int32_t)take(&p, &left, 1);
    cc.n_layer = (int32_t)take(&p, &left, 1);
    cc.n_index_layer = (int32_t)take(&p, &left, 1);
    cc.dcp = (int32_t)take(&p, &left, 1);
    cc.interleave = (int32_t)take(&p, &left, 1);
    cc.rank = (int32_t)take(&p, &left, 1);
    cc.n_page = take(&p, &left, 1);
    cc.kernel_level = (int32_t)take(&p, &left, 1) & 1;
    kvs_cache *c = NULL;
    kvs_status st = kvs_cache_create(&c, &cc, &err);
    if (st < 0) {
        must_explain(&err, st);
    }
    kvs_cache_free(c);

    kvs_comm *self = NULL;
    if (kvs_comm_open_self(&self, NULL, &err) < 0) {
        return 0;
    }
    kvs_dcp_config dc = kvs_dcp_config_default();
    dc.tp = (int32_t)take(&p, &left, 1);
    dc.dcp = (int32_t)take(&p, &left, 1);
    dc.interleave = (int32_t)take(&p, &left, 1);
    dc.n_head = (int32_t)take(&p, &left, 2);
    dc.n_index_head = (int32_t)take(&p, &left, 1);
    dc.topk = (int32_t)take(&p, &left, 2) % 600;
    const int32_t scale = (int32_t)take(&p, &left, 4);
    memcpy(&dc.softmax_scale, &scale, sizeof scale);
    dc.kv = (kvs_kv_format)take(&p, &left, 1);
    dc.index_kv = (kvs_index_format)take(&p, &left, 1);
    dc.exchange = (kvs_exchange)take(&p, &left, 1);
    dc.q_fp8 = (int32_t)take(&p, &left, 1);
    dc.max_rows = (int32_t)take(&p, &left, 1);
    dc.max_reqs = (int32_t)take(&p, &left, 1);
    dc.max_len = take(&p, &left, 3);
    dc.max_len = dc.max_len == 77 ? INT64_MAX : dc.max_len; /* a length no table could hold */
    dc.threads = (int32_t)take(&p, &left, 1) % 3;
    dc.trace = (int32_t)take(&p, &left, 1);
    dc.kernel_level = (int32_t)take(&p, &left, 1);
    char text[32];
    size_t n = left < sizeof text - 1 ? left : sizeof text - 1;
    memcpy(text, p, n);
    text[n] = '\0';
    if (n > 0) {
        dc.kernels = text;
    }
    dc.cpu = "avx2";
    kvs_dcp *d = NULL;
    st = kvs_dcp_open(&d, &dc, self, &err);
    if (st < 0) {
        must_explain(&err, st);
    }
    kvs_dcp_close(d);
    kvs_comm_close(self);
    return 0;
}
