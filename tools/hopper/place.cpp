/* SPDX-License-Identifier: Apache-2.0 */
/* Removes the order that one line of a kernel makes, to see whether the checker of memory order notices. */
#include "tools/hopper/place.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "tools/hopper/scheduler.h"

namespace hopper
{

static struct place_effect next;

/* Reads a variable of the environment that names places. */
static const char *asked(const char *name)
{
    const char *value = getenv(name);
    return value && value[0] != 0 ? value : NULL;
}

/* Appends a place to the file when it is first reached. Tests run in processes of their own, so the file is appended
 * to. */
static void list(const char *to, const std::string &place, const char *instruction)
{
    static std::set<std::string> &known = *new std::set<std::string>();
    if (!known.insert(place).second)
        return;
    FILE *f = fopen(to, "a");
    if (!f)
        return;
    fprintf(f, "%s %s\n", place.c_str(), instruction);
    fclose(f);
}

void place_is(const char *file, int line, const char *instruction)
{
    static const char *const without = asked("HOPPER_WITHOUT"), *const places = asked("HOPPER_PLACES");
    if ((!without && !places) || !scheduler_is_here())
        return;
    const char *name = file;
    for (const char *slash = file, *last = file; (slash = strchr(slash, '/')); last = ++slash)
        name = last; /* the folder and the file */
    std::string place = std::string(name) + ":" + std::to_string(line);
    if (places)
        list(places, place, instruction);
    if (!without || strncmp(without, place.c_str(), place.size()) != 0)
        return;
    if (without[place.size()] == 0)
        next.removed = true;
    else if (strcmp(without + place.size(), "=gpu") == 0)
        next.widest = SCOPE_GPU;
    else if (strcmp(without + place.size(), "=cta") == 0)
        next.widest = SCOPE_CTA;
}

struct place_effect place_taken(void)
{
    struct place_effect e = next;
    if (!scheduler_is_here())
        return {};
    next = {};
    return e;
}

} // namespace hopper
