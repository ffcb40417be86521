// SPDX-License-Identifier: Apache-2.0
// One grid in the kernel's own layout: rows one after the other with a cell of padding between
// them, so that every neighbour lies at a fixed distance and a pass is one loop over the vectors
// (blocks) that hold a cell which matters. Everything else has the values of padding: -inf, an
// interval without ends, no flow.
#pragma once

#include <cmath>

#include "../native/lanes.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

typedef Vector<double> Row;
constexpr int kWidth = Lanes<double>::width;
constexpr double kInfinity = __builtin_inf();
// A logit at or below it is a masked cell, as official code writes one (-1e9).
constexpr double kMaskedAtMost = -1e8;
// Values closer than this fraction of the numbers at hand are equal: sums of them are rounded.
constexpr double kTied = 1e-13;

// A connected set of cells that is still to be solved, and the rounds that led to it.
struct Set {
    int32_t first, last;
    int64_t rounds;
};

// Neighbours 0 to 3 of a cell: right, down, left, up; `open` has a bit for each.
struct Grid {
    int64_t h, w, stride, length;
    double lam, tied;
    double *z;              // logits, lowered by lam for each masked neighbour
    double *supply;         // z relative to the largest, lowered for each neighbour left out
    double *low, *high;     // the interval that the cell's value was proved to lie in
    double *widest_low, *widest_high;  // the same while no edge is decided
    double *right, *down;   // flow to that neighbour, in [-lam, lam]: the dual variable
    double *x;              // supply less what flows out: the value, once all is solved
    // Of descent.hpp: flow of the open edges, and what is left with it.
    double *now_right, *now_down, *ahead_right, *ahead_down, *room_right, *room_down;
    double *free, *value;
    uint8_t *open;          // edges whose flow is not known yet
    int32_t *distance, *queue, *cells, *blocks;
    Set *sets, *unsolved;
    int64_t block_count, set_count, unsolved_count;
    int32_t *groups;        // of the answer, with rows of row_length; null where nobody asks
    int64_t row_length;
};

static inline int64_t rounded_up(int64_t count) { return (count + 15) / 16 * 16; }

// Cells before the first and after the last that a neighbour's address may fall on.
static inline int64_t margin(int64_t w) { return rounded_up(w + 1) + 16; }

static inline int64_t padded_length(int64_t h, int64_t w) { return rounded_up(h * (w + 1)); }

constexpr int kDoubleArrays = 17, kIndexArrays = 4;

static inline size_t grid_bytes(int64_t h, int64_t w) {
    const size_t cells = size_t(padded_length(h, w) + 2 * margin(w));
    return cells * (kDoubleArrays * sizeof(double) + kIndexArrays * sizeof(int32_t) + 1 +
                    2 * sizeof(Set)) + 64 * 32;
}

struct Arena {
    char *next;
    template <class E>
    E *take(int64_t count) {
        E *const taken = reinterpret_cast<E *>(next);
        next += (size_t(count) * sizeof(E) + 63) / 64 * 64;
        return taken;
    }
};

// Everything that a pass reads beyond the cells themselves gets its value here, once a shape.
static inline Grid new_grid(int64_t h, int64_t w, void *scratch) {
    Grid g{};
    g.h = h, g.w = w, g.stride = w + 1, g.length = padded_length(h, w);
    const int64_t before = margin(w), all = g.length + 2 * before;
    Arena arena{static_cast<char *>(scratch)};
    const struct {
        double **array;
        double padding;
    } arrays[kDoubleArrays] = {
        {&g.z, -kInfinity},         {&g.supply, -kInfinity},     {&g.x, -kInfinity},
        {&g.low, -kInfinity},       {&g.widest_low, -kInfinity}, {&g.high, kInfinity},
        {&g.widest_high, kInfinity}, {&g.right, 0},               {&g.down, 0},
        {&g.now_right, 0},          {&g.now_down, 0},            {&g.ahead_right, 0},
        {&g.ahead_down, 0},         {&g.room_right, 0},          {&g.room_down, 0},
        {&g.free, 0},               {&g.value, 0}};
    for (const auto &each : arrays) {
        double *const array = arena.take<double>(all);
        for (int64_t i = 0; i < all; ++i) array[i] = each.padding;
        *each.array = array + before;
    }
    g.distance = arena.take<int32_t>(all) + before;
    g.queue = arena.take<int32_t>(all);
    g.cells = arena.take<int32_t>(all);
    g.blocks = arena.take<int32_t>(all);
    g.sets = arena.take<Set>(all);
    g.unsolved = arena.take<Set>(all);
    g.open = arena.take<uint8_t>(all) + before;
    for (int64_t i = -before; i < g.length + before; ++i) g.open[i] = 0;
    return g;
}

// One bit a lane of a comparison's result.
static inline unsigned bits_of(Lanes<double>::Mask mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX__)
    return unsigned(_mm256_movemask_pd((__m256d)mask));
#elif defined(__SSE2__)
    return unsigned(_mm_movemask_pd((__m128d)mask));
#else
    unsigned bits = 0;
    for (int lane = 0; lane < kWidth; ++lane) bits |= unsigned(mask[lane] != 0) << lane;
    return bits;
#endif
}

static inline Row when(Lanes<double>::Mask mask, double value) {
    return mask ? broadcast(value) : Row{};
}

static inline int64_t step(const Grid &g, int side) {
    const int64_t forward = (side & 1) ? g.stride : 1;
    return side < 2 ? forward : -forward;
}

// Flow of the edge between i and its neighbour on that side; it counts from left to right.
static inline double &flow(const Grid &g, int64_t i, int side) {
    double *const along = (side & 1) ? g.down : g.right;
    return along[side < 2 ? i : i + step(g, side)];
}

// What flows out of each cell of a vector.
static inline Row outflow(const Grid &g, const double *right, const double *down, int64_t i) {
    return load(right + i) - load(right + i - 1) + load(down + i) - load(down + i - g.stride);
}

}  // namespace tv
}  // namespace SACCADE_TARGET
}  // namespace saccade
