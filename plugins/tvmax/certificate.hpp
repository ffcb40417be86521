// SPDX-License-Identifier: Apache-2.0
// How far the answer can be from the exact one: sqrt(2 gap), as sparsemax brings no two points
// further apart.
#pragma once

#include "flow.hpp"
#include "gap.hpp"

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

// Sets that ran out of rounds are what their flow leaves, or their means where that is closer.
static inline double best_gap(Grid &g) {
    const double as_flow = gap(g);
    if (g.unsolved_count == 0) return as_flow;
    for (int64_t s = 0; s < g.unsolved_count; ++s) {
        const Set set = g.unsolved[s];
        const double mean = mean_of(g, set);
        for (int32_t k = set.first; k < set.last; ++k) {
            const int32_t i = g.cells[k];
            g.low[i] = g.x[i];
            g.x[i] = mean;
        }
    }
    const double as_means = gap(g);
    const bool means = as_means < as_flow;
    for (int64_t s = 0; s < g.unsolved_count; ++s) {
        const Set set = g.unsolved[s];
        if (means) fuse(g, set, g.x[g.cells[set.first]]);
        for (int32_t k = set.first; !means && k < set.last; ++k)
            g.x[g.cells[k]] = g.low[g.cells[k]];
    }
    return means ? as_means : as_flow;
}

// Rounded up; infinite where the squares cannot be counted.
static inline float bound(const Grid &g, double gap) {
    if (!(g.tied < 1e137) || !(gap < kInfinity)) return __builtin_inff();
    const double distance = std::sqrt(2 * gap);
    const float rounded = float(distance);
    return double(rounded) < distance ? nextafterf(rounded, __builtin_inff()) : rounded;
}

}  // namespace tv
}  // namespace SACCADE_TARGET
}  // namespace saccade
