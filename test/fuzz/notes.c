/* SPDX-License-Identifier: Apache-2.0 */
/* Notes of lost and returned rails, as the other side of a connection may send them at any time: each is refused, or
 * leads to a state in which both sides can continue and close. An input is a row of acts. */
#include "test/fuzz/fuzz.h"
#include "transport/nic/verbs/address.h"
#include "test/support/fake_sides.h"
#include "transport/peer/health.h"
#include "transport/peer/note.h"
#include "transport/peer/recovery.h"

/* NOTE is followed by a note, which the side gets. ALONE: it cannot fail over. LATER: a note of a loss is old. */
enum act { NOTE, LOSE, READ, STEP, LOOK, ANSWER, ALONE, LATER, ACTS };

struct act_head {
    uint8_t act, side;
};

static size_t add(uint8_t *out, enum act act, int side)
{
    memcpy(out, &(struct act_head){(uint8_t)act, (uint8_t)side}, sizeof(struct act_head));
    return sizeof(struct act_head);
}

static size_t add_note(uint8_t *out, int side, const struct prs_wire_note *note)
{
    size_t bytes = add(out, NOTE, side);

    memcpy(out + bytes, note, sizeof(*note));
    return bytes + sizeof(*note);
}

/* 0: a rail is lost and comes back. 1, 2: the same, where one side is played by notes. 3, 4, 5: the other notes. 6, 7:
 * the last of them without failover, and twice, of a rank that cannot be and with a text that has no end. */
size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    int side = n == 1 ? B : A;
    struct prs_wire_note note = {.type = PRS_NOTE_DOWN, .why = "a cable"};
    struct prs_rail_address port;
    size_t bytes = 0;

    if (n > 7)
        return 0;
    fuzz_require(room >= 3 * sizeof(note) + 100, "no room");
    if (n >= 5) {
        if (n > 5)
            bytes += add(out, ALONE, B);
        note = (struct prs_wire_note){.type = PRS_NOTE_LOST, .rank = n == 7 ? UINT32_MAX : 1, .loss = "no answer"};
        if (n == 7)
            memset(note.loss, 'x', sizeof(note.loss));
        bytes += add_note(out + bytes, B, &note);
        if (n == 7)
            bytes += add_note(out + bytes, B, &note);
        return bytes + add(out + bytes, LATER, B);
    }
    if (n >= 3) {
        note.type = n == 3 ? PRS_NOTE_FAILED : PRS_NOTE_FAREWELL;
        return add_note(out, B, &note);
    }
    bytes += n ? add_note(out, side, &note) : add(out, LOSE, A);
    for (int i = 0; i < 12; i++)
        bytes += add(out + bytes, READ + i / 2 % 3, n ? side : i % 2);
    note = (struct prs_wire_note){.type = n == 1 ? PRS_NOTE_OFFER : PRS_NOTE_ACCEPT, .epoch = 1};
    prs_verbs_tell_port(&(struct prs_verbs_own_port){.port = {.mtu = 5, .reads = 16}}, &port);
    note.where = port.told;
    prs_verbs_tell_queue(&(struct prs_verbs_queue){.number = 7}, &note.queue[0]);
    if (n)
        bytes += add_note(out + bytes, side, &note);
    for (int i = 0; i < 12; i++)
        bytes += add(out + bytes, READ + i / 2 % 3, n ? side : i % 2);
    note = (struct prs_wire_note){.type = PRS_NOTE_READY, .epoch = 1};
    if (n == 1)
        bytes += add_note(out + bytes, side, &note);
    return bytes;
}

/* Check that no NIC would refuse the values with which queues were connected. */
static void check_queues(void)
{
    for (int s = 0; s < 2; s++)
        for (uint32_t path = 0; sides[s].peer.failover && path < PATHS; path++) {
            const struct prs_failover_path *at = &sides[s].peer.failover->path[path];
            const struct fake_link *link = at->next ? fake(at->next) : fake(sides[s].peer.link[path]);

            fuzz_require(!link->reads || (link->mtu >= 1 && link->mtu <= 5), "side %d, path %u: MTU %u, reads %u", s,
                         path, link->mtu, link->reads);
            fuzz_require(!(link->mtu && !link->reads), "side %d, path %u: connected without reads", s, path);
            fuzz_require(at->stage <= PRS_PATH_JOINED && at->attempt <= PRS_ATTEMPT_ENDED, "no such stage");
        }
    fuzz_require(links_open <= 4 * PATHS, "%u links", links_open);
}

/* Nothing arrives for long after a note of a loss: then the peer fails, and says which rank was lost. */
static void outlast_loss(struct prs_peer *peer)
{
    char rank[32];

    if (!peer->loss || !peer->loss->since_ns)
        return;
    peer->loss->since_ns -= 1000000000;
    (void)prs_health_check(peer);
    snprintf(rank, sizeof(rank), " has lost rank %u: ", peer->loss->rank);
    fuzz_require(peer->error && strstr(peer->error_text, rank), "%d: %s", peer->error, peer->error_text);
}

static void act_on(struct fuzz_reader *in, enum act act, int s)
{
    struct prs_peer *peer = &sides[s].peer;
    struct prs_wire_note note;

    if (!peer->failover && (act == STEP || act == LOOK))
        act = READ;
    switch (act) {
    case NOTE:
        fuzz_take(in, &note, sizeof(note));
        prs_note_send(&sides[!s].peer, &note);
        fuzz_accepted += prs_failover_read(peer) == PRS_AGAIN;
        break;
    case LOSE:
        (void)prs_failover_start(peer, in->left ? *in->data % PATHS : 0, "lost by the input");
        break;
    case READ:
        (void)prs_failover_read(peer);
        break;
    case STEP:
        (void)prs_failover_step(peer);
        break;
    case LOOK:
        peer->failover->look_ns = 0;
        peer->failover->looks = 1u << 20;
        (void)prs_failover_recover(peer);
        break;
    case ALONE: /* as of a connection whose other side has failover off: no rail was lost yet */
        for (uint32_t path = 0; peer->failover && path < PATHS; path++)
            if (peer->failover->path[path].stage != PRS_PATH_UP || peer->failover->path[path].next)
                return;
        prs_failover_close(peer);
        break;
    case LATER:
        outlast_loss(peer);
        break;
    default:
        answers = !answers;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz_reader in = {data, bytes};

    open_sides();
    while (in.left) {
        struct act_head head;
        int s;

        fuzz_take(&in, &head, sizeof(head));
        s = head.side % 2;
        if (!sides[s].peer.error && !sides[s].peer.remote_closed)
            act_on(&in, (enum act)(head.act % ACTS), s);
        check_queues();
    }
    close_sides();
    return 0;
}
