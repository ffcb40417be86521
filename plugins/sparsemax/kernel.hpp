// SPDX-License-Identifier: Apache-2.0
// Sparsemax of rows, p = max(z - t, 0) with the t that makes p sum to 1, and its gradient.
//
// A block of as many rows as a vector has lanes goes through four steps.
//   1. The maxima of every W-th entry of a row fill one vector; transposed, one lane is one row.
//      Newton's steps on these W entries give a lower bound of t, since leaving entries out
//      lowers t.
//   2. Only entries above the bound can be in the support: they are packed into the output row.
//   3. Where at most W are left, which is usual, they are transposed too and t is found for all
//      rows at once; a row with more is done alone.
//   4. The answer is written over the packed entries.
// Newton's method for sum(max(z - t, 0)) = 1 starts below t and never passes it, and ends when
// the support no longer shrinks. All is relative to the row's maximum. A NaN needs no test of its
// own: it counts as above any bound, and its sum makes t, and with it the row, NaN.
#pragma once

#include "../native/lanes.hpp"
#include "../native/table.hpp"
#include "packing.hpp"

namespace saccade {
namespace SACCADE_TARGET {

// The last whole vector of numbers, with -inf in the lanes that the vectors before it cover.
template <class T>
static inline Vector<T> last_of(const T *row, int64_t n) {
    constexpr int width = Lanes<T>::width;
    typename Lanes<T>::Mask lane;
    for (int j = 0; j < width; ++j) lane[j] = j;
    const Vector<T> nothing = broadcast<T>(-__builtin_inf());
    return lane < width - int(n % width) ? nothing : load(row + n - width);
}

template <class T>
static inline Vector<T> lane_maxima(const T *row, int64_t n) {
    constexpr int width = Lanes<T>::width;
    Vector<T> a = n % width != 0 ? last_of(row, n) : load(row), b = a;
    int64_t i = 0;
    for (; i + 2 * width <= n; i += 2 * width) {
        a = larger(load(row + i), a);
        b = larger(load(row + i + width), b);
    }
    if (i + width <= n) a = larger(load(row + i), a);
    return larger(a, b);
}

// Sum less 1, and number, of what lies above t in the first `count` vectors; a row is a lane.
template <class T>
struct Above {
    Vector<T> excess, inside;

    Above(const Vector<T> *z, int count, Vector<T> t) {
        const Vector<T> zero{}, one = broadcast<T>(1);
        Vector<T> sum = zero, sum_odd = zero, inside_odd = zero;
        inside = zero;
        int j = 0;
        for (; j + 2 <= count; j += 2) {
            const Vector<T> even = z[j] - t, odd = z[j + 1] - t;
            sum += larger(zero, even);
            sum_odd += larger(zero, odd);
            inside += even > 0 ? one : zero;
            inside_odd += odd > 0 ? one : zero;
        }
        if (j < count) {
            const Vector<T> even = z[j] - t;
            sum += larger(zero, even);
            inside += even > 0 ? one : zero;
        }
        inside += inside_odd;
        excess = sum + sum_odd - one;
    }
};

// The threshold of each lane. A lane that is done stays as it is while others go on.
//
// Rounding may take a step past the threshold, and past entries that are almost equal there. The
// way back, on the slope ahead, is then too long, which the next step makes good; but not where
// it would end at or below a point known to be low: from there the same step would come again.
template <class T>
static inline Vector<T> thresholds(const Vector<T> *z, int count, Vector<T> t) {
    const Vector<T> zero{}, one = broadcast<T>(1);
    Vector<T> before = zero, low = -one;
    typename Lanes<T>::Mask open = one > zero;
    while (bits_above(open ? one : zero, zero) != 0) {
        const Above<T> above(z, count, t);
        const Vector<T> next = t + above.excess / above.inside;
        low = above.excess < 0 ? low : t;
        const typename Lanes<T>::Mask stays = next <= low;
        t = open & ~stays ? next : t;
        open &= ~stays & (above.inside != before);
        before = above.inside;
    }
    return t;
}

// z - top of the entries above `cut`, packed into `to`; answers how many. n >= a vector.
template <class T>
static inline int64_t gather_above(const T *row, T *to, int64_t n, T top, T cut) {
    constexpr int width = Lanes<T>::width;
    const Vector<T> tops = broadcast(top), cuts = broadcast(cut);
    int64_t found = 0, i = 0;
    for (; i + width <= n; i += width) {
        const Vector<T> z = load(row + i) - tops;
        found += append(to + found, z, bits_above(z, cuts));
    }
    if (i < n) {
        // The last whole vector, without the lanes that were done.
        const Vector<T> z = load(row + n - width) - tops;
        T rest[width];
        const int more = append(rest, z, bits_above(z, cuts) & (~0u << (i - n + width)));
        for (int j = 0; j < more; ++j) to[found + j] = rest[j];
        found += more;
    }
    return found;
}

// The threshold of one row of any length >= a vector, as `thresholds` finds it. Sums of a stretch
// go into a double, so that the length costs no accuracy.
template <class T>
static T threshold(const T *z, int64_t n, T t) {
    constexpr int width = Lanes<T>::width;
    constexpr int64_t stretch = 64 * width;
    const Vector<T> zero{};
    T low = -1;
    for (int64_t before = 0;;) {
        double sum = 0;
        int64_t inside = 0, i = 0;
        while (i + width <= n) {
            const int64_t end = n - i < stretch ? n : i + stretch;
            Vector<T> a = zero, b = zero;
            typename Lanes<T>::Mask in_a{}, in_b{};
            for (; i + 2 * width <= end; i += 2 * width) {
                const Vector<T> even = load(z + i) - t, odd = load(z + i + width) - t;
                a += larger(zero, even);
                b += larger(zero, odd);
                in_a -= even > 0;
                in_b -= odd > 0;
            }
            if (i + width <= end) {
                const Vector<T> even = load(z + i) - t;
                a += larger(zero, even);
                in_a -= even > 0;
                i += width;
            }
            sum += double(sum_of<T>(a + b));
            in_a += in_b;
            for (int j = 0; j < width; ++j) inside += in_a[j];
        }
        for (; i < n; ++i) {
            const T above = z[i] - t;
            sum += 0 > above ? 0 : double(above);
            inside += above > 0;
        }
        const T next = T(t + (sum - 1) / double(inside));
        if (!(sum < 1)) low = t;
        if (next <= low) return t;
        t = next;
        if (inside == before) return t;
        before = inside;
    }
}

// Candidates first, first + 1, ... of the `found` at `from`, then -inf; `from` holds n numbers.
template <class T>
static inline Vector<T> candidates(const T *from, int64_t first, int64_t found, int64_t n) {
    constexpr int width = Lanes<T>::width;
    Vector<T> some = broadcast<T>(-__builtin_inf());
    if (first >= found) return some;
    if (first + width > n) {
        std::memcpy(&some, from + first, size_t(found - first) * sizeof(T));
        return some;
    }
    typename Lanes<T>::Mask lane;
    for (int j = 0; j < width; ++j) lane[j] = j;
    return lane < (found - first < width ? int(found - first) : width) ? load(from + first) : some;
}

// Up to a vector's width of rows, at `z` and `p`; n >= a vector.
template <class T>
static void sparsemax_block(const T *z, T *p, int rows, int64_t n) {
    constexpr int width = Lanes<T>::width, most_together = 4 * width;
    // What rounding may add to the bound, several times over.
    const T margin = sizeof(T) == 4 ? T(1e-6) : T(1e-14);
    Vector<T> squares[most_together];
    for (int r = 0; r < width; ++r) squares[r] = r < rows ? lane_maxima(z + r * n, n) : squares[0];
    transpose<T>(squares);
    Vector<T> top = squares[0];
    for (int j = 1; j < width; ++j) top = larger(squares[j], top);
    for (int j = 0; j < width; ++j) squares[j] -= top;
    Vector<T> t = broadcast<T>(-1);
    for (int step = 0; step < 2; ++step) {
        const Above<T> above(squares, width, t);
        t += above.excess / above.inside;
    }

    T tops[width], cuts[width];
    store(tops, top);
    store(cuts, larger(t - margin, broadcast<T>(-1)));
    int64_t found[width], together[width];
    int most = 0;
    for (int r = 0; r < rows; ++r) {
        found[r] = gather_above(z + r * n, p + r * n, n, tops[r], cuts[r]);
        together[r] = found[r] <= most_together ? found[r] : 0;
        most = most < together[r] ? int(together[r]) : most;
    }
    for (int first = 0; first < most; first += width) {
        Vector<T> *square = squares + first;
        for (int r = 0; r < width; ++r)
            square[r] = r < rows ? candidates(p + r * n, first, together[r], n) : square[0];
        transpose<T>(square);
    }
    t = thresholds<T>(squares, most, t);

    for (int r = 0; r < rows; ++r) {
        const T at = found[r] > together[r] ? threshold(p + r * n, found[r], cuts[r]) : T(t[r]);
        const Vector<T> mine = broadcast(tops[r]), cut = broadcast(at), zero{};
        const T *from = z + r * n;
        T *to = p + r * n;
        for (int64_t i = 0; i + width <= n; i += width)
            store(to + i, larger(zero, load(from + i) - mine - cut));
        store(to + n - width, larger(zero, load(from + n - width) - mine - cut));
    }
}

template <class T>
void sparsemax(const T *z, T *p, int64_t rows, int64_t n) {
    constexpr int width = Lanes<T>::width;
    if (n == 0) return;
    if (n < width) {
        // Short rows, filled up by entries of weight 0.
        T padded[width * width], answer[width * width];
        for (int i = 0; i < width * width; ++i) padded[i] = T(-__builtin_inf());
        for (int64_t first = 0; first < rows; first += width) {
            const int count = rows - first < width ? int(rows - first) : width;
            for (int r = 0; r < count; ++r)
                for (int j = 0; j < n; ++j) padded[r * width + j] = z[(first + r) * n + j];
            sparsemax_block(padded, answer, count, width);
            for (int r = 0; r < count; ++r)
                for (int j = 0; j < n; ++j) p[(first + r) * n + j] = answer[r * width + j];
        }
        return;
    }
    // A block is read three times: long rows are taken one by one to stay in the cache.
    const int64_t fitting = 262144 / (n * int64_t(sizeof(T)));
    const int step = fitting < 1 ? 1 : fitting < width ? int(fitting) : width;
    for (int64_t first = 0; first < rows; first += step)
        sparsemax_block(z + first * n, p + first * n,
                        rows - first < step ? int(rows - first) : step, n);
}

// The lanes halved and added until one is left: what the compiler keeps in registers.
template <class T>
static inline double folded(Vector<T> value) {
    T part[Lanes<T>::width];
    std::memcpy(part, &value, sizeof value);
    for (int half = Lanes<T>::width / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) part[j] += part[j + half];
    return double(part[0]);
}

// out = gradient - its mean over the support on the support, 0 elsewhere; p is 0 or NaN there.
template <class T>
void sparsemax_backward(const T *p, const T *gradient, T *out, int64_t rows, int64_t n) {
    constexpr int width = Lanes<T>::width;
    // A lane adds at most so many numbers before they go into the double sum.
    constexpr int64_t stretch = 16 * width;
    const Vector<T> zero{}, one = zero + 1;
    for (int64_t row = 0; row < rows; ++row, p += n, gradient += n, out += n) {
        double sum = 0;
        Vector<T> counts{};
        int64_t i = 0;
        while (i + width <= n) {
            Vector<T> sums{};
            const int64_t end = n - i < stretch ? n : i + stretch;
            for (; i + width <= end; i += width) {
                const auto inside = load(p + i) > 0;
                sums += inside ? load(gradient + i) : zero;
                counts += inside ? one : zero;
            }
            sum += folded<T>(sums);
        }
        double count = folded<T>(counts);
        for (; i < n; ++i) {
            sum += p[i] > 0 ? double(gradient[i]) : 0;
            count += p[i] > 0;
        }
        const Vector<T> mean = broadcast(T(sum / count));
        for (i = 0; i + width <= n; i += width) {
            const Vector<T> weight = load(p + i);
            store(out + i, weight > 0 ? load(gradient + i) - mean : weight);
        }
        for (; i < n; ++i) out[i] = p[i] > 0 ? gradient[i] - mean[0] : p[i];
    }
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
