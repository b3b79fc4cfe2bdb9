/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-info: prints which devices exist, what would be chosen and why, what is wrong and how to fix it. */
#include <stdio.h>
#include <string.h>

#include "tools/common/option_table.h"
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
    if (all.count)
        machine->policy_error = prs_fabric_policy(fabric, &all, machine->policy, sizeof(machine->policy));
    if (machine->policy_error)
        snprintf(machine->policy, sizeof(machine->policy), "none: %s", prs_error_text());
    machine->interface_error = prs_fabric_interface(fabric, machine->interface, sizeof(machine->interface));
    if (machine->interface_error)
        snprintf(machine->interface, sizeof(machine->interface), "none: %s", prs_error_text());
    prs_fabric_close(fabric);
}

struct options {
    const char *job;
    bool json;
};

static const struct option_row rows[] = {
    {OPTION_SET, "json", NULL, "one JSON object, to attach to a report", OPTION_FIELD(struct options, json), 1},
    {OPTION_TEXT, "job", "PID", "the counters of a process that runs with PERSEUS_METRICS=FOLDER",
     OPTION_FIELD(struct options, job)},
};

static const struct option_table table = {
    "perseus-info",
    "usage: perseus-info [options]\n"
    "Shows the rails that Perseus would use, GPUs and their distance to them, how memory would be registered, the\n"
    "ordering policy and why, the interface of handshakes, other net plugins of NCCL, and what is wrong and how to\n"
    "fix it.\n",
    "Exit status 1: a job could not use RDMA here, since there is no rail, no interface, or not the policy asked for.\n"
    "Example, without a NIC:\n"
    "  softnic-run --nics 2 -- perseus-info --json\n",
    rows,
    sizeof(rows) / sizeof(rows[0]),
};

int main(int argc, char **argv)
{
    static struct machine machine;
    struct options options = {0};

    if (option_table_parse(&table, &options, argc, argv) < argc)
        option_table_refuse(&table, "'%s' is not an option", argv[argc - 1]);
    if (options.job)
        return job_print(options.job);
    prs_log_set(keep_line, &machine);
    find_rails(&machine);
    gpu_find(&machine);
    plugins_find(&machine);
    problems_find(&machine);
    if (options.json)
        print_json(&machine);
    else
        print_text(&machine);
    return machine.rail_count && !machine.policy_error && !machine.interface_error ? 0 : 1;
}
