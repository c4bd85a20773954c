// Preloaded into an engine: reads of slot files that come late or fail.
//
// READ_FAULTS names a file of five 64-bit numbers, which tests write and read while the engine runs:
// microseconds that each read takes longer, the errno with which it fails (0: none), and what came
// of it: reads that were seen, were late and failed. The disk tier reads with preadv where its
// engine is `threads`.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

struct faults {
    _Atomic int64_t delay_us, error, seen, late, failed;
};

static struct faults *faults;
static ssize_t (*real_preadv)(int, const struct iovec *, int, off_t);

__attribute__((constructor)) static void begin(void) {
    real_preadv = (ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, "preadv");
    const char *path = getenv("READ_FAULTS");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *memory = mmap(NULL, sizeof *faults, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) faults = memory;
    close(file);
}

static int is_slot_file(int file) {
    static const char name[] = "/slots.kvbm";
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path);
    size_t tail = sizeof name - 1;
    return length >= (ssize_t)tail && memcmp(path + length - tail, name, tail) == 0;
}

ssize_t preadv(int file, const struct iovec *runs, int count, off_t offset) {
    if (faults != NULL && is_slot_file(file)) {
        int64_t delay = faults->delay_us, error = faults->error;
        faults->seen++;
        if (delay > 0) {
            faults->late++;
            usleep(delay);
        }
        if (error != 0) {
            faults->failed++;
            errno = (int)error;
            return -1;
        }
    }
    return real_preadv(file, runs, count, offset);
}

ssize_t preadv64(int file, const struct iovec *runs, int count, off64_t offset) {
    return preadv(file, runs, count, offset);
}
