/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/buffers.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum {
    SLOT_ALIGN = 64,
    SLOTS_MAX = 17,         /* one for the first iteration, and 16 for timed ones */
    SLOTS_BYTES = 64 << 20, /* larger sizes have two slots only */
};

size_t buffers_slot_bytes(size_t bytes)
{
    return (bytes + SLOT_ALIGN) / SLOT_ALIGN * SLOT_ALIGN;
}

int buffers_slots(const struct options *options, size_t bytes)
{
    size_t fit = SLOTS_BYTES / buffers_slot_bytes(bytes);
    int most = options->iters + options->warmup + 1;

    most = most < SLOTS_MAX ? most : SLOTS_MAX;
    return fit < 2 ? 2 : fit > (size_t)most ? most : (int)fit;
}

static uint8_t *map_bytes(size_t bytes)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return data == MAP_FAILED ? NULL : data;
}

bool buffers_has_input(enum op op)
{
    return op == OP_SENDRECV || op == OP_ALLTOALL;
}

bool buffers_has_scratch(enum op op)
{
    return op == OP_ALLREDUCE || op == OP_REDUCESCATTER;
}

int buffers_map(struct rank *rank)
{
    const struct options *options = rank->options;

    for (int i = 0; i < (int)options->sizes.count; i++) {
        size_t bytes = buffers_slot_bytes(options->sizes.value[i]) * buffers_slots(options, options->sizes.value[i]);

        rank->buffer_bytes = bytes > rank->buffer_bytes ? bytes : rank->buffer_bytes;
    }
    rank->scratch_bytes = buffers_has_scratch(options->op) ? stream_scratch_bytes(options) : 0;
    rank->output = map_bytes(rank->buffer_bytes);
    rank->input = buffers_has_input(options->op) ? map_bytes(rank->buffer_bytes) : NULL;
    rank->scratch = rank->scratch_bytes ? map_bytes(rank->scratch_bytes * rank->stream_count) : NULL;
    if (!rank->output || (buffers_has_input(options->op) && !rank->input) || (rank->scratch_bytes && !rank->scratch)) {
        fprintf(stderr, "perseus-netbench: rank %d: cannot map buffers of %zu bytes: %s\n", rank->id,
                rank->buffer_bytes, strerror(errno));
        return -ENOMEM;
    }
    for (int i = 0; i < rank->stream_count; i++) {
        struct stream *stream = &rank->streams[i];

        stream->output = (struct buffer){.data = rank->output, .bytes = rank->buffer_bytes};
        stream->input = (struct buffer){.data = rank->input, .bytes = rank->input ? rank->buffer_bytes : 0};
        stream->scratch = (struct buffer){.bytes = rank->scratch_bytes};
        if (rank->scratch)
            stream->scratch.data = rank->scratch + (size_t)i * rank->scratch_bytes;
    }
    return 0;
}

void buffers_unmap(struct rank *rank)
{
    if (rank->output)
        munmap(rank->output, rank->buffer_bytes);
    if (rank->input)
        munmap(rank->input, rank->buffer_bytes);
    if (rank->scratch)
        munmap(rank->scratch, rank->scratch_bytes * rank->stream_count);
    rank->output = rank->input = rank->scratch = NULL;
}
