// SPDX-License-Identifier: Apache-2.0
// A head start for large sets: some rounds of the accelerated dual iteration, a vector at a time.
// They leave little to flow.hpp: the flow is nearly right, and no exact value is further than
// sqrt(2 gap) away, which decides most of the edges between groups.
#pragma once

#include "gap.hpp"

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

// Few or scattered open edges are routed sooner than iterated, and a rough answer is soon enough:
// these were the fastest of those tried on noise and smooth images.
constexpr int64_t kManyEdges = 48, kCellsAnEdge = 4;
constexpr int64_t kMostSteps = 100, kStepsACheck = 10;
constexpr double kRough = 1e-2;
// The largest eigenvalue of a grid's Laplacian is at most 8.
constexpr double kStep = 1.0 / 8;

static inline bool worth_descending(const Grid &g, int64_t opened) {
    return opened >= kManyEdges && opened * kCellsAnEdge >= g.block_count * kWidth;
}

// Blocks that an open edge touches go to `busy`.
static inline int64_t start_descent(Grid &g, int32_t *busy) {
    int64_t count = 0;
    for (int64_t b = 0; b < g.block_count; ++b) {
        const int64_t i = g.blocks[b];
        uint64_t any = 0;
        for (int lane = 0; lane < kWidth; ++lane) {
            const uint8_t open = g.open[i + lane];
            any |= open;
            g.room_right[i + lane] = open & 1 ? g.lam : 0;
            g.room_down[i + lane] = open & 2 ? g.lam : 0;
        }
        if (any == 0) continue;
        busy[count++] = int32_t(i);
        const Row x = load(g.x + i);
        store(g.free + i, x > broadcast(-kInfinity) ? x : Row{});
    }
    return count;
}

static inline void values_at(const Grid &g, const double *right, const double *down,
                             const int32_t *busy, int64_t count) {
    for (int64_t b = 0; b < count; ++b) {
        const int64_t i = busy[b];
        store(g.value + i, load(g.free + i) - outflow(g, right, down, i));
    }
}

// One axis of one block; answers how far momentum pushed against the gradient.
static inline Row step_axis(const Grid &g, double *now, double *ahead, const double *room,
                            int64_t i, int64_t next, Row momentum) {
    const Row from = load(ahead + i), most = load(room + i), old = load(now + i);
    const Row fall = load(g.value + i) - load(g.value + next);
    const Row moved = smaller(larger(from + fall * kStep, -most), most);
    store(now + i, moved);
    store(ahead + i, moved + momentum * (moved - old));
    return (from - moved) * (moved - old);
}

static inline bool step_all(const Grid &g, const int32_t *busy, int64_t count, double momentum) {
    values_at(g, g.ahead_right, g.ahead_down, busy, count);
    Row against = {};
    for (int64_t b = 0; b < count; ++b) {
        const int64_t i = busy[b];
        const Row by = broadcast(momentum);
        against += step_axis(g, g.now_right, g.ahead_right, g.room_right, i, i + 1, by);
        against += step_axis(g, g.now_down, g.ahead_down, g.room_down, i, i + g.stride, by);
    }
    return sum_of<double>(against) > 0;
}

static inline double open_gap(const Grid &g, const int32_t *busy, int64_t count) {
    values_at(g, g.now_right, g.now_down, busy, count);
    Row total = {};
    for (int64_t b = 0; b < count; ++b) {
        const int64_t i = busy[b];
        const Row value = load(g.value + i);
        const Row right = value - load(g.value + i + 1);
        const Row down = value - load(g.value + i + g.stride);
        total += slack(right, load(g.now_right + i), load(g.room_right + i));
        total += slack(down, load(g.now_down + i), load(g.room_down + i));
    }
    return sum_of<double>(total);
}

// Takes over the flow of one edge; its ends are further apart than the gap allows: closes it.
static inline void end_edge(Grid &g, int64_t i, int side, double apart) {
    const int64_t j = i + step(g, side);
    const double fall = g.value[i] - g.value[j];
    flow(g, i, side) = (side ? g.now_down : g.now_right)[i];
    if (!(fall > apart || fall < -apart)) return;
    flow(g, i, side) = fall > 0 ? g.lam : -g.lam;
    g.open[i] = uint8_t(g.open[i] & ~(1 << side));
    g.open[j] = uint8_t(g.open[j] & ~(4 << side));
}

static inline int64_t end_descent(Grid &g, const int32_t *busy, int64_t count, double gap) {
    // Two values differ from the exact ones by at most sqrt(2) sqrt(2 gap) together.
    const double apart = 2 * std::sqrt(gap) + 4 * g.tied;
    for (int64_t b = 0; b < count; ++b)
        for (int64_t i = busy[b]; i < busy[b] + kWidth; ++i)
            for (int side = 0; side < 2; ++side)
                if (g.open[i] >> side & 1) end_edge(g, i, side, apart);
    int64_t seeds = 0;
    for (int64_t b = 0; b < count; ++b) {
        const int64_t first = busy[b];
        store(g.x + first, load(g.supply + first) - outflow(g, g.right, g.down, first));
        double *const flows[] = {g.now_right, g.now_down, g.ahead_right, g.ahead_down};
        for (double *const each : flows) store(each + first, Row{});
        for (int64_t i = first; i < first + kWidth; ++i)
            if (g.open[i]) g.queue[seeds++] = int32_t(i);
    }
    return seeds;
}

// Answers the seeds of the sets that are left; adds its steps to `rounds`.
static inline int64_t descend(Grid &g, int64_t limit, int64_t &rounds) {
    int32_t *const busy = g.cells;
    const int64_t count = start_descent(g, busy);
    double pace = 1;
    for (int64_t steps = 1; steps <= kMostSteps && rounds < limit; ++steps, ++rounds) {
        const double next = (1 + std::sqrt(1 + 4 * pace * pace)) / 2;
        // Momentum that works against the gradient starts anew.
        pace = step_all(g, busy, count, (pace - 1) / next) ? 1 : next;
        if (steps % kStepsACheck == 0 && open_gap(g, busy, count) <= kRough * g.lam * g.lam) break;
    }
    return end_descent(g, busy, count, open_gap(g, busy, count));
}

}  // namespace tv
}  // namespace SACCADE_TARGET
}  // namespace saccade
