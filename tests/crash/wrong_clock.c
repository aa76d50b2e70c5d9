/* A wall clock that is wrong by as many microseconds as a file says, for every process that was started with this library before libc.
 * SQLite and libpq are in it as well as Python. The monotonic clock is left alone: that is what a clock that was set does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define US 1000000LL
static volatile int64_t *wrong_us;

/* From now on this process goes by the clock in that file of eight bytes, which others may change. */
int follow_clock(const char *path) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    void *found = mmap(NULL, sizeof *wrong_us, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return -1;
    wrong_us = found;
    return 0;
}

static void shift(struct timespec *at, int64_t by_us) {
    int64_t us = at->tv_sec * US + at->tv_nsec / 1000 + by_us;
    at->tv_nsec = us % US * 1000 + at->tv_nsec % 1000;
    at->tv_sec = us / US;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, which, now);
    if (!failed && wrong_us && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) shift(now, *wrong_us);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now) *now = at.tv_sec;
    return at.tv_sec;
}

/* A Python that was built for an old libc waits until a time of the wall clock, and the kernel's is not the one that we show. */
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    struct timespec at = *until;
    if (!real) real = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    if (wrong_us) shift(&at, -*wrong_us);
    return real(semaphore, &at);
}
