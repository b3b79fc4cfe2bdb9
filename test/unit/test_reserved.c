/* SPDX-License-Identifier: Apache-2.0 */
/* A program that was written for a newer version and sets one of its fields is told so, in every call that takes a
 * structure of options; the last reserved word counts as the first does. */
#include <criterion/criterion.h>
#include <errno.h>
#include <perseus/heap.h>
#include <string.h>

#include "transport/nic/fabric.h"
#include "transport/connect/setup.h"
#include "transport/gpu/window.h"

enum { LAST = PRS_RESERVED_WORDS - 1 };

static void refused(int r, const char *name)
{
    cr_expect_eq(r, -EINVAL, "%s: %d", name, r);
    cr_expect_not_null(strstr(prs_error_text(), name), "%s is not named: %s", name, prs_error_text());
    cr_expect_not_null(strstr(prs_error_text(), "reserved[7] is 0x5"), "%s", prs_error_text());
}

Test(reserved, a_field_of_a_newer_version_is_refused_by_the_name_of_its_structure)
{
    static const struct prs_fabric fabric;
    struct prs_fabric_options options = {.reserved[LAST] = 5};
    struct prs_peer_options peer = {.reserved[LAST] = 5};
    struct prs_team_options team = {.reserved[LAST] = 5};
    struct prs_proxy_options proxy = {.reserved[LAST] = 5};
    struct prs_window_options window = {.reserved[LAST] = 5};
    struct prs_heap_options heap = {.reserved[LAST] = 5};
    struct prs_bootstrap bootstrap = {.world = 1};
    struct prs_windows windows = {0};
    struct prs_setup_options setup;
    struct prs_fabric *opened;
    struct prs_team *made_team;
    struct prs_proxy *made_proxy;
    struct prs_heap *made_heap;

    refused(prs_fabric_open(&options, &opened), "struct prs_fabric_options");
    refused(prs_setup_options(&fabric, &peer, &setup), "struct prs_peer_options");
    refused(prs_team_open(&team, &made_team), "struct prs_team_options");
    refused(prs_proxy_open(&proxy, &made_proxy), "struct prs_proxy_options");
    refused(prs_windows_add(&windows, &window), "struct prs_window_options");
    refused(prs_heap_open(&bootstrap, &heap, &made_heap), "struct prs_heap_options");
}
