// SPDX-License-Identifier: Apache-2.0
// SvPN on the CPU: Jacobi makes the columns g_j of the tall side of Q orthogonal, and
// Y = sum_j s_j^(alpha - 1) g_j v_j' with s_j = |g_j|. All of it in double, whatever the type.
#pragma once

#include <cmath>

#include "../native/lanes.hpp"
#include "../native/table.hpp"
#include "jacobi.hpp"

namespace saccade {
namespace SACCADE_TARGET {

// float32 input is far from what double can resolve, so v_j = Q'g_j / s_j^2 is good enough and is
// computed once at the end; double input needs v_j turned along with g_j.
template <class T>
struct SvPNRule;

template <>
struct SvPNRule<float> {
    static constexpr bool turns_v = false;
    static constexpr double rank_threshold = 1e-6;
    static constexpr Limits limits = {1e-11, 1e-4, 1e-3, 1e-9};
};

template <>
struct SvPNRule<double> {
    static constexpr bool turns_v = true;
    static constexpr double rank_threshold = 1e-12;
    static constexpr Limits limits = {2e-15, 3e-8, 3e-8, 1e-15};
};

// How one matrix lies in memory, seen as `tall` rows of `count` columns, tall >= count, and the
// parts of the scratch. An element's vector holds that element of kWide matrices.
template <class T>
struct SvPNLayout {
    int64_t tall, count, row_step, column_step;

    SvPNLayout(int64_t m, int64_t n)
        : tall(m < n ? n : m), count(m < n ? m : n), row_step(m < n ? 1 : n),
          column_step(m < n ? n : 1) {}

    // g_j, and below it v_j if it is turned along; an odd number, so that columns do not compete
    // for the same lines of the cache.
    int64_t rows() const { return (SvPNRule<T>::turns_v ? tall + count : tall) | 1; }
    int64_t v() const { return (SvPNRule<T>::turns_v ? tall : rows() * count) * kWide; }
    int64_t v_rows() const { return SvPNRule<T>::turns_v ? rows() : count; }
    int64_t original() const { return v() + v_rows() * count * kWide; }
    int64_t squares() const {
        return original() + (SvPNRule<T>::turns_v ? 0 : tall * count * kWide);
    }
    int64_t end() const { return squares() + count * kWide; }
};

// out(a, b) = sum over t < depth of x[a, t] z[b, t], in tiles held in registers. At the edges a
// tile repeats the last row, which gives the same numbers again.
struct Strided {
    const double *data;
    int64_t step, depth_step;  // in vectors
};

template <class Out>
static inline void multiply(const Strided &x, int64_t x_count, const Strided &z, int64_t z_count,
                            int64_t depth, const Out &out) {
    constexpr int kTile = 4;
    for (int64_t a = 0; a < x_count; a += kTile)
        for (int64_t b = 0; b < z_count; b += kTile) {
            const double *left[kTile], *right[kTile];
            Wide total[kTile][kTile];
            for (int k = 0; k < kTile; ++k) {
                const int64_t row = a + k < x_count ? a + k : x_count - 1;
                const int64_t column = b + k < z_count ? b + k : z_count - 1;
                left[k] = x.data + row * x.step * kWide;
                right[k] = z.data + column * z.step * kWide;
                for (int l = 0; l < kTile; ++l) total[k][l] = broadcast(0.0);
            }
            for (int64_t t = 0; t < depth; ++t)
                for (int k = 0; k < kTile; ++k) {
                    const Wide value = load(left[k] + t * x.depth_step * kWide);
                    for (int l = 0; l < kTile; ++l)
                        total[k][l] += value * load(right[l] + t * z.depth_step * kWide);
                }
            for (int k = 0; k < kTile && a + k < x_count; ++k)
                for (int l = 0; l < kTile && b + l < z_count; ++l) out(a + k, b + l, total[k][l]);
        }
}

// What was taken out of each matrix before it was spread over its lane, and what is added to its
// answer: NaN if an entry is not finite.
struct SvPNLanes {
    int exponent[kWide];
    Wide added;
};

// NaN or infinity if an entry is.
template <class T>
static inline T largest_magnitude(const T *from, int64_t n) {
    constexpr int kStep = Lanes<T>::width;
    Vector<T> top = broadcast(T(0)), poison = top;
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
        const Vector<T> value = load(from + i);
        top = larger(top, larger(value, -value));
        poison += value * T(0);
    }
    T largest = largest_of<T>(top) + sum_of<T>(poison);
    for (; i < n; ++i) {
        const T magnitude = std::fabs(from[i]);
        largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
    }
    return largest;
}

// Each matrix scaled by a power of two so that its largest entry is near 1; zeros in a lane that
// has no matrix or one with an entry that is not finite.
template <class T>
static inline SvPNLanes spread(const T *q, int64_t matrices, const SvPNLayout<T> &layout,
                               double *scratch) {
    const int64_t size = layout.tall * layout.count, rows = layout.rows();
    SvPNLanes lanes;
    // In two steps: a subnormal's inverse is out of range.
    Wide half, rest;
    WideMask used;
    for (int lane = 0; lane < kWide; ++lane) {
        const bool exists = lane < matrices;
        const T *from = exists ? q + lane * size : q;
        const T largest = largest_magnitude(from, size);
        const bool finite = largest - largest == T(0);
        int &exponent = lanes.exponent[lane] = 0;
        if (finite) std::frexp(double(largest), &exponent);
        half[lane] = std::ldexp(1.0, -exponent / 2);
        rest[lane] = std::ldexp(1.0, -exponent + exponent / 2);
        used[lane] = exists && finite ? -1 : 0;
        lanes.added[lane] = finite ? 0.0 : __builtin_nan("");
        for (int64_t j = 0; j < layout.count; ++j)
            for (int64_t i = 0; i < layout.tall; ++i)
                scratch[(j * rows + i) * kWide + lane] =
                    double(from[i * layout.row_step + j * layout.column_step]);
    }
    for (int64_t j = 0; j < layout.count; ++j)
        for (int64_t i = 0; i < layout.tall; ++i) {
            double *at = scratch + (j * rows + i) * kWide;
            store(at, used ? load(at) * half * rest : broadcast(0.0));
        }
    return lanes;
}

// The factor of g_j v_j': a power of s_j, or 0 where s_j counts as 0; undoes the scaling.
template <class T>
static inline void weigh(const SvPNLayout<T> &layout, const SvPNLanes &lanes, double alpha,
                         double *squares) {
    for (int lane = 0; lane < kWide; ++lane) {
        double top = 0;
        for (int64_t j = 0; j < layout.count; ++j) {
            const double square = squares[j * kWide + lane];
            top = square > top ? square : top;
        }
        const double least = SvPNRule<T>::rank_threshold * std::sqrt(top);
        const double unscaled = std::exp2(alpha * lanes.exponent[lane]);
        for (int64_t j = 0; j < layout.count; ++j) {
            double &square = squares[j * kWide + lane];
            const double s = std::sqrt(square);
            const double powered = alpha == 0.5 ? std::sqrt(s) : std::pow(s, alpha);
            // g_j has length s, v_j turned along has length 1, and Q'g_j has length s^2.
            const double length = SvPNRule<T>::turns_v ? s : s * s * s;
            square = s > least ? powered * unscaled / length : 0.0;
        }
    }
}

template <class T>
size_t svpn_scratch(int64_t m, int64_t n) {
    return size_t(SvPNLayout<T>(m, n).end()) * sizeof(double);
}

template <class T>
static inline void svpn_lanes(const T *q, T *y, int64_t matrices, const SvPNLayout<T> &layout,
                              double alpha, double *scratch) {
    const SvPNLanes lanes = spread(q, matrices, layout, scratch);
    const int64_t tall = layout.tall, count = layout.count, rows = layout.rows();
    double *original = scratch + layout.original(), *squares = scratch + layout.squares();
    double *v = scratch + layout.v();
    const int64_t v_rows = layout.v_rows();
    for (int64_t j = 0; j < count; ++j) {
        if (SvPNRule<T>::turns_v) {
            for (int64_t i = 0; i < count; ++i)
                store(v + (j * v_rows + i) * kWide, broadcast(i == j ? 1.0 : 0.0));
        } else {
            std::memcpy(original + j * tall * kWide, scratch + j * rows * kWide,
                        size_t(tall) * sizeof(Wide));
        }
    }
    const int64_t turned = SvPNRule<T>::turns_v ? tall + count : tall;
    orthogonalise({scratch, squares, count, rows, turned, tall}, SvPNRule<T>::limits);
    weigh(layout, lanes, alpha, squares);
    if (!SvPNRule<T>::turns_v)
        multiply({scratch, rows, 1}, count, {original, tall, 1}, count, tall,
                 [=](int64_t j, int64_t i, Wide value) {
                     store(v + (j * v_rows + i) * kWide, value);
                 });
    for (int64_t j = 0; j < count; ++j)
        for (int64_t i = 0; i < count; ++i) {
            double *at = v + (j * v_rows + i) * kWide;
            store(at, load(at) * load(squares + j * kWide));
        }
    multiply({scratch, 1, rows}, tall, {v, 1, v_rows}, count, count,
             [=](int64_t i, int64_t j, Wide value) {
                 T *to = y + i * layout.row_step + j * layout.column_step;
                 const Wide answer = value + lanes.added;
                 for (int lane = 0; lane < kWide; ++lane)
                     if (lane < matrices) to[lane * tall * count] = T(answer[lane]);
             });
}

template <class T>
void svpn(const T *q, T *y, int64_t count, int64_t m, int64_t n, double alpha, void *scratch) {
    if (m == 0 || n == 0) return;
    const SvPNLayout<T> layout(m, n);
    for (int64_t i = 0; i < count; i += kWide)
        svpn_lanes(q + i * m * n, y + i * m * n, count - i, layout, alpha,
                   static_cast<double *>(scratch));
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
