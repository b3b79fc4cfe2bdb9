/* SPDX-License-Identifier: Apache-2.0 */
/* What travels in the 32-bit immediate of a write: which notification it completes, or which group it counts for.
 *
 *   bits  0-9   id      of the last message of a run
 *   bits 10-14  run-1   consecutive ids of equal-sized, single-part messages posted in one chain on one queue share one
 *                       immediate: the earlier ones are plain writes in front of it
 *   bits 15-20  parts-1 of this message; every part carries the same immediate
 *   bits 21-30  tag     counted policy: the open interval of a signal group that this write counts for; 0: none
 *   bit  31     bare    no notification: the low 21 bits are an enum prs_wire_bare instead of id, run and parts
 *
 * The size is the sum of the byte counts that completions report over the parts; each message of a run has the byte
 * count of the last. Whatever comes from the wire goes through prs_imm_parse(). */
#ifndef TRANSPORT_WIRE_H
#define TRANSPORT_WIRE_H

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

#include <perseus/perseus.h>

enum {
    PRS_WIRE_VERSION = 2, /* of handles, handshakes and immediates together */
    PRS_IMM_MAX_RUN = 32,
    PRS_IMM_MAX_PARTS = 64,
    PRS_IMM_MAX_TAG = 1023,
};

enum prs_wire_bare {
    PRS_BARE_COUNT = 0,  /* a put of the group that tag names */
    PRS_BARE_RECORD = 1, /* a signal record was written to the slot that tag names */
};

static_assert(PRS_NOTIFY_IDS == 1024, "an id has ten bits on the wire");

struct prs_imm {
    uint16_t id;
    uint8_t run;   /* 1..32 */
    uint8_t parts; /* 1..64 */
    uint16_t tag;
    bool bare;
    uint8_t kind; /* enum prs_wire_bare; bare only */
};

static inline uint32_t prs_imm_make(uint32_t id, uint32_t run, uint32_t parts, uint32_t tag)
{
    return (id & 0x3ff) | (run - 1) << 10 | (parts - 1) << 15 | tag << 21;
}

static inline uint32_t prs_imm_make_bare(enum prs_wire_bare kind, uint32_t tag)
{
    return 1u << 31 | tag << 21 | (uint32_t)kind;
}

/* Whether this is a run of whole messages that no group counts: then id and run are all that it says. */
static inline bool prs_imm_is_run(uint32_t value)
{
    return value < 1u << 15;
}

/* Return 0 or -EPROTO (no sender of this version makes such a value). */
static inline int prs_imm_parse(uint32_t value, struct prs_imm *out)
{
    out->bare = value >> 31;
    out->tag = value >> 21 & 0x3ff;
    if (out->bare) {
        out->kind = value & 0x1fffff;
        return (value & 0x1fffff) > PRS_BARE_RECORD ? -EPROTO : 0;
    }
    out->id = value & 0x3ff;
    out->run = (uint8_t)((value >> 10 & 0x1f) + 1);
    out->parts = (uint8_t)((value >> 15 & 0x3f) + 1);
    return out->run > 1 && out->parts > 1 ? -EPROTO : 0;
}

#endif
