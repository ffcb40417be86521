// SPDX-License-Identifier: Apache-2.0
// SvPN on a GPU: one-sided Jacobi, one block a matrix, in shared memory.
//
// The columns of A (of the transpose where that is the narrower one) are turned in pairs until all
// are orthogonal: A V = U S. The pairs of a round have no column in common, so each has eight
// lanes of its own; a round-robin tournament meets every pair once a sweep.
// Source: Brent and Luk 1985 (the order), Demmel and Veselic 1992 (the stopping rule).
#pragma once

#include "../native/cuda_block.cuh"

namespace saccade {
namespace cuda {

constexpr int kPairLanes = 8;
constexpr int kMostSweeps = 40;
// Cosine of two columns that count as orthogonal, and a column too short to matter.
constexpr float kOrthogonal = 5e-7f, kNegligible = 1e-8f;
constexpr float kRankThreshold = 1e-6f;

// A narrow matrix in scratch: `columns` columns of `length`, and V, both column by column.
struct Narrow {
    int length, columns;
    float *a, *v, *gain;

    __device__ Narrow(char *memory, int m, int n)
        : length(m > n ? m : n), columns(m > n ? n : m), a(reinterpret_cast<float *>(memory)) {
        v = a + size_t(length) * columns;
        gain = v + size_t(columns) * columns;
    }
};

inline size_t narrow_bytes(int64_t m, int64_t n) {
    const int64_t length = m > n ? m : n, columns = m > n ? n : m;
    return aligned16(size_t(length * columns + columns * columns + columns) * sizeof(float));
}

// Makes two columns orthogonal by the eight lanes of the caller; whether they were not.
inline __device__ bool turn_pair(const Narrow &q, int first, int second, float least) {
    const unsigned mask = lane_mask<kPairLanes>();
    const int lane = int(threadIdx.x) % kPairLanes;
    float *a = q.a + size_t(first) * q.length, *b = q.a + size_t(second) * q.length;
    float aa = 0.0f, bb = 0.0f, ab = 0.0f;
    for (int i = lane; i < q.length; i += kPairLanes) {
        aa += a[i] * a[i];
        bb += b[i] * b[i];
        ab += a[i] * b[i];
    }
    aa = reduced<kPairLanes>(aa, Sum());
    bb = reduced<kPairLanes>(bb, Sum());
    ab = reduced<kPairLanes>(ab, Sum());
    if (fminf(aa, bb) <= least || fabsf(ab) <= kOrthogonal * sqrtf(aa) * sqrtf(bb)) return false;
    const float ratio = (bb - aa) / (2.0f * ab);
    const float tangent = copysignf(1.0f, ratio) / (fabsf(ratio) + sqrtf(1.0f + ratio * ratio));
    const float cosine = rsqrtf(1.0f + tangent * tangent), sine = cosine * tangent;
    const auto turn = [&](float *x, float *y, int size) {
        for (int i = lane; i < size; i += kPairLanes) {
            const float before = x[i];
            x[i] = cosine * before - sine * y[i];
            y[i] = sine * before + cosine * y[i];
        }
    };
    turn(a, b, q.length);
    turn(q.v + size_t(first) * q.columns, q.v + size_t(second) * q.columns, q.columns);
    __syncwarp(mask);
    return true;
}

inline __device__ void make_orthogonal(const Narrow &q, float least) {
    // An odd number of columns plays against one that does not exist.
    const int players = q.columns + q.columns % 2, others = players - 1;
    const int teams = int(blockDim.x) / kPairLanes;
    bool turned = players > 1;
    for (int sweep = 0; sweep < kMostSweeps && __syncthreads_or(turned); ++sweep) {
        turned = false;
        for (int round = 0; round < others; ++round) {
            for (int pair = int(threadIdx.x) / kPairLanes; pair < players / 2; pair += teams) {
                const int first = pair == 0 ? others : (round + pair) % others;
                const int second = (round - pair + others) % others;
                if (first < q.columns && second < q.columns)
                    turned |= turn_pair(q, first < second ? first : second,
                                        first < second ? second : first, least);
            }
            __syncthreads();
        }
    }
}

// The power of each singular value that is still missing: A V has the first one in it.
inline __device__ void find_gains(const Narrow &q, float alpha) {
    float largest = 0.0f;
    for (int c = threadIdx.x; c < q.columns; c += blockDim.x) {
        double square = 0;
        for (int i = 0; i < q.length; ++i) {
            const float each = q.a[size_t(c) * q.length + i];
            square += double(each) * each;
        }
        q.gain[c] = float(sqrt(square));
        largest = fmaxf(largest, q.gain[c]);
    }
    largest = block_largest(largest);
    for (int c = threadIdx.x; c < q.columns; c += blockDim.x) {
        const float s = q.gain[c];
        q.gain[c] = s > kRankThreshold * largest ? powf(s, alpha - 1.0f) : 0.0f;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < q.length * q.columns; i += blockDim.x)
        q.a[i] *= q.gain[i / q.length];
    __syncthreads();
}

// Reads a matrix into the narrow form; its largest entry, NaN if one of them is not finite.
template <class T>
__device__ float read_matrix(const Narrow &q, const T *from, int n, bool turned) {
    float largest = 0.0f;
    bool broken = false;
    for (int at = threadIdx.x; at < q.length * q.columns; at += blockDim.x) {
        const int row = at / n, column = at % n;
        const float value = widened(from[at]);
        broken |= !isfinite(value);
        largest = fmaxf(largest, fabsf(value));
        q.a[turned ? row * q.length + column : column * q.length + row] = value;
    }
    broken = __syncthreads_or(broken);
    largest = block_largest(largest);
    return broken ? CUDART_NAN_F : largest;
}

// Entries of at most 1 by a power of two: exact, and no square overflows or vanishes. V becomes
// the identity. Answers the sum of squares.
inline __device__ float scale_matrix(const Narrow &q, int exponent) {
    float square = 0.0f;
    for (int at = threadIdx.x; at < q.length * q.columns; at += blockDim.x) {
        q.a[at] = scalbnf(q.a[at], -exponent);
        square += q.a[at] * q.a[at];
    }
    for (int at = threadIdx.x; at < q.columns * q.columns; at += blockDim.x)
        q.v[at] = at % (q.columns + 1) == 0 ? 1.0f : 0.0f;
    return block_sum(square);
}

template <class T>
__global__ void __launch_bounds__(256, 2)
    svpn_matrices(const T *in, T *out, int64_t count, int m, int n, float alpha, char *workspace,
                  size_t bytes) {
    const Narrow q(scratch_of_block(workspace, bytes), m, n);
    const bool turned = m < n;
    const int elements = m * n;
    for (int64_t matrix = blockIdx.x; matrix < count; matrix += gridDim.x) {
        T *to = out + matrix * elements;
        const float largest = read_matrix(q, in + matrix * elements, n, turned);
        if (!(largest > 0.0f)) {
            // A matrix of zeros is one of zeros, and one that is broken is one of NaN.
            for (int at = threadIdx.x; at < elements; at += blockDim.x)
                to[at] = narrowed<T>(largest);
            continue;
        }
        const int exponent = ilogbf(largest) + 1;
        const float square = scale_matrix(q, exponent);
        make_orthogonal(q, kNegligible * kNegligible * square);
        find_gains(q, alpha);
        const float size = exp2f(alpha * float(exponent));
        for (int at = threadIdx.x; at < elements; at += blockDim.x) {
            const int row = at / n, column = at % n;
            const int along = turned ? column : row, across = turned ? row : column;
            float sum = 0.0f;
            for (int c = 0; c < q.columns; ++c)
                sum += q.a[size_t(c) * q.length + along] * q.v[size_t(c) * q.columns + across];
            to[at] = narrowed<T>(sum * size);
        }
        __syncthreads();
    }
}

inline Scratch svpn_scratch(int64_t count, int64_t m, int64_t n) {
    return {narrow_bytes(m, n), count};
}

template <class T>
cudaError_t svpn(const T *q, T *y, int64_t count, int64_t m, int64_t n, float alpha,
                 void *workspace, cudaStream_t stream) {
    const Scratch scratch = svpn_scratch(count, m, n);
    const int64_t pairs = ((m < n ? m : n) + 1) / 2;
    return launch(svpn_matrices<T>, scratch.blocks(), whole_warps(pairs * kPairLanes, 256),
                  scratch.shared(), stream, q, y, count, int(m), int(n), alpha,
                  scratch.place(workspace), scratch.bytes);
}

}  // namespace cuda
}  // namespace saccade
