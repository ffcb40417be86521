// SPDX-License-Identifier: Apache-2.0
// TVMax on the CPU: exact in finitely many steps, in double precision whatever the type.
//
// Cells that cannot have a weight are left out (reading.hpp), intervals decide most edges
// (screening.hpp), large sets get a head start (descent.hpp), minimum cuts decide the rest
// (flow.hpp), the threshold of sparsemax gives the weights (simplex.hpp), and the duality gap the
// bound (certificate.hpp). Where groups are asked for, no cell is left out.
// One round of `max_iterations` is one pass of the intervals, one step of the descent, or one
// search-and-route or one split of a set; sets that do not meet count side by side. `tolerance` is
// not read: the answer is exact up to rounding unless the rounds run out, and then `error` says how
// far it is.
#pragma once

#include "../native/table.hpp"
#include "certificate.hpp"
#include "descent.hpp"
#include "reading.hpp"
#include "screening.hpp"
#include "simplex.hpp"

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

// Every cell that takes part is a group of its own.
static inline void single_groups(const Grid &g) {
    for (int64_t r = 0; r < g.h; ++r)
        for (int64_t c = 0; c < g.w; ++c) {
            const bool masked = g.z[r * g.stride + c] == -kInfinity;
            const int64_t cell = r * g.row_length + c;
            g.groups[cell] = masked ? -1 : int32_t(cell);
        }
}

static inline float solve(Grid &g, int64_t limit) {
    if (g.groups != nullptr) single_groups(g);
    if (g.lam == 0) return 0;
    Screened found = screen(g, limit, g.groups != nullptr);
    if (worth_descending(g, found.opened))
        found.seeds = descend(g, limit, found.rounds);
    solve_sets(g, found.seeds, found.rounds, limit);
    return bound(g, best_gap(g));
}

// Blocks become padding again for the next grid.
static inline void clear(Grid &g) {
    for (int64_t b = 0; b < g.block_count; ++b) {
        const int64_t i = g.blocks[b];
        const Row none = broadcast(-kInfinity), zero = {};
        store(g.supply + i, none), store(g.x + i, none), store(g.low + i, none);
        store(g.high + i, broadcast(kInfinity));
        store(g.right + i, zero), store(g.down + i, zero);
        std::memset(g.open + i, 0, kWidth);
    }
}

template <class T>
static inline void fill(T *grid, T value, int64_t h, int64_t w, int64_t row_length) {
    for (int64_t r = 0; r < h; ++r)
        for (int64_t c = 0; c < w; ++c) grid[r * row_length + c] = value;
}

template <class T>
static inline float one_grid(Grid &g, const T *z, T *p, int64_t limit) {
    if (!read(g, z, g.row_length, g.groups != nullptr)) {
        fill(p, T(__builtin_nan("")), g.h, g.w, g.row_length);
        return __builtin_nanf("");
    }
    const float error = solve(g, limit);
    write_weights(g, p, g.row_length);
    clear(g);
    return error;
}

}  // namespace tv

template <class T>
size_t tvmax_scratch(int64_t h, int64_t w) {
    return tv::grid_bytes(h, w);
}

template <class T>
void tvmax(const T *z, const int64_t *sizes, T *p, float *error, int32_t *groups, int64_t grids,
           int64_t h, int64_t w, TVMaxOptions options, void *scratch) {
    tv::Grid g{};
    for (int64_t k = 0; k < grids; ++k) {
        const int64_t rows = sizes == nullptr ? h : sizes[2 * k];
        const int64_t columns = sizes == nullptr ? w : sizes[2 * k + 1];
        const int64_t first = k * h * w;
        if (rows != h || columns != w) {
            tv::fill(p + first, T(0), h, w, w);
            if (groups != nullptr) tv::fill(groups + first, int32_t(-1), h, w, w);
        }
        error[k] = 0;
        if (rows == 0 || columns == 0) continue;
        if (rows != g.h || columns != g.w) g = tv::new_grid(rows, columns, scratch);
        g.lam = options.lam;
        g.row_length = w;
        g.groups = groups == nullptr ? nullptr : groups + first;
        if (g.groups != nullptr) tv::fill(g.groups, int32_t(-1), rows, columns, w);
        error[k] = tv::one_grid(g, z + first, p + first, options.max_iterations);
    }
}

// Sparsemax's rule, then the mean of each group. Needs a sum and a count for each cell.
template <class T>
void tvmax_backward(const T *p, const int32_t *groups, const T *gradient, T *out, int64_t grids,
                    int64_t cells, void *scratch) {
    double *const sums = static_cast<double *>(scratch), *const counts = sums + cells;
    for (int64_t k = 0; k < grids; ++k, p += cells, groups += cells, gradient += cells) {
        double total = 0, support = 0;
        for (int64_t i = 0; i < cells; ++i) {
            const bool weighs = p[i] > 0 && groups[i] >= 0;
            total += weighs ? double(gradient[i]) : 0;
            support += weighs ? 1 : 0;
            sums[i] = counts[i] = 0;
        }
        const double mean = support > 0 ? total / support : 0;
        for (int64_t i = 0; i < cells; ++i) {
            if (groups[i] < 0) continue;
            sums[groups[i]] += p[i] > 0 ? double(gradient[i]) - mean : 0;
            counts[groups[i]] += 1;
        }
        for (int64_t i = 0; i < cells; ++i, ++out) {
            const double share = groups[i] < 0 ? 0 : sums[groups[i]] / counts[groups[i]];
            *out = p[i] != p[i] ? p[i] : T(share);
        }
    }
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
