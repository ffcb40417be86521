// SPDX-License-Identifier: Apache-2.0
// What one build of the kernels offers: a table of plain functions, one an instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace saccade {

struct TVMaxOptions {
    double lam;
    double tolerance;
    int64_t max_iterations;
};

struct SvPNFastOptions {
    double alpha;
    int64_t singular_values;
    int64_t iterations;
    double epsilon;
};

// Scratch is 64-byte aligned, uninitialised, and of the size that the `_scratch` function gives;
// kernels allocate nothing. `count` rows, grids or matrices are done on the calling thread.
template <class T>
struct Kernels {
    void (*sparsemax)(const T *z, T *p, int64_t rows, int64_t n);
    void (*sparsemax_backward)(const T *p, const T *gradient, T *out, int64_t rows, int64_t n);

    size_t (*tvmax_scratch)(int64_t h, int64_t w);
    // sizes and groups may be null.
    void (*tvmax)(const T *z, const int64_t *sizes, T *p, float *error, int32_t *groups,
                  int64_t grids, int64_t h, int64_t w, TVMaxOptions options, void *scratch);
    void (*tvmax_backward)(const T *p, const int32_t *groups, const T *gradient, T *out,
                           int64_t grids, int64_t cells, void *scratch);

    size_t (*svpn_scratch)(int64_t m, int64_t n);
    void (*svpn)(const T *q, T *y, int64_t count, int64_t m, int64_t n, double alpha,
                 void *scratch);
    size_t (*svpn_fast_scratch)(int64_t m, int64_t n);
    void (*svpn_fast)(const T *q, const T *v0, T *y, int64_t count, int64_t m, int64_t n,
                      SvPNFastOptions options, void *scratch);
};

struct Table {
    const char *target;
    Kernels<float> float32;
    Kernels<double> float64;
    void (*widen)(const uint16_t *half, float *full, int64_t n);
    void (*narrow)(const float *full, uint16_t *half, int64_t n);
};

// Defined by kernels.cpp, once an instruction set.
extern const Table baseline_table;
extern const Table avx2_table;
extern const Table avx512_table;

}  // namespace saccade
