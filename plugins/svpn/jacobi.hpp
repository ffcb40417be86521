// SPDX-License-Identifier: Apache-2.0
// One-sided Jacobi: rotates pairs of columns until all are orthogonal, many matrices at a time,
// one in each lane of a vector of doubles. Nothing is summed across lanes, and a lane whose
// columns are orthogonal is rotated by exactly 0, so no matrix feels its neighbours.
#pragma once

#include <cmath>

#include "../native/lanes.hpp"

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

namespace saccade {
namespace SACCADE_TARGET {

using Wide = Vector<double>;
using WideMask = Lanes<double>::Mask;
constexpr int kWide = Lanes<double>::width;

// 1 / sqrt(x) and 1 / x for x > 0; the `rough` ones to 27 bits or more.
#if defined(__AVX512F__)
static inline Wide refined_root(Wide x, Wide guess) {
    return guess * (1.5 - 0.5 * x * guess * guess);
}
static inline Wide rough_reciprocal_root(Wide x) {
    return refined_root(x, (Wide)_mm512_maskz_rsqrt14_pd(0xFF, (__m512d)x));
}
static inline Wide reciprocal_root(Wide x) { return refined_root(x, rough_reciprocal_root(x)); }
static inline Wide rough_reciprocal(Wide x) {
    const Wide guess = (Wide)_mm512_maskz_rcp14_pd(0xFF, (__m512d)x);
    return guess * (2.0 - x * guess);
}
#else
static inline Wide reciprocal_root(Wide x) {
#if defined(__AVX__)
    return 1.0 / (Wide)_mm256_sqrt_pd((__m256d)x);
#else
    for (int i = 0; i < kWide; ++i) x[i] = std::sqrt(x[i]);
    return 1.0 / x;
#endif
}
static inline Wide rough_reciprocal_root(Wide x) { return reciprocal_root(x); }
static inline Wide rough_reciprocal(Wide x) { return 1.0 / x; }
#endif

static inline bool any(WideMask mask) {
    int64_t joined = 0;
    for (int i = 0; i < kWide; ++i) joined |= mask[i];
    return joined != 0;
}

// Column j is vectors from data + j * rows * kWide on: angles are judged by the first `judged`,
// and the first `turned` of them are turned.
struct Columns {
    double *data;
    double *squares;  // squared length of each column
    int64_t count, rows, turned, judged;

    double *column(int64_t j) const { return data + j * rows * kWide; }
    double *square(int64_t j) const { return squares + j * kWide; }
};

// A cosine between columns above `turned` is rotated away. A sweep that met none above
// `small_cosine` and turned by no tangent above `small_tangent` was the last one: what it leaves is
// about their product. A column shorter than `ignored` times the matrix is left alone.
struct Limits {
    double turned, small_cosine, small_tangent, ignored;
};

// What the lanes know of their own matrix during a sweep.
struct Sweep {
    Wide smallest_square;
    WideMask live;       // still turning
    WideMask unsettled;  // met a large cosine or tangent in this sweep
};

// Disjoint pairs (p, q), p < q. Many at once hide the latency of the roots; memory is read for
// four at a time, which is as many pointers as the CPU has registers for.
constexpr int kMostPairs = 16;
constexpr int kFour = 4;

struct Round {
    int count;
    double *p[kMostPairs], *q[kMostPairs];
    double *square_p[kMostPairs], *square_q[kMostPairs];
    Wide product[kMostPairs];
    Wide x[kMostPairs], y[kMostPairs];

    void add(const Columns &g, int64_t first, int64_t second) {
        p[count] = g.column(first);
        q[count] = g.column(second);
        square_p[count] = g.square(first);
        square_q[count++] = g.square(second);
    }
};

template <int N>
__attribute__((noinline)) static void take_products(const Columns &g, Round &round, int from) {
    const double *p[N], *q[N];
    Wide total[N];
    for (int k = 0; k < N; ++k) {
        p[k] = round.p[from + k];
        q[k] = round.q[from + k];
        total[k] = broadcast(0.0);
    }
    const int64_t end = g.judged * kWide;
    for (int64_t i = 0; i < end; i += kWide)
        for (int k = 0; k < N; ++k) total[k] += load(p[k] + i) * load(q[k] + i);
    for (int k = 0; k < N; ++k) round.product[from + k] = total[k];
}

// What N pairs are before they are turned. N in step, since one's results are slow to come.
template <int N>
struct Judged {
    Wide shorter[N], longer[N], gap[N], span_square[N];
    WideMask turned[N], straight[N];
};

template <int N>
static inline Judged<N> judge(const Round &round, int from, const Limits &limits, Sweep &sweep) {
    const double turned_square = limits.turned * limits.turned;
    const double small_square = limits.small_cosine * limits.small_cosine;
    Judged<N> pairs;
    for (int k = 0; k < N; ++k) {
        const Wide a = load(round.square_p[from + k]), b = load(round.square_q[from + k]);
        pairs.shorter[k] = smaller(a, b);
        pairs.longer[k] = larger(a, b);
        pairs.gap[k] = pairs.longer[k] - pairs.shorter[k];
        const Wide product = round.product[from + k];
        const Wide size = a * b, cosine = product * product;
        const WideMask counts = sweep.live & (pairs.shorter[k] > sweep.smallest_square);
        const WideMask turned = counts & (cosine > turned_square * size);
        sweep.unsettled |= counts & (cosine > small_square * size);
        pairs.turned[k] = turned;
        pairs.straight[k] = (a >= b) | ~turned;
        pairs.span_square[k] =
            turned ? pairs.gap[k] * pairs.gap[k] + 4.0 * cosine : broadcast(1.0);
    }
    return pairs;
}

// The columns become (x p + y q, x q - y p), the longer one first. An angle that is slightly off
// leaves a slightly larger cosine for the next sweep, but x^2 + y^2 must be 1.
template <int N>
__attribute__((noinline)) static void find_angles(Round &round, int from, const Limits &limits,
                                                  Sweep &sweep) {
    const Wide one = broadcast(1.0), zero = broadcast(0.0);
    const Judged<N> pairs = judge<N>(round, from, limits, sweep);
    Wide span[N], tangent[N], c[N];
    for (int k = 0; k < N; ++k)
        span[k] = pairs.span_square[k] * rough_reciprocal_root(pairs.span_square[k]);
    for (int k = 0; k < N; ++k) {
        tangent[k] = 2.0 * round.product[from + k] * rough_reciprocal(pairs.gap[k] + span[k]);
        tangent[k] = pairs.turned[k] ? tangent[k] : zero;
        sweep.unsettled |= larger(tangent[k], -tangent[k]) > limits.small_tangent;
    }
    for (int k = 0; k < N; ++k) c[k] = reciprocal_root(one + tangent[k] * tangent[k]);
    for (int k = 0; k < N; ++k) {
        const Wide s = c[k] * tangent[k], moved = tangent[k] * round.product[from + k];
        round.x[from + k] = pairs.straight[k] ? c[k] : s;
        round.y[from + k] = pairs.straight[k] ? s : c[k];
        double *a = round.square_p[from + k], *b = round.square_q[from + k];
        store(a, pairs.turned[k] ? pairs.longer[k] + moved : load(a));
        store(b, pairs.turned[k] ? larger(pairs.shorter[k] - moved, zero) : load(b));
    }
}

template <int N>
__attribute__((noinline)) static void turn(const Columns &g, const Round &round, int from) {
    double *p[N], *q[N];
    Wide x[N], y[N];
    for (int k = 0; k < N; ++k) {
        p[k] = round.p[from + k];
        q[k] = round.q[from + k];
        x[k] = round.x[from + k];
        y[k] = round.y[from + k];
    }
    const int64_t end = g.turned * kWide;
    for (int64_t i = 0; i < end; i += kWide) {
        Wide first[N], second[N];
        for (int k = 0; k < N; ++k) {
            first[k] = load(p[k] + i);
            second[k] = load(q[k] + i);
        }
        for (int k = 0; k < N; ++k) {
            store(p[k] + i, x[k] * first[k] + y[k] * second[k]);
            store(q[k] + i, x[k] * second[k] - y[k] * first[k]);
        }
    }
}

static inline void turn_round(const Columns &g, Round &round, const Limits &limits, Sweep &sweep) {
    const int fours = round.count / kFour * kFour, left = round.count - fours;
    for (int k = 0; k < fours; k += kFour) take_products<kFour>(g, round, k);
    if (left == 3) take_products<3>(g, round, fours);
    if (left == 2) take_products<2>(g, round, fours);
    if (left == 1) take_products<1>(g, round, fours);
    for (int k = 0; k < fours; k += kFour) find_angles<kFour>(round, k, limits, sweep);
    if (left == 3) find_angles<3>(round, fours, limits, sweep);
    if (left == 2) find_angles<2>(round, fours, limits, sweep);
    if (left == 1) find_angles<1>(round, fours, limits, sweep);
    for (int k = 0; k < fours; k += kFour) turn<kFour>(g, round, k);
    if (left == 3) turn<3>(g, round, fours);
    if (left == 2) turn<2>(g, round, fours);
    if (left == 1) turn<1>(g, round, fours);
}

struct Block {
    int64_t first, size;
};

// Every pair within a block, those with the same sum of indices, modulo the size, at once. It does
// the same as going through the pairs row by row, which together with putting longer columns first
// needs fewer sweeps than the schedule of a tournament.
static inline void turn_within(const Columns &g, Block block, const Limits &limits,
                               Sweep &sweep) {
    Round round;
    for (int64_t sum = 1; sum <= block.size; ++sum) {
        round.count = 0;
        for (int64_t i = 0; i < block.size; ++i) {
            const int64_t j = sum >= i ? sum - i : sum - i + block.size;
            if (i < j && j < block.size) round.add(g, block.first + i, block.first + j);
        }
        turn_round(g, round, limits, sweep);
    }
}

// Every pair of a column of one block and a column of a later one, while both are in the cache.
static inline void turn_across(const Columns &g, Block one, Block other, const Limits &limits,
                               Sweep &sweep) {
    const int64_t rounds = one.size > other.size ? one.size : other.size;
    Round round;
    for (int64_t sum = 0; sum < rounds; ++sum) {
        round.count = 0;
        for (int64_t a = 0; a < one.size; ++a) {
            const int64_t b = sum >= a ? sum - a : sum - a + rounds;
            if (b < other.size) round.add(g, one.first + a, other.first + b);
        }
        turn_round(g, round, limits, sweep);
    }
}

// The columns cut into blocks of nearly equal size, whole fours where it can be, two of which fit
// into the first-level cache.
struct Blocks {
    int64_t count, size, larger_ones;

    explicit Blocks(const Columns &g) {
        constexpr int64_t kCacheBytes = 32768;
        int64_t most = kCacheBytes / 2 / (g.turned * int64_t(sizeof(Wide))) / kFour * kFour;
        most = most < kFour ? kFour : most > kMostPairs ? kMostPairs : most;
        count = (g.count + most - 1) / most;
        size = g.count / count;
        larger_ones = g.count % count;
    }

    Block operator[](int64_t b) const {
        const bool is_larger = b < larger_ones;
        return {b * size + (is_larger ? b : larger_ones), size + (is_larger ? 1 : 0)};
    }
};

static inline void measure(const Columns &g) {
    for (int64_t j = 0; j < g.count; ++j) {
        const double *column = g.column(j);
        Wide total = broadcast(0.0);
        for (int64_t i = 0; i < g.judged * kWide; i += kWide)
            total += load(column + i) * load(column + i);
        store(g.square(j), total);
    }
}

// Leaves orthogonal columns and their squared lengths. Convergence is quadratic: six to eight
// sweeps; the bound is for what rounding might keep alive.
static inline void orthogonalise(const Columns &g, const Limits &limits) {
    constexpr int kMostSweeps = 40;
    const Blocks blocks(g);
    Sweep sweep;
    sweep.live = broadcast(0.0) == broadcast(0.0);
    for (int done = 0; done < kMostSweeps && any(sweep.live); ++done) {
        measure(g);
        Wide total = broadcast(0.0);
        for (int64_t j = 0; j < g.count; ++j) total += load(g.square(j));
        sweep.smallest_square = total * (limits.ignored * limits.ignored);
        sweep.unsettled = WideMask{};
        for (int64_t a = 0; a < blocks.count; ++a) {
            turn_within(g, blocks[a], limits, sweep);
            for (int64_t b = a + 1; b < blocks.count; ++b)
                turn_across(g, blocks[a], blocks[b], limits, sweep);
        }
        sweep.live &= sweep.unsettled;
    }
    measure(g);
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
