// SPDX-License-Identifier: Apache-2.0
// All kernels for one instruction set: compiled once for each, with -DSACCADE_TARGET=<its name>.
#include "../sparsemax/kernel.hpp"
#include "../svpn/kernel.hpp"
#include "../svpn_fast/kernel.hpp"
#include "../tvmax/kernel.hpp"
#include "half.hpp"
#include "table.hpp"

#define SACCADE_JOIN(a, b) a##b
#define SACCADE_TABLE(target) SACCADE_JOIN(target, _table)
#define SACCADE_TEXT(x) #x
#define SACCADE_NAME(target) SACCADE_TEXT(target)

namespace saccade {
namespace SACCADE_TARGET {

template <class T>
static constexpr Kernels<T> kernels() {
    return {sparsemax<T>,        sparsemax_backward<T>, tvmax_scratch<T>,
            tvmax<T>,            tvmax_backward<T>,     svpn_scratch<T>,
            svpn<T>,             svpn_fast_scratch<T>,  svpn_fast<T>};
}

}  // namespace SACCADE_TARGET

extern const Table SACCADE_TABLE(SACCADE_TARGET) = {
    SACCADE_NAME(SACCADE_TARGET), SACCADE_TARGET::kernels<float>(),
    SACCADE_TARGET::kernels<double>(), SACCADE_TARGET::widen, SACCADE_TARGET::narrow};

}  // namespace saccade
