/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Puts and signals started by the threads of a kernel. Everything here also compiles for the host, where threads play
 * blocks; device.cuh adds what only a GPU has (warp-wide and block-wide calls).
 *
 * Memory is named by window and offset (heap.h, proxy.h): a window is the same size on every rank. A peer whose windows
 * are mapped here (same node) is reached by plain stores; every other one by a command to the proxy of this rank.
 *
 * Order. A signal is seen only after the bytes of every put of its group that was started before it by the same thread,
 * or by a thread whose prs_group_arrive() or other release/acquire chain came before. Puts are not ordered among each
 * other. What a put reads must be written by the calling thread, or be ordered before the call by a barrier.
 *
 * Returns. 0 (or a positive value where said), or a negative prs_device_code. The first error of a device is sticky:
 * every later call fails at once, and the report (ring.h) tells the CPU what was awaited. Every wait has the limit
 * prs_device.timeout_ns and ends early when the proxy fails or is closed. */
#ifndef PERSEUS_DEVICE_H
#define PERSEUS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include <perseus/ring.h>
#include <perseus/sync.h>

/** What a kernel needs to know: plain data, passed by value or kept in device memory. Made by prs_proxy_device(). */
struct prs_device {
    struct prs_cmd *slots;
    struct prs_ring_control *control;
    struct prs_ring_local *local;
    const uint64_t *map;   /* [windows][world] address of the window of a rank, 0 where only the proxy reaches it */
    const uint64_t *bytes; /* [windows] */
    uint64_t slot_count;   /* power of two */
    uint64_t timeout_ns;
    uint32_t epoch;
    uint32_t rank;
    uint32_t world;
    uint32_t windows;
};

struct prs_device_put {
    uint64_t src_offset;
    uint64_t dst_offset;
    uint64_t bytes;
    uint32_t peer;
    uint32_t dst_window;
    uint32_t src_window;
    uint32_t group;
};

struct prs_device_signal {
    uint64_t offset; /* of a 64-bit word, 8-byte aligned, in a window made for signals */
    uint64_t value;
    uint32_t peer;
    uint32_t window;
    uint32_t group;
    uint16_t add;    /* 0: set the word to value; 1: add value to it */
    uint16_t strong; /* 1: behind every earlier command to that peer, not only those of the group */
};

/* ---- errors and bounded waits ---- */

PRS_HD uint64_t prs_device_who(void)
{
#if defined(__CUDA_ARCH__)
    return (uint64_t)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) << 32 | threadIdx.x;
#else
    return 0;
#endif
}

/** Make the device fail; the first reason wins. Return the code to hand up. */
PRS_HD int prs_device_fail(const struct prs_device *dev, enum prs_device_code code, enum prs_wait_kind kind,
                           uint64_t index, uint64_t want, uint64_t have)
{
    struct prs_device_report *report = &dev->control->report;

    if (prs_swap_if_gpu(&dev->local->failed, 0, (uint64_t)code) == 0) {
        prs_store_relaxed(&report->kind, (uint64_t)kind);
        prs_store_relaxed(&report->index, index);
        prs_store_relaxed(&report->want, want);
        prs_store_relaxed(&report->have, have);
        prs_store_relaxed(&report->who, prs_device_who());
        /* E0: the report is whole before its code is seen. Pairs with E1 in prs_ring_report(), transport/ring.c. */
        prs_store_release_sys(&report->code, (uint64_t)code);
    }
    return -(int)code;
}

/** The sticky error of this device: 0 or a negative prs_device_code. */
PRS_HD int prs_device_error(const struct prs_device *dev)
{
    return -(int)prs_load_acquire_gpu(&dev->local->failed);
}

/* How old what is known of the proxy must be before one of those who wait looks again. A look is a read or two of host
 * memory, more than 1 us each. Reads of a line of host memory are served one after the other, and what a copy engine
 * or a NIC reads there waits among them: so there must be few, however many threads wait. */
enum {
    PRS_LOOK_NS = 2000,        /* for a thread that waits for the proxy: credit or completion */
    PRS_LOOK_ABORT_NS = 20000, /* for one that waits for something else, and would only hear of an abort */
    PRS_WAIT_LOOKS = 16,       /* looks at the awaited word between two at the clock and for errors */
};

/** Learn what the proxy says, and tell the others, unless one of them is about it or has just been. Never waits. */
PRS_HD void prs_ring_look(const struct prs_device *dev, uint64_t now, uint64_t every_ns)
{
    struct prs_ring_local *local = dev->local;
    uint64_t looked = prs_load_relaxed(&local->looked_ns);
    uint64_t abort = 0, credit, done;

    if (looked == PRS_LOOKING || now < looked + every_ns)
        return;
    /* L0: from here to L1 this thread alone reads host memory and writes what was seen, so that it only grows. */
    if (prs_swap_if_gpu(&local->looked_ns, looked, PRS_LOOKING) != looked)
        return;
    prs_add_relaxed_gpu(&local->looks, 1);
    if (now >= prs_load_relaxed(&local->abort_ns) + PRS_LOOK_ABORT_NS) {
        abort = prs_load_relaxed(&dev->control->abort);
        prs_store_relaxed(&local->abort_ns, now);
    }
    /* R2: the proxy has copied a slot out before we may write it again. Pairs with R1 in prs_ring_return(); and what
     * completed commands stood for has happened: with D1 in prs_ring_done(), transport/ring.c. */
    prs_load_pair_acquire_sys(&dev->control->credit, &credit, &done);
    /* R3: handed on to the other producers. Pairs with the acquire in prs_ring_claim() and prs_ring_await(). */
    if (credit != prs_load_relaxed(&local->credit_seen))
        prs_store_release_gpu(&local->credit_seen, credit);
    if (done != prs_load_relaxed(&local->done_seen))
        prs_store_release_gpu(&local->done_seen, done);
    if (abort != 0)
        prs_store_relaxed(&local->abort_seen, abort);
    prs_store_release_gpu(&local->looked_ns, now); /* L1: pairs with L0 of the next */
}

struct prs_wait {
    uint64_t give_up_ns; /* 0 until the first look at the clock */
    uint32_t looks;
};

/** After a look that did not find what is wanted. Return 0 to look again, or the error that ends the wait. */
PRS_HD int prs_wait_more(const struct prs_device *dev, struct prs_wait *wait, enum prs_wait_kind kind, uint64_t index,
                         uint64_t want, uint64_t have)
{
    uint64_t now;
    int error;

    prs_spin_pause();
    if (++wait->looks % PRS_WAIT_LOOKS != 0)
        return 0;
    now = prs_now_ns();
    prs_ring_look(dev, now, PRS_LOOK_ABORT_NS);
    error = prs_device_error(dev);
    if (error)
        return error;
    if (prs_load_relaxed(&dev->local->abort_seen) != 0)
        return prs_device_fail(dev, PRS_DEVICE_ABORTED, kind, index, want, have);
    if (wait->give_up_ns == 0)
        wait->give_up_ns = now + dev->timeout_ns;
    if (now >= wait->give_up_ns)
        return prs_device_fail(dev, PRS_DEVICE_TIMEOUT, kind, index, want, have);
    return 0;
}

/* ---- the ring ---- */

/** Wait until the proxy has come as far as want; *seen is what is known of it (credit_seen or done_seen). */
PRS_HD int prs_ring_await(const struct prs_device *dev, const uint64_t *seen, uint64_t want, enum prs_wait_kind kind,
                          uint64_t index)
{
    struct prs_wait wait = {0, 0};
    uint64_t have = prs_load_acquire_gpu(seen); /* R3 */

    while (have < want) {
        int r;

        prs_ring_look(dev, prs_now_ns(), PRS_LOOK_NS);
        have = prs_load_acquire_gpu(seen);
        if (have >= want)
            break;
        r = prs_wait_more(dev, &wait, kind, index, want, have);
        if (r)
            return r;
    }
    return 0;
}

/** Claim count consecutive positions and wait until their slots are free. Return 0 or the error. */
PRS_HD int prs_ring_claim(const struct prs_device *dev, uint32_t count, uint64_t *first)
{
    uint64_t need;
    int r = prs_device_error(dev);

    if (r)
        return r;
    *first = prs_add_relaxed_gpu(&dev->local->claim, count);
    need = *first + count;
    if (need <= dev->slot_count)
        return 0; /* the first lap */
    return prs_ring_await(dev, &dev->local->credit_seen, need - dev->slot_count, PRS_WAIT_CREDIT, *first);
}

/** Write the command of a claimed position. */
PRS_HD void prs_ring_write(const struct prs_device *dev, uint64_t position, const struct prs_cmd_fields *fields)
{
    struct prs_cmd *slot = &dev->slots[position & (dev->slot_count - 1)];
    struct prs_cmd cmd = prs_cmd_pack(fields, prs_cmd_lap(position, dev->slot_count));

    /* A0: what the put reads, and every earlier command of the group, is visible before this command can be taken (all
     * four words must show the lap). Pairs with A1 in prs_ring_take(), transport/ring.c. System scope: a CPU reads. */
    prs_store_four_release_sys(slot->word, cmd.word);
}

PRS_HD struct prs_cmd_fields prs_cmd_of_put(const struct prs_device *dev, const struct prs_device_put *put)
{
    struct prs_cmd_fields f = {put->src_offset, put->dst_offset, put->bytes, PRS_CMD_PUT, 0, put->peer,
                               put->dst_window, put->src_window, put->group, dev->epoch,  0};
    return f;
}

PRS_HD struct prs_cmd_fields prs_cmd_of_signal(const struct prs_device *dev, const struct prs_device_signal *signal)
{
    struct prs_cmd_fields f = {0,
                               signal->offset,
                               signal->value,
                               signal->add ? (uint32_t)PRS_CMD_SIGNAL_ADD : (uint32_t)PRS_CMD_SIGNAL_SET,
                               signal->strong ? (uint32_t)PRS_CMD_STRONG : 0u,
                               signal->peer,
                               signal->window,
                               0,
                               signal->group,
                               dev->epoch,
                               0};
    return f;
}

/* ---- checks and mapped peers ---- */

/** Where the window of a rank is mapped here; 0: reach it through the proxy. */
PRS_HD uint64_t prs_device_map(const struct prs_device *dev, uint32_t window, uint32_t rank)
{
    return dev->map[(uint64_t)window * dev->world + rank];
}

PRS_HD int prs_device_in_window(const struct prs_device *dev, uint32_t window, uint64_t offset, uint64_t bytes)
{
    return window < dev->windows && offset <= dev->bytes[window] && bytes <= dev->bytes[window] - offset;
}

/** Return 0 or -PRS_DEVICE_MISUSE; the report's want and have are what was allowed and what came. */
PRS_HD int prs_device_check_put(const struct prs_device *dev, const struct prs_device_put *put)
{
    if (put->peer >= dev->world)
        return prs_device_fail(dev, PRS_DEVICE_MISUSE, PRS_WAIT_COMMAND, put->peer, dev->world, put->peer);
    if (put->group >= PRS_CMD_GROUPS)
        return prs_device_fail(dev, PRS_DEVICE_MISUSE, PRS_WAIT_COMMAND, put->peer, PRS_CMD_GROUPS, put->group);
    if (!prs_device_in_window(dev, put->dst_window, put->dst_offset, put->bytes))
        return prs_device_fail(dev, PRS_DEVICE_MISUSE, PRS_WAIT_COMMAND, put->peer, put->dst_offset, put->bytes);
    if (!prs_device_in_window(dev, put->src_window, put->src_offset, put->bytes))
        return prs_device_fail(dev, PRS_DEVICE_MISUSE, PRS_WAIT_COMMAND, put->peer, put->src_offset, put->bytes);
    return 0;
}

PRS_HD int prs_device_check_signal(const struct prs_device *dev, const struct prs_device_signal *signal)
{
    if (signal->peer >= dev->world)
        return prs_device_fail(dev, PRS_DEVICE_MISUSE, PRS_WAIT_COMMAND, signal->peer, dev->world, signal->peer);
    if (signal->group >= PRS_CMD_GROUPS)
        return prs_device_fail(dev, PRS_DEVICE_MISUSE, PRS_WAIT_COMMAND, signal->peer, PRS_CMD_GROUPS, signal->group);
    if (signal->offset % 8 != 0 || !prs_device_in_window(dev, signal->window, signal->offset, 8))
        return prs_device_fail(dev, PRS_DEVICE_MISUSE, PRS_WAIT_COMMAND, signal->peer, 8, signal->offset);
    return 0;
}

/** Copy by part of a team: thread `index` of `count`. 16 bytes at a time where both ends allow it. */
PRS_HD void prs_copy_part(void *dst, const void *src, uint64_t bytes, uint32_t index, uint32_t count)
{
    char *to = (char *)dst;
    const char *from = (const char *)src;
    uint64_t at = 0;

#if defined(__CUDA_ARCH__)
    if ((((uintptr_t)dst | (uintptr_t)src) & 15) == 0) {
        uint64_t vectors = bytes / 16;
        for (uint64_t i = index; i < vectors; i += count)
            ((uint4 *)dst)[i] = ((const uint4 *)src)[i];
        at = vectors * 16;
    }
#endif
    for (uint64_t i = at + index; i < bytes; i += count)
        to[i] = from[i];
}

PRS_HD void prs_signal_mapped(uint64_t *word, const struct prs_device_signal *signal)
{
    /* Everything this thread has written or acquired is visible at the peer before the signal. Pairs with the acquire
     * in prs_wait_signal(). */
    if (signal->add)
        prs_add_release_sys(word, signal->value);
    else
        prs_store_release_sys(word, signal->value);
}

/* ---- thread-wide calls ---- */

/**
 * Start to write. *ticket (may be NULL) is for prs_flush(): the source may be written again, and the bytes are at the
 * peer, once it is done. A peer that is mapped has the bytes when the next signal to it is seen. */
PRS_HD int prs_put(const struct prs_device *dev, const struct prs_device_put *put, uint64_t *ticket)
{
    struct prs_cmd_fields f;
    uint64_t at = 0, mapped;
    int r;

    r = prs_device_check_put(dev, put);
    if (r)
        return r;
    mapped = prs_device_map(dev, put->dst_window, put->peer);
    if (mapped != 0) {
        prs_copy_part((void *)(uintptr_t)(mapped + put->dst_offset),
                      (const void *)(uintptr_t)(prs_device_map(dev, put->src_window, dev->rank) + put->src_offset),
                      put->bytes, 0, 1);
        if (ticket)
            *ticket = 0;
        return prs_device_error(dev);
    }
    r = prs_ring_claim(dev, 1, &at);
    if (r)
        return r;
    f = prs_cmd_of_put(dev, put);
    prs_ring_write(dev, at, &f);
    if (ticket)
        *ticket = at + 1;
    return 0;
}

/** Start a signal behind the puts of its group. */
PRS_HD int prs_signal(const struct prs_device *dev, const struct prs_device_signal *signal, uint64_t *ticket)
{
    struct prs_cmd_fields f;
    uint64_t at = 0, mapped;
    int r;

    r = prs_device_check_signal(dev, signal);
    if (r)
        return r;
    mapped = prs_device_map(dev, signal->window, signal->peer);
    if (mapped != 0) {
        prs_signal_mapped((uint64_t *)(uintptr_t)(mapped + signal->offset), signal);
        if (ticket)
            *ticket = 0;
        return prs_device_error(dev);
    }
    r = prs_ring_claim(dev, 1, &at);
    if (r)
        return r;
    f = prs_cmd_of_signal(dev, signal);
    prs_ring_write(dev, at, &f);
    if (ticket)
        *ticket = at + 1;
    return 0;
}

/** A put and its signal (same peer): two slots claimed together, so nothing comes between them. */
PRS_HD int prs_put_signal(const struct prs_device *dev, const struct prs_device_put *put,
                          const struct prs_device_signal *signal, uint64_t *ticket)
{
    struct prs_cmd_fields f;
    uint64_t at = 0;
    int r;

    /* Out of range goes to the calls that refuse it with a report. */
    if (put->peer >= dev->world || put->dst_window >= dev->windows ||
        prs_device_map(dev, put->dst_window, put->peer) != 0) {
        r = prs_put(dev, put, ticket);
        return r != 0 ? r : prs_signal(dev, signal, ticket);
    }
    r = prs_device_check_put(dev, put);
    if (!r)
        r = prs_device_check_signal(dev, signal);
    if (!r)
        r = prs_ring_claim(dev, 2, &at);
    if (r)
        return r;
    f = prs_cmd_of_put(dev, put);
    prs_ring_write(dev, at, &f);
    f = prs_cmd_of_signal(dev, signal);
    prs_ring_write(dev, at + 1, &f);
    if (ticket)
        *ticket = at + 2;
    return 0;
}

/**
 * Wait until everything up to a ticket is complete: sources reusable, bytes at the peer, signals handed over. When a
 * signal is seen is for its receiver to say: under the counted policy it is the receiver that raises it. */
PRS_HD int prs_flush(const struct prs_device *dev, uint64_t ticket)
{
    int r = prs_device_error(dev);

    return r != 0 ? r : prs_ring_await(dev, &dev->local->done_seen, ticket, PRS_WAIT_DONE, ticket);
}

/** Wait until every command that any thread has claimed so far is complete. */
PRS_HD int prs_quiet(const struct prs_device *dev)
{
    return prs_flush(dev, prs_load_relaxed(&dev->local->claim));
}

enum prs_compare { PRS_COMPARE_GE = 0, PRS_COMPARE_EQ = 1, PRS_COMPARE_NE = 2 };

/** Wait until a signal word of this rank compares true with value; what it stands for may be read then. */
PRS_HD int prs_wait_signal(const struct prs_device *dev, const uint64_t *word, enum prs_compare compare, uint64_t value)
{
    struct prs_wait wait = {0, 0};
    int r = prs_device_error(dev);

    while (!r) {
        uint64_t have = prs_load_acquire_sys(word);
        if (compare == PRS_COMPARE_GE ? have >= value : compare == PRS_COMPARE_EQ ? have == value : have != value)
            return 0;
        r = prs_wait_more(dev, &wait, PRS_WAIT_SIGNAL, (uint64_t)(uintptr_t)word, value, have);
    }
    return r;
}

/* ---- groups: the last of n arrivals sends every signal of the group, behind one ordering point ---- */

/**
 * A group in device memory, shared by the threads that put to one peer. Used again and again: a round is `expected`
 * arrivals. Counters only grow, so a captured graph can be replayed. */
struct prs_group {
    uint64_t deposited;                /* arrivals begun */
    uint64_t arrived;                  /* arrivals whose puts are all in the ring */
    uint64_t flushed;                  /* rounds whose signals are all in the ring */
    struct prs_device_signal *signals; /* [expected] */
    uint32_t expected;
    uint32_t id; /* group of the puts and signals */
    uint64_t pad[3];
};
PRS_STATIC_ASSERT(sizeof(struct prs_group) == 64, "a group has a line of its own");

/** Before the first use, by one thread. signals has room for expected entries and stays the caller's. */
PRS_HD void prs_group_begin(struct prs_group *group, uint32_t id, uint32_t expected, struct prs_device_signal *signals)
{
    group->deposited = 0;
    group->arrived = 0;
    group->flushed = 0;
    group->signals = signals;
    group->expected = expected;
    group->id = id;
}

/** Send the signals of the round: the caller knows that all its puts are in the ring. Usually prs_group_arrive() does.
 */
PRS_HD int prs_group_flush(const struct prs_device *dev, struct prs_group *group)
{
    for (uint32_t i = 0; i < group->expected; i++) {
        struct prs_device_signal signal = group->signals[i];
        int r;

        signal.group = group->id;
        r = prs_signal(dev, &signal, NULL);
        if (r)
            return r;
    }
    /* G0: the signals of this round have been read before the next round may overwrite them. Pairs with G1. */
    prs_add_acq_rel_gpu(&group->flushed, 1);
    return 0;
}

/**
 * This thread's puts of the round are started; its signal is to be sent with those of the others. The last arrival
 * sends them all. Return 1 for that one, 0 for the others, or the error. */
PRS_HD int prs_group_arrive(const struct prs_device *dev, struct prs_group *group,
                            const struct prs_device_signal *signal)
{
    struct prs_wait wait = {0, 0};
    uint64_t place, round;
    int r;

    if (group->expected == 0) /* who arrives is one more than are expected */
        return prs_device_fail(dev, PRS_DEVICE_MISUSE, PRS_WAIT_ARRIVAL, group->id, 0, 1);
    place = prs_add_relaxed_gpu(&group->deposited, 1);
    round = place / group->expected;
    for (;;) {
        uint64_t flushed = prs_load_acquire_gpu(&group->flushed); /* G1 */
        if (flushed >= round)
            break;
        r = prs_wait_more(dev, &wait, PRS_WAIT_GROUP, group->id, round, flushed);
        if (r)
            return r;
    }
    group->signals[place % group->expected] = *signal;
    /* B0: this thread's puts are claimed, and its signal is deposited, before the count shows it; the last arrival
     * acquires all of them, so its signals get later positions than any put of the round. Pairs with itself. */
    if ((prs_add_acq_rel_gpu(&group->arrived, 1) + 1) % group->expected != 0)
        return 0;
    r = prs_group_flush(dev, group);
    return r != 0 ? r : 1;
}

#endif
