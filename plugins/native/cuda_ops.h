/* SPDX-License-Identifier: Apache-2.0 */
/* The plain C interface to the CUDA kernels. Every function only queues work on the stream: it
 * allocates nothing and waits for nothing, so it may be captured in a CUDA graph. It answers 0 or
 * the cudaError_t of the launch (cudaErrorInvalidValue for a number out of its range). Pointers
 * are device pointers to dense row-major tensors; `dtype` is SACCADE_FLOAT32 or SACCADE_FLOAT16;
 * the workspace, 16-byte aligned, has at least the bytes that the function of its name gives for
 * these or larger axes, and may be NULL where that is 0. */
#ifndef SACCADE_CUDA_OPS_H
#define SACCADE_CUDA_OPS_H

#include <cuda_runtime_api.h>

#include "saccade_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* x, y: [rows, n] */
SACCADE_EXPORT size_t saccade_cuda_sparsemax_workspace_bytes(int64_t rows, int64_t n);
SACCADE_EXPORT int saccade_cuda_sparsemax(int dtype, const void *x, void *y, int64_t rows,
                                          int64_t n, void *workspace, cudaStream_t stream);

/* z, p: [grids, h, w]; sizes: [grids, 2] or NULL, on the device: a grid whose size does not fit
 * gets NaN, for the host cannot look; error: [grids], a bound of ||p - p*||_2. */
SACCADE_EXPORT size_t saccade_cuda_tvmax_workspace_bytes(int64_t grids, int64_t h, int64_t w);
SACCADE_EXPORT int saccade_cuda_tvmax(int dtype, const void *z, const int64_t *sizes, void *p,
                                      float *error, int64_t grids, int64_t h, int64_t w, float lam,
                                      float tolerance, int64_t max_iterations, void *workspace,
                                      cudaStream_t stream);

/* q, y: [count, m, n] */
SACCADE_EXPORT size_t saccade_cuda_svpn_workspace_bytes(int64_t count, int64_t m, int64_t n);
SACCADE_EXPORT int saccade_cuda_svpn(int dtype, const void *q, void *y, int64_t count, int64_t m,
                                     int64_t n, float alpha, void *workspace, cudaStream_t stream);

/* v0: [n], of the same type as q */
SACCADE_EXPORT size_t saccade_cuda_svpn_fast_workspace_bytes(int64_t count, int64_t m, int64_t n);
SACCADE_EXPORT int saccade_cuda_svpn_fast(int dtype, const void *q, const void *v0, void *y,
                                          int64_t count, int64_t m, int64_t n, float alpha,
                                          int64_t singular_values, int64_t iterations,
                                          float epsilon, void *workspace, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
