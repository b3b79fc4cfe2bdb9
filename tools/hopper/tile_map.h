/* SPDX-License-Identifier: Apache-2.0 */
/* What the emulator keeps in the 128 opaque bytes of a CUtensorMap. */
#ifndef TOOLS_HOPPER_TILE_MAP_H
#define TOOLS_HOPPER_TILE_MAP_H

#include <cuda.h>
#include <stdint.h>

namespace hopper
{

enum : uint32_t { TILE_MAP_MAGIC = 0x71e3a9u, TILE_DIMS = 5 };

struct tile_map {
    uint32_t magic;
    uint8_t dims, element_bytes, swizzle_bytes, fill_nan;
    uint64_t base;
    uint64_t size[TILE_DIMS];
    uint64_t stride[TILE_DIMS - 1]; /* bytes; strides of dimensions 1 and up */
    uint16_t box[TILE_DIMS];
};
static_assert(sizeof(struct tile_map) <= sizeof(CUtensorMap), "opaque to the kernels");

/* cuTensorMapEncodeTiled(). */
CUresult tile_map_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t dims, void *base,
                         const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                         const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                         CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

/* Where a byte of a swizzled pattern lies: the bits that count rows are xored into those that count 16-byte chunks. */
static inline uint32_t swizzled(uint32_t address, uint32_t swizzle_bytes)
{
    return swizzle_bytes < 32 ? address : address ^ (address >> 3 & (swizzle_bytes - 1) & 0x70);
}

} // namespace hopper

#endif
