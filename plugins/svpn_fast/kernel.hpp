// SPDX-License-Identifier: Apache-2.0
// SvPNFast on the CPU, in double whatever the type. One power iteration is one pass: row i gives
// a_i = (row i) v, and w += a_i (row i) is then Q'Qv; and s = u'Qv = |Q'u| needs no pass.
#pragma once

#include <cmath>

#include "../native/lanes.hpp"
#include "../native/table.hpp"

namespace saccade {
namespace SACCADE_TARGET {

// Rows are padded with zeros to whole vectors, and up to whole blocks of rows.
struct SvPNFastLayout {
    static constexpr int64_t block = 8;  // of rows, and of the widest vector
    int64_t m, n, rows, width;

    SvPNFastLayout(int64_t height, int64_t length)
        : m(height), n(length), rows((height + block - 1) / block * block),
          width((length + Lanes<double>::width - 1) / Lanes<double>::width *
                Lanes<double>::width) {}

    int64_t size() const { return rows * width; }
};

// One matrix at a time: what is left of it, what was found, u before its normalisation (a), and
// the start, v and w.
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

template <class T>
static inline void copy_padded(const T *from, double *to, int64_t n, int64_t width) {
    for (int64_t i = 0; i < n; ++i) to[i] = double(from[i]);
    for (int64_t i = n; i < width; ++i) to[i] = 0;
}

static inline double norm_floored(const double *x, int64_t width) {
    constexpr double kSmallestNorm = 1e-12;
    Vector<double> total = broadcast(0.0);
    for (int64_t i = 0; i < width; i += Lanes<double>::width) total += load(x + i) * load(x + i);
    const double norm = std::sqrt(sum_of<double>(total));
    return norm < kSmallestNorm ? kSmallestNorm : norm;  // NaN stays
}

// a = Q v and w = Q' a.
static inline void iterate(const SvPNFastLayout &layout, const SvPNFastScratch &use) {
    constexpr int kStep = Lanes<double>::width;
    constexpr int kRows = 4;
    for (int64_t j = 0; j < layout.width; j += kStep) store(use.w + j, broadcast(0.0));
    for (int64_t i = 0; i < layout.rows; i += kRows) {
        const double *row = use.rest + i * layout.width;
        Vector<double> total[kRows] = {};
        for (int64_t j = 0; j < layout.width; j += kStep)
            for (int k = 0; k < kRows; ++k)
                total[k] += load(row + k * layout.width + j) * load(use.v + j);
        for (int k = 0; k < kRows; ++k) use.a[i + k] = sum_of<double>(total[k]);
        for (int64_t j = 0; j < layout.width; j += kStep) {
            Vector<double> sum = load(use.w + j);
            for (int k = 0; k < kRows; ++k)
                sum += broadcast(use.a[i + k]) * load(row + k * layout.width + j);
            store(use.w + j, sum);
        }
    }
}

// The next singular value of what is left; u and v are in a and v.
static inline double find(const SvPNFastLayout &layout, const SvPNFastScratch &use,
                          int64_t iterations) {
    double s = 0;
    for (int64_t i = 0; i < layout.width; ++i) use.v[i] = use.start[i];
    for (int64_t round = 0; round < iterations; ++round) {
        iterate(layout, use);
        const double a_norm = norm_floored(use.a, layout.rows);
        for (int64_t i = 0; i < layout.rows; ++i) use.a[i] /= a_norm;
        double square = 0;
        for (int64_t i = 0; i < layout.width; ++i) use.w[i] /= a_norm;
        const double w_norm = norm_floored(use.w, layout.width);
        for (int64_t i = 0; i < layout.width; ++i) {
            use.v[i] = use.w[i] / w_norm;
            square += use.w[i] * use.v[i];
        }
        s = square;
    }
    return s;
}

// to = x * to + y * u v', for the rows that the matrix has.
static inline void add_outer(const SvPNFastLayout &layout, const SvPNFastScratch &use, double *to,
                             double y) {
    for (int64_t i = 0; i < layout.m; ++i)
        for (int64_t j = 0; j < layout.width; ++j)
            to[i * layout.width + j] += y * use.a[i] * use.v[j];
}

template <class T>
static inline void svpn_fast_one(const T *q, T *y, const SvPNFastLayout &layout,
                                 const SvPNFastOptions &options, const SvPNFastScratch &use) {
    const int64_t m = layout.m, n = layout.n, width = layout.width;
    for (int64_t i = 0; i < m; ++i) copy_padded(q + i * n, use.rest + i * width, n, width);
    const bool all = options.singular_values == 0;
    const int64_t steps = all ? (m < n ? m : n) : options.singular_values;
    for (int64_t i = 0; steps > 1 && i < m * width; ++i) use.found[i] = 0;
    double power = 0, s = 0;
    for (int64_t step = 0; step < steps; ++step) {
        s = find(layout, use, options.iterations);
        power = std::pow(s, options.alpha);
        if (step + 1 == steps) break;
        add_outer(layout, use, use.found, power);
        add_outer(layout, use, use.rest, -s);
    }
    // The last one is subtracted from the rest and added to what was found in the same pass.
    const double divisor = std::pow(s, 1 - options.alpha) + options.epsilon;
    const double scale = all || divisor == 0 ? 0 : 1 / divisor;
    const double weight = power - s * scale;
    for (int64_t i = 0; i < m; ++i) {
        const double *rest = use.rest + i * width, *found = use.found + i * width;
        const double u = weight * use.a[i];
        for (int64_t j = 0; j < n; ++j) {
            const double value = scale * rest[j] + u * use.v[j];
            y[i * n + j] = T(steps > 1 ? found[j] + value : value);
        }
    }
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
    copy_padded(v0, use.start, n, layout.width);
    for (int64_t i = m * layout.width; i < layout.size(); ++i) use.rest[i] = 0;
    for (int64_t i = 0; i < count; ++i)
        svpn_fast_one(q + i * m * n, y + i * m * n, layout, options, use);
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
