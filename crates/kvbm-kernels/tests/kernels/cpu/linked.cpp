// The kernels for the test driver of `kvbm-device`, which launches what is linked with it.
#include "launch.h"

#include <mutex>

extern "C" int kvbm_kernels_has(const char* name) { return find_kernel(name) != nullptr; }

// Not 0 if the launch went wrong. One at a time: there is one CPU thread for all threads of the
// device.
extern "C" int kvbm_kernels_run(const char* name, unsigned grid, unsigned threads, unsigned shared_bytes,
                                const void* argument, size_t bytes) {
  static std::mutex one;
  std::lock_guard<std::mutex> lock(one);
  const u8* const begin = (const u8*)argument;
  const Call call = {find_kernel(name), std::vector<u8>(begin, begin + bytes)};
  return !call.fits() || !run(call, grid, threads, shared_bytes, false).empty();
}
