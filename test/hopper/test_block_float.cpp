/* SPDX-License-Identifier: Apache-2.0 */
/* Block floating point (fused/core/block_float.cuh): four numbers in 8 bytes. */
#include <criterion/criterion.h>
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>

#include "fused/core/block_float.cuh"

struct four {
    float x[4];
};

static struct four there_and_back(float a, float b, float c, float d)
{
    float from[4] = {a, b, c, d};
    struct four to = {{0, 0, 0, 0}};
    add_block_float(to.x, pack_block(from));
    return to;
}

static void assert_near(struct four have, const float *want)
{
    float most = 0;
    for (int i = 0; i < 4; i++)
        most = fmaxf(most, fabsf(want[i]));
    for (int i = 0; i < 4; i++)
        cr_assert_leq(fabs((double)have.x[i] - want[i]), fmax(most * 0x1p-13, 0x1p-126), "number %d: %a, want %a", i,
                      have.x[i], want[i]);
}

Test(block_float, numbers_of_every_exponent_are_near)
{
    for (int e = -126; e < 128; e++)
        for (int i = 0; i < 64; i++) {
            float most = ldexpf(1 + i / 64.0f + FLT_EPSILON, e), want[4] = {most, -most, most * 0.3f, -most * 0x1p-9f};
            for (int turn = 0; turn < 4; turn++) { /* any of the four may be the largest */
                const float v[4] = {want[turn], want[(turn + 1) % 4], want[(turn + 2) % 4], want[(turn + 3) % 4]};
                assert_near(there_and_back(v[0], v[1], v[2], v[3]), v);
            }
        }
}

Test(block_float, the_largest_number_is_not_wrapped)
{
    const float want[4] = {nextafterf(2, 0), -nextafterf(2, 0), FLT_MAX, -FLT_MAX};
    for (int i = 0; i < 4; i++) {
        const float v[4] = {want[i], want[i] * 0.5f, 0, want[i]};
        assert_near(there_and_back(v[0], v[1], v[2], v[3]), v);
    }
}

Test(block_float, whole_numbers_and_zeros_are_exact)
{
    struct four v = there_and_back(8191, -8191, 1, -0.0f), w = there_and_back(0, 0, 0, 0);
    cr_assert(v.x[0] == 8191 && v.x[1] == -8191 && v.x[2] == 1 && v.x[3] == 0, "%g %g %g %g", v.x[0], v.x[1], v.x[2],
              v.x[3]);
    cr_assert(w.x[0] == 0 && w.x[1] == 0 && w.x[2] == 0 && w.x[3] == 0);
}

Test(block_float, what_is_not_finite_stays_so)
{
    const float bad[3] = {INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 3; i++)
        for (int at = 0; at < 4; at++) {
            float v[4] = {1, -2, 0, FLT_MAX};
            struct four have;
            v[at] = bad[i];
            have = there_and_back(v[0], v[1], v[2], v[3]);
            for (int k = 0; k < 4; k++)
                cr_assert(isnan(have.x[k]), "%g at %d: number %d is %g", bad[i], at, k, have.x[k]);
        }
}
