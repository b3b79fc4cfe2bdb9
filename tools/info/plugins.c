/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL takes a net plugin by its file name from the folders of the dynamic linker, so one of another product may come
 * first. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/info/machine.h"

static int is_net_plugin(const struct dirent *entry)
{
    const char *name = entry->d_name, *end = strstr(name, ".so");

    /* libnccl-net.so and libnccl-net-NAME.so; names that end in a version are found through a link. */
    return !strncmp(name, "libnccl-net", 11) && (name[11] == '.' || name[11] == '-') && end && !end[3];
}

/* A copy of the plugin under another name still has its soname. */
static bool has_soname_of_perseus(const char *path)
{
    static const char soname[] = "libnccl-net-perseus.so";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    bool found = false;
    void *bytes;

    if (fd < 0)
        return false;
    if (fstat(fd, &st) == 0 && st.st_size > 0 &&
        (bytes = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)) != MAP_FAILED) {
        found = memmem(bytes, (size_t)st.st_size, soname, sizeof(soname)) != NULL;
        munmap(bytes, (size_t)st.st_size);
    }
    close(fd);
    return found;
}

static void look_in(struct machine *machine, const char *folder)
{
    struct dirent **entries;
    int count = scandir(folder, &entries, is_net_plugin, alphasort);

    for (int i = 0; i < count; i++) {
        char path[512], *real;
        bool is_known = false;

        snprintf(path, sizeof(path), "%s/%s", folder, entries[i]->d_name);
        real = realpath(path, NULL);
        for (int k = 0; k < machine->plugin_count; k++)
            is_known |= !strcmp(machine->plugin[k].path, path);
        if (real && !is_known && machine->plugin_count < INFO_PLUGINS) {
            struct plugin_file *plugin = &machine->plugin[machine->plugin_count++];

            snprintf(plugin->path, sizeof(plugin->path), "%s", path);
            plugin->is_perseus = strstr(real, "libnccl-net-perseus") || has_soname_of_perseus(real);
        }
        free(real);
        free(entries[i]);
    }
    if (count >= 0)
        free(entries);
}

void plugins_find(struct machine *machine)
{
    static const char *const folders[] = {
        "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/local/lib", "/lib64", "/usr/lib64", "/usr/lib"};
    const char *path = getenv("LD_LIBRARY_PATH");
    char *copy = strdup(path ? path : ""), *rest = copy, *folder;

    while (copy && (folder = strsep(&rest, ":")))
        if (*folder)
            look_in(machine, folder);
    free(copy);
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++)
        look_in(machine, folders[i]);
}
