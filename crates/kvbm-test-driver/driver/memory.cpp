// Memory of the device: a pool that other processes can map, since its handles are shared with
// them; memory of the host.
#include "state.h"

#include <sys/mman.h>
#include <unistd.h>

bool on_device(uint64_t address, size_t bytes) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  auto after = driver.ranges.upper_bound(address);
  if (after == driver.ranges.begin()) return false;
  auto found = std::prev(after);
  return address + bytes <= found->first + found->second.bytes;
}

bool on_host(uint64_t address, size_t bytes) {
  std::lock_guard<std::mutex> lock(driver.mutex);
  for (auto& known : driver.registrations) {
    const uint64_t begin = known.first, end = begin + known.second;
    if (address < end && begin < address + bytes) return begin <= address && address + bytes <= end;
  }
  return true;
}

// Bytes that the device has: KVBM_TEST_DRIVER_MIB, or 256 MiB.
__attribute__((constructor)) static void open_pool() {
  const char* mib = getenv("KVBM_TEST_DRIVER_MIB");
  driver.total = (mib ? strtoull(mib, nullptr, 10) : 256) << 20;
  driver.pool_file = memfd_create("kvbm-test-device", MFD_CLOEXEC);
  if (ftruncate(driver.pool_file, (off_t)driver.total)) abort();
  driver.pool = (uint8_t*)mmap(nullptr, driver.total, PROT_READ | PROT_WRITE, MAP_SHARED, driver.pool_file, 0);
  if (driver.pool == MAP_FAILED) abort();
}

// The first gap of the pool that is large enough; 0 if there is none. The lock is held.
static uint64_t find_gap(size_t bytes) {
  const uint64_t begin = (uint64_t)driver.pool, end = begin + driver.total;
  uint64_t at = begin;
  for (auto known = driver.ranges.lower_bound(begin); known != driver.ranges.end() && known->first < end; ++known) {
    if (known->first - at >= bytes) return at;
    at = (known->first + known->second.bytes + 255) / 256 * 256;
  }
  return end >= at && end - at >= bytes ? at : 0;
}

API int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  ANSWER("cuMemGetInfo_v2", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  *free_bytes = driver.total - driver.used;
  *total = driver.total;
  return OK;
}
API int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  ANSWER("cuMemAlloc_v2", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (!bytes) return INVALID_VALUE;
  const uint64_t found = bytes > driver.total - driver.used ? 0 : find_gap(bytes);
  if (!found) return OUT_OF_MEMORY;
  memset((void*)found, 0xDB, bytes);
  *address = found;
  driver.ranges[found] = {bytes, true, 0};
  driver.used += bytes;
  return OK;
}
API int cuMemFree_v2(uint64_t address) {
  ANSWER_AFTER("cuMemFree_v2", [&] {
    std::lock_guard<std::mutex> lock(driver.mutex);
    auto found = driver.ranges.find(address);
    if (found == driver.ranges.end() || !found->second.pooled) return INVALID_VALUE;
    driver.used -= found->second.bytes;
    // Whoever still reads it should notice.
    memset((void*)address, 0xDD, found->second.bytes);
    driver.ranges.erase(found);
    return OK;
  });
}
API int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
  ANSWER("cuMemGetAddressRange_v2", true);
  if (!on_device(address, 1)) return NOT_FOUND;
  std::lock_guard<std::mutex> lock(driver.mutex);
  auto found = std::prev(driver.ranges.upper_bound(address));
  *base = found->first;
  *bytes = found->second.bytes;
  return OK;
}
API int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
  ANSWER("cuMemHostRegister_v2", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  const uint64_t start = (uint64_t)memory;
  if (!bytes || start % 4096 || bytes % 4096 || flags != 1) return INVALID_VALUE;
  for (auto& known : driver.registrations)
    if (start < known.first + known.second && known.first < start + bytes) return ALREADY_REGISTERED;
  driver.registrations[start] = bytes;
  return OK;
}
API int cuMemHostUnregister(void* memory) {
  ANSWER_AFTER("cuMemHostUnregister", [&] {
    std::lock_guard<std::mutex> lock(driver.mutex);
    return driver.registrations.erase((uint64_t)memory) ? OK : NOT_REGISTERED;
  });
}
