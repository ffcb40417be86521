// SPDX-License-Identifier: Apache-2.0
// The C interface: checks numbers, picks the instruction set, cuts the work into tasks that the
// caller's pool may run in any order, and converts half precision on the way in and out.
#include "saccade_ops.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "contracts.hpp"
#include "table.hpp"

namespace {

using saccade::Kernels;
using saccade::Table;

const Table *best_table() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return &saccade::avx512_table;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return &saccade::avx2_table;
#endif
    return &saccade::baseline_table;
}

std::atomic<const Table *> chosen{nullptr};

const Table &table() {
    const Table *found = chosen.load(std::memory_order_acquire);
    if (found == nullptr) {
        found = best_table();
        chosen.store(found, std::memory_order_release);
    }
    return *found;
}

// A task's own memory, 64-byte aligned; empty where there was none.
class Scratch {
  public:
    explicit Scratch(size_t bytes)
        : data_(std::aligned_alloc(64, (bytes + 127) / 64 * 64)) {}
    ~Scratch() { std::free(data_); }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    void *data() const { return data_; }
    template <class T>
    T *take(size_t offset) const {
        return reinterpret_cast<T *>(static_cast<char *>(data_) + offset);
    }

  private:
    void *data_;
};

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// `count` items cut into chunks; `body(first, last)` answers false where memory ran out.
template <class Body>
int in_chunks(int64_t count, int64_t items_a_chunk, const saccade_pool *pool, const Body &body) {
    struct Work {
        const Body &body;
        int64_t count, step;
        std::atomic<bool> failed;
    } work{body, count, items_a_chunk < 1 ? 1 : items_a_chunk, {false}};
    const auto task = [](void *argument, size_t index) {
        Work &mine = *static_cast<Work *>(argument);
        const int64_t first = int64_t(index) * mine.step;
        const int64_t left = mine.count - first;
        if (!mine.body(first, first + (left < mine.step ? left : mine.step)))
            mine.failed.store(true);
    };
    const size_t chunks = size_t((count + work.step - 1) / work.step);
    if (pool == nullptr || chunks < 2)
        for (size_t i = 0; i < chunks; ++i) task(&work, i);
    else
        pool->run(pool->state, task, chunks, &work);
    return work.failed.load() ? SACCADE_NO_MEMORY : SACCADE_OK;
}

// Whether each axis and the product of all, in bytes of the widest type, can be counted.
bool countable(int64_t a, int64_t b, int64_t c) {
    const int64_t most = std::numeric_limits<int64_t>::max() / 64;
    if (a < 0 || b < 0 || c < 0) return false;
    if (a == 0 || b == 0 || c == 0) return true;
    return a <= most / b && a * b <= most / c;
}

// Elements that one task works through: enough to hide what a task costs.
constexpr int64_t kTaskElements = 32768;

int64_t items_a_task(int64_t elements_an_item) {
    return elements_an_item < 1 ? kTaskElements : kTaskElements / elements_an_item + 1;
}

// One input and one output of the same shape, [count, size], plus scratch of the kernel's own.
template <class T, class Kernel>
int map_items(const T *in, T *out, int64_t count, int64_t size, int64_t per_task, size_t scratch,
              const saccade_pool *pool, const Kernel &kernel) {
    return in_chunks(count, per_task, pool, [&](int64_t first, int64_t last) {
        Scratch memory(scratch);
        if (memory.data() == nullptr) return false;
        kernel(in + first * size, out + first * size, first, last - first, memory.data());
        return true;
    });
}

template <class Kernel>
int map_halves(const uint16_t *in, uint16_t *out, int64_t count, int64_t size, int64_t per_task,
               size_t scratch, const saccade_pool *pool, const Kernel &kernel) {
    const Table &use = table();
    const size_t block = aligned(size_t(per_task * size) * sizeof(float));
    return in_chunks(count, per_task, pool, [&](int64_t first, int64_t last) {
        Scratch memory(aligned(scratch) + 2 * block);
        if (memory.data() == nullptr) return false;
        float *wide = memory.take<float>(aligned(scratch));
        float *answer = memory.take<float>(aligned(scratch) + block);
        use.widen(in + first * size, wide, (last - first) * size);
        kernel(static_cast<const float *>(wide), answer, first, last - first, memory.data());
        use.narrow(answer, out + first * size, (last - first) * size);
        return true;
    });
}

// Runs `kernel(kernels of the type, in, out, first, count, scratch)` for whatever type it is.
template <class ScratchOf, class Kernel>
int dispatch(int dtype, const void *in, void *out, int64_t count, int64_t size, int64_t per_task,
             const saccade_pool *pool, const ScratchOf &scratch_of, const Kernel &kernel) {
    const Table &use = table();
    const auto single = [&](const float *a, float *b, int64_t first, int64_t n, void *memory) {
        kernel(use.float32, a, b, first, n, memory);
    };
    const auto dual = [&](const double *a, double *b, int64_t first, int64_t n, void *memory) {
        kernel(use.float64, a, b, first, n, memory);
    };
    if (per_task > count) per_task = count < 1 ? 1 : count;
    switch (dtype) {
        case SACCADE_FLOAT32:
            return map_items(static_cast<const float *>(in), static_cast<float *>(out), count,
                             size, per_task, scratch_of(use.float32), pool, single);
        case SACCADE_FLOAT64:
            return map_items(static_cast<const double *>(in), static_cast<double *>(out), count,
                             size, per_task, scratch_of(use.float64), pool, dual);
        case SACCADE_FLOAT16:
            return map_halves(static_cast<const uint16_t *>(in), static_cast<uint16_t *>(out),
                              count, size, per_task, scratch_of(use.float32), pool, single);
        default:
            return SACCADE_BAD_DTYPE;
    }
}

const auto no_scratch = [](const auto &) -> size_t { return 0; };

}  // namespace

extern "C" {

int saccade_interface(void) { return SACCADE_INTERFACE; }

const char *saccade_status(int code) {
    switch (code) {
        case SACCADE_OK: return "done";
        case SACCADE_BAD_DTYPE: return "element type is not float32, float16 or float64";
        case SACCADE_BAD_SHAPE: return "an axis is negative, or the tensor cannot be counted";
        case SACCADE_BAD_ATTRIBUTE: return "an attribute is out of its range";
        case SACCADE_BAD_SIZES: return "sizes do not fit into the grid";
        case SACCADE_NO_MEMORY: return "out of memory";
        default: return "unknown status";
    }
}

const char *saccade_target(void) { return table().target; }

int saccade_choose_target(const char *name) {
    const Table *best = best_table();
    if (name == nullptr) {
        chosen.store(best);
        return SACCADE_OK;
    }
    const Table *offered[] = {
        &saccade::baseline_table,
#if defined(__x86_64__)
        &saccade::avx2_table, &saccade::avx512_table,
#endif
    };
    for (const Table *each : offered) {
        if (std::strcmp(each->target, name) == 0) {
            chosen.store(each);
            return SACCADE_OK;
        }
        if (each == best) break;
    }
    return SACCADE_BAD_ATTRIBUTE;
}

int saccade_sparsemax(int dtype, const void *z, void *p, int64_t rows, int64_t n,
                      const saccade_pool *pool) {
    if (!countable(rows, n, 1)) return SACCADE_BAD_SHAPE;
    return dispatch(dtype, z, p, rows, n, items_a_task(n), pool, no_scratch,
                    [n](const auto &kernels, const auto *in, auto *out, int64_t, int64_t count,
                        void *) { kernels.sparsemax(in, out, count, n); });
}

// Gradients are float32 or float64: half precision is widened by the caller, who holds it anyway.
int saccade_sparsemax_backward(int dtype, const void *p, const void *gradient, void *out,
                               int64_t rows, int64_t n, const saccade_pool *pool) {
    if (!countable(rows, n, 1)) return SACCADE_BAD_SHAPE;
    if (dtype == SACCADE_FLOAT16) return SACCADE_BAD_DTYPE;
    return dispatch(dtype, p, out, rows, n, items_a_task(n), pool, no_scratch,
                    [n, gradient](const auto &kernels, const auto *in, auto *result,
                                  int64_t first, int64_t count, void *) {
                        const auto *of = static_cast<decltype(in)>(gradient) + first * n;
                        kernels.sparsemax_backward(in, of, result, count, n);
                    });
}

int saccade_tvmax(int dtype, const void *z, const int64_t *sizes, void *p, float *error,
                  int32_t *groups, int64_t grids, int64_t h, int64_t w, double lam,
                  double tolerance, int64_t max_iterations, const saccade_pool *pool) {
    if (!countable(grids, h, w) || h * w > std::numeric_limits<int32_t>::max() / 8)
        return SACCADE_BAD_SHAPE;
    if (!saccade::kTVMax.allows({lam, tolerance, double(max_iterations)}))
        return SACCADE_BAD_ATTRIBUTE;
    for (int64_t i = 0; sizes != nullptr && i < grids; ++i)
        if (sizes[2 * i] < 0 || sizes[2 * i] > h || sizes[2 * i + 1] < 0 || sizes[2 * i + 1] > w)
            return SACCADE_BAD_SIZES;
    const int64_t cells = h * w;
    const saccade::TVMaxOptions options{lam, tolerance, max_iterations};
    return dispatch(
        dtype, z, p, grids, cells, items_a_task(cells * 16), pool,
        [h, w](const auto &kernels) { return kernels.tvmax_scratch(h, w); },
        [=](const auto &kernels, const auto *in, auto *out, int64_t first, int64_t count,
            void *scratch) {
            kernels.tvmax(in, sizes == nullptr ? nullptr : sizes + 2 * first, out, error + first,
                          groups == nullptr ? nullptr : groups + first * cells, count, h, w,
                          options, scratch);
        });
}

int saccade_tvmax_backward(int dtype, const void *p, const int32_t *groups, const void *gradient,
                           void *out, int64_t grids, int64_t cells, const saccade_pool *pool) {
    if (!countable(grids, cells, 1)) return SACCADE_BAD_SHAPE;
    if (dtype == SACCADE_FLOAT16) return SACCADE_BAD_DTYPE;
    return dispatch(
        dtype, p, out, grids, cells, items_a_task(cells), pool,
        // A sum and a count for each group.
        [cells](const auto &) { return size_t(cells) * (sizeof(double) + sizeof(int64_t)); },
        [=](const auto &kernels, const auto *in, auto *result, int64_t first, int64_t count,
            void *scratch) {
            const auto *of = static_cast<decltype(in)>(gradient) + first * cells;
            kernels.tvmax_backward(in, groups + first * cells, of, result, count, cells, scratch);
        });
}

int saccade_svpn(int dtype, const void *q, void *y, int64_t count, int64_t m, int64_t n,
                 double alpha, const saccade_pool *pool) {
    if (!countable(count, m, n)) return SACCADE_BAD_SHAPE;
    if (!saccade::kSvPN.allows({alpha})) return SACCADE_BAD_ATTRIBUTE;
    // Sixteen matrices fill a vector of float32, one a lane.
    const int64_t per_task = (items_a_task(m * n * 16) + 15) / 16 * 16;
    return dispatch(
        dtype, q, y, count, m * n, per_task, pool,
        [m, n](const auto &kernels) { return kernels.svpn_scratch(m, n); },
        [=](const auto &kernels, const auto *in, auto *out, int64_t, int64_t matrices,
            void *scratch) { kernels.svpn(in, out, matrices, m, n, alpha, scratch); });
}

int saccade_svpn_fast(int dtype, const void *q, const void *v0, void *y, int64_t count, int64_t m,
                      int64_t n, double alpha, int64_t singular_values, int64_t iterations,
                      double epsilon, const saccade_pool *pool) {
    if (!countable(count, m, n)) return SACCADE_BAD_SHAPE;
    if (!saccade::kSvPNFast.allows({alpha, double(singular_values), double(iterations), epsilon}))
        return SACCADE_BAD_ATTRIBUTE;
    const saccade::SvPNFastOptions options{alpha, singular_values, iterations, epsilon};
    Scratch widened(dtype == SACCADE_FLOAT16 ? size_t(n) * sizeof(float) : 0);
    if (widened.data() == nullptr) return SACCADE_NO_MEMORY;
    if (dtype == SACCADE_FLOAT16) {
        table().widen(static_cast<const uint16_t *>(v0), widened.take<float>(0), n);
        v0 = widened.data();
    }
    return dispatch(
        dtype, q, y, count, m * n, items_a_task(m * n), pool,
        [m, n](const auto &kernels) { return kernels.svpn_fast_scratch(m, n); },
        [=](const auto &kernels, const auto *in, auto *out, int64_t, int64_t matrices,
            void *scratch) {
            kernels.svpn_fast(in, static_cast<decltype(in)>(v0), out, matrices, m, n, options,
                              scratch);
        });
}

}  // extern "C"
