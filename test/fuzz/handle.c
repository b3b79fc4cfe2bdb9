/* SPDX-License-Identifier: Apache-2.0 */
/* Handles, which travel through NCCL's bootstrap. An accepted handle that is made again from the values that were read
 * must be the same. */
#include <arpa/inet.h>

#include "test/fuzz/fuzz.h"
#include "transport/peer/handshake.h"

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    static const uint8_t cookie[16] = "sixteen bytes..";
    union prs_address address = {.v4 = {.sin_family = AF_INET, .sin_port = htons(4000)}};
    struct prs_handle handle;

    if (n > 1)
        return 0;
    if (n == 1)
        address.v6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(4000), .sin6_scope_id = 3};
    prs_handle_fill(cookie, &address, &handle);
    memcpy(out + 1, &handle, sizeof(struct prs_handle_wire));
    out[0] = 0;
    return sizeof(struct prs_handle_wire) + 1;
}

/* Let most inputs get past the check of the sum, as handles of a hostile rank would. */
static void correct_sum(struct prs_handle_wire *wire)
{
    uint32_t hash = 2166136261u;

    wire->check = 0;
    for (size_t i = 0; i < sizeof(*wire); i++)
        hash = (hash ^ ((const uint8_t *)wire)[i]) * 16777619u;
    wire->check = hash;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz_reader in = {data, bytes};
    struct prs_handle handle = {{0}}, again;
    struct prs_handle_wire wire;
    union prs_address address;
    uint8_t keep_sum, cookie[16];

    fuzz_take(&in, &keep_sum, 1);
    fuzz_take(&in, &wire, sizeof(wire));
    if (!(keep_sum & 1))
        correct_sum(&wire);
    memcpy(&handle, &wire, sizeof(wire));
    if (prs_handle_parse(&handle, cookie, &address))
        return 0;
    fuzz_accepted++;
    fuzz_require(wire.magic == PRS_HANDLE_MAGIC && wire.version == PRS_WIRE_VERSION, "a foreign handle was accepted");
    fuzz_require(!memcmp(cookie, wire.cookie, sizeof(cookie)), "another cookie");
    prs_handle_fill(cookie, &address, &again);
    fuzz_require(!memcmp(((struct prs_handle_wire *)&again)->address, wire.address, wire.family == 6 ? 16 : 4) &&
                     ((struct prs_handle_wire *)&again)->port == wire.port,
                 "another address");
    return 0;
}
