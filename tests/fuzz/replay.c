/* replay.c: runs a fuzz target once over every file of the folders and files it is given, in name
 * order, for builds without libFuzzer. Ends with 2 when there was nothing to run. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int run_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        perror(path);
        return -1;
    }
    uint8_t *data = NULL;
    size_t n = 0;
    size_t cap = 0;
    for (;;) {
        if (n == cap) {
            cap = cap == 0 ? 4096 : 2 * cap;
            uint8_t *grown = realloc(data, cap);
            if (grown == NULL) {
                break;
            }
            data = grown;
        }
        const size_t got = fread(data + n, 1, cap - n, f);
        if (got == 0) {
            break;
        }
        n += got;
    }
    fclose(f);
    /* An exact block, so that a sanitizer sees a read past the input. */
    uint8_t *exact = malloc(n > 0 ? n : 1);
    if (exact != NULL) {
        memcpy(exact, data, n);
        (void)LLVMFuzzerTestOneInput(exact, n);
    }
    free(exact);
    free(data);
    return exact != NULL ? 1 : -1;
}

static int run_path(const char *path)
{
    struct dirent **list = NULL;
    const int n = scandir(path, &list, NULL, alphasort);
    if (n < 0) {
        return run_file(path);
    }
    int n_run = 0;
    for (int i = 0; i < n; i++) {
        char name[4096];
        snprintf(name, sizeof name, "%s/%s", path, list[i]->d_name);
        if (list[i]->d_name[0] != '.' && n_run >= 0) {
            const int rc = run_path(name);
            n_run = rc < 0 ? rc : n_run + rc;
        }
        free(list[i]);
    }
    free(list);
    return n_run;
}

int main(int argc, char **argv)
{
    int n_run = 0;
    for (int i = 1; i < argc; i++) {
        const int rc = run_path(argv[i]);
        if (rc < 0) {
            return 1;
        }
        n_run += rc;
    }
    printf("%d inputs\n", n_run);
    return n_run > 0 ? 0 : 2;
}
