// SPDX-License-Identifier: Apache-2.0
// What the five plugins differ in beside their contracts: which kernel is queued.
#pragma once

#include "cuda_ops.h"
#include "tensorrt_fields.hpp"

namespace saccade {
namespace tensorrt {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

// The axes that a kernel counts: leading ones as one, then rows and columns of an item.
struct Extent {
    int64_t items, rows, columns;
};

inline Extent extent_of(const Dims &dims, int item_rank) {
    const auto size = [&](int back) {
        const int64_t axis = dims.nbDims < back ? 1 : dims.d[dims.nbDims - back];
        return axis < 0 ? 0 : axis;
    };
    Extent found{1, item_rank == 2 ? size(2) : 1, size(1)};
    for (int i = 0; i < dims.nbDims - item_rank; ++i) found.items *= dims.d[i] < 0 ? 0 : dims.d[i];
    return found;
}

struct Call {
    const PluginTensorDesc *in;
    const void *const *inputs;
    void *const *outputs;
    void *workspace;
    cudaStream_t stream;

    int dtype() const { return in[0].type == DataType::kHALF ? SACCADE_FLOAT16 : SACCADE_FLOAT32; }
    Extent extent(int item_rank) const { return extent_of(in[0].dims, item_rank); }
};

struct OpShell : OpContract {
    size_t (*workspace)(const Extent &most);
    int (*enqueue)(const Call &call, const Values &values);

    int item_rank() const { return int(axes); }
};

inline size_t tvmax_workspace(const Extent &most) {
    return saccade_cuda_tvmax_workspace_bytes(most.items, most.rows, most.columns);
}

inline int enqueue_tvmax(const Call &call, const Values &values) {
    const Extent e = call.extent(2);
    return saccade_cuda_tvmax(call.dtype(), call.inputs[0], nullptr, call.outputs[0],
                              static_cast<float *>(call.outputs[1]), e.items, e.rows, e.columns,
                              float(values[0]), float(values[1]), values.whole(2), call.workspace,
                              call.stream);
}

inline int enqueue_masked_tvmax(const Call &call, const Values &values) {
    const Extent e = call.extent(2);
    return saccade_cuda_tvmax(call.dtype(), call.inputs[0],
                              static_cast<const int64_t *>(call.inputs[1]), call.outputs[0],
                              static_cast<float *>(call.outputs[1]), e.items, e.rows, e.columns,
                              float(values[0]), float(values[1]), values.whole(2), call.workspace,
                              call.stream);
}

inline int enqueue_sparsemax(const Call &call, const Values &) {
    const Extent e = call.extent(1);
    return saccade_cuda_sparsemax(call.dtype(), call.inputs[0], call.outputs[0], e.items,
                                  e.columns, call.workspace, call.stream);
}

inline int enqueue_svpn(const Call &call, const Values &values) {
    const Extent e = call.extent(2);
    return saccade_cuda_svpn(call.dtype(), call.inputs[0], call.outputs[0], e.items, e.rows,
                             e.columns, float(values[0]), call.workspace, call.stream);
}

inline int enqueue_svpn_fast(const Call &call, const Values &values) {
    const Extent e = call.extent(2);
    return saccade_cuda_svpn_fast(call.dtype(), call.inputs[0], call.inputs[1], call.outputs[0],
                                  e.items, e.rows, e.columns, float(values[0]), values.whole(1),
                                  values.whole(2), float(values[3]), call.workspace, call.stream);
}

inline const OpShell kOps[] = {
    {kSparsemax,
     [](const Extent &e) { return saccade_cuda_sparsemax_workspace_bytes(e.items, e.columns); },
     enqueue_sparsemax},
    {kTVMax, tvmax_workspace, enqueue_tvmax},
    {kMaskedTVMax, tvmax_workspace, enqueue_masked_tvmax},
    {kSvPN,
     [](const Extent &e) { return saccade_cuda_svpn_workspace_bytes(e.items, e.rows, e.columns); },
     enqueue_svpn},
    {kSvPNFast,
     [](const Extent &e) {
         return saccade_cuda_svpn_fast_workspace_bytes(e.items, e.rows, e.columns);
     },
     enqueue_svpn_fast},
};

constexpr int kOpCount = int(sizeof kOps / sizeof kOps[0]);

}  // namespace tensorrt
}  // namespace saccade
