/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-ins for the rdma-core libraries that programs link beside libibverbs (libmlx5, libefa), and for rsockets.
 *
 * The real ones need symbols of version IBVERBS_PRIVATE_<n>, private to the rdma-core release they were built with, so
 * they cannot be loaded beside another libibverbs. Programs that are linked BIND_NOW (Debian's perftest) do not even
 * start unless every symbol and version they name exists. No function here is called for a device of another vendor. If
 * one is called all the same, it fails as the real one does on foreign hardware, without a message.
 *
 * The prototypes are declared here, with untyped pointers: the vendor headers of the build machine may be older or
 * newer than the program, and only the symbol, the version and the failure value matter. */
#ifndef SOFTNIC_STUB_H
#define SOFTNIC_STUB_H

#include <errno.h>
#include <stddef.h>

/* A function that returns a pointer: NULL and errno. */
#define STUB_PTR(name)                                                                                                 \
    void *name(void);                                                                                                  \
    void *name(void)                                                                                                   \
    {                                                                                                                  \
        errno = EOPNOTSUPP;                                                                                            \
        return NULL;                                                                                                   \
    }

/* A function of verbs that returns int: the errno value itself. */
#define STUB_ERRNO(name)                                                                                               \
    int name(void);                                                                                                    \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return EOPNOTSUPP;                                                                                             \
    }

/* A function of sockets that returns int: -1 and errno. */
#define STUB_MINUS1(name)                                                                                              \
    int name(void);                                                                                                    \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        errno = EOPNOTSUPP;                                                                                            \
        return -1;                                                                                                     \
    }

/* A function that frees an object which this library can never have created. */
#define STUB_VOID(name)                                                                                                \
    void name(void);                                                                                                   \
    void name(void)                                                                                                    \
    {                                                                                                                  \
    }

#endif
