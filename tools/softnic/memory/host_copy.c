/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory: a plain copy within the process, process_vm_writev and process_vm_readv between processes, or
 * /proc/PID/mem where these are missing.
 *
 * The kernel copies each iovec, local or remote, by itself and in order. Within one of them the order of the bytes is
 * not promised (a fast "rep movsb" may store them in any order); between two it is. So the last 8 bytes always get an
 * iovec of their own, and a program that polls them sees all bytes before. The local side is cut, because each remote
 * iovec costs 0.5 us for finding its pages. An aligned copy of 8 or 4 bytes is one store on the CPUs this runs on,
 * except where the kernel reads near the end of a page: keep_whole() avoids that. */
#include "tools/softnic/memory/host_copy.h"

#include <errno.h>
#include <fcntl.h>
#include <stdalign.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "tools/softnic/world/lock.h"

enum { FLAG_BYTES = 8, PAGE_LEAST = 4096, PAGE_END_BYTES = 64 };

/* Present when the program runs under ThreadSanitizer. Copies into the program's memory must then be hidden from TSan,
 * since the program polls that memory with plain loads, as it would with a NIC. */
extern void __tsan_init(void) __attribute__((weak));

struct vec {
    struct iovec local[SN_MAX_SPANS + 1], remote[SN_MAX_SPANS + 1];
    unsigned local_count, remote_count;
};

/* Turn spans into iovecs; the last 8 bytes get their own. */
static unsigned vec_fill(struct iovec *iov, const struct sn_span *span, uint32_t count, bool split_last)
{
    unsigned n = 0;

    for (uint32_t i = 0; i < count; i++)
        if (span[i].length)
            iov[n++] = (struct iovec){(void *)(uintptr_t)span[i].addr, span[i].length};
    if (split_last && n > 0 && iov[n - 1].iov_len > FLAG_BYTES) {
        iov[n].iov_base = (uint8_t *)iov[n - 1].iov_base + iov[n - 1].iov_len - FLAG_BYTES;
        iov[n].iov_len = FLAG_BYTES;
        iov[n - 1].iov_len -= FLAG_BYTES;
        n++;
    }
    return n;
}

/* System calls are raw: sanitizers intercept the C library's wrappers and would report the copy as a data race. */

/* Read or write each piece, in order. Memory of the other process that it cannot write itself is written too. */
static long mem_copy(bool writing, int fd, const struct iovec *local, unsigned locals, const struct iovec *remote,
                     unsigned remotes)
{
    size_t here = 0, there = 0; /* done of the first pieces */
    long done = 0;

    while (locals && remotes) {
        size_t piece =
            local->iov_len - here < remote->iov_len - there ? local->iov_len - here : remote->iov_len - there;
        long n = syscall(writing ? SYS_pwrite64 : SYS_pread64, fd, (uint8_t *)local->iov_base + here, piece,
                         (uint8_t *)remote->iov_base + there);

        if (n <= 0) {
            errno = n == 0 ? ESRCH : errno == EIO ? EFAULT : errno;
            return done ? done : -1;
        }
        done += n;
        here += (size_t)n;
        there += (size_t)n;
        if (here == local->iov_len)
            local++, locals--, here = 0;
        if (there == remote->iov_len)
            remote++, remotes--, there = 0;
    }
    return done;
}

static long mem_call(bool writing, uint32_t pid, const struct iovec *local, unsigned locals, const struct iovec *remote,
                     unsigned remotes)
{
    char path[32];
    long done;
    int fd, error;

    snprintf(path, sizeof(path), "/proc/%u/mem", pid);
    fd = open(path, (writing ? O_WRONLY : O_RDONLY) | O_CLOEXEC);
    if (fd < 0) {
        errno = errno == ENOENT ? ESRCH : errno == EACCES ? EPERM : errno;
        return -1;
    }
    done = mem_copy(writing, fd, local, locals, remote, remotes);
    error = errno;
    close(fd);
    errno = error;
    return done;
}

static long vm_call(bool writing, uint32_t pid, const struct iovec *local, unsigned locals, const struct iovec *remote,
                    unsigned remotes)
{
    static bool absent; /* atomic. Kernels may be built without these calls, and qemu-user has none */
    long n;

    if (__atomic_load_n(&absent, __ATOMIC_RELAXED))
        return mem_call(writing, pid, local, locals, remote, remotes);
    n = syscall(writing ? SYS_process_vm_writev : SYS_process_vm_readv, (long)pid, local, (unsigned long)locals, remote,
                (unsigned long)remotes, 0ul);
    if (n >= 0 || errno != ENOSYS)
        return n;
    __atomic_store_n(&absent, true, __ATOMIC_RELAXED);
    return mem_call(writing, pid, local, locals, remote, remotes);
}

struct word {
    alignas(2 * PAGE_END_BYTES) uint8_t bytes[FLAG_BYTES];
};

/* A "rep movsb" that reads from the last 48 bytes of a page may store byte by byte (seen on Xeons with FSRM, Linux
 * 6.18). A program that polls would see a part of a new word, so the last bytes of a write are read from elsewhere
 * then. Inline data, which are in a request, always are: on an AMD EPYC with FSRM, Linux 6.18, a few of 100,000 words
 * were seen in part. Why is not known. */
static void keep_whole(struct iovec *last, const struct sn_span *span, struct word *word)
{
    uintptr_t at = (uintptr_t)last->iov_base % PAGE_LEAST;

    if (last->iov_len > FLAG_BYTES)
        return;
    if (span->mr == SN_NONE) { /* inline, so it can be read without a fault */
        memcpy(word->bytes, last->iov_base, last->iov_len);
        last->iov_base = word->bytes;
        return;
    }
    if (at + last->iov_len <= PAGE_LEAST - PAGE_END_BYTES)
        return;
    if (!sn_host_read(sn_pid, (uintptr_t)last->iov_base, word->bytes, last->iov_len)) /* else the write says why */
        last->iov_base = word->bytes;
}

static bool local_readable(const struct iovec *iov, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        uint64_t first = (uintptr_t)iov[i].iov_base;
        uint8_t byte;

        if (sn_host_read(sn_pid, first, &byte, 1) || sn_host_read(sn_pid, first + iov[i].iov_len - 1, &byte, 1))
            return false;
    }
    return true;
}

/* Drop the first n bytes of an iovec list. */
static void vec_advance(struct iovec *iov, unsigned *count, size_t n)
{
    unsigned skip = 0;

    while (skip < *count && n >= iov[skip].iov_len)
        n -= iov[skip++].iov_len;
    *count -= skip;
    memmove(iov, iov + skip, *count * sizeof(*iov));
    if (n && *count) {
        iov->iov_base = (uint8_t *)iov->iov_base + n;
        iov->iov_len -= n;
    }
}

static int vm_error(uint32_t pid, int error, const struct vec *vec)
{
    if (error == ESRCH)
        return -ESRCH;
    if (error == EPERM) {
        sn_log("process_vm to pid %u: %s: is it another user's, did an unprivileged user start one of the two outside "
               "the softnic-run that made the world (give --name to both), or does a sandbox forbid ptrace (docker: "
               "--cap-add SYS_PTRACE)?",
               pid, strerror(error));
        return -EPERM;
    }
    if (error == EFAULT)
        return local_readable(vec->local, vec->local_count) ? -EFAULT : -EINVAL;
    sn_log("process_vm to pid %u: %s", pid, strerror(error));
    return -EIO;
}

static int vm_copy(const struct sn_copy *c, bool writing, uint32_t pid)
{
    uint64_t left = c->length;
    struct word word;
    struct vec vec;

    vec.local_count = vec_fill(vec.local, writing ? c->src : c->dst, writing ? c->src_count : c->dst_count, true);
    vec.remote_count = vec_fill(vec.remote, writing ? c->dst : c->src, writing ? c->dst_count : c->src_count, false);
    if (writing && vec.local_count)
        keep_whole(&vec.local[vec.local_count - 1], &c->src[c->src_count - 1], &word);
    while (left) {
        long n = vm_call(writing, pid, vec.local, vec.local_count, vec.remote, vec.remote_count);

        if (n <= 0)
            return vm_error(pid, n < 0 ? errno : EFAULT, &vec);
        left -= (uint64_t)n;
        if (left) { /* a limit of the kernel, or a fault that the next call reports */
            vec_advance(vec.local, &vec.local_count, (size_t)n);
            vec_advance(vec.remote, &vec.remote_count, (size_t)n);
        }
    }
    return 0;
}

/* [write-flag] release; pairs with the program's acquire of a flag that it polls: the bytes before are visible with
 * it. */
static void copy_piece(void *dst, const void *src, size_t n)
{
    if (n == 8 && ((uintptr_t)dst & 7) == 0) {
        uint64_t v;

        memcpy(&v, src, 8);
        __atomic_store_n((uint64_t *)dst, v, __ATOMIC_RELEASE);
    } else if (n == 4 && ((uintptr_t)dst & 3) == 0) {
        uint32_t v;

        memcpy(&v, src, 4);
        __atomic_store_n((uint32_t *)dst, v, __ATOMIC_RELEASE);
    } else if (n > FLAG_BYTES) {
        memmove(dst, src, n - FLAG_BYTES);
        copy_piece((uint8_t *)dst + n - FLAG_BYTES, (const uint8_t *)src + n - FLAG_BYTES, FLAG_BYTES);
    } else {
        memcpy(dst, src, n - 1);
        __atomic_store_n((uint8_t *)dst + n - 1, ((const uint8_t *)src)[n - 1], __ATOMIC_RELEASE);
    }
}

static void copy_inside(const struct sn_copy *c)
{
    uint64_t d_off = 0, s_off = 0, left = c->length;
    uint32_t d = 0, s = 0;

    while (left) {
        uint64_t n;

        while (c->dst[d].length == d_off)
            d++, d_off = 0;
        while (c->src[s].length == s_off)
            s++, s_off = 0;
        n = c->dst[d].length - d_off < c->src[s].length - s_off ? c->dst[d].length - d_off : c->src[s].length - s_off;
        copy_piece((void *)(uintptr_t)(c->dst[d].addr + d_off), (const void *)(uintptr_t)(c->src[s].addr + s_off), n);
        d_off += n;
        s_off += n;
        left -= n;
    }
}

int sn_host_copy_spans(const struct sn_copy *c)
{
    if (c->dst_proc == c->src_proc && !__tsan_init) {
        copy_inside(c);
        return 0;
    }
    if (c->dst_proc != c->self || c->dst_proc == c->src_proc)
        return vm_copy(c, true, c->world->procs[c->dst_proc].pid);
    return vm_copy(c, false, c->world->procs[c->src_proc].pid);
}

int sn_host_writes(struct sn_world *world, uint32_t dst_proc, const struct sn_span *dst, const struct sn_span *src,
                   unsigned count)
{
    struct iovec local[2 * SN_WRITE_BATCH], remote[SN_WRITE_BATCH];
    struct word words[SN_WRITE_BATCH];
    unsigned locals = 0, remotes = 0;
    uint64_t bytes = 0;

    for (unsigned i = 0; i < count; i++) {
        struct iovec *last = remotes ? &remote[remotes - 1] : NULL;

        locals += vec_fill(&local[locals], &src[i], 1, true);
        if (locals)
            keep_whole(&local[locals - 1], &src[i], &words[i]);
        if (last && (uintptr_t)last->iov_base + last->iov_len == dst[i].addr)
            last->iov_len += dst[i].length;
        else
            remotes += vec_fill(&remote[remotes], &dst[i], 1, false);
        bytes += src[i].length;
    }
    return vm_call(true, world->procs[dst_proc].pid, local, locals, remote, remotes) == (long)bytes ? 0 : -EAGAIN;
}

int sn_host_read(uint32_t pid, uint64_t from, void *to, size_t bytes)
{
    struct iovec here = {to, bytes}, there = {(void *)(uintptr_t)from, bytes};
    long n = vm_call(false, pid, &here, 1, &there, 1);

    if (n == (long)bytes)
        return 0;
    return n < 0 && (errno == ESRCH || errno == EPERM) ? -errno : -EFAULT;
}

bool sn_process_reachable(struct sn_world *world, uint32_t proc)
{
    const struct sn_proc *p = &world->procs[proc];
    uint64_t nonce = 0;

    if (__atomic_load_n(&p->state, __ATOMIC_ACQUIRE) != SN_PROC_LIVE)
        return false;
    return !sn_host_read(p->pid, p->nonce_addr, &nonce, sizeof(nonce)) && nonce == p->nonce;
}
