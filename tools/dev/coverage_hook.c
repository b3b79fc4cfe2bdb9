/* SPDX-License-Identifier: Apache-2.0 */
/* Linked into every program and library of a build that measures coverage (tools/dev/coverage): each has counters of
 * its own, which it tells the preloaded library of. */
#include <dlfcn.h>

void __gcov_dump(void);

static __attribute__((constructor)) void counters_tell(void)
{
    void (*told)(void (*dump)(void)) = (void (*)(void (*)(void)))dlsym(RTLD_DEFAULT, "coverage_counters");

    if (told)
        told(__gcov_dump);
}
