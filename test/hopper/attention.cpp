/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/attention.cu"
