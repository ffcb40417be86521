// SPDX-License-Identifier: Apache-2.0
// One grid of TVMax in a block's scratch: logits, the dual variable of every edge, fused groups.
#pragma once

#include "../native/cuda_block.cuh"

namespace saccade {
namespace cuda {

// A logit at or below it is a masked cell.
constexpr float kMaskedAtMost = -1e8f;

// What a cell knows; its masked neighbors are counted in the bits from kLoweredShift on.
constexpr unsigned char kHasRight = 1, kHasDown = 2, kFusedRight = 4, kFusedDown = 8, kLive = 16;
constexpr int kLoweredShift = 5;

// Values that differ by less than this part of lam count as equal.
constexpr double kTie = 5e-7;

// Nine words and the flags.
constexpr size_t kBytesACell = 9 * 4 + 1;

// Values that can be added in any order with one answer: multiples of a power of two.
typedef unsigned long long Fixed;

struct Grid {
    int cells, width;
    float lam;
    float *work0, *work1, *work2, *work3;  // two of them make one array of float64
    float *z, *right, *down;               // logits; u of the edges to the right and downwards
    int *label, *count;
    unsigned char *flags;
    double top, scale;

    // `most` cells lie in the scratch; this grid has rows x columns of them.
    __device__ Grid(char *memory, size_t most, int rows, int columns, float bound)
        : cells(rows * columns), width(columns), lam(bound), top(0), scale(1) {
        float *words = reinterpret_cast<float *>(memory);
        work0 = words, work1 = words + most, work2 = words + 2 * most, work3 = words + 3 * most;
        z = words + 4 * most, right = words + 5 * most, down = words + 6 * most;
        label = reinterpret_cast<int *>(words + 7 * most);
        count = reinterpret_cast<int *>(words + 8 * most);
        flags = reinterpret_cast<unsigned char *>(words + 9 * most);
    }

    // The sums over groups, then the means, cell by cell.
    __device__ Fixed *sums() const { return reinterpret_cast<Fixed *>(work0); }
    __device__ double *mean() const { return reinterpret_cast<double *>(work2); }

    // Reads the logits; false for a grid whose answer is NaN.
    template <class T>
    __device__ bool read(const T *from, int64_t stride) {
        bool broken = false;
        double highest = -CUDART_INF, lowest = -CUDART_INF;
        for (int i = threadIdx.x; i < cells; i += blockDim.x) {
            const float value = widened(from[i / width * stride + i % width]);
            const bool live = value > kMaskedAtMost;
            z[i] = value;
            right[i] = down[i] = 0.0f;
            broken |= isnan(value) || value == CUDART_INF_F;
            if (live) highest = fmax(highest, double(value)), lowest = fmax(lowest, -double(value));
        }
        broken = __syncthreads_or(broken);
        top = block_largest(highest);
        lowest = -block_largest(lowest);
        if (broken || !(top > -CUDART_INF)) return false;
        const int rows = cells / width;
        for (int i = threadIdx.x; i < cells; i += blockDim.x) {
            const int row = i / width, column = i % width;
            unsigned char flag = 0;
            if (live(i)) {
                flag = kLive;
                meet(column > 0, i - 1, 0, flag);
                meet(row > 0, i - width, 0, flag);
                meet(column + 1 < width, i + 1, kHasRight, flag);
                meet(row + 1 < rows, i + width, kHasDown, flag);
            }
            flags[i] = flag;
        }
        // The sum of all values of z - D'u below the top stays under 2^62.
        scale = scalbn(1.0, 60 - ilogb((top - lowest + 8.0 * double(lam) + 1e-30) * cells));
        __syncthreads();
        return true;
    }

    __device__ bool live(int i) const { return z[i] > kMaskedAtMost; }

    // A live neighbor shares an edge; a masked one lowers this cell by lam.
    __device__ void meet(bool there, int neighbor, unsigned char edge, unsigned char &flag) const {
        if (!there) return;
        flag = live(neighbor) ? flag | edge : flag + (1 << kLoweredShift);
    }

    // (D'u)_i; an edge that does not exist carries 0.
    __device__ float divergence(const float *u, const float *v, int i) const {
        float sum = u[i] + v[i];
        if (i > 0) sum -= u[i - 1];
        if (i >= width) sum -= v[i - width];
        return sum;
    }

    __device__ double supply(int i) const {
        return double(z[i]) - top - double(lam) * (flags[i] >> kLoweredShift);
    }

    // (z - D'u)_i below the top, in float64.
    __device__ double value(int i) const {
        double sum = double(right[i]) + down[i];
        if (i > 0) sum -= right[i - 1];
        if (i >= width) sum -= down[i - width];
        return supply(i) - sum;
    }

    __device__ float clipped(float u) const { return fminf(fmaxf(u, -lam), lam); }

    // One accelerated step of the edge from i to j. The difference of logits comes first: it is
    // exact for close ones, however large they are.
    __device__ void ascend(float *ahead, float *u, const float *flow, int i, int j,
                           float push) const {
        const int lowered = (flags[i] >> kLoweredShift) - (flags[j] >> kLoweredShift);
        const float slope = (z[i] - z[j]) - lam * float(lowered) - (flow[i] - flow[j]);
        const float before = u[i], after = clipped(ahead[i] + 0.125f * slope);
        u[i] = after;
        ahead[i] = after + push * (after - before);
    }

    __device__ float laplacian(const float *x, int i) const {
        float sum = 0.0f;
        if (flags[i] & kFusedRight) sum += x[i] - x[i + 1];
        if (flags[i] & kFusedDown) sum += x[i] - x[i + width];
        if (i > 0 && (flags[i - 1] & kFusedRight)) sum += x[i] - x[i - 1];
        if (i >= width && (flags[i - width] & kFusedDown)) sum += x[i] - x[i - width];
        return sum;
    }

    // How many times the step of phi (work0) from i to j the edge has room for.
    __device__ double room(float u, int i, int j) const {
        const double step = double(work0[i]) - work0[j];
        return step == 0 ? 1e30 : ((step > 0 ? double(lam) : -double(lam)) - u) / step;
    }

    __device__ float moved_right(int i, float step) const {
        if (!(flags[i] & kFusedRight)) return right[i];
        return clipped(right[i] + step * (work0[i] - work0[i + 1]));
    }

    __device__ float moved_down(int i, float step) const {
        if (!(flags[i] & kFusedDown)) return down[i];
        return clipped(down[i] + step * (work0[i] - work0[i + width]));
    }

    // 1/2 ||z - D'u||^2 after a step along D phi.
    __device__ double objective(float step) const {
        double sum = 0;
        for (int i = threadIdx.x; i < cells; i += blockDim.x) {
            if (!(flags[i] & kLive)) continue;
            double flow = double(moved_right(i, step)) + moved_down(i, step);
            if (i > 0) flow -= moved_right(i - 1, step);
            if (i >= width) flow -= moved_down(i - width, step);
            const double left = supply(i) - flow;
            sum += 0.5 * left * left;
        }
        return block_sum(sum);
    }

    // An edge strictly inside its bounds fuses its cells. At a tie it may stop at a bound by less
    // than the rounding of float32; to fuse such cells costs a square of it, not to fuse them the
    // gap of two unequal cells.
    __device__ bool fuses(float u, int i, int j) const {
        if (fabsf(u) < lam) return true;
        if (lam == 0.0f) return false;
        const double step = value(i) - value(j);
        return (u > 0.0f ? step : -step) < kTie * lam;
    }

    // A group is named after its first cell.
    __device__ void label_groups() const {
        for (int i = threadIdx.x; i < cells; i += blockDim.x) {
            unsigned char flag = flags[i] & ~(kFusedRight | kFusedDown);
            if (flag & kHasRight && fuses(right[i], i, i + 1)) flag |= kFusedRight;
            if (flag & kHasDown && fuses(down[i], i, i + width)) flag |= kFusedDown;
            label[i] = flag;  // neighbors still read the old flags
        }
        __syncthreads();
        for (int i = threadIdx.x; i < cells; i += blockDim.x) {
            flags[i] = static_cast<unsigned char>(label[i]);
            label[i] = i;
        }
        int changed = 1;
        while (__syncthreads_or(changed)) {
            changed = 0;
            for (int i = threadIdx.x; i < cells; i += blockDim.x) {
                if (flags[i] & kFusedRight) changed |= join(i, i + 1);
                if (flags[i] & kFusedDown) changed |= join(i, i + width);
            }
        }
    }

    // Lowers the labels of both cells, and of the cells that these are named after.
    __device__ int join(int i, int j) const {
        volatile int *name = label;
        const int a = name[i], b = name[j];
        int least = a < b ? a : b;
        const int further = name[least];
        least = further < least ? further : least;
        if (a == least && b == least) return 0;
        atomicMin(&label[a], least);
        atomicMin(&label[b], least);
        atomicMin(&label[i], least);
        atomicMin(&label[j], least);
        return 1;
    }

    __device__ void average_groups() const {
        for (int i = threadIdx.x; i < cells; i += blockDim.x) {
            sums()[i] = 0;
            count[i] = 0;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < cells; i += blockDim.x) {
            if (!(flags[i] & kLive)) continue;
            atomicAdd(&sums()[label[i]], Fixed(__double2ll_rn(value(i) * scale)));
            atomicAdd(&count[label[i]], 1);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < cells; i += blockDim.x) {
            if (!(flags[i] & kLive)) continue;
            const long long sum = static_cast<long long>(sums()[label[i]]);
            mean()[i] = double(sum) / scale / count[label[i]];
        }
        __syncthreads();
    }

    __device__ double gap() const {
        double sum = 0;
        for (int i = threadIdx.x; i < cells; i += blockDim.x) {
            if (!(flags[i] & kLive)) continue;
            const double off = value(i) - mean()[i];
            sum += 0.5 * off * off;
            if (flags[i] & kHasRight) sum += slack(right[i], mean()[i] - mean()[i + 1]);
            if (flags[i] & kHasDown) sum += slack(down[i], mean()[i] - mean()[i + width]);
        }
        return block_sum(sum);
    }

    __device__ double slack(float u, double step) const {
        return double(lam) * fabs(step) - double(u) * step;
    }
};

}  // namespace cuda
}  // namespace saccade
