/* SPDX-License-Identifier: Apache-2.0 */
/* libefa.so.1 for devices that are not EFA. */
#include "tools/softnic/stub/stub.h"

STUB_PTR(efadv_create_driver_qp)
STUB_PTR(efadv_create_qp_ex)
STUB_ERRNO(efadv_query_device)
STUB_ERRNO(efadv_query_ah)
STUB_PTR(efadv_create_cq)
STUB_PTR(efadv_cq_from_ibv_cq_ex)
STUB_ERRNO(efadv_query_mr)
