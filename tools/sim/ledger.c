/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/ledger.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *room_for(void *array, uint32_t count, uint32_t *room, size_t each)
{
    if (count < *room)
        return array;
    *room = *room ? 2 * *room : 1024;
    array = realloc(array, *room * each);
    if (!array) {
        fprintf(stderr, "perseus-sim: no memory for %u messages\n", *room);
        exit(1);
    }
    return array;
}

uint32_t sim_ledger_signal(struct sim_ledger *ledger, uint32_t from, uint32_t to, uint64_t token)
{
    ledger->signal = room_for(ledger->signal, ledger->signals, &ledger->signal_room, sizeof(*ledger->signal));
    ledger->signal[ledger->signals] = (struct sim_signal){.from = from, .to = to, .token = token};
    return ledger->signals++;
}

uint32_t sim_ledger_put(struct sim_ledger *ledger, uint32_t from, uint32_t to, uint64_t bytes, uint32_t signal)
{
    ledger->put = room_for(ledger->put, ledger->puts, &ledger->put_room, sizeof(*ledger->put));
    ledger->put[ledger->puts] =
        (struct sim_put){.from = from, .to = to, .bytes = bytes, .missing = bytes, .signal = signal};
    if (signal != SIM_NO_SIGNAL) {
        ledger->signal[signal].puts++;
        ledger->signal[signal].missing++;
    }
    return ledger->puts++;
}

void sim_ledger_arrive(struct sim_ledger *ledger, uint64_t address, uint64_t bytes)
{
    struct sim_put *put = &ledger->put[address / SIM_PUT_STRIDE];

    if (address / SIM_PUT_STRIDE >= ledger->puts || put->missing < bytes) {
        ledger->again++;
        return;
    }
    put->missing -= bytes;
    if (!put->missing && put->signal != SIM_NO_SIGNAL)
        ledger->signal[put->signal].missing--;
}

void sim_ledger_raise(struct sim_ledger *ledger, uint32_t signal, uint64_t now_ps)
{
    struct sim_signal *is = &ledger->signal[signal];

    if (is->raised++) {
        ledger->again++;
        return;
    }
    ledger->early += is->missing != 0;
    ledger->raised++;
    is->raised_ps = now_ps;
}

int sim_ledger_check(const struct sim_ledger *ledger)
{
    uint32_t bytes_missing = 0;

    for (uint32_t i = 0; i < ledger->puts; i++)
        bytes_missing += ledger->put[i].missing != 0;
    if (!ledger->early && !ledger->again && !bytes_missing && ledger->raised == ledger->signals)
        return 0;
    fprintf(stderr,
            "perseus-sim: order broken: %" PRIu64 " signals came before their bytes, %" PRIu64
            " came twice, %u of %u are missing; %u of %u puts have not arrived\n",
            ledger->early, ledger->again, ledger->signals - ledger->raised, ledger->signals, bytes_missing,
            ledger->puts);
    return -EPROTO;
}

void sim_ledger_clear(struct sim_ledger *ledger)
{
    ledger->puts = ledger->signals = ledger->raised = 0;
}

void sim_ledger_fini(struct sim_ledger *ledger)
{
    free(ledger->put);
    free(ledger->signal);
    memset(ledger, 0, sizeof(*ledger));
}
