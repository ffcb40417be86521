// SPDX-License-Identifier: Apache-2.0
// SvPNFast on the CPU, in double whatever the type. One power iteration is one pass: row i gives
// a_i = (row i) v, and the sum of a_i (row i) is Q'Qv; and s = u'Qv = |Q'u| needs no pass.
#pragma once

#include <cmath>

#include "../native/lanes.hpp"
#include "../native/table.hpp"
#include "rows.hpp"

namespace saccade {
namespace SACCADE_TARGET {

constexpr int kRowsAtOnce = 4;

// Rows are filled up with zeros to whole vectors, and their number to whole groups.
struct SvPNFastLayout {
    int64_t m, n, rows, width;

    SvPNFastLayout(int64_t height, int64_t length)
        : m(height), n(length), rows((height + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce),
          width((length + kRowStep - 1) / kRowStep * kRowStep) {}

    int64_t size() const { return rows * width; }
};

// One matrix at a time: what is left of it, what was found, the start, v, w = Q'Qv, and a = Qv.
struct SvPNFastScratch {
    double *rest, *found, *start, *v, *w, *a;

    SvPNFastScratch(void *memory, const SvPNFastLayout &layout)
        : rest(static_cast<double *>(memory)), found(rest + layout.size()),
          start(found + layout.size()), v(start + layout.width), w(v + layout.width),
          a(w + layout.width) {}

    static size_t bytes(const SvPNFastLayout &layout) {
        return size_t(2 * layout.size() + 3 * layout.width + layout.rows) * sizeof(double);
    }
};

// A singular value; its vectors are u = a * a_scale and v.
struct Found {
    double s, a_scale;
};

// The inverse of the length, or of the smallest length that is divided by.
static inline double inverse_length(double square) {
    constexpr double kSmallestNorm = 1e-12;
    const double length = std::sqrt(square);
    return 1 / (length < kSmallestNorm ? kSmallestNorm : length);  // NaN stays
}

// One power iteration from `v`, which leaves the next one in use.v.
static inline Found iterate(const SvPNFastLayout &layout, const SvPNFastScratch &use,
                            const double *v) {
    const int64_t width = layout.width;
    double a_square = 0;
    for (int64_t j = 0; j < width; j += kRowStep) store(use.w + j, broadcast(0.0));
    for (int64_t i = 0; i < layout.rows; i += kRowsAtOnce) {
        const double *row = use.rest + i * width;
        RowVector total[kRowsAtOnce] = {};
        for (int64_t j = 0; j < width; j += kRowStep)
            for (int k = 0; k < kRowsAtOnce; ++k)
                total[k] += load(row + k * width + j) * load(v + j);
        for (int k = 0; k < kRowsAtOnce; ++k) {
            total[k] = sum_everywhere(total[k]);
            use.a[i + k] = total[k][0];
            a_square += total[k][0] * total[k][0];
        }
        for (int64_t j = 0; j < width; j += kRowStep) {
            RowVector sum = load(use.w + j);
            for (int k = 0; k < kRowsAtOnce; ++k) sum += total[k] * load(row + k * width + j);
            store(use.w + j, sum);
        }
    }
    const double a_scale = inverse_length(a_square);
    RowVector squares = broadcast(0.0);
    for (int64_t j = 0; j < width; j += kRowStep) {
        const RowVector image = a_scale * load(use.w + j);
        store(use.w + j, image);
        squares += image * image;
    }
    const double w_square = sum_everywhere(squares)[0], w_scale = inverse_length(w_square);
    for (int64_t j = 0; j < width; j += kRowStep) store(use.v + j, w_scale * load(use.w + j));
    return {w_square * w_scale, a_scale};
}

// to += factor * a v'
static inline void add_outer(const SvPNFastLayout &layout, const SvPNFastScratch &use, double *to,
                             double factor) {
    for (int64_t i = 0; i < layout.m; ++i, to += layout.width) {
        const double share = factor * use.a[i];
        for (int64_t j = 0; j < layout.width; j += kRowStep)
            store(to + j, load(to + j) + share * load(use.v + j));
    }
}

static inline double power_of(double s, double exponent) {
    if (exponent == 0.5) return std::sqrt(s);
    return exponent == 0 ? 1.0 : std::pow(s, exponent);
}

template <class T>
static inline void svpn_fast_one(const T *q, T *y, const SvPNFastLayout &layout,
                                 const SvPNFastOptions &options, const SvPNFastScratch &use) {
    const int64_t m = layout.m, n = layout.n, width = layout.width;
    for (int64_t i = 0; i < m; ++i) widen_row(q + i * n, use.rest + i * width, n);
    const bool all = options.singular_values == 0;
    const int64_t steps = all ? (m < n ? m : n) : options.singular_values;
    for (int64_t i = 0; steps > 1 && i < m * width; i += kRowStep)
        store(use.found + i, broadcast(0.0));
    Found one = {};
    double power = 0;
    for (int64_t step = 0; step < steps; ++step) {
        for (int64_t round = 0; round < options.iterations; ++round)
            one = iterate(layout, use, round == 0 ? use.start : use.v);
        power = power_of(one.s, options.alpha);
        if (step + 1 == steps) break;
        add_outer(layout, use, use.found, power * one.a_scale);
        add_outer(layout, use, use.rest, -one.s * one.a_scale);
    }
    // The last one is taken from the rest and added to what was found in the same pass.
    const double divisor = power_of(one.s, 1 - options.alpha) + options.epsilon;
    const double scale = all || divisor == 0 ? 0 : 1 / divisor;
    const double weight = (power - one.s * scale) * one.a_scale;
    for (int64_t i = 0; i < m; ++i)
        narrow_row(use.rest + i * width, scale, use.v, weight * use.a[i],
                   steps > 1 ? use.found + i * width : nullptr, y + i * n, n);
}

template <class T>
size_t svpn_fast_scratch(int64_t m, int64_t n) {
    return SvPNFastScratch::bytes(SvPNFastLayout(m, n));
}

template <class T>
void svpn_fast(const T *q, const T *v0, T *y, int64_t count, int64_t m, int64_t n,
               SvPNFastOptions options, void *scratch) {
    if (m == 0 || n == 0) return;
    const SvPNFastLayout layout(m, n);
    const SvPNFastScratch use(scratch, layout);
    for (int64_t i = m * layout.width; i < layout.size(); ++i) use.rest[i] = 0;
    widen_row(v0, use.start, n);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t at = i * m * n;
        svpn_fast_one(q + at, y + at, layout, options, use);
    }
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
