// Streams, events, copies, kernels.
#include "state.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

static void run_stream(Stream* stream) {
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

static int enqueue(Stream* stream, std::function<void()> operation) {
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (!driver.streams.count(stream)) return INVALID_HANDLE;
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->queue.push_back(std::move(operation));
  stream->changed.notify_all();
  return OK;
}

// Work that touches memory; whether it goes well. A dead context does nothing.
static int enqueue_checked(Stream* stream, std::function<bool()> work) {
  return enqueue(stream, [work, life = driver.life.load()] {
    if (life != driver.life) return;
    bool good = !(driver.fail_operation >= 0 && driver.fail_operation-- == 0);
    if (good) {
      std::shared_lock<std::shared_mutex> working(driver.working);
      good = driver.dead || life != driver.life || work();
    }
    if (!good) kill_context(ILLEGAL_ADDRESS);
  });
}
static int enqueue_work(Stream* stream, std::function<void()> work) {
  return enqueue_checked(stream, [work] {
    work();
    return true;
  });
}

API int cuStreamCreate(Stream** stream, unsigned) {
  ANSWER("cuStreamCreate", true);
  *stream = new Stream;
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    driver.streams.insert(*stream);
  }
  std::thread(run_stream, *stream).detach();
  return OK;
}
API int cuStreamDestroy_v2(Stream* stream) {
  ANSWER_AFTER("cuStreamDestroy_v2", [&] {
    {
      std::lock_guard<std::mutex> lock(driver.mutex);
      if (!driver.streams.erase(stream)) return INVALID_HANDLE;
    }
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->closed = true;
    stream->changed.notify_all();
    return OK;
  });
}
API int cuStreamSynchronize(Stream* stream) {
  ANSWER("cuStreamSynchronize", true);
  auto point = std::make_shared<Point>();
  if (int code = enqueue(stream, [point] { point->reach(); })) return code;
  point->wait();
  return driver.dead;
}
API int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
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

API int cuEventCreate(Event** event, unsigned) {
  ANSWER("cuEventCreate", true);
  *event = new Event;
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.events.insert(*event);
  return OK;
}
API int cuEventDestroy_v2(Event* event) {
  ANSWER_AFTER("cuEventDestroy_v2", [&] {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (!driver.events.erase(event)) return INVALID_HANDLE;
    delete event;
    return OK;
  });
}
API int cuEventRecord(Event* event, Stream* stream) {
  ANSWER("cuEventRecord", true);
  auto point = std::make_shared<Point>();
  std::shared_ptr<std::atomic<int64_t>> at;
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (!driver.events.count(event)) return INVALID_HANDLE;
    event->point = point;
    at = event->at_ns;
  }
  return enqueue(stream, [point, at] {
    *at = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    point->reach();
  });
}
API int cuEventElapsedTime(float* ms, Event* start, Event* end) {
  ANSWER("cuEventElapsedTime", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (!driver.events.count(start) || !driver.events.count(end)) return INVALID_HANDLE;
  *ms = (float)((double)(*end->at_ns - *start->at_ns) / 1e6);
  return OK;
}
API int cuEventQuery(Event* event) {
  ANSWER("cuEventQuery", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (!driver.events.count(event)) return INVALID_HANDLE;
  // As the real one: an event that was never recorded is complete.
  return event->point && !event->point->is_reached() ? NOT_READY : OK;
}
API int cuEventSynchronize(Event* event) {
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

API int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
  ANSWER("cuMemcpyHtoDAsync_v2", true);
  if (!on_device(to, bytes) || !on_host((uint64_t)from, bytes)) return INVALID_VALUE;
  return enqueue_work(stream, [=] { memcpy((void*)to, from, bytes); });
}
API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
  ANSWER("cuMemcpyDtoHAsync_v2", true);
  if (!on_device(from, bytes) || !on_host((uint64_t)to, bytes)) return INVALID_VALUE;
  return enqueue_work(stream, [=] { memcpy(to, (const void*)from, bytes); });
}
API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
  ANSWER("cuMemcpyDtoDAsync_v2", true);
  if (!on_device(from, bytes) || !on_device(to, bytes)) return INVALID_VALUE;
  return enqueue_work(stream, [=] { memmove((void*)to, (const void*)from, bytes); });
}
API int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, Stream* stream) {
  ANSWER("cuMemsetD8Async", true);
  if (!on_device(to, bytes)) return INVALID_VALUE;
  return enqueue_work(stream, [=] { memset((void*)to, byte, bytes); });
}

// As of version 12.8: later ones have no `failed`. Nothing is queued if a copy is refused.
struct Attributes {
  int order;
  int from_hint[2];
  int to_hint[2];
  unsigned flags;
};

static int copy_batch(uint64_t* to, uint64_t* from, size_t* bytes, size_t count, Attributes* attributes,
                      size_t* attribute_begins, size_t attribute_count, size_t* failed, Stream* stream) {
  ANSWER("cuMemcpyBatchAsync", true);
  if (!count || count > 4096 || attribute_count != 1 || attribute_begins[0] || attributes->order != 1 || !stream) {
    *failed = SIZE_MAX;
    return INVALID_VALUE;
  }
  struct Copy {
    uint64_t to, from;
    size_t bytes;
  };
  std::vector<Copy> copies;
  for (size_t i = 0; i < count; ++i) {
    const bool sound = (on_device(to[i], bytes[i]) || on_host(to[i], bytes[i])) &&
                       (on_device(from[i], bytes[i]) || on_host(from[i], bytes[i]));
    if (!sound || !bytes[i]) {
      *failed = i;
      return INVALID_VALUE;
    }
    copies.push_back({to[i], from[i], bytes[i]});
  }
  // There is no order among them.
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    std::shuffle(copies.begin(), copies.end(), driver.random);
  }
  return enqueue_work(stream, [copies] {
    for (auto& copy : copies) memmove((void*)copy.to, (const void*)copy.from, copy.bytes);
  });
}

API int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status) {
  ANSWER("cuGetProcAddress_v2", false);
  *function = nullptr;
  const bool known = !strcmp(symbol, "cuMemcpyBatchAsync") && !driver.hidden.count(symbol);
  // What there is not, some drivers say by the code, others by the status alone.
  *status = !known ? 1 : driver.version < 12080 || version != 12080 ? 2 : 0;
  if (*status) return *status == 1 ? NOT_FOUND : OK;
  *function = (void*)copy_batch;
  return flags ? INVALID_VALUE : OK;
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

static auto& functions = *new std::map<std::string, Function>;

// Kernels that are linked in: whether there is one of this name, and whether its launch went wrong.
extern "C" int kvbm_kernels_has(const char* name);
extern "C" int kvbm_kernels_run(const char* name, unsigned grid, unsigned threads, unsigned shared_bytes,
                                const void* argument, size_t bytes);

API int cuModuleLoadData(uintptr_t* module, const void* image) {
  ANSWER("cuModuleLoadData", true);
  uint32_t magic;
  if ((uintptr_t)image % 8) return INVALID_VALUE;
  memcpy(&magic, image, sizeof magic);
  if (magic != 0xBA55ED50) return INVALID_IMAGE;
  static uintptr_t number = 0xA0;
  std::lock_guard<std::mutex> lock(driver.mutex);
  *module = ++number;
  driver.modules.insert(*module);
  return OK;
}
API int cuModuleUnload(uintptr_t module) {
  ANSWER_AFTER("cuModuleUnload", [&] {
    std::lock_guard<std::mutex> lock(driver.mutex);
    return driver.modules.erase(module) ? OK : INVALID_HANDLE;
  });
}
API int cuModuleGetFunction(Function** function, uintptr_t module, const char* name) {
  ANSWER("cuModuleGetFunction", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (!driver.modules.count(module)) return INVALID_HANDLE;
  if (strcmp(name, "kvbm_test_fill") && !kvbm_kernels_has(name)) return NOT_FOUND;
  *function = &functions.emplace(name, Function{name}).first->second;
  return OK;
}
API int cuLaunchKernel(Function* function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                       unsigned shared_bytes, Stream* stream, void** params, void** extra) {
  ANSWER("cuLaunchKernel", true);
  // The argument as one buffer; it is copied before this returns.
  if (!grid || !threads || threads > 1024 || params || !extra) return INVALID_VALUE;
  if (extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4]) return INVALID_VALUE;
  const size_t bytes = *(size_t*)extra[3];
  const std::string argument((const char*)extra[1], bytes);
  return enqueue_checked(stream, [=] {
    if (function->name != "kvbm_test_fill")
      return !kvbm_kernels_run(function->name.c_str(), grid, threads, shared_bytes, argument.data(), bytes);
    Fill fill;
    memcpy(&fill, argument.data(), sizeof fill);
    const bool sound = on_device(fill.to, fill.bytes);
    if (sound) memset((void*)fill.to, (int)fill.byte, fill.bytes);
    return sound;
  });
}
