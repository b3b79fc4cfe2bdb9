/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of names in NCCL's syntax, for NCCL_IB_HCA and NCCL_SOCKET_IFNAME. A leading "^" excludes the items; "="
 * compares names exactly instead of by prefix. Items are name[:port[:rail[:plane]]], separated by commas. */
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

/* `variable` is used only in the error text. NULL or "" admits everything. Return 0 or -EINVAL. */
int prs_hca_filter_parse(const char *variable, const char *text, struct prs_hca_filter *out);

/* Index of the first item that matches name and port, else -1. An empty list matches nothing. */
int prs_hca_filter_find(const struct prs_hca_filter *filter, const char *name, int port);

/* May this device or interface be used? An empty list admits everything. */
bool prs_hca_filter_admits(const struct prs_hca_filter *filter, const char *name, int port);

#endif
