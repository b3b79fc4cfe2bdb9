/* SPDX-License-Identifier: Apache-2.0 */
/* The fused GEMM kernels as C++: test/hopper/include comes first on the include path. */
#include "fused/kernels.cu"
