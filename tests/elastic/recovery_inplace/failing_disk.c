// To preload: while the file $FAULT_FLAG exists, calls with a path below $FAULT_PATH fail with error $FAULT_ERRNO;
// with EROFS only those that write.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int (*next_access)(const char *, int);

static int fails(const char *path, int writes) {
    const char *flag = getenv("FAULT_FLAG"), *below = getenv("FAULT_PATH"), *number = getenv("FAULT_ERRNO");
    if (!next_access) next_access = dlsym(RTLD_NEXT, "access");
    if (!flag || !below || !number || !path || !strstr(path, below) || next_access(flag, F_OK)) return 0;
    if (atoi(number) == EROFS && !writes) return 0;
    errno = atoi(number);
    return 1;
}
#define NEXT(name) static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name);
#define OPEN(name) int name(const char *path, int flags, ...) { \
    NEXT(name) va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
    return fails(path, flags & (O_WRONLY | O_RDWR | O_CREAT)) ? -1 : next(path, flags, mode); }
OPEN(open) OPEN(open64)
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { \
    NEXT(name) va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
    return fails(path, flags & (O_WRONLY | O_RDWR | O_CREAT)) ? -1 : next(at, path, flags, mode); }
OPENAT(openat) OPENAT(openat64)
int stat(const char *path, struct stat *s) { NEXT(stat) return fails(path, 0) ? -1 : next(path, s); }
int stat64(const char *path, struct stat64 *s) { NEXT(stat64) return fails(path, 0) ? -1 : next(path, s); }
int lstat(const char *path, struct stat *s) { NEXT(lstat) return fails(path, 0) ? -1 : next(path, s); }
int fstatat(int at, const char *path, struct stat *s, int f) { NEXT(fstatat) return fails(path, 0) ? -1 : next(at, path, s, f); }
int fstatat64(int at, const char *path, struct stat64 *s, int f) { NEXT(fstatat64) return fails(path, 0) ? -1 : next(at, path, s, f); }
int unlink(const char *path) { NEXT(unlink) return fails(path, 1) ? -1 : next(path); }
int mkdir(const char *path, mode_t m) { NEXT(mkdir) return fails(path, 1) ? -1 : next(path, m); }
int rename(const char *a, const char *b) { NEXT(rename) return fails(a, 1) || fails(b, 1) ? -1 : next(a, b); }
int renameat(int x, const char *a, int y, const char *b) { NEXT(renameat) return fails(a, 1) || fails(b, 1) ? -1 : next(x, a, y, b); }
