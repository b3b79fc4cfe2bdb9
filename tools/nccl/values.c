/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nccl/values.h"

#include <string.h>

static const struct {
    const char *name;
    size_t size;
} types[] = {
    [NCCL_INT8] = {"int8", 1},         [NCCL_UINT8] = {"uint8", 1},   [NCCL_INT32] = {"int32", 4},
    [NCCL_UINT32] = {"uint32", 4},     [NCCL_INT64] = {"int64", 8},   [NCCL_UINT64] = {"uint64", 8},
    [NCCL_FLOAT16] = {"half", 2},      [NCCL_FLOAT32] = {"float", 4}, [NCCL_FLOAT64] = {"double", 8},
    [NCCL_BFLOAT16] = {"bfloat16", 2},
};
enum { TYPES = sizeof(types) / sizeof(types[0]) };

size_t values_size(enum nccl_type type)
{
    return (unsigned)type < TYPES ? types[type].size : 0;
}

const char *values_type_name(enum nccl_type type)
{
    return (unsigned)type < TYPES ? types[type].name : "unknown";
}

int values_type_parse(const char *name)
{
    for (int i = 0; i < TYPES; i++)
        if (strcmp(types[i].name, name) == 0)
            return i;
    return -1;
}

/* A whole number in the type's own encoding; the low values_size() bytes count (little endian). */
static uint64_t encode(enum nccl_type type, unsigned value)
{
    uint64_t bits = 0;

    switch (type) {
    case NCCL_FLOAT16: {
        _Float16 half = (_Float16)value;

        memcpy(&bits, &half, sizeof(half));
        return bits;
    }
    case NCCL_BFLOAT16: {
        float wide = (float)value;
        uint32_t word;

        memcpy(&word, &wide, sizeof(word));
        return word >> 16; /* exact: values stay below 2^8 */
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
    char *place = out;

    for (unsigned v = 0; v < 7; v++)
        table[v] = encode(type, v);
    for (size_t i = 0; i < count; i++, place += size)
        memcpy(place, &table[values_at(rank, first + i, seed)], size);
}

static unsigned expected(enum nccl_redop op, unsigned rank_base, unsigned ranks, size_t place, unsigned seed)
{
    unsigned result = values_at(rank_base, place, seed);

    for (unsigned r = 1; r < ranks; r++) {
        unsigned value = values_at(rank_base + r, place, seed);

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
    /* The sum depends on the place only through (place + place / 1021) % 7: seven cases, worked out once. */
    uint64_t table[7];
    size_t size = values_size(type), wrong = 0;
    const char *place = got;

    for (unsigned phase = 0; phase < 7; phase++)
        table[phase] = encode(type, expected(op, rank_base, ranks, phase, seed));
    for (size_t i = 0; i < count; i++, place += size) {
        size_t at = first + i;

        if (memcmp(place, &table[(at + at / 1021) % 7], size) != 0 && wrong++ == 0)
            *where = at;
    }
    return wrong;
}
