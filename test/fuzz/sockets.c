/* SPDX-License-Identifier: Apache-2.0 */
/* The sockets with abstract names, which every process of the host may write to: softnic's wake-ups, and those over
 * which ranks of a node pass descriptors. Strangers wake nobody for nothing, and get no descriptor. */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "test/fuzz/fuzz.h"
#include "tools/softnic/world/wake.h"
#include "transport/host/fd_pass.h"

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    if (n > 2)
        return 0;
    memset(out, (int)n, 20);
    out[0] = (uint8_t)n;
    return n == 0 ? 2 : 17; /* 2: a token for a wake-up. 17: a cookie, correct (filled in later) or wrong */
}

static bool nothing(const void *of)
{
    return false;
}

static void wake(const uint8_t *data, size_t bytes)
{
    static struct sn_world *world; /* only its id and the next number are used */
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    uint32_t id;
    int fd, from, n;

    if (!world)
        world = mmap(NULL, sizeof(*world), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    fuzz_require(world != MAP_FAILED, "no memory");
    world->id = (uint64_t)getpid() << 20;
    fd = sn_wake_open(world, &id);
    from = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    fuzz_require(fd >= 0 && from >= 0, "sockets: %s", strerror(errno));
    n = snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "softnic.%016llx.%u",
                 (unsigned long long)world->id, id);
    for (int i = 0; i < 3; i++)
        (void)!sendto(from, data, bytes, MSG_DONTWAIT, (struct sockaddr *)&address,
                      (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n));
    sn_wake_settle(world, fd, id, nothing, NULL);
    fuzz_require(recv(fd, address.sun_path, 1, MSG_DONTWAIT) < 0, "a token without an event is left");
    close(from);
    close(fd);
}

/* A rank asks, a stranger says something else at the same time. Only the rank gets the files. */
static void pass_files(const uint8_t *data, size_t bytes)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct prs_fd_pass pass;
    char name[40] = "perseus-", drop[64];
    int files[PRS_FD_PASS_FILES], got[1][PRS_FD_PASS_FILES], stranger, n = 8, r;

    fuzz_require(prs_fd_pass_open(&pass) == 0, "no socket");
    for (size_t i = 0; i < sizeof(pass.address.name); i++)
        n += snprintf(address.sun_path + 1 + n, sizeof(address.sun_path) - 1 - (size_t)n, "%02x", pass.address.name[i]);
    memcpy(address.sun_path + 1, name, 8);
    stranger = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fuzz_require(stranger >= 0 && connect(stranger, (struct sockaddr *)&address,
                                          (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) == 0,
                 "connect: %s", strerror(errno));
    (void)!send(stranger, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    for (int i = 0; i < PRS_FD_PASS_FILES; i++)
        files[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    /* With itself: this process gives, and takes. */
    r = prs_fd_pass_exchange(&pass, files, &pass.address, 1, got, 5000);
    fuzz_require(r == 0, "a stranger stopped the exchange: %d", r);
    fuzz_require(recv(stranger, drop, sizeof(drop), MSG_DONTWAIT) <= 0, "the stranger got an answer");
    fuzz_accepted++;
    for (int i = 0; i < PRS_FD_PASS_FILES; i++) {
        close(files[i]);
        close(got[0][i]);
    }
    close(stranger);
    prs_fd_pass_close(&pass);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (!bytes)
        return 0;
    (data[0] % 2 ? pass_files : wake)(data + 1, bytes - 1);
    return 0;
}
