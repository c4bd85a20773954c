// A CUDA driver without hardware: the calls that kvbm makes, over host memory, with streams that
// run on threads of their own after random delays. It is strict where the real one is: calls that
// need a current context refuse without one, handles are checked, and whatever is left behind can
// be counted. Failures are injected through the kvbm_test_* functions.
#pragma once
#include <atomic>
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
#include <shared_mutex>
#include <string>

// Part of the driver's interface; everything else stays inside the library.
#define API extern "C" __attribute__((visibility("default")))

enum Result {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801,
};

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
  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex);
    return reached;
  }
};

struct Event {
  std::shared_ptr<Point> point;  // of the last record
  // When that was reached.
  std::shared_ptr<std::atomic<int64_t>> at_ns = std::make_shared<std::atomic<int64_t>>(0);
};

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool closed = false;
};

// Memory that has addresses of the device.
struct Range {
  size_t bytes;
  bool pooled;          // allocated, not mapped
  uintptr_t object;     // what is mapped there
};

// Physical memory that is mapped on its own.
struct Object {
  int file;
  size_t bytes;
  int kinds;  // of handles that it may be exported as
};

struct Driver {
  std::mutex mutex;
  bool initialised = false;
  int devices = 2;
  int version = 12080;
  int contexts = 0;
  size_t total = 0;
  size_t used = 0;
  int pool_file = -1;
  uint8_t* pool = nullptr;
  std::map<uint64_t, Range> ranges;
  std::map<uint64_t, size_t> reservations;
  std::map<uintptr_t, Object> objects;
  std::map<uint64_t, size_t> imported;
  std::map<uint64_t, size_t> registrations;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::set<uintptr_t> modules;
  std::set<std::string> hidden;  // symbols that cuGetProcAddress does not know
  bool no_fabric = false;
  std::string failing;  // the call that fails
  int failure = 0;      // with what
  int after = 0;        // once it has succeeded so often
  int calls = 0;        // calls so far
  int fail_at = -1;     // the number of the call that fails
  int fail_with = 0;
  std::string failed;   // the call that did
  std::map<std::string, int> counts;
  std::atomic<int> dead{0};
  std::atomic<int> life{0};     // of the process: work of an earlier one is never done
  // Held by work that touches memory: nothing does any more when a context is dead.
  std::shared_mutex working;
  std::atomic<int> fail_operation{-1};  // the operation on a stream that kills the context
  std::atomic<int> delay_us{0};
  std::mt19937 random{1};
};

// Never destroyed: a process may end while threads are in the driver, and who ends it does not wait
// for them.
extern Driver& driver;
extern thread_local int current;  // contexts pushed on this thread

// The context is dead from here on.
void kill_context(int code);
// What a call answers before it does anything.
int answer(const char* call, bool needs_context);
// Whether the range lies in memory of the device.
bool on_device(uint64_t address, size_t bytes);
// Whether an engine of the device may copy from or to the range of host memory: registered as a
// whole, or not at all.
bool on_host(uint64_t address, size_t bytes);

#define ANSWER(call, needs_context) \
  if (int code = answer(call, needs_context)) return code

// A call that gives something back: it does so even if it fails, as the real one does when it
// reports an older failure.
#define ANSWER_AFTER(call, work)          \
  const int injected = answer(call, true); \
  if (driver.dead) return injected;        \
  const int done = work();                 \
  return injected ? injected : done
