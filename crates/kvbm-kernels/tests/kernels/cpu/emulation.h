// What the kernels need of CUDA, on one CPU thread: blocks of threads one after the other, their
// threads one after the other in either order. Threads of a kernel with barriers are fibers that
// are parked at each barrier.
#pragma once
#include <cstddef>
#include <cstdint>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t s32;
typedef unsigned long long u64;

// Aligned as on the device, so that the alignment sanitizer finds accesses that would fault there.
struct alignas(16) uint4 {
  u32 x, y, z, w;
};

struct Dimensions {
  u32 x;
};

// Not inline: the loader would make those of several libraries in one process the same.
static Dimensions threadIdx, blockIdx, gridDim;
static u8* kvbm_shared;

void __syncthreads();
