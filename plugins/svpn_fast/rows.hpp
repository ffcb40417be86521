// SPDX-License-Identifier: Apache-2.0
// Rows of numbers as vectors of doubles: widened on the way in, narrowed on the way out.
#pragma once

#include "../native/lanes.hpp"

namespace saccade {
namespace SACCADE_TARGET {

using RowVector = Vector<double>;
constexpr int kRowStep = Lanes<double>::width;

// As many numbers of a type as a vector of doubles has.
template <class T>
struct Packed;

template <>
struct Packed<float> {
    typedef float Vector __attribute__((vector_size(SACCADE_VECTOR_BYTES / 2)));
};

template <>
struct Packed<double> {
    typedef double Vector __attribute__((vector_size(SACCADE_VECTOR_BYTES)));
};

// Each lane has that of its partner `distance` away.
static inline RowVector exchanged(RowVector value, int distance) {
#if defined(__clang__)
    RowVector other;
    for (int i = 0; i < kRowStep; ++i) other[i] = value[i ^ distance];
    return other;
#else
    Lanes<double>::Mask partner;
    for (int i = 0; i < kRowStep; ++i) partner[i] = i ^ distance;
    return __builtin_shuffle(value, partner);
#endif
}

// The sum of the lanes, in each of them.
static inline RowVector sum_everywhere(RowVector value) {
    for (int distance = kRowStep / 2; distance > 0; distance /= 2) {
        value += exchanged(value, distance);
    }
    return value;
}

// Calls body(j) so that vectors from j on cover n >= kRowStep numbers; the last may overlap.
template <class Body>
static inline void for_vectors(int64_t n, const Body &body) {
    for (int64_t j = 0; j + kRowStep <= n; j += kRowStep) body(j);
    if (n % kRowStep != 0) body(n - kRowStep);
}

// Fills the last vector up with zeros.
template <class T>
static inline void widen_row(const T *from, double *to, int64_t n) {
    store(to + (n - 1) / kRowStep * kRowStep, broadcast(0.0));
    if (n < kRowStep) {
        for (int64_t j = 0; j < n; ++j) to[j] = double(from[j]);
        return;
    }
    for_vectors(n, [=](int64_t j) {
        typename Packed<T>::Vector packed;
        std::memcpy(&packed, from + j, sizeof packed);
        store(to + j, __builtin_convertvector(packed, RowVector));
    });
}

// to = a_scale * a + b_scale * b + c; c may be null.
template <class T>
static inline void narrow_row(const double *a, double a_scale, const double *b, double b_scale,
                              const double *c, T *to, int64_t n) {
    if (n < kRowStep) {
        for (int64_t j = 0; j < n; ++j)
            to[j] = T(a_scale * a[j] + b_scale * b[j] + (c == nullptr ? 0.0 : c[j]));
        return;
    }
    for_vectors(n, [=](int64_t j) {
        RowVector value = a_scale * load(a + j) + b_scale * load(b + j);
        if (c != nullptr) value += load(c + j);
        const auto packed = __builtin_convertvector(value, typename Packed<T>::Vector);
        std::memcpy(to + j, &packed, sizeof packed);
    });
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
