/* SPDX-License-Identifier: Apache-2.0 */
/* Matrices quantised to e4m3 on an emulated GPU: every number and scale, bit by bit, and what is refused. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <perseus/quantise.h>

#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"

enum { SIDE = 128, UNTOUCHED = 0xa5 };

struct row {
    uint32_t group, rows, columns;
    uint32_t from_pitch, to_pitch, scale_row, scale_column;
};

static uint32_t bytes_of(uint32_t dtype)
{
    return dtype == PRS_DTYPE_FP32 ? 4 : 2;
}

/* Numbers of any size; a group of zeros; a few that are none, or infinite, if `odd`. */
static float number(const struct row *w, uint32_t dtype, uint32_t row, uint32_t column, bool odd)
{
    uint64_t at = (uint64_t)row * w->columns + column;
    float x = ldexpf(ranks_element_of(PRS_DTYPE_FP32, 7, at), (int)((row / SIDE + column / SIDE) % 9) - 4);
    if (row == 1 || (w->group != PRS_QUANTISE_ROWS && column / SIDE == 1))
        return 0;
    if (odd && at % 1009 == 5)
        return at % 2 == 0 ? NAN : -INFINITY;
    return dtype == PRS_DTYPE_FP32 ? x : ranks_value(dtype, ranks_bits(dtype, x));
}

static void put(void *to, uint32_t dtype, uint64_t at, float x)
{
    uint16_t bits = isnan(x) ? 0x7fff : dtype == PRS_DTYPE_FP32 ? 0 : ranks_bits(dtype, x);
    if (dtype == PRS_DTYPE_FP32)
        ((float *)to)[at] = x;
    else
        ((uint16_t *)to)[at] = bits;
}

/* The first row and column of a number's group, and their size. */
static void group_of(const struct row *w, uint32_t row, uint32_t column, uint32_t at[2], uint32_t size[2])
{
    size[0] = w->group == PRS_QUANTISE_TENSOR ? w->rows : w->group == PRS_QUANTISE_SQUARES ? SIDE : 1;
    size[1] = w->group >= PRS_QUANTISE_BLOCKS ? SIDE : w->columns;
    at[0] = row / size[0], at[1] = column / size[1];
}

static float scale_of(const struct row *w, uint32_t dtype, const uint32_t at[2], const uint32_t size[2], bool odd)
{
    float most = 0;
    for (uint32_t r = at[0] * size[0]; r < (at[0] + 1) * size[0] && r < w->rows; r++)
        for (uint32_t c = at[1] * size[1]; c < (at[1] + 1) * size[1]; c++)
            most = fmaxf(most, fabsf(number(w, dtype, r, c, odd))); /* fmaxf() leaves out what is no number */
    return fmaxf(most / 448, 0x1p-126f);
}

/* given: 0, or the scale of the tensor. */
static void check(const struct row *w, uint32_t dtype, bool odd, float given)
{
    uint32_t from_pitch = w->from_pitch != 0 ? w->from_pitch : w->columns;
    uint32_t to_pitch = w->to_pitch != 0 ? w->to_pitch : w->columns;
    uint32_t groups[2], size[2], last[2];
    size_t scales_bytes, to_bytes = (size_t)w->rows * to_pitch, wrong = 0;
    group_of(w, w->rows - 1, w->columns - 1, last, size);
    scales_bytes = (size_t)(last[0] + 1) * (w->scale_column != 0 ? 4 : last[1] + 1) * 64;
    uint8_t *from = ranks_device((size_t)w->rows * from_pitch * bytes_of(dtype), 0xff);
    uint8_t *to = ranks_device(to_bytes, UNTOUCHED), *have = malloc(to_bytes);
    float *scales = ranks_device(scales_bytes, 0xff), *have_scales = malloc(scales_bytes);
    struct prs_quantise x = {from,        to,           scales,          dtype,
                             w->group,    w->rows,      w->columns,      w->from_pitch,
                             w->to_pitch, w->scale_row, w->scale_column, .given = given != 0};
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess); /* the memory is filled */
    for (uint32_t i = 0; i < w->rows * w->columns; i++)
        put(from, dtype, (uint64_t)(i / w->columns) * from_pitch + i % w->columns,
            number(w, dtype, i / w->columns, i % w->columns, odd));
    if (given != 0)
        *scales = given;
    cr_assert_eq(prs_fused_quantise(&x, NULL), 0, "%s", prs_fused_error_text());
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    (void)cudaMemcpy(have, to, to_bytes, cudaMemcpyDeviceToHost);
    (void)cudaMemcpy(have_scales, scales, scales_bytes, cudaMemcpyDeviceToHost);
    uint32_t known[2] = {UINT32_MAX, 0};
    float scale = given;
    for (uint32_t i = 0; i < w->rows * to_pitch; i++) {
        uint32_t row = i / to_pitch, column = i % to_pitch;
        if (column >= w->columns) {
            wrong += have[i] != UNTOUCHED;
            continue;
        }
        group_of(w, row, column, groups, size);
        if (given == 0 && memcmp(groups, known, sizeof(known)) != 0)
            scale = scale_of(w, dtype, groups, size, odd);
        memcpy(known, groups, sizeof(known));
        uint64_t at = w->scale_row == 0 ? (uint64_t)groups[0] * (last[1] + 1) + groups[1]
                                        : groups[0] * w->scale_row + groups[1] * w->scale_column;
        float want = number(w, dtype, row, column, odd) * (1 / scale);
        wrong += have_scales[at] != scale;
        wrong += isnan(want) ? (have[i] & 0x7f) != 0x7f : have[i] != ranks_bits(PRS_DTYPE_E4M3, want);
    }
    cr_assert_eq(wrong, 0, "group %u, dtype %u, %u x %u, odd %d, given %g: %zu wrong", w->group, dtype, w->rows,
                 w->columns, odd, given, wrong);
    free(have);
    free(have_scales);
}

Test(quantise, groups_are_right, .timeout = 120)
{
    static const struct row rows[] = {
        {PRS_QUANTISE_BLOCKS, 9, 1280},
        {PRS_QUANTISE_BLOCKS, 12, 384, .from_pitch = 400, .to_pitch = 416, .scale_row = 1, .scale_column = 12},
        {PRS_QUANTISE_SQUARES, 200, 256},
        {PRS_QUANTISE_SQUARES, 128, 128, .from_pitch = 144, .to_pitch = 160, .scale_row = 1, .scale_column = 1},
        {PRS_QUANTISE_ROWS, 5, 2064},
        {PRS_QUANTISE_ROWS, 3, 16, .to_pitch = 32},
        {PRS_QUANTISE_TENSOR, 7, 272},
    };
    hopper_setup(1, 4, 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        for (uint32_t dtype = PRS_DTYPE_BF16; dtype <= PRS_DTYPE_FP32; dtype++)
            check(&rows[i], dtype, i % 2 == dtype % 2, 0);
    /* What is too large for a given scale saturates. */
    for (uint32_t dtype = PRS_DTYPE_BF16; dtype <= PRS_DTYPE_FP32; dtype++)
        check(&rows[6], dtype, true, 0x1p-12f);
}

Test(quantise, what_cannot_be_is_refused_by_name, .timeout = 300)
{
    float *p;
    hopper_setup(1, 4, 0);
    p = ranks_device(4096, 0);
    const struct {
        struct prs_quantise x;
        const char *why;
    } list[] = {
        {{p, p, p, PRS_DTYPE_E4M3, 3, 1, 128}, "quantise dtype 4 (e4m3)"},
        {{p, p, p, 9, 3, 1, 128}, "quantise dtype 9 (not known)"},
        {{p, p, p, 0, 0, 1, 128}, "quantise group 0"},
        {{p, p, p, 0, 5, 1, 128}, "quantise group 5"},
        {{p, p, p, 0, 3, 1, 64}, "rows of 64 columns: they must be a multiple of 128"},
        {{p, p, p, 0, 2, 1, 24}, "rows of 24 columns: they must be a multiple of 16"},
        {{p, p, p, 0, 2, 1, 16, .given = 1}, "group 2 with a given scale"},
        {{NULL, p, p, 0, 2, 1, 16}, "quantise from (nil)"},
        {{p, (char *)p + 8, p, 0, 2, 1, 16}, "16-byte aligned"},
        {{p, p, NULL, 0, 2, 1, 16}, "scales (nil)"},
        {{p, p, p, 0, 2, 1, 32, .from_pitch = 16}, "from_pitch 16"},
        {{p, p, p, 0, 2, 1, 32, .to_pitch = 40}, "to_pitch 40"},
        {{p, p, p, 0, 2, 1, 32, .reserved = {1}}, "struct prs_quantise"},
    };
    for (size_t i = 0; i < sizeof(list) / sizeof(*list); i++) {
        cr_expect_eq(prs_fused_quantise(&list[i].x, NULL), -EINVAL, "%s", list[i].why);
        cr_expect(strstr(prs_fused_error_text(), list[i].why), "%s\nis not: %s", prs_fused_error_text(), list[i].why);
    }
    cr_expect_eq(prs_fused_quantise(&(struct prs_quantise){.group = PRS_QUANTISE_ROWS, .columns = 16}, NULL), 0);
}
