/* comm/self.c: a group of one rank. Nobody to wait for, nothing to move; everything else is the
 * same code as for many ranks. */
#include "base/err.h"
#include "comm/impl.h"

static kvs_status self_exchange(comm *c, const comm_head *head, bool first, kvs_error *err)
{
    (void)head;
    (void)first;
    (void)err;
    return comm_failed(c) ? KVS_PEER : KVS_OK;
}

static void self_tell(comm *c)
{
    (void)c;
}

static uint64_t self_offer(comm *c)
{
    (void)c;
    return 0;
}

static kvs_status self_prepare(comm *c, comm *child, const comm_plan *plan, uint64_t *token,
                               kvs_error *err)
{
    (void)c;
    (void)child;
    (void)plan;
    (void)err;
    *token = 0;
    return KVS_OK;
}

static void self_commit(comm *child, uint64_t token)
{
    (void)child;
    (void)token;
}

static void self_cancel(comm *child, uint64_t token, bool ended)
{
    (void)child;
    (void)token;
    (void)ended;
}

static void self_close(comm *c)
{
    (void)c;
}

static const transport g_self = {
    .name = "self",
    .exchange = self_exchange,
    .tell = self_tell,
    .split_offer = self_offer,
    .split_prepare = self_prepare,
    .split_commit = self_commit,
    .split_cancel = self_cancel,
    .close = self_close,
};

kvs_status comm_self_open(comm **out, const comm_config *cfg, kvs_error *err)
{
    *out = comm_new(&g_self, NULL, 0, 1, cfg);
    if (*out == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for a group of 1 rank");
    }
    return KVS_OK;
}
