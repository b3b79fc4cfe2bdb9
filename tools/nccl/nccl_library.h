/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's public calls, found in libnccl.so.2 at run time, so that one binary serves every installed NCCL. */
#ifndef TOOLS_NCCL_NCCL_LIBRARY_H
#define TOOLS_NCCL_NCCL_LIBRARY_H

#include <stddef.h>

#include "tools/nccl/cuda_driver.h"

/* Values of NCCL's ABI, stable since 2.10. */
enum nccl_type {
    NCCL_INT8 = 0,
    NCCL_UINT8 = 1,
    NCCL_INT32 = 2,
    NCCL_UINT32 = 3,
    NCCL_INT64 = 4,
    NCCL_UINT64 = 5,
    NCCL_FLOAT16 = 6,
    NCCL_FLOAT32 = 7,
    NCCL_FLOAT64 = 8,
    NCCL_BFLOAT16 = 9,
};
enum { NCCL_IN_PROGRESS = 7 }; /* a result */
enum nccl_redop { NCCL_SUM = 0, NCCL_PROD = 1, NCCL_MAX = 2, NCCL_MIN = 3 };

struct nccl_unique_id {
    char bytes[128];
};
typedef struct nccl_comm_object *nccl_comm;

struct nccl_library {
    int (*get_version)(int *version);
    int (*get_unique_id)(struct nccl_unique_id *id);
    int (*comm_init_rank)(nccl_comm *comm, int ranks, struct nccl_unique_id id, int rank);
    int (*comm_destroy)(nccl_comm comm);
    int (*comm_get_async_error)(nccl_comm comm, int *error);
    int (*comm_register)(nccl_comm comm, void *buffer, size_t bytes, void **handle); /* NULL before 2.19 */
    int (*comm_deregister)(nccl_comm comm, void *handle);
    const char *(*get_error_string)(int result);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*all_reduce)(const void *send, void *recv, size_t count, int type, int op, nccl_comm comm, cuda_stream stream);
    int (*all_gather)(const void *send, void *recv, size_t count, int type, nccl_comm comm, cuda_stream stream);
    int (*reduce_scatter)(const void *send, void *recv, size_t count, int type, int op, nccl_comm comm,
                          cuda_stream stream);
    int (*broadcast)(const void *send, void *recv, size_t count, int type, int root, nccl_comm comm,
                     cuda_stream stream);
    int (*reduce)(const void *send, void *recv, size_t count, int type, int op, int root, nccl_comm comm,
                  cuda_stream stream);
    int (*send)(const void *buffer, size_t count, int type, int peer, nccl_comm comm, cuda_stream stream);
    int (*recv)(void *buffer, size_t count, int type, int peer, nccl_comm comm, cuda_stream stream);
};

/* The library, opened once; NULL with a line on stderr when it cannot be used. path NULL: libnccl.so.2. */
const struct nccl_library *nccl_library_open(const char *path);

#endif
