// Runs kernels that are described on standard input and writes what they made of memory to standard
// output.
//
// A job: kernel name, grid, threads, shared bytes, order of threads (0 forward, 1 reverse),
// argument, segments of memory, relocations. An answer: error text (empty if all went well),
// segments. Integers are 8 bytes, in the machine's order; texts and bytes are preceded by their
// length. Each segment is an allocation of its own with exactly its length, so that a sanitizer
// sees every access outside.
#include "launch.h"

namespace {

void read_exactly(void* to, size_t bytes) {
  if (bytes && fread(to, 1, bytes, stdin) != bytes) exit(feof(stdin) ? 0 : 3);
}

u64 read_number() {
  u64 number;
  read_exactly(&number, sizeof number);
  return number;
}

std::vector<u8> read_bytes() {
  std::vector<u8> bytes(read_number());
  read_exactly(bytes.data(), bytes.size());
  return bytes;
}

void write_bytes(const void* bytes, u64 length) {
  fwrite(&length, sizeof length, 1, stdout);
  fwrite(bytes, 1, length, stdout);
}

struct Segment {
  void* allocation;
  u8* bytes;
  u64 length;
};

// `skew` bytes behind a multiple of 64, as the address that the host calculated with.
Segment read_segment() {
  const u64 skew = read_number(), length = read_number();
  Segment segment = {nullptr, nullptr, length};
  if (posix_memalign(&segment.allocation, 64, skew + length)) exit(4);
  segment.bytes = (u8*)segment.allocation + skew;
  read_exactly(segment.bytes, length);
  return segment;
}

}  // namespace

int main() {
  for (;;) {
    const std::vector<u8> name = read_bytes();
    Call call = {find_kernel(std::string(name.begin(), name.end())), {}};
    const u32 grid = (u32)read_number(), threads = (u32)read_number();
    const size_t shared_bytes = read_number();
    const bool reverse = read_number();
    call.argument = read_bytes();
    std::vector<Segment> segments(read_number());
    for (Segment& segment : segments) segment = read_segment();
    // Addresses: which of (argument, segment 0, segment 1, ...) holds it and where, which segment
    // it points into and where.
    for (u64 left = read_number(); left; --left) {
      const u64 holder = read_number(), at = read_number(), target = read_number(), offset = read_number();
      const u64 address = (u64)(segments[target].bytes + offset);
      memcpy((holder ? segments[holder - 1].bytes : call.argument.data()) + at, &address, sizeof address);
    }
    const std::string error = !call.kernel ? "no such kernel" : !call.fits() ? "argument of another length"
                              : run(call, grid, threads, shared_bytes, reverse);
    write_bytes(error.data(), error.size());
    for (const Segment& segment : segments) {
      write_bytes(segment.bytes, segment.length);
      free(segment.allocation);
    }
    fflush(stdout);
  }
}
