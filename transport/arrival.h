/* SPDX-License-Identifier: Apache-2.0 */
/* The receiving half of ordering: parts and runs come in, whole notifications go out. Pure. */
#ifndef TRANSPORT_ARRIVAL_H
#define TRANSPORT_ARRIVAL_H

#include "transport/wire.h"

/* Parts of messages that are not whole yet, by id. */
struct prs_arrivals {
    uint8_t wanted[PRS_NOTIFY_IDS]; /* parts; 0: nothing has come yet */
    uint8_t missing[PRS_NOTIFY_IDS];
    uint64_t bytes[PRS_NOTIFY_IDS];
};

/* Ids first, first+1 ... (modulo PRS_NOTIFY_IDS) are whole, each with that many bytes. */
struct prs_notice {
    uint32_t first_id;
    uint32_t count;
    uint64_t bytes;
};

/* One arrival. Return 1 (*out is filled), 0 (parts are missing) or -EPROTO (parts contradict each other). */
static inline int prs_arrivals_add(struct prs_arrivals *arrivals, const struct prs_imm *imm, uint32_t bytes,
                                   struct prs_notice *out)
{
    uint32_t id = imm->id;

    if (imm->parts == 1) {
        if (arrivals->wanted[id])
            return -EPROTO;
        *out = (struct prs_notice){(id - imm->run + 1u) % PRS_NOTIFY_IDS, imm->run, bytes};
        return 1;
    }
    if (!arrivals->wanted[id]) {
        arrivals->wanted[id] = imm->parts;
        arrivals->missing[id] = imm->parts;
        arrivals->bytes[id] = 0;
    } else if (arrivals->wanted[id] != imm->parts) {
        return -EPROTO;
    }
    arrivals->bytes[id] += bytes;
    if (--arrivals->missing[id])
        return 0;
    arrivals->wanted[id] = 0;
    *out = (struct prs_notice){id, 1, arrivals->bytes[id]};
    return 1;
}

#endif
