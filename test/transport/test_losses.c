/* SPDX-License-Identifier: Apache-2.0 */
/* Several of three rails are lost, at once and one after the other. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "test/transport/loss.h"
#include "test/transport/pair.h"
#include "transport/peer/peer.h"
#include "transport/util/clock.h"

enum { RAILS = 3 };

struct losses {
    struct loss loss[MOST_LOSSES];
};

ParameterizedTestParameters(losses, messages_go_on_over_the_third_rail)
{
    static struct losses rows[] = {
        /* at once */
        {{{0, QUEUE_ERROR, 0, 50}, {0, QUEUE_ERROR, 1, 50}}},
        {{{1, QUEUE_ERROR, 0, 60}, {1, RAIL_ERROR, 2, 60}}},
        {{{0, PORT_DOWN, 0, 70}, {0, QUEUE_ERROR, 1, 70}}},
        {{{1, PORT_DOWN, 1, 80}, {1, PORT_DOWN, 2, 80}}},
        {{{0, QUEUE_ERROR, 0, 90}, {1, QUEUE_ERROR, 1, 90}}},
        {{{0, RAIL_ERROR, 2, 91}, {1, QUEUE_ERROR, 0, 89}}},
        {{{0, DEVICE_DEAD, 0, 50}, {1, DEVICE_DEAD, 1, 55}}},
        {{{0, QUEUE_ERROR, 0, 399}, {0, QUEUE_ERROR, 1, 399}}},
        /* shortly after each other */
        {{{1, QUEUE_ERROR, 0, 50}, {1, QUEUE_ERROR, 1, 58}}},
        /* the second one when the first is agreed on */
        {{{0, QUEUE_ERROR, 0, 50}, {0, QUEUE_ERROR, 1, 100, true}}},
        {{{1, RAIL_ERROR, 2, 40}, {0, QUEUE_ERROR, 0, 90, true}}},
        {{{0, PORT_DOWN, 0, 40}, {1, RAIL_ERROR, 1, 150, true}}},
    };
    return cr_make_param_array(struct losses, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct losses *row, losses, messages_go_on_over_the_third_rail)
{
    run_losses(row->loss, 2, RAILS, send_messages, receive_messages);
}

/* ---- all of them ---- */

enum { ALL_TIMEOUT_MS = 20000 }; /* a second or two, alone */

/* Messages go both ways until there is an error: each side soon gets one, which says what has happened. */
static void talk_until_all_are_lost(struct pair *pair)
{
    static struct prs_op op[SLOTS];
    uint64_t give_up_ms = prs_clock_ms() + ALL_TIMEOUT_MS;
    const char *error, *at;
    uint32_t sent = 0, queue;
    int r = 0;

    find_loss();
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        op[slot].status = 0;
    while (!r) {
        uint32_t slot = sent % SLOTS;
        struct prs_put put =
            pair_put_of(pair, slot * SLOT_BYTES, slot * SLOT_BYTES, length_of(sent), sent, PRS_PUT_NOTIFY);

        /* No side is told which messages have arrived, so no id is used twice. */
        if (sent < PRS_NOTIFY_IDS && op[slot].status != PRS_OP_PENDING) {
            r = prs_peer_put(pair->peer, &op[slot], &put);
            if (r == 0)
                lose_rails(pair, sent++);
        }
        r = r < 0 ? r : prs_peer_progress(pair->peer);
        r = r < 0 ? r : prs_peer_check_remote(pair->peer);
        must(prs_clock_ms() < give_up_ms, "no error, %u messages were sent", sent);
    }
    error = prs_peer_error(pair->peer);
    must(r == -ECONNRESET || r == -ETIMEDOUT || r == -ENETDOWN, "%d %s", r, error);
    /* It saw its last rail fail, or was told of it. */
    must(strstr(error, "no other rail is left") || strstr(error, "no rail is left: ") || strstr(error, " has failed: "),
         "%s", error);
    at = strstr(error, " on queue ");
    must(!at || (sscanf(at, " on queue %u", &queue) == 1 && queue < pair->peer->queues),
         "not of a queue to the peer: %s", error);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        must(op[slot].status != PRS_OP_PENDING, "op %u is still pending", slot);
}

ParameterizedTestParameters(losses, of_all_rails_are_a_named_error_at_both_sides)
{
    static struct losses rows[] = {
        {{{1, QUEUE_ERROR, 0, 50}, {1, QUEUE_ERROR, 1, 50}, {1, QUEUE_ERROR, 2, 50}}},
        {{{0, QUEUE_ERROR, 0, 50}, {1, QUEUE_ERROR, 1, 50}, {0, RAIL_ERROR, 2, 50}}},
        {{{0, QUEUE_ERROR, 0, 50}, {0, QUEUE_ERROR, 1, 55}, {0, QUEUE_ERROR, 2, 60}}},
        {{{1, RAIL_ERROR, 2, 50}, {0, RAIL_ERROR, 1, 70, true}, {1, QUEUE_ERROR, 0, 90, true}}},
    };
    return cr_make_param_array(struct losses, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct losses *row, losses, of_all_rails_are_a_named_error_at_both_sides)
{
    run_losses(row->loss, 3, RAILS, talk_until_all_are_lost, talk_until_all_are_lost);
}
