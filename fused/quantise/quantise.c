/* SPDX-License-Identifier: Apache-2.0 */
/* What the host checks and decides of a matrix that is quantised. */
#include <errno.h>

#include "fused/core/cuda.h"
#include "fused/core/element.h"
#include "fused/core/scales.h"
#include "fused/quantise/kernels.h"
#include "transport/util/error.h"

static int check(const struct prs_quantise *x)
{
    const struct prs_element *type = prs_element_find(x->dtype);
    uint32_t columns = x->group >= PRS_QUANTISE_BLOCKS ? PRS_SCALE_BLOCK : 16;
    if (!type || x->dtype == PRS_DTYPE_E4M3)
        return prs_fail(-EINVAL, "fused: quantise dtype %u (%s): bf16, fp16 or fp32", x->dtype,
                        type ? type->name : "not known");
    if (x->group < PRS_QUANTISE_TENSOR || x->group > PRS_QUANTISE_SQUARES)
        return prs_fail(-EINVAL, "fused: quantise group %u: PRS_QUANTISE_TENSOR, _ROWS, _BLOCKS or _SQUARES", x->group);
    if (x->given && x->group != PRS_QUANTISE_TENSOR)
        return prs_fail(-EINVAL, "fused: quantise group %u with a given scale: only PRS_QUANTISE_TENSOR has one",
                        x->group);
    if (x->columns % columns != 0)
        return prs_fail(-EINVAL, "fused: quantise rows of %u columns: they must be a multiple of %u", x->columns,
                        columns);
    if (x->rows == 0 || x->columns == 0)
        return 0;
    if (!x->from || !x->to || !x->scales || ((uintptr_t)x->from | (uintptr_t)x->to) % 16 != 0 ||
        (uintptr_t)x->scales % sizeof(float) != 0)
        return prs_fail(-EINVAL,
                        "fused: quantise from %p to %p, scales %p: 16-byte aligned, scales 4-byte, and not NULL",
                        x->from, x->to, (void *)x->scales);
    if ((x->from_pitch | x->to_pitch) % 16 != 0 || (x->from_pitch != 0 && x->from_pitch < x->columns) ||
        (x->to_pitch != 0 && x->to_pitch < x->columns))
        return prs_fail(-EINVAL,
                        "fused: quantise %u columns, from_pitch %llu, to_pitch %llu: at least the columns, and "
                        "multiples of 16",
                        x->columns, (unsigned long long)x->from_pitch, (unsigned long long)x->to_pitch);
    return 0;
}

/* Scales one after the other. */
static void decide(struct prs_quantise *x)
{
    uint32_t blocks = x->group >= PRS_QUANTISE_BLOCKS ? x->columns / PRS_SCALE_BLOCK : 1;
    x->from_pitch = x->from_pitch != 0 ? x->from_pitch : x->columns;
    x->to_pitch = x->to_pitch != 0 ? x->to_pitch : x->columns;
    if (x->scale_row == 0 && x->scale_column == 0)
        x->scale_row = blocks, x->scale_column = 1;
}

int prs_fused_quantise(const struct prs_quantise *given, struct CUstream_st *stream)
{
    struct prs_quantise x = *given;
    int device, sms, r = prs_check_reserved(given, "struct prs_quantise");
    x.dtype = x.dtype == PRS_DTYPE_DEFAULT ? PRS_DTYPE_BF16 : x.dtype;
    if (!r)
        r = check(&x);
    if (r || x.rows == 0 || x.columns == 0)
        return r;
    r = prs_cuda_check(cudaGetDevice(&device), "device to quantise on");
    if (!r)
        r = prs_cuda_check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "number of SMs");
    if (r)
        return r;
    decide(&x);
    x.sms = x.sms == 0 || x.sms > (uint32_t)sms ? (uint32_t)sms : x.sms;
    r = prs_quantise_kernels_launch(&x, stream);
    return r ? prs_fail(r, "fused: the kernel that quantises could not be launched: built for another GPU?") : 0;
}
