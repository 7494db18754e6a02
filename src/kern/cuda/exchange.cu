/* exchange.cu - messages between ranks by stores into the peers' memory.
 *
 * A message is a stream of words (lines), or parts cut into pieces of 4096 bytes (chunks), which a warp each
 * stores and fetches. Rows begin where the args say, on both sides: nothing is packed before or after. */
#include "kern/cuda/exchange.cuh"

enum { VECS = WIRE_CHUNK_DATA / 16 / 32 /* of a piece, per lane */ };

/* R: ranks that the launch can serve. */
template <int R>
struct exchange_launch {
    exchange_shape shape;
    uint32_t words;  /* to one peer */
    uint32_t pieces;
    exchange_args rank[R];
};

/* A place in the stream of words. */
typedef struct cursor {
    int part;
    uint32_t row, col; /* col: words */
} cursor;

static __device__ __forceinline__ cursor cursor_at(const exchange_args &a, uint32_t word)
{
    cursor c = {0, 0, 0};
    uint32_t width = (uint32_t)a.part[0].bytes / 4;
    while (c.part + 1 < a.n_part && word >= width * (uint32_t)a.n_row) {
        word -= width * (uint32_t)a.n_row;
        width = (uint32_t)a.part[++c.part].bytes / 4;
    }
    c.row = word / width;
    c.col = word % width;
    return c;
}

static __device__ __forceinline__ void cursor_step(const exchange_args &a, cursor *c)
{
    if (++c->col == (uint32_t)a.part[c->part].bytes / 4) {
        c->col = 0;
        if (++c->row == (uint32_t)a.n_row) {
            c->row = 0;
            c->part++;
        }
    }
}

static __device__ __forceinline__ const uint32_t *src_word(const exchange_args &a, const cursor &c, int to)
{
    const exchange_part &p = a.part[c.part];
    return (const uint32_t *)((const uint8_t *)p.src + to * p.src_rank + c.row * p.src_row) + c.col;
}

static __device__ __forceinline__ uint32_t *dst_word(const exchange_args &a, const cursor &c, int from)
{
    const exchange_part &p = a.part[c.part];
    return (uint32_t *)((uint8_t *)p.dst + from * p.dst_rank + c.row * p.dst_row) + c.col;
}

/* Up to three words of line i of `words`; those past the end are 0. */
static __device__ __forceinline__ uint4 read_line(const exchange_args &a, uint32_t words, uint32_t i, int to)
{
    uint32_t v[WIRE_LINE_WORDS] = {0, 0, 0};
    cursor c = cursor_at(a, i * WIRE_LINE_WORDS);
#pragma unroll
    for (int k = 0; k < WIRE_LINE_WORDS; k++) {
        if (i * WIRE_LINE_WORDS + k < words) {
            v[k] = *src_word(a, c, to);
            cursor_step(a, &c);
        }
    }
    return make_uint4(v[0], v[1], v[2], 0);
}

static __device__ __forceinline__ void write_line(const exchange_args &a, uint32_t words, uint32_t i, uint4 line,
                                                  int from)
{
    const uint32_t v[WIRE_LINE_WORDS] = {line.x, line.y, line.z};
    cursor c = cursor_at(a, i * WIRE_LINE_WORDS);
#pragma unroll
    for (int k = 0; k < WIRE_LINE_WORDS; k++) {
        if (i * WIRE_LINE_WORDS + k < words) {
            *dst_word(a, c, from) = v[k];
            cursor_step(a, &c);
        }
    }
}

/* first: line t.at of the first peer, already read. Then the own rows. */
static __device__ void send_lines(const exchange_shape &s, const exchange_args &a, uint32_t words, uint4 first,
                                  const wire_run &r)
{
    const crew t = crew_of_threads(s);
    const uint32_t lines = (words + WIRE_LINE_WORDS - 1) / WIRE_LINE_WORDS;
    for (int k = 1; k < a.w.n_rank; k++) {
        const int to = nth_rank(a.w, k);
        uint8_t *slot = wire_lines(a.w, r.epoch, to, a.w.rank);
        for (uint32_t i = t.at; i < lines; i += t.n) {
            uint4 v = k == 1 && i == t.at ? first : read_line(a, words, i, to);
            v.w = r.epoch;
            wire_store16(slot + (size_t)i * WIRE_LINE, v);
        }
    }
    for (uint32_t i = t.at; i < lines; i += t.n) {
        write_line(a, words, i, read_line(a, words, i, a.w.rank), a.w.rank);
    }
}

static __device__ void receive_lines(const exchange_shape &s, const exchange_args &a, uint32_t words, wire_run *r)
{
    const crew t = crew_of_threads(s);
    const uint32_t lines = (words + WIRE_LINE_WORDS - 1) / WIRE_LINE_WORDS;
    for (int k = 1; k < a.w.n_rank; k++) {
        const int from = nth_rank(a.w, k);
        const uint8_t *slot = wire_lines(a.w, r->epoch, a.w.rank, from);
        for (uint32_t i = t.at; i < lines; i += 2 * t.n) {
            const bool two = i + t.n < lines;
            uint4 v[2];
            wire_wait_lines<2>(a.w, r, slot + (size_t)i * WIRE_LINE, (size_t)t.n * WIRE_LINE, two ? 2 : 1, from, v);
            write_line(a, words, i, v[0], from);
            if (two) {
                write_line(a, words, i + t.n, v[1], from);
            }
        }
    }
}

/* One piece of a part: bytes [begin, begin + n) of its rows. */
typedef struct piece {
    int part;
    uint32_t begin, n;
} piece;

static __device__ __forceinline__ piece piece_of(const exchange_args &a, uint32_t i)
{
    piece p = {0, 0, 0};
    uint32_t bytes = (uint32_t)a.n_row * (uint32_t)a.part[0].bytes;
    for (;;) {
        const uint32_t pieces = (bytes + WIRE_CHUNK_DATA - 1) / WIRE_CHUNK_DATA;
        if (i < pieces) {
            break;
        }
        i -= pieces;
        bytes = (uint32_t)a.n_row * (uint32_t)a.part[++p.part].bytes;
    }
    p.begin = i * WIRE_CHUNK_DATA;
    p.n = bytes - p.begin < WIRE_CHUNK_DATA ? bytes - p.begin : (uint32_t)WIRE_CHUNK_DATA;
    return p;
}

static __device__ __forceinline__ bool is_vectors(const exchange_part &p)
{
    return ((p.bytes | p.src_rank | p.src_row | p.dst_rank | p.dst_row | (int64_t)(uintptr_t)p.src |
             (int64_t)(uintptr_t)p.dst) & 15) == 0;
}

/* Moves a piece by a warp between its rows and a buffer: V is what is moved at a time. OUT: to the buffer. */
template <typename V, bool OUT>
static __device__ __forceinline__ void move_piece(const exchange_part &p, int rank, const piece &at,
                                                  uint8_t *buf)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t width = (uint32_t)p.bytes;
    uint8_t *rows = OUT ? (uint8_t *)p.src + rank * p.src_rank : (uint8_t *)p.dst + rank * p.dst_rank;
    const int64_t stride = OUT ? p.src_row : p.dst_row;
    for (uint32_t first = 0; first < at.n; first += VECS * 32 * (uint32_t)sizeof(V)) {
        V v[VECS];
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            const uint32_t i = first + (lane + 32 * k) * (uint32_t)sizeof(V);
            const uint32_t off = at.begin + i;
            if (i < at.n) {
                v[k] = OUT ? *(const V *)(rows + off / width * stride + off % width)
                           : __ldcg((const V *)(buf + i));
            }
        }
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            const uint32_t i = first + (lane + 32 * k) * (uint32_t)sizeof(V);
            const uint32_t off = at.begin + i;
            if (i < at.n) {
                *(V *)(OUT ? buf + i : rows + off / width * stride + off % width) = v[k];
            }
        }
    }
}

/* The own rows, without a buffer. */
template <typename V>
static __device__ __forceinline__ void copy_piece(const exchange_part &p, int rank, const piece &at)
{
    const uint32_t width = (uint32_t)p.bytes;
    for (uint32_t i = threadIdx.x % 32 * (uint32_t)sizeof(V); i < at.n; i += 32 * (uint32_t)sizeof(V)) {
        const uint32_t row = (at.begin + i) / width;
        const uint32_t col = (at.begin + i) % width;
        *(V *)((uint8_t *)p.dst + rank * p.dst_rank + row * p.dst_row + col) =
            *(const V *)((const uint8_t *)p.src + rank * p.src_rank + row * p.src_row + col);
    }
}

static __device__ void send_chunks(const exchange_shape &s, const exchange_args &a, uint32_t pieces,
                                   const wire_run &r, uint32_t *counts)
{
    send_groups(a.w, r, s, pieces, counts, [&](int to, uint32_t i, uint8_t *at) {
        const piece c = piece_of(a, i);
        const exchange_part &p = a.part[c.part];
        if (is_vectors(p)) {
            move_piece<uint4, true>(p, to, c, at);
        } else {
            move_piece<uint32_t, true>(p, to, c, at);
        }
    });
    if (is_flag_warp()) {
        return;
    }
    const crew t = crew_of_warps(s);
    for (uint32_t i = t.at; i < pieces; i += t.n) { /* the own rows */
        const piece c = piece_of(a, i);
        if (is_vectors(a.part[c.part])) {
            copy_piece<uint4>(a.part[c.part], a.w.rank, c);
        } else {
            copy_piece<uint32_t>(a.part[c.part], a.w.rank, c);
        }
    }
}

static __device__ void receive_chunks(const exchange_shape &s, const exchange_args &a, uint32_t pieces, wire_run *r)
{
    if (is_flag_warp()) {
        return;
    }
    const crew t = crew_of_warps(s);
    for (int k = 1; k < a.w.n_rank; k++) {
        const int from = nth_rank(a.w, k);
        uint8_t *slot = wire_chunks(a.w, r->epoch, a.w.rank, from);
        const uint32_t *flags = wire_flags(a.w, r->epoch, a.w.rank, from);
        for (uint32_t i = t.at; i < pieces; i += t.n) {
            const piece c = piece_of(a, i);
            const exchange_part &p = a.part[c.part];
            wire_wait_flag(a.w, r, flags + i / s.group, from);
            if (is_vectors(p)) {
                move_piece<uint4, false>(p, from, c, slot + (size_t)i * WIRE_CHUNK);
            } else {
                move_piece<uint32_t, false>(p, from, c, slot + (size_t)i * WIRE_CHUNK);
            }
        }
    }
}

template <int R>
static __global__ void __launch_bounds__(THREADS + 32, 2)
    exchange_kernel(const __grid_constant__ exchange_launch<R> x)
{
    __shared__ uint32_t counts[MAX_GROUP];
    const exchange_args &a = x.rank[R == 1 ? 0 : blockIdx.y];
    const bool sends = blockIdx.x > 0 && !is_receiver(x.shape);
    wire_run r;
    after_the_one_before();
    const uint4 control = wire_ask(a.w);
    uint4 first = make_uint4(0, 0, 0, 0);
    if (sends && x.shape.lines && a.w.n_rank > 1 &&
        crew_of_threads(x.shape).at * WIRE_LINE_WORDS < x.words) {
        first = read_line(a, x.words, crew_of_threads(x.shape).at, nth_rank(a.w, 1));
    }
    const bool sound = wire_begin(a.w, control, &r);
    if (!(sends && !x.shape.lines ? begin_groups(counts, sound) : sound)) {
        return;
    }
    if (blockIdx.x == 0) {
        wire_compare_heads(a.w, &r, (uint32_t)a.op | (uint32_t)(x.shape.lines << 8), (uint32_t)a.n_row,
                           x.words);
    } else if (sends) {
        x.shape.lines ? send_lines(x.shape, a, x.words, first, r)
                      : send_chunks(x.shape, a, x.pieces, r, counts);
    } else {
        x.shape.lines ? receive_lines(x.shape, a, x.words, &r) : receive_chunks(x.shape, a, x.pieces, &r);
    }
    wire_end(a.w, blockIdx.x, gridDim.x);
}

template <int R>
static void launch_exchange(const exchange_args *a, int32_t n, dev_queue *q)
{
    exchange_launch<R> x;
    memset(&x, 0, sizeof x);
    const int64_t bytes = exchange_bytes(a);
    const int32_t lines = is_lines(a->form, bytes);
    x.words = (uint32_t)(bytes / 4);
    for (int32_t i = 0; i < a->n_part; i++) {
        x.pieces += (uint32_t)(((int64_t)a->n_row * a->part[i].bytes + WIRE_CHUNK_DATA - 1) / WIRE_CHUNK_DATA);
    }
    memcpy(x.rank, a, (size_t)n * sizeof *a);
    const int64_t items = lines ? (bytes + 11) / 12 : x.pieces;
    x.shape = shape_of(q, n, a->w.n_rank, lines, items, lines ? THREADS : WARPS);
    launch(exchange_kernel<R>, x, x.shape, n, q, "exchange_kernel");
}

static const char *refuses_parts(const exchange_args *a, const exchange_args *b)
{
    bool same = a->n_part == b->n_part;
    for (int32_t k = 0; same && k < a->n_part; k++) {
        same = a->part[k].bytes == b->part[k].bytes;
    }
    return same ? NULL : "exchange: the ranks of a launch have parts of the same widths";
}

void exchange_sm90(const exchange_args *a, int32_t n, dev_queue *q)
{
    if (cuda_refused(q, refuses_ranks(a, n))) {
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        if (cuda_refused(q, exchange_refuses(&a[i])) || cuda_refused(q, refuses_parts(&a[0], &a[i]))) {
            return;
        }
    }
    n == 1 ? launch_exchange<1>(a, n, q) : launch_exchange<WIRE_MAX_RANK>(a, n, q);
}
