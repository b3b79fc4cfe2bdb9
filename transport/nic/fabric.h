/* SPDX-License-Identifier: Apache-2.0 */
/* The usable rails of the process, and the settings that they were opened with. */
#ifndef TRANSPORT_FABRIC_H
#define TRANSPORT_FABRIC_H

#include "transport/order/policy.h"
#include "transport/nic/rail.h"

enum { PRS_FABRIC_RAILS = 64 }; /* bits of a mask of rails */

struct prs_fabric {
    struct prs_fabric *next; /* list of the process, under the list's lock */
    uint32_t refs;           /* likewise */
    pid_t owner;
    struct prs_config config;
    int device_count; /* devices that back ends have found, usable or not */
    int rail_count;
    struct prs_rail rail[PRS_FABRIC_RAILS];
};

struct prs_nic_ops;

/* Add the rails of all devices that these back ends find; NULL ends the list. Return 0, or the last back end's error if
 * none of them can look for devices. */
int prs_fabric_find_rails(struct prs_fabric *fabric, const struct prs_nic_ops *const *backends);

/* Give each rail its info.chip_port. */
void prs_fabric_number_ports(struct prs_fabric *fabric);

/* Check that the set names rails of this fabric, each once, all with one back end. Return 0 or -EINVAL; the text names
 * `caller`. */
int prs_fabric_check_set(const struct prs_fabric *fabric, const struct prs_rail_set *rails, const char *caller);

/* Add the standby rail of a set of one: the nearest rail of another NIC with the same abilities, if
 * PERSEUS_STANDBY_RAIL asks for one and a lost rail can be replaced under this policy. The same set and settings always
 * give the same rail. Return true if it was added, at the end of *out. */
bool prs_fabric_add_standby(const struct prs_fabric *fabric, const struct prs_rail_set *rails, enum prs_policy policy,
                            struct prs_rail_set *out);

/* Check one rail, as prs_fabric_check() checks all. A port is lost when it has been down for longer than
 * patience_ns. */
int prs_fabric_check_rail(const struct prs_fabric *fabric, int rail, uint64_t patience_ns);

#endif
