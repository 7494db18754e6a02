/* host_name.c - what tells hosts apart. */
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "dev/dev.h"

kvs_status dev_host_name(char name[DEV_HOST_NAME], kvs_error *err)
{
    static const char path[] = "/proc/sys/kernel/random/boot_id";
    memset(name, 0, DEV_HOST_NAME);
    FILE *f = fopen(path, "r");
    const size_t n = f != NULL ? fread(name, 1, DEV_HOST_NAME - 1, f) : 0;
    if (f != NULL) {
        fclose(f);
    }
    return n > 0 ? KVS_OK : err_set(err, KVS_IO, "%s cannot be read: it tells hosts apart", path);
}
