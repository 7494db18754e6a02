/* An application outside the project: says the version it runs with, if it is the one it was
 * compiled for. */
#include <stdio.h>
#include <string.h>

#include <kvspan/status.h>
#include <kvspan/version.h>

int main(void)
{
    if (strcmp(kvs_version(), KVS_VERSION_STRING) != 0) {
        return 1;
    }
    printf("%s %s\n", kvs_version(), kvs_status_name(KVS_OK));
    return 0;
}
