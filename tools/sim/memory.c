/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/memory.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum {
    LINE = 64,
    CHUNK = 2 << 20, /* a huge page, with pieces of one size */
    PIECE_MOST = 128 << 10,
    SIZES = PIECE_MOST / LINE + 1,
};
#define ARENA ((size_t)32 * CHUNK)

/* The header of a chunk, whose address is a multiple of CHUNK. */
struct chunk {
    size_t piece_bytes; /* 0: one piece, longer than PIECE_MOST */
    size_t map_bytes;   /* bytes of that map */
};

/* A piece that is free. */
struct hole {
    struct hole *next;
};

/* Chunks come from arenas, which are listed to be unmapped in the end. */
struct arena {
    struct arena *next;
    size_t bytes;
};

static struct size {
    struct hole *holes;
    char *fresh, *end; /* the unused part of its newest chunk */
} sizes[SIZES];
static struct arena *arenas;
static char *chunk_next, *chunk_end;
static size_t used;

static void *map_aligned(size_t bytes)
{
    char *map = mmap(NULL, bytes + CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t before;

    if (map == MAP_FAILED)
        return NULL;
    before = -(uintptr_t)map % CHUNK;
    if (before)
        munmap(map, before);
    munmap(map + before + bytes, CHUNK - before);
    return map + before;
}

/* The first chunk of an arena holds only its list entry. */
static struct chunk *new_chunk(void)
{
    struct chunk *chunk;

    if (chunk_next == chunk_end) {
        struct arena *arena = map_aligned(ARENA);

        if (!arena)
            return NULL;
        *arena = (struct arena){.next = arenas, .bytes = ARENA};
        arenas = arena;
        chunk_next = (char *)arena + CHUNK;
        chunk_end = (char *)arena + ARENA;
        (void)madvise(chunk_next, ARENA - CHUNK, MADV_HUGEPAGE);
    }
    chunk = (struct chunk *)(void *)chunk_next;
    chunk_next += CHUNK;
    return chunk;
}

static void *take_long(size_t bytes)
{
    size_t map_bytes = (bytes + LINE + CHUNK - 1) / CHUNK * CHUNK;
    struct chunk *chunk = map_aligned(map_bytes);

    if (!chunk)
        return NULL;
    chunk->map_bytes = map_bytes;
    used += map_bytes;
    return (char *)chunk + LINE;
}

void *sim_malloc(size_t bytes)
{
    size_t rounded = (bytes + LINE - 1) / LINE * LINE;
    struct size *size = &sizes[rounded / LINE % SIZES];
    void *piece = size->holes;

    if (!bytes || rounded < bytes)
        return NULL;
    if (rounded > PIECE_MOST)
        return take_long(rounded);
    used += rounded;
    if (piece) {
        size->holes = size->holes->next;
        return piece;
    }
    if ((size_t)(size->end - size->fresh) < rounded) {
        struct chunk *chunk = new_chunk();

        if (!chunk) {
            used -= rounded;
            return NULL;
        }
        chunk->piece_bytes = rounded;
        size->fresh = (char *)chunk + LINE;
        size->end = (char *)chunk + CHUNK;
    }
    piece = size->fresh;
    size->fresh += rounded;
    return piece;
}

void *sim_calloc(size_t count, size_t each)
{
    void *piece = each && count > SIZE_MAX / 2 / each ? NULL : sim_malloc(count * each);

    return piece ? memset(piece, 0, count * each) : NULL;
}

void sim_free(void *piece)
{
    struct chunk *chunk = (struct chunk *)((uintptr_t)piece / CHUNK * CHUNK);
    struct hole *hole = piece;

    if (!piece)
        return;
    if (!chunk->piece_bytes) {
        used -= chunk->map_bytes;
        munmap(chunk, chunk->map_bytes);
        return;
    }
    used -= chunk->piece_bytes;
    hole->next = sizes[chunk->piece_bytes / LINE].holes;
    sizes[chunk->piece_bytes / LINE].holes = hole;
}

size_t sim_memory_used(void)
{
    return used;
}

void sim_memory_fini(void)
{
    while (arenas) {
        struct arena *arena = arenas;

        arenas = arena->next;
        munmap(arena, arena->bytes);
    }
    memset(sizes, 0, sizeof(sizes));
    chunk_next = chunk_end = NULL;
    used = 0;
}
