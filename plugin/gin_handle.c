/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the comm or the set of a handle, and keeps the error of a comm. */
#include "plugin/gin.h"
#include "plugin/result.h"

struct gin_comm *gin_comm_of(void *handle)
{
    struct gin_base *base = handle;

    return base && (base->magic == GIN_COMM || base->magic == GIN_SET) ? base->comm : NULL;
}

struct gin_set *gin_set_of(void *handle)
{
    struct gin_base *base = handle;

    if (!base)
        return NULL;
    if (base->magic == GIN_SET)
        return handle;
    return base->magic == GIN_COMM ? base->comm->own : NULL;
}

net_result gin_fail(struct gin_comm *comm, int error)
{
    int none = 0;

    __atomic_compare_exchange_n(&comm->error, &none, error, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return result_from_errno(error);
}

net_result gin_comm_error(void *handle, bool *has_error)
{
    struct gin_comm *comm = gin_comm_of(handle);

    *has_error = comm && __atomic_load_n(&comm->error, __ATOMIC_RELAXED) != 0;
    return NET_SUCCESS;
}
