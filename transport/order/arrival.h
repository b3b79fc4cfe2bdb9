/* SPDX-License-Identifier: Apache-2.0 */
/* The receiving half of ordering: assembles whole notifications from parts and runs. Pure. */
#ifndef TRANSPORT_ARRIVAL_H
#define TRANSPORT_ARRIVAL_H

#include "transport/order/wire.h"

/* Notifications of which some parts have arrived, by id. */
struct prs_arrivals {
    uint8_t wanted[PRS_NOTIFY_IDS]; /* parts; 0: none has arrived yet */
    uint8_t missing[PRS_NOTIFY_IDS];
    uint64_t bytes[PRS_NOTIFY_IDS];
};

/* `count` ids from first_id on (modulo PRS_NOTIFY_IDS) are whole; each has `bytes` bytes. */
struct prs_notice {
    uint32_t first_id;
    uint32_t count;
    uint64_t bytes;
};

/* Handle one arrival. Return 1 (*out is filled), 0 (parts are missing) or -EPROTO (parts contradict each other). */
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
