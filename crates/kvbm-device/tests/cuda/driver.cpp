// A CUDA driver without hardware: the calls that kvbm makes, over host memory, with streams that run on threads of their own
// after random delays. It is strict where the real one is: calls that need a current context refuse without one, handles
// are checked, and whatever is left behind can be counted. Failures are injected through the kvbm_test_* functions.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

namespace {

enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
};

constexpr size_t kTotal = 256 << 20;

// A point that work reaches once.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;

  void reach() {
    std::lock_guard<std::mutex> lock(mutex);
    reached = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }
};

struct Event {
  std::shared_ptr<Point> point;  // of the last record
};

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool closed = false;
};

struct Driver {
  std::mutex mutex;
  bool initialised = false;
  int devices = 2;
  int version = 12040;
  int contexts = 0;
  size_t used = 0;
  std::map<uint64_t, size_t> allocations;
  std::map<uint64_t, size_t> registrations;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::set<uintptr_t> modules;
  std::string failing;  // the call that fails
  int failure = 0;      // with what
  int after = 0;        // once it has succeeded so often
  std::atomic<int> dead{0};
  std::atomic<int> fail_operation{-1};  // the operation on a stream that kills the context
  std::atomic<int> delay_us{0};
  std::mt19937 random{1};
};

Driver driver;
thread_local int current = 0;  // contexts pushed on this thread
const uintptr_t kContext = 0xC0;

// What a call answers before it does anything.
int answer(const char* call, bool needs_context) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (driver.failing == call && driver.after-- <= 0) {
    driver.failing.clear();
    return driver.failure;
  }
  if (!driver.initialised && strcmp(call, "cuInit")) return 3;
  if (needs_context && !current) return INVALID_CONTEXT;
  if (needs_context && driver.dead) return driver.dead;
  return OK;
}

#define ANSWER(call, needs_context) \
  if (int code = answer(call, needs_context)) return code

void run_stream(Stream* stream) {
  for (;;) {
    std::function<void()> operation;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->changed.wait(lock, [&] { return stream->closed || !stream->queue.empty(); });
      if (stream->queue.empty()) break;
      operation = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    if (int most = driver.delay_us) {
      int delay;
      {
        std::lock_guard<std::mutex> lock(driver.mutex);
        delay = (int)(driver.random() % (unsigned)most);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    operation();
  }
  delete stream;
}

int enqueue(Stream* stream, std::function<void()> operation) {
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (!driver.streams.count(stream)) return INVALID_HANDLE;
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->queue.push_back(std::move(operation));
  stream->changed.notify_all();
  return OK;
}

// Work that touches memory. A dead context does nothing.
int enqueue_work(Stream* stream, std::function<void()> work) {
  return enqueue(stream, [work] {
    if (driver.fail_operation >= 0 && driver.fail_operation-- == 0) driver.dead = ILLEGAL_ADDRESS;
    if (!driver.dead) work();
  });
}

// A kernel of this driver alone: sets bytes.
struct Fill {
  uint64_t to;
  uint32_t bytes;
  uint32_t byte;
};

struct Function {
  std::string name;
};

std::map<std::string, Function> functions;

// Whether the range lies inside one allocation.
bool on_device(uint64_t address, size_t bytes) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  auto after = driver.allocations.upper_bound(address);
  if (after == driver.allocations.begin()) return false;
  auto found = std::prev(after);
  return address + bytes <= found->first + found->second;
}

}  // namespace

extern "C" {

// Kernels that are linked in: whether there is one of this name, and what its launch comes to (empty if all is well).
__attribute__((weak)) int kvbm_kernels_has(const char* name);
__attribute__((weak)) int kvbm_kernels_run(const char* name, unsigned grid, unsigned threads, unsigned shared_bytes,
                                           const void* argument, size_t bytes);

int cuInit(unsigned flags) {
  ANSWER("cuInit", false);
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.initialised = true;
  return flags ? INVALID_VALUE : OK;
}
int cuDriverGetVersion(int* version) {
  ANSWER("cuDriverGetVersion", false);
  *version = driver.version;
  return OK;
}
int cuGetErrorName(int code, const char** name) {
  static const std::map<int, const char*> names = {
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},     {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},             {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},   {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {999, "CUDA_ERROR_UNKNOWN"},
  };
  auto found = names.find(code);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? INVALID_VALUE : OK;
}
int cuDeviceGetCount(int* count) {
  ANSWER("cuDeviceGetCount", false);
  *count = driver.devices;
  return OK;
}
int cuDeviceGet(int* device, int ordinal) {
  ANSWER("cuDeviceGet", false);
  *device = ordinal;
  return ordinal >= 0 && ordinal < driver.devices ? OK : INVALID_DEVICE;
}
int cuDeviceGetName(char* name, int bytes, int device) {
  ANSWER("cuDeviceGetName", false);
  snprintf(name, (size_t)bytes, "test device %d", device);
  return OK;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) {
  ANSWER("cuDeviceTotalMem_v2", false);
  *bytes = kTotal;
  return OK;
}
int cuDevicePrimaryCtxRetain(uintptr_t* context, int) {
  ANSWER("cuDevicePrimaryCtxRetain", false);
  std::lock_guard<std::mutex> lock(driver.mutex);
  ++driver.contexts;
  *context = kContext;
  return OK;
}
int cuDevicePrimaryCtxRelease_v2(int) {
  ANSWER("cuDevicePrimaryCtxRelease_v2", false);
  std::lock_guard<std::mutex> lock(driver.mutex);
  return driver.contexts-- > 0 ? OK : INVALID_CONTEXT;
}
int cuCtxPushCurrent_v2(uintptr_t context) {
  ANSWER("cuCtxPushCurrent_v2", false);
  if (context != kContext || !driver.contexts) return INVALID_CONTEXT;
  ++current;
  return OK;
}
int cuCtxPopCurrent_v2(uintptr_t* context) {
  if (!current) return INVALID_CONTEXT;
  --current;
  *context = kContext;
  return OK;
}
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  ANSWER("cuMemGetInfo_v2", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  *free_bytes = kTotal - driver.used;
  *total = kTotal;
  return OK;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  ANSWER("cuMemAlloc_v2", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (!bytes) return INVALID_VALUE;
  if (bytes > kTotal - driver.used) return OUT_OF_MEMORY;
  const size_t rounded = (bytes + 255) / 256 * 256;
  void* memory = aligned_alloc(256, rounded);
  memset(memory, 0xDB, rounded);
  *address = (uint64_t)memory;
  driver.allocations[*address] = bytes;
  driver.used += bytes;
  return OK;
}
int cuMemFree_v2(uint64_t address) {
  ANSWER("cuMemFree_v2", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  auto found = driver.allocations.find(address);
  if (found == driver.allocations.end()) return INVALID_VALUE;
  driver.used -= found->second;
  // Whoever still reads it should notice.
  memset((void*)address, 0xDD, found->second);
  free((void*)address);
  driver.allocations.erase(found);
  return OK;
}
int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
  ANSWER("cuMemGetAddressRange_v2", true);
  if (!on_device(address, 1)) return NOT_FOUND;
  std::lock_guard<std::mutex> lock(driver.mutex);
  auto found = std::prev(driver.allocations.upper_bound(address));
  *base = found->first;
  *bytes = found->second;
  return OK;
}
int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
  ANSWER("cuMemHostRegister_v2", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  const uint64_t start = (uint64_t)memory;
  if (!bytes || start % 4096 || bytes % 4096) return INVALID_VALUE;
  for (auto& known : driver.registrations)
    if (start < known.first + known.second && known.first < start + bytes) return ALREADY_REGISTERED;
  driver.registrations[start] = bytes;
  return OK;
}
int cuMemHostUnregister(void* memory) {
  ANSWER("cuMemHostUnregister", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  return driver.registrations.erase((uint64_t)memory) ? OK : NOT_REGISTERED;
}
int cuStreamCreate(Stream** stream, unsigned) {
  ANSWER("cuStreamCreate", true);
  *stream = new Stream;
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    driver.streams.insert(*stream);
  }
  std::thread(run_stream, *stream).detach();
  return OK;
}
int cuStreamDestroy_v2(Stream* stream) {
  ANSWER("cuStreamDestroy_v2", true);
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (!driver.streams.erase(stream)) return INVALID_HANDLE;
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->closed = true;
  stream->changed.notify_all();
  return OK;
}
int cuStreamSynchronize(Stream* stream) {
  ANSWER("cuStreamSynchronize", true);
  auto point = std::make_shared<Point>();
  if (int code = enqueue(stream, [point] { point->reach(); })) return code;
  point->wait();
  return driver.dead;
}
int cuEventCreate(Event** event, unsigned) {
  ANSWER("cuEventCreate", true);
  *event = new Event;
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.events.insert(*event);
  return OK;
}
int cuEventDestroy_v2(Event* event) {
  ANSWER("cuEventDestroy_v2", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (!driver.events.erase(event)) return INVALID_HANDLE;
  delete event;
  return OK;
}
int cuEventRecord(Event* event, Stream* stream) {
  ANSWER("cuEventRecord", true);
  auto point = std::make_shared<Point>();
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (!driver.events.count(event)) return INVALID_HANDLE;
    event->point = point;
  }
  return enqueue(stream, [point] { point->reach(); });
}
int cuEventSynchronize(Event* event) {
  ANSWER("cuEventSynchronize", true);
  std::shared_ptr<Point> point;
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (!driver.events.count(event)) return INVALID_HANDLE;
    point = event->point;
  }
  if (point) point->wait();
  return driver.dead;
}
int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  ANSWER("cuStreamWaitEvent", true);
  std::shared_ptr<Point> point;
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (!driver.events.count(event)) return INVALID_HANDLE;
    point = event->point;
  }
  // As the real one: an event that was never recorded holds nothing up.
  return point ? enqueue(stream, [point] { point->wait(); }) : OK;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
  ANSWER("cuMemcpyHtoDAsync_v2", true);
  if (!on_device(to, bytes)) return INVALID_VALUE;
  return enqueue_work(stream, [=] { memcpy((void*)to, from, bytes); });
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
  ANSWER("cuMemcpyDtoHAsync_v2", true);
  if (!on_device(from, bytes)) return INVALID_VALUE;
  return enqueue_work(stream, [=] { memcpy(to, (const void*)from, bytes); });
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
  ANSWER("cuMemcpyDtoDAsync_v2", true);
  if (!on_device(from, bytes) || !on_device(to, bytes)) return INVALID_VALUE;
  return enqueue_work(stream, [=] { memmove((void*)to, (const void*)from, bytes); });
}
int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, Stream* stream) {
  ANSWER("cuMemsetD8Async", true);
  if (!on_device(to, bytes)) return INVALID_VALUE;
  return enqueue_work(stream, [=] { memset((void*)to, byte, bytes); });
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  ANSWER("cuDeviceGetAttribute", false);
  *value = attribute == 16 ? 4 : attribute == 75 ? 9 : 0;
  return attribute == 16 || attribute == 75 || attribute == 76 ? OK : INVALID_VALUE;
}
int cuModuleLoadData(uintptr_t* module, const void* image) {
  ANSWER("cuModuleLoadData", true);
  uint32_t magic;
  if ((uintptr_t)image % 8) return INVALID_VALUE;
  memcpy(&magic, image, sizeof magic);
  if (magic != 0xBA55ED50) return 200;  // CUDA_ERROR_INVALID_IMAGE
  static uintptr_t number = 0xA0;
  std::lock_guard<std::mutex> lock(driver.mutex);
  *module = ++number;
  driver.modules.insert(*module);
  return OK;
}
int cuModuleUnload(uintptr_t module) {
  ANSWER("cuModuleUnload", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  return driver.modules.erase(module) ? OK : INVALID_HANDLE;
}
int cuModuleGetFunction(Function** function, uintptr_t module, const char* name) {
  ANSWER("cuModuleGetFunction", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (!driver.modules.count(module)) return INVALID_HANDLE;
  if (strcmp(name, "kvbm_test_fill") && !(kvbm_kernels_has && kvbm_kernels_has(name))) return NOT_FOUND;
  *function = &functions.emplace(name, Function{name}).first->second;
  return OK;
}
int cuLaunchKernel(Function* function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned shared_bytes, Stream* stream, void** params, void** extra) {
  ANSWER("cuLaunchKernel", true);
  // The argument as one buffer; it is copied before this returns.
  if (!grid || !threads || threads > 1024 || params || !extra) return INVALID_VALUE;
  if (extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4]) return INVALID_VALUE;
  const size_t bytes = *(size_t*)extra[3];
  const std::string argument((const char*)extra[1], bytes);
  return enqueue_work(stream, [=] {
    if (function->name == "kvbm_test_fill") {
      Fill fill;
      memcpy(&fill, argument.data(), sizeof fill);
      if (!on_device(fill.to, fill.bytes)) driver.dead = ILLEGAL_ADDRESS;
      else memset((void*)fill.to, (int)fill.byte, fill.bytes);
    } else if (kvbm_kernels_run(function->name.c_str(), grid, threads, shared_bytes, argument.data(), bytes)) {
      driver.dead = ILLEGAL_ADDRESS;
    }
  });
}

// What a machine has.
void kvbm_test_machine(int devices, int version) {
  driver.devices = devices;
  driver.version = version;
}
// Lets a call fail once, after so many successes.
void kvbm_test_fail(const char* call, int code, int after) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.failing = call;
  driver.failure = code;
  driver.after = after;
}
// Lets an operation on a stream go astray, after so many that do not: the context is dead from then on.
void kvbm_test_go_astray(int after) { driver.fail_operation = after; }
// Longest delay before each operation.
void kvbm_test_delay(int us) { driver.delay_us = us; }
// Allocations, registrations, streams, events, modules and contexts that are still there.
int kvbm_test_left() {
  std::lock_guard<std::mutex> lock(driver.mutex);
  return (int)(driver.allocations.size() + driver.registrations.size() + driver.streams.size() +
               driver.events.size() + driver.modules.size()) + driver.contexts;
}

}  // extern "C"
