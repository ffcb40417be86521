// SPDX-License-Identifier: Apache-2.0
// How far the answer can be from the exact one, computed from the values and the flow at hand.
//
// For values x and a feasible flow u with y = supply - outflow(u), the duality gap of the total
// variation problem is 1/2 |y - x|^2 + sum over edges (lam -+ u_ij) |x_i - x_j|, where u_ij
// counts in the direction of the fall. Every term is >= 0, so nothing cancels. |x - x*| <= sqrt(2 gap), and sparsemax brings no two points
// further apart.
#pragma once

#include "flow.hpp"
#include "screening.hpp"

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

// 0 for the NaN and infinity that padding makes; bound() refuses numbers whose squares overflow.
static inline Row counted(Row term) {
    return (term > Row{}) & (term < broadcast(kInfinity)) ? term : Row{};
}

static inline Row slack(Row fall, Row flow, Row lam) {
    return counted(fall > Row{} ? (lam - flow) * fall : (lam + flow) * -fall);
}

static inline double gap(const Grid &g) {
    const Row lam = broadcast(g.lam);
    Row total = {};
    for (int64_t b = 0; b < g.block_count; ++b) {
        const int64_t i = g.blocks[b];
        const Row x = load(g.x + i), miss = load(g.supply + i) - outflow(g, i) - x;
        const Row right = x - load(g.x + i + 1), down = x - load(g.x + i + g.stride);
        total += counted(miss * miss * 0.5);
        total += slack(right, load(g.right + i), lam) + slack(down, load(g.down + i), lam);
    }
    return sum_of<double>(total);
}

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
