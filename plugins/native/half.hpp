// SPDX-License-Identifier: Apache-2.0
// Half precision to float32 and back, rounding to nearest even; by hardware where the build has it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace saccade {
namespace SACCADE_TARGET {

static inline float widened(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u;
    uint32_t fraction = half & 1023u;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7F800000u | (fraction << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else {
        // A subnormal is fraction * 2^-24, which float32 holds exactly.
        const float value = float(fraction) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float full;
    std::memcpy(&full, &bits, 4);
    return full;
}

static inline uint16_t narrowed(float full) {
    uint32_t bits;
    std::memcpy(&bits, &full, 4);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u) return uint16_t(sign | 0x7E00u);
    if (bits >= 0x477FF000u) return uint16_t(sign | 0x7C00u);  // rounds to 65,536 or more
    if (bits < 0x38800000u) {
        // Below the normal range: adding 0.5 makes float32 round at the 24th binary place.
        float value;
        std::memcpy(&value, &bits, 4);
        value += 0.5f;
        std::memcpy(&bits, &value, 4);
        return uint16_t(sign | (bits - 0x3F000000u));
    }
    const uint32_t odd = (bits >> 13) & 1u;
    return uint16_t(sign | ((bits + 0xFFFu + odd - 0x38000000u) >> 13));
}

static inline void widen(const uint16_t *half, float *full, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(full + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i))));
#endif
    for (; i < n; ++i) full[i] = widened(half[i]);
}

static inline void narrow(const float *full, uint16_t *half, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(full + i), 0));
#endif
    for (; i < n; ++i) half[i] = narrowed(full[i]);
}

}  // namespace SACCADE_TARGET
}  // namespace saccade
