// SPDX-License-Identifier: Apache-2.0
// TVMax on a GPU: one block a grid, everything in shared memory.
//
// The CPU kernel splits a grid along minimum cuts and solves its parts exactly; augmenting paths
// are a poor fit for a block of threads, so the same problem is solved here from its dual,
//     minimise 1/2 ||z - D'u||^2 over |u_e| <= lam,     prox = z - D'u,
// by rounds of three steps, each of which only uses a cell and its neighbors:
//   1. a burst of accelerated projected gradient steps finds which edges are at their bound;
//   2. the cells that the other edges join are the fused groups: labels spread over them, and x is
//      the mean of z - D'u over each group, in which the edges inside cancel;
//   3. conjugate gradients on the graph of the groups move the free edges to where z - D'u is x.
//      If no bound is in the way that ends the search: the gap is then rounding.
// After 2 and 3 the duality gap of (x, u) in float64 says how far x can be from the answer:
//     ||x - x*||^2 <= 2 gap,   gap = 1/2 ||z - D'u - x||^2 + sum(lam |Dx| - u Dx),
// and as sparsemax is a projection its answer is no farther away.
// Source: Beck and Teboulle 2009 (bursts), More and Toraldo 1991 (faces by conjugate gradients).
#pragma once

#include "../sparsemax/kernel.cuh"
#include "grid.cuh"

namespace saccade {
namespace cuda {

struct TVMaxSettings {
    float lam;
    double tolerance;
    int64_t max_iterations;
};

constexpr int kFirstBurst = 24, kLongestBurst = 192;

// Accelerated projected gradient steps from u; the work arrays hold the extrapolated point and its
// divergence. The largest eigenvalue of D D' is below 8, hence the step.
inline __device__ void burst(const Grid &g, int64_t steps) {
    float *right = g.work0, *down = g.work1, *flow = g.work2;
    for (int i = threadIdx.x; i < g.cells; i += blockDim.x) {
        right[i] = g.right[i];
        down[i] = g.down[i];
    }
    float momentum = 1.0f;
    for (int64_t step = 0; step < steps; ++step) {
        __syncthreads();
        for (int i = threadIdx.x; i < g.cells; i += blockDim.x)
            flow[i] = g.divergence(right, down, i);
        __syncthreads();
        const float next = 0.5f + sqrtf(0.25f + momentum * momentum);
        const float push = (momentum - 1.0f) / next;
        momentum = next;
        for (int i = threadIdx.x; i < g.cells; i += blockDim.x) {
            if (g.flags[i] & kHasRight) g.ascend(right, g.right, flow, i, i + 1, push);
            if (g.flags[i] & kHasDown) g.ascend(down, g.down, flow, i, i + g.width, push);
        }
    }
    __syncthreads();
}

// Solves L phi = z - D'u - x over the fused edges, phi in work0; answers the rounds it took.
inline __device__ int64_t solve_groups(const Grid &g, double tolerance, int64_t most) {
    float *phi = g.work0, *toward = g.work1, *image = g.work2, *rest = g.work3;
    double square = 0;
    for (int i = threadIdx.x; i < g.cells; i += blockDim.x) {
        const float r = g.flags[i] & kLive ? float(g.value(i) - g.mean()[i]) : 0.0f;
        toward[i] = r;
        square += double(r) * r;
    }
    square = block_sum(square);
    for (int i = threadIdx.x; i < g.cells; i += blockDim.x) {
        rest[i] = toward[i];
        phi[i] = 0.0f;
    }
    __syncthreads();
    // Well below what the certificate needs; the rounding of float32 is reached soon after.
    const double enough = 0.01 * tolerance * tolerance;
    int64_t round = 0;
    for (; round < most && square > enough; ++round) {
        double curvature = 0;
        for (int i = threadIdx.x; i < g.cells; i += blockDim.x) {
            image[i] = g.laplacian(toward, i);
            curvature += double(toward[i]) * image[i];
        }
        curvature = block_sum(curvature);
        if (!(curvature > 0)) break;
        const float step = float(square / curvature);
        double left = 0;
        for (int i = threadIdx.x; i < g.cells; i += blockDim.x) {
            phi[i] += step * toward[i];
            rest[i] -= step * image[i];
            left += double(rest[i]) * rest[i];
        }
        left = block_sum(left);
        const float turn = float(left / square);
        square = left;
        for (int i = threadIdx.x; i < g.cells; i += blockDim.x)
            toward[i] = rest[i] + turn * toward[i];
        __syncthreads();
    }
    return round;
}

// Moves u along D phi on the free edges, as far as it lowers the dual objective.
inline __device__ void move_free_edges(const Grid &g) {
    double room = -1e30;
    for (int i = threadIdx.x; i < g.cells; i += blockDim.x) {
        if (g.flags[i] & kFusedRight) room = fmax(room, -g.room(g.right[i], i, i + 1));
        if (g.flags[i] & kFusedDown) room = fmax(room, -g.room(g.down[i], i, i + g.width));
    }
    room = -block_largest(room);
    float step = 1.0f;
    if (room < 1.0) {
        // A bound is in the way: bend along it while that helps, else stop at it.
        const double before = g.objective(0.0f);
        int tries = 0;
        while (tries < 3 && g.objective(step) >= before) {
            step *= 0.25f;
            ++tries;
        }
        if (tries == 3) step = float(room);
    }
    for (int i = threadIdx.x; i < g.cells; i += blockDim.x) {
        g.right[i] = g.moved_right(i, step);
        g.down[i] = g.moved_down(i, step);
    }
    __syncthreads();
}

// Sparsemax of the means.
template <class T>
__device__ void write_weights(const Grid &g, T *p, int64_t stride) {
    double top = -CUDART_INF;
    for (int i = threadIdx.x; i < g.cells; i += blockDim.x)
        if (g.flags[i] & kLive) top = fmax(top, g.mean()[i]);
    top = block_largest(top);
    float *z = g.work0;
    for (int i = threadIdx.x; i < g.cells; i += blockDim.x)
        z[i] = g.flags[i] & kLive ? float(g.mean()[i] - top) : -CUDART_INF_F;
    float threshold = -1.0f;
    int previous = 0;
    for (int round = 0; round < kNewtonRounds; ++round) {
        float sum = 0.0f;
        int count = 0;
        for (int i = threadIdx.x; i < g.cells; i += blockDim.x) {
            sum += fmaxf(z[i] - threshold, 0.0f);
            count += z[i] > threshold ? 1 : 0;
        }
        sum = block_sum(sum);
        count = block_sum(count);
        if (!newton_step(sum, count, threshold, previous)) break;
    }
    for (int i = threadIdx.x; i < g.cells; i += blockDim.x)
        p[i / g.width * stride + i % g.width] = narrowed<T>(fmaxf(z[i] - threshold, 0.0f));
}

// Labels, means and the bound of the error at u; writes the answer if it is the best one so far.
template <class T>
__device__ bool certified(const Grid &g, const TVMaxSettings &settings, double &best, T *p,
                          int64_t stride) {
    g.label_groups();
    g.average_groups();
    const double gap = g.gap();
    const double error = sqrt(2.0 * (gap > 0 ? gap : 0.0));
    // The first answer is written whatever its bound is.
    if (error < best || best == CUDART_INF) {
        best = error;
        write_weights(g, p, stride);
    }
    return best <= settings.tolerance;
}

template <class T>
__device__ double solve_grid(const Grid &g, const TVMaxSettings &settings, T *p, int64_t stride) {
    double best = CUDART_INF;
    if (settings.lam == 0.0f || g.cells == 1) {
        certified(g, settings, best, p, stride);
        return best;
    }
    int64_t left = settings.max_iterations, steps = kFirstBurst;
    while (true) {
        steps = steps < left ? steps : left;
        burst(g, steps);
        left -= steps;
        if (certified(g, settings, best, p, stride) || left == 0) return best;
        const int64_t reach = 2 * (g.width + g.cells / g.width) + 16;
        left -= solve_groups(g, settings.tolerance, reach < left ? reach : left);
        move_free_edges(g);
        if (certified(g, settings, best, p, stride) || left == 0) return best;
        steps = steps * 2 < kLongestBurst ? steps * 2 : kLongestBurst;
    }
}

// Few grids leave most of the GPU idle, so each gets many threads; many share the registers.
struct FewGrids {
    static constexpr int kThreads = 512, kBlocks = 1;

    static int threads(int64_t cells) { return whole_warps(cells, kThreads); }
};

struct ManyGrids {
    static constexpr int kThreads = 256, kBlocks = 3;

    static int threads(int64_t cells) {
        return whole_warps(cells < 512 ? cells / 2 : cells / 4, kThreads);
    }
};

template <class T, class Load>
__global__ void __launch_bounds__(Load::kThreads, Load::kBlocks)
    tvmax_grids(const T *z, const int64_t *sizes, T *p, float *error, int64_t grids, int64_t h,
                int64_t w, TVMaxSettings settings, char *workspace, size_t bytes) {
    char *memory = scratch_of_block(workspace, bytes);
    for (int64_t grid = blockIdx.x; grid < grids; grid += gridDim.x) {
        const int64_t rows = sizes == nullptr ? h : sizes[2 * grid];
        const int64_t columns = sizes == nullptr ? w : sizes[2 * grid + 1];
        const bool fits = rows >= 0 && rows <= h && columns >= 0 && columns <= w;
        const bool empty = fits && rows * columns == 0;
        const T *in = z + grid * h * w;
        T *out = p + grid * h * w;
        for (int64_t i = threadIdx.x; i < h * w; i += blockDim.x)
            if (!fits || i / w >= rows || i % w >= columns)
                out[i] = narrowed<T>(fits ? 0.0f : CUDART_NAN_F);
        double bound = empty ? 0.0 : CUDART_NAN;
        if (fits && !empty) {
            Grid g(memory, size_t(h * w), int(rows), int(columns), settings.lam);
            if (g.read(in, w))
                bound = solve_grid(g, settings, out, w);
            else
                for (int i = threadIdx.x; i < g.cells; i += blockDim.x)
                    out[i / g.width * w + i % g.width] = narrowed<T>(CUDART_NAN_F);
        }
        // Rounding up: the bound stays one.
        if (threadIdx.x == 0) error[grid] = __double2float_ru(bound);
        __syncthreads();
    }
}

inline Scratch tvmax_scratch(int64_t grids, int64_t h, int64_t w) {
    return {aligned16(size_t(h * w) * kBytesACell), grids};
}

template <class T, class Load>
cudaError_t tvmax_with(const T *z, const int64_t *sizes, T *p, float *error, int64_t grids,
                       int64_t h, int64_t w, const TVMaxSettings &settings, void *workspace,
                       cudaStream_t stream) {
    const Scratch scratch = tvmax_scratch(grids, h, w);
    return launch(tvmax_grids<T, Load>, scratch.blocks(), Load::threads(h * w), scratch.shared(),
                  stream, z, sizes, p, error, grids, h, w, settings, scratch.place(workspace),
                  scratch.bytes);
}

template <class T>
cudaError_t tvmax(const T *z, const int64_t *sizes, T *p, float *error, int64_t grids, int64_t h,
                  int64_t w, const TVMaxSettings &settings, void *workspace, cudaStream_t stream) {
    const auto run = grids * h * w <= kFewCells ? tvmax_with<T, FewGrids> : tvmax_with<T, ManyGrids>;
    return run(z, sizes, p, error, grids, h, w, settings, workspace, stream);
}

}  // namespace cuda
}  // namespace saccade
