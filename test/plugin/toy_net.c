/* SPDX-License-Identifier: Apache-2.0 */
/* A net plugin over loopback TCP that can be told to fail (TOY_FAULT). It tests perseus-netbench: a bench that does not
 * find faults proves nothing about a plugin. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "plugin/abi.h"

enum { REQUESTS = 1024, MAX_RECVS = 8 };

struct head {
    uint32_t size;
    int32_t tag;
};

struct toy_request {
    struct toy_comm *comm;
    int n, left;
    uint8_t *data[MAX_RECVS];
    int capacity[MAX_RECVS], tag[MAX_RECVS], size[MAX_RECVS];
};

struct toy_comm {
    int fd, is_send;
    struct head head;     /* of the message being transferred */
    size_t moved;         /* bytes of its head and data transferred so far */
    int entry;            /* receiving: index of its buffer */
    uint32_t first, next; /* requests that are not done, in order */
    struct toy_request request[REQUESTS];
};

static const char *fault;
static uint64_t messages;

static int has_fault(const char *name)
{
    return fault && strcmp(fault, name) == 0;
}

static net_result toy_init(net_log_fn *log)
{
    fault = getenv("TOY_FAULT");
    if (has_fault("init")) {
        log(NET_LOG_WARN, NET_LOG_INIT, __func__, __LINE__, "toy: told to fail");
        return NET_SYSTEM_ERROR;
    }
    return NET_SUCCESS;
}

static net_result toy_devices(int *count)
{
    *count = 1;
    return NET_SUCCESS;
}

static net_result toy_properties(int device, struct net_properties_v8 *properties)
{
    static char name[] = "toy0";

    *properties = (struct net_properties_v8){
        .name = name, .ptr_support = NET_PTR_HOST, .speed = 1000, .max_comms = 1024, .max_recvs = MAX_RECVS};
    return device == 0 ? NET_SUCCESS : NET_INVALID_ARGUMENT;
}

static net_result toy_listen(int device, void *handle, void **listen_comm)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof(address);
    struct toy_comm *comm = calloc(1, sizeof(*comm));

    (void)device;
    comm->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (bind(comm->fd, (struct sockaddr *)&address, size) || listen(comm->fd, 16) ||
        getsockname(comm->fd, (struct sockaddr *)&address, &size))
        return NET_SYSTEM_ERROR;
    memset(handle, 0, NET_HANDLE_BYTES);
    memcpy(handle, &address, sizeof(address));
    *listen_comm = comm;
    return NET_SUCCESS;
}

static net_result toy_connect(int device, void *handle, void **send_comm, struct net_device_handle **offload)
{
    struct toy_comm *comm = calloc(1, sizeof(*comm));

    (void)device;
    (void)offload;
    *send_comm = NULL;
    if (has_fault("connect"))
        return NET_SUCCESS; /* never connects */
    comm->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(comm->fd, handle, sizeof(struct sockaddr_in)) < 0)
        return NET_REMOTE_ERROR;
    fcntl(comm->fd, F_SETFL, O_NONBLOCK);
    comm->is_send = 1;
    *send_comm = comm;
    return NET_SUCCESS;
}

static net_result toy_accept(void *listen_comm, void **recv_comm, struct net_device_handle **offload)
{
    struct toy_comm *listening = listen_comm, *comm;
    int fd = accept4(listening->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

    (void)offload;
    *recv_comm = NULL;
    if (fd < 0)
        return errno == EAGAIN ? NET_SUCCESS : NET_SYSTEM_ERROR;
    comm = calloc(1, sizeof(*comm));
    comm->fd = fd;
    *recv_comm = comm;
    return NET_SUCCESS;
}

static net_result toy_reg(void *comm, void *data, size_t size, int type, void **mhandle)
{
    (void)comm;
    (void)size;
    *mhandle = data;
    return type == NET_PTR_HOST ? NET_SUCCESS : NET_INVALID_ARGUMENT;
}

static net_result toy_dereg(void *comm, void *mhandle)
{
    (void)comm;
    (void)mhandle;
    return NET_SUCCESS;
}

static net_result toy_isend(void *send_comm, void *data, int size, int tag, void *mhandle, void **out)
{
    struct toy_comm *comm = send_comm;
    struct toy_request *request = &comm->request[comm->next % REQUESTS];

    (void)mhandle;
    if (has_fault("unwritten"))
        return NET_SUCCESS;
    *out = NULL;
    if (comm->next - comm->first == REQUESTS)
        return NET_SUCCESS;
    if (has_fault("die") && ++messages == 20)
        raise(SIGKILL);
    *request = (struct toy_request){.comm = comm, .n = 1, .left = 1, .data = {data}, .size = {size}, .tag = {tag}};
    comm->next++;
    *out = request;
    return NET_SUCCESS;
}

static net_result toy_irecv(void *recv_comm, int n, void **data, int *sizes, int *tags, void **mhandles, void **out)
{
    struct toy_comm *comm = recv_comm;
    struct toy_request *request = &comm->request[comm->next % REQUESTS];

    (void)mhandles;
    *out = NULL;
    if (comm->next - comm->first == REQUESTS)
        return NET_SUCCESS;
    *request = (struct toy_request){.comm = comm, .n = n, .left = n};
    for (int i = 0; i < n; i++) {
        request->data[i] = data[i];
        request->capacity[i] = sizes[i];
        request->tag[i] = tags[i];
        request->size[i] = -1;
    }
    comm->next++;
    *out = request;
    return NET_SUCCESS;
}

/* Move some bytes of one piece. Return 1 when the piece is complete. */
static int move(struct toy_comm *comm, int is_send, void *piece, size_t from, size_t size)
{
    ssize_t n;

    if (comm->moved >= from + size)
        return 1;
    piece = (uint8_t *)piece + (comm->moved - from);
    n = is_send ? send(comm->fd, piece, from + size - comm->moved, MSG_NOSIGNAL)
                : recv(comm->fd, piece, from + size - comm->moved, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN))
        return -1;
    comm->moved += n > 0 ? (size_t)n : 0;
    return comm->moved >= from + size;
}

static void spoil(uint8_t *data, int size)
{
    if (has_fault("corrupt") && ++messages % 16 == 0 && size > 0)
        data[size / 2] ^= 0x10;
}

/* Transfer one message of the oldest request. Return 1 when it is complete, 0 if it is not yet, or -1. */
static int advance(struct toy_comm *comm, struct toy_request *request, int is_send)
{
    int r;

    if (comm->moved == 0 && is_send)
        comm->head = (struct head){.size = (uint32_t)request->size[0], .tag = request->tag[0]};
    r = move(comm, is_send, &comm->head, 0, sizeof(comm->head));
    if (r <= 0)
        return r;
    for (comm->entry = 0; !is_send && comm->entry < request->n; comm->entry++)
        if (request->size[comm->entry] < 0 && request->tag[comm->entry] == comm->head.tag)
            break;
    if (comm->entry == request->n || (!is_send && (int)comm->head.size > request->capacity[comm->entry]))
        return -1;
    r = move(comm, is_send, request->data[comm->entry], sizeof(comm->head), comm->head.size);
    if (r <= 0)
        return r;
    if (!is_send) {
        spoil(request->data[comm->entry], (int)comm->head.size);
        request->size[comm->entry] = (int)comm->head.size - has_fault("short");
    }
    comm->moved = 0;
    if (--request->left == 0)
        comm->first++;
    return 1;
}

static net_result toy_test(void *handle, int *done, int *sizes)
{
    struct toy_request *request = handle;
    struct toy_comm *comm = request->comm;

    *done = 0;
    if (has_fault("slow"))
        usleep(100000); /* as on a machine where each call waits for a processor */
    if (has_fault("hang"))
        return NET_SUCCESS;
    while (request->left && comm->first != comm->next) {
        struct toy_request *oldest = &comm->request[comm->first % REQUESTS];
        int r = advance(comm, oldest, comm->is_send);

        if (r < 0)
            return NET_REMOTE_ERROR;
        if (!r)
            return NET_SUCCESS;
    }
    *done = 1;
    if (sizes)
        memcpy(sizes, request->size, request->n * sizeof(int));
    return NET_SUCCESS;
}

static net_result toy_iflush(void *comm, int n, void **data, int *sizes, void **mhandles, void **request)
{
    (void)comm;
    (void)n;
    (void)data;
    (void)sizes;
    (void)mhandles;
    *request = NULL;
    return NET_SUCCESS;
}

static net_result toy_close(void *handle)
{
    struct toy_comm *comm = handle;

    if (!has_fault("leak"))
        close(comm->fd);
    free(comm);
    return NET_SUCCESS;
}

extern const struct net_v8 ncclNetPlugin_v8;
__attribute__((visibility("default"))) const struct net_v8 ncclNetPlugin_v8 = {
    .name = "Toy",
    .init = toy_init,
    .devices = toy_devices,
    .properties = toy_properties,
    .listen = toy_listen,
    .connect = toy_connect,
    .accept = toy_accept,
    .reg = toy_reg,
    .dereg = toy_dereg,
    .isend = toy_isend,
    .irecv = toy_irecv,
    .iflush = toy_iflush,
    .test = toy_test,
    .close_send = toy_close,
    .close_recv = toy_close,
    .close_listen = toy_close,
};
