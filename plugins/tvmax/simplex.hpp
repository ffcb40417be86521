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

// What is taken from every value: Newton's method from below, where it is monotone and finite.
static inline double threshold(const Grid &g) {
    Row top = broadcast(-kInfinity);
    for (int64_t b = 0; b < g.block_count; ++b) top = larger(load(g.x + g.blocks[b]), top);
    double found = largest_of<double>(top) - 1;
    while (true) {
        const Row least = broadcast(found);
        Row sum = {}, count = {};
        for (int64_t b = 0; b < g.block_count; ++b) {
            const Row x = load(g.x + g.blocks[b]);
            sum += x > least ? x - least : Row{};
            count += when(x > least, 1);
        }
        const double next = found + (sum_of<double>(sum) - 1) / sum_of<double>(count);
        if (!(next > found)) return found;
        found = next;
    }
}

template <class T>
static inline void write_weights(const Grid &g, T *p, int64_t row_length) {
    const double least = threshold(g), none = kNoWeight * (g.tied / kTied);
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
