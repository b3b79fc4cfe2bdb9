/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of names in NCCL's syntax: "^" in front excludes, "=" compares exactly (else by prefix), items are
 * name[:port[:rail[:plane]]] separated by commas. Used for NCCL_IB_HCA and NCCL_SOCKET_IFNAME. */
#ifndef TRANSPORT_HCA_FILTER_H
#define TRANSPORT_HCA_FILTER_H

#include <stdbool.h>

enum { HCA_FILTER_ITEMS = 64 };

struct prs_hca_item {
    char name[64];
    int port;  /* -1: any */
    int rail;  /* -1: unknown */
    int plane; /* -1: unknown */
};

struct prs_hca_filter {
    bool exclude;
    bool exact;
    int count;
    struct prs_hca_item item[HCA_FILTER_ITEMS];
};

/* variable is only for the text. NULL or "" matches everything. Return 0 or -EINVAL. */
int prs_hca_filter_parse(const char *variable, const char *text, struct prs_hca_filter *out);

/* The item that name and port hit, else -1; an empty list hits nothing. */
int prs_hca_filter_find(const struct prs_hca_filter *filter, const char *name, int port);

/* Is it to be used? An empty list admits everything. */
bool prs_hca_filter_admits(const struct prs_hca_filter *filter, const char *name, int port);

#endif
