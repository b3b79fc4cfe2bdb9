/* SPDX-License-Identifier: Apache-2.0 */
/* The 32-bit immediate of a write: which notification the write completes, or for which group it counts.
 *
 *   bits  0-9   id      of the last message of a run
 *   bits 10-14  run-1   messages of equal size, one part and consecutive ids that are posted in one chain on one queue
 *                       share one immediate: that of the last, which the others precede as plain writes
 *   bits 15-20  parts-1 of this message; every part carries the same immediate. With run-1 = 31, which no message in
 *               parts has: the number of parts, each of which is a plain write that this write follows. The payload
 *               of this write is the size of the message, for the receiver's array of sizes
 *   bits 21-30  tag     policy counted: the open interval of the group for which this write counts; 0: none
 *   bit  31     bare    no notification: the low 21 bits are an enum prs_wire_bare instead of id, run and parts
 *
 * The size of a message is the sum of the byte counts that the completions of its parts report. All messages of a run
 * have the byte count of the last. Every immediate from the wire goes through prs_imm_parse(). */
#ifndef TRANSPORT_WIRE_H
#define TRANSPORT_WIRE_H

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

#include <perseus/perseus.h>

enum {
    PRS_WIRE_VERSION = 9, /* version of handles, handshakes and immediates together */
    PRS_IMM_MAX_RUN = 32,
    PRS_IMM_MAX_PARTS = 64,
    PRS_IMM_MAX_SIZED_PARTS = 63,
    PRS_IMM_MAX_TAG = 1023,
};

enum prs_wire_bare {
    PRS_BARE_COUNT = 0,  /* a put of the group to whose interval the tag belongs */
    PRS_BARE_RECORD = 1, /* a signal record was written to the slot that the tag numbers */
    PRS_BARE_NOTE = 2,   /* a note has been sent on the TCP stream (failover.h) */
};

static_assert(PRS_NOTIFY_IDS == 1024, "an id has ten bits on the wire");

struct prs_imm {
    uint16_t id;
    uint8_t run;   /* 1..32 */
    uint8_t parts; /* 1..64 */
    uint16_t tag;
    bool bare;
    bool sized;   /* the size is in the array of sizes */
    uint8_t kind; /* enum prs_wire_bare; bare only */
};

static inline uint32_t prs_imm_make(uint32_t id, uint32_t run, uint32_t parts, uint32_t tag)
{
    return (id & 0x3ff) | (run - 1) << 10 | (parts - 1) << 15 | tag << 21;
}

static inline uint32_t prs_imm_make_sized(uint32_t id, uint32_t parts, uint32_t tag)
{
    return (id & 0x3ff) | (PRS_IMM_MAX_RUN - 1) << 10 | parts << 15 | tag << 21;
}

static inline uint32_t prs_imm_make_bare(enum prs_wire_bare kind, uint32_t tag)
{
    return 1u << 31 | tag << 21 | (uint32_t)kind;
}

/* Is this a run of whole messages that counts for no group? It then has only an id and a run. */
static inline bool prs_imm_is_run(uint32_t value)
{
    return value < 1u << 15;
}

/* Take an immediate apart. Return 0 or -EPROTO: no sender of this version makes such a value. */
static inline int prs_imm_parse(uint32_t value, struct prs_imm *out)
{
    *out = (struct prs_imm){.bare = value >> 31, .tag = value >> 21 & 0x3ff};
    if (out->bare) {
        out->kind = value & 0x1fffff;
        return (value & 0x1fffff) > PRS_BARE_NOTE ? -EPROTO : 0;
    }
    out->id = value & 0x3ff;
    out->run = (uint8_t)((value >> 10 & 0x1f) + 1);
    out->parts = (uint8_t)((value >> 15 & 0x3f) + 1);
    out->sized = out->run == PRS_IMM_MAX_RUN && out->parts > 1;
    if (out->sized) {
        out->run = 1;
        out->parts--;
    }
    return out->run > 1 && out->parts > 1 ? -EPROTO : 0;
}

#endif
