/* SPDX-License-Identifier: Apache-2.0 */
/* Linked into every program and library of a build that measures coverage (tools/dev/coverage): each has counters of
 * its own, and tells the preloaded library about them. It does not use dlsym(), because some tests replace that. */
void __gcov_dump(void);
__attribute__((weak)) void coverage_counters(void (*dump)(void)); /* coverage_exit.c */

static __attribute__((constructor)) void counters_tell(void)
{
    if (coverage_counters)
        coverage_counters(__gcov_dump);
}
