/* Notes every change that a process makes to files below $POWER_CUT_ROOT, in order, in
 * $POWER_CUT_LOG: what was written where, and what was synced. Preloaded; Linux.
 *
 *   C inode path      a file was created       W inode offset hex   bytes were written
 *   M path            a folder was created     T inode size         a file was cut
 *   R from to         a file was renamed       S inode              a file was synced
 *   U path            a file was unlinked      D path               a folder was synced
 *   A hex             a line was written to the file "acks": the process said something
 *
 * Paths have no spaces. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *notes;

static int below(const char *path) {
    const char *root = getenv("POWER_CUT_ROOT");
    return root && path && strncmp(path, root, strlen(root)) == 0;
}

static FILE *out(void) {
    if (!notes) notes = fopen(getenv("POWER_CUT_LOG"), "ae");
    if (!notes) abort();
    return notes;
}

/* The path of a descriptor below the root; none for any other. */
static int path_of(int fd, char *path, struct stat *about) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, 4095);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path) && fstat(fd, about) == 0;
}

static void begin(void) { pthread_mutex_lock(&lock); }

static void end(void) {
    if (notes) fflush(notes);
    pthread_mutex_unlock(&lock);
}

static void hex(const void *data, size_t size) {
    for (size_t n = 0; n < size; n++) fprintf(out(), "%02x", ((const unsigned char *)data)[n]);
    fputc('\n', out());
}

static void wrote(int fd, const void *data, ssize_t size, off_t offset) {
    char path[4096];
    struct stat about;
    int was = errno;
    if (size > 0 && path_of(fd, path, &about) && S_ISREG(about.st_mode)) {
        size_t length = strlen(path);
        if (length > 5 && strcmp(path + length - 5, "/acks") == 0)
            fprintf(out(), "A ");
        else
            fprintf(out(), "W %lu %lld ", (unsigned long)about.st_ino, (long long)offset);
        hex(data, (size_t)size);
    }
    errno = was;
}

static int opened(int fd, const char *path, int flags, int existed) {
    char full[4096];
    struct stat about;
    int was = errno;
    if (fd >= 0 && path_of(fd, full, &about) && S_ISREG(about.st_mode)) {
        if (!existed)
            fprintf(out(), "C %lu %s\n", (unsigned long)about.st_ino, full);
        else if (flags & O_TRUNC)
            fprintf(out(), "T %lu 0\n", (unsigned long)about.st_ino);
    }
    errno = was;
    (void)path;
    return fd;
}

#define OPEN(name)                                          \
    int name(const char *path, int flags, ...) {            \
        va_list more;                                       \
        va_start(more, flags);                              \
        mode_t mode = va_arg(more, mode_t);                 \
        va_end(more);                                       \
        begin();                                            \
        int existed = access(path, F_OK) == 0;              \
        int fd = REAL(name)(path, flags, mode);             \
        opened(fd, path, flags, existed);                   \
        end();                                              \
        return fd;                                          \
    }
OPEN(open)
OPEN(open64)

#define WRITE(name, type)                                              \
    ssize_t name(int fd, const void *data, size_t size, type offset) { \
        begin();                                                       \
        ssize_t done = REAL(name)(fd, data, size, offset);             \
        wrote(fd, data, done, offset);                                 \
        end();                                                         \
        return done;                                                   \
    }
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t size) {
    static __thread int inside; /* the notes are written with it, too */
    if (inside) return REAL(write)(fd, data, size);
    inside = 1;
    begin();
    ssize_t done = REAL(write)(fd, data, size);
    if (done > 0) wrote(fd, data, done, lseek(fd, 0, SEEK_CUR) - done);
    end();
    inside = 0;
    return done;
}

static void cut(int fd, long long size) {
    char path[4096];
    struct stat about;
    if (path_of(fd, path, &about)) fprintf(out(), "T %lu %lld\n", (unsigned long)about.st_ino, size);
}

#define TRUNCATE(name, type)              \
    int name(int fd, type size) {         \
        begin();                          \
        int done = REAL(name)(fd, size);  \
        if (done == 0) cut(fd, size);     \
        end();                            \
        return done;                      \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

static void synced(int fd) {
    char path[4096];
    struct stat about;
    if (!path_of(fd, path, &about)) return;
    if (S_ISDIR(about.st_mode))
        fprintf(out(), "D %s\n", path);
    else
        fprintf(out(), "S %lu\n", (unsigned long)about.st_ino);
}

#define SYNC(name)                  \
    int name(int fd) {              \
        begin();                    \
        int done = REAL(name)(fd);  \
        if (done == 0) synced(fd);  \
        end();                      \
        return done;                \
    }
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *from, const char *to) {
    begin();
    int done = REAL(rename)(from, to);
    if (done == 0 && below(to)) fprintf(out(), "R %s %s\n", from, to);
    end();
    return done;
}

int unlink(const char *path) {
    begin();
    int done = REAL(unlink)(path);
    if (done == 0 && below(path)) fprintf(out(), "U %s\n", path);
    end();
    return done;
}

int mkdir(const char *path, mode_t mode) {
    begin();
    int done = REAL(mkdir)(path, mode);
    if (done == 0 && below(path)) fprintf(out(), "M %s\n", path);
    end();
    return done;
}
