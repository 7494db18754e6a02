/* exchange.cu - messages between ranks by stores into the peers' memory.
 *
 * The parts of a message are streams of bytes, row after row, cut into cells; a part begins a cell. A lane moves a
 * cell at a time: four or eight were slower, for the stream then comes in coarser pieces. Rows begin where the args
 * say, on both sides: nothing is packed before or after. */
#include "kern/cuda/exchange.cuh"

/* How parts become cells. */
typedef struct cut {
    uint32_t first[EXCHANGE_MAX_PART]; /* cell that each begins */
    uint32_t wide; /* parts of which a cell lies within a row and at multiples of 16 bytes, on both sides: bits */
} cut;

/* R: ranks that the launch can serve. */
template <int R>
struct exchange_launch {
    exchange_shape shape;
    uint32_t words; /* to one peer */
    uint32_t cells; /* the same */
    cut cut;
    exchange_args rank[R];
};

/* A cell: bytes [at, ...) of the rows of a part. */
typedef struct place {
    int part;
    uint32_t at;
} place;

static __device__ __forceinline__ place place_of(const exchange_args &a, const cut &x, uint32_t cell)
{
    place p = {0, 0};
    while (p.part + 1 < a.n_part && cell >= x.first[p.part + 1]) {
        p.part++;
    }
    p.at = (cell - x.first[p.part]) * WIRE_CELL;
    return p;
}

static __device__ __forceinline__ const uint8_t *src_at(const exchange_part &p, uint32_t at, int to)
{
    const uint32_t row = at / (uint32_t)p.bytes;
    return (const uint8_t *)p.src + to * p.src_rank + row * p.src_row + (at - row * (uint32_t)p.bytes);
}

static __device__ __forceinline__ uint8_t *dst_at(const exchange_part &p, uint32_t at, int from)
{
    const uint32_t row = at / (uint32_t)p.bytes;
    return (uint8_t *)p.dst + from * p.dst_rank + row * p.dst_row + (at - row * (uint32_t)p.bytes);
}

/* A cell that is not wide goes word by word; words past the end of the part are 0. */
static __device__ __forceinline__ uint4 load_cell(const exchange_args &a, const cut &x, uint32_t cell, int to)
{
    const place c = place_of(a, x, cell);
    const exchange_part &p = a.part[c.part];
    if ((x.wide >> c.part & 1u) != 0) {
        return *(const uint4 *)src_at(p, c.at, to);
    }
    const uint32_t end = (uint32_t)a.n_row * (uint32_t)p.bytes;
    uint32_t v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        v[k] = c.at + 4 * k < end ? *(const uint32_t *)src_at(p, c.at + 4 * k, to) : 0u;
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
}

static __device__ __forceinline__ void store_cell(const exchange_args &a, const cut &x, uint32_t cell, uint4 v,
                                                  int from)
{
    const place c = place_of(a, x, cell);
    const exchange_part &p = a.part[c.part];
    if ((x.wide >> c.part & 1u) != 0) {
        *(uint4 *)dst_at(p, c.at, from) = v;
        return;
    }
    const uint32_t end = (uint32_t)a.n_row * (uint32_t)p.bytes;
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (c.at + 4 * k < end) {
            *(uint32_t *)dst_at(p, c.at + 4 * k, from) = word[k];
        }
    }
}

/* ahead: cell t.at for the first peer, already loaded. */
template <int R>
static __device__ __forceinline__ void send_all(const exchange_launch<R> &x, const exchange_args &a, const crew &t,
                                                uint4 ahead, const wire_run &r)
{
    for (int k = 1; k < a.w.n_rank; k++) {
        const int to = nth_rank(a.w, k);
        uint8_t *cells = wire_cells(a.w, r.epoch, to, a.w.rank);
        for (uint32_t i = t.at; i < x.cells; i += t.n) {
            const uint4 v = k == 1 && i == t.at ? ahead : load_cell(a, x.cut, i, to);
            wire_put(a.w, r.epoch, to, cells, i, v);
        }
    }
}

/* The own rows are copied while those of the peers are on their way. */
template <int R>
static __device__ __forceinline__ void receive_all(const exchange_launch<R> &x, const exchange_args &a, const crew &t,
                                                   wire_run *r)
{
    for (uint32_t i = t.at; i < x.cells; i += t.n) {
        const uint4 own = load_cell(a, x.cut, i, a.w.rank);
        for (int k = 1; k < a.w.n_rank; k++) {
            const int from = nth_rank(a.w, k);
            store_cell(a, x.cut, i, wire_take(a.w, r, from, i), from);
        }
        store_cell(a, x.cut, i, own, a.w.rank);
    }
}

template <int R>
static __global__ void __launch_bounds__(THREADS, BLOCKS) exchange_kernel(const __grid_constant__ exchange_launch<R> x)
{
    const exchange_args &a = x.rank[R == 1 ? 0 : blockIdx.y];
    const bool sends = blockIdx.x > 0 && !is_receiver(x.shape);
    const crew t = crew_of_threads(x.shape);
    wire_run r;
    uint4 ahead = make_uint4(0, 0, 0, 0);
    after_the_one_before();
    const uint4 control = wire_ask(a.w);
    if (sends && a.w.n_rank > 1 && t.at < x.cells) {
        ahead = load_cell(a, x.cut, t.at, nth_rank(a.w, 1));
    }
    if (!wire_begin(a.w, control, &r)) {
        return;
    }
    if (blockIdx.x == 0) {
        wire_compare_heads(a.w, &r, (uint32_t)a.op, (uint32_t)a.n_row, x.words);
    } else if (sends) {
        send_all<R>(x, a, t, ahead, r);
    } else {
        receive_all<R>(x, a, t, &r);
    }
    wire_end(a.w, blockIdx.x, gridDim.x);
}

static bool is_wide(const exchange_args *a, int32_t n, int32_t part)
{
    int64_t all = 0;
    for (int32_t i = 0; i < n; i++) {
        const exchange_part *p = &a[i].part[part];
        all |= p->bytes | p->src_rank | p->src_row | p->dst_rank | p->dst_row | (int64_t)(uintptr_t)p->src |
               (int64_t)(uintptr_t)p->dst;
    }
    return (all & 15) == 0;
}

template <int R>
static void launch_exchange(const exchange_args *a, int32_t n, dev_queue *q)
{
    exchange_launch<R> x;
    memset(&x, 0, sizeof x);
    x.words = (uint32_t)(exchange_bytes(a) / 4);
    for (int32_t i = 0; i < a->n_part; i++) {
        x.cut.first[i] = x.cells;
        x.cut.wide |= is_wide(a, n, i) ? 1u << i : 0u;
        x.cells += (uint32_t)(((int64_t)a->n_row * a->part[i].bytes + WIRE_CELL - 1) / WIRE_CELL);
    }
    memcpy(x.rank, a, (size_t)n * sizeof *a);
    x.shape = shape_of(q, n, a->w.n_rank > 1 ? a->w.n_rank - 1 : 1, ((int64_t)x.cells + 31) / 32);
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
