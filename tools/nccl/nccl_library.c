/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nccl/nccl_library.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>

const struct nccl_library *nccl_library_open(const char *path)
{
    static struct nccl_library nccl;
    static const struct {
        void *slot;
        const char *name;
        bool optional;
    } symbols[] = {
        {&nccl.get_version, "ncclGetVersion", false},
        {&nccl.get_unique_id, "ncclGetUniqueId", false},
        {&nccl.comm_init_rank, "ncclCommInitRank", false},
        {&nccl.comm_destroy, "ncclCommDestroy", false},
        {&nccl.comm_get_async_error, "ncclCommGetAsyncError", false},
        {&nccl.comm_register, "ncclCommRegister", true},
        {&nccl.comm_deregister, "ncclCommDeregister", true},
        {&nccl.get_error_string, "ncclGetErrorString", false},
        {&nccl.group_start, "ncclGroupStart", false},
        {&nccl.group_end, "ncclGroupEnd", false},
        {&nccl.all_reduce, "ncclAllReduce", false},
        {&nccl.all_gather, "ncclAllGather", false},
        {&nccl.reduce_scatter, "ncclReduceScatter", false},
        {&nccl.broadcast, "ncclBroadcast", false},
        {&nccl.reduce, "ncclReduce", false},
        {&nccl.send, "ncclSend", false},
        {&nccl.recv, "ncclRecv", false},
    };
    void *library = dlopen(path ? path : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        fprintf(stderr, "perseus-nccl: cannot open NCCL: %s (give --nccl FILE)\n", dlerror());
        return NULL;
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        *(void **)symbols[i].slot = dlsym(library, symbols[i].name);
        if (!*(void **)symbols[i].slot && !symbols[i].optional) {
            fprintf(stderr, "perseus-nccl: NCCL has no %s: too old?\n", symbols[i].name);
            return NULL;
        }
    }
    return &nccl;
}
