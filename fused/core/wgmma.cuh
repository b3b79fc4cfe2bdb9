/* SPDX-License-Identifier: Apache-2.0 */
/* The instructions of the tensor cores. Part of ptx.cuh, which includes it. */
#ifndef PERSEUS_FUSED_WGMMA_CUH
#define PERSEUS_FUSED_WGMMA_CUH

/* ---- tensor cores ---- */
/* Operand of wgmma in shared memory, 128-byte swizzle. K-major: rows of 128 bytes, 8-row groups 1024 bytes apart.
 * N-major: boxes of 64 K rows x 64 columns, 8192 bytes apart; 8-row groups along K 1024 bytes apart. */
PRS_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

PRS_DEVICE void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

PRS_DEVICE void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> PRS_DEVICE void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define PRS_REGISTERS_8(d, i)                                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define PRS_REGISTERS_32(d, i)                                                                                         \
    PRS_REGISTERS_8(d, i), PRS_REGISTERS_8(d, i + 8), PRS_REGISTERS_8(d, i + 16), PRS_REGISTERS_8(d, i + 24)
#define PRS_NAMES_32                                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define PRS_NAMES_64                                                                                                   \
    PRS_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "   \
                 "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PRS_NAMES_88                                                                                                   \
    PRS_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, "   \
                 "%83, %84, %85, %86, %87"
#define PRS_NAMES_96 PRS_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define PRS_NAMES_128                                                                                                  \
    PRS_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "  \
                 "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, "    \
                 "%122, %123, %124, %125, %126, %127"

#define PRS_WGMMA_M64N256K16(types)                                                                                    \
    asm volatile("{\n"                                                                                                 \
                 ".reg .pred p;\n"                                                                                     \
                 "setp.ne.b32 p, %130, 0;\n"                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." types " {" PRS_NAMES_128 "}, "                         \
                 "%128, %129, p, 1, 1, 0, %131;\n"                                                                     \
                 "}"                                                                                                   \
                 : PRS_REGISTERS_32(d, 0), PRS_REGISTERS_32(d, 32), PRS_REGISTERS_32(d, 64), PRS_REGISTERS_32(d, 96)   \
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_B))

/* d[64 x 256] (+)= A[64 x 16] * B[16 x 256]; one warpgroup; add = 0 overwrites d. TRANS_B = 1: B lies N-major in shared
 * memory. */
template <int TRANS_B> PRS_DEVICE void wgmma_m64n256k16_bf16(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
{
    PRS_WGMMA_M64N256K16("bf16.bf16");
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n256k16_f16(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
{
    PRS_WGMMA_M64N256K16("f16.f16");
}

#define PRS_WGMMA_M64N192K16(types)                                                                                    \
    asm volatile("{\n"                                                                                                 \
                 ".reg .pred p;\n"                                                                                     \
                 "setp.ne.b32 p, %98, 0;\n"                                                                            \
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32." types " {" PRS_NAMES_96 "}, "                          \
                 "%96, %97, p, 1, 1, 0, %99;\n"                                                                        \
                 "}"                                                                                                   \
                 : PRS_REGISTERS_32(d, 0), PRS_REGISTERS_32(d, 32), PRS_REGISTERS_32(d, 64)                            \
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_B))

template <int TRANS_B> PRS_DEVICE void wgmma_m64n192k16_bf16(float (&d)[96], uint64_t a, uint64_t b, uint32_t add)
{
    PRS_WGMMA_M64N192K16("bf16.bf16");
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n192k16_f16(float (&d)[96], uint64_t a, uint64_t b, uint32_t add)
{
    PRS_WGMMA_M64N192K16("f16.f16");
}

/* d[64 x 256] (+)= A[64 x 32] * B[32 x 256] of e4m3, both K-major. The tensor cores keep about 14 bits of sums, within
 * one instruction and in d between instructions. */
PRS_DEVICE void wgmma_m64n256k32_e4m3(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" PRS_NAMES_128 "}, "
                 "%128, %129, p, 1, 1;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0), PRS_REGISTERS_32(d, 32), PRS_REGISTERS_32(d, 64), PRS_REGISTERS_32(d, 96)
                 : "l"(a), "l"(b), "r"(add));
}

PRS_DEVICE void wgmma_m64n128k32_e4m3(float (&d)[64], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" PRS_NAMES_64 "}, "
                 "%64, %65, p, 1, 1;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0), PRS_REGISTERS_32(d, 32)
                 : "l"(a), "l"(b), "r"(add));
}

/* The same for few columns: decoding has few tokens. */
PRS_DEVICE void wgmma_m64n64k32_e4m3(float (&d)[32], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" PRS_NAMES_32 "}, %32, %33, p, 1, 1;\n}"
                 : PRS_REGISTERS_32(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

PRS_DEVICE void wgmma_m64n32k32_e4m3(float (&d)[16], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
                 "%11, %12, %13, %14, %15}, %16, %17, p, 1, 1;\n}"
                 : PRS_REGISTERS_8(d, 0), PRS_REGISTERS_8(d, 8)
                 : "l"(a), "l"(b), "r"(add));
}

PRS_DEVICE void wgmma_m64n16k32_e4m3(float (&d)[8], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "%8, %9, p, 1, 1;\n}"
                 : PRS_REGISTERS_8(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

PRS_DEVICE void wgmma_m64n8k32_e4m3(float (&d)[4], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, p, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a), "l"(b), "r"(add));
}

/* ---- tensor cores: attention ---- */
/* Keeps instructions that compute these registers before this point, and those that use them after it. The compiler
 * does not know that wgmma_wait() fills an accumulator, nor that work before it should run during a product. */
template <int N> PRS_DEVICE void registers_pin(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* Like wgmma_m64n256k16_bf16, for fewer columns. */
template <int TRANS_B> PRS_DEVICE void wgmma_m64n128k16_bf16(float (&d)[64], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PRS_NAMES_64 "}, "
                 "%64, %65, p, 1, 1, 0, %67;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0), PRS_REGISTERS_32(d, 32)
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_B));
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n64k16_bf16(float (&d)[32], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PRS_NAMES_32 "}, "
                 "%32, %33, p, 1, 1, 0, %35;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0)
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_B));
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n176k16_bf16(float (&d)[88], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %90, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {" PRS_NAMES_88 "}, "
                 "%88, %89, p, 1, 1, 0, %91;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0), PRS_REGISTERS_32(d, 32), PRS_REGISTERS_8(d, 64), PRS_REGISTERS_8(d, 72),
                   PRS_REGISTERS_8(d, 80)
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_B));
}

/* The same for few columns: decoding has few tokens. */
template <int TRANS_B> PRS_DEVICE void wgmma_m64n32k16_bf16(float (&d)[16], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
                 "%11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, %19;\n}"
                 : PRS_REGISTERS_8(d, 0), PRS_REGISTERS_8(d, 8)
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_B));
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n16k16_bf16(float (&d)[8], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "%8, %9, p, 1, 1, 0, %11;\n}"
                 : PRS_REGISTERS_8(d, 0)
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_B));
}

template <int TRANS_B> PRS_DEVICE void wgmma_m64n8k16_bf16(float (&d)[4], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, %7;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_B));
}

/* In both operands K is outermost: A is M-major, B is N-major. */
PRS_DEVICE void wgmma_m64n64k16_bf16_outer(float (&d)[32], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PRS_NAMES_32 "}, "
                 "%32, %33, p, 1, 1, 1, 1;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

/* A[64 x 16] in registers, as mma fragments: rows lane / 4 and + 8 (a1, a3), columns 2 * (lane % 4) and + 8 (a2, a3).
 * They must not change until the product has been waited for. */
template <int TRANS_B>
PRS_DEVICE void wgmma_m64n64k16_bf16_registers(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PRS_NAMES_32 "}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(TRANS_B));
}

template <int TRANS_B>
PRS_DEVICE void wgmma_m64n96k16_bf16_registers(float (&d)[48], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %53, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" PRS_NAMES_32
                 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
                 "{%48, %49, %50, %51}, %52, p, 1, 1, %54;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0), PRS_REGISTERS_8(d, 32), PRS_REGISTERS_8(d, 40)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(TRANS_B));
}

template <int TRANS_B>
PRS_DEVICE void wgmma_m64n256k16_bf16_registers(float (&d)[128], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %133, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" PRS_NAMES_128 "}, "
                 "{%128, %129, %130, %131}, %132, p, 1, 1, %134;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0), PRS_REGISTERS_32(d, 32), PRS_REGISTERS_32(d, 64), PRS_REGISTERS_32(d, 96)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(TRANS_B));
}

template <int TRANS_B>
PRS_DEVICE void wgmma_m64n128k16_bf16_registers(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b, uint32_t add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PRS_NAMES_64 "}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n"
                 "}"
                 : PRS_REGISTERS_32(d, 0), PRS_REGISTERS_32(d, 32)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(TRANS_B));
}

#endif
