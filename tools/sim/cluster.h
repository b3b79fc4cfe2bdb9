/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of a cluster, read from a small text file: one a line, "name value  # source". An unknown value is a
 * range, "low..high": a run takes one end of all ranges, or the middle. */
#ifndef SIM_CLUSTER_H
#define SIM_CLUSTER_H

#include <stdint.h>

enum sim_routing { SIM_ROUTING_ECMP, SIM_ROUTING_ADAPTIVE, SIM_ROUTING_SPRAY };

/* Which end of the ranges a run takes. FAST: the end at which the cluster is faster. */
enum sim_band { SIM_BAND_FAST, SIM_BAND_MIDDLE, SIM_BAND_SLOW };

/* Times in nanoseconds, rates in gigabits a second, unless the name says otherwise. cluster.c has a line on each. */
struct sim_cluster {
    char name[64];
    /* the NIC */
    double link_gbps, pcie_gbps, latency_ns, jitter_ns, wr_ns, doorbell_ns, fence_ns, atomic_ns, loopback_ns;
    double post_latency_ns, completion_latency_ns;
    double fence_strict, fence_stalls, in_order, adds, whole_messages, software;
    double quantum_bytes;
    double call_ns, request_ns, scatter_ns, copy_gbps; /* for a software NIC */
    /* the fabric */
    double routing, adaptive_unordered, nodes_per_leaf, oversubscription, hop_ns;
    /* the host */
    double step_ns, poll_ns, command_ns, post_ns, completion_ns, arrival_ns, raise_ns, pickup_ns;
    double drain_ns, drain_peer_ns;
    /* the GPU */
    double gpus_per_node, nics_per_gpu, push_ns, ring_latency_ns, see_ns, lost_ns, tcp_ns, tflops, nvlink_gbps,
        nvlink_latency_ns;
};

/* Read a file. Then take one end of the ranges. Return 0, or -errno: the reason is on stderr. */
int sim_cluster_read(const char *path, enum sim_band band, struct sim_cluster *out);
/* Set one parameter by "name=value"; low..high takes the band's end. Return 0 or -EINVAL, with a line on stderr. */
int sim_cluster_set(struct sim_cluster *cluster, const char *text, enum sim_band band);
/* Complain about values that no cluster can have. Return 0, or -EINVAL with a line on stderr. */
int sim_cluster_check(const struct sim_cluster *cluster);
/* Print every parameter with its meaning, for --parameters. */
void sim_cluster_print(const struct sim_cluster *cluster);

#endif
