/* SPDX-License-Identifier: Apache-2.0 */
/* Private data of the sender's connection request: where its clear-to-send ring is. From the wire: it may be
 * anything. */
#ifndef PERSEUS_PLUGIN_SENDER_INFO_H
#define PERSEUS_PLUGIN_SENDER_INFO_H

#include <errno.h>
#include <string.h>

#include "plugin/cts.h"
#include "transport/util/error.h"

enum {
    SENDER_INFO_MAGIC = 0x53524550, /* "PERS" */
    SENDER_INFO_VERSION = 2,        /* of struct sender_info and of struct cts_record */
};

struct sender_info {
    uint32_t magic;
    uint16_t version;
    uint16_t ring_records;
    uint64_t ring_addr;
    struct prs_keys ring_keys;
};
static_assert(sizeof(struct sender_info) == 80 && sizeof(struct sender_info) <= PRS_PRIVATE_DATA_BYTES,
              "goes over the wire");

/* Check what the sender told about itself, and copy it to *out. from: the sender, for the error's text. Return 0 or
 * -EPROTO, logged. */
static inline int sender_info_read(const void *private_data, uint32_t bytes, const char *from, struct sender_info *out)
{
    if (bytes != sizeof(*out))
        return prs_fail(-EPROTO,
                        "%s: sent %u bytes of private data instead of %zu: is it another version of the plugin?", from,
                        bytes, sizeof(*out));
    memcpy(out, private_data, sizeof(*out));
    if (out->magic != SENDER_INFO_MAGIC || out->version != SENDER_INFO_VERSION || out->ring_records != CTS_RING)
        return prs_fail(-EPROTO, "%s: plugin protocol %#x version %u with %u records, expected %#x version %u with %u",
                        from, out->magic, out->version, out->ring_records, SENDER_INFO_MAGIC, SENDER_INFO_VERSION,
                        CTS_RING);
    return 0;
}

#endif
