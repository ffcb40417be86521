// SPDX-License-Identifier: Apache-2.0
// Deciding edges by intervals: a value lies within lam times its undecided edges of its supply, so
// two neighbours whose intervals do not meet saturate their edge, which narrows both intervals.
#pragma once

#include "simplex.hpp"

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

// One round: every cell against its four neighbours. Answers whether an interval became narrower.
// Cells are updated in place: an interval stays true whatever the order.
static inline bool narrow_intervals(const Grid &g) {
    Lanes<double>::Mask changed = {};
    const double twice = 2 * g.lam;
    for (int64_t b = 0; b < g.block_count; ++b) {
        const int64_t i = g.blocks[b];
        const Row low = load(g.low + i), high = load(g.high + i);
        Row raised = {}, lowered = {};
        for (int side = 0; side < 4; ++side) {
            const int64_t near = i + step(g, side);
            raised += when(load(g.low + near) > high, twice);
            lowered += when(load(g.high + near) < low, twice);
        }
        const Row new_low = load(g.widest_low + i) + raised;
        const Row new_high = load(g.widest_high + i) - lowered;
        changed |= (new_low != low) | (new_high != high);
        store(g.low + i, new_low);
        store(g.high + i, new_high);
    }
    return bits_of(changed) != 0;
}

// Opens the edge between i and its neighbour on that side; i, unless open edges lead to it already,
// is the seed of a set.
static inline void open_edge(Grid &g, int64_t i, int side, int64_t &seeds) {
    const int64_t j = i + step(g, side);
    if (g.open[i] == 0) g.queue[seeds++] = int32_t(i);
    g.open[i] = uint8_t(g.open[i] | 1 << side);
    g.open[j] = uint8_t(g.open[j] | 4 << side);
    g.distance[i] = g.distance[j] = -2;
}

// Full flow along decided edges, none along the others, which are opened. Answers the seeds.
static inline int64_t set_flows(Grid &g, int64_t &opened) {
    const Row lam = broadcast(g.lam), none = broadcast(-kInfinity);
    int64_t seeds = 0;
    for (int64_t b = 0; b < g.block_count; ++b) {
        const int64_t i = g.blocks[b];
        const Row low = load(g.low + i), high = load(g.high + i);
        for (int side = 0; side < 2; ++side) {
            const int64_t j = i + step(g, side);
            const Row near_low = load(g.low + j), near_high = load(g.high + j);
            const Lanes<double>::Mask above = low > near_high, below = near_low > high;
            const Row saturated = above ? lam : (below ? -lam : Row{});
            store((side ? g.down : g.right) + i, saturated);
            unsigned bits = bits_of(~(above | below) & (low > none) & (near_low > none));
            opened += __builtin_popcount(bits);
            for (; bits != 0; bits &= bits - 1)
                open_edge(g, i + __builtin_ctz(bits), side, seeds);
        }
    }
    return seeds;
}

// The threshold of the lower ends is at most that of the values: a cell that lies below it by its
// upper end has no weight and is left out. Such a cell has an interval at -inf, which decides its
// edges as a masked cell's.
static inline void leave_out_intervals(Grid &g) {
    const Row none = broadcast(-kInfinity);
    const double least = threshold(g, g.low, largest(g, g.low) - 1, kSteps) - g.tied;
    for (int64_t b = 0; b < g.block_count; ++b) {
        const int64_t i = g.blocks[b];
        const Lanes<double>::Mask out = load(g.high + i) < broadcast(least);
        double *const arrays[] = {g.low, g.high, g.widest_low, g.widest_high, g.supply};
        for (double *const array : arrays) store(array + i, out ? none : load(array + i));
    }
}

struct Screened {
    int64_t rounds;   // at most `limit`
    int64_t opened;   // edges, and
    int64_t seeds;    // of the sets that they make, in `queue`
};

static inline Screened screen(Grid &g, int64_t limit, bool whole) {
    Screened found{};
    while (found.rounds < limit) {
        const bool changed = narrow_intervals(g);
        if (++found.rounds == 2 && !whole) leave_out_intervals(g);
        else if (!changed) break;
    }
    found.seeds = set_flows(g, found.opened);
    for (int64_t b = 0; b < g.block_count; ++b) {
        const int64_t i = g.blocks[b];
        store(g.x + i, load(g.supply + i) - outflow(g, g.right, g.down, i));
    }
    return found;
}

}  // namespace tv
}  // namespace SACCADE_TARGET
}  // namespace saccade
