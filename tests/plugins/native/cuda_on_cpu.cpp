// SPDX-License-Identifier: Apache-2.0
// The coroutines behind cuda_on_cpu.hpp: each thread of a block has a stack of its own, and the
// scheduler lets all of them run up to their next barrier.
#include "cuda_on_cpu.hpp"

#include <ucontext.h>

#include <cstdio>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

// 1: threads run in descending order between two barriers.
EXPORT int cuda_on_cpu_descending;
int cuda_on_cpu_descending = 0;
EXPORT int cuda_on_cpu_shared_bytes;
int cuda_on_cpu_shared_bytes = 63 * 1024;

namespace on_cpu {

Index thread, block, block_size, grid_size;
char *dynamic;

namespace {

enum class Waits { no, for_block, for_warp, ended };

constexpr size_t kStackBytes = 65536;

struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    Waits waits = Waits::no;
    unsigned mask = 0;
};

std::vector<Thread> threads(512);
char shown[16][32][16];
ucontext_t scheduler;
const std::function<void()> *body;
int current, any_now, any_before;

void enter() {
    (*body)();
    threads[size_t(current)].waits = Waits::ended;
    // Returning goes on at the scheduler.
}

void wait(Waits why, unsigned mask) {
    Thread &mine = threads[size_t(current)];
    mine.waits = why;
    mine.mask = mask;
    swapcontext(&mine.context, &scheduler);
}

bool run_ready(int count) {
    bool ran = false;
    for (int i = 0; i < count; ++i) {
        current = cuda_on_cpu_descending ? count - 1 - i : i;
        Thread &next = threads[size_t(current)];
        if (next.waits != Waits::no) continue;
        thread.x = unsigned(current);
        swapcontext(&scheduler, &next.context);
        ran = true;
    }
    return ran;
}

// Lanes of a mask go on together, once all of them have come to it.
bool release_warps(int count) {
    bool released = false;
    for (int i = 0; i < count; ++i) {
        if (threads[size_t(i)].waits != Waits::for_warp) continue;
        const unsigned mask = threads[size_t(i)].mask;
        const int first = i / 32 * 32;
        bool all = true;
        for (int lane = 0; lane < 32; ++lane) {
            const Thread &other = threads[size_t(first + lane)];
            const bool asked = (mask >> lane) & 1u;
            all &= !asked || (other.waits == Waits::for_warp && other.mask == mask);
        }
        if (!all) continue;
        for (int lane = 0; lane < 32; ++lane)
            if ((mask >> lane) & 1u) threads[size_t(first + lane)].waits = Waits::no;
        released = true;
    }
    return released;
}

// True when the block goes on, or has ended; a thread that waits for ever ends the process.
bool release_block(int count, bool &ended) {
    ended = true;
    for (int i = 0; i < count; ++i) {
        ended &= threads[size_t(i)].waits == Waits::ended;
        if (threads[size_t(i)].waits == Waits::for_warp) return false;
    }
    for (int i = 0; i < count; ++i)
        if (threads[size_t(i)].waits == Waits::for_block) threads[size_t(i)].waits = Waits::no;
    any_before = any_now;
    any_now = 0;
    return true;
}

}  // namespace

void block_barrier() { wait(Waits::for_block, 0); }

int block_any(int value) {
    any_now |= value != 0;
    wait(Waits::for_block, 0);
    return any_before;
}

void warp_barrier(unsigned mask) { wait(Waits::for_warp, mask); }

char *shown_by(unsigned lane) { return shown[current / 32][lane]; }

void run_block(const std::function<void()> &kernel, int count) {
    body = &kernel;
    any_now = 0;
    for (int i = 0; i < count; ++i) {
        Thread &each = threads[size_t(i)];
        each.stack.resize(kStackBytes);
        getcontext(&each.context);
        each.context.uc_stack.ss_sp = each.stack.data();
        each.context.uc_stack.ss_size = kStackBytes;
        each.context.uc_link = &scheduler;
        makecontext(&each.context, enter, 0);
        each.waits = Waits::no;
    }
    for (bool ended = false; !ended;) {
        if (run_ready(count) || release_warps(count)) continue;
        if (!release_block(count, ended)) {
            std::fprintf(stderr, "threads of a block wait for lanes that never come\n");
            std::abort();
        }
    }
}

}  // namespace on_cpu
