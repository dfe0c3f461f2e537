/* Records the file operations of a process below a folder, in the order in which they took effect;
 * preloaded by tests/power_cut/recording.py.
 *
 *   RECORD_ROOT   the folder, absolute and without links; nothing is recorded without it
 *   RECORD_LOG    a file outside of it. A record is a line: the kind of call, two numbers (the
 *                 bytes that follow the line, and a place or a size) and a path; of a rename, the
 *                 bytes that follow are the new path
 *
 * One call takes effect at a time, so that the order is certain. Calls that can't be recorded are
 * noted as "other". A process that this one forks or starts is left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define LOG_FD 1000 /* out of the way of those that the process opens */

static char root[PATH_MAX];
static size_t root_length;
static pid_t armed;
static int log_fd = -1;
static pthread_mutex_t order = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static void *next(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}
/* The C library's own function, under the name `real`. */
#define REAL(name)                                   \
    static __typeof__(&name) real;                   \
    if (!real) real = (__typeof__(&name))next(#name)

/* Called in a process that is to be recorded; tests/faults/nursery.py has the name. */
void inject_arm(void) {
    const char *folder = getenv("RECORD_ROOT"), *log = getenv("RECORD_LOG");
    armed = 0;
    if (!folder || !log || strlen(folder) >= sizeof root) return;
    strcpy(root, folder);
    root_length = strlen(root);
    int fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    log_fd = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, LOG_FD);
    syscall(SYS_close, fd);
    armed = syscall(SYS_getpid);
}

static int is_below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static const char *path_of(int fd, char *whole) {
    char link[64];
    if (!armed || syscall(SYS_getpid) != armed || fd < 0) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX - 1);
    if (length < 0) return NULL;
    whole[length] = 0;
    return is_below(whole) ? whole : NULL;
}

/* The absolute path of one below the root, in `whole`; NULL for all others. */
static const char *below(int folder, const char *path, char *whole) {
    char base[PATH_MAX];
    if (!path || !armed || syscall(SYS_getpid) != armed) return NULL;
    if (path[0] == '/') return is_below(path) ? path : NULL;
    if (folder == AT_FDCWD) {
        if (syscall(SYS_getcwd, base, sizeof base) < 0) return NULL;
    } else if (!path_of(folder, base)) {
        return NULL;
    }
    int length = snprintf(whole, PATH_MAX, *path ? "%s/%s" : "%s%s", base, path);
    return length < PATH_MAX && is_below(whole) ? whole : NULL;
}
#define AT(folder, path) below(folder, path, (char[PATH_MAX]){0})
#define HERE(path) AT(AT_FDCWD, path)
#define OF(fd) path_of(fd, (char[PATH_MAX]){0})

static void put(const void *data, size_t size) {
    for (const char *from = data; size;) {
        long written = syscall(SYS_write, log_fd, from, size);
        if (written <= 0) abort();
        from += written;
        size -= written;
    }
}
static void note(const char *kind, size_t bytes, long place, const char *path) {
    char line[PATH_MAX + 96];
    put(line, snprintf(line, sizeof line, "%s %zu %ld %s\n", kind, bytes, place, path));
}

/* A call that takes effect and is noted, before any other is. */
#define RECORDED(type, call, succeeded, noting)      \
    do {                                             \
        pthread_mutex_lock(&order);                  \
        type result = call;                          \
        if (succeeded) noting;                       \
        pthread_mutex_unlock(&order);                \
        return result;                               \
    } while (0)
#define NAMED(path, call, noting) RECORDED(int, call, path && !result, noting)

/* Names --------------------------------------------------------------------------------------- */

#define MKDIR(path_, call)                                  \
    const char *inside = path_;                             \
    NAMED(inside, call, note("mkdir", 0, 0, inside))
int mkdir(const char *path, mode_t rights) {
    REAL(mkdir);
    MKDIR(HERE(path), real(path, rights));
}
int mkdirat(int folder, const char *path, mode_t rights) {
    REAL(mkdirat);
    MKDIR(AT(folder, path), real(folder, path, rights));
}
#define REMOVE(path_, call)                                 \
    const char *inside = path_;                             \
    NAMED(inside, call, note("remove", 0, 0, inside))
int unlink(const char *path) {
    REAL(unlink);
    REMOVE(HERE(path), real(path));
}
int rmdir(const char *path) {
    REAL(rmdir);
    REMOVE(HERE(path), real(path));
}
int remove(const char *path) {
    REAL(remove);
    REMOVE(HERE(path), real(path));
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    REMOVE(AT(folder, path), real(folder, path, flags));
}
static void note_rename(const char *from, const char *to) {
    /* Into the folder or out of it. */
    if (!from || !to) {
        note("other", 0, 0, from ? from : to);
        return;
    }
    note("rename", strlen(to), 0, from);
    put(to, strlen(to));
}
#define RENAME(from_, to_, call)                                     \
    const char *before = from_, *after = to_;                        \
    RECORDED(int, call, (before || after) && !result, note_rename(before, after))
int rename(const char *from, const char *to) {
    REAL(rename);
    RENAME(HERE(from), HERE(to), real(from, to));
}
int renameat(int folder, const char *from, int other, const char *to) {
    REAL(renameat);
    RENAME(AT(folder, from), AT(other, to), real(folder, from, other, to));
}
int renameat2(int folder, const char *from, int other, const char *to, unsigned flags) {
    REAL(renameat2);
    RENAME(AT(folder, from), AT(other, to), real(folder, from, other, to, flags));
}

/* Contents ------------------------------------------------------------------------------------ */

#define OPENED(name, inside_, ...)                                                        \
    mode_t rights = 0;                                                                    \
    if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) {                                 \
        va_list more;                                                                     \
        va_start(more, flags);                                                            \
        rights = va_arg(more, mode_t);                                                    \
        va_end(more);                                                                     \
    }                                                                                     \
    const char *inside = flags & (O_CREAT | O_TRUNC) ? inside_ : NULL;                    \
    RECORDED(int, real(__VA_ARGS__, flags, rights), inside && result >= 0,                \
             note("open", 0, !!(flags & O_TRUNC), inside))
int open(const char *path, int flags, ...) {
    REAL(open);
    OPENED(open, HERE(path), path);
}
int open64(const char *path, int flags, ...) {
    REAL(open64);
    OPENED(open64, HERE(path), path);
}
int openat(int folder, const char *path, int flags, ...) {
    REAL(openat);
    OPENED(openat, AT(folder, path), folder, path);
}
int openat64(int folder, const char *path, int flags, ...) {
    REAL(openat64);
    OPENED(openat64, AT(folder, path), folder, path);
}

static void note_write(const char *path, const struct iovec *pieces, ssize_t size, off_t place) {
    note("write", size, place, path);
    for (; size > 0; pieces++) {
        size_t part = (size_t)size < pieces->iov_len ? (size_t)size : pieces->iov_len;
        put(pieces->iov_base, part);
        size -= part;
    }
}
#define WRITTEN(pieces, call, place)                                     \
    const char *inside = OF(fd);                                         \
    RECORDED(ssize_t, call, inside && result > 0, note_write(inside, pieces, result, place))
#define BEHIND (lseek(fd, 0, SEEK_CUR) - result)
ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    struct iovec piece = {(void *)data, size};
    WRITTEN(&piece, real(fd, data, size), BEHIND);
}
ssize_t writev(int fd, const struct iovec *pieces, int count) {
    REAL(writev);
    WRITTEN(pieces, real(fd, pieces, count), BEHIND);
}
#define WRITE_AT(name, offset)                                           \
    ssize_t name(int fd, const void *data, size_t size, offset place) {  \
        REAL(name);                                                      \
        struct iovec piece = {(void *)data, size};                       \
        WRITTEN(&piece, real(fd, data, size, place), place);             \
    }
WRITE_AT(pwrite, off_t)
WRITE_AT(pwrite64, off64_t)
#define WRITEV_AT(name, offset)                                                   \
    ssize_t name(int fd, const struct iovec *pieces, int count, offset place) {   \
        REAL(name);                                                               \
        WRITTEN(pieces, real(fd, pieces, count, place), place);                   \
    }
WRITEV_AT(pwritev, off_t)
WRITEV_AT(pwritev64, off64_t)

#define TRUNCATE(name, offset)                                                    \
    int name(int fd, offset size) {                                               \
        REAL(name);                                                               \
        const char *inside = OF(fd);                                              \
        NAMED(inside, real(fd, size), note("truncate", 0, size, inside));         \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)
#define SYNC(name)                                                                \
    int name(int fd) {                                                            \
        REAL(name);                                                               \
        const char *inside = OF(fd);                                              \
        NAMED(inside, real(fd), note("sync", 0, 0, inside));                      \
    }
SYNC(fsync)
SYNC(fdatasync)

/* What no run does -------------------------------------------------------------------------------- */

#define OTHER(path_, call)                                            \
    const char *inside = path_;                                                   \
    if (inside) note("other", 0, 0, inside);                                      \
    return call
int link(const char *from, const char *to) {
    REAL(link);
    OTHER(HERE(to), real(from, to));
}
int symlink(const char *from, const char *to) {
    REAL(symlink);
    OTHER(HERE(to), real(from, to));
}
int truncate(const char *path, off_t size) {
    REAL(truncate);
    OTHER(HERE(path), real(path, size));
}
int posix_fallocate(int fd, off_t place, off_t size) {
    REAL(posix_fallocate);
    OTHER(OF(fd), real(fd, place, size));
}
ssize_t sendfile(int to, int from, off_t *place, size_t size);
ssize_t sendfile(int to, int from, off_t *place, size_t size) {
    REAL(sendfile);
    OTHER(OF(to), real(to, from, place, size));
}
ssize_t copy_file_range(int from, off64_t *read, int to, off64_t *write, size_t size,
                        unsigned flags) {
    REAL(copy_file_range);
    OTHER(OF(to), real(from, read, to, write, size, flags));
}
