// SPDX-License-Identifier: Apache-2.0
// Vectors of the widest kind that this build's instruction set has, by the compiler's own vector
// types: the same source for SSE2, AVX2, AVX-512 and NEON.
//
// Everything here and in the kernels lives in a namespace of the instruction set and uses no
// templates of the standard library: an inline function shared by two builds would be kept once
// by the linker, with instructions that a lesser CPU lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define SACCADE_VECTOR_BYTES 64
#elif defined(__AVX__)
#define SACCADE_VECTOR_BYTES 32
#else
#define SACCADE_VECTOR_BYTES 16
#endif

namespace saccade {
namespace SACCADE_TARGET {

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
    typedef float Vector __attribute__((vector_size(SACCADE_VECTOR_BYTES)));
    typedef int32_t Mask __attribute__((vector_size(SACCADE_VECTOR_BYTES)));
    static constexpr int width = SACCADE_VECTOR_BYTES / 4;
};

template <>
struct Lanes<double> {
    typedef double Vector __attribute__((vector_size(SACCADE_VECTOR_BYTES)));
    typedef int64_t Mask __attribute__((vector_size(SACCADE_VECTOR_BYTES)));
    static constexpr int width = SACCADE_VECTOR_BYTES / 8;
};

template <class T>
using Vector = typename Lanes<T>::Vector;

template <class T>
static inline Vector<T> load(const T *from) {
    Vector<T> value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
static inline void store(T *to, Vector<T> value) {
    std::memcpy(to, &value, sizeof value);
}

template <class T>
static inline Vector<T> broadcast(T value) {
    return Vector<T>{} + value;
}

// The larger one; b where either is NaN.
template <class V>
static inline V larger(V a, V b) {
    return a > b ? a : b;
}

template <class V>
static inline V smaller(V a, V b) {
    return a < b ? a : b;
}

template <class T>
static inline T sum_of(Vector<T> value) {
    T total = 0;
    for (int i = 0; i < Lanes<T>::width; ++i) total += value[i];
    return total;
}

template <class T>
static inline T largest_of(Vector<T> value) {
    T top = value[0];
    for (int i = 1; i < Lanes<T>::width; ++i) top = value[i] > top ? value[i] : top;
    return top;
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
