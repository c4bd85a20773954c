// What tests do to the machine, and what they ask it.
#include "state.h"

// What the machine has.
API void kvbm_test_machine(int devices, int version) {
  driver.devices = devices;
  driver.version = version;
}
// Lets a call fail once, after so many successes.
API void kvbm_test_fail(const char* call, int code, int after) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.failing = call;
  driver.failure = code;
  driver.after = after;
}
// Lets the call of this number fail, whichever it is, counted from here; a negative one: none.
API void kvbm_test_fail_call(int number, int code) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.fail_at = number < 0 ? -1 : driver.calls + number;
  driver.fail_with = code;
  driver.failed.clear();
}
// The call that failed by its number; empty if none has.
API const char* kvbm_test_failed() { return driver.failed.c_str(); }
// Calls so far; of one function, or of all.
API int kvbm_test_calls(const char* call) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  return *call ? driver.counts[call] : driver.calls;
}
// Hides what newer drivers have, as an old one does.
API void kvbm_test_hide(const char* symbol) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.hidden.insert(symbol);
}
// A machine without a fabric between its nodes.
API void kvbm_test_no_fabric() { driver.no_fabric = true; }
// Lets an operation on a stream fail on the device, after so many that succeed: the context is dead
// then.
API void kvbm_test_fail_on_device(int after) { driver.fail_operation = after; }
// The process has started anew.
API void kvbm_test_revive() {
  std::unique_lock<std::shared_mutex> nobody_works(driver.working);
  std::lock_guard<std::mutex> lock(driver.mutex);
  ++driver.life;
  driver.dead = 0;
  driver.fail_operation = -1;
  driver.ranges.clear();
  driver.used = 0;
  driver.registrations.clear();
  driver.reservations.clear();
  driver.objects.clear();
  driver.imported.clear();
  driver.events.clear();
  driver.streams.clear();
  driver.modules.clear();
}
// Longest delay before each operation.
API void kvbm_test_delay(int us) { driver.delay_us = us; }
// Whatever is still there. What was in a context that is dead went with it.
API int kvbm_test_left() {
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (driver.dead) return driver.contexts;
  return (int)(driver.ranges.size() + driver.reservations.size() + driver.objects.size() + driver.imported.size() +
               driver.registrations.size() + driver.streams.size() + driver.events.size() + driver.modules.size()) +
         driver.contexts;
}
