// SPDX-License-Identifier: Apache-2.0
// Runs the CUDA kernels on a CPU: the blocks of a launch one after the other, the threads of
// a block as coroutines that stop at every barrier and shuffle. For checking what the kernels
// compute where there is no GPU; included before plugins/native/cuda_ops.cu, it stands in for
// cuda_launch.cuh. Threads run in ascending or descending order between two barriers: an answer
// that depends on it lacks a barrier.
#pragma once
#define SACCADE_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#ifndef __global__
#define __global__
#define __device__
#endif
#undef __shared__
#undef __launch_bounds__
#define __shared__ static
#define __launch_bounds__(...)

using std::isfinite;
using std::isnan;

// Shared memory that a block may have; a small one sends every item to the workspace.
extern "C" int cuda_on_cpu_shared_bytes;

namespace on_cpu {

struct Index {
    unsigned x;
};
extern Index thread, block, block_size, grid_size;
extern char *dynamic;

void block_barrier();
int block_any(int value);
void warp_barrier(unsigned mask);
// What a lane shows to the others of its warp.
char *shown_by(unsigned lane);
void run_block(const std::function<void()> &body, int threads);

template <class V>
void show(V value, unsigned mask) {
    std::memcpy(shown_by(thread.x % 32), &value, sizeof value);
    warp_barrier(mask);
}

template <class V>
V seen(unsigned lane) {
    V value;
    std::memcpy(&value, shown_by(lane), sizeof value);
    return value;
}

template <class To, class From>
To bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "same size");
    std::memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace on_cpu

#define threadIdx on_cpu::thread
#define blockIdx on_cpu::block
#define blockDim on_cpu::block_size
#define gridDim on_cpu::grid_size

inline void __syncthreads() { on_cpu::block_barrier(); }
inline int __syncthreads_or(int value) { return on_cpu::block_any(value); }
inline void __syncwarp(unsigned mask) { on_cpu::warp_barrier(mask); }

template <class V>
V __shfl_xor_sync(unsigned mask, V value, int step) {
    const unsigned other = (on_cpu::thread.x % 32) ^ unsigned(step);
    // A lane outside the mask has nothing to show.
    if (((mask >> other) & 1u) == 0) std::abort();
    on_cpu::show(value, mask);
    const V found = on_cpu::seen<V>(other);
    on_cpu::warp_barrier(mask);
    return found;
}

template <class V>
V __shfl_up_sync(unsigned mask, V value, int step, int width) {
    const unsigned lane = on_cpu::thread.x % 32;
    const bool inside = int(lane) % width >= step;
    if (inside && ((mask >> (lane - unsigned(step))) & 1u) == 0) std::abort();
    on_cpu::show(value, mask);
    const V found = inside ? on_cpu::seen<V>(lane - unsigned(step)) : value;
    on_cpu::warp_barrier(mask);
    return found;
}

inline unsigned __ballot_sync(unsigned mask, int value) {
    on_cpu::show(value, mask);
    unsigned set = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if ((mask >> lane) & 1u && on_cpu::seen<int>(lane) != 0) set |= 1u << lane;
    on_cpu::warp_barrier(mask);
    return set;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline int __any_sync(unsigned mask, int value) {
    on_cpu::show(value, mask);
    int any = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if ((mask >> lane) & 1u) any |= on_cpu::seen<int>(lane) != 0;
    on_cpu::warp_barrier(mask);
    return any;
}

template <class V>
V atomicAdd(V *to, V value) {
    const V before = *to;
    *to += value;
    return before;
}

inline int atomicMin(int *to, int value) {
    const int before = *to;
    if (value < before) *to = value;
    return before;
}

inline float __int_as_float(int value) { return on_cpu::bits<float>(value); }
inline double __longlong_as_double(long long value) { return on_cpu::bits<double>(value); }
inline long long __double2ll_rn(double value) { return std::llrint(value); }
inline float __double2float_ru(double value) {
    const float near = float(value);
    return double(near) < value ? std::nextafter(near, INFINITY) : near;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

namespace saccade {
namespace cuda {

constexpr size_t kSharedBytesUnasked = 47 * 1024;
constexpr int64_t kWorkspaceBlocks = 3, kMostBlocks = 2147483647;
// Cases have few grids: the larger ones of them count as many.
constexpr int64_t kFewCells = 200;

inline char *dynamic_memory() { return on_cpu::dynamic; }

template <class T>
struct Exactly {
    using type = T;
};

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared,
                   cudaStream_t, typename Exactly<Parameters>::type... values) {
    char *memory = static_cast<char *>(std::aligned_alloc(64, (shared + 127) / 64 * 64));
    on_cpu::dynamic = memory;
    on_cpu::block_size.x = unsigned(threads);
    on_cpu::grid_size.x = unsigned(blocks);
    for (int64_t each = 0; each < blocks; ++each) {
        std::memset(memory, 0xAB, shared);
        on_cpu::block.x = unsigned(each);
        on_cpu::run_block([&] { kernel(values...); }, threads);
    }
    std::free(memory);
    return cudaSuccess;
}

struct Scratch {
    size_t bytes;
    int64_t items;

    bool fits() const { return bytes <= size_t(cuda_on_cpu_shared_bytes); }
    size_t shared() const { return fits() ? bytes : 0; }
    int64_t blocks() const {
        return fits() || items < kWorkspaceBlocks ? items : kWorkspaceBlocks;
    }
    size_t workspace_bytes() const { return fits() ? 0 : size_t(blocks()) * bytes; }
    char *place(void *workspace) const { return fits() ? nullptr : static_cast<char *>(workspace); }
};

inline char *scratch_of_block(char *workspace, size_t bytes) {
    return workspace == nullptr ? dynamic_memory() : workspace + size_t(blockIdx.x) * bytes;
}

inline size_t aligned16(size_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace cuda
}  // namespace saccade
