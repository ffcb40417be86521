/* SPDX-License-Identifier: Apache-2.0 */
/* The plain C interface to the CPU kernels. Every function checks its numbers and answers 0, or a
 * code whose words saccade_status() gives. Buffers are dense, row-major, and never overlap. */
#ifndef SACCADE_OPS_H
#define SACCADE_OPS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SACCADE_EXPORT __attribute__((visibility("default")))

/* Raised whenever a signature below changes. */
#define SACCADE_INTERFACE 1

/* Element types, with ONNX's numbers. */
enum { SACCADE_FLOAT32 = 1, SACCADE_FLOAT16 = 10, SACCADE_FLOAT64 = 11 };

enum {
    SACCADE_OK = 0,
    SACCADE_BAD_DTYPE = 1,
    SACCADE_BAD_SHAPE = 2,
    SACCADE_BAD_ATTRIBUTE = 3,
    SACCADE_BAD_SIZES = 4,
    SACCADE_NO_MEMORY = 5
};

/* The caller's threads: calls task(argument, i) for each i < count, in any order, and returns when
 * all are done. NULL for a pool means: here, one after the other. */
typedef struct saccade_pool {
    void *state;
    void (*run)(void *state, void (*task)(void *argument, size_t index), size_t count,
                void *argument);
} saccade_pool;

SACCADE_EXPORT int saccade_interface(void);
SACCADE_EXPORT const char *saccade_status(int code);
/* The instruction set that was chosen: "baseline", "avx2" or "avx512"; NULL asks for the best.
 * A name that this CPU lacks is refused with SACCADE_BAD_ATTRIBUTE. For tests. */
SACCADE_EXPORT const char *saccade_target(void);
SACCADE_EXPORT int saccade_choose_target(const char *name);

/* z, p: [rows, n] */
SACCADE_EXPORT int saccade_sparsemax(int dtype, const void *z, void *p, int64_t rows, int64_t n,
                                     const saccade_pool *pool);
SACCADE_EXPORT int saccade_sparsemax_backward(int dtype, const void *p, const void *gradient,
                                              void *out, int64_t rows, int64_t n,
                                              const saccade_pool *pool);

/* z, p: [grids, h, w]; sizes: [grids, 2] or NULL; error: [grids], a bound of ||p - p*||_2;
 * groups: [grids, h, w] or NULL: cells of a fused group have the same number, the index of its
 * first cell; -1 where a cell takes no part. */
SACCADE_EXPORT int saccade_tvmax(int dtype, const void *z, const int64_t *sizes, void *p,
                                 float *error, int32_t *groups, int64_t grids, int64_t h,
                                 int64_t w, double lam, double tolerance, int64_t max_iterations,
                                 const saccade_pool *pool);
/* The gradient of z for the gradient of p: sparsemax's rule, then the mean of each group. */
SACCADE_EXPORT int saccade_tvmax_backward(int dtype, const void *p, const int32_t *groups,
                                          const void *gradient, void *out, int64_t grids,
                                          int64_t cells, const saccade_pool *pool);

/* q, y: [count, m, n] */
SACCADE_EXPORT int saccade_svpn(int dtype, const void *q, void *y, int64_t count, int64_t m,
                                int64_t n, double alpha, const saccade_pool *pool);
/* v0: [n] */
SACCADE_EXPORT int saccade_svpn_fast(int dtype, const void *q, const void *v0, void *y,
                                     int64_t count, int64_t m, int64_t n, double alpha,
                                     int64_t singular_values, int64_t iterations, double epsilon,
                                     const saccade_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
