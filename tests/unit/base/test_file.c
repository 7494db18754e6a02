/* Files: whole reads with a limit, exact reads and writes, mappings, replacement in one step. */
#include "unit/unit.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

static char dir[64];

static const char *at(const char *name)
{
    static char path[2][160];
    static int turn;
    turn = 1 - turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/kvspan-file-XXXXXX");
    return mkdtemp(dir) != NULL ? 0 : -1;
}

static int n_entries(void)
{
    DIR *d = opendir(dir);
    int n = 0;
    for (const struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        n += e->d_name[0] != '.';
    }
    closedir(d);
    return n;
}

static int remove_dir(void **state)
{
    (void)state;
    DIR *d = opendir(dir);
    for (const struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        if (e->d_name[0] != '.') {
            unlinkat(dirfd(d), e->d_name, 0);
        }
    }
    closedir(d);
    return rmdir(dir);
}

static void put(const char *path, const char *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

static void read_all_gives_every_byte_and_a_nul(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 4095, 4096, 4097, 200000};
    char *want = malloc(200000);
    for (size_t i = 0; i < 200000; i++) {
        want[i] = (char)(i * 7);
    }
    for (size_t k = 0; k < UNIT_COUNT(sizes); k++) {
        put(at("a"), want, sizes[k]);
        for (int exact = 0; exact < 2; exact++) {
            char *data = NULL;
            size_t n = 99;
            kvs_error err = {0};
            const size_t limit = exact ? sizes[k] : SIZE_MAX;
            assert_int_equal(file_read_all(at("a"), limit, &data, &n, &err), KVS_OK);
            assert_int_equal(n, sizes[k]);
            assert_memory_equal(data, want, n);
            assert_int_equal(data[n], 0);
            mem_free(data);
        }
        if (sizes[k] > 0) {
            char *data = (char *)want;
            size_t n = 99;
            kvs_error err = {0};
            assert_int_equal(file_read_all(at("a"), sizes[k] - 1, &data, &n, &err), KVS_LIMIT);
            assert_null(data);
            assert_non_null(strstr(err.text, at("a")));
        }
    }
    free(want);
}

static void read_all_reads_a_pipe(void **state)
{
    (void)state;
    int fd[2];
    assert_int_equal(pipe(fd), 0);
    assert_true(fcntl(fd[1], F_SETPIPE_SZ, 1 << 18) >= 1 << 18);
    char chunk[1000];
    memset(chunk, 'x', sizeof chunk);
    for (int i = 0; i < 150; i++) {
        assert_int_equal(write(fd[1], chunk, sizeof chunk), sizeof chunk);
    }
    close(fd[1]);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd[0]);
    char *data = NULL;
    size_t n = 0;
    assert_int_equal(file_read_all(path, 1 << 20, &data, &n, NULL), KVS_OK);
    assert_int_equal(n, 150000);
    mem_free(data);
    close(fd[0]);
}

static void what_is_missing_is_named(void **state)
{
    (void)state;
    kvs_error err = {0};
    file f;
    assert_int_equal(file_open(&f, at("none"), &err), KVS_IO);
    assert_int_equal(f.fd, -1);
    assert_non_null(strstr(err.text, "/none: cannot open: No such file"));
    char *data = NULL;
    size_t n = 0;
    assert_int_equal(file_read_all(dir, 100, &data, &n, &err), KVS_IO);
    assert_null(data);
    file_map m;
    assert_int_equal(file_map_open(&m, dir, &err), KVS_IO);
    assert_non_null(strstr(err.text, "not a regular file"));
    assert_null(m.data);
    file_replace r;
    assert_int_equal(file_replace_begin(&r, at("no/such"), &err), KVS_IO);
    file_replace_abort(&r);
    void *p = &err;
    assert_int_equal(file_map_sparse(&p, at("no"), 10, &err), KVS_IO);
    assert_null(p);
    assert_int_equal(file_map_sparse(&p, NULL, 0, &err), KVS_INVALID);
}

static void a_short_file_says_where_it_ends(void **state)
{
    (void)state;
    put(at("s"), "0123456789", 10);
    file f;
    kvs_error err = {0};
    char buf[16] = {0};
    assert_int_equal(file_open(&f, at("s"), &err), KVS_OK);
    int64_t size = 0;
    assert_int_equal(file_size(&f, &size, &err), KVS_OK);
    assert_int_equal(size, 10);
    assert_int_equal(file_pread(&f, buf, 4, 6, &err), KVS_OK);
    assert_memory_equal(buf, "6789", 5);
    assert_int_equal(file_pread(&f, buf, 0, 10, &err), KVS_OK);
    assert_int_equal(file_pread(&f, buf, 5, 6, &err), KVS_FORMAT);
    assert_int_equal(err.pos, 10);
    assert_non_null(strstr(err.text, "ends at byte 10, 1 bytes short"));
    assert_int_equal(file_pwrite(&f, "x", 1, 0, &err), KVS_IO); /* opened for reading */
    file_close(&f);
    assert_int_equal(file_pread(&f, buf, 1, 0, &err), KVS_IO);
}

static void mapping_shows_the_file(void **state)
{
    (void)state;
    put(at("m"), "hello", 5);
    file_map m;
    assert_int_equal(file_map_open(&m, at("m"), NULL), KVS_OK);
    assert_int_equal(m.n, 5);
    assert_memory_equal(m.data, "hello", 5);
    file_map_scattered(&m, true); /* hints change nothing, wherever they point */
    file_map_want(&m, 3, 1);
    file_map_want(&m, 0, SIZE_MAX);
    file_map_want(&m, 5, 1);
    file_map_want(&m, SIZE_MAX, SIZE_MAX);
    file_map_scattered(&m, false);
    assert_memory_equal(m.data, "hello", 5);
    file_map_close(&m);
    file_map_scattered(&m, true);
    file_map_want(&m, 0, 1);
    assert_null(m.data);
    put(at("e"), "", 0);
    assert_int_equal(file_map_open(&m, at("e"), NULL), KVS_OK);
    assert_int_equal(m.n, 0);
    assert_null(m.data);
    file_map_close(&m);
}

static void sparse_mapping_passes_4_gib(void **state)
{
    (void)state;
    const size_t bytes = ((size_t)5 << 30) + 123;
    const char *const dirs[] = {NULL, dir};
    for (size_t i = 0; i < UNIT_COUNT(dirs); i++) {
        void *p = NULL;
        kvs_error err = {0};
        if (file_map_sparse(&p, dirs[i], bytes, &err) != KVS_OK) {
            fail_msg("%s", err.text);
        }
        unsigned char *b = p;
        static const size_t offs[] = {0, 4096, ((size_t)1 << 31) + 1, ((size_t)1 << 32) + 4097};
        for (size_t k = 0; k < UNIT_COUNT(offs); k++) {
            assert_int_equal(b[offs[k]], 0);
            b[offs[k]] = (unsigned char)(k + 1);
        }
        b[bytes - 1] = 9;
        for (size_t k = 0; k < UNIT_COUNT(offs); k++) {
            assert_int_equal(b[offs[k]], k + 1);
        }
        file_unmap_sparse(p, bytes);
    }
    file_unmap_sparse(NULL, 5);
}

static void replacement_is_all_or_nothing(void **state)
{
    (void)state;
    put(at("t"), "old", 3);
    const int n0 = n_entries();
    file_replace r;
    char *data = NULL;
    size_t n = 0;
    assert_int_equal(file_replace_begin(&r, at("t"), NULL), KVS_OK);
    assert_int_equal(file_pwrite(&r.f, "new content", 11, 0, NULL), KVS_OK);
    assert_int_equal(file_read_all(at("t"), 100, &data, &n, NULL), KVS_OK);
    assert_string_equal(data, "old");
    mem_free(data);
    file_replace_abort(&r);
    file_replace_abort(&r);
    assert_int_equal(n_entries(), n0);
    assert_int_equal(file_read_all(at("t"), 100, &data, &n, NULL), KVS_OK);
    assert_string_equal(data, "old");
    mem_free(data);

    file_replace s;
    assert_int_equal(file_replace_begin(&r, at("t"), NULL), KVS_OK);
    assert_int_equal(file_replace_begin(&s, at("t"), NULL), KVS_OK);
    assert_int_equal(file_pwrite(&r.f, "first", 5, 0, NULL), KVS_OK);
    assert_int_equal(file_pwrite(&s.f, "second", 6, 0, NULL), KVS_OK);
    assert_int_equal(file_replace_commit(&r, NULL), KVS_OK);
    assert_int_equal(file_replace_commit(&s, NULL), KVS_OK);
    assert_int_equal(n_entries(), n0);
    /* no memory: before the new name, or not at all */
    assert_int_equal(file_replace_begin(&r, at("t"), NULL), KVS_OK);
    assert_int_equal(file_pwrite(&r.f, "third", 5, 0, NULL), KVS_OK);
    mem_fail_after(1);
    const kvs_status no_memory = file_replace_commit(&r, NULL);
    mem_fail_after(0);
    assert_int_equal(no_memory, KVS_NOMEM);
    assert_int_equal(n_entries(), n0);
    assert_int_equal(file_read_all(at("t"), 100, &data, &n, NULL), KVS_OK);
    assert_string_equal(data, "second");
    mem_free(data);
    struct stat st;
    assert_int_equal(stat(at("t"), &st), 0);
    const mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(st.st_mode & 0777, 0666 & ~mask);
}

static void a_full_disk_leaves_the_old_file(void **state)
{
    (void)state;
    put(at("t"), "old", 3);
    const int n0 = n_entries();
    struct rlimit lim;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &lim), 0);
    const struct rlimit small = {4096, lim.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    static char big[10000];
    kvs_error err = {0};
    const kvs_status got = file_write_all(at("t"), big, sizeof big, &err);
    setrlimit(RLIMIT_FSIZE, &lim);
    assert_int_equal(got, KVS_IO);
    assert_non_null(strstr(err.text, "cannot write: File too large"));
    assert_int_equal(n_entries(), n0);
    /* A folder that comes up in its place: the rename fails after everything was written. */
    file_replace r;
    assert_int_equal(file_replace_begin(&r, at("d"), &err), KVS_OK);
    assert_int_equal(file_pwrite(&r.f, "x", 1, 0, &err), KVS_OK);
    assert_int_equal(mkdir(at("d"), 0777), 0);
    assert_int_equal(file_replace_commit(&r, &err), KVS_IO);
    assert_non_null(strstr(err.text, "rename"));
    assert_int_equal(rmdir(at("d")), 0);
    assert_int_equal(n_entries(), n0);
    char *data = NULL;
    size_t n = 0;
    assert_int_equal(file_read_all(at("t"), 100, &data, &n, NULL), KVS_OK);
    assert_string_equal(data, "old");
    mem_free(data);
    assert_int_equal(file_write_all(at("t"), "", 0, NULL), KVS_OK);
    assert_int_equal(file_read_all(at("t"), 100, &data, &n, NULL), KVS_OK);
    assert_int_equal(n, 0);
    mem_free(data);
}

/* Ends at once, or the test's time is up. */
static void a_named_pipe_without_a_writer_is_not_waited_for(void **state)
{
    (void)state;
    kvs_error err = {0};
    assert_int_equal(mkfifo(at("p"), 0666), 0);
    alarm(20);
    char *data = NULL;
    size_t n = 1;
    assert_int_equal(file_read_all(at("p"), 100, &data, &n, &err), KVS_OK);
    assert_int_equal(n, 0);
    mem_free(data);
    file_map m;
    assert_int_equal(file_map_open(&m, at("p"), &err), KVS_IO);
    assert_non_null(strstr(err.text, "not a regular file"));
    /* One whose writer is there but slow is read to its end. */
    const int reader = open(at("p"), O_RDONLY | O_NONBLOCK);
    const int writer = open(at("p"), O_WRONLY);
    assert_true(reader >= 0 && writer >= 0);
    const pid_t pid = fork();
    if (pid == 0) {
        close(reader);
        usleep(200000);
        _exit(write(writer, "late", 4) == 4 ? 0 : 1);
    }
    close(writer);
    assert_int_equal(file_read_all(at("p"), 100, &data, &n, &err), KVS_OK);
    assert_string_equal(data, "late");
    mem_free(data);
    alarm(0);
    close(reader);
    int status = 1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(unlink(at("p")), 0);
}

static void what_is_no_regular_file_keeps_its_name(void **state)
{
    (void)state;
    kvs_error err = {0};
    assert_int_equal(mkdir(at("d"), 0777), 0);
    assert_int_equal(mkfifo(at("p"), 0666), 0);
    const int n0 = n_entries();
    static const char *const name[] = {"d", "p"};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(file_write_all(at(name[i]), "x", 1, &err), KVS_IO);
        assert_non_null(strstr(err.text, "no regular file"));
    }
    assert_int_equal(n_entries(), n0);
    struct stat st;
    assert_int_equal(stat(at("p"), &st), 0);
    assert_true(S_ISFIFO(st.st_mode));
    assert_int_equal(unlink(at("p")), 0);
    assert_int_equal(rmdir(at("d")), 0);
}

static void no_memory_is_an_error_without_a_leak(void **state)
{
    (void)state;
    put(at("t"), "old", 3);
    const mem_stats s0 = mem_stats_get();
    const int n0 = n_entries();
    for (int n = 1;; n++) {
        mem_fail_after(n);
        char *data = NULL;
        size_t len = 0;
        const kvs_status a = file_read_all(at("t"), 100, &data, &len, NULL);
        mem_free(data);
        file_map m;
        const kvs_status b = file_map_open(&m, at("t"), NULL);
        file_map_close(&m);
        const kvs_status c = file_write_all(at("t"), "new", 3, NULL);
        const int fired = mem_fail_fired();
        mem_fail_after(0);
        assert_int_equal(a != KVS_OK || b != KVS_OK || c != KVS_OK, fired);
        assert_int_equal(mem_stats_get().n_live, s0.n_live);
        assert_int_equal(n_entries(), n0);
        if (!fired) {
            assert_true(n > 5);
            break;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(read_all_gives_every_byte_and_a_nul),
        cmocka_unit_test(read_all_reads_a_pipe),
        cmocka_unit_test(what_is_missing_is_named),
        cmocka_unit_test(a_short_file_says_where_it_ends),
        cmocka_unit_test(mapping_shows_the_file),
        cmocka_unit_test(sparse_mapping_passes_4_gib),
        cmocka_unit_test(replacement_is_all_or_nothing),
        cmocka_unit_test(a_full_disk_leaves_the_old_file),
        cmocka_unit_test(what_is_no_regular_file_keeps_its_name),
        cmocka_unit_test(a_named_pipe_without_a_writer_is_not_waited_for),
        cmocka_unit_test(no_memory_is_an_error_without_a_leak),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
