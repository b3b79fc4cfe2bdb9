/* SPDX-License-Identifier: Apache-2.0 */
/* Private data of a connection that was accepted: of the plugin's senders, and of the members of a team, as GIN and the
 * GPU's proxy have. The first byte chooses. */
#include "test/fuzz/fuzz.h"
#include "plugin/sender_info.h"
#include "transport/connect/team_state.h"
#include "transport/nic/fabric.h"
#include "transport/peer/peer.h"

enum { PLUGIN, TEAM, KINDS, RANKS = 5 };

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    struct sender_info info = {.magic = SENDER_INFO_MAGIC,
                               .version = SENDER_INFO_VERSION,
                               .ring_records = CTS_RING,
                               .ring_addr = 0x7f0000001000};
    struct prs_team_hello hello = {PRS_TEAM_HELLO_MAGIC, RANKS - 1, RANKS, 3, {1, 2, 3}};

    out[0] = (uint8_t)n;
    if (n == PLUGIN)
        memcpy(out + 1, &info, sizeof(info));
    if (n == TEAM)
        memcpy(out + 1, &hello, sizeof(hello));
    fuzz_require(room > sizeof(hello) + sizeof(info), "no room");
    return n == PLUGIN ? 1 + sizeof(info) : n == TEAM ? 1 + sizeof(hello) : 0;
}

/* The peer belongs to the parent of a fork, so that closing it frees nothing. */
static void join(const uint8_t *data, uint32_t bytes)
{
    static struct prs_fabric parents;
    static struct prs_peer peer;
    struct prs_team_options options = {.fabric = &parents, .world = RANKS};
    struct prs_team *team = calloc(1, sizeof(*team));
    uint32_t members = 0;

    fuzz_require(team, "no memory");
    team->options = options;
    pthread_mutex_init(&team->lock, NULL);
    pthread_mutex_init(&team->text_lock, NULL);
    memset(&peer, 0, sizeof(peer));
    peer.fabric = &parents;
    peer.stream_fd = -1;
    peer.private_bytes = bytes;
    memcpy(peer.private_data, data, bytes);
    prs_team_file_accepted_locked(team, &peer);
    prs_team_file_accepted_locked(team, &peer); /* a second one of the rank */
    for (uint32_t i = 0; i < PRS_TEAM_CONTEXTS; i++)
        for (uint32_t rank = 0; team->contexts[i].key && rank < RANKS; rank++)
            members += team->contexts[i].members[rank].accepted != NULL;
    fuzz_require(members <= 1, "%u members", members);
    fuzz_accepted += members;
    prs_team_close(team);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct sender_info info;

    if (bytes < 1 || bytes - 1 > PRS_PRIVATE_DATA_BYTES) /* the handshake takes no more */
        return 0;
    if (data[0] % KINDS == TEAM)
        join(data + 1, (uint32_t)bytes - 1);
    else if (sender_info_read(data + 1, (uint32_t)bytes - 1, "a peer", &info) == 0) {
        fuzz_require(info.ring_records == CTS_RING, "%u records", info.ring_records);
        fuzz_accepted++;
    }
    return 0;
}
