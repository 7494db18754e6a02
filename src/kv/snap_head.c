/* snap_head.c - the snapshot header as bytes: encode, and parse what may be hostile.
 *
 * Order of the checks: size, magic, version, checksum, then fields from the first byte on, then how
 * the sections lie. A refusal names the field and its value and sets the byte.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/hash.h"
#include "kv/snap.h"

static const uint8_t MAGIC[8] = {'K', 'V', 'S', 'P', 'A', 'N', 0, 1};

/* Bytes of the fields before the entries. */
enum {
    AT_VERSION = 8,
    AT_ROW_TAG = 12,
    AT_INDEX_TAG = 16,
    AT_PAGE = 20,
    AT_N_LAYER = 24,
    AT_N_INDEX = 28,
    AT_DCP = 32,
    AT_INTERLEAVE = 36,
    AT_N_TOKEN = 40,
    AT_TOKENS = 48,
    AT_FILE_BYTES = 56,
    AT_MODEL_HASH = 64,
    AT_TOKEN_HASH = 80,
    AT_ZERO = 96
};

#define NOT_RECORDED UINT32_MAX

static_assert(SNAP_ENTRY_AT + SNAP_MAX_ENTRY * SNAP_ENTRY_BYTES <= SNAP_HASH_AT, "entries fit");
static_assert(SNAP_HASH_AT + 8 == SNAP_HEADER_BYTES, "the checksum ends the header");

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) {
        p[i] = (uint8_t)(v >> (8 * i));
    }
}

static void put64(uint8_t *p, uint64_t v)
{
    put32(p, (uint32_t)v);
    put32(p + 4, (uint32_t)(v >> 32));
}

static uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t get64(const uint8_t *p)
{
    return get32(p) | (uint64_t)get32(p + 4) << 32;
}

static int32_t n_section(const snap_head *h)
{
    return h->n_layer + h->n_index_layer;
}

int64_t snap_n_page(const snap_head *h)
{
    return shard_cdiv(h->n_token, KVS_PAGE_TOKENS);
}

int64_t snap_page_bytes(const snap_head *h, int32_t i)
{
    return i < h->n_layer ? kv_page_bytes(h->layout.kv) : index_page_bytes(h->layout.index);
}

static int64_t section_bytes(const snap_head *h, int32_t i)
{
    return snap_n_page(h) * (snap_page_bytes(h, i) + SNAP_PAGE_HASH_BYTES);
}

static int64_t token_bytes(const snap_head *h)
{
    return h->n_token * (int64_t)sizeof(int32_t);
}

void snap_head_place(snap_head *h, bool with_tokens)
{
    int64_t at = SNAP_HEADER_BYTES;
    h->token_at = 0;
    if (with_tokens) {
        h->token_at = at;
        at += token_bytes(h);
    }
    for (int32_t i = 0; i < n_section(h); i++) {
        h->layer[i].at = at;
        at += section_bytes(h, i);
    }
    h->file_bytes = at;
}

void snap_head_encode(const snap_head *h, uint8_t out[SNAP_HEADER_BYTES])
{
    memset(out, 0, SNAP_HEADER_BYTES);
    memcpy(out, MAGIC, sizeof MAGIC);
    put32(out + AT_VERSION, SNAP_VERSION);
    put32(out + AT_ROW_TAG, kv_tag(h->layout));
    put32(out + AT_INDEX_TAG, index_tag(h->layout));
    put32(out + AT_PAGE, KVS_PAGE_TOKENS);
    put32(out + AT_N_LAYER, (uint32_t)h->n_layer);
    put32(out + AT_N_INDEX, (uint32_t)h->n_index_layer);
    put32(out + AT_DCP, (uint32_t)h->dcp);
    put32(out + AT_INTERLEAVE, (uint32_t)h->interleave);
    put64(out + AT_N_TOKEN, (uint64_t)h->n_token);
    put64(out + AT_TOKENS, (uint64_t)h->token_at);
    put64(out + AT_FILE_BYTES, (uint64_t)h->file_bytes);
    for (int i = 0; i < 2; i++) {
        put64(out + AT_MODEL_HASH + 8 * i, h->model_hash[i]);
        put64(out + AT_TOKEN_HASH + 8 * i, h->token_hash[i]);
    }
    for (int32_t i = 0; i < n_section(h); i++) {
        const snap_layer *l = &h->layer[i];
        uint8_t *p = out + SNAP_ENTRY_AT + i * SNAP_ENTRY_BYTES;
        put64(p, (uint64_t)l->at);
        put32(p + 8, i < h->n_layer ? f32_bits(l->k_scale) : (uint32_t)l->of_layer);
    }
    put64(out + SNAP_HASH_AT, hash_xx64(out, SNAP_HASH_AT));
}

static kvs_status refuse(kvs_error *err, int64_t pos, kvs_status st)
{
    err_at(err, pos);
    return st;
}

/* A macro because err_set takes the line along. */
#define REFUSE(pos, code, ...) return refuse(err, (pos), err_set(err, (code), __VA_ARGS__))

static kvs_status parse_frame(const uint8_t *in, int64_t file_bytes, kvs_error *err)
{
    if (memcmp(in, MAGIC, sizeof MAGIC) != 0) {
        REFUSE(0, KVS_FORMAT, "not a cache snapshot: it does not begin with KVSPAN");
    }
    const uint32_t version = get32(in + AT_VERSION);
    if (version != SNAP_VERSION) {
        REFUSE(AT_VERSION, KVS_UNSUPPORTED,
               "snapshot version %" PRIu32 "; this library reads version %d", version,
               SNAP_VERSION);
    }
    if (get64(in + SNAP_HASH_AT) != hash_xx64(in, SNAP_HASH_AT)) {
        REFUSE(SNAP_HASH_AT, KVS_FORMAT,
               "the header does not have its checksum: the file is damaged; write it again");
    }
    const uint64_t said = get64(in + AT_FILE_BYTES);
    if (said != (uint64_t)file_bytes) {
        const bool cut = said > (uint64_t)file_bytes;
        REFUSE(file_bytes, KVS_FORMAT,
               "the file has %" PRId64 " bytes, its header says %" PRIu64 ": %s", file_bytes, said,
               cut ? "it is cut off" : "bytes follow the last page");
    }
    return KVS_OK;
}

static kvs_status parse_layout(snap_head *h, const uint8_t *in, kvs_error *err)
{
    const uint64_t tag = get32(in + AT_ROW_TAG) | (uint64_t)get32(in + AT_INDEX_TAG) << 32;
    if (cache_tag_parse(tag, &h->layout, err) != KVS_OK) {
        return refuse(err, AT_ROW_TAG, KVS_FORMAT);
    }
    const uint32_t page = get32(in + AT_PAGE);
    if (page != KVS_PAGE_TOKENS) {
        REFUSE(AT_PAGE, KVS_FORMAT, "pages of %" PRIu32 " tokens; a page has %d", page,
               KVS_PAGE_TOKENS);
    }
    const uint32_t n_layer = get32(in + AT_N_LAYER);
    const uint32_t n_index = get32(in + AT_N_INDEX);
    if (n_layer < 1 || n_layer > SNAP_MAX_ENTRY || n_index > n_layer ||
        n_layer + n_index > SNAP_MAX_ENTRY) {
        REFUSE(AT_N_LAYER, KVS_FORMAT,
               "%" PRIu32 " layers with rows and %" PRIu32 " with index keys: a snapshot has 1 to "
               "%d in all, no more with keys than with rows",
               n_layer, n_index, SNAP_MAX_ENTRY);
    }
    if ((n_index > 0) != (h->layout.index != KVS_INDEX_AUTO)) {
        REFUSE(AT_INDEX_TAG, KVS_FORMAT, "%" PRIu32 " layers with index keys, an index tag for %s",
               n_index, n_index > 0 ? "none" : "some");
    }
    kv_layout pair = h->layout;
    const kvs_status together = kv_layout_resolve(n_index > 0, &pair, err);
    if (together != KVS_OK) {
        return refuse(err, AT_ROW_TAG, together);
    }
    h->n_layer = (int32_t)n_layer;
    h->n_index_layer = (int32_t)n_index;
    return KVS_OK;
}

static kvs_status parse_counts(snap_head *h, const uint8_t *in, kvs_error *err)
{
    const uint32_t dcp = get32(in + AT_DCP);
    const uint32_t interleave = get32(in + AT_INTERLEAVE);
    const uint64_t n_token = get64(in + AT_N_TOKEN);
    if (dcp < 1 || dcp > KVS_MAX_RANKS) {
        REFUSE(AT_DCP, KVS_FORMAT, "writer's dcp %" PRIu32 ": it is 1 to %d", dcp, KVS_MAX_RANKS);
    }
    if (interleave < 1 || interleave > KVS_PAGE_TOKENS || KVS_PAGE_TOKENS % interleave != 0) {
        REFUSE(AT_INTERLEAVE, KVS_FORMAT,
               "writer's interleave %" PRIu32 ": it is 1, 2, 4, 8, 16, 32 or 64", interleave);
    }
    if (n_token > INT32_MAX) {
        REFUSE(AT_N_TOKEN, KVS_FORMAT, "%" PRIu64 " tokens: a sequence has at most 2^31 - 1",
               n_token);
    }
    h->dcp = (int32_t)dcp;
    h->interleave = (int32_t)interleave;
    h->n_token = (int64_t)n_token;
    for (int i = 0; i < 2; i++) {
        h->model_hash[i] = get64(in + AT_MODEL_HASH + 8 * i);
        h->token_hash[i] = get64(in + AT_TOKEN_HASH + 8 * i);
    }
    const int32_t entries_end = SNAP_ENTRY_AT + n_section(h) * SNAP_ENTRY_BYTES;
    for (int32_t at = AT_ZERO; at < SNAP_HASH_AT; at++) {
        if (in[at] != 0 && (at < SNAP_ENTRY_AT || at >= entries_end)) {
            REFUSE(at, KVS_FORMAT, "unused byte %d of the header is %d, not 0", (int)at, in[at]);
        }
    }
    return KVS_OK;
}

static kvs_status parse_k_scale(const snap_head *h, snap_layer *l, int32_t i, uint32_t word,
                                int32_t at, kvs_error *err)
{
    l->k_scale = f32_from_bits(word);
    if (h->layout.kv == KVS_KV_FP8) {
        return kv_k_scale_check(l->k_scale, i, err) == KVS_OK ? KVS_OK
                                                              : refuse(err, at, KVS_FORMAT);
    }
    if (word != f32_bits(1.0f)) {
        REFUSE(at, KVS_FORMAT, "k_scale %g of layer %d: %s rows have none, which is written as 1",
               (double)l->k_scale, (int)i, kv_fmt_name(h->layout.kv));
    }
    return KVS_OK;
}

/* Index keys name the layers of rows they belong to, ascending, or none of them does. */
static bool owner_follows(const snap_head *h, int32_t i, uint32_t word)
{
    const bool first = i == h->n_layer;
    const int32_t before = first ? -1 : h->layer[i - 1].of_layer;
    if (word == NOT_RECORDED) {
        return first || before < 0;
    }
    return word < (uint32_t)h->n_layer && (first || (before >= 0 && (int32_t)word > before));
}

static kvs_status parse_layers(snap_head *h, const uint8_t *in, kvs_error *err)
{
    for (int32_t i = 0; i < n_section(h); i++) {
        const int32_t at = SNAP_ENTRY_AT + i * SNAP_ENTRY_BYTES;
        const uint32_t word = get32(in + at + 8);
        snap_layer *l = &h->layer[i];
        *l = (snap_layer){.at = 0, .k_scale = 1.0f, .of_layer = -1};
        if (get32(in + at + 12) != 0) {
            REFUSE(at + 12, KVS_FORMAT, "unused bytes %d to %d of the header are not 0",
                   (int)at + 12, (int)at + 15);
        }
        if (i < h->n_layer) {
            TRY(parse_k_scale(h, l, i, word, at + 8, err));
            continue;
        }
        if (!owner_follows(h, i, word)) {
            REFUSE(at + 8, KVS_FORMAT,
                   "index keys %d belong to layer %" PRIu32 ": layers ascend below %d, or none is "
                   "recorded (4294967295)",
                   (int)(i - h->n_layer), word, (int)h->n_layer);
        }
        l->of_layer = word == NOT_RECORDED ? -1 : (int32_t)word;
    }
    return KVS_OK;
}

typedef struct section {
    int64_t at, bytes;
    int32_t i; /* -1: the token ids */
} section;

typedef struct section_name {
    char s[40];
} section_name;

static section_name name_of(const snap_head *h, int32_t i)
{
    section_name n;
    if (i < 0) {
        snprintf(n.s, sizeof n.s, "token ids");
    } else if (i < h->n_layer) {
        snprintf(n.s, sizeof n.s, "rows of layer %d", (int)i);
    } else {
        snprintf(n.s, sizeof n.s, "index keys %d", (int)(i - h->n_layer));
    }
    return n;
}

/* Takes a section at its offset as read, into its place by offset. */
static kvs_status add_section(const snap_head *h, section *list, int32_t n, int32_t i, uint64_t at,
                              int64_t bytes, int32_t field, kvs_error *err)
{
    if (at < SNAP_HEADER_BYTES || at > (uint64_t)h->file_bytes ||
        (uint64_t)bytes > (uint64_t)h->file_bytes - at) {
        REFUSE(field, KVS_FORMAT,
               "%s: %" PRId64 " bytes at byte %" PRIu64
               " do not lie between the header and the file's end, %" PRId64,
               name_of(h, i).s, bytes, at, h->file_bytes);
    }
    int32_t k = n;
    while (k > 0 && list[k - 1].at > (int64_t)at) {
        list[k] = list[k - 1];
        k--;
    }
    list[k] = (section){.at = (int64_t)at, .bytes = bytes, .i = i};
    return KVS_OK;
}

static kvs_status parse_sections(snap_head *h, const uint8_t *in, kvs_error *err)
{
    section list[SNAP_MAX_ENTRY + 1];
    int32_t n = 0;
    const uint64_t token_at = get64(in + AT_TOKENS);
    if (token_at == 0 && (h->token_hash[0] | h->token_hash[1]) != 0) {
        REFUSE(AT_TOKEN_HASH, KVS_FORMAT, "a hash of token ids without token ids");
    }
    if (token_at != 0) {
        TRY(add_section(h, list, n++, -1, token_at, token_bytes(h), AT_TOKENS, err));
        h->token_at = (int64_t)token_at;
    }
    for (int32_t i = 0; i < n_section(h); i++) {
        const int32_t field = SNAP_ENTRY_AT + i * SNAP_ENTRY_BYTES;
        const uint64_t at = get64(in + field);
        TRY(add_section(h, list, n++, i, at, section_bytes(h, i), field, err));
        h->layer[i].at = (int64_t)at;
    }
    int64_t end = SNAP_HEADER_BYTES;
    for (int32_t k = 0; k < n; k++) {
        if (list[k].at != end) {
            REFUSE(list[k].at, KVS_FORMAT,
                   "%s begin at byte %" PRId64 ", what precedes them ends at %" PRId64
                   ": sections %s",
                   name_of(h, list[k].i).s, list[k].at, end,
                   list[k].at < end ? "overlap" : "leave a gap");
        }
        end += list[k].bytes;
    }
    if (end != h->file_bytes) {
        REFUSE(end, KVS_FORMAT,
               "the last section ends at byte %" PRId64 ", the file at %" PRId64
               ": bytes follow the last page",
               end, h->file_bytes);
    }
    return KVS_OK;
}

kvs_status snap_head_parse(snap_head *h, const uint8_t in[SNAP_HEADER_BYTES], int64_t file_bytes,
                           kvs_error *err)
{
    memset(h, 0, sizeof *h);
    TRY(parse_frame(in, file_bytes, err));
    h->file_bytes = file_bytes;
    TRY(parse_layout(h, in, err));
    TRY(parse_counts(h, in, err));
    TRY(parse_layers(h, in, err));
    return parse_sections(h, in, err);
}
