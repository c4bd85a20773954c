// Memory that processes share: handles of allocations, and memory that is created, mapped and
// exported on its own.
#include "state.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const size_t kGranularity = 2 << 20;
enum Kind { POSIX_FD = 1, FABRIC = 8 };

// What a handle of 64 bytes says: a file of a process, and where the memory lies in it.
struct Shared {
  uint64_t magic;
  int pid;
  int file;
  uint64_t offset;
  uint64_t bytes;
};
static const uint64_t kMagic = 0x6B76626D2D697063;

struct Handle {
  unsigned char bytes[64];
};

static int open_shared(const Shared& shared) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.pid, shared.file);
  return open(path, O_RDWR | O_CLOEXEC);
}

API int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
  ANSWER("cuIpcGetMemHandle", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  auto after = driver.ranges.upper_bound(address);
  if (after == driver.ranges.begin()) return INVALID_VALUE;
  auto found = std::prev(after);
  // Memory that is mapped has no handle of this kind.
  if (!found->second.pooled || address >= found->first + found->second.bytes) return INVALID_VALUE;
  const Shared shared = {kMagic, (int)getpid(), driver.pool_file, found->first - (uint64_t)driver.pool,
                         found->second.bytes};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &shared, sizeof shared);
  return OK;
}
API int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned flags) {
  ANSWER("cuIpcOpenMemHandle_v2", true);
  Shared shared;
  memcpy(&shared, &handle, sizeof shared);
  if (shared.magic != kMagic || flags != 1) return INVALID_VALUE;
  // The process that has the memory may not open it again.
  if (shared.pid == (int)getpid()) return INVALID_CONTEXT;
  const int file = open_shared(shared);
  if (file < 0) return INVALID_HANDLE;
  const uint64_t page = shared.offset / 4096 * 4096, skip = shared.offset - page;
  void* memory = mmap(nullptr, skip + shared.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)page);
  close(file);
  if (memory == MAP_FAILED) return OUT_OF_MEMORY;
  *address = (uint64_t)memory + skip;
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.ranges[*address] = {shared.bytes, false, 0};
  driver.imported[*address] = skip + shared.bytes;
  return OK;
}
API int cuIpcCloseMemHandle(uint64_t address) {
  ANSWER_AFTER("cuIpcCloseMemHandle", [&] {
    std::lock_guard<std::mutex> lock(driver.mutex);
    auto found = driver.imported.find(address);
    if (found == driver.imported.end()) return INVALID_VALUE;
    munmap((void*)(address / 4096 * 4096), found->second);
    driver.imported.erase(found);
    driver.ranges.erase(address);
    return OK;
  });
}

struct Properties {
  int type;
  int kinds;
  int location[2];
  void* unused;
  unsigned char flags[8];
};

static bool sound(const Properties* wanted) {
  return wanted->type == 1 && wanted->location[0] == 1 && !(wanted->kinds & ~(POSIX_FD | FABRIC));
}

API int cuMemGetAllocationGranularity(size_t* bytes, const Properties* wanted, int) {
  ANSWER("cuMemGetAllocationGranularity", false);
  *bytes = kGranularity;
  return sound(wanted) ? OK : INVALID_VALUE;
}
static uintptr_t keep(int file, size_t bytes, int kinds) {
  static uintptr_t number = 0xF00;
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.objects[++number] = {file, bytes, kinds};
  return number;
}
API int cuMemCreate(uintptr_t* handle, size_t bytes, const Properties* wanted, uint64_t) {
  ANSWER("cuMemCreate", true);
  if (!sound(wanted) || !bytes || bytes % kGranularity) return INVALID_VALUE;
  if ((wanted->kinds & FABRIC) && driver.no_fabric) return 800;
  const int file = memfd_create("kvbm-test-object", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, (off_t)bytes)) return OUT_OF_MEMORY;
  *handle = keep(file, bytes, wanted->kinds);
  return OK;
}
API int cuMemRelease(uintptr_t handle) {
  ANSWER_AFTER("cuMemRelease", [&] {
    std::lock_guard<std::mutex> lock(driver.mutex);
    auto found = driver.objects.find(handle);
    if (found == driver.objects.end()) return INVALID_VALUE;
    close(found->second.file);
    driver.objects.erase(found);
    return OK;
  });
}
API int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t, uint64_t, uint64_t) {
  ANSWER("cuMemAddressReserve", true);
  void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return OUT_OF_MEMORY;
  *address = (uint64_t)memory;
  std::lock_guard<std::mutex> lock(driver.mutex);
  driver.reservations[*address] = bytes;
  return OK;
}
API int cuMemAddressFree(uint64_t address, size_t bytes) {
  ANSWER_AFTER("cuMemAddressFree", [&] {
    std::lock_guard<std::mutex> lock(driver.mutex);
    auto found = driver.reservations.find(address);
    if (found == driver.reservations.end() || found->second != bytes || driver.ranges.count(address))
      return INVALID_VALUE;
    munmap((void*)address, bytes);
    driver.reservations.erase(found);
    return OK;
  });
}
API int cuMemMap(uint64_t address, size_t bytes, size_t offset, uintptr_t handle, uint64_t) {
  ANSWER("cuMemMap", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  auto object = driver.objects.find(handle);
  auto reserved = driver.reservations.find(address);
  if (object == driver.objects.end() || reserved == driver.reservations.end()) return INVALID_VALUE;
  if (offset || bytes > object->second.bytes || bytes > reserved->second) return INVALID_VALUE;
  void* memory = mmap((void*)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, object->second.file, 0);
  if (memory == MAP_FAILED) return OUT_OF_MEMORY;
  driver.ranges[address] = {bytes, false, handle};
  return OK;
}
API int cuMemUnmap(uint64_t address, size_t bytes) {
  ANSWER_AFTER("cuMemUnmap", [&] {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (!driver.ranges.erase(address)) return INVALID_VALUE;
    mmap((void*)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return OK;
  });
}
struct Access {
  int location[2];
  int flags;
};
API int cuMemSetAccess(uint64_t address, size_t bytes, const Access* access, size_t count) {
  ANSWER("cuMemSetAccess", true);
  if (count != 1 || access->location[0] != 1 || access->flags != 3) return INVALID_VALUE;
  return mprotect((void*)address, bytes, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}
API int cuMemRetainAllocationHandle(uintptr_t* handle, void* memory) {
  ANSWER("cuMemRetainAllocationHandle", true);
  Object found;
  {
    std::lock_guard<std::mutex> lock(driver.mutex);
    auto after = driver.ranges.upper_bound((uint64_t)memory);
    if (after == driver.ranges.begin()) return INVALID_VALUE;
    auto range = std::prev(after);
    if (!range->second.object || (uint64_t)memory >= range->first + range->second.bytes) return INVALID_VALUE;
    found = driver.objects.at(range->second.object);
  }
  *handle = keep(dup(found.file), found.bytes, found.kinds);
  return OK;
}
API int cuMemGetAllocationPropertiesFromHandle(Properties* properties, uintptr_t handle) {
  ANSWER("cuMemGetAllocationPropertiesFromHandle", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  auto found = driver.objects.find(handle);
  if (found == driver.objects.end()) return INVALID_VALUE;
  *properties = {1, found->second.kinds, {1, 0}, nullptr, {}};
  return OK;
}
API int cuMemExportToShareableHandle(void* out, uintptr_t handle, int kind, uint64_t) {
  ANSWER("cuMemExportToShareableHandle", true);
  std::lock_guard<std::mutex> lock(driver.mutex);
  auto found = driver.objects.find(handle);
  if (found == driver.objects.end() || !(found->second.kinds & kind)) return INVALID_VALUE;
  if (kind == POSIX_FD) {
    *(int*)out = dup(found->second.file);
    return OK;
  }
  // The fabric keeps the memory open: so does this descriptor, which nobody closes.
  const Shared shared = {kMagic, (int)getpid(), dup(found->second.file), 0, found->second.bytes};
  memset(out, 0, sizeof(Handle));
  memcpy(out, &shared, sizeof shared);
  return OK;
}
API int cuMemImportFromShareableHandle(uintptr_t* handle, void* in, int kind) {
  ANSWER("cuMemImportFromShareableHandle", true);
  int file;
  if (kind == POSIX_FD) {
    file = dup((int)(uintptr_t)in);
  } else {
    Shared shared;
    memcpy(&shared, in, sizeof shared);
    if (kind != FABRIC || shared.magic != kMagic) return INVALID_VALUE;
    file = open_shared(shared);
  }
  struct stat status;
  if (file < 0 || fstat(file, &status)) return INVALID_HANDLE;
  *handle = keep(file, (size_t)status.st_size, kind);
  return OK;
}
