// Launches of the kernels on one CPU thread: blocks of threads one after the other, the threads of
// a kernel with barriers as fibers that are parked at each barrier.
#pragma once
#include "kvbm_kernels.cu"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <ucontext.h>
#include <vector>

namespace {

struct Kernel {
  const char* name;
  void (*rows)(RowJob);
  void (*pairs)(PairJob);
  bool barriers;
};

const Kernel kernels[] = {
    {"kvbm_rows_16", kvbm_rows_16, nullptr, false}, {"kvbm_rows_8", kvbm_rows_8, nullptr, false},
    {"kvbm_rows_4", kvbm_rows_4, nullptr, false},   {"kvbm_rows_2", kvbm_rows_2, nullptr, false},
    {"kvbm_rows_1", kvbm_rows_1, nullptr, false},   {"kvbm_tiles_8", kvbm_tiles_8, nullptr, true},
    {"kvbm_tiles_4", kvbm_tiles_4, nullptr, true},  {"kvbm_tiles_2", kvbm_tiles_2, nullptr, true},
    {"kvbm_tiles_1", kvbm_tiles_1, nullptr, true},  {"kvbm_spans", kvbm_spans, nullptr, false},
    {"kvbm_pairs", nullptr, kvbm_pairs, false},
};

const Kernel* find_kernel(const std::string& name) {
  for (const Kernel& kernel : kernels)
    if (name == kernel.name) return &kernel;
  return nullptr;
}

// The argument by value, as a launch takes it, and the kernel that gets it.
struct Call {
  const Kernel* kernel;
  std::vector<u8> argument;

  bool fits() const { return argument.size() == (kernel->rows ? sizeof(RowJob) : sizeof(PairJob)); }

  void run() const {
    if (kernel->rows) {
      RowJob job;
      memcpy(&job, argument.data(), sizeof job);
      kernel->rows(job);
    } else {
      PairJob job;
      memcpy(&job, argument.data(), sizeof job);
      kernel->pairs(job);
    }
  }
};

constexpr size_t kStack = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::vector<u8> stack;
  bool done;
};

const Call* current_call;
ucontext_t scheduler;
// Never destroyed: a process may end while a launch goes on.
std::vector<Fiber>& fibers = *new std::vector<Fiber>;
Fiber* running;

void fiber_main() {
  current_call->run();
  running->done = true;
}

// All threads of one block of threads, from barrier to barrier. False if some leave while others
// wait.
bool run_fibers(u32 threads, bool reverse) {
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(kStack);
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, fiber_main, 0);
  }
  for (u32 left = threads; left;) {
    u32 finished = 0;
    for (u32 k = 0; k < threads; ++k) {
      threadIdx.x = reverse ? threads - 1 - k : k;
      running = &fibers[threadIdx.x];
      if (running->done) return false;
      swapcontext(&scheduler, &running->context);
      finished += running->done;
    }
    if (finished && finished != threads) return false;
    left -= finished;
  }
  return true;
}

std::string run(const Call& call, u32 grid, u32 threads, size_t shared_bytes, bool reverse) {
  current_call = &call;
  gridDim.x = grid;
  std::string error;
  kvbm_shared = shared_bytes ? (u8*)aligned_alloc(16, shared_bytes) : nullptr;
  for (u32 block = 0; block < grid && error.empty(); ++block) {
    blockIdx.x = reverse ? grid - 1 - block : block;
    if (shared_bytes) memset(kvbm_shared, 0xCD, shared_bytes);
    if (call.kernel->barriers) {
      if (!run_fibers(threads, reverse)) error = "some threads leave the kernel while others wait at a barrier";
      continue;
    }
    running = nullptr;
    for (u32 k = 0; k < threads; ++k) {
      threadIdx.x = reverse ? threads - 1 - k : k;
      call.run();
    }
  }
  free(kvbm_shared);
  return error;
}

}  // namespace

void __syncthreads() {
  if (!running) {
    fputs("a kernel that is listed without barriers has one\n", stderr);
    abort();
  }
  swapcontext(&running->context, &scheduler);
}
