/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The layout of the command ring, which the threads of a kernel write and a proxy thread of the CPU reads. It consists
 * of plain integers, with the same layout on both sides.
 *
 * A slot is four 8-byte words, each with the lap in bit 0: 1 on the first trip round the ring, 0 on the second, and so
 * on. A command is taken only when all four words carry the lap that is due, so it does not matter in which order, or
 * how far apart, the words arrive: a torn command is never taken. A put takes one slot (32 bytes); a put with its
 * signal takes two that were claimed together (64 bytes).
 *
 * Positions have 64 bits and never wrap. A producer claims positions by one atomic add, and may write a position when
 * it is less than credit + slots. The proxy raises credit when it has copied a slot out. It sets done to a position
 * when all commands below that position are complete. */
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

/** A slot of the ring. */
struct prs_cmd {
    uint64_t word[4];
};
PRS_STATIC_ASSERT(sizeof(struct prs_cmd) == 32, "two slots fill a 64-byte line");

/** What a command does. */
enum prs_cmd_op {
    PRS_CMD_PUT = 1,
    PRS_CMD_SIGNAL_SET = 2,
    PRS_CMD_SIGNAL_ADD = 3,
};

/** How it does it. */
enum prs_cmd_flags {
    PRS_CMD_STRONG = 1, /* a signal that follows every earlier command to its peer, not only those of its group */
};

/** Limits of the fields. Offsets have 63 bits and lengths 47, enough for any memory that exists. */
#define PRS_CMD_PEERS      (1u << 16)
#define PRS_CMD_WINDOWS    (1u << 12)
#define PRS_CMD_GROUPS     (1u << 16)
#define PRS_CMD_EPOCHS     (1u << 16)
#define PRS_CMD_MAX_BYTES  ((1ull << 47) - 1)
#define PRS_CMD_MAX_OFFSET ((1ull << 63) - 1)

/** A command, unpacked. */
struct prs_cmd_fields {
    uint64_t src_offset; /* put: within src_window of this rank */
    uint64_t dst_offset; /* within dst_window of the peer */
    uint64_t bytes;      /* put: length; signal: value */
    uint32_t op;         /* enum prs_cmd_op */
    uint32_t flags;      /* enum prs_cmd_flags */
    uint32_t peer;       /* rank */
    uint32_t dst_window;
    uint32_t src_window; /* put only */
    uint32_t group;
    uint32_t epoch; /* of the ring, so that commands of a kernel that outlived its ring are detected */
    uint32_t pad;
};
PRS_STATIC_ASSERT(sizeof(struct prs_cmd_fields) == 56, "no hidden padding");

/** What a thread waited for, or misused, when the device failed. */
enum prs_wait_kind {
    PRS_WAIT_NONE = 0,
    PRS_WAIT_CREDIT = 1,  /* a free slot; a timeout means that the proxy is dead, stopped or too slow */
    PRS_WAIT_DONE = 2,    /* completion of a position */
    PRS_WAIT_SIGNAL = 3,  /* a signal word */
    PRS_WAIT_ROUND = 4,   /* the signals of the previous round, of an arrival counter */
    PRS_WAIT_COMMAND = 5, /* nothing: the command itself was refused */
    PRS_WAIT_ARRIVAL = 6, /* nothing: an arrival at a counter that expects none was refused */
};

/** What a device call returns, negated, and what a report says. */
enum prs_device_code {
    PRS_DEVICE_OK = 0,
    PRS_DEVICE_TIMEOUT = 1, /* a wait reached its limit */
    PRS_DEVICE_ABORTED = 2, /* the CPU failed first or asked to stop; prs_proxy_error() says why */
    PRS_DEVICE_MISUSE = 3,  /* a field is out of range, or an arrival was refused */
};

/** The first error of the producers. It is written once; the code is written last, with release. */
struct prs_device_report {
    uint64_t code;  /* enum prs_device_code */
    uint64_t kind;  /* enum prs_wait_kind */
    uint64_t index; /* position, address of the signal word, group or peer, depending on kind */
    uint64_t want;
    uint64_t have;
    uint64_t thread; /* block << 32 | thread */
    uint64_t pad[2];
};
PRS_STATIC_ASSERT(sizeof(struct prs_device_report) == 64, "a line of its own");

/** The part of the ring in host memory, which is mapped on the device. Each line has one writer. */
struct prs_ring_control {
    uint64_t credit; /* by the proxy: slots that it has copied out */
    uint64_t done;   /* by the proxy: positions below it are complete; read together with credit */
    uint64_t abort;  /* by the proxy: not 0 ends every wait; an errno */
    uint64_t pad[5];
    struct prs_device_report report; /* by the producers */
};
PRS_STATIC_ASSERT(sizeof(struct prs_ring_control) == 128, "two lines");
PRS_STATIC_ASSERT(offsetof(struct prs_ring_control, credit) == 0 && offsetof(struct prs_ring_control, done) == 8,
                  "one read of 16 bytes has both");

/** looked_ns while a thread reads the host memory of the ring. */
#define PRS_LOOKING (~0ull)

/**
 * The part of the ring in the memory of the device, which the producers share. Waiting threads read it; one of them at
 * a time reads the host memory for all (prs_ring_look(), device.h). */
struct prs_ring_local {
    uint64_t claim; /* next position to claim */
    uint64_t pad[7];
    uint64_t failed;      /* sticky: not 0 after the first error */
    uint64_t credit_seen; /* this and the next one: the values last read from host memory; they only grow */
    uint64_t done_seen;
    uint64_t abort_seen;
    uint64_t looked_ns; /* when the last look began, or PRS_LOOKING */
    uint64_t abort_ns;  /* when the abort word was last read */
    uint64_t looks;     /* looks at host memory so far */
    uint64_t pad_seen;
};
PRS_STATIC_ASSERT(sizeof(struct prs_ring_local) == 128, "a line to claim from and a line to wait at");

/** The lap bit of a position. slots is a power of two. */
PRS_HD uint64_t prs_cmd_lap(uint64_t position, uint64_t slots)
{
    return (position & slots) == 0;
}

/** Pack a command into a slot. Its fields must be within their limits. */
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

/** Unpack a slot. Any four words give fields; the caller must check that they make sense. */
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
    /* A signal has only the top bit of its value in word 3. Other bits are malformed: keep them where a check sees
     * them. */
    f.bytes = f.op == PRS_CMD_PUT ? length : (cmd->word[1] >> 1) | length << 63;
    f.pad = f.op == PRS_CMD_PUT ? 0 : (uint32_t)(length >> 1 != 0);
    return f;
}

#endif
