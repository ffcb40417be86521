// SPDX-License-Identifier: Apache-2.0
// Starting a kernel, and where a block's scratch lies: in shared memory, or in the workspace where
// one item is too large for that. All that ties the kernels to CUDA's launch machinery is here.
#ifndef SACCADE_CUDA_LAUNCH_CUH
#define SACCADE_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace saccade {
namespace cuda {

// Every architecture since 7.5 lets a block have 64 KiB after asking for it and 48 KiB without;
// one KiB is for what kernels declare themselves.
constexpr size_t kSharedBytes = 63 * 1024;
constexpr size_t kSharedBytesUnasked = 47 * 1024;
// Blocks that share the workspace; each takes one item after the other.
constexpr int64_t kWorkspaceBlocks = 256;
constexpr int64_t kMostBlocks = 2147483647;
// Up to here a thread per cell finds room on a large GPU (an H100 was measured).
constexpr int64_t kFewCells = 65536;

template <class T>
struct Exactly {
    using type = T;
};

inline __device__ char *dynamic_memory() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared,
                   cudaStream_t stream, typename Exactly<Parameters>::type... values) {
    const void *entry = reinterpret_cast<const void *>(kernel);
    if (shared > kSharedBytesUnasked) {
        const cudaError_t status = cudaFuncSetAttribute(
            entry, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kSharedBytes));
        if (status != cudaSuccess) return status;
    }
    void *arguments[] = {&values...};
    return cudaLaunchKernel(entry, dim3(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)),
                            dim3(unsigned(threads)), arguments, shared, stream);
}

// The scratch of one item, and how many blocks work on `items` of them.
struct Scratch {
    size_t bytes;
    int64_t items;

    bool fits() const { return bytes <= kSharedBytes; }
    size_t shared() const { return fits() ? bytes : 0; }
    int64_t blocks() const {
        return fits() || items < kWorkspaceBlocks ? items : kWorkspaceBlocks;
    }
    size_t workspace_bytes() const { return fits() ? 0 : size_t(blocks()) * bytes; }
    // What a kernel gets: null means shared memory.
    char *place(void *workspace) const { return fits() ? nullptr : static_cast<char *>(workspace); }
};

inline __device__ char *scratch_of_block(char *workspace, size_t bytes) {
    return workspace == nullptr ? dynamic_memory() : workspace + size_t(blockIdx.x) * bytes;
}

inline size_t aligned16(size_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace cuda
}  // namespace saccade
#endif
