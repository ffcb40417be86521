// SPDX-License-Identifier: Apache-2.0
// The five ops as ONNX Runtime sees them: their contracts, and how each runs.
#pragma once

#include "contracts.hpp"
#include "onnxruntime_api.h"
#include "saccade_ops.h"

namespace saccade {

// What an attribute is; `real` holds the number too where it is whole.
struct Number {
    double real;
    int64_t whole;
};

constexpr size_t kMostAxes = 64;

struct Tensor {
    const void *data;
    const int64_t *shape;
    size_t rank;
    int64_t copied[kMostAxes];  // the shape, where the runtime does not show its own
};

// One call's dense buffers: `count` rows, grids or matrices of `m` by `n` (a row has m = 1).
struct Buffers {
    const void *first, *second;
    void *answer;
    float *error;
    int64_t count, m, n;
};

struct Op : OpContract {
    int (*run)(int dtype, const Buffers &, const Number *attributes, const saccade_pool *);
};

constexpr size_t kOpCount = 5;
extern const Op kOps[kOpCount];

// An op for one element type, as it is registered. The runtime hands back the address of
// `interface`, which is the address of the whole.
struct RegisteredOp {
    ort::CustomOp interface;
    const ort::Api *api;
    bool shows_shapes;  // the runtime has GetTensorElementTypeAndShapeDataReference
    const Op *op;
    ort::ElementType type;
};

// Creates, runs and destroys kernels; onnxruntime_kernel.cpp.
ort::Status *create_kernel(const ort::CustomOp *, const ort::Api *, const ort::KernelInfo *,
                           void **kernel);
ort::Status *run_kernel(void *kernel, ort::KernelContext *);
void destroy_kernel(void *kernel);

}  // namespace saccade
