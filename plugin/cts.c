/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "plugin/cts.h"
#include "transport/util/error.h"

enum { RING_BYTES = CTS_RING * sizeof(struct cts_record) };

int cts_ring_open(struct prs_fabric *fabric, const struct prs_rail_set *rails, struct cts_record **ring,
                  struct prs_region **region)
{
    struct prs_mem mem = {.len_bytes = RING_BYTES, .kind = PRS_MEM_HOST, .dmabuf_fd = -1, .flags = PRS_MEM_STRICT};
    int r;

    mem.addr = mmap(NULL, RING_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mem.addr == MAP_FAILED)
        return prs_fail(-errno, "clear-to-send ring: cannot map %d bytes: %s", RING_BYTES, strerror(errno));
    r = prs_region_register(fabric, rails, &mem, region);
    if (r < 0) {
        munmap(mem.addr, RING_BYTES);
        return r;
    }
    *ring = mem.addr;
    return 0;
}

void cts_ring_close(struct cts_record *ring, struct prs_region *region)
{
    prs_region_release(region);
    if (ring)
        munmap(ring, RING_BYTES);
}
