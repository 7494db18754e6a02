/* check_cuda.c - the check on a CUDA device: the same cases and the same oracle, with the kernels of the
 * device beside the reference, in memory that both see. */
#include <string.h>

#include "base/err.h"
#include "check/check.h"

enum { MAX_LIST = 4 * KERN_N_OP };

void check_describe_device(const dev_cuda_info *i, char *text, size_t cap)
{
    snprintf(text, cap,
             "device %d of %d: %s, %d SMs, L2 %.0f MiB, %.1f GiB, driver CUDA %d.%d, runtime %d.%d",
             (int)i->index, (int)i->n_device, i->name, (int)i->n_sm,
             (double)i->l2_bytes / (1024.0 * 1024.0),
             (double)i->mem_bytes / (1024.0 * 1024.0 * 1024.0), (int)(i->driver / 1000),
             (int)(i->driver % 1000 / 10), (int)(i->runtime / 1000), (int)(i->runtime % 1000 / 10));
}

kvs_status check_device_parse(const char *word, int32_t *cuda, kvs_error *err)
{
    *cuda = word != NULL && strcmp(word, "cuda") == 0;
    if (word == NULL || *cuda != 0 || strcmp(word, "cpu") == 0) {
        return KVS_OK;
    }
    return err_set(err, KVS_INVALID, "unknown device \"%.32s\": use cpu or cuda", word);
}

/* The reference of every op, each followed by the CUDA kernels of the op. */
static int32_t list_variants(kern_variant list[MAX_LIST])
{
    int32_t n = 0;
    int32_t n_host = 0;
    int32_t n_cuda = 0;
    const kern_variant *host = kern_variants(&n_host);
    const kern_variant *cuda = kern_variants_cuda(&n_cuda);
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        int32_t first = 0;
        while ((int32_t)host[first].op != op) {
            first++;
        }
        list[n++] = host[first];
        for (int32_t i = 0; i < n_cuda && n < MAX_LIST; i++) {
            if ((int32_t)cuda[i].op == op) {
                list[n++] = cuda[i];
            }
        }
    }
    return n;
}

kvs_status check_run_cuda(const kvs_check_config *cfg, kvs_error *err)
{
    if (cfg->selftest != 0 || cfg->cpu != NULL) {
        return err_set(err, KVS_INVALID,
                       "check: selftest and cpu are about the host: leave them out with device "
                       "cuda");
    }
    dev_cuda_info info;
    dev_queue queue;
    TRY(dev_cuda_open(0, &info, err));
    TRY(dev_queue_open_cuda(&queue, err));
    if (cfg->line != NULL) {
        char text[192];
        check_describe_device(&info, text, sizeof text);
        cfg->line(cfg->ctx, text);
    }
    kern_variant list[MAX_LIST];
    const int32_t n = list_variants(list);
    const kvs_status st = check_run_on(cfg, list, n, (check_filter){NULL, 0}, &queue, err);
    if (st != KVS_DEVICE) {
        dev_queue_close(&queue); /* a device that failed answers nothing more */
    }
    return st;
}
