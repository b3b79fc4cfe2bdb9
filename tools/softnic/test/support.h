/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers of the software NIC's tests: a world of their own, connected queue pairs, and bounded waits. */
#ifndef TEST_SOFTNIC_SUPPORT_H
#define TEST_SOFTNIC_SUPPORT_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "tools/softnic/world/world.h"

enum { END_BYTES = 1 << 16, END_WRS = 64, ALL_ACCESS = 15, LARGEST_PAGE = 1 << 16 /* of any kernel */ };
enum { WAIT_S = 60 }; /* limit for what must come: only a failure waits this long, but a machine may take seconds */

/* One side of a connection, with a registered buffer. */
struct end {
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint8_t *buf;
    size_t bytes;
};

/* The address of an end, for the other side. */
struct address {
    uint32_t qpn;
    uint32_t rkey;
    uint64_t addr;
    union ibv_gid gid;
};

struct end_options {
    uint32_t dev;  /* index in the device list */
    size_t bytes;  /* buffer; 0: END_BYTES */
    uint32_t wrs;  /* send and receive queue length; 0: END_WRS */
    uint32_t cqe;  /* 0: four times wrs */
    bool with_srq; /* receive through a shared queue */
    bool extended; /* for ibv_wr_* */
    struct ibv_comp_channel *channel;
    struct ibv_context *ctx; /* NULL: open one */
};

struct link_options {
    uint8_t rnr_retry, retry_cnt, timeout, min_rnr_timer;
    unsigned int access;
    uint8_t rd_atomic;
};

/* Make a new world with this configuration (NULL: defaults, two devices) and let this process use it. It is unlinked
 * when the process ends. */
struct sn_world *test_world(const struct sn_config *config);
void test_world_drop(void);

void end_open(struct end *end, const struct end_options *options);
/* The steps before and after making an end's queue pair: device and completion queue; the buffer. */
uint32_t end_begin(struct end *end, const struct end_options *options); /* returns the length of its queues */
void end_register(struct end *end, unsigned int access);
void end_close(struct end *end);
/* Close one that was opened in the context of another, which stays open. */
void end_leave(struct end *end);
struct address end_address(const struct end *end);
extern const struct link_options link_default;
void end_connect(struct end *end, const struct address *to, const struct link_options *options);

/* Open two connected ends in this process, on devices 0 and 1. */
void pair_open(struct end *a, struct end *b);
void pair_open_with(struct end *a, struct end *b, const struct end_options *ao, const struct end_options *bo,
                    const struct link_options *link);

/* Post a request on a part of end's buffer. Return the result of ibv_post_send. */
int post(struct end *end, enum ibv_wr_opcode opcode, size_t off, uint32_t length, const struct address *to,
         size_t to_off, unsigned int flags, uint64_t wr_id);
int post_recv(struct end *end, size_t off, uint32_t length, uint64_t wr_id);

/* Wait up to WAIT_S for one completion; without one, the test fails and prints `what`. */
struct ibv_wc wait_wc(struct ibv_cq *cq, const char *what);
/* True if no completion comes within us microseconds. */
bool quiet(struct ibv_cq *cq, unsigned us);

/* Run child(fd, arg) in a forked process; its fd and *fd are the two ends of a socket pair. */
pid_t spawn(void (*child)(int fd, void *arg), void *arg, int *fd);
void tell(int fd, const void *data, size_t bytes);
void hear(int fd, void *data, size_t bytes);
/* Wait for the child, which must exit with status 0. */
void reap(pid_t pid);

/* The function that a second process runs with its end, which is connected to ours; fd leads to us. */
typedef void act_fn(struct end *end, const struct address *peer, int fd);
/* A new world with an end on its device 0, connected to one on device 1 of a second process that runs its act and
 * exits. */
struct couple {
    struct sn_world *world;
    struct end end;
    struct address peer;
    pid_t pid;
    int fd;
};
struct couple couple_open(act_fn *act);
/* An act that only waits for a byte: the NIC does everything. */
void wait_for_word(struct end *end, const struct address *peer, int fd);

/* As cr_assert, but works in a spawned child, too. */
void require(bool ok, const char *format, ...) __attribute__((format(printf, 2, 3)));

uint64_t now_ns(void);

#endif
