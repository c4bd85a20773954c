// Runs kernels that are described on standard input and writes what they made of memory to standard output.
//
// A job: kernel name, grid, threads, shared bytes, order of threads (0 forward, 1 reverse), argument, segments of memory,
// relocations. An answer: error text (empty if all went well), segments. Integers are 8 bytes, in the machine's order; texts
// and bytes are preceded by their length. Each segment is an allocation of its own with exactly its length, so that a
// sanitizer sees every access outside.
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
std::vector<Fiber> fibers;
Fiber* running;

void fiber_main() {
  current_call->run();
  running->done = true;
}

// All threads of one block of threads, from barrier to barrier. False if some leave while others wait.
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

void read_exactly(void* to, size_t bytes) {
  if (bytes && fread(to, 1, bytes, stdin) != bytes) exit(feof(stdin) ? 0 : 3);
}

u64 read_number() {
  u64 number;
  read_exactly(&number, sizeof number);
  return number;
}

std::vector<u8> read_bytes() {
  std::vector<u8> bytes(read_number());
  read_exactly(bytes.data(), bytes.size());
  return bytes;
}

void write_bytes(const void* bytes, u64 length) {
  fwrite(&length, sizeof length, 1, stdout);
  fwrite(bytes, 1, length, stdout);
}

struct Segment {
  void* allocation;
  u8* bytes;
  u64 length;
};

// `skew` bytes behind a multiple of 64, as the address that the host calculated with.
Segment read_segment() {
  const u64 skew = read_number(), length = read_number();
  Segment segment = {nullptr, nullptr, length};
  if (posix_memalign(&segment.allocation, 64, skew + length)) exit(4);
  segment.bytes = (u8*)segment.allocation + skew;
  read_exactly(segment.bytes, length);
  return segment;
}

}  // namespace

void __syncthreads() {
  if (!running) {
    fputs("a kernel that is listed without barriers has one\n", stderr);
    abort();
  }
  swapcontext(&running->context, &scheduler);
}

int main() {
  for (;;) {
    const std::vector<u8> name = read_bytes();
    Call call = {nullptr, {}};
    for (const Kernel& kernel : kernels)
      if (std::string(name.begin(), name.end()) == kernel.name) call.kernel = &kernel;
    const u32 grid = (u32)read_number(), threads = (u32)read_number();
    const size_t shared_bytes = read_number();
    const bool reverse = read_number();
    call.argument = read_bytes();
    std::vector<Segment> segments(read_number());
    for (Segment& segment : segments) segment = read_segment();
    // Addresses: which of (argument, segment 0, segment 1, ...) holds it and where, which segment it points into and where.
    for (u64 left = read_number(); left; --left) {
      const u64 holder = read_number(), at = read_number(), target = read_number(), offset = read_number();
      const u64 address = (u64)(segments[target].bytes + offset);
      memcpy((holder ? segments[holder - 1].bytes : call.argument.data()) + at, &address, sizeof address);
    }
    const std::string error = !call.kernel ? "no such kernel" : !call.fits() ? "argument of another length"
                              : run(call, grid, threads, shared_bytes, reverse);
    write_bytes(error.data(), error.size());
    for (const Segment& segment : segments) {
      write_bytes(segment.bytes, segment.length);
      free(segment.allocation);
    }
    fflush(stdout);
  }
}
