// SPDX-License-Identifier: Apache-2.0
// Sets of cells joined by open edges, solved exactly: surplus over the set's mean is routed to the
// cells below it. If all is routed, the set is one fused group; otherwise the minimum cut parts it
// (Chambolle and Darbon 2009), cut edges carry lam, and each part is a set of its own.
#pragma once

#include "grid.hpp"

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

constexpr int kOpposite[] = {2, 3, 0, 1};

// What i may still send to its neighbour on that side.
static inline double room(const Grid &g, int64_t i, int side) {
    return side < 2 ? g.lam - flow(g, i, side) : g.lam + flow(g, i, side);
}

static inline void send(Grid &g, int64_t i, int side, double amount) {
    double &along = flow(g, i, side);
    const double sum = along + (side < 2 ? amount : -amount);
    along = sum > g.lam ? g.lam : (sum < -g.lam ? -g.lam : sum);
    g.x[i] -= amount;
    g.x[i + step(g, side)] += amount;
}

// Sets of the cells in list[0..count) that open edges join, appended to `sets` and written to
// `cells` from `place` on. A cell to be found has the distance -2.
static inline void find_sets(Grid &g, const int32_t *list, int64_t count, int32_t place,
                             int64_t rounds) {
    for (int64_t k = 0; k < count; ++k) {
        if (g.distance[list[k]] != -2) continue;
        const int32_t first = place;
        g.cells[place++] = list[k];
        g.distance[list[k]] = -1;
        for (int32_t at = first; at < place; ++at) {
            const int32_t i = g.cells[at];
            for (unsigned sides = g.open[i]; sides != 0; sides &= sides - 1) {
                const int32_t j = i + int32_t(step(g, __builtin_ctz(sides)));
                if (g.distance[j] != -2) continue;
                g.distance[j] = -1;
                g.cells[place++] = j;
            }
        }
        if (place - first > 1) g.sets[g.set_count++] = {first, place, rounds};
    }
}

static inline double mean_of(const Grid &g, Set set) {
    double total = 0;
    for (int32_t k = set.first; k < set.last; ++k) total += g.x[g.cells[k]];
    return total / (set.last - set.first);
}

struct Layers {
    int64_t reached;     // cells in `queue`, by their distance from a cell below the mean
    int64_t surpluses;   // cells above the mean,
    int64_t routable;    // and those of them that were reached
};

// Breadth first from the cells below the mean, against the direction of what may be sent, until
// every surplus is reached or no more can be.
static inline Layers layers(Grid &g, Set set, double mean) {
    Layers found{};
    for (int32_t k = set.first; k < set.last; ++k) {
        const int32_t i = g.cells[k];
        const double over = g.x[i] - mean;
        found.surpluses += over > g.tied;
        g.distance[i] = over < -g.tied ? 0 : -1;
        if (over < -g.tied) g.queue[found.reached++] = i;
    }
    for (int64_t at = 0; at < found.reached && found.routable < found.surpluses; ++at) {
        const int32_t j = g.queue[at];
        for (unsigned sides = g.open[j]; sides != 0; sides &= sides - 1) {
            const int side = __builtin_ctz(sides);
            const int32_t i = j + int32_t(step(g, side));
            if (g.distance[i] >= 0 || room(g, i, kOpposite[side]) <= g.tied) continue;
            g.distance[i] = g.distance[j] + 1;
            g.queue[found.reached++] = i;
            found.routable += g.x[i] - mean > g.tied;
        }
    }
    return found;
}

// From the furthest cell on, each sends its surplus one layer down; what finds no room waits.
static inline void route(Grid &g, const Layers &found, double mean) {
    for (int64_t at = found.reached - 1; at >= 0 && g.distance[g.queue[at]] > 0; --at) {
        const int32_t i = g.queue[at];
        for (unsigned sides = g.open[i]; sides != 0; sides &= sides - 1) {
            const double surplus = g.x[i] - mean;
            if (surplus <= g.tied) break;
            const int side = __builtin_ctz(sides);
            const int32_t j = i + int32_t(step(g, side));
            if (g.distance[j] != g.distance[i] - 1) continue;
            const double free = room(g, i, side);
            double amount = surplus < free ? surplus : free;
            if (g.distance[j] == 0) {
                const double wanted = mean - g.x[j];
                if (!(wanted > 0)) continue;
                amount = amount < wanted ? amount : wanted;
            }
            if (amount > 0) send(g, i, side, amount);
        }
    }
}

// Saturates and closes the edges between cells that were reached and cells that were not.
static inline void split(Grid &g, Set set) {
    for (int32_t k = set.first; k < set.last; ++k) {
        const int32_t i = g.cells[k];
        g.queue[k - set.first] = i;
        if (g.distance[i] >= 0) continue;
        for (unsigned sides = g.open[i]; sides != 0; sides &= sides - 1) {
            const int side = __builtin_ctz(sides);
            const int32_t j = i + int32_t(step(g, side));
            if (g.distance[j] < 0) continue;
            send(g, i, side, room(g, i, side));
            flow(g, i, side) = side < 2 ? g.lam : -g.lam;
            g.open[i] = uint8_t(g.open[i] & ~(1u << side));
            g.open[j] = uint8_t(g.open[j] & ~(1u << kOpposite[side]));
        }
    }
    const int64_t count = set.last - set.first;
    for (int64_t k = 0; k < count; ++k) g.distance[g.queue[k]] = -2;
    find_sets(g, g.queue, count, set.first, set.rounds + 1);
}

static inline void fuse(Grid &g, Set set, double mean) {
    int32_t first = g.cells[set.first];
    for (int32_t k = set.first; k < set.last; ++k) {
        const int32_t i = g.cells[k];
        g.x[i] = mean;
        first = i < first ? i : first;
    }
    if (g.groups == nullptr) return;
    const int32_t stride = int32_t(g.stride), length = int32_t(g.row_length);
    const int32_t name = first / stride * length + first % stride;
    for (int32_t k = set.first; k < set.last; ++k) {
        const int32_t i = g.cells[k];
        g.groups[i / stride * length + i % stride] = name;
    }
}

// Two cells: half their difference, or as much as the edge has room for.
static inline void solve_pair(Grid &g, Set set) {
    int32_t i = g.cells[set.first], j = g.cells[set.first + 1];
    int side = __builtin_ctz(g.open[i]);
    if (g.x[i] < g.x[j]) {
        const int32_t lower = i;
        i = j, j = lower, side = kOpposite[side];
    }
    const double wanted = (g.x[i] - g.x[j]) / 2, free = room(g, i, side);
    send(g, i, side, wanted < free ? wanted : free);
    if (wanted <= free + g.tied) fuse(g, set, (g.x[i] + g.x[j]) / 2);
}

static inline void solve_set(Grid &g, Set set, int64_t limit) {
    if (set.last - set.first == 2) return solve_pair(g, set);
    const double mean = mean_of(g, set);
    while (true) {
        const Layers found = layers(g, set, mean);
        if (found.surpluses == 0 || found.reached == 0) return fuse(g, set, mean);
        if (set.rounds >= limit) {
            g.unsolved[g.unsolved_count++] = set;
            return;
        }
        if (found.routable == 0) return split(g, set);
        route(g, found, mean);
        ++set.rounds;
    }
}

// The rounds of a set are those of the sets that it was split from and its own.
static inline void solve_sets(Grid &g, int64_t seeds, int64_t rounds, int64_t limit) {
    g.set_count = g.unsolved_count = 0;
    find_sets(g, g.queue, seeds, 0, rounds);
    while (g.set_count > 0) solve_set(g, g.sets[--g.set_count], limit);
}

}  // namespace tv
}  // namespace SACCADE_TARGET
}  // namespace saccade
