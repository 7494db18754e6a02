/* check.c - the run: which ops, classes, cases and variants, one row each, and the public entry.
 *
 * A case is built once and every variant runs over it, so that the oracle works once. The reference
 * is the first variant of every op. A variant whose function is one that was already tested is
 * listed as inherited; one that this machine cannot run is listed as skipped.
 */
#include "check/check.h"

#include <string.h>

#include "base/cpu.h"
#include "base/err.h"
#include "base/mem.h"
#include "check/check_comm.h"
#include "check/comm_cuda.h"
#include "check/oracle.h"

enum { MAX_VARIANT = 16, N_WORKER = 2, MAX_PROCESS = 8 };

static const check_op *const g_ops[KERN_N_OP] = {
#define CHECK_OP(name) &check_##name##_op,
    KERN_OP_LIST(CHECK_OP)
#undef CHECK_OP
};

const check_op *check_op_of(kern_op op)
{
    return g_ops[op];
}

check_variant check_variant_of(const kern_variant *v)
{
    const int bf16 = strstr(v->name, "bf16") != NULL || strstr(v->name, "amx") != NULL;
    /* A CUDA kernel may round to fp16 (2^-11) or bf16, and flushes nothing. */
    const check_variant cv = {
        .name = v->name,
        .u_p = bf16 || v->place == KERN_CUDA ? 0x1p-8 : 0.0,
        .bf16 = bf16,
        .place = v->place,
        .dot_u = (double)v->dot_u,
        .key_u = (double)v->key_u,
        .step = (double)v->step,
        .free_order = (v->flags & KERN_FREE_ORDER) != 0,
    };
    return cv;
}

/* ---- rows ---- */

static void say(check_run *c, const char *text)
{
    if (c->cfg->line != NULL) {
        c->cfg->line(c->cfg->ctx, text);
    }
}

/* A field of a CSV: quoted, with quotes doubled. */
static void csv_text(FILE *f, const char *s)
{
    fputc('"', f);
    for (; *s != '\0'; s++) {
        if (*s == '"') {
            fputc('"', f);
        }
        fputc(*s, f);
    }
    fputc('"', f);
}

static void csv_row(check_run *c, const char *op, const char *variant, const char *cls,
                    const char *verdict, const check_result *r, const char *detail)
{
    if (c->csv == NULL) {
        return;
    }
    fprintf(c->csv, "%s,%s,%s,%lld,%s,%.4g,", op, variant, cls,
            r != NULL ? (long long)r->n_case : 0LL, verdict, r != NULL ? r->worst : 0.0);
    csv_text(c->csv, detail);
    fprintf(c->csv, ",%llu\n", (unsigned long long)c->cfg->seed);
}

void check_row(check_run *c, const char *op, const char *variant, const char *cls, int verdict,
               const check_result *r, const char *note)
{
    static const char *const words[] = {"pass", "FAIL", "skip"};
    char text[512];
    const char *detail = verdict == 1 && r != NULL ? r->first : note;
    char worst[32] = "-";
    if (r != NULL && verdict != 2) {
        snprintf(worst, sizeof worst, "%.3g", r->worst);
    }
    snprintf(text, sizeof text, "%-12s %-11s %-14s %s %9s  %s", op, variant, cls, words[verdict],
             worst, detail != NULL ? detail : "");
    for (size_t n = strlen(text); n > 0 && text[n - 1] == ' '; n--) {
        text[n - 1] = '\0';
    }
    say(c, text);
    csv_row(c, op, variant, cls, words[verdict], r, detail != NULL ? detail : "");
    if (c->cfg->row != NULL) {
        const kvs_check_row row = {
            .op = op,
            .variant = variant,
            .cls = cls,
            .verdict = words[verdict],
            .n_case = r != NULL ? r->n_case : 0,
            .worst = r != NULL ? r->worst : 0.0,
            .detail = detail != NULL ? detail : "",
            .line = text,
        };
        c->cfg->row(c->cfg->ctx, &row);
    }
    int64_t *const counts[] = {&c->total.n_passed, &c->total.n_failed, &c->total.n_skipped};
    ++*counts[verdict];
    if (verdict == 1 && c->first_fail[0] == '\0') {
        snprintf(c->first_fail, sizeof c->first_fail, "%s %s %s: %s", op, variant, cls,
                 detail != NULL ? detail : "");
    }
}

/* ---- one op ---- */

typedef struct live_variant {
    const kern_variant *v;
    check_variant cv;
    kern_table table;
    int listed; /* gets rows; the reference runs for comparison even when it is not asked for */
    check_result result;
    int32_t n_refused; /* cases of the class that are not for it */
    char refused[96];  /* why the first one is not */
} live_variant;

typedef struct op_run {
    const check_op *op;
    live_variant live[MAX_VARIANT];
    int32_t n_live;
} op_run;

static void missing_features(uint32_t lacks, char *note, size_t cap)
{
    char names[160];
    snprintf(note, cap, "not on this machine or above the CPU cap: %s",
             cpu_describe(lacks, names, sizeof names));
}

static void add_variant(check_run *c, op_run *o, const kern_variant *v)
{
    const char *op = kern_op_name(o->op->op);
    const int asked = c->cfg->variant == NULL || strcmp(c->cfg->variant, v->name) == 0;
    const int is_ref = o->n_live == 0;
    char note[224];
    if (!asked && !is_ref) {
        return;
    }
    if ((v->features & ~c->features) != 0) {
        missing_features(v->features & ~c->features, note, sizeof note);
        check_row(c, op, v->name, "-", 2, NULL, note);
        return;
    }
    live_variant *l = &o->live[o->n_live];
    memset(l, 0, sizeof *l);
    v->apply(&l->table);
    l->table.variant[v->op] = v->name;
    if (!o->op->filled(&l->table)) {
        check_row(c, op, v->name, "-", 1, NULL,
                  "the variant is listed but sets no function for this op");
        return;
    }
    for (int32_t i = 0; i < o->n_live; i++) {
        if (o->op->same(&o->live[i].table, &l->table)) {
            snprintf(note, sizeof note, "inherited: the function of %s", o->live[i].v->name);
            check_row(c, op, v->name, "-", 2, NULL, note);
            return;
        }
    }
    l->v = v;
    l->cv = check_variant_of(v);
    l->listed = asked && (c->queue == NULL || v->place == KERN_CUDA);
    o->n_live++;
}

/* Whether the built case is for the variant; counts those that are not. */
static int takes_case(live_variant *l, const check_case *k)
{
    const char *why = l->v->refuses != NULL ? l->v->refuses(k->args) : NULL;
    if (why != NULL) {
        if (l->n_refused++ == 0) {
            snprintf(l->refused, sizeof l->refused, "%s", why);
        }
        return 0;
    }
    return (k->cls->flags & CLASS_DEVICE) == 0 || l->v->place == KERN_CUDA;
}

static kvs_status run_case(check_run *c, op_run *o, const check_class *cls, int32_t index,
                           kvs_error *err)
{
    check_case k;
    const uint64_t seed = c->cfg->conformance ? 0 : c->cfg->seed;
    TRY(case_open(&k, o->op, cls, index, seed, c->cfg->quick, c->queue, err));
    kvs_status st = case_build(&k, err);
    for (int32_t i = 0; i < o->n_live && st == KVS_OK; i++) {
        live_variant *l = &o->live[i];
        const int wanted =
            l->listed ? (cls->flags & CLASS_ORDER) == 0 || (l->v->flags & KERN_FREE_ORDER) == 0
                      : (cls->flags & CLASS_SAME_BITS) != 0;
        if (wanted && takes_case(l, &k)) {
            case_run(&k, &l->cv, &l->table, i == 0, c->workers, NULL, &l->result);
        }
        if (k.broken) {
            st = err_set(err, KVS_DEVICE, "%s %s, %s, case %d: %.120s; the device cannot go on",
                         kern_op_name(o->op->op), l->v->name, cls->name, (int)index,
                         l->result.first);
        }
    }
    if (!k.broken) {
        case_close(&k);
    }
    return st;
}

/* Cases of a class that this run has. */
static int32_t class_cases(const check_run *c, const check_class *cls)
{
    if ((c->cfg->conformance && cls->rule == NULL) ||
        (c->only.cls != NULL && strcmp(c->only.cls, cls->name) != 0) ||
        ((cls->flags & CLASS_DEVICE) != 0 && c->queue == NULL)) {
        return 0;
    }
    const int32_t n = c->cfg->quick ? cls->n_quick : cls->n_case;
    return c->only.n_case > 0 && c->only.n_case < n ? c->only.n_case : n;
}

kvs_status check_report(check_run *c, const char *op, const char *what, kvs_error *err)
{
    char text[96];
    snprintf(text, sizeof text, "%s %s", op, what);
    const int stop =
        c->cfg->progress != NULL && c->cfg->progress(c->cfg->ctx, text, c->n_done, c->n_total) != 0;
    c->n_done++;
    return stop ? err_set(err, KVS_CANCELLED, "check: ended in %s", text) : KVS_OK;
}

static void class_row(check_run *c, const op_run *o, const check_class *cls, const live_variant *l)
{
    const check_result *r = &l->result;
    const char *op = kern_op_name(o->op->op);
    char note[160];
    if (r->n_case > 0) {
        snprintf(note, sizeof note, "%d of %d cases left out: %s", (int)l->n_refused,
                 (int)(l->n_refused + r->n_case), l->refused);
        check_row(c, op, l->v->name, cls->name, r->n_bad > 0, r,
                  l->n_refused > 0           ? note
                  : c->cfg->conformance != 0 ? cls->rule
                                             : NULL);
        return;
    }
    check_row(c, op, l->v->name, cls->name, 2, NULL,
              l->n_refused > 0 ? l->refused : "the variant promises no order of sums");
}

static kvs_status run_class(check_run *c, op_run *o, const check_class *cls, kvs_error *err)
{
    for (int32_t i = 0; i < o->n_live; i++) {
        memset(&o->live[i].result, 0, sizeof o->live[i].result);
        o->live[i].n_refused = 0;
    }
    const int32_t n = class_cases(c, cls);
    kvs_status st = KVS_OK;
    for (int32_t i = 0; i < n && st == KVS_OK; i++) {
        st = check_report(c, kern_op_name(o->op->op), cls->name, err);
        st = st == KVS_OK ? run_case(c, o, cls, i, err) : st;
    }
    for (int32_t i = 0; i < o->n_live && n > 0 && (st == KVS_OK || st == KVS_DEVICE); i++) {
        const live_variant *l = &o->live[i];
        if (l->listed && (st == KVS_OK || l->result.n_bad > 0)) {
            class_row(c, o, cls, l);
        }
    }
    return st;
}

static kvs_status run_op(check_run *c, const check_op *op, kvs_error *err)
{
    op_run *o = mem_calloc(1, sizeof *o);
    if (o == NULL) {
        return err_set(err, KVS_NOMEM, "no memory for the check of %s", kern_op_name(op->op));
    }
    o->op = op;
    kvs_status st = KVS_OK;
    for (int32_t i = 0; i < c->n_variant; i++) {
        if (c->variants[i].op != op->op) {
            continue;
        }
        if (o->n_live == MAX_VARIANT) {
            st = err_set(err, KVS_LIMIT, "%s has more than %d variants", kern_op_name(op->op),
                         MAX_VARIANT);
            break;
        }
        add_variant(c, o, &c->variants[i]);
    }
    int32_t n_listed = 0; /* a reference that nobody asked for runs only beside one that was */
    for (int32_t i = 0; i < o->n_live; i++) {
        n_listed += o->live[i].listed;
    }
    if (n_listed == 0 && c->queue != NULL && st == KVS_OK) {
        check_row(c, kern_op_name(op->op), "-", "-", 2, NULL, "no CUDA kernel of that name");
    }
    for (int32_t i = 0; i < op->n_class && st == KVS_OK && n_listed > 0; i++) {
        st = run_class(c, o, &op->cls[i], err);
    }
    mem_free(o);
    return st;
}

/* ---- the run ---- */

static int op_asked(const check_run *c, kern_op op)
{
    return c->cfg->op == NULL || strcmp(c->cfg->op, kern_op_name(op)) == 0;
}

static kvs_status run_all(check_run *c, kvs_error *err)
{
    if (c->cfg->selftest) {
        return check_selftest(c, err);
    }
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        for (int32_t i = 0; i < g_ops[op]->n_class && op_asked(c, (kern_op)op); i++) {
            c->n_total += class_cases(c, &g_ops[op]->cls[i]);
        }
    }
    for (int32_t op = 0; op < KERN_N_OP; op++) {
        if (op_asked(c, (kern_op)op)) {
            TRY(run_op(c, g_ops[op], err));
        }
    }
    return KVS_OK;
}

static void add_name(char *list, size_t cap, const char *name)
{
    const size_t n = strlen(list);
    snprintf(list + n, cap - n, "%s%s", n > 0 ? ", " : "", name);
}

/* The named op and variant exist. */
static kvs_status check_names(const check_run *c, kvs_error *err)
{
    char ops[192] = "";
    char variants[128] = "";
    int op_found = c->cfg->op == NULL;
    int variant_found = c->cfg->variant == NULL;
    for (int32_t i = 0; i < KERN_N_OP; i++) {
        op_found |= op_asked(c, (kern_op)i);
        add_name(ops, sizeof ops, kern_op_name((kern_op)i));
    }
    if (!op_found) {
        return err_set(err, KVS_INVALID, "unknown op \"%.32s\"; ops are %s", c->cfg->op, ops);
    }
    for (int32_t i = 0; i < c->n_variant; i++) {
        const kern_variant *v = &c->variants[i];
        if (!op_asked(c, v->op)) {
            continue;
        }
        variant_found |= c->cfg->variant != NULL && strcmp(c->cfg->variant, v->name) == 0;
        int known = 0;
        for (int32_t j = 0; j < i; j++) {
            known |= op_asked(c, c->variants[j].op) && strcmp(c->variants[j].name, v->name) == 0;
        }
        if (!known) {
            add_name(variants, sizeof variants, v->name);
        }
    }
    if (!variant_found) {
        return err_set(err, KVS_INVALID, "%s has no variant \"%.32s\"; there are %s",
                       c->cfg->op != NULL ? c->cfg->op : "no op", c->cfg->variant, variants);
    }
    return KVS_OK;
}

static kvs_status check_flags(const kvs_check_config *cfg, kvs_error *err)
{
    const struct {
        const char *name;
        int32_t value;
    } flags[] = {
        {"quick", cfg->quick}, {"conformance", cfg->conformance}, {"selftest", cfg->selftest}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        if (flags[i].value != 0 && flags[i].value != 1) {
            return err_set(err, KVS_INVALID, "check: %s is %d; use 0 or 1", flags[i].name,
                           flags[i].value);
        }
    }
    if (cfg->conformance && (cfg->quick || cfg->selftest || cfg->seed != 0)) {
        return err_set(err, KVS_INVALID,
                       "check: the conformance run has a fixed seed and size; leave out "
                       "quick, selftest and seed");
    }
    return KVS_OK;
}

static kvs_status finish(check_run *c, kvs_error *err)
{
    char text[96];
    snprintf(text, sizeof text, "%lld passed, %lld failed, %lld skipped",
             (long long)c->total.n_passed, (long long)c->total.n_failed,
             (long long)c->total.n_skipped);
    say(c, text);
    if (c->total.n_failed > 0) {
        return err_set(err, KVS_INTERNAL, "%lld of %lld checks failed, first %s",
                       (long long)c->total.n_failed,
                       (long long)(c->total.n_failed + c->total.n_passed), c->first_fail);
    }
    return KVS_OK;
}

static kvs_status csv_open(check_run *c, kvs_error *err)
{
    if (c->cfg->csv == NULL) {
        return KVS_OK;
    }
    c->csv = fopen(c->cfg->csv, "w");
    if (c->csv == NULL) {
        return err_set(err, KVS_IO, "check: cannot write %s; name a file in a folder that exists",
                       c->cfg->csv);
    }
    fprintf(c->csv, "op,variant,class,cases,verdict,worst,detail,seed\n");
    return KVS_OK;
}

static kvs_status csv_close(check_run *c, kvs_status st, kvs_error *err)
{
    if (c->csv == NULL) {
        return st;
    }
    const int broken = ferror(c->csv) != 0;
    const int lost = fclose(c->csv) != 0;
    if (st == KVS_OK && (broken || lost)) {
        return err_set(err, KVS_IO, "check: writing %s failed; the disk may be full", c->cfg->csv);
    }
    return st;
}

kvs_status check_run_variants(const kvs_check_config *cfg, const kern_variant *variants,
                              int32_t n_variant, check_filter only, kvs_error *err)
{
    return check_run_on(cfg, variants, n_variant, only, NULL, err);
}

kvs_status check_run_on(const kvs_check_config *cfg, const kern_variant *variants,
                        int32_t n_variant, check_filter only, dev_queue *queue, kvs_error *err)
{
    check_run c = {
        .cfg = cfg, .only = only, .variants = variants, .n_variant = n_variant, .queue = queue};
    uint32_t cap = 0;
    TRY(cpu_parse_level(cfg->cpu, &cap, err));
    TRY(check_flags(cfg, err));
    TRY(check_names(&c, err));
    c.features = cpu_features() & cap;
    orc_init();
    TRY(csv_open(&c, err));
    kvs_status st = pool_open(&c.workers, N_WORKER, err);
    if (st == KVS_OK) {
        st = run_all(&c, err);
    }
    pool_close(c.workers);
    if (st == KVS_OK) {
        st = finish(&c, err);
    }
    if (cfg->result != NULL) {
        *cfg->result = c.total;
    }
    return csv_close(&c, st, err);
}

/* ---- collectives ---- */

static void comm_line(void *ctx, const char *text)
{
    const kvs_check_config *cfg = ctx;
    if (cfg->line != NULL) {
        cfg->line(cfg->ctx, text);
    }
    if (cfg->row != NULL) {
        const char *verdict = strstr(text, " FAIL") != NULL   ? "FAIL"
                              : strstr(text, " skip") != NULL ? "skip"
                                                              : "pass";
        const kvs_check_row row = {.verdict = verdict, .detail = "", .line = text};
        cfg->row(cfg->ctx, &row);
    }
}

/* Before the processes meet, which takes them all. */
static kvs_status check_job_size(const kvs_check_config *cfg, kvs_error *err)
{
    if (cfg->rendezvous != NULL && (cfg->n_rank < 1 || cfg->n_rank > MAX_PROCESS)) {
        return err_set(err, KVS_INVALID, "check: comm over %d processes: use 1 to %d", (int)cfg->n_rank, MAX_PROCESS);
    }
    if (cfg->rendezvous != NULL && (cfg->rank < 0 || cfg->rank >= cfg->n_rank)) {
        return err_set(err, KVS_INVALID, "check: rank %d of %d processes: use 0 to %d", (int)cfg->rank,
                       (int)cfg->n_rank, (int)cfg->n_rank - 1);
    }
    return KVS_OK;
}

static kvs_status run_comm(const kvs_check_config *cfg, kvs_error *err)
{
    if (cfg->op != NULL || cfg->variant != NULL || cfg->cpu != NULL || cfg->conformance ||
        cfg->selftest || cfg->csv != NULL) {
        return err_set(err, KVS_INVALID,
                       "check: comm has no op, variant, cpu, conformance, selftest or csv: leave them "
                       "out");
    }
    int32_t cuda = 0;
    TRY(check_device_parse(cfg->device, &cuda, err));
    TRY(check_job_size(cfg, err));
    check_comm_totals t = {0, 0, 0};
    const check_comm_config cc = {
        .seed = cfg->seed,
        .quick = cfg->quick,
        .timeout_ms = cfg->timeout_ms,
        .rendezvous = cfg->rendezvous,
        .rank = cfg->rank,
        .n_rank = cfg->n_rank,
        .line = comm_line,
        .ctx = (void *)(uintptr_t)cfg,
        .totals = &t,
    };
    const kvs_status st = cuda != 0 ? check_comm_cuda(&cc, err) : check_comm_run(&cc, err);
    if (cfg->result != NULL) {
        *cfg->result = (kvs_check_result){t.n_passed, t.n_failed, t.n_skipped};
    }
    if (cfg->line != NULL && (st == KVS_OK || st == KVS_INTERNAL)) {
        char text[96];
        snprintf(text, sizeof text, "%lld passed, %lld failed, %lld skipped", (long long)t.n_passed,
                 (long long)t.n_failed, (long long)t.n_skipped);
        cfg->line(cfg->ctx, text);
    }
    return st;
}

kvs_status kvs_check_run(const kvs_check_config *cfg, kvs_error *err)
{
    if (cfg == NULL || cfg->struct_size < sizeof cfg->struct_size ||
        cfg->struct_size > 16 * sizeof *cfg) {
        return err_set(err, KVS_INVALID,
                       "check: struct_size is not set; start from "
                       "kvs_check_config_default()");
    }
    kvs_check_config local;
    memset(&local, 0, sizeof local);
    memcpy(&local, cfg, cfg->struct_size < sizeof local ? cfg->struct_size : sizeof local);
    if (local.comm != 0) {
        return run_comm(&local, err);
    }
    int32_t cuda = 0;
    TRY(check_device_parse(local.device, &cuda, err));
    if (cuda != 0) {
        return check_run_cuda(&local, err);
    }
    int32_t n = 0;
    const kern_variant *variants = kern_variants(&n);
    return check_run_variants(&local, variants, n, (check_filter){NULL, 0}, err);
}
