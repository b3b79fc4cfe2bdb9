/* SPDX-License-Identifier: Apache-2.0 */
/* libefa.so.1: the names and versions of the real library. libibverbs.so.1 beside it does the work
 * (tools/softnic/verbs/efadv.c). Pointers are untyped, as in stub.h, and are passed on. */
#include <stdint.h>

#include "tools/softnic/stub/stub.h"

#define FORWARD(result, name, parameters, arguments)                                                                   \
    result sn_##name parameters;                                                                                       \
    result name parameters;                                                                                            \
    result name parameters                                                                                             \
    {                                                                                                                  \
        return sn_##name arguments;                                                                                    \
    }

FORWARD(void *, efadv_create_driver_qp, (void *pd, void *attr, uint32_t type), (pd, attr, type))
FORWARD(void *, efadv_create_qp_ex, (void *context, void *attr, void *efa, uint32_t bytes), (context, attr, efa, bytes))
FORWARD(int, efadv_query_device, (void *context, void *attr, uint32_t bytes), (context, attr, bytes))
FORWARD(int, efadv_query_ah, (void *ah, void *attr, uint32_t bytes), (ah, attr, bytes))
FORWARD(void *, efadv_create_cq, (void *context, void *attr, void *efa, uint32_t bytes), (context, attr, efa, bytes))
FORWARD(void *, efadv_cq_from_ibv_cq_ex, (void *cq), (cq))
FORWARD(int, efadv_query_mr, (void *mr, void *attr, uint32_t bytes), (mr, attr, bytes))

FORWARD(int, efadv_get_max_sq_depth, (void *context, void *attr, uint32_t bytes), (context, attr, bytes))
FORWARD(int, efadv_get_max_rq_depth, (void *context, void *attr, uint32_t bytes), (context, attr, bytes))

/* Queues in the program's memory, hints and counters of the device: there is no hardware for them. */
STUB_ERRNO(efadv_query_qp_wqs)
STUB_ERRNO(efadv_query_cq)
STUB_PTR(efadv_qp_from_ibv_qp_ex)
STUB_PTR(efadv_create_comp_cntr)
