/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The command ring: what the threads of a kernel write and a proxy thread of the CPU reads. Layout only; plain
 * integers, the same on both sides.
 *
 * A slot is four 8-byte words, each with the lap in bit 0: 1 on the first trip round the ring, 0 on the second, and so
 * on. A command is taken only when all four words carry the lap that is due, so it does not matter in which order, or
 * how far apart, the words arrive: a torn command is never taken. A put takes one slot (32 bytes); a put with its
 * signal takes two that were claimed together (64 bytes).
 *
 * Positions are 64 bit and never wrap. A producer claims positions by one atomic add, and may write them when
 * position < credit + slots. The proxy raises credit when it has copied a slot out, and done when everything below has
 * completed. */
#ifndef PERSEUS_RING_H
#define PERSEUS_RING_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include <perseus/sync.h>

#if defined(__cplusplus)
#    define PRS_STATIC_ASSERT static_assert
#else
#    define PRS_STATIC_ASSERT _Static_assert
#endif

struct prs_cmd {
    uint64_t word[4];
};
PRS_STATIC_ASSERT(sizeof(struct prs_cmd) == 32, "two slots fill a 64-byte line");

enum prs_cmd_op {
    PRS_CMD_PUT = 1,
    PRS_CMD_SIGNAL_SET = 2,
    PRS_CMD_SIGNAL_ADD = 3,
};

enum prs_cmd_flags {
    PRS_CMD_STRONG = 1, /* signal: behind every earlier command to that peer, not only those of its group */
};

/* Field limits. Offsets have 63 bits, lengths 47, so nothing that exists is out of reach. */
#define PRS_CMD_PEERS      (1u << 16)
#define PRS_CMD_WINDOWS    (1u << 12)
#define PRS_CMD_GROUPS     (1u << 16)
#define PRS_CMD_EPOCHS     (1u << 16)
#define PRS_CMD_MAX_BYTES  ((1ull << 47) - 1)
#define PRS_CMD_MAX_OFFSET ((1ull << 63) - 1)

/** A command, unpacked. */
struct prs_cmd_fields {
    uint64_t src_offset; /* put: within src_window here */
    uint64_t dst_offset; /* within dst_window at the peer */
    uint64_t bytes;      /* put: length; signal: value */
    uint32_t op;         /* enum prs_cmd_op */
    uint32_t flags;      /* enum prs_cmd_flags */
    uint32_t peer;       /* rank */
    uint32_t dst_window;
    uint32_t src_window; /* put only */
    uint32_t group;
    uint32_t epoch; /* of the ring: a kernel that holds a closed ring's description is found out by it */
    uint32_t pad;
};
PRS_STATIC_ASSERT(sizeof(struct prs_cmd_fields) == 56, "no hidden padding");

/** What a wait waited for, or what was misused. */
enum prs_wait_kind {
    PRS_WAIT_NONE = 0,
    PRS_WAIT_CREDIT = 1,  /* a free slot: the proxy is dead, stopped or slower than the time limit */
    PRS_WAIT_DONE = 2,    /* completion of a position */
    PRS_WAIT_SIGNAL = 3,  /* a signal word */
    PRS_WAIT_GROUP = 4,   /* the flush of a group's earlier round */
    PRS_WAIT_COMMAND = 5, /* nothing: the command itself was refused */
    PRS_WAIT_ARRIVAL = 6, /* nothing: an arrival at a group that expects none was refused */
};

enum prs_device_code {
    PRS_DEVICE_OK = 0,
    PRS_DEVICE_TIMEOUT = 1, /* a wait reached its limit */
    PRS_DEVICE_ABORTED = 2, /* the other side failed first or asked to stop; its text tells why */
    PRS_DEVICE_MISUSE = 3,  /* a field out of range, or a group used wrongly */
};

/** The first error of the producers. Written once; code last, with release. */
struct prs_device_report {
    uint64_t code;  /* enum prs_device_code */
    uint64_t kind;  /* enum prs_wait_kind */
    uint64_t index; /* position, signal address, group id or peer, by kind */
    uint64_t want;
    uint64_t have;
    uint64_t who; /* block << 32 | thread */
    uint64_t pad[2];
};
PRS_STATIC_ASSERT(sizeof(struct prs_device_report) == 64, "a line of its own");

/** Host memory, mapped on the device. A line has one writer. */
struct prs_ring_control {
    uint64_t credit; /* the proxy's: slots copied out */
    uint64_t done;   /* the proxy's: positions below are complete; read together with credit */
    uint64_t abort;  /* the proxy's: not 0 asks every wait to end; a negative errno as unsigned */
    uint64_t pad[5];
    struct prs_device_report report; /* the producers' */
};
PRS_STATIC_ASSERT(sizeof(struct prs_ring_control) == 128, "two lines");
PRS_STATIC_ASSERT(offsetof(struct prs_ring_control, credit) == 0 && offsetof(struct prs_ring_control, done) == 8,
                  "one read of 16 bytes has both");

/** looked_ns of a ring whose host memory a thread is looking at now. */
#define PRS_LOOKING (~0ull)

/**
 * The producers' own memory (of the device), shared by them. Whoever waits looks here; one thread at a time looks at
 * host memory for all (prs_ring_look(), device.h). */
struct prs_ring_local {
    uint64_t claim; /* next position to claim */
    uint64_t pad[7];
    uint64_t failed;      /* sticky: not 0 after the first error */
    uint64_t credit_seen; /* as last read, by who looked; they only grow */
    uint64_t done_seen;
    uint64_t abort_seen;
    uint64_t looked_ns; /* when the last look began, or PRS_LOOKING */
    uint64_t abort_ns;  /* when the abort word was last looked at */
    uint64_t looks;     /* that went to host memory */
    uint64_t pad_seen;
};
PRS_STATIC_ASSERT(sizeof(struct prs_ring_local) == 128, "a line to claim from and a line to wait at");

/** The lap bit that is due at a position. slots is a power of two. */
PRS_HD uint64_t prs_cmd_lap(uint64_t position, uint64_t slots)
{
    return (position & slots) == 0;
}

PRS_HD struct prs_cmd prs_cmd_pack(const struct prs_cmd_fields *f, uint64_t lap)
{
    struct prs_cmd cmd;
    int is_put = f->op == PRS_CMD_PUT;

    cmd.word[0] = lap | (uint64_t)f->op << 1 | (uint64_t)f->flags << 5 | (uint64_t)f->peer << 8 |
                  (uint64_t)f->dst_window << 24 | (uint64_t)f->src_window << 36 | (uint64_t)f->group << 48;
    /* A signal's value has 64 bits and a word 63: the top bit travels in word 3. */
    cmd.word[1] = lap | (is_put ? f->src_offset : f->bytes) << 1;
    cmd.word[2] = lap | f->dst_offset << 1;
    cmd.word[3] = lap | (is_put ? f->bytes : f->bytes >> 63) << 1 | (uint64_t)f->epoch << 48;
    return cmd;
}

/** The inverse of prs_cmd_pack(). Any four words give fields; whether they make sense is for the reader to check. */
PRS_HD struct prs_cmd_fields prs_cmd_unpack(const struct prs_cmd *cmd)
{
    struct prs_cmd_fields f;
    uint64_t length = (cmd->word[3] >> 1) & PRS_CMD_MAX_BYTES;

    f.op = (uint32_t)(cmd->word[0] >> 1) & 15;
    f.flags = (uint32_t)(cmd->word[0] >> 5) & 7;
    f.peer = (uint32_t)(cmd->word[0] >> 8) & (PRS_CMD_PEERS - 1);
    f.dst_window = (uint32_t)(cmd->word[0] >> 24) & (PRS_CMD_WINDOWS - 1);
    f.src_window = (uint32_t)(cmd->word[0] >> 36) & (PRS_CMD_WINDOWS - 1);
    f.group = (uint32_t)(cmd->word[0] >> 48);
    f.epoch = (uint32_t)(cmd->word[3] >> 48);
    f.dst_offset = cmd->word[2] >> 1;
    f.src_offset = f.op == PRS_CMD_PUT ? cmd->word[1] >> 1 : 0;
    /* For a signal more than the top bit in word 3 is malformed; keep it where the reader's check sees it. */
    f.bytes = f.op == PRS_CMD_PUT ? length : (cmd->word[1] >> 1) | length << 63;
    f.pad = f.op == PRS_CMD_PUT ? 0 : (uint32_t)(length >> 1 != 0);
    return f;
}

#endif
