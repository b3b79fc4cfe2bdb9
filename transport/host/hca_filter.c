/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/host/hca_filter.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/util/error.h"

/* Parse ":number" at *text, if there is one, and advance. */
static int parse_number(const char **text, const char *end, int *out)
{
    char *stop;
    long number;

    if (*text == end)
        return 0;
    number = strtol(*text + 1, &stop, 10);
    if (**text != ':' || stop == *text + 1 || stop > end || number < 0 || number > 32767)
        return -EINVAL;
    *out = (int)number;
    *text = stop;
    return 0;
}

static int parse_item(const char *text, const char *end, struct prs_hca_item *item)
{
    size_t name_bytes = strcspn(text, ":,");

    *item = (struct prs_hca_item){.port = -1, .rail = -1, .plane = -1};
    if (name_bytes == 0 || name_bytes >= sizeof(item->name))
        return -EINVAL;
    memcpy(item->name, text, name_bytes);
    text += name_bytes;
    if (parse_number(&text, end, &item->port) || parse_number(&text, end, &item->rail) ||
        parse_number(&text, end, &item->plane) || text != end)
        return -EINVAL;
    return 0;
}

int prs_hca_filter_parse(const char *variable, const char *text, struct prs_hca_filter *out)
{
    const char *at = text ? text : "";

    *out = (struct prs_hca_filter){0};
    if (*at == '^') {
        out->exclude = true;
        at++;
    }
    if (*at == '=') {
        out->exact = true;
        at++;
    }
    while (*at) {
        const char *end = at + strcspn(at, ",");

        if (end == at) { /* NCCL tolerates empty items */
            at++;
            continue;
        }
        if (out->count == HCA_FILTER_ITEMS)
            return prs_fail(-EINVAL, "%s=%s: more than %d items", variable, text, HCA_FILTER_ITEMS);
        if (parse_item(at, end, &out->item[out->count]))
            return prs_fail(-EINVAL, "%s=%s: \"%.*s\" is not name[:port[:rail[:plane]]]", variable, text,
                            (int)(end - at), at);
        out->count++;
        at = *end ? end + 1 : end;
    }
    return 0;
}

int prs_hca_filter_find(const struct prs_hca_filter *filter, const char *name, int port)
{
    for (int i = 0; i < filter->count; i++) {
        const struct prs_hca_item *item = &filter->item[i];
        bool same = filter->exact ? !strcmp(item->name, name) : !strncmp(item->name, name, strlen(item->name));

        if (same && (item->port == -1 || port == -1 || item->port == port))
            return i;
    }
    return -1;
}

bool prs_hca_filter_admits(const struct prs_hca_filter *filter, const char *name, int port)
{
    if (filter->count == 0)
        return true;
    return (prs_hca_filter_find(filter, name, port) >= 0) != filter->exclude;
}
