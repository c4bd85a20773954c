// What the kernels need of the language, for NVRTC and nvcc, or as plain C++ on one CPU thread (tests).
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;
#define KVBM_DEVICE __device__ __forceinline__
#define KVBM_KERNEL extern "C" __global__ void __launch_bounds__(kThreads)
// Not static: a variable with internal linkage would get a name that differs from build to build.
extern __shared__ __align__(16) u8 kvbm_shared[];
// An address that comes out of a table is global memory: without being told, the compiler has every access find out.
KVBM_DEVICE u8* global(u8* address) {
  __builtin_assume(__isGlobal(address));
  return address;
}
#else
#include "emulation.h"
inline u8* global(u8* address) { return address; }
#define KVBM_DEVICE inline
#define KVBM_KERNEL extern "C" void
#endif

// The unsigned integer of W bytes.
template <int W> struct Word;
template <> struct Word<16> { typedef uint4 type; };
template <> struct Word<8> { typedef u64 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<1> { typedef u8 type; };
