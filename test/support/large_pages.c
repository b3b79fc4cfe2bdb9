/* SPDX-License-Identifier: Apache-2.0 */
/* LD_PRELOAD: memory as a kernel with pages of 64 KB gives it, as many 64-bit Arm servers have. sysconf() says so, what
 * is mapped begins and ends at such pages, and an address within one is refused. The C library's own memory (malloc,
 * stacks, programs) still has the pages of this kernel; there a large page counts as mapped if a part of it is. */
#undef _FILE_OFFSET_BITS /* makes mmap() another name of mmap64() */
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SMALL = 4096, LARGE = 65536 };

static size_t up_to(size_t bytes, size_t page)
{
    return (bytes + page - 1) / page * page;
}

static int refuse(int error)
{
    errno = error;
    return -1;
}

/* ---- what programs ask ---- */

long __sysconf(int name); /* the C library's */

long sysconf(int name)
{
    return name == _SC_PAGESIZE ? LARGE : __sysconf(name);
}

int getpagesize(void)
{
    return LARGE;
}

/* ---- mapping ---- */

static void *map(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    return (void *)syscall(SYS_mmap, at, bytes, prot, flags, fd, offset); /* on failure -1, which is MAP_FAILED */
}

static void unmap(void *at, size_t bytes)
{
    if (bytes)
        (void)syscall(SYS_munmap, at, bytes);
}

/* Large pages that nothing else uses, those at `wish` if they are free. */
static uint8_t *reserve(void *wish, size_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    uint8_t *all, *at;

    if (wish && (uintptr_t)wish % LARGE == 0 && map(wish, bytes, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0) == wish)
        return wish;
    all = map(NULL, bytes + LARGE, PROT_NONE, flags, -1, 0);
    if (all == MAP_FAILED)
        return NULL;
    at = (uint8_t *)up_to((uintptr_t)all, LARGE);
    unmap(all, (size_t)(at - all));
    unmap(at + bytes, (size_t)(all + LARGE - at));
    return at;
}

/* How many bytes of a mapping have pages of its file; all of them if it has no file. After the last of a file's pages
 * come zeros to the end of the large page. */
static size_t of_file(size_t bytes, int flags, int fd, off_t offset)
{
    struct stat st;
    size_t left;

    if ((flags & MAP_ANONYMOUS) || fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size <= offset)
        return bytes;
    left = up_to((size_t)(st.st_size - offset), SMALL);
    return left < bytes && up_to(left, LARGE) >= bytes ? left : bytes;
}

void *mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    size_t all = up_to(bytes, LARGE), file = of_file(all, flags, fd, offset);
    bool fixed = flags & (MAP_FIXED | MAP_FIXED_NOREPLACE);
    void *result;

    if (!bytes || offset % LARGE || (fixed && (uintptr_t)at % LARGE)) {
        errno = EINVAL;
        return MAP_FAILED;
    }
    if (!fixed && !(at = reserve(at, all)))
        return MAP_FAILED;
    result = map(at, file, prot, fixed ? flags : flags | MAP_FIXED, fd, offset);
    if (result != MAP_FAILED && file < all)
        (void)map((uint8_t *)at + file, all - file, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (result == MAP_FAILED && !fixed) {
        int error = errno;

        unmap(at, all);
        errno = error;
    }
    return result;
}

void *mmap64(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    return mmap(at, bytes, prot, flags, fd, offset);
}

int munmap(void *at, size_t bytes)
{
    if ((uintptr_t)at % LARGE || !bytes)
        return refuse(EINVAL);
    return (int)syscall(SYS_munmap, at, up_to(bytes, LARGE));
}

/* ---- calls about pages that are there ---- */

static bool one_page(long call, uint8_t *at, int what)
{
    bool any = false;

    for (size_t i = 0; i < LARGE; i += SMALL)
        any = !syscall(call, at + i, SMALL, what) || any;
    return any;
}

static int about_pages(long call, uint8_t *at, size_t bytes, int what)
{
    size_t all = up_to(bytes, LARGE);

    if ((uintptr_t)at % LARGE)
        return refuse(EINVAL);
    if (!syscall(call, at, all, what))
        return 0;
    for (size_t i = 0; i < all; i += LARGE) {
        int error = errno;

        if (!one_page(call, at + i, what))
            return refuse(error);
    }
    return 0;
}

int madvise(void *at, size_t bytes, int advice)
{
    return about_pages(SYS_madvise, at, bytes, advice);
}

int mprotect(void *at, size_t bytes, int prot)
{
    if (prot & PROT_EXEC) /* where the test framework changes code, a large page has data of the program too */
        prot |= PROT_READ | PROT_WRITE;
    return about_pages(SYS_mprotect, at, bytes, prot);
}

int msync(void *at, size_t bytes, int flags)
{
    return about_pages(SYS_msync, at, bytes, flags);
}
