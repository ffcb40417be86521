// SPDX-License-Identifier: Apache-2.0
// The C interface to the CUDA kernels: checks numbers, picks the element type and launches.
#include "cuda_ops.h"

#include <cmath>

#include "../sparsemax/kernel.cuh"
#include "../svpn/kernel.cuh"
#include "../svpn_fast/kernel.cuh"
#include "../tvmax/kernel.cuh"
#include "contracts.hpp"

namespace {

namespace cuda = saccade::cuda;

// What float32 arithmetic can certify; a smaller tolerance is raised to it.
constexpr double kSmallestTolerance = 1e-5;
// Cells of one grid, elements of one matrix: what a kernel counts in 32 bits.
constexpr int64_t kMostElements = 2147483647 / 8;

bool countable(int64_t items, int64_t rows, int64_t columns) {
    if (items < 0 || rows < 0 || columns < 0) return false;
    if (rows == 0 || columns == 0) return true;
    return columns <= kMostElements && rows <= kMostElements / columns;
}

// An element type, as a value that a lambda can take.
template <class T>
struct Typed {
    static const T *in(const void *data) { return static_cast<const T *>(data); }
    static T *out(void *data) { return static_cast<T *>(data); }
};

template <class Run>
int of_type(int dtype, const Run &run) {
    switch (dtype) {
        case SACCADE_FLOAT32: return run(Typed<float>());
        case SACCADE_FLOAT16: return run(Typed<__half>());
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace

extern "C" {

size_t saccade_cuda_sparsemax_workspace_bytes(int64_t, int64_t) { return 0; }

int saccade_cuda_sparsemax(int dtype, const void *x, void *y, int64_t rows, int64_t n, void *,
                           cudaStream_t stream) {
    if (!countable(rows, 1, n)) return cudaErrorInvalidValue;
    if (rows == 0 || n == 0) return cudaSuccess;
    return of_type(dtype, [&](auto type) {
        return cuda::sparsemax(type.in(x), type.out(y), rows, n, stream);
    });
}

size_t saccade_cuda_tvmax_workspace_bytes(int64_t grids, int64_t h, int64_t w) {
    return countable(grids, h, w) ? cuda::tvmax_scratch(grids, h, w).workspace_bytes() : 0;
}

int saccade_cuda_tvmax(int dtype, const void *z, const int64_t *sizes, void *p, float *error,
                       int64_t grids, int64_t h, int64_t w, float lam, float tolerance,
                       int64_t max_iterations, void *workspace, cudaStream_t stream) {
    const bool allowed = saccade::kTVMax.allows({lam, tolerance, double(max_iterations)});
    if (!countable(grids, h, w) || !allowed) return cudaErrorInvalidValue;
    if (grids == 0) return cudaSuccess;
    const double reachable = tolerance < kSmallestTolerance ? kSmallestTolerance : tolerance;
    const cuda::TVMaxSettings settings{lam, reachable, max_iterations};
    return of_type(dtype, [&](auto type) {
        return cuda::tvmax(type.in(z), sizes, type.out(p), error, grids, h, w, settings, workspace,
                           stream);
    });
}

size_t saccade_cuda_svpn_workspace_bytes(int64_t count, int64_t m, int64_t n) {
    return countable(count, m, n) ? cuda::svpn_scratch(count, m, n).workspace_bytes() : 0;
}

int saccade_cuda_svpn(int dtype, const void *q, void *y, int64_t count, int64_t m, int64_t n,
                      float alpha, void *workspace, cudaStream_t stream) {
    if (!countable(count, m, n) || !saccade::kSvPN.allows({alpha})) return cudaErrorInvalidValue;
    if (count == 0 || m == 0 || n == 0) return cudaSuccess;
    return of_type(dtype, [&](auto type) {
        return cuda::svpn(type.in(q), type.out(y), count, m, n, alpha, workspace, stream);
    });
}

size_t saccade_cuda_svpn_fast_workspace_bytes(int64_t count, int64_t m, int64_t n) {
    return countable(count, m, n) ? cuda::svpn_fast_scratch(count, m, n).workspace_bytes() : 0;
}

int saccade_cuda_svpn_fast(int dtype, const void *q, const void *v0, void *y, int64_t count,
                           int64_t m, int64_t n, float alpha, int64_t singular_values,
                           int64_t iterations, float epsilon, void *workspace,
                           cudaStream_t stream) {
    const bool allowed = saccade::kSvPNFast.allows(
        {alpha, double(singular_values), double(iterations), epsilon});
    if (!countable(count, m, n) || !allowed) return cudaErrorInvalidValue;
    if (count == 0 || m == 0 || n == 0) return cudaSuccess;
    const cuda::SvPNFastSettings settings{alpha, singular_values, iterations, epsilon};
    return of_type(dtype, [&](auto type) {
        return cuda::svpn_fast(type.in(q), type.in(v0), type.out(y), count, m, n, settings,
                               workspace, stream);
    });
}

}  // extern "C"
