/* SPDX-License-Identifier: Apache-2.0 */
/* Products of e4m3 on the emulated tensor cores: values, layouts, and the bits that their sums lose. */
#include <criterion/criterion.h>
#include <cuda_runtime.h>
#include <math.h>
#include <vector>

#include "fused/core/element.cuh"
#include "fused/core/launch.cuh"
#include "fused/core/ptx.cuh"
#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"
#include "tools/hopper/tile_map.h"

enum { ROWS = 64, STEP = 128, B_PLACE = 16 << 10, BARRIER = 64 << 10, SHARED = 65 << 10 };

struct product {
    CUtensorMap a, b; /* of one step of K */
    float *out;       /* [ROWS][columns] */
    uint32_t times;   /* that the same step is multiplied */
    bool promoted;    /* each step to fp32 */
};

template <int N> static __global__ void multiply(const __grid_constant__ struct product p)
{
    typedef element<PRS_DTYPE_E4M3> in;
    uint8_t *a = dynamic_shared(), *b = a + B_PLACE;
    uint64_t *bar = (uint64_t *)(a + BARRIER);
    uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    float d[N / 2], sum[N / 2] = {};
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_expect(bar, (ROWS + N) * STEP);
        tma_load_2d(a, &p.a, bar, 0, 0);
        tma_load_2d(b, &p.b, bar, 0, 0);
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
    for (uint32_t i = 0; i < p.times; i++) {
        wgmma_fence();
        for (uint32_t k = 0; k < STEP; k += in::product_k)
            in::template multiply<0>(d, matrix_descriptor(smem_address(a + k), 16),
                                     matrix_descriptor(smem_address(b + k), 16), k != 0 || (i != 0 && !p.promoted));
        wgmma_commit();
        wgmma_wait<0>();
        for (uint32_t j = 0; j < N / 2; j++)
            sum[j] = p.promoted ? sum[j] + d[j] : d[j];
    }
    for (uint32_t i = 0; i < N / 2; i++)
        p.out[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

template <class T> static T *on_device(const std::vector<T> &from)
{
    T *p = NULL;
    cr_assert_eq(cudaMalloc((void **)&p, from.size() * sizeof(T)), cudaSuccess);
    cr_assert_eq(cudaMemcpy(p, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

static void set_map(CUtensorMap *map, const std::vector<uint8_t> &from)
{
    const cuuint64_t size[2] = {STEP, from.size() / STEP}, stride[1] = {STEP};
    const cuuint32_t box[2] = {STEP, (cuuint32_t)size[1]}, ones[2] = {1, 1};
    cr_assert_eq(hopper::tile_map_encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, on_device(from), size, stride, box,
                                         ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                 CUDA_SUCCESS);
}

/* Multiplies a [ROWS][STEP] with b [N][STEP]. */
template <int N>
static std::vector<float> run(const std::vector<uint8_t> &a, const std::vector<uint8_t> &b, uint32_t times,
                              bool promoted)
{
    struct launch_shape shape = {1, 128, SHARED};
    std::vector<float> out((size_t)ROWS * N);
    struct product p = {};
    uint32_t clusters;
    set_map(&p.a, a);
    set_map(&p.b, b);
    p.out = on_device(out);
    p.times = times, p.promoted = promoted;
    cr_assert_eq(launch_prepare(multiply<N>, &shape, &clusters), 0);
    cr_assert_eq(launch_kernel(multiply<N>, &shape, 1, NULL, p), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess, "%s", hopper_violation());
    cr_assert_eq(cudaMemcpy(out.data(), p.out, out.size() * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
}

static float number(uint8_t bits)
{
    return ranks_value(PRS_DTYPE_E4M3, bits);
}

/* Sums of numbers from -2 to 2, and of the same numbers as subnormals, fit 14 bits. */
template <int N> static void check_exact(bool subnormal)
{
    std::vector<uint8_t> a(ROWS * STEP), b((size_t)N * STEP);
    for (size_t i = 0; i < a.size(); i++)
        a[i] = (uint8_t)ranks_bits(PRS_DTYPE_E4M3,
                                   (float)((int)(ranks_mix(1, (uint32_t)i, 0) % 5) - 2) * (subnormal ? 0x1p-9f : 1));
    for (size_t i = 0; i < b.size(); i++)
        b[i] = (uint8_t)ranks_bits(PRS_DTYPE_E4M3, (float)((int)(ranks_mix(2, (uint32_t)i, 0) % 5) - 2));
    std::vector<float> out = run<N>(a, b, 1, false);
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t column = 0; column < N; column++) {
            float want = 0;
            for (uint32_t k = 0; k < STEP; k++)
                want += number(a[row * STEP + k]) * number(b[column * STEP + k]);
            cr_assert_eq(out[row * N + column], want, "N %d, subnormal %d: [%u][%u] %g for %g", N, subnormal, row,
                         column, out[row * N + column], want);
        }
}

Test(fp8, what_fits_fourteen_bits_is_exact, .timeout = 60)
{
    hopper_setup(1, 2, 0);
    for (int subnormal = 0; subnormal < 2; subnormal++) {
        check_exact<128>(subnormal);
        check_exact<256>(subnormal);
    }
}

/* The first product is large, and so the accumulator; each other one is half of the last bit that is then kept. */
Test(fp8, what_is_smaller_than_the_last_of_fourteen_bits_is_lost, .timeout = 60)
{
    std::vector<uint8_t> a(ROWS * STEP, 0), b(128 * STEP, 0);
    hopper_setup(1, 2, 0);
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t k = 0; k < STEP; k++)
            a[row * STEP + k] = (uint8_t)ranks_bits(PRS_DTYPE_E4M3, k == 0 ? 256 : row % 2 ? 0x1p-6f : 0x1p-5f);
    for (uint8_t &x : b)
        x = (uint8_t)ranks_bits(PRS_DTYPE_E4M3, 1);
    std::vector<float> out = run<128>(a, b, 1, false);
    for (size_t i = 0; i < out.size(); i++) /* the last bit of 256 is 2^-5 */
        cr_assert_eq(out[i], i / 128 % 2 ? 256 : 256 + 127 * 0x1p-5f, "%zu: %g", i, out[i]);
}

Test(fp8, a_number_that_is_none_stays_one, .timeout = 60)
{
    std::vector<uint8_t> a(ROWS * STEP, 0x38), b(128 * STEP, 0x38); /* ones */
    hopper_setup(1, 2, 0);
    a[5 * STEP + 77] = 0x7f;
    std::vector<float> out = run<128>(a, b, 2, false);
    for (size_t i = 0; i < out.size(); i++)
        cr_assert(i / 128 == 5 ? isnan(out[i]) : out[i] == 256, "%zu: %g", i, out[i]);
}

/* Losses of the elements of a product with K = times * STEP. */
struct losses {
    uint32_t beyond; /* elements that lose more than promotion to fp32 after each step may lose */
    double mean;     /* relative to the element */
};

static struct losses losses_of(const std::vector<uint8_t> &a, const std::vector<uint8_t> &b, uint32_t times,
                               bool promoted)
{
    std::vector<float> out = run<128>(a, b, times, promoted);
    struct losses all = {};
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t column = 0; column < 128; column++) {
            struct ranks_fp8_sum s = {};
            for (uint32_t k = 0; k < STEP; k += 32) {
                double products[32];
                for (uint32_t i = 0; i < 32; i++)
                    products[i] = (double)number(a[row * STEP + k + i]) * number(b[column * STEP + k + i]);
                ranks_fp8_add(&s, products, 32);
            }
            ranks_fp8_promote(&s, times);
            double lost = fabs(out[row * 128 + column] - s.sum);
            all.beyond += !(lost <= s.lost + s.sum * times * 0x1p-24);
            all.mean += lost / s.sum / (ROWS * 128);
        }
    return all;
}

/* With numbers of one sign, as after an activation, the lost part grows with K, because the accumulator grows and each
 * product that is added loses more bits. */
Test(fp8, long_sums_need_promotion, .timeout = 60)
{
    enum { TIMES = 32 };
    std::vector<uint8_t> a(ROWS * STEP), b(128 * STEP);
    hopper_setup(1, 2, 0);
    for (size_t i = 0; i < a.size(); i++)
        a[i] = (uint8_t)ranks_bits(PRS_DTYPE_E4M3, 1 + fabsf(ranks_element(1, i)));
    for (size_t i = 0; i < b.size(); i++)
        b[i] = (uint8_t)ranks_bits(PRS_DTYPE_E4M3, 1 + fabsf(ranks_element(2, i)));
    struct losses promoted = losses_of(a, b, TIMES, true), not_promoted = losses_of(a, b, TIMES, false);
    cr_assert_eq(promoted.beyond, 0, "promoted: %u elements", promoted.beyond);
    cr_assert_eq(not_promoted.beyond, ROWS * 128, "not promoted: %u elements", not_promoted.beyond);
    cr_assert(promoted.mean < 0.001 && not_promoted.mean > 0.05, "promoted %g, not promoted %g", promoted.mean,
              not_promoted.mean);
}
