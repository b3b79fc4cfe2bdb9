/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/report.h"

#include <stdio.h>

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

/* counted and drain assume nothing of the network, so they must hold everywhere. */
static bool is_promised(const struct policy_report *policy, int index)
{
    return policy->is_chosen || index == COUNTED || index == DRAIN;
}

bool report_is_good(const struct report *report)
{
    bool good = report->rail_count > 0;

    for (uint32_t i = 0; i < report->rail_count; i++) {
        const struct rail_report *rail = &report->rail[i];

        good &= !rail->text[0] && ran(&rail->latency) && ran(&rail->bandwidth);
        for (int p = 0; p < POLICIES; p++)
            if (is_promised(&rail->policy[p], p))
                good &= ran(&rail->policy[p].set) && ran(&rail->policy[p].add) && !is_broken(&rail->policy[p].set) &&
                        !is_broken(&rail->policy[p].add);
    }
    return good;
}

/* A fence that waits for all earlier requests adds a round trip to each pair; one that waits for reads and atomics adds
 * nothing to writes. */
static const char *fence_waits_for(const struct rail_report *rail)
{
    const struct attempt *without = &rail->policy[IN_ORDER].set, *with = &rail->policy[NIC_FENCE].set;
    double round_trip = 2 * rail->latency.outcome.value, added = with->outcome.value - without->outcome.value;

    if (!ran(without) || !ran(with) || !ran(&rail->latency))
        return "not tried";
    if (round_trip < without->outcome.value)
        return "not measurable: a round trip is shorter than a pair takes anyway";
    return added < 0.3 * round_trip   ? "reads and atomics"
           : added > 0.7 * round_trip ? "all earlier requests"
                                      : "unclear";
}

/* ---- text ---- */

static void text_of(const char *claim, const struct attempt *attempt, uint32_t pairs)
{
    printf("    %-52s ", claim);
    if (!attempt->tried)
        printf("not tried\n");
    else if (attempt->text[0])
        printf("not tried: %s\n", attempt->text);
    else if (is_broken(attempt))
        printf("BROKEN: %llu of %u late, %llu wrong\n", (unsigned long long)attempt->outcome.late, pairs,
               (unsigned long long)attempt->outcome.wrong);
    else
        printf("held %u times\n", pairs);
}

static const char *mtu_text(uint32_t mtu, char text[16])
{
    snprintf(text, 16, "%u", mtu);
    return mtu ? text : "unknown";
}

static void text_of_rail(const struct report *report, const struct rail_report *rail, uint32_t index)
{
    char here[16], there[16];

    printf("rail %u: %s %s %s (MTU of the network %s)  <->  %s %s (%s)\n", index, rail->here.device, rail->here.link,
           rail->here.gid, mtu_text(rail->here.mtu, here), rail->there.device, rail->there.gid,
           mtu_text(rail->there.mtu, there));
    if (rail->text[0]) {
        printf("  not reachable: %s\n", rail->text);
        return;
    }
    printf("  latency %.2f us one way%s%s, bandwidth %.2f GB/s%s%s\n", rail->latency.outcome.value,
           rail->latency.text[0] ? ": " : "", rail->latency.text, rail->bandwidth.outcome.value,
           rail->bandwidth.text[0] ? ": " : "", rail->bandwidth.text);
    printf("  chosen policy: %s%s\n", rail->chosen, rail->adaptive_routing ? "; adaptive routing is assumed" : "");
    for (int p = 0; p < POLICIES; p++) {
        const struct policy_report *policy = &rail->policy[p];

        printf("  %s%s: %.2f us a pair\n", policy_names[p], policy->is_chosen ? " (chosen)" : "",
               policy->set.outcome.value);
        text_of("a signal (write) comes after its data:", &policy->set, report->pairs);
        text_of("a signal (atomic) comes after its data:", &policy->add, report->pairs);
    }
    text_of("an immediate comes after an earlier write:", &rail->notify, report->pairs);
    printf("    the fence flag waits for: %s\n", fence_waits_for(rail));
}

void report_text(const struct report *report)
{
    printf("Perseus %s, and %s at %s\n", prs_version(), report->other_version, report->host);
    if (report->rails_here != report->rails_there)
        printf("rails: %u here, %u there: those of equal number are paired\n", report->rails_here, report->rails_there);
    if (report->rail_count)
        printf("interface of handshakes: %s; there: %s\n", report->rail[0].here.interface,
               report->rail[0].there.interface);
    for (uint32_t i = 0; i < report->rail_count; i++)
        text_of_rail(report, &report->rail[i], i);
    printf("%s\n", report_is_good(report) ? "all that Perseus relies on held"
                                          : "NOT all that Perseus relies on held, or could be tried");
}

/* ---- JSON ---- */

static void json_side(const char *name, const struct message *side)
{
    json_print(stdout, "%s:{host:%s,device:%s,link:%s,gid:%s,interface:%s,speed_mbps:%u,network_mtu:%u},", name,
               side->host, side->device, side->link, side->gid, side->interface, side->speed_mbps, side->mtu);
}

static void json_attempt(const char *name, const struct attempt *attempt, const char *end)
{
    json_print(stdout, "%s:{ran:%hhd,error:%s,usec:%.3f,late:%llu,wrong:%llu}", name, ran(attempt), attempt->text,
               attempt->outcome.value, (unsigned long long)attempt->outcome.late,
               (unsigned long long)attempt->outcome.wrong);
    fputs(end, stdout);
}

static void json_rail(const struct rail_report *rail)
{
    json_print(stdout, "{error:%s,chosen:%s,adaptive_routing:%hhd,", rail->text, rail->chosen, rail->adaptive_routing);
    json_side("here", &rail->here);
    json_side("there", &rail->there);
    json_print(stdout, "latency_us:%.3f,latency_error:%s,bandwidth_GBps:%.4f,bandwidth_error:%s,fence_waits_for:%s,",
               rail->latency.outcome.value, rail->latency.text, rail->bandwidth.outcome.value, rail->bandwidth.text,
               fence_waits_for(rail));
    json_attempt("immediate_after_write", &rail->notify, ",");
    json_print(stdout, "policies:[");
    for (int p = 0; p < POLICIES; p++) {
        json_print(stdout, p ? ",{policy:%s,chosen:%hhd," : "{policy:%s,chosen:%hhd,", policy_names[p],
                   rail->policy[p].is_chosen);
        json_attempt("write", &rail->policy[p].set, ",");
        json_attempt("atomic", &rail->policy[p].add, "}");
    }
    json_print(stdout, "]}");
}

void report_json(const struct report *report)
{
    json_print(stdout, "{version:%s,other_version:%s,host:%s,pairs:%u,rails_here:%u,rails_there:%u,good:%hhd,rails:[",
               prs_version(), report->other_version, report->host, report->pairs, report->rails_here,
               report->rails_there, report_is_good(report));
    for (uint32_t i = 0; i < report->rail_count; i++) {
        json_print(stdout, i ? "," : "");
        json_rail(&report->rail[i]);
    }
    json_print(stdout, "]}\n");
}
