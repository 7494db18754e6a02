#include "unit/api/drive.h"

#include "unit/unit.h"

kvs_engine *drive_open(const kvs_engine_config *c)
{
    kvs_engine *e = NULL;
    kvs_error err = {0};
    if (kvs_engine_open(&e, c, &err) < 0) {
        fail_msg("tp %d, dcp %d: %s", c->tp, c->dcp, err.text);
    }
    return e;
}

uint64_t drive_submit(kvs_engine *e, const kvs_request *r)
{
    uint64_t id = 0;
    kvs_error err = {0};
    if (kvs_engine_submit(e, r, &id, &err) < 0) {
        fail_msg("%s", err.text);
    }
    return id;
}

void drive(kvs_engine *e, void (*on_event)(void *ctx, kvs_engine *e, const kvs_event *ev),
           void *ctx)
{
    kvs_event ev[4];
    kvs_error err = {0};
    kvs_status st = KVS_OK;
    while (st == KVS_OK) {
        st = kvs_engine_step(e, &err);
        if (st < 0) {
            fail_msg("%s", err.text);
        }
        for (int32_t n = 0; (n = kvs_engine_poll(e, ev, 4)) > 0;) {
            for (int32_t i = 0; i < n; i++) {
                on_event(ctx, e, &ev[i]);
            }
        }
    }
    assert_int_equal(st, KVS_IDLE);
}
