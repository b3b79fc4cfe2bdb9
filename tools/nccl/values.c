/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nccl/values.h"

#include <string.h>

const char *const values_type_names[] = {
    [NCCL_INT8] = "int8",
    [NCCL_UINT8] = "uint8",
    [NCCL_INT32] = "int32",
    [NCCL_UINT32] = "uint32",
    [NCCL_INT64] = "int64",
    [NCCL_UINT64] = "uint64",
    [NCCL_FLOAT16] = "half",
    [NCCL_FLOAT32] = "float",
    [NCCL_FLOAT64] = "double",
    [NCCL_BFLOAT16] = "bfloat16",
    NULL,
};

static const uint8_t sizes[] = {
    [NCCL_INT8] = 1,   [NCCL_UINT8] = 1,   [NCCL_INT32] = 4,   [NCCL_UINT32] = 4,  [NCCL_INT64] = 8,
    [NCCL_UINT64] = 8, [NCCL_FLOAT16] = 2, [NCCL_FLOAT32] = 4, [NCCL_FLOAT64] = 8, [NCCL_BFLOAT16] = 2,
};

size_t values_size(enum nccl_type type)
{
    return (size_t)type < sizeof(sizes) ? sizes[type] : 0;
}

/* A whole number in the type's own encoding; the low values_size() bytes count (little endian). */
static uint64_t encode(enum nccl_type type, unsigned value)
{
    uint64_t bits = 0;

    switch (type) {
    case NCCL_FLOAT16: {
        float wide = (float)value;
        uint32_t word;

        memcpy(&word, &wide, sizeof(word));
        return value ? (word >> 13) - (112 << 10) : 0; /* exact, since values are below 2^8 */
    }
    case NCCL_BFLOAT16: {
        float wide = (float)value;
        uint32_t word;

        memcpy(&word, &wide, sizeof(word));
        return word >> 16; /* exact, since values are below 2^8 */
    }
    case NCCL_FLOAT32: {
        float single = (float)value;

        memcpy(&bits, &single, sizeof(single));
        return bits;
    }
    case NCCL_FLOAT64: {
        double twice = value;

        memcpy(&bits, &twice, sizeof(twice));
        return bits;
    }
    default:
        return value;
    }
}

void values_fill(void *out, enum nccl_type type, unsigned rank, size_t first, size_t count, unsigned seed)
{
    uint64_t table[7];
    size_t size = values_size(type);
    char *at = out;

    for (unsigned v = 0; v < 7; v++)
        table[v] = encode(type, v);
    for (size_t i = 0; i < count; i++, at += size)
        memcpy(at, &table[values_at(rank, first + i, seed)], size);
}

static unsigned expected(enum nccl_redop op, unsigned rank_base, unsigned ranks, size_t i, unsigned seed)
{
    unsigned result = values_at(rank_base, i, seed);

    for (unsigned r = 1; r < ranks; r++) {
        unsigned value = values_at(rank_base + r, i, seed);

        if (op == NCCL_SUM)
            result += value;
        else if (op == NCCL_PROD)
            result *= value;
        else if (op == NCCL_MAX ? value > result : value < result)
            result = value;
    }
    return result;
}

size_t values_check(const void *got, enum nccl_type type, enum nccl_redop op, unsigned rank_base, unsigned ranks,
                    size_t first, size_t count, unsigned seed, size_t *where)
{
    /* The reduction depends on the index i only by (i + i / 1021) % 7: seven cases. */
    uint64_t table[7];
    size_t size = values_size(type), wrong = 0;
    const char *element = got;

    for (unsigned phase = 0; phase < 7; phase++)
        table[phase] = encode(type, expected(op, rank_base, ranks, phase, seed));
    for (size_t i = 0; i < count; i++, element += size) {
        size_t at = first + i;

        if (memcmp(element, &table[(at + at / 1021) % 7], size) && wrong++ == 0)
            *where = at;
    }
    return wrong;
}
