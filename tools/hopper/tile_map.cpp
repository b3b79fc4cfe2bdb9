/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/tile_map.h"

#include <cstdio>
#include <cstring>

namespace hopper
{

static uint32_t type_bytes(CUtensorMapDataType type)
{
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
        return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
        return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

static uint32_t span_of(CUtensorMapSwizzle swizzle)
{
    switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
        return 16;
    case CU_TENSOR_MAP_SWIZZLE_32B:
        return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B:
        return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B:
        return 128;
    default:
        return 0;
    }
}

/* Refuses what the driver refuses. The destination in shared memory, which it cannot know, is checked at each copy. */
CUresult tile_map_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t dims, void *base,
                         const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                         const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                         CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill)
{
    struct tile_map m = {};
    uint64_t inner;
    if ((uintptr_t)map % 64 != 0) /* worth a message: calloc() aligns to 16 */
        fprintf(stderr, "hopper: cuTensorMapEncodeTiled: the CUtensorMap at %p is not aligned to 64 bytes\n",
                (void *)map);
    m.magic = TILE_MAP_MAGIC;
    m.dims = (uint8_t)dims;
    m.element_bytes = (uint8_t)type_bytes(type);
    m.swizzle_bytes = (uint8_t)span_of(swizzle);
    m.fill_nan = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    m.base = (uint64_t)(uintptr_t)base;
    if (dims < 1 || dims > TILE_DIMS || m.element_bytes == 0 || m.swizzle_bytes == 0 ||
        interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || (uintptr_t)map % 64 != 0 || m.base % 16 != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < TILE_DIMS; i++) {
        m.size[i] = i < dims ? size[i] : 1;
        m.box[i] = (uint16_t)(i < dims ? box[i] : 1);
        if (i < dims &&
            (size[i] == 0 || size[i] > 1ull << 32 || box[i] == 0 || box[i] > 256 || element_strides[i] != 1))
            return CUDA_ERROR_INVALID_VALUE;
        if (i == 0)
            continue;
        m.stride[i - 1] = i < dims ? stride[i - 1] : 0;
        if (i < dims && (stride[i - 1] % 16 != 0 || stride[i - 1] >= 1ull << 40))
            return CUDA_ERROR_INVALID_VALUE;
    }
    inner = (uint64_t)m.box[0] * m.element_bytes;
    if (inner % 16 != 0 || (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && inner > m.swizzle_bytes))
        return CUDA_ERROR_INVALID_VALUE;
    memset(map, 0, sizeof(*map));
    memcpy(map, &m, sizeof(m));
    return CUDA_SUCCESS;
}

} // namespace hopper
