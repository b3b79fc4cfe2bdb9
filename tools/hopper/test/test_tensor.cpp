/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated tensor cores and tensor copies, compared with plain loops. The fused kernels, which are right on GPUs,
 * confirm the 128-byte swizzle; the other swizzles are as NVIDIA documents them. */
#include <criterion/criterion.h>
#include <cuda_runtime.h>
#include <math.h>
#include <string>
#include <vector>

#include "fused/core/element.h"
#include "fused/core/epilogue.cuh"
#include "fused/core/launch.cuh"
#include "fused/core/multiply.cuh"
#include "fused/core/ptx.cuh"
#include "tools/hopper/hopper.h"
#include "test/hopper/ranks.h"
#include "tools/hopper/tile_map.h"

enum { SHARED = 128 << 10, BARRIER = 120 << 10, SECOND = 32 << 10 };

template <class T> static T *on_device(const std::vector<T> &from)
{
    T *p = NULL;
    cr_assert_eq(cudaMalloc((void **)&p, from.size() * sizeof(T)), cudaSuccess);
    cr_assert_eq(cudaMemcpy(p, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

template <class T> static std::vector<T> from_device(const T *p, size_t count)
{
    std::vector<T> to(count);
    cr_assert_eq(cudaMemcpy(to.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess, "%s",
                 hopper_violation());
    return to;
}

template <class Args>
static void run(void (*kernel)(const Args), uint32_t cluster, uint32_t threads, const Args &args,
                uint32_t shared_bytes = SHARED)
{
    struct launch_shape shape = {cluster, threads, shared_bytes};
    uint32_t clusters;
    cr_assert_eq(launch_prepare(kernel, &shape, &clusters), 0);
    cr_assert_eq(launch_kernel(kernel, &shape, 1, NULL, args), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess, "%s", hopper_violation());
}

static uint32_t span_of(CUtensorMapSwizzle swizzle)
{
    return swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 16 : 16u << (unsigned)swizzle;
}

static void set_map(CUtensorMap *map, const void *base, CUtensorMapDataType type, uint32_t bytes,
                    std::vector<cuuint64_t> size, std::vector<cuuint32_t> box, CUtensorMapSwizzle swizzle)
{
    std::vector<cuuint64_t> strides(size.size());
    std::vector<cuuint32_t> ones(size.size(), 1);
    cuuint64_t stride = bytes;
    for (size_t i = 0; i < size.size(); i++)
        strides[i] = stride *= size[i];
    cr_assert_eq(hopper::tile_map_encode(map, type, (cuuint32_t)size.size(), (void *)(uintptr_t)base, size.data(),
                                         strides.data(), box.data(), ones.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                                         swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                 CUDA_SUCCESS);
}

/* ---- wgmma ---- */
struct product {
    CUtensorMap a, b; /* boxes of 64 (n) rows by span bytes; N-major: 64 K rows by span bytes */
    float *out;       /* [64][n] */
    const uint16_t *a_plain;
    uint32_t span, n, k; /* k: elements of one span, 16 to 64; without swizzle 16, in two boxes */
    bool b_n_major, a_in_registers;
};

PRS_DEVICE uint64_t descriptor(const uint8_t *at, uint32_t lead, uint32_t stride, uint32_t span)
{
    uint64_t mode = span == 128 ? 1 : span == 64 ? 2 : span == 32 ? 3 : 0;
    return (uint64_t)(smem_address(at) >> 4) | (uint64_t)(lead >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | mode << 62;
}

PRS_DEVICE void load_operands(const struct product &p, uint8_t *a, uint8_t *b, uint64_t *bar)
{
    uint32_t pieces = p.span == 16 ? 2 : 1, across = p.span / 2;
    mbarrier_init(bar, 1);
    mbarrier_expect(bar, (64 + p.n) * p.k * 2);
    for (uint32_t i = 0; i < pieces; i++)
        tma_load_2d(a + i * 1024, &p.a, bar, (int32_t)(i * 8), 0);
    if (!p.b_n_major)
        for (uint32_t i = 0; i < pieces; i++)
            tma_load_2d(b + i * p.n * 16, &p.b, bar, (int32_t)(i * 8), 0);
    else
        for (uint32_t i = 0; i < p.n / across; i++)
            tma_load_2d(b + i * p.k * p.span, &p.b, bar, (int32_t)(i * across), 0);
}

template <int N, hopper::wgmma_type TYPE> static __global__ void multiply(const __grid_constant__ struct product p)
{
    uint8_t *a = dynamic_shared(), *b = a + SECOND;
    uint64_t *bar = (uint64_t *)(a + BARRIER);
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
    float d[N / 2];
    if (threadIdx.x == 0)
        load_operands(p, a, b, bar);
    __syncthreads();
    mbarrier_wait(bar, 0);
    wgmma_fence();
    for (uint32_t k = 0; k < p.k; k += 16) {
        uint32_t lead = p.span == 16 ? 1024 : 16, stride = p.span * 8;
        uint64_t at = descriptor(a + k * 2, lead, stride, p.span);
        uint64_t bt = descriptor(b + k * 2, p.span == 16 ? p.n * 16 : 16, stride, p.span);
        if (p.b_n_major) /* boxes of k rows; without swizzle groups of 8 K rows are 128 bytes, boxes k * 16 */
            bt = p.span == 16 ? descriptor(b + k * 16, 128, p.k * 16, 16)
                              : descriptor(b + k * p.span, p.k * p.span, p.span * 8, p.span);
        if (p.a_in_registers) {
            const uint32_t *x = (const uint32_t *)(p.a_plain + row * p.k + k) + lane % 4;
            const uint32_t *y = x + 4 * p.k; /* eight rows on */
            p.b_n_major ? wgmma_registers<1, TYPE>(d, x[0], y[0], x[4], y[4], bt, k != 0)
                        : wgmma_registers<0, TYPE>(d, x[0], y[0], x[4], y[4], bt, k != 0);
        } else {
            p.b_n_major ? wgmma_shared<1, TYPE>(d, at, bt, k != 0) : wgmma_shared<0, TYPE>(d, at, bt, k != 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (uint32_t i = 0; i < N / 2; i++)
        p.out[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

/* Some rows of an f16 A have only subnormal numbers. The error that is allowed is theirs. */
static const uint32_t SUBNORMAL_ROWS = 4;

static float scale_of_row(bool f16, uint32_t row)
{
    return f16 && row % SUBNORMAL_ROWS == 0 ? 0x1p-15f : 1;
}

template <int N, bool F16 = false>
static void check_product(CUtensorMapSwizzle swizzle, bool b_n_major, bool a_in_registers)
{
    constexpr hopper::wgmma_type type = F16 ? hopper::WGMMA_F16 : hopper::WGMMA_BF16;
    const uint32_t dtype = F16 ? PRS_DTYPE_FP16 : PRS_DTYPE_BF16;
    uint32_t span = span_of(swizzle), k = span == 16 ? 16 : span / 2, across = span / 2;
    std::vector<uint16_t> a(64 * k), b((size_t)N * k);
    struct product p = {};
    for (size_t i = 0; i < a.size(); i++)
        a[i] = ranks_bits(dtype, ranks_element(1, i) * scale_of_row(F16, (uint32_t)(i / k)));
    for (size_t i = 0; i < b.size(); i++)
        b[i] = ranks_bits(dtype, ranks_element(2, i));
    const uint16_t *da = on_device(a), *db = on_device(b);
    set_map(&p.a, da, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, {k, 64}, {across, 64}, swizzle);
    if (b_n_major)
        set_map(&p.b, db, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, {N, k}, {across, k}, swizzle);
    else
        set_map(&p.b, db, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, {k, N}, {across, N}, swizzle);
    p.out = on_device(std::vector<float>(64 * N));
    p.a_plain = da;
    p.span = span, p.n = N, p.k = k;
    p.b_n_major = b_n_major, p.a_in_registers = a_in_registers;
    run(multiply<N, type>, 1, 128, p);
    std::vector<float> out = from_device(p.out, 64 * N);
    for (uint32_t r = 0; r < 64; r++)
        for (uint32_t c = 0; c < N; c++) {
            double want = 0;
            for (uint32_t i = 0; i < k; i++)
                want += (double)ranks_value(dtype, a[r * k + i]) *
                        ranks_value(dtype, b_n_major ? b[i * N + c] : b[c * k + i]);
            cr_assert_float_eq(out[r * N + c], want, 1e-4 * scale_of_row(F16, r),
                               "f16 %d, span %u, N %d, n-major %d, registers %d: [%u][%u] %g for %g", F16, span, N,
                               b_n_major, a_in_registers, r, c, out[r * N + c], want);
        }
}

template <int N> static void check_products(void)
{
    hopper_setup(1, 2, 0);
    for (int swizzle = CU_TENSOR_MAP_SWIZZLE_NONE; swizzle <= CU_TENSOR_MAP_SWIZZLE_128B; swizzle++)
        for (int registers = 0; registers < 2; registers++) {
            check_product<N>((CUtensorMapSwizzle)swizzle, false, registers);
            if (N % (span_of((CUtensorMapSwizzle)swizzle) / 2) == 0)
                check_product<N>((CUtensorMapSwizzle)swizzle, true, registers);
        }
}

Test(tensor, products_of_any_width_and_layout_are_right, .timeout = 900)
{
    check_products<8>();
    check_products<16>();
    check_products<32>();
    check_products<40>();
    check_products<64>();
    check_products<176>();
    check_products<256>();
}

Test(tensor, products_of_f16_are_right, .timeout = 900)
{
    hopper_setup(1, 2, 0);
    for (int n_major = 0; n_major < 2; n_major++) {
        check_product<64, true>(CU_TENSOR_MAP_SWIZZLE_128B, n_major, false);
        check_product<256, true>(CU_TENSOR_MAP_SWIZZLE_128B, n_major, false);
    }
}

/* ---- element types, and tiles of other widths ---- */
template <int TYPE> static void check_type(void)
{
    const struct prs_element *row = prs_element_find(TYPE);
    uint64_t size[2] = {row ? 16 / row->bytes : 1, 1};
    CUtensorMap map;
    cr_assert(row != NULL, "type %d has no row", TYPE);
    cr_assert_eq(row->bytes, element<TYPE>::bytes, "%s: %u bytes in the row", row->name, row->bytes);
    cr_assert_eq(prs_element_step(TYPE), element<TYPE>::in_row, "%s", row->name);
    if constexpr (TYPE != PRS_DTYPE_FP32)
        cr_assert(row->multiplies && row->sum == (uint32_t)element<TYPE>::sum, "%s: sums of type %u in the row",
                  row->name, row->sum);
    /* The driver refuses a box that is no multiple of 16 bytes. */
    set_map(&map, on_device(std::vector<uint8_t>(16)), row->tensor, row->bytes, {size[0], size[1]},
            {(cuuint32_t)size[0], 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
    cr_assert_eq(((struct hopper::tile_map *)&map)->element_bytes, row->bytes, "%s: the tensor map's type", row->name);
}

Test(tensor, kernels_and_host_agree_on_the_types_of_elements)
{
    hopper_setup(1, 2, 0);
    check_type<PRS_DTYPE_BF16>();
    check_type<PRS_DTYPE_FP16>();
    check_type<PRS_DTYPE_FP32>();
    check_type<PRS_DTYPE_E4M3>();
    cr_assert(!prs_element_find(PRS_DTYPE_DEFAULT) && !prs_element_find(PRS_DTYPE_E4M3 + 1));
}

/* An instance of the tile product: one CTA, one tile. */
template <int TYPE, int COLUMNS> struct one_tile : tile_columns<COLUMNS, element<TYPE>::sum> {
    static constexpr int type = TYPE;
    static constexpr int b_n_major = 0;
    static constexpr int cluster = 1;
    static constexpr int slabs = 1;
    static constexpr bool reduces = false;
};

struct tile_args {
    CUtensorMap a, b, c;
    struct prs_epilogue epilogue;
    uint32_t steps, columns; /* columns: of the result */
};

template <class E> PRS_DEVICE void load_tile(const struct tile_args &args, const struct cta_memory &m)
{
    struct pipeline r = {0, 0};
    for (uint32_t step = 0; step < args.steps; step++, pipeline_next(&r)) {
        int32_t k = (int32_t)(step * element<E::type>::in_row);
        mbarrier_wait(&m.empty[r.stage], r.phase ^ 1);
        mbarrier_expect(&m.full[r.stage], PRS_STAGE_A + E::stage_b);
        tma_load_2d(m.base + PRS_SMEM_A + r.stage * PRS_STAGE_A, &args.a, &m.full[r.stage], k, 0);
        tma_load_2d(m.base + PRS_SMEM_B + r.stage * PRS_STAGE_B, &args.b, &m.full[r.stage], k, 0);
    }
}

template <class E> PRS_DEVICE void store_tile(const struct tile_args &args, const struct cta_memory &m, uint32_t half)
{
    for (uint32_t i = 0; i < args.columns / E::slab_columns; i++) {
        mbarrier_wait(&m.c_full[half], i & 1);
        tma_store_2d(&args.c, m.base + PRS_SMEM_C + half * PRS_SLAB, (int32_t)(i * E::slab_columns),
                     (int32_t)(half * 64));
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(&m.c_empty[half]);
    }
    bulk_wait_done<0>();
}

template <class E> PRS_DEVICE void compute_tile(const struct tile_args &args, const struct cta_memory &m, uint32_t half)
{
    struct slab_pipeline slabs = {0};
    struct left_over<E> left;
    struct pipeline r = {0, 0};
    float d[E::accumulators];
    left.next = left_over<E>::count;
    multiply_tile<E>(d, m, &r, half, args.steps, &left, &slabs);
    if (args.epilogue.any)
        finish_tile<E::sum>(args.epilogue, d, {half * 64, 0, PRS_TILE_M, args.columns});
    hand_over_tile<E>(d, m, half, &slabs, false, &left, args.epilogue.gated != 0);
    hand_over_rest<E>(&left, m, half, &slabs);
}

template <class E> static __global__ void one_tile_kernel(const __grid_constant__ struct tile_args args)
{
    struct cta_memory m = cta_memory_map(dynamic_shared());
    if (threadIdx.x == 0)
        cta_memory_init<E>(&m);
    __syncthreads();
    if (threadIdx.x == 0)
        load_tile<E>(args, m);
    else if (threadIdx.x == 32 || threadIdx.x == 64)
        store_tile<E>(args, m, threadIdx.x / 32 - 1);
    else if (threadIdx.x >= 128)
        compute_tile<E>(args, m, threadIdx.x / 128 - 1);
}

/* Six steps of K, so that stages are used again. */
template <int TYPE, int COLUMNS> static void check_tile(bool gated)
{
    enum { K = 6 * 64 };
    uint32_t columns = gated ? COLUMNS / 2 : COLUMNS;
    std::vector<uint16_t> a(PRS_TILE_M * K), b(COLUMNS * K), c;
    struct tile_args args = {};
    for (size_t i = 0; i < a.size(); i++)
        a[i] = ranks_bits(TYPE, ranks_element(1, i));
    for (size_t i = 0; i < b.size(); i++)
        b[i] = ranks_bits(TYPE, ranks_element(2, i));
    uint16_t *out = on_device(std::vector<uint16_t>(PRS_TILE_M * columns));
    set_map(&args.a, on_device(a), prs_element_find(TYPE)->tensor, 2, {K, PRS_TILE_M}, {64, PRS_TILE_M},
            CU_TENSOR_MAP_SWIZZLE_128B);
    set_map(&args.b, on_device(b), prs_element_find(TYPE)->tensor, 2, {K, COLUMNS}, {64, COLUMNS},
            CU_TENSOR_MAP_SWIZZLE_128B);
    set_map(&args.c, out, prs_element_find(TYPE)->tensor, 2, {columns, PRS_TILE_M}, {64, 64},
            CU_TENSOR_MAP_SWIZZLE_128B);
    args.epilogue.any = args.epilogue.gated = gated;
    args.steps = 6, args.columns = columns;
    run(one_tile_kernel<one_tile<TYPE, COLUMNS>>, 1, PRS_THREADS, args, PRS_SMEM_BYTES);
    c = from_device(out, PRS_TILE_M * columns);
    for (uint32_t row = 0; row < PRS_TILE_M; row++)
        for (uint32_t column = 0; column < columns; column++) {
            double sum[2] = {0, 0};
            for (uint32_t up = 0; up <= gated; up++)
                for (uint32_t k = 0; k < K; k++)
                    sum[up] += (double)ranks_value(TYPE, a[row * K + k]) *
                               ranks_value(TYPE, b[(up * columns + column) * K + k]);
            double want = gated ? sum[0] * sum[1] : sum[0], seen = ranks_value(TYPE, c[row * columns + column]);
            cr_assert_float_eq(seen, want, 1e-3 + fabs(want) / 200, "%d columns, gated %d: [%u][%u] %g for %g", COLUMNS,
                               gated, row, column, seen, want);
        }
}

Test(tensor, tiles_of_128_and_256_columns_are_right, .timeout = 900)
{
    hopper_setup(1, 2, 0);
    for (int gated = 0; gated < 2; gated++) {
        check_tile<PRS_DTYPE_BF16, 128>(gated);
        check_tile<PRS_DTYPE_BF16, 256>(gated);
    }
    check_tile<PRS_DTYPE_FP16, 256>(false);
}

/* Every f16 number, and the floats half-way to the next one and just next to that. */
Test(tensor, f16_is_rounded_as_ieee_says, .timeout = 900)
{
    for (uint32_t i = 0; i < 0x10000; i++) {
        uint16_t bits = (uint16_t)i;
        float value = ranks_value(PRS_DTYPE_FP16, bits), low = f16_low(i | 0x3c000000),
              high = f16_high(i << 16 | 0x3c00);
        if (value != value) {
            cr_assert(low != low && high != high && (pack_f16x2(value, 0) & 0x7fff) > 0x7c00, "%#x", i);
            continue;
        }
        cr_assert(low == value && high == value, "%#x is %g, and not %g or %g", i, value, low, high);
        cr_assert_eq(pack_f16x2(value, 1), i | 0x3c000000);
        cr_assert_eq(pack_f16x2(1, value), i << 16 | 0x3c00);
        if ((bits & 0x7c00) == 0x7c00)
            continue;
        float next = (bits & 0x7fff) == 0x7bff ? copysignf(65536, value) : ranks_value(PRS_DTYPE_FP16, bits + 1);
        float middle = (value + next) / 2;
        for (float between : {nextafterf(middle, value), middle, nextafterf(middle, next)})
            cr_assert_eq(pack_f16x2(between, 0), ranks_bits(PRS_DTYPE_FP16, between), "%a after %#x: %#x", between, i,
                         pack_f16x2(between, 0));
        cr_assert_eq(pack_f16x2(nextafterf(middle, value), 0), i, "below the middle");
        cr_assert_eq(pack_f16x2(nextafterf(middle, next), 0), i + 1, "above the middle");
        cr_assert_eq(pack_f16x2(middle, 0), i + (i & 1), "a tie goes to the even one");
    }
}

/* Every e4m3 number, the floats next to it and half-way to the next number, and numbers that saturate. */
Test(tensor, e4m3_is_rounded_and_saturates)
{
    for (uint32_t i = 0; i < 0x100; i++) {
        float value = ranks_value(PRS_DTYPE_E4M3, (uint16_t)i);
        if (value != value) {
            cr_assert_eq(pack_e4m3x2(value, 1) & 0x7f, 0x7f, "%#x", i);
            continue;
        }
        cr_assert_eq(pack_e4m3x2(value, 1), i | 0x3800);
        cr_assert_eq(pack_e4m3x2(1, value), i << 8 | 0x38);
        float next = (i & 0x7f) == 0x7e ? copysignf(480, value) : ranks_value(PRS_DTYPE_E4M3, (uint16_t)(i + 1));
        float middle = (value + next) / 2;
        for (float between : {nextafterf(middle, value), middle, nextafterf(middle, next)})
            cr_assert_eq(pack_e4m3x2(between, 0), ranks_bits(PRS_DTYPE_E4M3, between), "%a after %#x: %#x", between, i,
                         pack_e4m3x2(between, 0));
    }
    for (float most : {449.0f, 1e30f, INFINITY})
        cr_assert_eq(pack_e4m3x2(most, -most), 0xfe7e);
}

/* ---- tensor copies ---- */
struct boxes {
    CUtensorMap from, to;
    uint8_t *copy; /* what was loaded, as it lies in shared memory */
    int32_t at[5], store_at[5];
    uint32_t dims, bytes;
};

static __global__ void move_box(const __grid_constant__ struct boxes p)
{
    uint64_t *bar = (uint64_t *)(dynamic_shared() + BARRIER);
    const int32_t *x = p.at;
    mbarrier_init(bar, 1);
    mbarrier_expect(bar, p.bytes);
    switch (p.dims) {
    case 2:
        tma_load_2d(dynamic_shared(), &p.from, bar, x[0], x[1]);
        break;
    case 3:
        tma_load_3d(dynamic_shared(), &p.from, bar, x[0], x[1], x[2]);
        break;
    case 4:
        tma_load_4d(dynamic_shared(), &p.from, bar, x[0], x[1], x[2], x[3]);
        break;
    default:
        tma_load_5d(dynamic_shared(), &p.from, bar, x[0], x[1], x[2], x[3], x[4]);
    }
    mbarrier_wait(bar, 0);
    memcpy(p.copy, dynamic_shared(), p.bytes);
    hopper::tile_store(&p.to, smem_address(dynamic_shared()), p.store_at, (int)p.dims, hopper::REDUCE_NONE);
    bulk_commit();
    bulk_wait_done<0>();
}

/* The index of an element in a dense array, or -1 outside. */
static int64_t index_of(const std::vector<cuuint64_t> &size, const std::vector<int32_t> &at)
{
    int64_t index = 0;
    for (size_t d = size.size(); d-- > 0;) {
        if (at[d] < 0 || at[d] >= (int64_t)size[d])
            return -1;
        index = index * (int64_t)size[d] + at[d];
    }
    return index;
}

static void check_box(uint32_t dims, const int32_t *at, const int32_t *store_at)
{
    std::vector<cuuint64_t> size = {24, 7, 5, 3, 2};
    std::vector<cuuint32_t> box = {16, 4, 3, 2, 2};
    struct boxes p = {};
    uint64_t count = 1;
    size.resize(dims), box.resize(dims);
    p.dims = dims, p.bytes = 2;
    for (uint32_t i = 0; i < dims; i++) {
        count *= size[i], p.bytes *= box[i];
        p.at[i] = at[i], p.store_at[i] = store_at[i];
    }
    std::vector<uint16_t> source(count), untouched(count, 0xeeee);
    for (uint64_t i = 0; i < count; i++)
        source[i] = (uint16_t)(i + 1);
    uint16_t *to = on_device(untouched);
    set_map(&p.from, on_device(source), CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, size, box, CU_TENSOR_MAP_SWIZZLE_NONE);
    set_map(&p.to, to, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, size, box, CU_TENSOR_MAP_SWIZZLE_NONE);
    p.copy = on_device(std::vector<uint8_t>(p.bytes));
    run(move_box, 1, 1, p);
    std::vector<uint16_t> want = untouched, loaded = from_device((uint16_t *)p.copy, p.bytes / 2);
    for (uint32_t i = 0; i < p.bytes / 2; i++) {
        std::vector<int32_t> here(dims), there(dims);
        for (uint32_t d = 0, left = i; d < dims; left /= box[d], d++) {
            here[d] = at[d] + (int32_t)(left % box[d]);
            there[d] = store_at[d] + (int32_t)(left % box[d]);
        }
        int64_t from = index_of(size, here), into = index_of(size, there);
        cr_assert_eq(loaded[i], from < 0 ? 0 : source[(size_t)from], "%u dimensions, element %u", dims, i);
        if (into >= 0)
            want[(size_t)into] = loaded[i];
    }
    cr_assert(from_device(to, count) == want, "%u dimensions: the stored box", dims);
}

Test(tensor, boxes_beyond_the_edge_are_filled_and_clipped, .timeout = 900)
{
    static const int32_t inside[5] = {0, 1, 1, 0, 0}, low[5] = {-8, -1, -2, -1, -1}, high[5] = {16, 5, 3, 2, 1};
    static const int32_t outside[5] = {24, 0, 0, 0, 0};
    hopper_setup(1, 2, 0);
    for (uint32_t dims = 2; dims <= 5; dims++) {
        check_box(dims, inside, low);
        check_box(dims, low, high);
        check_box(dims, high, inside);
        check_box(dims, outside, inside);
    }
}

/* ---- clusters, sums, matrices ---- */
struct bytes {
    uint8_t *in, *out; /* 4096 each */
    CUtensorMap map;   /* boxes of 64 x 8 bf16 */
};

static __global__ void multicast_and_send(const __grid_constant__ struct bytes p)
{
    uint64_t *bar = (uint64_t *)(dynamic_shared() + BARRIER);
    mbarrier_init(&bar[0], 1);
    mbarrier_init(&bar[1], 1);
    mbarrier_init_fence();
    cluster_arrive();
    cluster_wait();
    mbarrier_expect(&bar[0], 1024);
    if (blockIdx.x == 0)
        tma_load_2d_multicast(dynamic_shared(), &p.map, &bar[0], 0, 0, 3);
    mbarrier_wait(&bar[0], 0);
    memcpy(p.out + blockIdx.x * 1024, dynamic_shared(), 1024);
    if (blockIdx.x == 1) {
        mbarrier_expect(&bar[1], 1024);
        mbarrier_wait(&bar[1], 0);
        memcpy(p.out + 2048, dynamic_shared() + SECOND, 1024);
    } else { /* from CTA to CTA */
        hopper::bulk_copy_shared(hopper::shared_map(smem_address(dynamic_shared() + SECOND), 1),
                                 smem_address(dynamic_shared()), 1024, hopper::shared_map(smem_address(&bar[1]), 1));
    }
    cluster_arrive();
    cluster_wait();
}

Test(tensor, what_is_multicast_reaches_every_cta, .timeout = 900)
{
    std::vector<uint8_t> in(4096);
    struct bytes p = {};
    hopper_setup(1, 2, 0);
    for (size_t i = 0; i < in.size(); i++)
        in[i] = (uint8_t)(i * 7 + i / 256);
    p.in = on_device(in);
    p.out = on_device(std::vector<uint8_t>(4096));
    set_map(&p.map, p.in, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, {64, 32}, {64, 8}, CU_TENSOR_MAP_SWIZZLE_NONE);
    run(multicast_and_send, 2, 1, p);
    std::vector<uint8_t> out = from_device(p.out, 3072);
    for (size_t i = 0; i < out.size(); i++)
        cr_assert_eq(out[i], in[i % 1024], "byte %zu", i);
}

static __global__ void accumulate(const __grid_constant__ struct bytes p)
{
    float f[4] = {1, 2, 3, 4};
    uint32_t h = pack_bf16x2(0.5f, -2), at = smem_address(dynamic_shared());
    hopper::shared_store(at, f, 16);
    store_shared_v4(at + 16, h, h, h, h);
    fence_async_shared();
    hopper::bulk_store_bytes(p.out, at, 16, hopper::REDUCE_ADD_F32);
    hopper::bulk_store_bytes(p.out, at, 16, hopper::REDUCE_ADD_F32);
    hopper::bulk_store_bytes(p.out + 16, at + 16, 16, hopper::REDUCE_ADD_BF16);
    bulk_commit();
    bulk_wait_done<0>();
}

Test(tensor, bulk_sums_add_to_what_is_there, .timeout = 900)
{
    struct bytes p = {};
    hopper_setup(1, 2, 0);
    p.out = on_device(std::vector<uint8_t>(32));
    run(accumulate, 1, 1, p);
    std::vector<float> f = from_device((float *)p.out, 4);
    std::vector<uint16_t> h = from_device((uint16_t *)(p.out + 16), 8);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(f[(size_t)i], 2.0f * (float)(i + 1));
    for (size_t i = 0; i < 8; i++)
        cr_assert_eq(ranks_float(h[i]), i % 2 == 0 ? 0.5f : -2.0f);
}

/* stmatrix as documented: row r of matrix i lies at the address of lane 8 i + r; lane t holds columns 2 (t % 4) and
 * 2 (t % 4) + 1 of row t / 4. */
static __global__ void store_matrices(const __grid_constant__ struct bytes p)
{
    uint32_t lane = threadIdx.x, base = smem_address(dynamic_shared()), r[4], back[4];
    for (uint32_t i = 0; i < 4; i++)
        r[i] = (i * 64 + lane * 2) | (i * 64 + lane * 2 + 1) << 16; /* the matrix, and the element in it */
    store_matrix_x4(base + lane * 16, r[0], r[1], r[2], r[3]);
    __syncwarp();
    hopper::warp_load_matrix(base + lane * 16, back, 4, false);
    memcpy(p.out + lane * 16, dynamic_shared() + lane * 16, 16);
    p.out[512 + lane] = memcmp(r, back, 16) == 0;
    hopper::warp_load_matrix(base + lane * 16, back, 4, true);
    p.out[544 + lane] = (back[0] & 0xffff) == lane % 4 * 2 * 8 + lane / 4;
    p.out[576 + lane] = __shfl_xor_sync(~0u, lane, 5) == (lane ^ 5) &&
                        __shfl_up_sync(~0u, lane, 1) == (lane ? lane - 1 : 0) &&
                        __ballot_sync(~0u, lane % 3 == 0) == 0x49249249u && __reduce_add_sync(~0u, lane) == 496 &&
                        __shfl_sync(~0u, lane, 2, 8) == lane / 8 * 8 + 2;
}

Test(tensor, matrices_lie_as_documented, .timeout = 900)
{
    struct bytes p = {};
    hopper_setup(1, 2, 0);
    p.out = on_device(std::vector<uint8_t>(4096));
    run(store_matrices, 1, 32, p);
    std::vector<uint8_t> out = from_device(p.out, 608);
    for (uint32_t i = 0; i < 256; i++)
        cr_assert_eq(((const uint16_t *)out.data())[i], i);
    for (uint32_t i = 512; i < 608; i++)
        cr_assert_eq(out[i], 1, "%u", i);
}
