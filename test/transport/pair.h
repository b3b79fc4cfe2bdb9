/* SPDX-License-Identifier: Apache-2.0 */
/* Two real processes, connected over whatever verbs devices there are: softnic, soft-RoCE or hardware. */
#ifndef TEST_TRANSPORT_PAIR_H
#define TEST_TRANSPORT_PAIR_H

#include <stdbool.h>
#include <stdint.h>

#include <perseus/perseus.h>

/* Long, since only a failure waits until then: soft-RoCE in QEMU or a shared core is slow. */
enum { PAIR_TIMEOUT_MS = 200000 };

struct pair_shared;

struct pair_spec {
    int rails[2];        /* of A (connects) and B (listens); 0: one */
    int queues_per_rail; /* 0: one */
    const char *hca[2];  /* NCCL_IB_HCA of A and B; NULL: unchanged */
    const char *policy;  /* NULL: auto */
    size_t buffer_bytes; /* registered on each side; 0: 1 MiB */
    uint32_t max_ops;
    bool words_on_device; /* the transport treats the words, which are host memory, as device memory */
    bool b_dies;          /* B may end without a farewell, as by pair_vanish() */
    bool exclusive_adds;  /* as in struct prs_peer_options */
    bool no_signals[2];   /* likewise, of A and B */
    bool no_atomics[2];   /* of A and B: the transport treats the NICs as without atomics */
};

/* One of the two processes. */
struct pair {
    const struct pair_spec *spec;
    struct pair_shared *shared;
    int side; /* 0: A, 1: B */
    uint32_t barriers;
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    struct prs_peer *peer;
    struct prs_region *region; /* data */
    uint8_t *buffer;
    size_t buffer_bytes;
    struct prs_region *words_region; /* strict memory */
    uint64_t *words;                 /* 512 words */
    /* The other side's. */
    uint64_t remote_buffer, remote_words;
    struct prs_keys remote_keys, remote_words_keys;
    /* The notifications that have arrived. */
    uint32_t notified;
    uint32_t count[PRS_NOTIFY_IDS];
    uint64_t bytes[PRS_NOTIFY_IDS];
    uint32_t order[4096]; /* ids in the order of arrival */
};

typedef void pair_fn(struct pair *pair);

/* The number of rails, found in a separate process; 0 also when there is no libibverbs. */
int pair_rails(void);
/* Whether their queues promise what this policy needs: order (RC does, SRD does not), or a fence. Found in a separate
 * process. */
bool pair_rails_keep(const char *policy);
/* Whether a lost rail can be replaced. Found in a separate process. */
bool pair_rails_fail_over(void);
/* Whether they have atomics. Likewise. */
bool pair_rails_add(void);
/* For main(), when called with "--rails" or "--side ...". */
int pair_rails_here(void);
int pair_side_main(char **argv);

/* Run a and b in two connected processes. The test fails unless both return. It is skipped if there are too few rails,
 * or if the rails cannot keep the policy. */
void pair_run(const struct pair_spec *spec, pair_fn *a, pair_fn *b);

/* In a side's process: print the message and exit. */
#define must(condition, ...)                                                                                           \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            pair_die(__FILE__, __LINE__, #condition, __VA_ARGS__);                                                     \
    } while (0)
void pair_die(const char *file, int line, const char *what, const char *format, ...)
    __attribute__((noreturn, format(printf, 4, 5)));

/* Whether this side's rails keep order. */
bool pair_in_order(const struct pair *pair);

/* Wait for the other side, making progress. */
void pair_barrier(struct pair *pair);
/* Exchange a 64-bit value with the other side; both call it. */
uint64_t pair_swap(struct pair *pair, uint64_t value);
/* Tell the other side something once, and ask whether it has done so. Neither makes progress. */
void pair_say(struct pair *pair);
bool pair_has_said(const struct pair *pair);

struct prs_put pair_put_of(struct pair *pair, size_t from, size_t to, size_t len_bytes, uint32_t id, uint32_t flags);
/* Start the put or signal, making progress while the peer returns PRS_BUSY. */
void pair_put(struct pair *pair, struct prs_op *op, const struct prs_put *put);
void pair_signal(struct pair *pair, struct prs_op *op, const struct prs_signal *signal);
void pair_wait_op(struct pair *pair, struct prs_op *op);
void pair_wait_notified(struct pair *pair, uint32_t total);
/* End this process at once, like a crash. */
void pair_vanish(void) __attribute__((noreturn));
/* Progress until the peer fails; return the error. */
int pair_wait_error(struct pair *pair);

/* The expected byte at position `at` of stream `seed`. */
static inline uint8_t pair_byte(uint32_t seed, size_t at)
{
    uint32_t x = (uint32_t)at * 2654435761u + seed * 40503u;

    return (uint8_t)(x >> 13 ^ x);
}
void pair_fill(uint8_t *bytes, size_t len_bytes, uint32_t seed);
void pair_check(const uint8_t *bytes, size_t len_bytes, uint32_t seed, const char *what);

#endif
