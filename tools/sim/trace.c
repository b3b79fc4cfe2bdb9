/* SPDX-License-Identifier: Apache-2.0 */
/* A recorded trace: a line "us rank put PEER BYTES GROUP" or "us rank signal PEER GROUP" for each command of a kernel.
 * A signal follows the puts of its group from the same rank to the same peer since the signal before. Lines are in the
 * order of their times; # begins a comment. Each command is issued at its time, however late others are. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/sim/fused.h"
#include "tools/sim/ledger.h"

struct line {
    double us;
    uint32_t rank, peer, group;
    uint64_t bytes; /* 0: a signal */
};

struct state {
    const struct work *work;
    struct line *line;
    uint32_t lines, next;
    uint32_t *follows; /* [line of a put]: the line of its signal, or UINT32_MAX */
    uint32_t *signal;  /* [line of a signal]: its number in the ledger plus 1 */
    uint32_t *left;    /* [rank]: signals that have not arrived */
    struct fused_end end;
};

static struct state *state_of(struct sim *sim)
{
    return sim->workload_state;
}

static bool parse(const char *text, struct line *line)
{
    char word[16];
    int at = 0;

    *line = (struct line){0};
    if (sscanf(text, "%lf %" SCNu32 " %15s %" SCNu32 "%n", &line->us, &line->rank, word, &line->peer, &at) != 4)
        return false;
    if (!strcmp(word, "put"))
        return sscanf(text + at, "%" SCNu64 " %" SCNu32, &line->bytes, &line->group) == 2 && line->bytes;
    return !strcmp(word, "signal") && sscanf(text + at, "%" SCNu32, &line->group) == 1;
}

static int refuse(const char *path, int number, const char *why)
{
    fprintf(stderr, "perseus-sim: %s:%d: %s\n", path, number, why);
    return -EINVAL;
}

static int add_line(struct state *state, const struct line *line, const char *path, int number)
{
    struct line *grown;

    if (line->rank >= state->work->sim.ranks || line->peer >= state->work->sim.ranks || line->rank == line->peer)
        return refuse(path, number, "no such pair of ranks; --nodes says how many there are");
    if (line->bytes >= SIM_PUT_STRIDE)
        return refuse(path, number, "a put of 2 GB or more");
    if (!(line->us >= 0 && line->us < 1e9)) /* NaN is neither */
        return refuse(path, number, "a time is from 0 to 1e9 us");
    if (state->lines && line->us < state->line[state->lines - 1].us)
        return refuse(path, number, "earlier than the line before");
    grown = realloc(state->line, (state->lines + 1) * sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    state->line = grown;
    state->line[state->lines++] = *line;
    return 0;
}

static int read_trace(struct state *state, const char *path)
{
    FILE *file = fopen(path, "r");
    char text[256];
    int number = 0, r = 0;

    if (!file) {
        fprintf(stderr, "perseus-sim: cannot open the trace '%s': %s\n", path, strerror(errno));
        return -EINVAL;
    }
    while (!r && fgets(text, sizeof(text), file)) {
        struct line line;

        number++;
        text[strcspn(text, "#\n")] = 0;
        if (strspn(text, " \t") == strlen(text))
            continue;
        r = parse(text, &line)
                ? add_line(state, &line, path, number)
                : refuse(path, number, "want \"us rank put PEER BYTES GROUP\" or \"us rank signal PEER GROUP\"");
    }
    if (!r && ferror(file)) {
        fprintf(stderr, "perseus-sim: cannot read the trace '%s': %s\n", path, strerror(errno));
        r = -EINVAL;
    }
    fclose(file);
    if (!r && !state->lines)
        r = refuse(path, number, "no command");
    return r;
}

/* Find the signal of each put. Lines are read backwards, so it is the last seen signal of the put's rank, peer and
 * group. */
static int link_lines(struct state *state)
{
    state->follows = malloc(state->lines * sizeof(*state->follows));
    state->signal = calloc(state->lines, sizeof(*state->signal));
    state->left = calloc(state->work->sim.ranks, sizeof(*state->left));
    if (!state->follows || !state->signal || !state->left)
        return -ENOMEM;
    for (uint32_t i = 0; i < state->lines; i++) {
        const struct line *is = &state->line[i];

        state->follows[i] = UINT32_MAX;
        state->left[is->peer] += !is->bytes;
        for (uint32_t k = i + 1; is->bytes && k < state->lines; k++) {
            const struct line *other = &state->line[k];

            if (!other->bytes && other->rank == is->rank && other->peer == is->peer && other->group == is->group) {
                state->follows[i] = k;
                break;
            }
        }
    }
    return 0;
}

static uint32_t signal_of(struct sim *sim, uint32_t line)
{
    struct state *state = state_of(sim);
    const struct line *is = &state->line[line];

    if (!state->signal[line])
        state->signal[line] = 1 + sim_ledger_signal(sim->ledger, is->rank, is->peer, 0);
    return state->signal[line] - 1;
}

static void issue(struct sim *sim, uint32_t rank, uint64_t token)
{
    struct state *state = state_of(sim);
    uint32_t i = (uint32_t)token;
    const struct line *is = &state->line[i];

    (void)rank;
    if (is->bytes) {
        uint32_t signal = state->follows[i] == UINT32_MAX ? SIM_NO_SIGNAL : signal_of(sim, state->follows[i]);

        sim_put(sim, sim_ledger_put(sim->ledger, is->rank, is->peer, is->bytes, signal), is->group);
    } else {
        sim_signal(sim, signal_of(sim, i), is->group);
    }
    if (i + 1 < state->lines)
        sim_call_at(sim, (uint64_t)(state->line[i + 1].us * 1e6), state->line[i + 1].rank, i + 1);
}

static void start(struct sim *sim)
{
    struct state *state = state_of(sim);

    for (uint32_t rank = 0; rank < sim->options.ranks; rank++)
        if (!state->left[rank])
            state->end.us[rank] = 1e-6; /* it waits for nothing */
    sim_call_at(sim, (uint64_t)(state->line[0].us * 1e6), state->line[0].rank, 0);
}

static void raised(struct sim *sim, uint32_t rank, uint32_t signal)
{
    struct state *state = state_of(sim);

    (void)signal;
    if (--state->left[rank] == 0)
        fused_rank_ends(sim, &state->end, rank);
}

int trace_play(const struct work *work, struct work_result *result)
{
    static const struct sim_workload workload = {.start = start, .raised = raised, .call = issue};
    struct state state = {.work = work};
    int r;

    r = read_trace(&state, work->options->trace);
    if (!r)
        r = link_lines(&state);
    if (!r)
        r = fused_run(work, &workload, &state, &state.end, result);
    free(state.line);
    free(state.follows);
    free(state.signal);
    free(state.left);
    return r;
}
