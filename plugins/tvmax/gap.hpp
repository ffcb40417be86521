// SPDX-License-Identifier: Apache-2.0
// The duality gap of the values and the flow at hand: |x - x*| <= sqrt(2 gap).
//
// For values x and a feasible flow u that leaves y of the supplies, the gap is 1/2 |y - x|^2 and,
// for each edge, what the flow lacks of lam in the direction of the fall, times the fall. Every
// term is >= 0, so nothing cancels.
#pragma once

#include "grid.hpp"

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

// 0 for the NaN and infinity that padding makes; bound() refuses numbers whose squares overflow.
static inline Row counted(Row term) {
    return ((term > Row{}) & (term < broadcast(kInfinity))) ? term : Row{};
}

static inline Row slack(Row fall, Row flow, Row lam) {
    return counted(fall > Row{} ? (lam - flow) * fall : (lam + flow) * -fall);
}

static inline double gap(const Grid &g) {
    const Row lam = broadcast(g.lam);
    Row total = {};
    for (int64_t b = 0; b < g.block_count; ++b) {
        const int64_t i = g.blocks[b];
        const Row x = load(g.x + i);
        const Row miss = load(g.supply + i) - outflow(g, g.right, g.down, i) - x;
        const Row right = x - load(g.x + i + 1), down = x - load(g.x + i + g.stride);
        total += counted(miss * miss * 0.5);
        total += slack(right, load(g.right + i), lam) + slack(down, load(g.down + i), lam);
    }
    return sum_of<double>(total);
}

}  // namespace tv
}  // namespace SACCADE_TARGET
}  // namespace saccade
