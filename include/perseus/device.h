/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Puts and signals that the threads of a kernel start. Everything here also compiles for the host, where one thread
 * takes the place of a block. device.cuh adds the same calls for a warp and for a block, which exist only on a GPU.
 *
 * Memory is named by window and offset (heap.h, proxy.h). A window has the same size on every rank. A peer whose
 * windows are mapped here (same node) is reached by plain stores, any other by a command to the proxy of this rank.
 *
 * Order. A signal becomes visible only after the bytes of the puts of its group that were started before it: by the
 * same thread, or by threads that are ordered before it by an arrival counter or another release/acquire chain. Puts
 * are not ordered among each other. The data that a put reads must have been written by the calling thread, or be
 * ordered before the call by a barrier.
 *
 * Threads. Any number of threads may call any function at the same time, unless its comment says otherwise.
 *
 * Ownership. Descriptions of puts and signals are read during the call only. The source of a put must not be written
 * until prs_flush() or prs_quiet() says that the put is complete.
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

/** What a kernel needs to know: plain data, to be passed by value or kept in device memory. prs_proxy_start() fills it
 * in. It, and the memory that it points to, live until the proxy is closed. */
struct prs_device {
    struct prs_cmd *slots;            /* the command ring, [slot_count] */
    struct prs_ring_control *control; /* of the ring, in host memory */
    struct prs_ring_local *local;     /* of the ring, in device memory */
    const uint64_t *map;              /* [windows][world] address of a rank's window; 0: only the proxy reaches it */
    const uint64_t *bytes;            /* [windows] */
    uint64_t slot_count;              /* power of two */
    uint64_t timeout_ns;              /* limit of each wait */
    uint32_t epoch;                   /* names the proxy, so that a kernel that outlived it is detected */
    uint32_t rank;                    /* this one */
    uint32_t world;                   /* number of ranks */
    uint32_t windows;
};

/** What prs_put() writes: bytes from a window of this rank to a window of peer. */
struct prs_device_put {
    uint64_t src_offset;
    uint64_t dst_offset;
    uint64_t bytes;
    uint32_t peer;
    uint32_t dst_window;
    uint32_t src_window;
    uint32_t group; /* signals of this group follow the put */
};

/** What prs_signal() does to a signal word of peer. Ranks of the peer's node and ranks of other nodes must not add to
 * the same word: GPU atomics and NIC atomics are not atomic with respect to each other. */
struct prs_device_signal {
    uint64_t offset; /* of a 64-bit word, 8-byte aligned, in a window made for signals */
    uint64_t value;
    uint32_t peer;
    uint32_t window;
    uint32_t group;
    uint16_t add;    /* 0: set the word to value; 1: add value to it */
    uint16_t strong; /* 1: it follows every earlier command to that peer, not only those of the group */
};

/* ---- errors and bounded waits ---- */

/** The calling thread, as reports name it: block << 32 | thread. 0 on the host. */
PRS_HD uint64_t prs_device_thread(void)
{
#if defined(__CUDA_ARCH__)
    return (uint64_t)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) << 32 | threadIdx.x;
#else
    return 0;
#endif
}

/** Make the device fail, and report what was awaited; only the first error counts. Return -code. */
PRS_HD int prs_device_fail(const struct prs_device *dev, enum prs_device_code code, enum prs_wait_kind kind,
                           uint64_t index, uint64_t want, uint64_t have)
{
    struct prs_device_report *report = &dev->control->report;

    if (prs_compare_and_swap_gpu(&dev->local->failed, 0, (uint64_t)code) == 0) {
        prs_store_relaxed(&report->kind, (uint64_t)kind);
        prs_store_relaxed(&report->index, index);
        prs_store_relaxed(&report->want, want);
        prs_store_relaxed(&report->have, have);
        prs_store_relaxed(&report->thread, prs_device_thread());
        /* [device-report] The report is complete before its code is seen. Pairs with prs_ring_report(),
         * transport/gpu/ring.c. */
        prs_store_release_sys(&report->code, (uint64_t)code);
    }
    return -(int)code;
}

/** The sticky error of this device: 0 or a negative prs_device_code. */
PRS_HD int prs_device_error(const struct prs_device *dev)
{
    return -(int)prs_load_acquire_gpu(&dev->local->failed);
}

/** How often waiting threads read the state of the proxy, which all of them cache in struct prs_ring_local. A look is
 * one or two reads of host memory, more than 1 us each. Reads of one cache line of host memory are served one after
 * the other, and reads of a copy engine or a NIC queue among them. So there must be few looks, however many threads
 * wait. */
enum {
    PRS_LOOK_NS = 2000,        /* minimum age of the cached state for a thread that waits for credit or completion */
    PRS_LOOK_ABORT_NS = 20000, /* for a thread that waits for something else, and looks only to notice an abort */
    PRS_WAIT_LOOKS = 16,       /* reads of the awaited word between two checks of the clock and for errors */
};

/** Refresh the cached state of the proxy for all threads if it is older than every_ns, unless another thread is doing
 * so. Never waits. */
PRS_HD void prs_ring_look(const struct prs_device *dev, uint64_t now, uint64_t every_ns)
{
    struct prs_ring_local *local = dev->local;
    uint64_t looked = prs_load_relaxed(&local->looked_ns);
    uint64_t abort = 0, credit, done;

    if (looked == PRS_LOOKING || now < looked + every_ns)
        return;
    /* [look-lock] From here to the last store only this thread reads host memory and writes the cached state. So the
     * state only grows. Pairs with that store of the previous thread. */
    if (prs_compare_and_swap_gpu(&local->looked_ns, looked, PRS_LOOKING) != looked)
        return;
    prs_add_relaxed_gpu(&local->looks, 1);
    if (now >= prs_load_relaxed(&local->abort_ns) + PRS_LOOK_ABORT_NS) {
        abort = prs_load_relaxed(&dev->control->abort);
        prs_store_relaxed(&local->abort_ns, now);
    }
    /* [ring-credit] The proxy has copied a slot out before a thread writes it again. Pairs with prs_ring_return().
     * [ring-done] The effects of complete commands precede what follows. Pairs with prs_ring_done(),
     * transport/gpu/ring.c. */
    prs_load_pair_acquire_sys(&dev->control->credit, &credit, &done);
    /* [ring-seen] Hand both on to the other threads. Pairs with prs_ring_await(). */
    if (credit != prs_load_relaxed(&local->credit_seen))
        prs_store_release_gpu(&local->credit_seen, credit);
    if (done != prs_load_relaxed(&local->done_seen))
        prs_store_release_gpu(&local->done_seen, done);
    if (abort != 0)
        prs_store_relaxed(&local->abort_seen, abort);
    prs_store_release_gpu(&local->looked_ns, now); /* [look-lock] of the next thread */
}

/** State of one wait, zeroed when it begins. */
struct prs_wait {
    uint64_t give_up_ns; /* 0 until the clock is read for the first time */
    uint32_t looks;      /* reads of the awaited word */
};

/** Call it when the awaited word does not have its value yet. kind, index, want and have are for the report. Return 0
 * to read the word again, or the error that ends the wait. */
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

/** Wait until the proxy has reached position want. seen points to the cached position: credit_seen or done_seen. */
PRS_HD int prs_ring_await(const struct prs_device *dev, const uint64_t *seen, uint64_t want, enum prs_wait_kind kind,
                          uint64_t index)
{
    struct prs_wait wait = {0, 0};
    uint64_t have = prs_load_acquire_gpu(seen); /* [ring-seen] */

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

/** Claim count consecutive positions, from *first on, and wait until their slots are free. The caller must write every
 * claimed position. Return 0 or the error. */
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

/** Write the command of a claimed position. From then on the proxy may execute it. */
PRS_HD void prs_ring_write(const struct prs_device *dev, uint64_t position, const struct prs_cmd_fields *fields)
{
    struct prs_cmd *slot = &dev->slots[position & (dev->slot_count - 1)];
    struct prs_cmd cmd = prs_cmd_pack(fields, prs_cmd_lap(position, dev->slot_count));

    /* [ring-slot] What the put reads, and every earlier command of the group, is visible before this command can be
     * taken, which is when all four words show the lap. Pairs with prs_ring_take(), transport/gpu/ring.c. System scope,
     * because a CPU reads. */
    prs_store_four_release_sys(slot->word, cmd.word);
}

/** The command of a put. */
PRS_HD struct prs_cmd_fields prs_cmd_of_put(const struct prs_device *dev, const struct prs_device_put *put)
{
    struct prs_cmd_fields f = {put->src_offset, put->dst_offset, put->bytes, PRS_CMD_PUT, 0, put->peer,
                               put->dst_window, put->src_window, put->group, dev->epoch,  0};
    return f;
}

/** The command of a signal. */
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

/** The address at which the window of a rank is mapped here; 0: only the proxy reaches it. Both must be in range. */
PRS_HD uint64_t prs_device_map(const struct prs_device *dev, uint32_t window, uint32_t rank)
{
    return dev->map[(uint64_t)window * dev->world + rank];
}

/** Is there such a window, and does the range lie within it? */
PRS_HD int prs_device_in_window(const struct prs_device *dev, uint32_t window, uint64_t offset, uint64_t bytes)
{
    return window < dev->windows && offset <= dev->bytes[window] && bytes <= dev->bytes[window] - offset;
}

/** Check all fields of a put. Return 0 or -PRS_DEVICE_MISUSE; the report then has the allowed value and the actual
 * one. */
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

/** Check all fields of a signal. Return as prs_device_check_put(). */
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

/** Copy this thread's part, if `count` threads copy together and this one is number `index`. On a GPU it copies 16
 * bytes at a time if both addresses are aligned. */
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

/** Set or add to the signal word of a mapped peer. */
PRS_HD void prs_signal_mapped(uint64_t *word, const struct prs_device_signal *signal)
{
    /* [mapped-signal] Everything that this thread has written or acquired is visible at the peer before the signal.
     * Pairs with prs_wait_signal(). */
    if (signal->add)
        prs_add_release_sys(word, signal->value);
    else
        prs_store_release_sys(word, signal->value);
}

/* ---- thread-wide calls ---- */

/**
 * Start a put; waits only if the ring has no free slot. *ticket (may be NULL) is for prs_flush(): once that has
 * returned 0 the source may be written again and the bytes are at the peer. A mapped peer has the bytes when it sees
 * the next signal. */
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

/** Start a signal: the peer sees it after the puts of its group. *ticket as for prs_put(). */
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

/** Start a put and its signal, to the same peer. Their slots are claimed together, so that no command comes between
 * them. *ticket as for prs_put(); it stands for both. */
PRS_HD int prs_put_signal(const struct prs_device *dev, const struct prs_device_put *put,
                          const struct prs_device_signal *signal, uint64_t *ticket)
{
    struct prs_cmd_fields f;
    uint64_t at = 0;
    int r;

    /* Values out of range go to the calls that refuse them with a report. */
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
 * Wait until all commands up to a ticket are complete: sources may be written again, bytes are at the peer, and signals
 * have reached it. A signal may become visible later, since under the policy `counted` the receiver's CPU raises it. */
PRS_HD int prs_flush(const struct prs_device *dev, uint64_t ticket)
{
    int r = prs_device_error(dev);

    return r != 0 ? r : prs_ring_await(dev, &dev->local->done_seen, ticket, PRS_WAIT_DONE, ticket);
}

/** Wait until every command that any thread has claimed so far is complete, in the sense of prs_flush(). */
PRS_HD int prs_quiet(const struct prs_device *dev)
{
    return prs_flush(dev, prs_load_relaxed(&dev->local->claim));
}

/** How prs_wait_signal() compares the word with the value: greater or equal, equal, not equal. */
enum prs_compare { PRS_COMPARE_GE = 0, PRS_COMPARE_EQ = 1, PRS_COMPARE_NE = 2 };

/** Wait until the comparison of a signal word of this rank with value is true. Then the bytes of the puts before that
 * signal may be read. */
PRS_HD int prs_wait_signal(const struct prs_device *dev, const uint64_t *word, enum prs_compare compare, uint64_t value)
{
    struct prs_wait wait = {0, 0};
    int r = prs_device_error(dev);

    while (!r) {
        uint64_t have = prs_load_acquire_sys(word); /* [mapped-signal] */

        if (compare == PRS_COMPARE_GE ? have >= value : compare == PRS_COMPARE_EQ ? have == value : have != value)
            return 0;
        r = prs_wait_more(dev, &wait, PRS_WAIT_SIGNAL, (uint64_t)(uintptr_t)word, value, have);
    }
    return r;
}

/* ---- arrival counters: the last of n arrivals sends the signals of all ---- */

/**
 * An arrival counter, in device memory. The threads whose puts are in one group share it, so that the last of them
 * sends the signals of all. Each round has `expected` arrivals. Counters only grow, so that rounds need no reset and a
 * captured graph can be replayed. */
struct prs_arrival_counter {
    uint64_t deposited;                /* arrivals that have begun */
    uint64_t arrived;                  /* arrivals whose puts are all started and whose signal is in signals[] */
    uint64_t flushed;                  /* rounds whose signals are all started */
    struct prs_device_signal *signals; /* [expected] of the present round */
    uint32_t expected;                 /* arrivals in a round */
    uint32_t group;                    /* of the puts and signals */
    uint64_t pad[3];
};
PRS_STATIC_ASSERT(sizeof(struct prs_arrival_counter) == 64, "a counter has a line of its own");

/** Prepare a counter, by one thread, before any thread arrives. signals has room for `expected` entries; it stays the
 * caller's and must live as long as the counter is used. */
PRS_HD void prs_arrival_counter_init(struct prs_arrival_counter *counter, uint32_t group, uint32_t expected,
                                     struct prs_device_signal *signals)
{
    counter->deposited = 0;
    counter->arrived = 0;
    counter->flushed = 0;
    counter->signals = signals;
    counter->expected = expected;
    counter->group = group;
}

/** Start the signals of the round. Only the last arrival may call it, which prs_arrival_counter_arrive() does. */
PRS_HD int prs_arrival_counter_flush(const struct prs_device *dev, struct prs_arrival_counter *counter)
{
    for (uint32_t i = 0; i < counter->expected; i++) {
        struct prs_device_signal signal = counter->signals[i];
        int r;

        signal.group = counter->group;
        r = prs_signal(dev, &signal, NULL);
        if (r)
            return r;
    }
    /* [round-flushed] The signals of this round have been read before the next round overwrites them. Pairs with
     * prs_arrival_counter_arrive(). */
    prs_add_acq_rel_gpu(&counter->flushed, 1);
    return 0;
}

/**
 * Arrive: this thread has started its puts of the round, and its signal is to be sent with those of the others. Waits
 * only while the signals of the previous round are being sent. The last thread to arrive sends all signals. Return 1 to
 * that thread, 0 to the others, or the error. */
PRS_HD int prs_arrival_counter_arrive(const struct prs_device *dev, struct prs_arrival_counter *counter,
                                      const struct prs_device_signal *signal)
{
    struct prs_wait wait = {0, 0};
    uint64_t position, round;
    int r;

    if (!counter->expected) /* the counter expects none, so any arrival is an error */
        return prs_device_fail(dev, PRS_DEVICE_MISUSE, PRS_WAIT_ARRIVAL, counter->group, 0, 1);
    position = prs_add_relaxed_gpu(&counter->deposited, 1);
    round = position / counter->expected;
    for (;;) {
        uint64_t flushed = prs_load_acquire_gpu(&counter->flushed); /* [round-flushed] */

        if (flushed >= round)
            break;
        r = prs_wait_more(dev, &wait, PRS_WAIT_ROUND, counter->group, round, flushed);
        if (r)
            return r;
    }
    counter->signals[position % counter->expected] = *signal;
    /* [arrival-count] This thread has claimed its puts and stored its signal before it is counted. The last arrival
     * acquires all that the others did, so its signals get later positions than any put of the round. Pairs with
     * itself. */
    if ((prs_add_acq_rel_gpu(&counter->arrived, 1) + 1) % counter->expected != 0)
        return 0;
    r = prs_arrival_counter_flush(dev, counter);
    return r ? r : 1;
}

#endif
