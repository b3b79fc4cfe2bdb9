/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <errno.h>

#include "fused/core/element.h"
#include "transport/util/error.h"

/* Found through the runtime, so that the library loads without libcuda.so. */
static PFN_cuTensorMapEncodeTiled_v12000 encoder(void)
{
    static PFN_cuTensorMapEncodeTiled_v12000 fn; /* every thread finds the same address, so a race is harmless */
    void *p = NULL;
    enum cudaDriverEntryPointQueryResult found;
    PFN_cuTensorMapEncodeTiled_v12000 have = __atomic_load_n(&fn, __ATOMIC_RELAXED);
    if (have)
        return have;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return NULL;
    have = (PFN_cuTensorMapEncodeTiled_v12000)p;
    __atomic_store_n(&fn, have, __ATOMIC_RELAXED);
    return have;
}

static int encode(const void *base, uint32_t type, uint32_t rank, const cuuint64_t *size, const cuuint64_t *stride,
                  const cuuint32_t *box, bool swizzled, CUtensorMap *map)
{
    PFN_cuTensorMapEncodeTiled_v12000 fn = encoder();
    cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUresult e;
    if (!fn)
        return prs_fail(-ENOTSUP, "fused: the driver has no cuTensorMapEncodeTiled: older than CUDA 12.0");
    e = fn(map, prs_element_find(type)->tensor, rank, (void *)(uintptr_t)base, size, stride, box, steps,
           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (e != CUDA_SUCCESS)
        return prs_fail(-EINVAL, "fused: no tensor map for %p, %llu rows of %llu: CUDA error %d (16-byte alignment?)",
                        base, (unsigned long long)size[1], (unsigned long long)size[0], (int)e);
    return 0;
}

int prs_tensor_map_encode(const struct prs_tensor *t, CUtensorMap *map)
{
    cuuint64_t size[3] = {t->columns, t->rows, t->planes};
    cuuint64_t pitch = (t->pitch != 0 ? t->pitch : t->columns) * prs_element_bytes(t->type),
               stride[2] = {pitch, pitch * t->rows};
    cuuint32_t box[3] = {prs_element_step(t->type), t->box_rows, 1};
    return encode(t->base, t->type, t->planes == 0 ? 2 : 3, size, stride, box, t->swizzled, map);
}

int prs_tensor_view_encode(const struct prs_tensor_view *v, CUtensorMap *map)
{
    cuuint64_t size[5], stride[4];
    for (int i = 0; i < 5; i++)
        size[i] = v->size[i];
    for (int i = 0; i < 4; i++)
        stride[i] = v->stride[i];
    return encode(v->base, v->type, 5, size, stride, v->box, v->swizzled, map);
}
