/* Fails the Nth of a process's file operations on purpose; preloaded by tests/faults/preload.py.
 *
 * Calls of the C library are counted that name a path below a folder, or a descriptor that was
 * opened on one. What is to fail comes from the environment, when the library is loaded or when
 * inject_arm() is called:
 *
 *   INJECT_ROOT   the folder, absolute and without links; nothing is counted without it
 *   INJECT_LOG    a file outside of it: a line for each call in the mode "count", else for each
 *                 that was disturbed: the kind of call, the errno and the path
 *   INJECT_KINDS  the kinds of call that are counted, with commas between; none: all
 *   INJECT_MODE   count, once, from (the Nth and all behind it), short (the Nth read or write gets
 *                 half of what was asked for)
 *   INJECT_NTH, INJECT_ERRNO   numbers
 *
 * A process that this one forks or starts is left alone.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind {
    MKDIR, CREATE, OPEN, READ, WRITE, RENAME, LINK, REMOVE, TRUNCATE, SYNC, CLOSE, LIST, STAT,
    LOCK, COPY, CHMOD, MMAP, KINDS
};
static const char *const NAMES[KINDS] = {
    "mkdir", "create", "open", "read", "write", "rename", "link", "remove", "truncate", "sync",
    "close", "list", "stat", "lock", "copy", "chmod", "mmap",
};
enum mode { COUNT, ONCE, FROM, SHORT };
enum verdict { PASS, FAIL, HALVE };

#define MOST_FILES 4096
#define LOG_FD 1000 /* out of the way of those that the process opens */

static char root[PATH_MAX];
static size_t root_length;
static unsigned kinds;
static enum mode mode;
static long nth, counted;
static int error;
static pid_t armed;
static int log_fd = -1;
static char *opened[MOST_FILES]; /* the path below the root that a descriptor stands for */

static void *next(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}
/* The C library's own function, under the name `real`. */
#define REAL(name)                                   \
    static __typeof__(&name) real;                   \
    if (!real) real = (__typeof__(&name))next(#name)

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

void inject_arm(void) {
    armed = 0;
    const char *folder = setting("INJECT_ROOT");
    root_length = strlen(folder);
    if (!root_length || root_length >= sizeof root) return;
    strcpy(root, folder);
    kinds = 0;
    char listed[256];
    snprintf(listed, sizeof listed, ",%s,", setting("INJECT_KINDS"));
    for (int kind = 0; kind < KINDS; kind++) {
        char name[32];
        snprintf(name, sizeof name, ",%s,", NAMES[kind]);
        if (listed[1] == ',' || strstr(listed, name)) kinds |= 1u << kind;
    }
    const char *asked = setting("INJECT_MODE");
    mode = !strcmp(asked, "once") ? ONCE : !strcmp(asked, "from") ? FROM
         : !strcmp(asked, "short") ? SHORT : COUNT;
    nth = atol(setting("INJECT_NTH"));
    error = atoi(setting("INJECT_ERRNO"));
    counted = 0;
    int fd = syscall(SYS_openat, AT_FDCWD, setting("INJECT_LOG"),
                     O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    log_fd = fd < 0 ? -1 : (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, LOG_FD);
    if (fd >= 0) syscall(SYS_close, fd);
    armed = syscall(SYS_getpid);
    unsetenv("INJECT_ROOT"); /* what this process starts is not armed */
}

__attribute__((constructor)) static void arm_at_start(void) { inject_arm(); }

static int is_armed(void) { return armed && syscall(SYS_getpid) == armed; }

static int is_below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The absolute path of one below the root, in `whole`; NULL for all others. */
static const char *below(int folder, const char *path, char *whole) {
    if (!path || !is_armed()) return NULL;
    if (path[0] == '/') return is_below(path) ? path : NULL;
    char base[PATH_MAX];
    if (folder == AT_FDCWD) {
        if (syscall(SYS_getcwd, base, sizeof base) < 0) return NULL;
    } else {
        if (folder < 0 || folder >= MOST_FILES || !opened[folder]) return NULL;
        snprintf(base, sizeof base, "%s", opened[folder]);
    }
    int length = snprintf(whole, PATH_MAX, *path ? "%s/%s" : "%s%s", base, path);
    return length < PATH_MAX && is_below(whole) ? whole : NULL;
}

static const char *path_of(int fd) {
    return fd >= 0 && fd < MOST_FILES && opened[fd] && is_armed() ? opened[fd] : NULL;
}

static void remember(int fd, const char *path) {
    if (fd < 0 || fd >= MOST_FILES) return;
    char *before = opened[fd];
    opened[fd] = path ? strdup(path) : NULL;
    free(before);
}

static void note(enum kind kind, int number, const char *path) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %d %s\n", NAMES[kind], number, path);
    if (log_fd >= 0) syscall(SYS_write, log_fd, line, length);
}

/* What is to happen to a call. `partial`: it may be given half of what it asked for. */
static enum verdict judge(enum kind kind, const char *path, int partial) {
    if (!path || !(kinds >> kind & 1)) return PASS;
    long number = __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
    if (mode == COUNT) {
        note(kind, 0, path);
        return PASS;
    }
    if (mode == FROM ? number < nth : number != nth) return PASS;
    /* A disk that gets full takes the beginning of a write. */
    int halved = partial && (mode == SHORT || (number == nth && mode == FROM && kind == WRITE));
    if (mode == SHORT && !halved) return PASS;
    note(kind, halved ? 0 : error, path);
    if (halved) return HALVE;
    errno = error;
    return FAIL;
}

static int fails(enum kind kind, const char *path) { return judge(kind, path, 0) == FAIL; }

/* Paths ------------------------------------------------------------------------------------- */

#define AT(folder, path) below(folder, path, (char[PATH_MAX]){0})
#define HERE(path) AT(AT_FDCWD, path)

int mkdir(const char *path, mode_t rights) {
    REAL(mkdir);
    return fails(MKDIR, HERE(path)) ? -1 : real(path, rights);
}
int mkdirat(int folder, const char *path, mode_t rights) {
    REAL(mkdirat);
    return fails(MKDIR, AT(folder, path)) ? -1 : real(folder, path, rights);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    return fails(RENAME, HERE(to)) ? -1 : real(from, to);
}
int renameat(int folder, const char *from, int other, const char *to) {
    REAL(renameat);
    return fails(RENAME, AT(other, to)) ? -1 : real(folder, from, other, to);
}
int renameat2(int folder, const char *from, int other, const char *to, unsigned flags) {
    REAL(renameat2);
    return fails(RENAME, AT(other, to)) ? -1 : real(folder, from, other, to, flags);
}
int link(const char *from, const char *to) {
    REAL(link);
    return fails(LINK, HERE(to)) ? -1 : real(from, to);
}
int linkat(int folder, const char *from, int other, const char *to, int flags) {
    REAL(linkat);
    return fails(LINK, AT(other, to)) ? -1 : real(folder, from, other, to, flags);
}
int symlink(const char *from, const char *to) {
    REAL(symlink);
    return fails(LINK, HERE(to)) ? -1 : real(from, to);
}
int symlinkat(const char *from, int folder, const char *to) {
    REAL(symlinkat);
    return fails(LINK, AT(folder, to)) ? -1 : real(from, folder, to);
}
int unlink(const char *path) {
    REAL(unlink);
    return fails(REMOVE, HERE(path)) ? -1 : real(path);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    return fails(REMOVE, AT(folder, path)) ? -1 : real(folder, path, flags);
}
int rmdir(const char *path) {
    REAL(rmdir);
    return fails(REMOVE, HERE(path)) ? -1 : real(path);
}
int remove(const char *path) {
    REAL(remove);
    return fails(REMOVE, HERE(path)) ? -1 : real(path);
}
int truncate(const char *path, off_t size) {
    REAL(truncate);
    return fails(TRUNCATE, HERE(path)) ? -1 : real(path, size);
}
int truncate64(const char *path, off64_t size) {
    REAL(truncate64);
    return fails(TRUNCATE, HERE(path)) ? -1 : real(path, size);
}
int chmod(const char *path, mode_t rights) {
    REAL(chmod);
    return fails(CHMOD, HERE(path)) ? -1 : real(path, rights);
}
int fchmodat(int folder, const char *path, mode_t rights, int flags) {
    REAL(fchmodat);
    return fails(CHMOD, AT(folder, path)) ? -1 : real(folder, path, rights, flags);
}
int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    REAL(utimensat);
    return fails(CHMOD, AT(folder, path)) ? -1 : real(folder, path, times, flags);
}

#define STAT_OF(name, type)                                 \
    int name(const char *path, struct type *about) {        \
        REAL(name);                                         \
        return fails(STAT, HERE(path)) ? -1 : real(path, about); \
    }
STAT_OF(stat, stat)
STAT_OF(stat64, stat64)
STAT_OF(lstat, stat)
STAT_OF(lstat64, stat64)
#define STAT_AT(name, type)                                                       \
    int name(int folder, const char *path, struct type *about, int flags) {       \
        REAL(name);                                                               \
        return fails(STAT, AT(folder, path)) ? -1 : real(folder, path, about, flags); \
    }
STAT_AT(fstatat, stat)
STAT_AT(fstatat64, stat64)
#define STAT_FD(name, type)                                   \
    int name(int fd, struct type *about) {                    \
        REAL(name);                                           \
        return fails(STAT, path_of(fd)) ? -1 : real(fd, about); \
    }
STAT_FD(fstat, stat)
STAT_FD(fstat64, stat64)

/* What programs call that were built with a C library of before 2.33. */
int __xstat(int version, const char *path, struct stat *about);
int __xstat64(int version, const char *path, struct stat64 *about);
int __lxstat(int version, const char *path, struct stat *about);
int __lxstat64(int version, const char *path, struct stat64 *about);
int __fxstat(int version, int fd, struct stat *about);
int __fxstat64(int version, int fd, struct stat64 *about);
#define OLD_STAT_OF(name, type)                                   \
    int name(int version, const char *path, struct type *about) { \
        REAL(name);                                               \
        return fails(STAT, HERE(path)) ? -1 : real(version, path, about); \
    }
OLD_STAT_OF(__xstat, stat)
OLD_STAT_OF(__xstat64, stat64)
OLD_STAT_OF(__lxstat, stat)
OLD_STAT_OF(__lxstat64, stat64)
#define OLD_STAT_FD(name, type)                          \
    int name(int version, int fd, struct type *about) {  \
        REAL(name);                                      \
        return fails(STAT, path_of(fd)) ? -1 : real(version, fd, about); \
    }
OLD_STAT_FD(__fxstat, stat)
OLD_STAT_FD(__fxstat64, stat64)

int statx(int folder, const char *path, int flags, unsigned mask, struct statx *about) {
    REAL(statx);
    return fails(STAT, AT(folder, path)) ? -1 : real(folder, path, flags, mask, about);
}
int access(const char *path, int rights) {
    REAL(access);
    return fails(STAT, HERE(path)) ? -1 : real(path, rights);
}
int faccessat(int folder, const char *path, int rights, int flags) {
    REAL(faccessat);
    return fails(STAT, AT(folder, path)) ? -1 : real(folder, path, rights, flags);
}

/* Files that are opened and closed ------------------------------------------------------------ */

static enum kind kind_of(int flags) {
    return (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT ? CREATE : OPEN;
}

#define RIGHTS(flags, rights)                         \
    mode_t rights = 0;                                \
    if ((flags) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list more;                                 \
        va_start(more, flags);                        \
        rights = va_arg(more, mode_t);                \
        va_end(more);                                 \
    }
#define OPEN_OF(name)                                     \
    int name(const char *path, int flags, ...) {          \
        REAL(name);                                       \
        RIGHTS(flags, rights)                             \
        const char *inside = HERE(path);                  \
        if (fails(kind_of(flags), inside)) return -1;     \
        int fd = real(path, flags, rights);               \
        remember(fd, inside);                             \
        return fd;                                        \
    }
OPEN_OF(open)
OPEN_OF(open64)
#define OPEN_AT(name)                                        \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name);                                          \
        RIGHTS(flags, rights)                                \
        const char *inside = AT(folder, path);               \
        if (fails(kind_of(flags), inside)) return -1;        \
        int fd = real(folder, path, flags, rights);          \
        remember(fd, inside);                                \
        return fd;                                           \
    }
OPEN_AT(openat)
OPEN_AT(openat64)
#define CREAT_OF(name)                              \
    int name(const char *path, mode_t rights) {     \
        REAL(name);                                 \
        const char *inside = HERE(path);            \
        if (fails(CREATE, inside)) return -1;       \
        int fd = real(path, rights);                \
        remember(fd, inside);                       \
        return fd;                                  \
    }
CREAT_OF(creat)
CREAT_OF(creat64)
#define FOPEN_OF(name)                                                           \
    FILE *name(const char *path, const char *how) {                              \
        REAL(name);                                                              \
        const char *inside = HERE(path);                                         \
        if (fails(how[0] == 'r' && !strchr(how, '+') ? OPEN : CREATE, inside)) return NULL; \
        FILE *file = real(path, how);                                            \
        if (file) remember(fileno(file), inside);                                \
        return file;                                                             \
    }
FOPEN_OF(fopen)
FOPEN_OF(fopen64)

/* The C library closes by itself what it has opened, so here the number is forgotten. */
int fclose(FILE *file) {
    REAL(fclose);
    int fd = fileno(file);
    const char *inside = path_of(fd);
    int failed = fails(CLOSE, inside);
    remember(fd, NULL);
    int status = real(file);
    if (!failed) return status;
    errno = error;
    return EOF;
}
int close(int fd) {
    REAL(close);
    const char *inside = path_of(fd);
    int failed = fails(CLOSE, inside);
    remember(fd, NULL);
    int status = real(fd);
    if (!failed) return status;
    errno = error;
    return -1;
}
int dup(int fd) {
    REAL(dup);
    int copy = real(fd);
    remember(copy, path_of(fd));
    return copy;
}
int dup2(int fd, int copy) {
    REAL(dup2);
    int made = real(fd, copy);
    if (made >= 0 && fd != copy) remember(made, path_of(fd));
    return made;
}
int dup3(int fd, int copy, int flags) {
    REAL(dup3);
    int made = real(fd, copy, flags);
    if (made >= 0) remember(made, path_of(fd));
    return made;
}

static int is_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||
           command == F_OFD_SETLKW;
}
#define FCNTL_OF(name)                                            \
    int name(int fd, int command, ...) {                          \
        REAL(name);                                               \
        va_list more;                                             \
        va_start(more, command);                                  \
        void *argument = va_arg(more, void *);                    \
        va_end(more);                                             \
        if (is_lock(command) && fails(LOCK, path_of(fd))) return -1; \
        int result = real(fd, command, argument);                 \
        if (command == F_DUPFD || command == F_DUPFD_CLOEXEC)     \
            remember(result, path_of(fd));                        \
        return result;                                            \
    }
FCNTL_OF(fcntl)
FCNTL_OF(fcntl64)
int flock(int fd, int operation);
int flock(int fd, int operation) {
    REAL(flock);
    return fails(LOCK, path_of(fd)) ? -1 : real(fd, operation);
}

/* Contents ------------------------------------------------------------------------------------ */

#define HALF(size) ((size) > 1 ? (size) / 2 : (size))
#define MOVED(kind, name, buffer)                                \
    ssize_t name(int fd, buffer data, size_t size) {             \
        REAL(name);                                              \
        enum verdict found = judge(kind, path_of(fd), size > 1); \
        if (found == FAIL) return -1;                            \
        return real(fd, data, found == HALVE ? HALF(size) : size); \
    }
MOVED(READ, read, void *)
MOVED(WRITE, write, const void *)
#define MOVED_AT(kind, name, buffer, offset)                          \
    ssize_t name(int fd, buffer data, size_t size, offset place) {    \
        REAL(name);                                                   \
        enum verdict found = judge(kind, path_of(fd), size > 1);      \
        if (found == FAIL) return -1;                                 \
        return real(fd, data, found == HALVE ? HALF(size) : size, place); \
    }
MOVED_AT(READ, pread, void *, off_t)
MOVED_AT(READ, pread64, void *, off64_t)
MOVED_AT(WRITE, pwrite, const void *, off_t)
MOVED_AT(WRITE, pwrite64, const void *, off64_t)
/* Of several pieces, half of the first. */
#define MOVED_PIECES(kind, name)                                      \
    ssize_t name(int fd, const struct iovec *pieces, int count) {     \
        REAL(name);                                                   \
        int partial = count > 0 && pieces[0].iov_len > 1;             \
        enum verdict found = judge(kind, path_of(fd), partial);       \
        if (found == FAIL) return -1;                                 \
        struct iovec half = {0};                                      \
        if (found == HALVE) {                                         \
            half.iov_base = pieces[0].iov_base;                       \
            half.iov_len = HALF(pieces[0].iov_len);                   \
            return real(fd, &half, 1);                                \
        }                                                             \
        return real(fd, pieces, count);                               \
    }
MOVED_PIECES(READ, readv)
MOVED_PIECES(WRITE, writev)
#define MOVED_PIECES_AT(kind, name, offset)                           \
    ssize_t name(int fd, const struct iovec *pieces, int count, offset place) { \
        REAL(name);                                                   \
        return fails(kind, path_of(fd)) ? -1 : real(fd, pieces, count, place); \
    }
MOVED_PIECES_AT(READ, preadv, off_t)
MOVED_PIECES_AT(READ, preadv64, off64_t)
MOVED_PIECES_AT(WRITE, pwritev, off_t)
MOVED_PIECES_AT(WRITE, pwritev64, off64_t)

#define OF_FD(kind, name)                               \
    int name(int fd) {                                  \
        REAL(name);                                     \
        return fails(kind, path_of(fd)) ? -1 : real(fd); \
    }
OF_FD(SYNC, fsync)
OF_FD(SYNC, fdatasync)
int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    return fails(TRUNCATE, path_of(fd)) ? -1 : real(fd, size);
}
int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    return fails(TRUNCATE, path_of(fd)) ? -1 : real(fd, size);
}
int posix_fallocate(int fd, off_t place, off_t size) {
    REAL(posix_fallocate);
    return fails(TRUNCATE, path_of(fd)) ? error : real(fd, place, size);
}
int fchmod(int fd, mode_t rights) {
    REAL(fchmod);
    return fails(CHMOD, path_of(fd)) ? -1 : real(fd, rights);
}
int futimens(int fd, const struct timespec times[2]) {
    REAL(futimens);
    return fails(CHMOD, path_of(fd)) ? -1 : real(fd, times);
}
ssize_t sendfile(int to, int from, off_t *place, size_t size);
ssize_t sendfile(int to, int from, off_t *place, size_t size) {
    REAL(sendfile);
    return fails(COPY, path_of(to)) ? -1 : real(to, from, place, size);
}
ssize_t sendfile64(int to, int from, off64_t *place, size_t size);
ssize_t sendfile64(int to, int from, off64_t *place, size_t size) {
    REAL(sendfile64);
    return fails(COPY, path_of(to)) ? -1 : real(to, from, place, size);
}
ssize_t copy_file_range(int from, off64_t *read, int to, off64_t *write, size_t size,
                        unsigned flags) {
    REAL(copy_file_range);
    return fails(COPY, path_of(to)) ? -1 : real(from, read, to, write, size, flags);
}
void *mmap(void *where, size_t size, int rights, int flags, int fd, off_t place) {
    REAL(mmap);
    return fails(MMAP, path_of(fd)) ? MAP_FAILED : real(where, size, rights, flags, fd, place);
}
void *mmap64(void *where, size_t size, int rights, int flags, int fd, off64_t place) {
    REAL(mmap64);
    return fails(MMAP, path_of(fd)) ? MAP_FAILED : real(where, size, rights, flags, fd, place);
}

/* Folders ------------------------------------------------------------------------------------- */

DIR *opendir(const char *path) {
    REAL(opendir);
    const char *inside = HERE(path);
    if (fails(LIST, inside)) return NULL;
    DIR *folder = real(path);
    if (folder) remember(dirfd(folder), inside);
    return folder;
}
DIR *fdopendir(int fd) {
    REAL(fdopendir);
    return fails(LIST, path_of(fd)) ? NULL : real(fd);
}
struct dirent *readdir(DIR *folder) {
    REAL(readdir);
    return fails(LIST, path_of(dirfd(folder))) ? NULL : real(folder);
}
struct dirent64 *readdir64(DIR *folder) {
    REAL(readdir64);
    return fails(LIST, path_of(dirfd(folder))) ? NULL : real(folder);
}
int closedir(DIR *folder) {
    REAL(closedir);
    remember(dirfd(folder), NULL);
    return real(folder);
}
