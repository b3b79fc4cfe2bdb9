/* SPDX-License-Identifier: Apache-2.0 */
/* Makes Criterion's tests run under ThreadSanitizer; linked only into such builds. Criterion shares memory with the
 * process of each test at an address that it draws with rand_r(): 0x200000000000 + 16 MiB times a number of 22 bits.
 * ThreadSanitizer refuses a mapping outside the ranges it has a shadow for, and Criterion gives up ("Could not
 * initialize inheritable arena"). This rand_r() replaces libc's and draws from the range in which ThreadSanitizer
 * keeps position-independent programs. */
#include <stdlib.h>

enum { FIRST = 0x352000, SLOTS = 0x14000 }; /* 0x552000000000 to 0x566000000000 of 0x550000000000 to 0x568000000000 */

int rand_r(unsigned int *seed)
{
    *seed = *seed * 1103515245u + 12345u;
    return FIRST + (int)((*seed >> 8) % SLOTS);
}
