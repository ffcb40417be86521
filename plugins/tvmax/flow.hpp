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

// What i may still send to its neighbour on that side, or take from it where `way` is -1.
static inline double room(const Grid &g, int64_t i, int side, double way) {
    const double out = way * flow(g, i, side);
    return side < 2 ? g.lam - out : g.lam + out;
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

// A search of one set. It starts from the fewer: the cells below the mean, to which those above
// send their surplus (way 1), or the cells above, from which those below take (way -1).
struct Search {
    double mean, way;
    int64_t above, below;
    int64_t reached;    // cells in `queue`, in the order of their distance from the start
    int64_t movers;     // cells that have to send or take, found by the search
};

static inline double left_to_move(const Grid &g, const Search &search, int64_t i) {
    return search.way * (g.x[i] - search.mean);
}

static inline Search count_sides(const Grid &g, Set set, double mean) {
    Search search{mean, 1, 0, 0, 0, 0};
    for (int32_t k = set.first; k < set.last; ++k) {
        const double over = g.x[g.cells[k]] - mean;
        search.above += over > g.tied;
        search.below += over < -g.tied;
    }
    if (search.above < search.below) search.way = -1;
    return search;
}

// Breadth first, against the direction of what may be moved, until every mover is found or no more
// can be.
static inline void reach(Grid &g, Set set, Search &search) {
    for (int32_t k = set.first; k < set.last; ++k) {
        const int32_t i = g.cells[k];
        const bool starts = left_to_move(g, search, i) < -g.tied;
        g.distance[i] = starts ? 0 : -1;
        g.queue[search.reached] = i;
        search.reached += starts;
    }
    const int64_t wanted = search.way > 0 ? search.above : search.below;
    for (int64_t at = 0; at < search.reached && search.movers < wanted; ++at) {
        const int32_t j = g.queue[at];
        for (unsigned sides = g.open[j]; sides != 0; sides &= sides - 1) {
            const int side = __builtin_ctz(sides);
            const int32_t i = j + int32_t(step(g, side));
            if (g.distance[i] >= 0 || room(g, i, kOpposite[side], search.way) <= g.tied) continue;
            g.distance[i] = g.distance[j] + 1;
            g.queue[search.reached++] = i;
            search.movers += left_to_move(g, search, i) > g.tied;
        }
    }
}

// What one cell has left to move goes one layer nearer to the start; what finds no room waits.
static inline void move_nearer(Grid &g, const Search &search, int32_t i) {
    for (unsigned sides = g.open[i]; sides != 0; sides &= sides - 1) {
        const double left = left_to_move(g, search, i);
        if (left <= g.tied) return;
        const int side = __builtin_ctz(sides);
        const int32_t j = i + int32_t(step(g, side));
        if (g.distance[j] != g.distance[i] - 1) continue;
        const double free = room(g, i, side, search.way);
        double amount = left < free ? left : free;
        if (g.distance[j] == 0) {
            const double lacks = -left_to_move(g, search, j);
            amount = amount < lacks ? amount : lacks;
        }
        if (amount > 0) send(g, i, side, search.way * amount);
    }
}

static inline void route(Grid &g, const Search &search) {
    for (int64_t at = search.reached - 1; at >= 0 && g.distance[g.queue[at]] > 0; --at)
        move_nearer(g, search, g.queue[at]);
}

// Saturates and closes the edges between cells that were reached and cells that were not.
static inline void split(Grid &g, Set set, const Search &search) {
    for (int32_t k = set.first; k < set.last; ++k) {
        const int32_t i = g.cells[k];
        g.queue[k - set.first] = i;
        if (g.distance[i] >= 0) continue;
        for (unsigned sides = g.open[i]; sides != 0; sides &= sides - 1) {
            const int side = __builtin_ctz(sides);
            const int32_t j = i + int32_t(step(g, side));
            if (g.distance[j] < 0) continue;
            send(g, i, side, search.way * room(g, i, side, search.way));
            flow(g, i, side) = side < 2 ? search.way * g.lam : -search.way * g.lam;
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
    const double wanted = (g.x[i] - g.x[j]) / 2, free = room(g, i, side, 1);
    send(g, i, side, wanted < free ? wanted : free);
    if (wanted <= free + g.tied) fuse(g, set, (g.x[i] + g.x[j]) / 2);
}

static inline void solve_set(Grid &g, Set set, int64_t limit) {
    if (set.last - set.first == 2) return solve_pair(g, set);
    const double mean = mean_of(g, set);
    while (true) {
        Search search = count_sides(g, set, mean);
        if (search.above == 0 || search.below == 0) return fuse(g, set, mean);
        if (set.rounds >= limit) {
            g.unsolved[g.unsolved_count++] = set;
            return;
        }
        reach(g, set, search);
        if (search.movers == 0) return split(g, set, search);
        route(g, search);
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
