/* SPDX-License-Identifier: Apache-2.0 */
/* Every put and signal of a run, by number, and the check of what the transport promises: a signal is raised once, and
 * after all bytes of the puts that it follows. No memory is written in a simulation. An address is a number of the
 * ledger, so the receiving NIC knows whose bytes arrive. */
#ifndef SIM_LEDGER_H
#define SIM_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

enum { SIM_NO_SIGNAL = UINT32_MAX };

struct sim_put {
    uint64_t bytes, missing;
    uint32_t from, to;
    uint32_t signal; /* the signal that follows it, or SIM_NO_SIGNAL */
};

struct sim_signal {
    uint32_t from, to;
    uint32_t missing; /* number of puts that have not arrived */
    uint32_t puts;
    uint32_t raised; /* how often it was raised */
    uint64_t issued_ps, raised_ps;
    uint64_t token; /* chosen by the workload */
};

struct sim_ledger {
    struct sim_put *put;
    struct sim_signal *signal;
    uint32_t puts, signals, put_room, signal_room;
    uint32_t raised;
    uint64_t early; /* signals that were raised before all their bytes had arrived */
    uint64_t again; /* signals that were raised more than once, and bytes that arrived twice */
};

/* Addresses: the number of a put times PUT_STRIDE, plus the offset of a part; the number of a signal times 8. */
#define SIM_PUT_STRIDE (1ull << 31)
#define SIM_PUT_MOST   (1u << 31)

/* Add a signal, and a put that it follows. Return the number. End the program when memory runs out. */
uint32_t sim_ledger_signal(struct sim_ledger *ledger, uint32_t from, uint32_t to, uint64_t token);
uint32_t sim_ledger_put(struct sim_ledger *ledger, uint32_t from, uint32_t to, uint64_t bytes, uint32_t signal);
void sim_ledger_arrive(struct sim_ledger *ledger, uint64_t address, uint64_t bytes);
void sim_ledger_raise(struct sim_ledger *ledger, uint32_t signal, uint64_t now_ps);
/* Are all signals raised and all bytes here? Return 0, or -EPROTO with a line on stderr that says which are not, or
 * which came early. */
int sim_ledger_check(const struct sim_ledger *ledger);
/* Forget everything: the next iteration begins. */
void sim_ledger_clear(struct sim_ledger *ledger);
void sim_ledger_fini(struct sim_ledger *ledger);

#endif
