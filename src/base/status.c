/* status.c: names and texts of the status list, and the version of the library. */
#include "kvspan/status.h"
#include "kvspan/version.h"

const char *kvs_status_name(kvs_status status)
{
    switch (status) {
#define STATUS_NAME(name, value, text)                                                             \
    case KVS_##name:                                                                               \
        return "KVS_" #name;
        KVS_STATUS_LIST(STATUS_NAME)
#undef STATUS_NAME
    }
    return "KVS_?";
}

const char *kvs_status_text(kvs_status status)
{
    switch (status) {
#define STATUS_TEXT(name, value, text)                                                             \
    case KVS_##name:                                                                               \
        return text;
        KVS_STATUS_LIST(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "unknown status";
}

const char *kvs_version(void)
{
    return KVS_VERSION_STRING;
}
