/* mkmodel VARIANT f32|bf16|fp8 DIR [SHARDS]: writes a tiny checkpoint into DIR (see mkmodel.h). */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "oracle/mkmodel.h"

int main(int argc, char **argv)
{
    if (argc < 4 || argc > 5) {
        fprintf(stderr, "usage: %s VARIANT f32|bf16|fp8 DIR [SHARDS]\nvariants:", argv[0]);
        for (int i = 0; mkmodel_variants[i] != NULL; i++)
            fprintf(stderr, " %s", mkmodel_variants[i]);
        fputc('\n', stderr);
        return 2;
    }
    mkdir(argv[3], 0777); /* may be there already; the first file tells */
    char msg[256];
    if (mkmodel_write(argv[1], argv[2], argc == 5 ? atoi(argv[4]) : 1, argv[3], msg, sizeof msg) ==
        0)
        return 0;
    fprintf(stderr, "%s\n", msg);
    return 1;
}
