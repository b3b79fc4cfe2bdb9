/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank has for one plugin. */
#ifndef NETBENCH_RANK_STATE_H
#define NETBENCH_RANK_STATE_H

#include <pthread.h>

#include "tools/netbench/job.h"
#include "tools/netbench/net.h"
#include "tools/netbench/options.h"
#include "tools/netbench/stream.h"

enum phase { SERVICE_OPENING, SERVICE_OPEN, SERVICE_CLOSING };

struct rank {
    const struct options *options;
    struct job *job;
    int id;
    bool prints; /* the results */
    struct net net;
    int stream_count;
    struct stream *streams;
    uint8_t *input, *output, *scratch;
    size_t buffer_bytes, scratch_bytes; /* bytes of each buffer; scratch: for one stream */
    int complaints;                     /* lines printed about wrong data */
    uint64_t iteration;                 /* counts over all sizes, so that no two iterations have the same data */
    /* service thread */
    pthread_t service;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum phase phase;
    int service_result;
};

#endif
