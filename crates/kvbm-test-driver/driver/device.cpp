// Machine, devices, contexts, and what a call answers first.
#include "state.h"

Driver& driver = *new Driver;
thread_local int current = 0;
const uintptr_t kContext = 0xC0;

void kill_context(int code) {
  std::unique_lock<std::shared_mutex> nobody_works(driver.working);
  driver.dead = code;
}

int answer(const char* call, bool needs_context) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  ++driver.counts[call];
  if (driver.calls++ == driver.fail_at) {
    driver.failed = call;
    return driver.fail_with;
  }
  if (driver.failing == call && driver.after-- <= 0) {
    driver.failing.clear();
    return driver.failure;
  }
  if (!driver.initialised && strcmp(call, "cuInit")) return NOT_INITIALIZED;
  if (needs_context && !current) return INVALID_CONTEXT;
  if (needs_context && driver.dead) return driver.dead;
  return OK;
}

API int cuInit(unsigned flags) {
  ANSWER("cuInit", false);
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.initialised = true;
  return flags ? INVALID_VALUE : OK;
}
API int cuDriverGetVersion(int* version) {
  ANSWER("cuDriverGetVersion", false);
  *version = driver.version;
  return OK;
}
API int cuGetErrorName(int code, const char** name) {
  static const auto& names = *new std::map<int, const char*>{
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},     {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},             {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},   {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {999, "CUDA_ERROR_UNKNOWN"},
  };
  auto found = names.find(code);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? INVALID_VALUE : OK;
}
API int cuDeviceGetCount(int* count) {
  ANSWER("cuDeviceGetCount", false);
  *count = driver.devices;
  return OK;
}
API int cuDeviceGet(int* device, int ordinal) {
  ANSWER("cuDeviceGet", false);
  *device = ordinal;
  return ordinal >= 0 && ordinal < driver.devices ? OK : INVALID_DEVICE;
}
API int cuDeviceGetName(char* name, int bytes, int device) {
  ANSWER("cuDeviceGetName", false);
  snprintf(name, (size_t)bytes, "test device %d", device);
  return OK;
}
API int cuDeviceGetPCIBusId(char* name, int bytes, int device) {
  ANSWER("cuDeviceGetPCIBusId", false);
  // No bus has it: the machine that runs this has no such device.
  snprintf(name, (size_t)bytes, "FFFF:%02X:00.0", device);
  return OK;
}
API int cuDeviceTotalMem_v2(size_t* bytes, int) {
  ANSWER("cuDeviceTotalMem_v2", false);
  *bytes = driver.total;
  return OK;
}
API int cuDeviceGetAttribute(int* value, int attribute, int) {
  ANSWER("cuDeviceGetAttribute", false);
  // Multiprocessors, compute capability 9.0, mapped memory, handles as descriptors, handles of a
  // fabric.
  const std::map<int, int> values = {{16, 4}, {75, 9}, {76, 0}, {102, 1}, {103, 1}, {128, driver.no_fabric ? 0 : 1}};
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return found == values.end() ? INVALID_VALUE : OK;
}
API int cuDevicePrimaryCtxRetain(uintptr_t* context, int) {
  ANSWER("cuDevicePrimaryCtxRetain", false);
  std::lock_guard<std::mutex> lock(driver.mutex);
  ++driver.contexts;
  *context = kContext;
  return OK;
}
API int cuDevicePrimaryCtxRelease_v2(int) {
  const int injected = answer("cuDevicePrimaryCtxRelease_v2", false);
  std::lock_guard<std::mutex> lock(driver.mutex);
  const bool held = driver.contexts-- > 0;
  return injected ? injected : held ? OK : INVALID_CONTEXT;
}
API int cuCtxPushCurrent_v2(uintptr_t context) {
  if (int code = answer("cuCtxPushCurrent_v2", false)) {
    // A context that cannot be entered stays so.
    kill_context(code);
    return code;
  }
  if (driver.dead) return driver.dead;
  if (context != kContext || !driver.contexts) return INVALID_CONTEXT;
  ++current;
  return OK;
}
API int cuCtxPopCurrent_v2(uintptr_t* context) {
  if (!current) return INVALID_CONTEXT;
  --current;
  *context = kContext;
  return OK;
}
