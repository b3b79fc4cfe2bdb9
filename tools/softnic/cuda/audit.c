/* SPDX-License-Identifier: Apache-2.0 */
/* The library that softnic-run names in LD_AUDIT: where the program looks up a function of the CUDA driver, it gives it
 * the one of driver_calls.c instead. This library lives in a namespace of its own, so it only decides, and loads
 * driver_calls.c into the program's namespace when the first such function is asked for. A program without CUDA never
 * gets that far. Preloading would need a dlsym() of ours, which breaks RTLD_NEXT, and AddressSanitizer refuses
 * libraries before its own. */
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "tools/softnic/cuda/driver_calls.h"

typedef __typeof__(&softnic_driver_call) replace_fn;

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

unsigned la_version(unsigned version)
{
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

/* NCCL asks for libibverbs.so first, without a number. A wheel of the software NIC cannot have such a link, and the
 * loader would find the system's library in addition to ours. */
char *la_objsearch(const char *name, uintptr_t *cookie, unsigned flag)
{
    static const char *const ours[][2] = {{"libibverbs.so", "libibverbs.so.1"},
                                          {"librdmacm.so", "librdmacm.so.1"},
                                          {"libefa.so", "libefa.so.1"},
                                          {"libmlx5.so", "libmlx5.so.1"}};

    (void)cookie;
    for (size_t i = 0; flag == LA_SER_ORIG && i < sizeof(ours) / sizeof(ours[0]); i++)
        if (!strcmp(name, ours[i][0]))
            name = ours[i][1];
    return (char *)(uintptr_t)name;
}

/* Has the loader report the look-ups of driver functions by any library except the software NIC itself, which must
 * never wait. */
unsigned la_objopen(struct link_map *map, Lmid_t namespace, uintptr_t *cookie)
{
    const char *name = base_name(map->l_name);

    bool driver = !strncmp(name, "libcuda.so", 10);

    *cookie =
        driver || namespace != LM_ID_BASE || !strcmp(name, SN_DRIVER_CALLS_LIBRARY) || !strcmp(name, "libibverbs.so.1");
    if (driver && namespace == LM_ID_BASE)
        return LA_FLG_BINDTO;
    return *cookie ? 0 : LA_FLG_BINDFROM;
}

static replace_fn replace;

/* Loads driver_calls.c's library, which is in this library's folder. */
static replace_fn load(void)
{
    static int loading; /* under the lock of dlsym() */
    char path[PATH_MAX];
    Dl_info info;
    void *library = NULL, *symbol;

    if (replace || loading)
        return replace;
    loading = 1;
    if (dladdr((void *)(uintptr_t)&la_version, &info)) {
        snprintf(path, sizeof(path), "%.*s%s", (int)(base_name(info.dli_fname) - info.dli_fname), info.dli_fname,
                 SN_DRIVER_CALLS_LIBRARY);
        library = dlmopen(LM_ID_BASE, path, RTLD_NOW);
    }
    symbol = library ? dlsym(library, "softnic_driver_call") : NULL;
    if (!symbol)
        fprintf(stderr, "softnic: CUDA's copies may stop this program, since its driver calls are not watched: %s\n",
                dlerror());
    memcpy(&replace, &symbol, sizeof(replace));
    return replace;
}

uintptr_t la_symbind64(Elf64_Sym *symbol, unsigned index, uintptr_t *from, uintptr_t *to, unsigned *flags,
                       const char *name)
{
    void *found;

    (void)index, (void)to;
    if (*from || strncmp(name, "cu", 2))
        return symbol->st_value;
    /* Only look-ups by dlsym() are replaced, because other bindings may be made while libraries cannot be loaded. The
     * runtime library, NCCL and PyTorch use dlsym(). */
    if (*flags & LA_SYMB_DLSYM)
        load();
    found = replace ? replace(name) : NULL;
    return found ? (uintptr_t)found : symbol->st_value;
}
