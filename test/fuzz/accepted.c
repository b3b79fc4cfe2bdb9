/* SPDX-License-Identifier: Apache-2.0 */
#include "test/fuzz/fuzz.h"

uint64_t fuzz_accepted;
