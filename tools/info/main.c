/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-info: what there is to use, what would be chosen and why, what is wrong and how to fix it. */
#include <stdio.h>
#include <string.h>

#include "tools/info/machine.h"

/* A prs_log_fn that keeps what the transport logs about each device. */
static void keep_line(void *user, enum prs_log_level level, const char *file, int line, const char *text)
{
    struct machine *machine = user;

    (void)file;
    (void)line;
    if (level <= PRS_LOG_INFO && machine->line_count < INFO_LINES)
        snprintf(machine->line[machine->line_count++], sizeof(machine->line[0]), "%s", text);
}

static void find_rails(struct machine *machine)
{
    struct prs_rail_set all = {.count = 0};
    struct prs_fabric *fabric = NULL;

    machine->open_error = prs_fabric_open(NULL, &fabric);
    if (machine->open_error) {
        snprintf(machine->open_text, sizeof(machine->open_text), "%s", prs_error_text());
        return;
    }
    for (int i = 0; i < prs_fabric_rails(fabric) && i < INFO_RAILS; i++) {
        if (prs_rail_query(fabric, i, &machine->rail[machine->rail_count]) == 0)
            machine->rail_count++;
        if (all.count < PRS_MAX_RAILS)
            all.rail[all.count++] = i;
    }
    if (all.count && prs_fabric_policy(fabric, &all, machine->policy, sizeof(machine->policy)) < 0)
        snprintf(machine->policy, sizeof(machine->policy), "none: %s", prs_error_text());
    prs_fabric_close(fabric);
}

int main(int argc, char **argv)
{
    static struct machine machine;
    bool is_json = argc == 2 && !strcmp(argv[1], "--json");

    if (argc == 3 && !strcmp(argv[1], "--job"))
        return job_print(argv[2]);
    if (argc > 1 && !is_json) {
        bool is_help = argc == 2 && !strcmp(argv[1], "--help");

        fprintf(is_help ? stdout : stderr,
                "usage: perseus-info [--json]\n"
                "       perseus-info --job PID    the counters of a process that runs with PERSEUS_METRICS=FOLDER\n"
                "Shows the rails that Perseus would use, GPUs and their distance to them, how memory would be "
                "registered, the\nordering policy and why, and what is wrong and how to fix it. Exit status 1: "
                "nothing to use.\n");
        return is_help ? 0 : 2;
    }
    prs_log_set(keep_line, &machine);
    find_rails(&machine);
    gpu_find(&machine);
    problems_find(&machine);
    if (is_json)
        print_json(&machine);
    else
        print_text(&machine);
    return machine.rail_count ? 0 : 1;
}
