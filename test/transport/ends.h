/* SPDX-License-Identifier: Apache-2.0 */
/* Both ends of a connection in one process and thread, on the first rail. */
#ifndef TEST_TRANSPORT_ENDS_H
#define TEST_TRANSPORT_ENDS_H

#include <stdbool.h>
#include <stdint.h>

#include <perseus/perseus.h>

enum { HEALTHY_MS = 60000 }; /* long, for busy machines */

extern struct prs_fabric *fabric;
extern const struct prs_rail_set one_rail;

void open_with(uint32_t timeout_ms);
/* For .init and .fini. The time limit is HEALTHY_MS. */
void open_default(void);
void close_default(void);

/* Listen on the first rail; connect to it. An error fails the test. */
struct prs_listener *open_listener(struct prs_handle *handle);
struct prs_connector *open_connector(const struct prs_handle *handle);

/* Drive both ends until both are peers or one has failed. Return 0 or the error. */
int meet(struct prs_listener *listener, struct prs_connector *connector, struct prs_peer **a, struct prs_peer **b);
/* Does this host have the address ::1? */
bool ends_have_ipv6(void);
/* Connect and close once, to show that the listener still works. */
void connect_once(struct prs_listener *listener, const struct prs_handle *handle);

#endif
