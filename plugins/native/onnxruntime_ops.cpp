// SPDX-License-Identifier: Apache-2.0
// How each op runs: buffers and attributes of a node, handed to the C interface.
#include "onnxruntime_ops.hpp"

namespace saccade {
namespace {

int run_sparsemax(int dtype, const Buffers &b, const Number *, const saccade_pool *pool) {
    return saccade_sparsemax(dtype, b.first, b.answer, b.count, b.n, pool);
}

int run_tvmax(int dtype, const Buffers &b, const Number *a, const saccade_pool *pool) {
    return saccade_tvmax(dtype, b.first, static_cast<const int64_t *>(b.second), b.answer, b.error,
                         nullptr, b.count, b.m, b.n, a[0].real, a[1].real, a[2].whole, pool);
}

int run_svpn(int dtype, const Buffers &b, const Number *a, const saccade_pool *pool) {
    return saccade_svpn(dtype, b.first, b.answer, b.count, b.m, b.n, a[0].real, pool);
}

int run_svpn_fast(int dtype, const Buffers &b, const Number *a, const saccade_pool *pool) {
    return saccade_svpn_fast(dtype, b.first, b.second, b.answer, b.count, b.m, b.n, a[0].real,
                             a[1].whole, a[2].whole, a[3].real, pool);
}

}  // namespace

const Op kOps[kOpCount] = {
    {kSparsemax, run_sparsemax}, {kTVMax, run_tvmax},       {kMaskedTVMax, run_tvmax},
    {kSvPN, run_svpn},           {kSvPNFast, run_svpn_fast},
};

}  // namespace saccade
