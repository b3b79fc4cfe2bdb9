/* SPDX-License-Identifier: Apache-2.0 */
/* One simulated cluster: ranks with proxies, their NICs, and the network between them. README.md is the map.
 *
 * The transport runs here unmodified: a rank's kernel writes commands into a real ring (ring.c), dispatch.c takes them,
 * peer.c, order*.c and tally.c turn them into requests, and records.c raises signals at the receiver. The simulator
 * adds the NIC back end below peer.c, the clock, and the cost of each step. */
#ifndef SIM_SIM_H
#define SIM_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "tools/sim/cluster.h"
#include "tools/sim/events.h"
#include "tools/sim/explain.h"
#include "transport/gpu/dispatch.h"
#include "transport/nic/fabric.h"
#include "transport/nic/nic.h"
#include "transport/nic/region.h"
#include "transport/gpu/ring.h"
#include "transport/gpu/window.h"

enum sim_event_kind {
    SIM_STEP,       /* a rank: a round of its proxy */
    SIM_ISSUE,      /* a rank: its kernel writes commands into the ring */
    SIM_DOORBELL,   /* a queue: its NIC sees the requests before position a */
    SIM_SEND,       /* a port: it can send again */
    SIM_UPLINK,     /* a queue: a part of request a begins to arrive at its leaf switch */
    SIM_DOWNLINK,   /* a queue: a part of request a begins to arrive at its spine switch */
    SIM_ARRIVE,     /* a queue: a part of request a begins to arrive at the receiving port */
    SIM_DELIVER,    /* a queue: request a takes effect */
    SIM_EXECUTED,   /* a queue: thread a of a software NIC has carried out what it began */
    SIM_DONE,       /* a queue: the sender learns that request a is complete */
    SIM_UNANSWERED, /* a queue: its NIC gives up waiting for an answer over a lost rail */
    SIM_UNFENCE,    /* a queue: what its fence waits for is complete */
    SIM_NEAR,       /* between GPUs of a node: put a has arrived, or, with b, signal a */
    SIM_SEEN,       /* the kernel of the target continues because of signal a */
    SIM_QUIET,      /* the kernel of rank a sees that all its commands are complete */
    SIM_CALL,       /* the workload: a and b are its own */
    SIM_RAIL,       /* a rail is lost, or, with a 0, is back */
    SIM_NOTE,       /* argument: one end of a connection. A message arrives on its TCP stream */
};

/* A direction of a cable: busy until free_ps. */
struct sim_clock {
    uint64_t free_ps;
};

/* One port of a NIC, with all queues that send over it. */
struct sim_port {
    struct sim_queue *first, *last; /* queues with requests to send, in turn */
    uint64_t nic_free_ps, send_free_ps, receive_free_ps;
    uint32_t rank, rail, leaf;
    bool sending; /* a SIM_SEND event is on its way */
    bool down;    /* its rail is lost */
};

/* The network's state of the request in a slot. */
enum sim_request_state { SIM_REQUEST_NEW, SIM_REQUEST_WAITS_AT_FENCE, SIM_REQUEST_ARRIVED };

/* A queue of a NIC. Positions count requests, as in the order engine. */
struct sim_queue {
    struct prs_queue base;
    struct sim_end *end; /* this side of the connection, which sends */
    struct sim_port *from, *to;
    const struct prs_wr *ring; /* the order engine's ring: a request stays there until it is complete */
    uint32_t mask;
    uint32_t posted, sending, delivered; /* next positions; all requests below `delivered` have arrived */
    uint32_t sent_bytes;                 /* bytes of request `sending` that are sent */
    uint32_t last_read;                  /* position after the last add; a fence of the specification waits for it */
    uint64_t last_done_ps, last_read_ps; /* when the sender knows that these are complete */
    struct sim_queue *next;              /* the next queue of the port */
    uint32_t way;                        /* uplink that request `sending` uses */
    bool loopback, in_turn;
    bool silent;       /* nothing of it crosses the network any more (rails.c) */
    bool unanswered;   /* it is silent, and the sender waits for an answer */
    bool fenced;       /* request `sending` waits at its fence, and with fence_stalls all after it */
    uint8_t *state;    /* [mask + 1] enum sim_request_state */
    uint32_t *missing; /* [mask + 1]: bytes that have not arrived. Used only if parts take different paths */
    /* For a software NIC (executor.c): */
    uint32_t executed;          /* next position; all requests below it have taken effect. Delivered requests are due */
    uint64_t *done_ps;          /* [mask + 1]: when the sender may learn that a due request is complete */
    struct sim_queue *next_due; /* the next queue that waits for a thread */
    bool lined_up;              /* it waits for a thread, or a thread runs it */
    uint32_t taken;             /* polled arrivals from the other side's queue with the same number */
};

/* A thread that runs queues of a software NIC. */
struct sim_thread {
    struct sim_queue *queue; /* NULL: none */
    uint32_t first;          /* position at which the run began */
    uint32_t requests;       /* requests in the call that the thread makes */
    uint64_t bytes;          /* bytes of the run */
};
enum { SIM_THREAD_PROXY, SIM_THREAD_ENGINE, SIM_THREADS };

/* Completions and arrivals of one link that its proxy has not polled. */
struct sim_link {
    struct prs_link base;
    struct sim_end *end;
    uint32_t loopback_depth; /* send slots of its loopback queue */
    struct prs_queue *queues[PRS_ORDER_MAX_QUEUES_PER_RAIL];
    struct sim_completion {
        uint32_t kind, queue, value, bytes;
    } * completion;
    uint32_t first, count, room; /* first entry, entries and room of a ring; room is a power of two */
};

/* The domain of all rails. */
struct sim_device {
    struct prs_domain base;
    struct sim *sim;
};

/* One side of a connection. */
struct sim_end {
    struct prs_peer *peer;
    struct prs_team *rank; /* the rank of this side */
    struct sim_end *other;
    uint32_t events;           /* events in the heap, and requests in flight, of this side's queues */
    uint32_t receives;         /* arrivals with immediates */
    bool listed;               /* it is in the rank's list of sides that need progress */
    struct sim_stream *stream; /* NULL: no rail is lost in this run */
};

struct sim_pair {
    struct sim_end end[2];
    struct sim_pair *newer, *older;
};

/* Counts of a rank over all its connections, including closed ones. */
struct sim_counts {
    uint64_t puts, signals, fences, drains, doorbells, work_requests, completions, arrivals, records, bytes;
};

/* A rank: a GPU, its proxy and its NICs. */
struct prs_team {
    struct sim *sim;
    uint32_t rank;
    struct prs_ring ring;
    struct prs_windows windows;
    struct prs_dispatch dispatch;
    struct sim_end **end;    /* [world] by peer; NULL: not connected */
    bool *met;               /* [world]: was connected at some time */
    uint32_t connected;      /* number of peers ever connected: a proxy closes no connection, so it polls all of them */
    struct sim_end **listed; /* sides that need progress */
    uint32_t listed_count, listed_room;
    struct prs_cmd_fields *command; /* FIFO of commands that the kernel has issued and that are not in the ring yet */
    uint64_t command_first, command_end;
    uint32_t command_room;
    uint64_t claimed;    /* positions of the ring written so far */
    uint64_t cpu_ps;     /* the proxy's core is busy until then; inside a round: the current time of the round */
    uint64_t nvlink_ps;  /* the link to the other GPUs of the node is busy until then */
    uint64_t compute_ps; /* the product units are busy until then */
    bool awake;          /* a SIM_STEP event is on its way */
    bool issuing;
    bool busy;                              /* it has issued commands that are not complete */
    bool agreeing;                          /* it polls because a lost rail is not replaced yet */
    bool draining;                          /* value of dispatch.drain.waits when the last round ended */
    struct sim_queue *due_first, *due_last; /* queues of a software NIC that wait for a thread */
    struct sim_thread thread[SIM_THREADS];
    uint32_t polls_left; /* peers that the proxy has not polled in this round */
    uint64_t fences_charged;
    uint32_t fences_open;     /* requests that wait at fences */
    struct sim_counts counts; /* counts of closed connections */
    struct sim_explain explain;
};

struct sim_workload;

/* A rail of all GPUs of a node that is lost at some time. */
struct sim_loss {
    bool wanted;
    uint32_t rail, node;
    uint64_t at_ps;
    uint64_t back_ps; /* when connections that are made later can use the rail again; 0: never */
};

/* The cost of replacing a lost rail, summed over all sides of connections. */
struct sim_lost {
    uint64_t sides;
    uint64_t taken, replayed, bytes; /* requests that had arrived; requests and bytes that were sent again */
    uint64_t agree_ps;               /* longest time from an error until both sides agreed */
    uint64_t last_ps;                /* when the last side continued */
};

struct sim_options {
    const struct sim_cluster *cluster;
    uint32_t ranks;
    enum prs_policy policy;
    uint32_t queues_per_rail;
    uint32_t window;      /* operations in flight of one connection */
    uint32_t ring_slots;  /* slots in the ring of each rank */
    uint32_t connections; /* connections that are kept open; beyond that, settled ones are closed */
    uint32_t
        turn_commands; /* not 0: one thread issues this many commands and then steps the proxy, as perseus-perf does */
    bool turn_pairs;   /* a put and its signal count as one command */
    uint64_t seed;
    bool explain, statistics;
    struct sim_loss loss;
};

struct sim {
    struct sim_options options;
    struct sim_cluster cluster;
    struct sim_events events;
    uint32_t rails; /* rails of a rank */
    struct prs_team *rank;
    struct sim_port *port; /* [ranks * rails] */
    struct sim_clock *uplink, *downlink;
    uint32_t leaves_per_rail, uplinks; /* uplinks of each leaf; 0: there are no spines */
    double uplink_gbps;
    struct prs_fabric fabric;
    struct prs_region region;
    struct prs_window_remote *remotes;
    struct sim_end *opening; /* the side for which prs_setup_open() is running */
    struct sim_pair *newest, *oldest;
    uint64_t pairs_open, pairs_most, pairs_made;
    size_t ranks_bytes; /* bytes of sim_malloc() before the first connection */
    struct sim_ledger *ledger;
    struct sim_stream **stream; /* [number] */
    uint32_t streams, stream_room;
    struct sim_lost lost;
    const struct sim_workload *workload;
    void *workload_state;
    uint64_t random;
    int error;
};

/* A workload. Every function may be NULL. */
struct sim_workload {
    void (*start)(struct sim *sim);
    /* called when the kernel of the rank sees a signal */
    void (*raised)(struct sim *sim, uint32_t rank, uint32_t signal);
    /* called when all commands of the rank are complete */
    void (*quiet)(struct sim *sim, uint32_t rank);
    void (*call)(struct sim *sim, uint32_t rank, uint64_t token); /* sim_call_at() */
    void (*notified)(struct sim *sim, uint32_t rank, uint32_t from, uint32_t id, uint64_t bytes);
};

/* Return 0, or -errno with a line on stderr. */
int sim_open(struct sim *sim, const struct sim_options *options);
void sim_close(struct sim *sim);
/* Run until no event is left. Return 0, or the first error, with a line on stderr. */
int sim_run(struct sim *sim, const struct sim_workload *workload, void *state);

static inline uint64_t sim_ps(double ns)
{
    return (uint64_t)(ns * SIM_PS_PER_NS + 0.5);
}

static inline uint64_t sim_transfer_ps(uint64_t bytes, double gbps)
{
    return (uint64_t)((double)bytes * 8000 / gbps + 0.5);
}

static inline double sim_now_us(const struct sim *sim)
{
    return (double)sim->events.now_ps / 1e6;
}

/* A number below n, reproducible from the seed. */
uint64_t sim_random(struct sim *sim, uint64_t n);

/* ---- for workloads ---- */

/* The kernel of a rank issues a put, or a signal, by the ledger's number (ledger.h). Between GPUs of a node they go
 * over NVLink and take no proxy. */
void sim_put(struct sim *sim, uint32_t put, uint32_t group);
void sim_signal(struct sim *sim, uint32_t signal, uint32_t group);
/* The rank computes for this time, after the work that it already has; then call(rank, token). */
void sim_compute(struct sim *sim, uint32_t rank, double ns, uint64_t token);
void sim_call_at(struct sim *sim, uint64_t at_ps, uint32_t rank, uint64_t token);
/* The counters of a rank, or of all ranks. */
struct sim_counts sim_rank_counts(struct sim *sim, uint32_t rank);
struct sim_counts sim_all_counts(struct sim *sim);

/* ---- between the files of this folder ---- */

void sim_add_event(struct sim *sim, uint64_t at_ps, enum sim_event_kind kind, void *object, uint32_t a, uint64_t b);
void sim_fail(struct sim *sim, int error);

/* rank.c */
int sim_ranks_open(struct sim *sim);
void sim_ranks_close(struct sim *sim);
void sim_rank_step(struct prs_team *rank);
void sim_rank_issue(struct prs_team *rank);
void sim_rank_wake(struct prs_team *rank, uint64_t at_ps);
/* The proxy has run a queue of a software NIC. */
void sim_rank_polled(struct prs_team *rank);
void sim_rank_list(struct prs_team *rank, struct sim_end *end);
struct sim_end *sim_end_of(struct prs_peer *peer);
void sim_notified(void *user, uint32_t id, uint64_t bytes);

/* connect.c */
int sim_connect(struct sim *sim, uint32_t a, uint32_t b);
void sim_disconnect_all(struct sim *sim);
struct prs_peer *sim_peer(struct sim *sim, uint32_t rank, uint32_t other);

/* nic.c */
extern struct prs_nic_ops sim_nic; /* has the properties of the cluster's NIC */
void sim_nic_init(const struct sim_cluster *cluster);
void sim_nic_event(struct sim *sim, const struct sim_event *event);
void sim_nic_take_effect(struct sim *sim, struct sim_queue *queue, uint32_t position);

/* executor.c */
/* A request of the queue is due. */
void sim_executor_due(struct sim_queue *queue);
/* The proxy polls, and begins to run a queue that is due. Return false when none is. sim_rank_polled() follows. */
bool sim_executor_poll(struct prs_team *rank);
void sim_executor_event(struct sim_queue *queue, uint32_t thread);

/* rails.c */
void sim_rails_open(struct sim *sim);
/* prs_nic_ops.stop */
void sim_rails_stop(struct prs_link *base);
/* The rail is lost, or back. */
void sim_rails_event(struct sim *sim, bool down);
int sim_rails_connect(struct sim *sim, struct sim_end *end);
void sim_rails_disconnect(struct sim_end *end);
/* An event of a silent queue: it has no effect, and the sender gets no answer. */
void sim_rails_silent_event(struct sim *sim, const struct sim_event *event);
void sim_rails_note(struct sim_end *end, uint64_t token);
/* Must the proxy poll, since both sides do not agree yet? */
bool sim_rails_agreeing(const struct sim_end *end);
/* Called before the proxy polls this side. */
void sim_rails_poll(struct sim_end *end);

/* fabric.c */
int sim_fabric_init(struct sim *sim);
void sim_fabric_fini(struct sim *sim);
/* A part of a request leaves its port. Adds the event of its first bit's arrival at the receiving port or, over a
 * spine, at its leaf switch. */
void sim_fabric_send(struct sim *sim, struct sim_queue *queue, uint32_t position, uint32_t bytes, bool last,
                     uint64_t left_ps);
void sim_fabric_uplink(struct sim *sim, struct sim_queue *queue, uint32_t position, uint64_t part);
void sim_fabric_downlink(struct sim *sim, struct sim_queue *queue, uint32_t position, uint64_t part);
/* The latency in one direction, without transfer time. */
uint64_t sim_fabric_latency(const struct sim *sim, const struct sim_queue *queue);

/* The b of SIM_UPLINK, SIM_DOWNLINK and SIM_ARRIVE: a part of a request. */
static inline uint64_t sim_part(uint32_t bytes, bool last, uint32_t way)
{
    return (uint64_t)way << 40 | (uint64_t)bytes << 1 | last;
}
static inline uint32_t sim_part_bytes(uint64_t part)
{
    return (uint32_t)(part >> 1);
}
static inline bool sim_part_last(uint64_t part)
{
    return part & 1;
}
static inline uint32_t sim_part_way(uint64_t part)
{
    return (uint32_t)(part >> 40);
}

/* Keys say what the address of a request refers to. */
enum sim_key {
    SIM_KEY_MEMORY = 1, /* real memory: the records and credits of a connection */
    SIM_KEY_DATA = 2,   /* a put of the ledger */
    SIM_KEY_SIGNAL = 3, /* a signal of the ledger */
};
enum { SIM_WINDOW_DATA, SIM_WINDOW_SIGNALS, SIM_WINDOWS };

/* A signal word has been written. */
void sim_raise(struct sim *sim, uint64_t address);

#endif
