// SPDX-License-Identifier: Apache-2.0
// SvPNFast on a GPU: the power iteration of each matrix by one block, the matrix in shared memory.
#pragma once

#include "../native/cuda_block.cuh"

namespace saccade {
namespace cuda {

struct SvPNFastSettings {
    float alpha;
    int64_t singular_values, iterations;
    float epsilon;
};

// A vector shorter than it is not lengthened to 1.
constexpr double kSmallestNorm = 1e-12;

// What is left of a matrix, what was found of it, and the vectors of one direction. Rows of an odd
// number of words, so that threads on neighbouring rows meet different memory banks.
struct Peeled {
    int m, n, stride;
    float *rest, *found, *u, *v;

    __device__ Peeled(char *memory, int rows, int columns)
        : m(rows), n(columns), stride(columns | 1), rest(reinterpret_cast<float *>(memory)) {
        found = rest + size_t(m) * stride;
        u = found + size_t(m) * stride;
        v = u + m;
    }

    // to = rest from (or its transpose), made a unit vector; answers to . rest from. Sums of
    // squares in float64 neither overflow nor vanish.
    __device__ float multiply(bool transposed, const float *from, float *to) const {
        const int size = transposed ? n : m, across = transposed ? m : n;
        const int step = transposed ? stride : 1, start = transposed ? 1 : stride;
        double square = 0;
        for (int i = threadIdx.x; i < size; i += blockDim.x) {
            float sum = 0.0f;
            for (int j = 0; j < across; ++j) sum += rest[i * start + j * step] * from[j];
            to[i] = sum;
            square += double(sum) * sum;
        }
        square = block_sum(square);
        const double norm = sqrt(square);
        // NaN fails the comparison and so stays.
        const double divisor = norm <= kSmallestNorm ? kSmallestNorm : norm;
        for (int i = threadIdx.x; i < size; i += blockDim.x) to[i] = float(to[i] / divisor);
        __syncthreads();
        return float(square / divisor);
    }

    __device__ void peel(float s, float power) const {
        for (int at = threadIdx.x; at < m * n; at += blockDim.x) {
            const int row = at / n, column = at % n;
            const float outer = u[row] * v[column];
            found[row * stride + column] += power * outer;
            rest[row * stride + column] -= s * outer;
        }
        __syncthreads();
    }
};

inline size_t peeled_bytes(int64_t m, int64_t n) {
    return aligned16(size_t(2 * m * (n | 1) + m + n) * sizeof(float));
}

template <class T>
__global__ void __launch_bounds__(256)
    svpn_fast_matrices(const T *in, const T *v0, T *out, int64_t count, int m, int n,
                       SvPNFastSettings settings, char *workspace, size_t bytes) {
    const Peeled q(scratch_of_block(workspace, bytes), m, n);
    const int elements = m * n;
    const int64_t directions = settings.singular_values == 0 ? int64_t(m < n ? m : n)
                                                             : settings.singular_values;
    for (int64_t matrix = blockIdx.x; matrix < count; matrix += gridDim.x) {
        for (int at = threadIdx.x; at < elements; at += blockDim.x) {
            q.rest[at / n * q.stride + at % n] = widened(in[matrix * elements + at]);
            q.found[at / n * q.stride + at % n] = 0.0f;
        }
        float s = 0.0f;
        for (int64_t direction = 0; direction < directions; ++direction) {
            for (int i = threadIdx.x; i < n; i += blockDim.x) q.v[i] = widened(v0[i]);
            __syncthreads();
            for (int64_t i = 0; i < settings.iterations; ++i) {
                q.multiply(false, q.v, q.u);
                s = q.multiply(true, q.u, q.v);
            }
            q.peel(s, powf(s, settings.alpha));
        }
        const float divisor = powf(s, 1.0f - settings.alpha) + settings.epsilon;
        const float share = settings.singular_values > 0 && divisor > 0.0f ? 1.0f : 0.0f;
        for (int at = threadIdx.x; at < elements; at += blockDim.x) {
            const int place = at / n * q.stride + at % n;
            const float scaled = share > 0.0f ? q.rest[place] / divisor : 0.0f;
            out[matrix * elements + at] = narrowed<T>(q.found[place] + scaled);
        }
        __syncthreads();
    }
}

inline Scratch svpn_fast_scratch(int64_t count, int64_t m, int64_t n) {
    return {peeled_bytes(m, n), count};
}

template <class T>
cudaError_t svpn_fast(const T *q, const T *v0, T *y, int64_t count, int64_t m, int64_t n,
                      const SvPNFastSettings &settings, void *workspace, cudaStream_t stream) {
    const Scratch scratch = svpn_fast_scratch(count, m, n);
    return launch(svpn_fast_matrices<T>, scratch.blocks(), whole_warps(m > n ? m : n, 256),
                  scratch.shared(), stream, q, v0, y, count, int(m), int(n), settings,
                  scratch.place(workspace), scratch.bytes);
}

}  // namespace cuda
}  // namespace saccade
