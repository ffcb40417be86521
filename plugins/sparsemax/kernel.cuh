// SPDX-License-Identifier: Apache-2.0
// Sparsemax on a GPU: Newton's method on the threshold, as on the CPU, without sorting.
//
// The excess of a threshold t, sum(max(z - t, 0)) - 1, is convex and falls. Newton's steps from a t
// below the root rise to it and end after finitely many rounds, when the support stays the same.
// A row of up to 2,048 elements stays in the registers of a part of a warp: it is read once and
// written once. As soon as the support has at most one element per lane, which most rows reach
// after a round or two, the other elements are left out of the rounds.
// A longer row has a block of its own and is kept in shared memory while it fits.
#pragma once

#include "../native/cuda_block.cuh"

namespace saccade {
namespace cuda {

// The product of excess and support at least quarters in a round: 64 are more than any row needs.
constexpr int kNewtonRounds = 64;
constexpr int kShortThreads = 128;

// One step of the threshold; false when the support is the one of the round before.
inline __device__ bool newton_step(float sum, int count, float &threshold, int &previous) {
    threshold += (sum - 1.0f) / float(count > 0 ? count : 1);
    const bool moved = count != previous;
    previous = count;
    return moved;
}

// Gives each lane one element of the row's support, and the lanes that are left over -infinity.
// `own` counts this lane's elements of the support; all lanes together have at most kLanes.
template <int kLanes, int kElements>
__device__ float one_of_support(const float (&z)[kElements], float threshold, int own) {
    __shared__ float support[kShortThreads];
    const unsigned mask = lane_mask<kLanes>();
    const int lane = int(threadIdx.x) % kLanes;
    float *place = support + (int(threadIdx.x) - lane);
    place[lane] = -CUDART_INF_F;
    int next = lanes_before<kLanes>(own);
    __syncwarp(mask);
#pragma unroll
    for (int i = 0; i < kElements; ++i)
        if (z[i] - threshold > 0.0f) place[next++] = z[i];
    __syncwarp(mask);
    return place[lane];
}

// The remaining rounds, with one element per lane.
template <int kLanes>
__device__ float final_threshold(float z, float threshold, int previous) {
    for (int round = 0; round < kNewtonRounds; ++round) {
        const float over = z - threshold;
        const float sum = reduced<kLanes>(fmaxf(over, 0.0f), Sum());
        const int count = __popc(__ballot_sync(lane_mask<kLanes>(), over > 0.0f));
        if (!newton_step(sum, count, threshold, previous)) break;
    }
    return threshold;
}

template <class T, int kLanes, int kPack, int kChunks>
__global__ void __launch_bounds__(kShortThreads, 4)
    sparsemax_short(const T *x, T *y, int64_t rows, int n) {
    const int lane = int(threadIdx.x) % kLanes;
    const int64_t row =
        int64_t(blockIdx.x) * (blockDim.x / kLanes) + int64_t(threadIdx.x) / kLanes;
    if (row >= rows) return;
    const unsigned mask = lane_mask<kLanes>();
    const Pack<T, kPack> *in = reinterpret_cast<const Pack<T, kPack> *>(x + row * n);
    Pack<T, kPack> *out = reinterpret_cast<Pack<T, kPack> *>(y + row * n);
    const int packs = n / kPack;

    constexpr int kElements = kChunks * kPack;
    float z[kElements];
    float top = -CUDART_INF_F;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int at = chunk * kLanes + lane;
        Pack<T, kPack> read;
        if (at < packs) read = in[at];
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            z[chunk * kPack + i] = at < packs ? widened(read.of[i]) : -CUDART_INF_F;
            top = fmaxf(top, z[chunk * kPack + i]);
        }
    }
    top = reduced<kLanes>(top, Largest());
    bool broken = false;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
        z[i] -= top;
        // NaN where the element is NaN, and where the top is infinite.
        broken |= !(z[i] <= 0.0f);
    }
    broken = __any_sync(mask, broken);

    float threshold = -1.0f;
    int previous = 0;
    for (int round = 0; round < kNewtonRounds && !broken; ++round) {
        const float before = threshold;
        float sum = 0.0f;
        int own = 0;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            const float over = z[i] - before;
            sum += fmaxf(over, 0.0f);
            own += over > 0.0f ? 1 : 0;
        }
        sum = reduced<kLanes>(sum, Sum());
        const int count = lanes_sum<kLanes>(own);
        if (!newton_step(sum, count, threshold, previous)) break;
        // For a handful of elements per row, sorting them out costs more than a round.
        if (kLanes == 32 && count <= kLanes) {
            const float mine = one_of_support<kLanes>(z, before, own);
            threshold = final_threshold<kLanes>(mine, threshold, previous);
            break;
        }
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int at = chunk * kLanes + lane;
        Pack<T, kPack> answer;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const float weight = fmaxf(z[chunk * kPack + i] - threshold, 0.0f);
            answer.of[i] = narrowed<T>(broken ? CUDART_NAN_F : weight);
        }
        if (at < packs) out[at] = answer;
    }
}

// A row of a block: kept in shared memory where it fits, otherwise read again in each round.
template <class T, int kPack>
struct LongRow {
    const Pack<T, kPack> *in;
    float *cache;  // null: it does not fit
    int64_t packs;

    // Calls visit(pack, element of the pack, value) for this thread's part of the row.
    template <class Visit>
    __device__ void each(bool first, Visit visit) const {
        for (int64_t at = threadIdx.x; at < packs; at += blockDim.x) {
            const bool reads = first || cache == nullptr;
            Pack<T, kPack> read;
            if (reads) read = in[at];
            for (int i = 0; i < kPack; ++i) {
                const float value = reads ? widened(read.of[i]) : cache[i * packs + at];
                if (first && cache != nullptr) cache[i * packs + at] = value;
                visit(at, i, value);
            }
        }
    }
};

template <class T, int kPack>
__global__ void __launch_bounds__(512, 1)
    sparsemax_long(const T *x, T *y, int64_t rows, int64_t n, bool cached) {
    float *cache = cached ? reinterpret_cast<float *>(dynamic_memory()) : nullptr;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const LongRow<T, kPack> z{reinterpret_cast<const Pack<T, kPack> *>(x + row * n), cache,
                                  n / kPack};
        float top = -CUDART_INF_F;
        z.each(true, [&](int64_t, int, float value) { top = fmaxf(top, value); });
        top = block_largest(top);
        bool broken = false;
        z.each(false, [&](int64_t, int, float value) { broken |= !(value - top <= 0.0f); });
        broken = __syncthreads_or(broken);

        float threshold = -1.0f;
        int previous = 0;
        for (int round = 0; round < kNewtonRounds && !broken; ++round) {
            float sum = 0.0f;
            int count = 0;
            z.each(false, [&](int64_t, int, float value) {
                const float over = value - top - threshold;
                sum += fmaxf(over, 0.0f);
                count += over > 0.0f ? 1 : 0;
            });
            sum = block_sum(sum);
            count = block_sum(count);
            if (!newton_step(sum, count, threshold, previous)) break;
        }
        Pack<T, kPack> *out = reinterpret_cast<Pack<T, kPack> *>(y + row * n);
        Pack<T, kPack> answer;
        z.each(false, [&](int64_t at, int i, float value) {
            const float weight = fmaxf(value - top - threshold, 0.0f);
            answer.of[i] = narrowed<T>(broken ? CUDART_NAN_F : weight);
            if (i == kPack - 1) out[at] = answer;
        });
    }
}

template <class T, int kLanes, int kPack, int kChunks>
cudaError_t sparsemax_with(const T *x, T *y, int64_t rows, int64_t n, cudaStream_t stream) {
    constexpr int kRows = kShortThreads / kLanes;
    // A launch has at most 2^31 - 1 blocks.
    constexpr int64_t kMost = kMostBlocks * kRows;
    for (int64_t first = 0; first < rows; first += kMost) {
        const int64_t left = rows - first < kMost ? rows - first : kMost;
        const cudaError_t status =
            launch(sparsemax_short<T, kLanes, kPack, kChunks>, (left + kRows - 1) / kRows,
                   kShortThreads, 0, stream, x + first * n, y + first * n, left, int(n));
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

template <class T, int kPack>
cudaError_t sparsemax_packed(const T *x, T *y, int64_t rows, int64_t n, cudaStream_t stream) {
    const int64_t packs = n / kPack;
    // As few packs a lane as hold the row.
    constexpr int k = kPack == 1 ? 4 : 1;
    if (packs <= 8 * k) return sparsemax_with<T, 8, kPack, k>(x, y, rows, n, stream);
    if (packs <= 64 * k) return sparsemax_with<T, 32, kPack, 2 * k>(x, y, rows, n, stream);
    if (packs <= 128 * k) return sparsemax_with<T, 32, kPack, 4 * k>(x, y, rows, n, stream);
    if (packs <= 256 * k) return sparsemax_with<T, 32, kPack, 8 * k>(x, y, rows, n, stream);
    const bool cached = size_t(n) * sizeof(float) <= kSharedBytesUnasked;
    return launch(sparsemax_long<T, kPack>, rows, whole_warps(packs / 4, 512),
                  cached ? size_t(n) * sizeof(float) : 0, stream, x, y, rows, n, cached);
}

template <class T>
cudaError_t sparsemax(const T *x, T *y, int64_t rows, int64_t n, cudaStream_t stream) {
    constexpr int kPack = int(16 / sizeof(T));
    const uintptr_t places = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y);
    if (places % 16 == 0 && n % kPack == 0)
        return sparsemax_packed<T, kPack>(x, y, rows, n, stream);
    return sparsemax_packed<T, 1>(x, y, rows, n, stream);
}

}  // namespace cuda
}  // namespace saccade
