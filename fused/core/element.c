/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/element.h"

#include <stddef.h>

static const struct prs_element elements[] = {
    [PRS_DTYPE_BF16] = {"bf16", 2, true, PRS_DTYPE_BF16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CUDA_R_16BF},
    [PRS_DTYPE_FP16] = {"fp16", 2, true, PRS_DTYPE_FP16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CUDA_R_16F},
    [PRS_DTYPE_FP32] = {"fp32", 4, false, 0, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CUDA_R_32F},
    [PRS_DTYPE_E4M3] = {"e4m3", 1, true, PRS_DTYPE_BF16, CU_TENSOR_MAP_DATA_TYPE_UINT8, CUDA_R_8F_E4M3},
};

const struct prs_element *prs_element_find(uint32_t type)
{
    return type < sizeof(elements) / sizeof(*elements) && elements[type].name ? &elements[type] : NULL;
}
