// SPDX-License-Identifier: Apache-2.0
// The weights: the nearest point of the simplex to the values.
#pragma once

#include "grid.hpp"

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

// A weight below this fraction is the rounding of a cell that lies on the threshold: a tie keeps it
// out of the support, which the gradient sees.
constexpr double kNoWeight = 1e-15;
// Newton steps for a bound that only has to be good.
constexpr int kSteps = 3;

static inline double largest(const Grid &g, const double *values) {
    Row top = broadcast(-kInfinity);
    for (int64_t b = 0; b < g.block_count; ++b) top = larger(load(values + g.blocks[b]), top);
    return largest_of<double>(top);
}

// What sparsemax takes from every value, by Newton's method from below, where it is monotone and
// finite: `from` may not be above the answer, and neither is what fewer steps give.
static inline double threshold(const Grid &g, const double *values, double from, int steps) {
    for (; steps != 0; --steps) {
        const Row least = broadcast(from);
        Row sum = {}, count = {};
        for (int64_t b = 0; b < g.block_count; ++b) {
            const Row over = load(values + g.blocks[b]) - least;
            sum += larger(over, Row{});
            count += when(over > Row{}, 1);
        }
        const double next = from + (sum_of<double>(sum) - 1) / sum_of<double>(count);
        if (!(next > from)) break;
        from = next;
    }
    return from;
}

template <class T>
static inline void write_weights(const Grid &g, T *p, int64_t row_length) {
    const double least = threshold(g, g.x, largest(g, g.x) - 1, -1);
    const double none = kNoWeight * (g.tied / kTied);
    for (int64_t r = 0; r < g.h; ++r) {
        const double *const row = g.x + r * g.stride;
        for (int64_t c = 0; c < g.w; ++c) {
            const double weight = row[c] - least;
            p[r * row_length + c] = T(weight > none ? weight : 0);
        }
    }
}

}  // namespace tv
}  // namespace SACCADE_TARGET
}  // namespace saccade
