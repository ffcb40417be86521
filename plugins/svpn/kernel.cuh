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
// Its square is finite; beyond it the angle is 0 in float32.
constexpr float kLargestRatio = 1e15f;

inline __device__ float norm_with_one(float x) {
    const float square = 1.0f + x * x;
    return square * rsqrtf(square);
}

// Words from one column to the next: an odd number of eights. The eight lanes of a pair read eight
// neighboring words, and the pairs of a warp work on neighboring columns: they all meet different
// memory banks.
inline __host__ __device__ int64_t column_stride(int64_t length) {
    return (((length + kPairLanes - 1) / kPairLanes) | 1) * kPairLanes;
}

// A narrow matrix in scratch: `columns` columns of `length`, and V, both column by column, with
// zeros up to the stride.
struct Narrow {
    int length, columns, stride, v_stride;
    float *a, *v, *gain;

    __device__ Narrow(char *memory, int m, int n)
        : length(m > n ? m : n), columns(m > n ? n : m), stride(int(column_stride(length))),
          v_stride(int(column_stride(columns))), a(reinterpret_cast<float *>(memory)) {
        v = a + size_t(stride) * columns;
        gain = v + size_t(v_stride) * columns;
    }
};

inline size_t narrow_bytes(int64_t m, int64_t n) {
    const int64_t length = m > n ? m : n, columns = m > n ? n : m;
    const int64_t words = column_stride(length) + column_stride(columns) + 1;
    return aligned16(size_t(words * columns) * sizeof(float));
}

// This lane's part of two columns. With kEach > 0 it is in registers: a column has at most
// 8 kEach elements, and is read and written once.
template <int kEach>
struct PairPart {
    float x[kEach], y[kEach];

    __device__ void read(const float *a, const float *b, int size) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int at = i * kPairLanes + int(threadIdx.x) % kPairLanes;
            x[i] = i * kPairLanes < size ? a[at] : 0.0f;
            y[i] = i * kPairLanes < size ? b[at] : 0.0f;
        }
    }

    __device__ void dots(float &aa, float &bb, float &ab) const {
#pragma unroll
        for (int i = 0; i < kEach; ++i) aa += x[i] * x[i], bb += y[i] * y[i], ab += x[i] * y[i];
    }

    __device__ void turn(float *a, float *b, int size, float cosine, float sine) const {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int at = i * kPairLanes + int(threadIdx.x) % kPairLanes;
            if (i * kPairLanes >= size) continue;
            a[at] = cosine * x[i] - sine * y[i];
            b[at] = sine * x[i] + cosine * y[i];
        }
    }
};

// Longer columns stay where they are.
template <>
struct PairPart<0> {
    const float *x, *y;
    int size;

    __device__ void read(const float *a, const float *b, int length) {
        x = a, y = b, size = length;
    }

    __device__ void dots(float &aa, float &bb, float &ab) const {
        for (int i = int(threadIdx.x) % kPairLanes; i < size; i += kPairLanes)
            aa += x[i] * x[i], bb += y[i] * y[i], ab += x[i] * y[i];
    }

    __device__ void turn(float *a, float *b, int, float cosine, float sine) const {
        for (int i = int(threadIdx.x) % kPairLanes; i < size; i += kPairLanes) {
            const float before = x[i], other = y[i];
            a[i] = cosine * before - sine * other;
            b[i] = sine * before + cosine * other;
        }
    }
};

// Makes two columns orthogonal by the eight lanes of the caller; whether they were not.
template <int kEach>
__device__ bool turn_pair(const Narrow &q, int first, int second, float least) {
    float *a = q.a + first * q.stride, *b = q.a + second * q.stride;
    float *va = q.v + first * q.v_stride, *vb = q.v + second * q.v_stride;
    PairPart<kEach> part, of_v;
    part.read(a, b, q.length);
    float aa = 0.0f, bb = 0.0f, ab = 0.0f;
    part.dots(aa, bb, ab);
    aa = reduced<kPairLanes>(aa, Sum());
    bb = reduced<kPairLanes>(bb, Sum());
    ab = reduced<kPairLanes>(ab, Sum());
    if (fminf(aa, bb) <= least || fabsf(ab) * rsqrtf(aa) * rsqrtf(bb) <= kOrthogonal) return false;
    // An angle that is off in the last bits is made up for in the next sweep; cosine and sine come
    // from the same tangent, so the turn itself stays orthogonal.
    const float ratio = __fdividef(bb - aa, 2.0f * ab), size = fminf(fabsf(ratio), kLargestRatio);
    const float tangent =
        copysignf(__fdividef(1.0f, size + norm_with_one(size)), ratio);
    const float cosine = rsqrtf(1.0f + tangent * tangent), sine = cosine * tangent;
    part.turn(a, b, q.length, cosine, sine);
    of_v.read(va, vb, q.columns);
    of_v.turn(va, vb, q.columns, cosine, sine);
    return true;
}

template <int kEach>
__device__ void make_orthogonal(const Narrow &q, float least) {
    // An odd number of columns plays against one that does not exist.
    const int players = q.columns + q.columns % 2, others = players - 1;
    const int teams = int(blockDim.x) / kPairLanes;
    bool turned = players > 1;
    for (int sweep = 0; sweep < kMostSweeps && __syncthreads_or(turned); ++sweep) {
        turned = false;
        for (int round = 0; round < others; ++round) {
            // Unrolled it needs more registers than there are, and most teams have one pair.
#pragma unroll 1
            for (int pair = int(threadIdx.x) / kPairLanes; pair < players / 2; pair += teams) {
                const int up = round + pair, down = round - pair;
                const int first = pair == 0 ? others : up < others ? up : up - others;
                const int second = down < 0 ? down + others : down;
                if (first < q.columns && second < q.columns)
                    turned |= turn_pair<kEach>(q, first < second ? first : second,
                                               first < second ? second : first, least);
            }
            __syncthreads();
        }
    }
}

// The power of each singular value that is still missing: A V has the first one in it.
inline __device__ void find_gains(const Narrow &q, float alpha) {
    float largest = 0.0f;
    const int lane = int(threadIdx.x) % kPairLanes, teams = int(blockDim.x) / kPairLanes;
    for (int c = int(threadIdx.x) / kPairLanes; c < q.columns; c += teams) {
        double square = 0;
        for (int i = lane; i < q.length; i += kPairLanes) {
            const float each = q.a[size_t(c) * q.stride + i];
            square += double(each) * each;
        }
        const float norm = float(sqrt(reduced<kPairLanes>(square, Sum())));
        if (lane == 0) q.gain[c] = norm;
        largest = fmaxf(largest, norm);
    }
    largest = block_largest(largest);
    for (int c = threadIdx.x; c < q.columns; c += blockDim.x) {
        const float s = q.gain[c];
        q.gain[c] = s > kRankThreshold * largest ? powf(s, alpha - 1.0f) : 0.0f;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < q.stride * q.columns; i += blockDim.x)
        q.a[i] *= q.gain[i / q.stride];
    __syncthreads();
}

// Reads a matrix into the narrow form; its largest entry, NaN if one of them is not finite.
template <class T>
__device__ float read_matrix(const Narrow &q, const T *from, int n, bool turned) {
    float largest = 0.0f;
    bool broken = false;
    for (int at = threadIdx.x; at < q.stride * q.columns; at += blockDim.x)
        if (at % q.stride >= q.length) q.a[at] = 0.0f;
    for (int at = threadIdx.x; at < q.length * q.columns; at += blockDim.x) {
        const int row = at / n, column = at % n;
        const float value = widened(from[at]);
        broken |= !isfinite(value);
        largest = fmaxf(largest, fabsf(value));
        q.a[turned ? row * q.stride + column : column * q.stride + row] = value;
    }
    broken = __syncthreads_or(broken);
    largest = block_largest(largest);
    return broken ? CUDART_NAN_F : largest;
}

// Entries of at most 1 by a power of two: exact, and no square overflows or vanishes. V becomes
// the identity. Answers the sum of squares.
inline __device__ float scale_matrix(const Narrow &q, int exponent) {
    float square = 0.0f;
    for (int at = threadIdx.x; at < q.stride * q.columns; at += blockDim.x) {
        q.a[at] = scalbnf(q.a[at], -exponent);
        square += q.a[at] * q.a[at];
    }
    for (int at = threadIdx.x; at < q.v_stride * q.columns; at += blockDim.x)
        q.v[at] = at % (q.v_stride + 1) == 0 ? 1.0f : 0.0f;
    return block_sum(square);
}

// Threads of a block, and blocks of a multiprocessor that registers are shared out for.
template <int kEach>
struct Threads {
    static constexpr int kMost = kEach > 0 ? 4 * kEach * kPairLanes : 256;
    static constexpr int kBlocks = kEach == 2 ? 16 : kEach == 3 ? 10 : kEach == 5 ? 4 : 2;
};

template <class T, int kEach>
__global__ void __launch_bounds__(Threads<kEach>::kMost, Threads<kEach>::kBlocks)
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
        make_orthogonal<kEach>(q, kNegligible * kNegligible * square);
        find_gains(q, alpha);
        const float size = exp2f(alpha * float(exponent));
        for (int at = threadIdx.x; at < elements; at += blockDim.x) {
            const int row = at / n, column = at % n;
            const int along = turned ? column : row, across = turned ? row : column;
            float sum = 0.0f;
            for (int c = 0; c < q.columns; ++c)
                sum += q.a[size_t(c) * q.stride + along] * q.v[size_t(c) * q.v_stride + across];
            to[at] = narrowed<T>(sum * size);
        }
        __syncthreads();
    }
}

inline Scratch svpn_scratch(int64_t count, int64_t m, int64_t n) {
    return {narrow_bytes(m, n), count};
}

template <class T, int kEach>
cudaError_t svpn_with(const T *q, T *y, int64_t count, int64_t m, int64_t n, float alpha,
                      void *workspace, cudaStream_t stream) {
    const Scratch scratch = svpn_scratch(count, m, n);
    const int64_t pairs = ((m < n ? m : n) + 1) / 2;
    return launch(svpn_matrices<T, kEach>, scratch.blocks(),
                  whole_warps(pairs * kPairLanes, Threads<kEach>::kMost),
                  scratch.shared(), stream, q, y, count, int(m), int(n), alpha,
                  scratch.place(workspace), scratch.bytes);
}

template <class T>
cudaError_t svpn(const T *q, T *y, int64_t count, int64_t m, int64_t n, float alpha,
                 void *workspace, cudaStream_t stream) {
    const int64_t length = m > n ? m : n;
    if (length <= 16) return svpn_with<T, 2>(q, y, count, m, n, alpha, workspace, stream);
    if (length <= 24) return svpn_with<T, 3>(q, y, count, m, n, alpha, workspace, stream);
    if (length <= 40) return svpn_with<T, 5>(q, y, count, m, n, alpha, workspace, stream);
    if (length <= 64) return svpn_with<T, 8>(q, y, count, m, n, alpha, workspace, stream);
    return svpn_with<T, 0>(q, y, count, m, n, alpha, workspace, stream);
}

}  // namespace cuda
}  // namespace saccade
