/* fake_dev.c - see fake_dev.h. */
#include "unit/comm/fake_dev.h"

#include <stdlib.h>
#include <string.h>
#include "base/err.h"
#include "unit/comm/fake_ipc.h"

fake_dev fake;

static void *fake_alloc(size_t bytes)
{
    void *shared = fake.no_memory ? NULL : fake_ipc_alloc(bytes);
    void *p = fake.no_memory || shared != NULL ? shared : malloc(bytes);
    if (p != NULL) {
        memset(p, 0xA5, bytes);
        fake.n_live++;
    }
    return p;
}

static void fake_free(void *p)
{
    fake.n_live -= p != NULL;
    if (!fake_ipc_free(p)) {
        free(p);
    }
}

static void fake_copy(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

static void fake_fill(void *dst, int byte, size_t bytes)
{
    memset(dst, byte, bytes);
}

const dev_place dev_cuda = {"cuda",    fake_alloc, fake_free,     fake_copy,
                            fake_copy, fake_fill,  dev_queue_sync};

static int n_visible(void)
{
    return fake.n_visible > 0 ? fake.n_visible : FAKE_DEVICES;
}

kvs_status dev_cuda_open(int32_t index, dev_cuda_info *info, kvs_error *err)
{
    TRY(dev_cuda_use(index, err));
    if (info != NULL) {
        memset(info, 0, sizeof *info);
        info->index = index;
        info->n_device = n_visible();
        memset(info->uuid, 0x40 + (fake.n_visible > 0 ? fake.visible[index] : index), sizeof info->uuid);
    }
    return KVS_OK;
}

kvs_status dev_cuda_use(int32_t index, kvs_error *err)
{
    return index >= 0 && index < n_visible()
               ? KVS_OK
               : err_set(err, KVS_NODEV, "CUDA device %d: there are %d", (int)index, n_visible());
}

kvs_status dev_host_name(char name[DEV_HOST_NAME], kvs_error *err)
{
    (void)err;
    memset(name, 0, DEV_HOST_NAME);
    strcpy(name, fake.host != NULL ? fake.host : "here");
    return KVS_OK;
}

kvs_status dev_cuda_reach(int32_t from, int32_t to, kvs_error *err)
{
    if (fake.apart) {
        return err_set(err, KVS_UNSUPPORTED, "CUDA device %d cannot reach the memory of device %d", (int)from,
                       (int)to);
    }
    fake.reach[from][to]++;
    return KVS_OK;
}

void dev_queue_sync(dev_queue *q)
{
    (void)q;
}

int dev_queue_is_done(dev_queue *q)
{
    (void)q;
    return !fake.busy;
}
