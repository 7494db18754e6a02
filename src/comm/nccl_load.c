/* comm/nccl_load.c: finds NCCL at run time. */
#include "comm/nccl_load.h"
#include <dlfcn.h>
#include <string.h>
#include "base/err.h"

kvs_status nccl_api_load(nccl_api *api, const char *name, kvs_error *err)
{
    const struct {
        const char *symbol;
        void *slot;
    } want[] = {
        {"ncclGetVersion", &api->version},
        {"ncclGetUniqueId", &api->unique_id},
        {"ncclCommInitRank", &api->init_rank},
        {"ncclCommDestroy", &api->destroy},
        {"ncclCommAbort", &api->abort},
        {"ncclCommGetAsyncError", &api->async_error},
        {"ncclGetErrorString", &api->error_text},
        {"ncclAllGather", &api->all_gather},
        {"ncclBroadcast", &api->broadcast},
        {"ncclSend", &api->send},
        {"ncclRecv", &api->recv},
        {"ncclGroupStart", &api->group_start},
        {"ncclGroupEnd", &api->group_end},
    };
    memset(api, 0, sizeof *api);
    void *lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL) {
        const char *why = dlerror();
        return err_set(err, KVS_UNSUPPORTED,
                       "NCCL cannot be loaded (%.160s): install NCCL 2 and put the folder of %s into "
                       "LD_LIBRARY_PATH, or exchange by peer memory",
                       why != NULL ? why : "no reason given", name);
    }
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        void *f = dlsym(lib, want[i].symbol);
        if (f == NULL) {
            dlclose(lib);
            return err_set(err, KVS_UNSUPPORTED,
                           "%s has no %s: use NCCL 2.7 or later, or exchange by peer memory", name,
                           want[i].symbol);
        }
        memcpy(want[i].slot, &f, sizeof f); /* an object pointer becomes a function pointer, as POSIX has it */
    }
    return KVS_OK;
}
