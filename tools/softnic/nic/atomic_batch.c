/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/nic/atomic_batch.h"

#include <errno.h>
#include <stdlib.h>

#include "tools/softnic/nic/execute.h"
#include "tools/softnic/nic/pipeline.h"
#include "tools/softnic/nic/responder.h"
#include "tools/softnic/world/lock.h"

enum {
    ATOMICS = 32, /* after so many atomics the locks are given back, since others need them, too */
    READS = 4,
    SPAN_BYTES = 4096, /* words within this distance are read by one copy */
    WORD = 8,
    RUN_MOST = 8, /* more neighbours than these arrive sooner as one copy than as words, one after the other */
};
#define WRITE_PATIENCE_NS 4000000000ull
static_assert(SN_ATOMIC_LOCKS == 64, "struct sn_batch has a bit for each");
static_assert((int)ATOMICS <= (int)SN_MAX_SPANS, "one copy has all its words");

struct word {
    uint64_t addr, value;
    uint32_t mr;
    uint32_t end; /* the value is valid for requests below this position: later ones were not posted when it was read */
    bool known;
    bool made;    /* atomics of the batch have changed it */
    bool changed; /* the value is not yet in the copy queue */
};

struct read {
    struct sn_span span;
    struct sn_queued_copy queued_copy;
    uint64_t bytes[SPAN_BYTES / WORD];
};

struct sn_batch {
    uint32_t proc;    /* whose memory it is */
    uint64_t locks;   /* which of world->atomic_locks it holds */
    unsigned made;    /* atomics carried out since the first lock was taken */
    unsigned pending; /* atomics in the pipeline, including one that waits for its word */
    unsigned words;
    struct word word[ATOMICS];
    bool reading; /* the last atomic in the pipeline waits for its word */
    unsigned reads, reads_done;
    bool writing; /* some changed words of the requests [first, end) are not yet in the copy queue */
    uint32_t first, end;
    uint64_t give_up; /* while writing: when to give up */
    unsigned stores, stores_done;
    struct sn_queued_copy store[ATOMICS];
    struct read read[READS];
};

static struct word *word_find(struct sn_batch *b, uint32_t proc, const struct sn_span *span)
{
    for (unsigned i = 0; proc == b->proc && i < b->words; i++)
        if (b->word[i].addr == span->addr)
            return &b->word[i];
    return NULL;
}

static bool word_holds(const struct word *word, uint32_t at)
{
    return word->known && (int32_t)(word->end - at) > 0;
}

/* The word that the request at this position names, if its value is known, or NULL. */
static struct word *word_known(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at)
{
    struct sn_span span;
    struct word *word = NULL;

    if (qp->batch && sn_responder_grants(target, sn_wqe_at(qp, at), &span))
        word = word_find(qp->batch, target->owner - 1, &span);
    return word && word_holds(word, at) ? word : NULL;
}

bool sn_batch_knows(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at, unsigned before)
{
    return word_known(qp, target, at) && qp->batch->made + before < ATOMICS;
}

bool sn_batch_waits(const struct sn_qp *qp)
{
    return qp->batch && (qp->batch->reading || qp->batch->writing);
}

bool sn_batch_covers(const struct sn_qp *qp, uint32_t proc, const struct sn_span *span)
{
    const struct sn_batch *b = qp->batch;

    for (unsigned i = 0; b && proc == b->proc && i < b->words; i++)
        if (b->word[i].addr < span->addr + span->length && b->word[i].addr + WORD > span->addr)
            return true;
    return false;
}

/* A lock is only tried: a thread that holds one waits for no other, so there is no deadlock, in whatever order threads
 * want them. */
static bool lock_have(struct sn_batch *b, uint64_t addr)
{
    unsigned i = sn_atomic_lock_of(b->proc, addr);
    uint32_t tries = 0; /* not used: the request is tried again later */

    if (b->locks >> i & 1)
        return true;
    if (!sn_lock_try(&sn_self->world->atomic_locks[i], &tries))
        return false;
    b->locks |= 1ull << i;
    return true;
}

/* Give back the locks that no word needs. */
static void drop_unneeded_locks(struct sn_batch *b)
{
    uint64_t needed = 0;

    for (unsigned i = 0; i < b->words; i++)
        needed |= 1ull << sn_atomic_lock_of(b->proc, b->word[i].addr);
    for (uint64_t left = b->locks & ~needed; left; left &= left - 1)
        sn_lock_drop(&sn_self->world->atomic_locks[__builtin_ctzll(left)]);
    b->locks &= needed;
}

/* Find a read that can include the word, and extend it; or start one. NULL: there are too many. */
static struct read *read_grow(struct sn_batch *b, const struct sn_span *span)
{
    for (unsigned i = 0; i < b->reads; i++) {
        struct sn_span *all = &b->read[i].span;
        uint64_t from = span->addr < all->addr ? span->addr : all->addr;
        uint64_t to = span->addr > all->addr + all->length - WORD ? span->addr + WORD : all->addr + all->length;

        if (span->mr == all->mr && to - from <= SPAN_BYTES) {
            all->addr = from;
            all->length = to - from;
            return &b->read[i];
        }
    }
    if (b->reads == READS)
        return NULL;
    b->read[b->reads].span = *span;
    return &b->read[b->reads++];
}

/* Gather the words of the atomics in [at, end) that are not known yet, or not for these requests, and take their
 * locks. */
static void words_gather(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at, uint32_t end)
{
    struct sn_batch *b = qp->batch;
    unsigned made = b->made;

    b->reads = b->reads_done = 0;
    for (; at != end && made < ATOMICS && b->words < ATOMICS; at++) {
        const struct sn_wqe *w = sn_wqe_at(qp, at);
        struct word *word;
        struct sn_span span;

        if (!sn_is_atomic(w->opcode))
            continue;
        if (!sn_responder_grants(target, w, &span) || span.kind == SN_MEM_HOST)
            return;
        made++;
        word = word_find(b, b->proc, &span);
        if (word && (!word->known || word_holds(word, at)))
            continue;
        if (!lock_have(b, span.addr) || !read_grow(b, &span))
            return;
        if (!word)
            b->word[b->words++] = (struct word){.addr = span.addr, .mr = span.mr, .end = end};
        else
            *word = (struct word){.addr = span.addr, .mr = span.mr, .end = end, .made = word->made};
    }
}

static int read_enqueue(struct sn_qp *qp, struct read *read)
{
    struct sn_copy c; /* large, so only members that a copy of one span reads are filled in */

    c.world = sn_self->world;
    c.self = c.dst_proc = sn_self->proc;
    c.src_proc = qp->batch->proc;
    c.length = read->span.length;
    c.dst_count = c.src_count = 1;
    c.src[0] = read->span;
    c.dst[0] = (struct sn_span){.addr = (uintptr_t)read->bytes, .length = read->span.length, .mr = SN_NONE};
    return sn_device_mem->enqueue(&c, &qp->queue, &read->queued_copy);
}

static bool word_within(const struct word *word, const struct sn_span *span)
{
    return word->mr == span->mr && word->addr >= span->addr && word->addr < span->addr + span->length;
}

/* Forget words whose values will not arrive. Locks of atomics in flight must stay. */
static void forget_unread_words(struct sn_batch *b)
{
    unsigned kept = 0;

    for (unsigned i = 0; i < b->words; i++) {
        bool keep = b->word[i].known || b->word[i].made;

        for (unsigned r = 0; r < b->reads && !keep; r++)
            keep = word_within(&b->word[i], &b->read[r].span);
        if (keep)
            b->word[kept++] = b->word[i];
    }
    b->words = kept;
    drop_unneeded_locks(b);
}

bool sn_batch_read(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at, uint32_t end)
{
    struct sn_wqe *w = sn_wqe_at(qp, at);
    struct sn_batch *b = qp->batch ? qp->batch : calloc(1, sizeof(*b));
    unsigned pipeline_begun = 0;
    int r = SN_COPY_BUSY;

    if (!b)
        return false; /* an atomic that is executed alone needs no batch */
    qp->batch = b;
    if (!b->locks)
        b->proc = target->owner - 1;
    words_gather(qp, target, at, end);
    while (pipeline_begun < b->reads && (r = read_enqueue(qp, &b->read[pipeline_begun])) == 0)
        pipeline_begun++;
    b->reads = pipeline_begun;
    forget_unread_words(b);
    if (!pipeline_begun && r == SN_COPY_BUSY)
        return false;
    b->reading = pipeline_begun > 0;
    w->queue_error = pipeline_begun ? 0 : r;
    w->stores = b->stores;
    b->pending++;
    return true;
}

/* Return 0 or SN_COPY_BUSY; or -errno, after forgetting the words that were being read. */
static int reads_poll(struct sn_qp *qp, bool ask)
{
    struct sn_batch *b = qp->batch;
    int error = 0;

    for (; b->reads_done < b->reads; b->reads_done++) {
        struct read *read = &b->read[b->reads_done];
        int r = sn_device_mem->queued_done(&qp->queue, &read->queued_copy, ask);

        if (r == SN_COPY_BUSY)
            return r;
        error = r ? r : error;
        for (unsigned i = 0; i < b->words && !r; i++) {
            struct word *word = &b->word[i];

            if (!word->known && word_within(word, &read->span)) {
                word->known = true;
                word->value = read->bytes[(word->addr - read->span.addr) / WORD];
            }
        }
    }
    b->reading = false;
    b->reads = 0;
    forget_unread_words(b);
    return error;
}

static void word_change(struct word *word, struct sn_wqe *w)
{
    uint64_t value = word->value;

    w->result = value;
    if (w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
        value += w->compare_add;
    else if (value == w->compare_add)
        value = w->swap;
    word->made = true;
    word->changed |= value != word->value;
    word->value = value;
}

static int by_address(const void *a, const void *b)
{
    const struct word *x = a, *y = b;

    return x->addr < y->addr ? -1 : x->addr > y->addr;
}

/* How many changed words, from this one on, follow each other. */
static unsigned neighbours(const struct word *word, unsigned left)
{
    unsigned n = 0;

    while (n < left && word[n].changed && word[n].mr == word->mr && word[n].addr == word->addr + n * WORD)
        n++;
    return n;
}

/* Queue the changed words among these that lie in the first one's registration, each apart or as one piece. Return as
 * enqueue in device_mem.h. */
static int changed_enqueue(struct sn_qp *qp, struct word *word, unsigned count, bool one_piece)
{
    struct sn_batch *b = qp->batch;
    struct word *queued[ATOMICS];
    uint64_t values[ATOMICS];
    struct sn_copy c; /* large, so only the members that are used are filled in */
    unsigned n = 0;
    int r;

    c.dst_count = 0;
    for (unsigned i = 0; i < count; i++) {
        if (!word[i].changed || word[i].mr != word->mr)
            continue;
        if (n == 0 || !one_piece)
            c.dst[c.dst_count++] = (struct sn_span){.addr = word[i].addr, .mr = word->mr, .kind = SN_MEM_CUDA};
        c.dst[c.dst_count - 1].length += WORD;
        values[n] = word[i].value;
        queued[n++] = &word[i];
    }
    c.world = sn_self->world;
    c.self = c.src_proc = sn_self->proc;
    c.dst_proc = b->proc;
    c.length = n * WORD;
    c.src_count = 1;
    c.src[0] = (struct sn_span){.addr = (uintptr_t)values, .length = c.length, .mr = SN_NONE};
    r = sn_device_mem->enqueue(&c, &qp->queue, &b->store[b->stores]);
    for (unsigned i = 0; i < n && r == 0; i++)
        queued[i]->changed = false;
    b->stores += r == 0;
    return r;
}

/* The queue does not accept it now: there is too little free pinned memory until other copies are done. */
static int write_later(struct sn_qp *qp)
{
    if (sn_now_ns() < qp->batch->give_up)
        return SN_COPY_BUSY;
    sn_log("queue pair %u: the copier did not take a word of an atomic for 4 s (no pinned memory left, or the "
           "registration is gone)",
           qp->qpn);
    return -EIO;
}

/* Put the changed words into the copy queue, as far as it takes them now. */
static void words_write(struct sn_qp *qp)
{
    struct sn_batch *b = qp->batch;
    int r = 0;

    qsort(b->word, b->words, sizeof(b->word[0]), by_address);
    for (unsigned i = 0; i < b->words && r >= 0; i++) {
        struct word *word = &b->word[i];
        unsigned run = neighbours(word, b->words - i);

        if (!run)
            continue;
        r = run > RUN_MOST ? SN_COPY_BUSY : changed_enqueue(qp, word, b->words - i, false);
        if (r == SN_COPY_BUSY)
            r = changed_enqueue(qp, word, run, true);
        if (r == SN_COPY_BUSY)
            r = write_later(qp);
        if (r == SN_COPY_BUSY)
            return;
    }
    b->writing = false;
    for (uint32_t at = b->first; at != b->end; at++) {
        struct sn_wqe *w = sn_wqe_at(qp, at);

        if (!sn_is_atomic(w->opcode))
            continue;
        w->stores = b->stores;
        /* on error the first atomic fails, and the queue pair with it */
        w->queue_error = r;
    }
}

void sn_batch_change(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at, uint32_t end)
{
    struct sn_batch *b = qp->batch;
    unsigned before = b ? b->made : 0;

    for (uint32_t i = at; i != end; i++) {
        struct sn_wqe *w = sn_wqe_at(qp, i);

        if (!sn_is_atomic(w->opcode))
            continue;
        word_change(word_known(qp, target, i), w);
        w->queue_error = 0;
        b->made++;
        b->pending++;
    }
    if (!b || b->made == before)
        return;
    b->first = at;
    b->end = end;
    b->writing = true;
    b->give_up = sn_now_ns() + WRITE_PATIENCE_NS;
    words_write(qp);
}

/* End the writes of the batch's requests that are done, although atomics before them are not. Otherwise the words could
 * wait for ever: for a place in the queue that these writes hold, or for the end of the queue's copies on another
 * GPU. */
static void end_writes(struct sn_qp *qp)
{
    struct sn_batch *b = qp->batch;

    if ((int32_t)(qp->exec - b->first) < 0)
        return; /* other copies are before them in the queue */
    for (uint32_t at = qp->exec; at != b->end; at++) {
        struct sn_wqe *w = sn_wqe_at(qp, at);
        int r;

        if (sn_is_atomic(w->opcode) || w->copied || w->queue_error)
            continue;
        r = sn_device_mem->queued_done(&qp->queue, &w->queued_copy, true);
        if (r == SN_COPY_BUSY)
            return;
        w->copied = true;
        w->queue_error = r;
    }
}

int sn_batch_done(struct sn_qp *qp, const struct sn_wqe *w, bool ask)
{
    struct sn_batch *b = qp->batch;
    int r;

    if (b->reading && qp->in_pipeline == 1) {
        r = reads_poll(qp, ask);
        return r ? r : SN_EXEC_WORD_KNOWN;
    }
    if (b->writing) {
        end_writes(qp);
        words_write(qp);
    }
    if (b->writing)
        return SN_EXEC_BUSY;
    for (r = 0; b->stores_done < w->stores && !r; b->stores_done += r != SN_COPY_BUSY)
        r = sn_device_mem->queued_done(&qp->queue, &b->store[b->stores_done], ask);
    return r ? r : w->queue_error;
}

void sn_batch_close(struct sn_qp *qp)
{
    struct sn_batch *b = qp->batch;

    if (!b || b->pending)
        return;
    b->words = b->made = b->stores = b->stores_done = 0;
    drop_unneeded_locks(b);
}

void sn_batch_leave(struct sn_qp *qp, bool goes_on)
{
    qp->batch->pending--;
    if (!goes_on)
        sn_batch_close(qp);
}
