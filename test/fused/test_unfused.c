/* SPDX-License-Identifier: Apache-2.0 */
/* The unfused path's protocol on threads: for each rank one thread plays its stream, as fused/gemm/unfused/unfused.c
 * fills it, and another its NIC. Slices, slots and words are those of fused/gemm/unfused/exchange.h. Data are plain
 * memory, one word for two elements. Flags and signals have the kernels' memory orders, so that ThreadSanitizer finds a
 * missing wait. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fused/gemm/unfused/exchange.h"
#include "fused/gemm/unfused/inbox.h"
#include "test/fused/nic.h"
#include "test/fused/watch.h"

enum { WORLD = 4, POISON = 0x7fc07fc0 };

enum { EPOCHS = MODEL_LAUNCHES };

struct rank {
    struct model *model;
    struct prs_schedule s;
    uint8_t *staging, *result;                          /* plain */
    uint32_t flags[WORLD];                              /* atomic: by neighbour */
    uint32_t signals[PRS_EXCHANGE_WORDS * (WORLD - 1)]; /* atomic: by counterpart */
    uint32_t meetings, epoch, random;
    struct nic nic;
};

struct model {
    struct rank ranks[WORLD];
    struct prs_slice_bytes slice[2]; /* slices of launches in turn, the most rows first */
    struct watch watch;
    uint32_t epochs;
};

static const struct prs_slice_bytes *slice_of(const struct rank *me, uint32_t epoch)
{
    return &me->model->slice[epoch % 2];
}

static struct rank *neighbour(struct rank *me, uint32_t p)
{
    return &me->model->ranks[me->s.place.node * me->s.place.local_ranks +
                             (me->s.place.local_rank + p) % me->s.place.local_ranks];
}

/* A rank's data: its part of the product, or its rows of A. */
static uint32_t value(uint32_t epoch, uint32_t rank, uint64_t word)
{
    uint32_t x = epoch * 2654435761u ^ rank * 40503u ^ (uint32_t)word * 69069u;
    return x ^ x >> 15;
}

static uint32_t *word_at(uint8_t *memory, uint64_t byte)
{
    return (uint32_t *)(memory + byte);
}

static void model_copy(struct rank *me, uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    memcpy(to, from, bytes);
    watch_dawdle(&me->random);
}

/* ---- kernels ---- */
static bool meet(struct rank *me)
{
    const struct prs_schedule *s = &me->s;
    uint32_t count = ++me->meetings;
    for (uint32_t p = 1; p < s->place.local_ranks; p++)
        watch_raise(&neighbour(me, p)->flags[prs_index_after(
                        s->place.local_rank, (s->place.local_rank + p) % s->place.local_ranks, s->place.local_ranks)],
                    count);
    for (uint32_t slot = 0; slot + 1 < s->place.local_ranks; slot++)
        if (!watch_wait(&me->model->watch, &me->flags[slot], count, "arrival", s->place.rank, slot,
                        (uint32_t)(neighbour(me, slot + 1) - me->model->ranks)))
            return false;
    watch_dawdle(&me->random);
    return true;
}

static bool cross(struct rank *me, const struct prs_exchange *x, bool of_result)
{
    struct model *m = me->model;
    for (uint32_t i = 0; i + 1 < me->s.place.nodes; i++) {
        struct prs_exchange_part p = prs_exchange_with(&me->s, x, i);
        struct rank *to = &m->ranks[p.peer];
        /* MUTANT(model unfused) the credit of the launch before: s/epoch/epoch - 1/ */
        /* MUTANT(model unfused) sums and rows wait for credit: s/(x/(0 && x/ */
        if (x->credit &&
            !watch_wait(&m->watch, &me->signals[p.credit], me->epoch, "credit", me->s.place.rank, p.credit, p.peer))
            return false;
        if (p.bytes != 0)
            nic_post(&me->nic, &(struct nic_command){.from = word_at(of_result ? me->result : me->staging, p.from),
                                                     .to = word_at(of_result ? to->result : to->staging, p.to),
                                                     .words = (uint32_t)p.bytes / 4,
                                                     .peer = p.peer,
                                                     .group = x->word});
        /* MUTANT(model unfused) a signal stays behind its put: s/word/word + 2/ */
        nic_post(&me->nic, &(struct nic_command){
                               .to = &to->signals[p.signal], .value = me->epoch + 1, .peer = p.peer, .group = x->word});
    }
    for (uint32_t i = 0; i + 1 < me->s.place.nodes; i++) {
        struct prs_exchange_part p = prs_exchange_with(&me->s, x, i);
        /* MUTANT(model unfused) what crosses is awaited: s/+ 1// */
        if (!watch_wait(&m->watch, &me->signals[p.awaited], me->epoch + 1, of_result ? "slice" : "sums or rows",
                        me->s.place.rank, p.awaited, p.peer))
            return false;
    }
    watch_dawdle(&me->random);
    return true;
}

static bool finish(struct rank *me)
{
    struct prs_exchange nothing = {.word = PRS_EXCHANGE_BACK};
    /* MUTANT(model unfused) a launch ends when the neighbours have read: s/|| !meet(me)// */
    /* MUTANT(model unfused) a launch ends when its puts are complete: s/!nic_quiet(&me->nic) ||// */
    if (!nic_quiet(&me->nic) || !meet(me))
        return false;
    for (uint32_t i = 0; me->s.op != PRS_GEMM_ALLREDUCE && i + 1 < me->s.place.nodes; i++) {
        struct prs_exchange_part p = prs_exchange_with(&me->s, &nothing, i);
        nic_post(&me->nic, &(struct nic_command){.to = &me->model->ranks[p.peer].signals[p.signal],
                                                 .value = me->epoch + 1,
                                                 .peer = p.peer,
                                                 .group = PRS_EXCHANGE_BACK});
    }
    me->epoch++;
    return true;
}

/* Adds up a rank's slice, and stores it at offset `to` in `copies` neighbours. */
static void add_slice(struct rank *me, uint32_t rank, uint64_t to, uint32_t copies)
{
    const struct prs_slice_bytes *slice = slice_of(me, me->epoch);
    uint64_t first = prs_slice_offset(slice, rank), slot = prs_exchange_slot_bytes(slice);
    for (uint64_t at = 0; at < prs_slice_len(slice, rank); at += 4) {
        uint32_t sum = 0;
        for (uint32_t p = 0; p < me->s.place.local_ranks; p++)
            sum += *word_at(neighbour(me, p)->staging, first + at);
        for (uint32_t i = 0; rank == me->s.place.rank && i + 1 < me->s.place.nodes; i++)
            sum += *word_at(me->staging, prs_exchange_received(slice, me->s.place.nodes, 0) + i * slot + at);
        for (uint32_t p = 0; p < copies; p++)
            *word_at(rank == me->s.place.rank ? neighbour(me, p)->result : me->staging, to + at) = sum;
        watch_dawdle(&me->random);
    }
}

/* ---- the stream ---- */
static bool spread(struct rank *me, const struct prs_exchange *x, bool of_result)
{
    const struct prs_schedule *s = &me->s;
    if (!cross(me, x, of_result))
        return false;
    for (uint32_t i = 1; i < s->place.nodes; i++) {
        uint32_t block = (s->place.node + i) % s->place.nodes * s->place.local_ranks + s->place.local_rank;
        uint64_t first = prs_slice_offset(&x->slice, block), bytes = prs_slice_len(&x->slice, block);
        for (uint32_t p = 1; p < s->place.local_ranks; p++)
            model_copy(me, (of_result ? neighbour(me, p)->result : neighbour(me, p)->staging) + first,
                       (of_result ? me->result : me->staging) + first, bytes);
    }
    return true;
}

/* The product reads what was gathered. */
static bool gather(struct rank *me)
{
    struct model *m = me->model;
    const struct prs_slice_bytes *slice = slice_of(me, me->epoch);
    struct prs_exchange x = {.slice = *slice, .word = PRS_EXCHANGE_THERE, .credit = 1};
    for (uint32_t p = 0; p < me->s.place.local_ranks; p++) {
        for (uint64_t i = 0; i < prs_slice_len(slice, me->s.place.rank) / 4; i++)
            *word_at(neighbour(me, p)->staging, prs_slice_offset(slice, me->s.place.rank) + i * 4) =
                value(me->epoch, me->s.place.rank, i);
        watch_dawdle(&me->random);
    }
    /* MUTANT(model unfused) the product waits for the neighbours' rows: s/|| !meet(me)// */
    if (!spread(me, &x, false) || !meet(me))
        return false;
    for (uint32_t r = 0; r < WORLD; r++) {
        for (uint64_t i = 0; i < prs_slice_len(slice, r) / 4; i++) {
            uint32_t seen = *word_at(me->staging, prs_slice_offset(slice, r) + i * 4);
            watch_dawdle(&me->random);
            if (seen != value(me->epoch, r, i)) {
                watch_fail(&m->watch, "row", me->s.place.rank, (uint32_t)i, r, value(me->epoch, r, i), seen);
                return false;
            }
        }
    }
    return true;
}

static bool reduce(struct rank *me)
{
    const struct prs_schedule *s = &me->s;
    const struct prs_slice_bytes *slice = slice_of(me, me->epoch);
    bool all = s->op == PRS_GEMM_ALLREDUCE;
    struct prs_exchange sums = {.slice = *slice,
                                .source = prs_exchange_sent(slice, 0),
                                .target = prs_exchange_received(slice, s->place.nodes, 0),
                                .slot_bytes = prs_exchange_slot_bytes(slice),
                                .word = PRS_EXCHANGE_THERE,
                                .credit = !all};
    struct prs_exchange rows = {.slice = *slice, .word = PRS_EXCHANGE_BACK};
    for (uint64_t i = 0; i < slice->all_bytes / 4; i++)
        *word_at(me->staging, i * 4) = value(me->epoch, s->place.rank, i);
    /* MUTANT(model unfused) sums are added up when all are there: delete */
    if (!meet(me))
        return false;
    for (uint32_t i = 0; i + 1 < s->place.nodes; i++)
        add_slice(me, (s->place.node + 1 + i) % s->place.nodes * s->place.local_ranks + s->place.local_rank,
                  prs_exchange_sent(slice, i), 1);
    if (!cross(me, &sums, false))
        return false;
    add_slice(me, s->place.rank, prs_slice_offset(slice, s->place.rank), all ? s->place.local_ranks : 1);
    return all ? spread(me, &rows, true) : true;
}

/* Checks the launch's result on this rank. The owner may change it from then on. */
static bool check_result(struct rank *me, uint32_t epoch)
{
    const struct prs_slice_bytes *slice = slice_of(me, epoch);
    bool all = me->s.op == PRS_GEMM_ALLREDUCE;
    uint64_t first = all ? 0 : prs_slice_offset(slice, me->s.place.rank) / 4;
    uint64_t count = (all ? slice->all_bytes : prs_slice_len(slice, me->s.place.rank)) / 4;
    for (uint64_t i = first; i < first + count; i++) {
        uint32_t want = 0, seen = *word_at(me->result, i * 4);
        for (uint32_t r = 0; r < WORLD; r++)
            want += value(epoch, r, i);
        if (seen != want) {
            watch_fail(&me->model->watch, "sum", me->s.place.rank, (uint32_t)i, (uint32_t)(i * 4 / slice->each_bytes),
                       want, seen);
            return false;
        }
        *word_at(me->result, i * 4) = POISON;
    }
    return true;
}

static void *run_rank(void *arg)
{
    struct rank *me = arg;
    struct model *m = me->model;
    bool gathers = me->s.op == PRS_GEMM_ALLGATHER;
    for (uint32_t i = 1; i <= m->epochs; i++)
        if ((me->s.place.node + 1 == me->s.place.nodes && watch_leaves(&m->watch, i)) ||
            !(gathers ? gather(me) : reduce(me)) || !finish(me) || (!gathers && !check_result(me, me->epoch - 1)))
            break;
    return NULL;
}

/* ---- runs ---- */
struct shape {
    uint32_t op, nodes;
    uint64_t elements, fewer; /* elements of the whole matrix, in odd and even launches; fewer 0: always as many */
};

static void open_rank(struct model *m, uint32_t r, const struct shape *x)
{
    struct rank *me = &m->ranks[r];
    me->model = m;
    prs_schedule_init(&me->s, x->op, r, WORLD, x->nodes, WORLD, 1, 1, 1);
    me->staging = calloc(1, prs_exchange_received(&m->slice[0], x->nodes, x->nodes - 1));
    me->result = calloc(1, m->slice[0].all_bytes);
    cr_assert(me->staging && me->result != NULL);
    me->random = r * 7919 + 1;
    me->epoch = me->meetings = FIRST_EPOCH;
    for (uint32_t i = 0; i < WORLD; i++)
        me->flags[i] = FIRST_EPOCH;
    for (uint32_t i = 0; i < prs_exchange_word(&me->s, PRS_EXCHANGE_WORDS, 0); i++)
        me->signals[i] = FIRST_EPOCH;
}

static struct model *run_model(const struct shape *x, uint32_t epochs, uint32_t lost_after)
{
    struct model *m = calloc(1, sizeof(*m));
    pthread_t threads[WORLD];
    cr_assert_not_null(m);
    for (int i = 0; i < 2; i++) {
        uint64_t elements = i == 1 && x->fewer != 0 ? x->fewer : x->elements;
        struct prs_slice slice = prs_slice_of(elements, WORLD, x->op == PRS_GEMM_ALLREDUCE ? 8 : 1);
        m->slice[i] = prs_slice_scale(&slice, 2);
    }
    m->epochs = epochs;
    watch_init(&m->watch, WORLD, WORLD / x->nodes, lost_after);
    for (uint32_t r = 0; r < WORLD; r++)
        open_rank(m, r, x);
    for (uint32_t r = 0; r < WORLD; r++)
        nic_open(&m->ranks[r].nic, &m->watch, r + 1);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_eq(pthread_create(&threads[r], NULL, run_rank, &m->ranks[r]), 0);
    for (uint32_t r = 0; r < WORLD; r++)
        pthread_join(threads[r], NULL);
    for (uint32_t r = 0; r < WORLD; r++)
        nic_close(&m->ranks[r].nic);
    return m;
}

static void close_model(struct model *m)
{
    for (uint32_t r = 0; r < WORLD; r++) {
        free(m->ranks[r].staging);
        free(m->ranks[r].result);
    }
    free(m);
}

static void run_by_turns(uint32_t op, uint32_t nodes, uint64_t elements, uint64_t fewer, uint64_t puts_a_launch)
{
    struct model *m = run_model(&(struct shape){op, nodes, elements, fewer}, EPOCHS, 0);
    cr_assert_eq(watch_load(&m->watch.failed), 0, "%s", m->watch.text);
    for (uint32_t r = 0; r < WORLD; r++)
        cr_assert_eq(m->ranks[r].epoch, FIRST_EPOCH + EPOCHS, "rank %u stopped at epoch %u", r, m->ranks[r].epoch);
    cr_assert_eq(m->ranks[0].nic.puts, puts_a_launch * EPOCHS);
    cr_assert_eq(m->ranks[0].nic.signals, 2ull * (nodes - 1) * EPOCHS, "one each way to each counterpart");
    close_model(m);
}

static void run_soundly(uint32_t op, uint32_t nodes, uint64_t elements, uint64_t puts_a_launch)
{
    run_by_turns(op, nodes, elements, 0, puts_a_launch);
}

Test(unfused, sums_for_another_node_wait_until_the_last_launch_s_were_read, .timeout = 600)
{
    run_soundly(PRS_GEMM_REDUCE_SCATTER, 2, WORLD * 12, 1);
}

Test(unfused, sums_of_nodes_of_one_gpu, .timeout = 600)
{
    run_soundly(PRS_GEMM_REDUCE_SCATTER, 4, WORLD * 12, 3);
}

Test(unfused, rows_of_another_node_wait_until_the_last_launch_s_were_read, .timeout = 600)
{
    run_soundly(PRS_GEMM_ALLGATHER, 2, WORLD * 12, 1);
}

Test(unfused, rows_of_nodes_of_one_gpu, .timeout = 600)
{
    run_soundly(PRS_GEMM_ALLGATHER, 4, WORLD * 12, 3);
}

Test(unfused, a_finished_share_is_credit_too, .timeout = 600)
{
    run_soundly(PRS_GEMM_ALLREDUCE, 2, WORLD * 16, 2);
    run_soundly(PRS_GEMM_ALLREDUCE, 4, WORLD * 16, 6);
}

/* 26 elements: slices of 8, the last of 2; and 10, where two ranks have none: rank 0 has something to put, but gets
 * nothing to add from node 1. */
Test(unfused, ranks_may_have_less_to_add_up_or_nothing, .timeout = 600)
{
    run_soundly(PRS_GEMM_ALLREDUCE, 2, 26, 2);
    run_soundly(PRS_GEMM_ALLREDUCE, 2, 10, 1);
}

/* With fewer rows, slices and slots move to places from which a neighbour or the NIC may still read data of the last
 * launch. */
Test(unfused, launches_may_have_other_rows_than_the_last, .timeout = 900)
{
    for (uint32_t nodes = 2; nodes <= 4; nodes += 2) {
        run_by_turns(PRS_GEMM_REDUCE_SCATTER, nodes, WORLD * 12, WORLD * 2, nodes - 1);
        run_by_turns(PRS_GEMM_ALLGATHER, nodes, WORLD * 12, WORLD * 2, nodes - 1);
        run_by_turns(PRS_GEMM_ALLREDUCE, nodes, WORLD * 16, WORLD * 8, 2 * (nodes - 1));
    }
}

/* ---- sums by inboxes ---- */
static float number_of(uint32_t bf16)
{
    uint32_t bits = bf16 << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* 0 means: not arrived. Only not-a-numbers may arrive as other not-a-numbers. */
Test(unfused, every_pair_of_elements_arrives_as_it_is_and_none_as_nothing)
{
    for (uint32_t low = 0; low < 1 << 16; low++)
        for (uint32_t high = 0; high < 1 << 16; high += low % 97 == 0 || low == 0xffff ? 1 : 251) {
            uint32_t pair = high << 16 | low, sent = prs_inbox_sent(pair), received = prs_inbox_received(sent);
            cr_assert_neq(sent, 0, "%#x", pair);
            if (received != pair)
                cr_assert(isnan(number_of(low)) && isnan(number_of(high)) && isnan(number_of(received & 0xffff)) &&
                              isnan(number_of(received >> 16)),
                          "%#x arrives as %#x", pair, received);
        }
}

/* Plans of several sizes share an inbox: the second bank of each begins at the same place, after the first of the
 * largest. */
Test(unfused, banks_of_an_inbox_do_not_overlap)
{
    for (uint32_t ranks = 2; ranks <= 8; ranks++)
        for (uint64_t elements = 1; elements < 100; elements++) {
            uint64_t bank = prs_inbox_bank_bytes(ranks, elements, 2), bytes = prs_inbox_bytes(bank);
            for (uint64_t more = 0; more < 64; more += 7) {
                uint64_t step = prs_inbox_bank_step(bytes + more);
                cr_assert(step >= bank && step % 16 == 0 && PRS_INBOX_BANKS + step + bank <= bytes + more);
            }
        }
    for (uint32_t to = 0; to < 8; to++)
        for (uint32_t from = 0, slot = 0; from < 8; from++)
            if (from != to)
                cr_assert_eq(prs_inbox_slot(from, to), slot++);
}

/* The ranks of one node stop between two launches: every waiting thread reports its wait, and all end. */
Test(unfused, a_lost_node_is_named_by_whoever_waits_for_it, .timeout = 300)
{
    for (uint32_t op = PRS_GEMM_REDUCE_SCATTER; op <= PRS_GEMM_ALLREDUCE; op++) {
        unsigned waits, awaited;
        struct model *m = run_model(&(struct shape){op, 2, WORLD * 16}, 100, 20);
        cr_assert_eq(watch_load(&m->watch.failed), 2);
        cr_assert_eq(sscanf(m->watch.text, "rank %u: %*[^0-9] %*u of rank %u:", &waits, &awaited), 2, "%s",
                     m->watch.text);
        cr_assert(waits < 2 && awaited != waits, "%s", m->watch.text);
        for (uint32_t r = 0; r < WORLD; r++)
            cr_assert_leq(m->ranks[r].epoch - FIRST_EPOCH, 21, "rank %u went on to epoch %u", r, m->ranks[r].epoch);
        close_model(m);
    }
}
