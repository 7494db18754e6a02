/* selftest.c - the tool is tested: a fault of every kind, in every op, must be reported.
 *
 * Per op the first case of each of the first classes runs once as it is, which must pass, and then
 * once per kind of fault, which must fail; a value just inside its bound must pass. A row per (op,
 * fault).
 */
#include <string.h>

#include "base/err.h"
#include "check/check.h"

enum { N_TRY = 2, N_CLASS = 4 }; /* places per kind of fault and class; classes per op */

/* Whether planting the fault is answered as it should be. */
static int fault_reported(check_case *k, const check_variant *v, const kern_table *t, check_run *c,
                          fault_kind kind, uint64_t pick)
{
    const check_fault f = {kind, pick};
    check_result r;
    memset(&r, 0, sizeof r);
    if (kind == FAULT_ULP || kind == FAULT_INSIDE) {
        r.plant = (int64_t)(1 + pick % 100);
        r.plant_over = kind == FAULT_ULP;
    }
    /* against the reference's own bytes, where the class compares them */
    case_run(k, v, t, kind != FAULT_BITS, c->workers, &f, &r);
    if ((kind == FAULT_ULP || kind == FAULT_INSIDE) && r.plant > 0) {
        return -1; /* the class compares no value against a bound */
    }
    return (r.n_bad > 0) == (kind != FAULT_INSIDE);
}

static void count_kind(check_case *k, const kern_variant *v, const kern_table *t, check_run *c,
                       fault_kind kind, int64_t n[2])
{
    const check_variant cv = check_variant_of(v);
    const int by_value = kind == FAULT_ULP || kind == FAULT_INSIDE;
    for (int i = 0; i < N_TRY; i++) {
        if (!by_value && !fault_applies(k, kind)) {
            return;
        }
        const int ok = fault_reported(k, &cv, t, c, kind, rng_u64(c->cfg->seed, 77, (uint64_t)i));
        if (ok >= 0) {
            n[ok]++;
        }
    }
}

/* n[kind][0] missed, [1] reported; clean[0] cases that fail without a fault. */
static kvs_status selftest_class(check_run *c, const check_op *op, const check_class *cls,
                                 const kern_variant *v, int64_t n[N_FAULT][2], kvs_error *err)
{
    kern_table t;
    memset(&t, 0, sizeof t);
    v->apply(&t);
    check_case k;
    TRY(case_open(&k, op, cls, 0, c->cfg->seed, 1, NULL, err));
    kvs_status st = case_build(&k, err);
    if (st == KVS_OK) {
        check_result clean;
        memset(&clean, 0, sizeof clean);
        const check_variant cv = check_variant_of(v);
        case_run(&k, &cv, &t, 1, c->workers, NULL, &clean);
        n[FAULT_NONE][clean.n_bad == 0]++;
        for (int kind = FAULT_NONE + 1; kind < N_FAULT; kind++) {
            count_kind(&k, v, &t, c, (fault_kind)kind, n[kind]);
        }
    }
    case_close(&k);
    return st;
}

static void selftest_rows(check_run *c, const check_op *op, const char *variant,
                          int64_t n[N_FAULT][2])
{
    for (int kind = 0; kind < N_FAULT; kind++) {
        check_result r;
        memset(&r, 0, sizeof r);
        r.n_case = n[kind][0] + n[kind][1];
        if (r.n_case == 0) {
            continue;
        }
        char note[CHECK_MAX_DETAIL];
        const int quiet = kind == FAULT_NONE || kind == FAULT_INSIDE;
        snprintf(note, sizeof note, "%lld of %lld %s", (long long)n[kind][1], (long long)r.n_case,
                 quiet ? "accepted" : "reported");
        memcpy(r.first, note, sizeof note);
        check_row(c, kern_op_name(op->op), variant, fault_name((fault_kind)kind), n[kind][0] > 0,
                  &r, note);
    }
}

/* Whether variant i is the first of its op. */
static int is_first(const check_run *c, int32_t i)
{
    for (int32_t j = 0; j < i; j++) {
        if (c->variants[j].op == c->variants[i].op) {
            return 0;
        }
    }
    return 1;
}

/* Variant i is the one that its op is tested with, and its op is asked for. */
static int takes_part(const check_run *c, int32_t i)
{
    const char *op = kern_op_name(c->variants[i].op);
    return is_first(c, i) && (c->cfg->op == NULL || strcmp(c->cfg->op, op) == 0);
}

kvs_status check_selftest(check_run *c, kvs_error *err)
{
    for (int32_t i = 0; i < c->n_variant; i++) {
        c->n_total += takes_part(c, i);
    }
    for (int32_t i = 0; i < c->n_variant; i++) {
        const kern_variant *v = &c->variants[i];
        if (!takes_part(c, i)) {
            continue;
        }
        TRY(check_report(c, kern_op_name(v->op), "selftest", err));
        int64_t n[N_FAULT][2];
        memset(n, 0, sizeof n);
        const check_op *op = check_op_of(v->op);
        for (int32_t j = 0; j < op->n_class && j < N_CLASS; j++) {
            if (op->cls[j].n_quick == 0) {
                continue; /* too long to run so often; the same code as its neighbours */
            }
            TRY(selftest_class(c, op, &op->cls[j], v, n, err));
        }
        selftest_rows(c, op, v->name, n);
    }
    return KVS_OK;
}
