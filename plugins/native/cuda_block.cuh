// SPDX-License-Identifier: Apache-2.0
// What all CUDA kernels use: elements read as float32 and written back, and reductions over a part
// of a warp and over a block. Their order is fixed, so every run gives the same bits.
#pragma once

#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda_launch.cuh"

namespace saccade {
namespace cuda {

inline __device__ float widened(float value) { return value; }
inline __device__ float widened(__half value) { return __half2float(value); }

template <class T>
__device__ T narrowed(float value);
template <>
inline __device__ float narrowed<float>(float value) {
    return value;
}
template <>
inline __device__ __half narrowed<__half>(float value) {
    return __float2half_rn(value);
}

// Neighboring elements that travel as one access.
template <class T, int kElements>
struct alignas(sizeof(T) * kElements) Pack {
    T of[kElements];
};

struct Sum {
    template <class V>
    __device__ V operator()(V a, V b) const {
        return a + b;
    }
};

// NaN loses against any number.
struct Largest {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
    __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

// The lanes of the warp that reduce together with this one: kLanes neighbors.
template <int kLanes>
__device__ unsigned lane_mask() {
    if (kLanes == 32) return 0xFFFFFFFFu;
    const unsigned first = (threadIdx.x % 32) / kLanes * kLanes;
    return ((1u << (kLanes % 32)) - 1u) << first;
}

template <int kLanes, class V, class Combine>
__device__ V reduced(V value, Combine combine) {
    const unsigned mask = lane_mask<kLanes>();
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
        value = combine(value, __shfl_xor_sync(mask, value, step));
    return value;
}

// Whole numbers have an instruction for it since compute capability 8.0.
template <int kLanes>
__device__ int lanes_sum(int value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (kLanes == 32) return __reduce_add_sync(0xFFFFFFFFu, value);
#endif
    return reduced<kLanes>(value, Sum());
}

// The sum over the lanes before this one.
template <int kLanes>
__device__ int lanes_before(int value) {
    const unsigned mask = lane_mask<kLanes>();
    const int lane = int(threadIdx.x) % kLanes;
    int sum = value;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
        const int lower = __shfl_up_sync(mask, sum, step, kLanes);
        if (lane >= step) sum += lower;
    }
    return sum - value;
}

// All threads of the block call it and get the answer; blocks are whole warps.
template <class V, class Combine>
__device__ V block_reduced(V value, Combine combine) {
    __shared__ V partial[32];
    value = reduced<32>(value, combine);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    V total = partial[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) total = combine(total, partial[warp]);
    __syncthreads();
    return total;
}

template <class V>
__device__ V block_sum(V value) {
    return block_reduced(value, Sum());
}

template <class V>
__device__ V block_largest(V value) {
    return block_reduced(value, Largest());
}

inline int whole_warps(int64_t threads, int most) {
    const int64_t rounded = (threads + 31) / 32 * 32;
    return int(rounded < 32 ? 32 : rounded > most ? most : rounded);
}

}  // namespace cuda
}  // namespace saccade
