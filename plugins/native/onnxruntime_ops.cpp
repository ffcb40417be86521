// SPDX-License-Identifier: Apache-2.0
// The table of ops: what contract.py declares, for the runtime's side. A test compares the two.
#include "onnxruntime_ops.hpp"

#include <cmath>

namespace saccade {
namespace {

const Attribute kLam{"lam", false, 0.01, "a finite number >= 0",
                     [](double v) { return v >= 0 && std::isfinite(v); }};
const Attribute kTolerance{"tolerance", false, 1e-6, "a finite number > 0",
                           [](double v) { return v > 0 && std::isfinite(v); }};
const Attribute kMaxIterations{"max_iterations", true, 2000, "a whole number >= 1",
                               [](double v) { return v >= 1; }};
const Attribute kAlpha{"alpha", false, 0.5, "a number in (0, 1]",
                       [](double v) { return v > 0 && v <= 1; }};
const Attribute kSingularValues{"singular_values", true, 1, "a whole number >= 0 (0: all)",
                                [](double v) { return v >= 0; }};
const Attribute kIterations{"iterations", true, 1, "a whole number >= 1",
                            [](double v) { return v >= 1; }};
const Attribute kEpsilon{"epsilon", false, 1e-5, "a finite number >= 0",
                         [](double v) { return v >= 0 && std::isfinite(v); }};

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
    {"Sparsemax", "X [... n]", {"X", nullptr}, Op::kNone, false, 1, 0, {}, run_sparsemax},
    {"TVMax", "Z [... h w]", {"Z", nullptr}, Op::kNone, true, 2, 3,
     {kLam, kTolerance, kMaxIterations}, run_tvmax},
    {"MaskedTVMax", "Z [... h w], sizes [... 2]", {"Z", "sizes"}, Op::kSizes, true, 2, 3,
     {kLam, kTolerance, kMaxIterations}, run_tvmax},
    {"SvPN", "Q [... m n]", {"Q", nullptr}, Op::kNone, false, 2, 1, {kAlpha}, run_svpn},
    {"SvPNFast", "Q [... m n], v0 [n]", {"Q", "v0"}, Op::kVector, false, 2, 4,
     {kAlpha, kSingularValues, kIterations, kEpsilon}, run_svpn_fast},
};

}  // namespace saccade
