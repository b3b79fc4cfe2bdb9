/* SPDX-License-Identifier: Apache-2.0 */
/* In place of lt.c where cublasLt.h is missing at build time: shapes that need the unfused path are refused. */
#include <errno.h>

#include "fused/gemm/unfused/lt.h"
#include "transport/util/error.h"

int prs_lt_open(void **handle, void *workspace, const struct prs_gemm_shape *shape, uint32_t sms, struct prs_lt **out)
{
    *out = NULL;
    return prs_fail(-ENOTSUP, "fused: %u x %u x %u needs cuBLASLt, and this library was built without its header",
                    shape->m, shape->n, shape->k);
}

void prs_lt_close(struct prs_lt *lt)
{
}

void prs_lt_release(void *handle)
{
}

int prs_lt_run(struct prs_lt *lt, uint32_t m, const struct prs_lt_operands *x, cudaStream_t stream)
{
    return -ENOTSUP;
}
