/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/report.h"

#include <stdio.h>
#include <string.h>

#include "tools/common/json.h"

const char *const policy_names[POLICIES] = {"in_order", "nic_fence", "counted", "drain"};

static bool is_broken(const struct attempt *attempt)
{
    return attempt->outcome.late + attempt->outcome.wrong > 0;
}

static bool ran(const struct attempt *attempt)
{
    return attempt->tried && !attempt->text[0];
}

static bool held(const struct attempt *attempt)
{
    return ran(attempt) && !is_broken(attempt);
}

/* The NIC that adds is the receiver's, under every policy. */
static bool breaks_its_claim(const struct pair_report *pair)
{
    return pair->there.atomic_scope == PRS_ATOMIC_CPU && is_broken(&pair->beside);
}

/* counted and drain assume nothing of the network, so they must hold everywhere. */
static bool is_promised(const struct pair_report *pair, int index)
{
    return pair->policy[index].is_chosen || (!pair->is_of_all && (index == COUNTED || index == DRAIN));
}

static bool pair_is_good(const struct pair_report *pair)
{
    bool good = !pair->text[0] && ran(&pair->latency) && ran(&pair->bandwidth) && ran(&pair->empty) &&
                !pair->empty.outcome.wrong && !breaks_its_claim(pair);

    if (pair->queues > 1)
        good &= held(&pair->shared);

    for (int p = 0; p < POLICIES; p++)
        if (is_promised(pair, p))
            good &= held(&pair->policy[p].set) && held(&pair->policy[p].add);
    return good;
}

bool report_is_good(const struct report *report)
{
    bool good = report->pairs > 0 && (!report->all.is_of_all || pair_is_good(&report->all));

    for (uint32_t i = 0; i < report->pairs; i++)
        good &= pair_is_good(&report->pair[i]) && (!report->loaded[i].queues || pair_is_good(&report->loaded[i]));
    return good;
}

/* A fence that waits for all earlier requests adds a round trip to each pair; one that waits for reads and atomics adds
 * nothing to writes. */
static const char *fence_waits_for(const struct pair_report *pair)
{
    const struct attempt *without = &pair->policy[IN_ORDER].set, *with = &pair->policy[NIC_FENCE].set;
    double round_trip = 2 * pair->latency.outcome.value, added = with->outcome.value - without->outcome.value;

    if (!ran(without) || !ran(with) || !ran(&pair->latency))
        return "not tried";
    if (round_trip < without->outcome.value)
        return "not measurable: a round trip is shorter than a pair takes anyway";
    return added < 0.3 * round_trip   ? "reads and atomics"
           : added > 0.7 * round_trip ? "all earlier requests"
                                      : "unclear";
}

/* ---- text ---- */

static void text_of(const char *claim, const struct attempt *attempt, uint32_t count)
{
    printf("    %-52s ", claim);
    if (!attempt->tried)
        printf("not tried\n");
    else if (attempt->text[0])
        printf("not tried: %s\n", attempt->text);
    else if (is_broken(attempt))
        printf("BROKEN: %llu of %u late, %llu wrong\n", (unsigned long long)attempt->outcome.late, count,
               (unsigned long long)attempt->outcome.wrong);
    else
        printf("held %u times\n", count);
}

/* ---- what NICs claim of their atomics ---- */

/* From the wire: any number. */
static const char *name_of_scope(uint32_t scope)
{
    static const char *const names[] = {"unknown", "none", "nic", "cpu"};

    return names[scope < sizeof(names) / sizeof(names[0]) ? scope : 0];
}

static const char *text_of_scope(uint32_t scope)
{
    return scope == PRS_ATOMIC_NONE  ? "none"
           : scope == PRS_ATOMIC_NIC ? "among the NIC's own requests (HCA)"
           : scope == PRS_ATOMIC_CPU ? "also with the CPU (GLOB)"
                                     : "it does not say";
}

static void text_of_shared(const struct attempt *attempt, uint32_t count)
{
    printf("    %-52s ", "adds of all queues to one word:");
    if (!ran(attempt))
        printf("not tried%s%s\n", attempt->tried ? ": " : "", attempt->text);
    else if (is_broken(attempt))
        printf("BROKEN, LOST: %llu of %u\n", (unsigned long long)attempt->outcome.wrong, count);
    else
        printf("none of %u was lost\n", count);
}

/* Where no more is claimed nothing fails, but a program must know it. */
static void text_of_beside(const struct pair_report *pair)
{
    const struct attempt *attempt = &pair->beside;
    uint32_t scope = pair->there.atomic_scope;

    printf("    %-52s ", "adds of the NIC and of the CPU to one word:");
    if (!ran(attempt))
        printf("not tried%s%s\n", attempt->tried ? ": " : "", attempt->text);
    else if (is_broken(attempt))
        printf("%s: %llu; only one of both may add to a word%s\n", breaks_its_claim(pair) ? "BROKEN, LOST" : "LOST",
               (unsigned long long)attempt->outcome.wrong,
               breaks_its_claim(pair) ? ", whatever the NIC there claims (GLOB)" : "");
    else
        printf("none was lost%s\n", scope == PRS_ATOMIC_CPU    ? ", as the NIC there claims (GLOB)"
                                    : scope == PRS_ATOMIC_NONE ? "; the NIC there has no atomics, so the CPU adds"
                                    : scope == PRS_ATOMIC_NIC  ? "; not promised: the NIC there claims no more than HCA"
                                                               : "; not promised: the NIC there claims nothing");
}

static const char *mtu_text(uint32_t mtu, char text[16])
{
    snprintf(text, 16, "%u", mtu);
    return mtu ? text : "unknown";
}

static void text_of_class(const struct side *side)
{
    printf("%u", side->traffic_class);
    if (side->traffic_class)
        printf(" (DSCP %u)", side->traffic_class >> 2);
    if (side->settings[0])
        printf(" (%s)", side->settings);
}

static void text_of_growth(const char *where, const struct side *side)
{
    if (!side->counters)
        printf("  counters of loss and congestion %s: none can be read\n", where);
    else if (!side->grown[0])
        printf("  counters of loss and congestion %s: none of %u has grown\n", where, side->counters);
    else
        printf("  counters %s that have grown: %s\n", where, side->grown);
}

/* Print the packets' class, and what the network did to them. */
static void text_of_network(const struct side *here, const struct side *there)
{
    uint32_t smaller = here->path_mtu < there->path_mtu ? here->path_mtu : there->path_mtu;
    char a[16], b[16];

    printf("  path MTU %s", mtu_text(smaller, a));
    if (here->path_mtu != there->path_mtu)
        printf(" (%s here, %s there: unlike MTUs waste the larger one)", mtu_text(here->path_mtu, a),
               mtu_text(there->path_mtu, b));
    printf("; MTU of the interface %s, there %s\n", mtu_text(here->network_mtu, a), mtu_text(there->network_mtu, b));
    printf("  traffic class ");
    text_of_class(here);
    printf("; there ");
    text_of_class(there);
    printf("%s\n", here->traffic_class == there->traffic_class ? "" : ": NCCL_IB_TC must be the same on all hosts");
    printf("  atomics claimed: %s; there: %s\n", text_of_scope(here->atomic_scope), text_of_scope(there->atomic_scope));
    text_of_growth("here", here);
    text_of_growth("there", there);
}

static void text_of_policy(const struct report *report, const struct pair_report *pair, int index)
{
    const struct policy_report *policy = &pair->policy[index];

    if (!policy->set.tried)
        return;
    if (policy->set.text[0] && !strcmp(policy->set.text, policy->add.text)) {
        printf("  %s%s: not tried: %s\n", policy_names[index], policy->is_chosen ? " (chosen)" : "", policy->set.text);
        return;
    }
    printf("  %s%s: %.2f us a pair\n", policy_names[index], policy->is_chosen ? " (chosen)" : "",
           policy->set.outcome.value);
    text_of("a signal (write) comes after its data:", &policy->set, report->count);
    text_of("a signal (atomic) comes after its data:", &policy->add, report->count);
}

static void text_of_pair(const struct report *report, const struct pair_report *pair)
{
    const struct side *here = &pair->here, *there = &pair->there;
    bool is_of_rail = !pair->is_of_all && pair->queues == 1;

    if (pair->is_of_all)
        printf("all rails together: %s\n", pair->path);
    else if (pair->queues > 1)
        printf("rail %u <-> rail %u, %u queues at once:\n", pair->rail_here, pair->rail_there, pair->queues);
    else
        printf("rail %u: %s %s %s  <->  rail %u: %s %s %s\n", pair->rail_here, here->device, here->link, here->gid,
               pair->rail_there, there->device, there->link, there->gid);
    if (pair->text[0])
        printf("  not reachable: %s\n", pair->text);
    if (is_of_rail)
        text_of_network(here, there);
    if (pair->text[0])
        return;
    printf("  latency %.2f us one way%s%s, bandwidth %.2f GB/s%s%s\n", pair->latency.outcome.value,
           pair->latency.text[0] ? ": " : "", pair->latency.text, pair->bandwidth.outcome.value,
           pair->bandwidth.text[0] ? ": " : "", pair->bandwidth.text);
    printf("  chosen policy: %s%s\n", pair->chosen, pair->adaptive_routing ? "; adaptive routing is assumed" : "");
    for (int p = 0; p < POLICIES; p++)
        text_of_policy(report, pair, p);
    text_of("an immediate comes after an earlier write:", &pair->notify, report->count);
    text_of("that of an empty write too, and it has no bytes:", &pair->empty, report->count);
    if (pair->queues > 1)
        text_of_shared(&pair->shared, report->count);
    text_of_beside(pair);
    if (is_of_rail)
        printf("    the fence flag waits for: %s\n", fence_waits_for(pair));
}

static void text_of_reaches(const struct report *report)
{
    if (report->reaches)
        printf("other pairs of rails, here and there:\n");
    for (uint32_t i = 0; i < report->reaches; i++) {
        const struct reach *reach = &report->reach[i];

        if (ran(&reach->latency))
            printf("  %u and %u: %.2f us one way\n", reach->rail_here, reach->rail_there, reach->latency.outcome.value);
        else
            printf("  %u and %u: not reachable: %s\n", reach->rail_here, reach->rail_there, reach->latency.text);
    }
}

void report_text(const struct report *report)
{
    printf("Perseus %s, and %s at %s\n", prs_version(), report->other_version, report->host);
    if (report->rails_here != report->rails_there)
        printf("rails: %u here, %u there\n", report->rails_here, report->rails_there);
    if (report->pairs)
        printf("interface of handshakes: %s; there: %s\n", report->pair[0].here.interface,
               report->pair[0].there.interface);
    for (uint32_t i = 0; i < report->pairs; i++)
        text_of_pair(report, &report->pair[i]);
    for (uint32_t i = 0; i < report->pairs; i++)
        if (report->loaded[i].queues)
            text_of_pair(report, &report->loaded[i]);
    if (report->all.is_of_all)
        text_of_pair(report, &report->all);
    text_of_reaches(report);
    printf("%s\n", report_is_good(report) ? "all that Perseus relies on held"
                                          : "NOT all that Perseus relies on held, or could be tried");
}

/* ---- JSON ---- */

static void json_side(const char *name, uint32_t rail, const struct side *side)
{
    json_print(stdout,
               "%s:{host:%s,rail:%u,device:%s,link:%s,gid:%s,interface:%s,speed_mbps:%u,path_mtu:%u,network_mtu:%u,"
               "traffic_class:%u,atomics:%s,settings:%s,counters:%u,counters_grown:%s},",
               name, side->host, rail, side->device, side->link, side->gid, side->interface, side->speed_mbps,
               side->path_mtu, side->network_mtu, side->traffic_class, name_of_scope(side->atomic_scope),
               side->settings, side->counters, side->grown);
}

static void json_attempt(const char *name, const struct attempt *attempt, const char *end)
{
    json_print(stdout, "%s:{ran:%hhd,error:%s,usec:%.3f,late:%llu,wrong:%llu}", name, ran(attempt), attempt->text,
               attempt->outcome.value, (unsigned long long)attempt->outcome.late,
               (unsigned long long)attempt->outcome.wrong);
    fputs(end, stdout);
}

static void json_pair(const struct pair_report *pair)
{
    json_print(stdout, "{queues:%u,error:%s,chosen:%s,path:%s,adaptive_routing:%hhd,", pair->queues, pair->text,
               pair->chosen, pair->path, pair->adaptive_routing);
    json_side("here", pair->rail_here, &pair->here);
    json_side("there", pair->rail_there, &pair->there);
    json_print(stdout, "latency_us:%.3f,latency_error:%s,bandwidth_GBps:%.4f,bandwidth_error:%s,fence_waits_for:%s,",
               pair->latency.outcome.value, pair->latency.text, pair->bandwidth.outcome.value, pair->bandwidth.text,
               fence_waits_for(pair));
    json_attempt("immediate_after_write", &pair->notify, ",");
    json_attempt("empty_write", &pair->empty, ",");
    json_attempt("adds_of_all_queues", &pair->shared, ",");
    json_attempt("adds_beside_cpu", &pair->beside, ",");
    json_print(stdout, "policies:[");
    for (int p = 0; p < POLICIES; p++) {
        json_print(stdout, p ? ",{policy:%s,chosen:%hhd," : "{policy:%s,chosen:%hhd,", policy_names[p],
                   pair->policy[p].is_chosen);
        json_attempt("write", &pair->policy[p].set, ",");
        json_attempt("atomic", &pair->policy[p].add, "}");
    }
    json_print(stdout, "]}");
}

void report_json(const struct report *report)
{
    json_print(stdout, "{version:%s,other_version:%s,host:%s,pairs:%u,rails_here:%u,rails_there:%u,good:%hhd,rails:[",
               prs_version(), report->other_version, report->host, report->count, report->rails_here,
               report->rails_there, report_is_good(report));
    for (uint32_t i = 0; i < report->pairs; i++) {
        json_print(stdout, i ? "," : "");
        json_pair(&report->pair[i]);
    }
    json_print(stdout, "],several_queues:[");
    for (uint32_t i = 0, shown = 0; i < report->pairs; i++) {
        if (!report->loaded[i].queues)
            continue;
        json_print(stdout, shown++ ? "," : "");
        json_pair(&report->loaded[i]);
    }
    json_print(stdout, "],all_rails:");
    if (report->all.is_of_all)
        json_pair(&report->all);
    else
        json_print(stdout, "null");
    json_print(stdout, ",other_pairs:[");
    for (uint32_t i = 0; i < report->reaches; i++) {
        json_print(stdout, i ? ",{here:%u,there:%u," : "{here:%u,there:%u,", report->reach[i].rail_here,
                   report->reach[i].rail_there);
        json_attempt("latency", &report->reach[i].latency, "}");
    }
    json_print(stdout, "]}\n");
}
