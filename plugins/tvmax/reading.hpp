// SPDX-License-Identifier: Apache-2.0
// From logits to supplies: masked cells, and cells that cannot have a weight, leave the grid.
#pragma once

#include "simplex.hpp"

namespace saccade {
namespace SACCADE_TARGET {
namespace tv {

// A masked cell lowers its neighbours by lam and takes its edges away.
static inline void mask_cells(Grid &g) {
    int64_t masked = 0;
    for (int64_t r = 0; r < g.h; ++r)
        for (int64_t i = r * g.stride; i < r * g.stride + g.w; ++i)
            if (g.z[i] <= kMaskedAtMost) {
                g.z[i] = -kInfinity;
                g.queue[masked++] = int32_t(i);
            }
    for (int64_t k = 0; k < masked; ++k)
        for (int side = 0; side < 4; ++side) g.z[g.queue[k] + step(g, side)] -= g.lam;
}

struct Extremes {
    double top, bottom;
    bool finite;   // neither NaN nor +inf
    bool masked;
};

static inline Extremes extremes(const Grid &g) {
    Row top = broadcast(-kInfinity), bottom = broadcast(kInfinity);
    Lanes<double>::Mask finite = Lanes<double>::Mask{} - 1, real = {};
    for (int64_t i = 0; i < g.length; i += kWidth) {
        const Row z = load(g.z + i);
        const Lanes<double>::Mask unmasked = z > broadcast(kMaskedAtMost);
        finite &= z < broadcast(kInfinity);
        real -= unmasked;
        top = larger(z, top);
        const Row seen = unmasked ? z : broadcast(kInfinity);
        bottom = smaller(seen, bottom);
    }
    int64_t count = 0;
    for (int lane = 0; lane < kWidth; ++lane) {
        count += real[lane];
        bottom[0] = bottom[lane] < bottom[0] ? bottom[lane] : bottom[0];
    }
    return {largest_of<double>(top), bottom[0], bits_of(finite) == (1u << kWidth) - 1,
            count != g.h * g.w};
}

// Which vectors hold a cell of at least `cut`.
static inline void find_blocks(Grid &g, double cut) {
    g.block_count = 0;
    for (int64_t i = 0; i < g.length; i += kWidth) {
        g.blocks[g.block_count] = int32_t(i);
        g.block_count += bits_of(load(g.z + i) >= broadcast(cut)) != 0;
    }
}

static inline void drop_blocks(Grid &g, double cut) {
    int64_t kept = 0;
    for (int64_t b = 0; b < g.block_count; ++b) {
        g.blocks[kept] = g.blocks[b];
        kept += bits_of(load(g.z + g.blocks[b]) >= broadcast(cut)) != 0;
    }
    g.block_count = kept;
}

// No value is further than 4 lam from its logit, so the threshold of the values is at least that
// of the logits - 4 lam, and a cell that is more than 4 lam below has no weight. At the levels
// above the threshold its edges cost what they cost at a masked cell: leaving it out changes no
// value there.
static inline double leave_out(Grid &g, double top) {
    const double reach = 1 + 8 * g.lam, largest = top < 0 ? -top : top;
    const double slack = kTied * (reach + largest);
    find_blocks(g, top - reach - slack);
    const double cut = threshold(g, g.z, top - 1, kSteps) - 8 * g.lam - slack;
    drop_blocks(g, cut);
    return cut;
}

static inline void set_supplies(Grid &g, double top, double cut) {
    const Row lam = broadcast(g.lam);
    for (int64_t b = 0; b < g.block_count; ++b) {
        const int64_t i = g.blocks[b];
        const Row z = load(g.z + i);
        Row kept = {}, left_out = {};
        for (int side = 0; side < 4; ++side) {
            const Row near = load(g.z + i + step(g, side));
            kept += when(near >= broadcast(cut), 1);
            left_out += when(near < broadcast(cut), 1) - when(near == broadcast(-kInfinity), 1);
        }
        const Lanes<double>::Mask here = z >= broadcast(cut);
        const Row supply = here ? z - top - lam * left_out : broadcast(-kInfinity);
        const Row low = supply - lam * kept;
        const Row high = here ? supply + lam * kept + g.tied : broadcast(kInfinity);
        store(g.supply + i, supply), store(g.x + i, supply);
        store(g.low + i, low), store(g.widest_low + i, low);
        store(g.high + i, high), store(g.widest_high + i, high);
    }
}

// Answers false where the grid has no answer: NaN, +inf, or all masked. With `whole`, cells that
// have no weight take part as well.
template <class T>
static inline bool read(Grid &g, const T *z, int64_t row_length, bool whole) {
    for (int64_t r = 0; r < g.h; ++r) {
        double *const row = g.z + r * g.stride;
        for (int64_t c = 0; c < g.w; ++c) row[c] = double(z[r * row_length + c]);
    }
    Extremes found = extremes(g);
    if (!found.finite || !(found.top > kMaskedAtMost)) return false;
    if (found.masked) {
        mask_cells(g);
        found = extremes(g);
    }
    // With an edge that carries all there is, more lam changes nothing but the rounding.
    const double range = found.top - found.bottom, enough = 1 + range * double(g.h * g.w);
    g.lam = g.lam < enough ? g.lam : enough;
    const double reach = 1 + 8 * (g.lam < range ? g.lam : range);
    g.tied = kTied * (whole && range > reach ? range : reach);
    const bool all = whole || !(reach < 1e100) || !(found.top < 1e100);
    const double cut = all ? -__DBL_MAX__ : leave_out(g, found.top);
    if (all) find_blocks(g, cut);
    set_supplies(g, found.top, cut);
    return true;
}

}  // namespace tv
}  // namespace SACCADE_TARGET
}  // namespace saccade
