/* cli/output.c - texts that appear whole or not at all. */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void cli_output_drop(cli_output *o)
{
    if (o->f != NULL) {
        fclose(o->f);
    }
    free(o->text);
    *o = (cli_output){0};
}

static bool write_all(int fd, const char *text, size_t n)
{
    for (size_t done = 0; done < n;) {
        const ssize_t k = write(fd, text + done, n - done);
        if (k < 0 && errno != EINTR) {
            return false;
        }
        done += k > 0 ? (size_t)k : 0;
    }
    return true;
}

bool cli_is_special(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && !S_ISREG(st.st_mode);
}

static int write_special(const cli_output *o)
{
    const int fd = open(o->path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return cli_fail(CLI_FAILED, "%s: cannot open for writing: %s", o->path, strerror(errno));
    }
    const bool ok = write_all(fd, o->text, o->n);
    const int why = errno;
    close(fd);
    return ok ? CLI_OK : cli_fail(CLI_FAILED, "%s: cannot write: %s", o->path, strerror(why));
}

enum { PATH_BYTES = 4096 };

/* A new file beside the target; its path in temp. -1 with the failure told. */
static int create_beside(const char *path, char temp[PATH_BYTES])
{
    const int n = snprintf(temp, PATH_BYTES, "%s.%ld.tmp", path, (long)getpid());
    if (n < 0 || n >= PATH_BYTES) {
        cli_fail(CLI_FAILED, "%.80s...: the path is too long", path);
        return -1;
    }
    const int fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        cli_fail(CLI_FAILED, "%s: cannot create: %s", path, strerror(errno));
    }
    return fd;
}

/* Long work must not end at a file that could never be written. */
static bool can_create(const char *path)
{
    struct stat st;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        cli_fail(CLI_FAILED, "%s: is a folder: name a file", path);
        return false;
    }
    if (strcmp(path, "-") == 0 || cli_is_special(path)) {
        return true;
    }
    char temp[PATH_BYTES];
    const int fd = create_beside(path, temp);
    if (fd < 0) {
        return false;
    }
    close(fd);
    unlink(temp);
    return true;
}

bool cli_output_open(cli_output *o, const char *path)
{
    *o = (cli_output){.path = path};
    if (path == NULL) {
        return true;
    }
    if (!can_create(path)) {
        return false;
    }
    o->f = open_memstream(&o->text, &o->n);
    if (o->f == NULL) {
        cli_fail(CLI_FAILED, "no memory for the output to %s", path);
        return false;
    }
    return true;
}

/* A new file beside the target, then renamed over it. */
static int write_replacing(const cli_output *o)
{
    char temp[PATH_BYTES];
    const int fd = create_beside(o->path, temp);
    if (fd < 0) {
        return CLI_FAILED;
    }
    const bool wrote = write_all(fd, o->text, o->n) && fsync(fd) == 0;
    int why = errno;
    const bool closed = close(fd) == 0;
    if (wrote && closed && rename(temp, o->path) == 0) {
        return CLI_OK;
    }
    why = wrote ? errno : why;
    unlink(temp);
    return cli_fail(CLI_FAILED, "%s: cannot write: %s", o->path, strerror(why));
}

int cli_output_commit(cli_output *o)
{
    if (o->path == NULL) {
        return CLI_OK;
    }
    const bool whole = fflush(o->f) == 0 && !ferror(o->f);
    int code = CLI_OK;
    if (!whole) {
        code = cli_fail(CLI_FAILED, "no memory for the output to %s", o->path);
    } else if (strcmp(o->path, "-") == 0) {
        fwrite(o->text, 1, o->n, stdout); /* cli_close_stdout sees a failure */
    } else {
        code = cli_is_special(o->path) ? write_special(o) : write_replacing(o);
    }
    cli_output_drop(o);
    return code;
}

int cli_close_stdout(void)
{
    const bool bad = ferror(stdout) != 0;
    if (fclose(stdout) != 0 || bad) {
        return cli_fail(CLI_FAILED, "standard output: cannot write: %s", strerror(errno));
    }
    return CLI_OK;
}
