// SPDX-License-Identifier: Apache-2.0
// Lanes chosen by a comparison, packed side by side, and squares of vectors transposed: what turns
// rows with few numbers of interest into vectors that hold one row a lane.
#pragma once

#include "../native/lanes.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace saccade {
namespace SACCADE_TARGET {

// Bit i: lane i of a is above that of b, or one of them is NaN.
static inline uint32_t bits_above(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NLE_UQ);
#elif defined(__AVX__)
    return uint32_t(_mm256_movemask_ps((__m256) ~(a <= b)));
#elif defined(__SSE2__)
    return uint32_t(_mm_movemask_ps((__m128) ~(a <= b)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < Lanes<float>::width; ++i) bits |= uint32_t(!(a[i] <= b[i])) << i;
    return bits;
#endif
}

static inline uint32_t bits_above(Vector<double> a, Vector<double> b) {
#if defined(__AVX512F__)
    return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_NLE_UQ);
#elif defined(__AVX__)
    return uint32_t(_mm256_movemask_pd((__m256d) ~(a <= b)));
#elif defined(__SSE2__)
    return uint32_t(_mm_movemask_pd((__m128d) ~(a <= b)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < Lanes<double>::width; ++i) bits |= uint32_t(!(a[i] <= b[i])) << i;
    return bits;
#endif
}

// The chosen lanes side by side; what follows them is undefined.
#if defined(__AVX512F__)
static inline Vector<float> packed(Vector<float> value, uint32_t bits) {
    return (Vector<float>)_mm512_maskz_compress_ps(__mmask16(bits), (__m512)value);
}

static inline Vector<double> packed(Vector<double> value, uint32_t bits) {
    return (Vector<double>)_mm512_maskz_compress_pd(__mmask8(bits), (__m512d)value);
}
#elif defined(__AVX2__)
// For each choice of 8 lanes their numbers, a byte each; and for each of 4 wide lanes the choice
// of their halves.
struct Packing {
    uint64_t order[256];
    uint8_t halves[16];

    constexpr Packing() : order(), halves() {
        for (int bits = 0; bits < 256; ++bits)
            for (int lane = 0, place = 0; lane < 8; ++lane)
                if (bits >> lane & 1) order[bits] |= uint64_t(lane) << (8 * place++);
        for (int bits = 0; bits < 16; ++bits)
            for (int lane = 0; lane < 4; ++lane)
                if (bits >> lane & 1) halves[bits] |= uint8_t(3 << (2 * lane));
    }
};

static constexpr Packing packing{};

static inline Vector<float> packed(Vector<float> value, uint32_t bits) {
    const __m128i order = _mm_cvtsi64_si128(int64_t(packing.order[bits]));
    return (Vector<float>)_mm256_permutevar8x32_ps((__m256)value, _mm256_cvtepu8_epi32(order));
}

static inline Vector<double> packed(Vector<double> value, uint32_t bits) {
    return (Vector<double>)packed((Vector<float>)value, packing.halves[bits]);
}
#endif

// Writes the chosen lanes to `to` and answers how many; a whole vector of room is needed.
template <class T>
static inline int append(T *to, Vector<T> value, uint32_t bits) {
#if defined(__AVX2__)
    store(to, packed(value, bits));
    return __builtin_popcount(bits);
#else
    int count = 0;
    for (; bits != 0; bits &= bits - 1) to[count++] = value[__builtin_ctz(bits)];
    return count;
#endif
}

// Lanes first, first + 1, ... of a and of b in turn.
template <class T>
static inline Vector<T> interleaved(Vector<T> a, Vector<T> b, int first) {
    constexpr int width = Lanes<T>::width;
#if defined(__clang__)
    Vector<T> value;
    for (int i = 0; i < width; ++i) value[i] = i % 2 ? b[first + i / 2] : a[first + i / 2];
    return value;
#else
    typename Lanes<T>::Mask order;
    for (int i = 0; i < width; ++i) order[i] = first + i / 2 + i % 2 * width;
    return __builtin_shuffle(a, b, order);
#endif
}

// A square of as many vectors as a vector has lanes: each round is a perfect shuffle.
template <class T>
static inline void transpose(Vector<T> *square) {
    constexpr int width = Lanes<T>::width;
    for (int round = 1; round < width; round *= 2) {
        Vector<T> next[width];
        for (int i = 0; i < width / 2; ++i) {
            next[2 * i] = interleaved<T>(square[i], square[i + width / 2], 0);
            next[2 * i + 1] = interleaved<T>(square[i], square[i + width / 2], width / 2);
        }
        for (int i = 0; i < width; ++i) square[i] = next[i];
    }
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
