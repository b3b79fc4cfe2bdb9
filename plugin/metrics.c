/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <perseus/team.h>
#include "transport/util/env.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"
#include "transport/util/thread.h"

enum { MAX_ROWS = 32, RAIL_TEXT = 72 };

/* The sums of one table over one set of rails. */
struct row {
    const char *table;
    char rail[PRS_MAX_RAILS][RAIL_TEXT]; /* as "mlx5_0:1" */
    int rails;
    struct prs_stats closed; /* of sources that were removed */
    uint32_t open;           /* sources */
};

static struct {
    pthread_mutex_t lock; /* protects all that follows */
    pthread_cond_t changed;
    pid_t owner;
    struct metrics_source *sources;
    struct row row[MAX_ROWS];
    uint32_t rows;
    pthread_t writer; /* runs while there is a source */
    bool is_writing;
    uintptr_t generation; /* generation of the writer: a writer that finds a newer number ends */
    bool has_failed;
    char written[600]; /* the file, once there is one */
} metrics = {.lock = PTHREAD_MUTEX_INITIALIZER};
PRS_RENEW_IN_CHILD(metrics, metrics.lock)

struct counter {
    const char *name, *help;
    size_t offset; /* in struct prs_stats */
};
#define COUNTER(member, help)                                                                                          \
    {                                                                                                                  \
#        member, help, offsetof(struct prs_stats, member)                                                              \
    }
static const struct counter counters[] = {
    COUNTER(puts, "writes started"),
    COUNTER(gets, "reads started"),
    COUNTER(signals, "signals started"),
    COUNTER(notifications, "notifications that arrived"),
    COUNTER(work_requests, "work requests posted"),
    COUNTER(receives, "receives posted"),
    COUNTER(doorbells, "calls that posted work requests"),
    COUNTER(completions, "completions of own requests"),
    COUNTER(arrivals, "completions of remote requests"),
    COUNTER(fences, "fences posted"),
    COUNTER(drains, "waits for all completions"),
    COUNTER(merged_signals, "signals that joined an earlier one"),
};

/* Counters of retries and losses that some NICs have, by their drivers' names. */
static const char *const nic_counters[] = {"local_ack_timeout_err", "packet_seq_err", "rnr_nak_retry_err",
                                           "out_of_sequence",       "retrans_pkts",   "retrans_timeout_events"};

static void add_stats(struct prs_stats *sum, const struct prs_stats *one)
{
    uint64_t *to = (uint64_t *)sum;

    for (size_t i = 0; i < sizeof(*one) / sizeof(uint64_t); i++)
        to[i] += ((const uint64_t *)one)[i];
}

static void read_source(const struct metrics_source *source, struct prs_stats *out)
{
    struct prs_stats one;

    memset(out, 0, sizeof(*out));
    if (source->peer)
        prs_peer_stats(source->peer, out);
    for (uint32_t i = 0; !source->peer && i < source->contexts; i++) {
        prs_team_stats(source->team, source->first_context + i, &one);
        add_stats(out, &one);
    }
}

/* ---- the file ---- */

static void write_nic_counters(FILE *file, const char *rail)
{
    int name = (int)strcspn(rail, ":");
    const char *port = rail[name] ? rail + name + 1 : "1";

    for (size_t i = 0; i < sizeof(nic_counters) / sizeof(*nic_counters); i++) {
        unsigned long long value;
        char path[256];
        FILE *in;

        snprintf(path, sizeof(path), "/sys/class/infiniband/%.*s/ports/%s/hw_counters/%s", name, rail, port,
                 nic_counters[i]);
        in = fopen(path, "re");
        if (in && fscanf(in, "%llu", &value) == 1)
            fprintf(file, "perseus_nic_total{rail=\"%s\",counter=\"%s\"} %llu\n", rail, nic_counters[i], value);
        if (in)
            fclose(in);
    }
}

static void write_rail_names(FILE *file, const struct row *row)
{
    fprintf(file, "{table=\"%s\",rails=\"", row->table);
    for (int i = 0; i < row->rails; i++)
        fprintf(file, "%s%s", i ? "+" : "", row->rail[i]);
    fputs("\"} ", file);
}

static void write_rows(FILE *file, const struct prs_stats *sums)
{
    for (size_t i = 0; i < sizeof(counters) / sizeof(*counters); i++) {
        fprintf(file, "# HELP perseus_%s_total %s\n# TYPE perseus_%s_total counter\n", counters[i].name,
                counters[i].help, counters[i].name);
        for (uint32_t r = 0; r < metrics.rows; r++) {
            fprintf(file, "perseus_%s_total", counters[i].name);
            write_rail_names(file, &metrics.row[r]);
            fprintf(file, "%" PRIu64 "\n", *(const uint64_t *)((const char *)&sums[r] + counters[i].offset));
        }
    }
    fputs("# HELP perseus_bytes_total bytes written, by rail\n# TYPE perseus_bytes_total counter\n", file);
    for (uint32_t r = 0; r < metrics.rows; r++)
        for (int i = 0; i < metrics.row[r].rails; i++)
            fprintf(file, "perseus_bytes_total{table=\"%s\",rail=\"%s\"} %" PRIu64 "\n", metrics.row[r].table,
                    metrics.row[r].rail[i], sums[r].rail_bytes[i]);
    fputs("# HELP perseus_connections open connections, or sets of contexts\n# TYPE perseus_connections gauge\n", file);
    for (uint32_t r = 0; r < metrics.rows; r++) {
        fputs("perseus_connections", file);
        write_rail_names(file, &metrics.row[r]);
        fprintf(file, "%u\n", metrics.row[r].open);
    }
    fputs("# HELP perseus_nic_total counters of the NIC, of all processes\n# TYPE perseus_nic_total counter\n", file);
    for (uint32_t r = 0; r < metrics.rows; r++)
        for (int i = 0; i < metrics.row[r].rails; i++)
            write_nic_counters(file, metrics.row[r].rail[i]);
}

/* A new file of our own: others may write to the folder, too. A file or link that they have put there under this name
 * is neither followed nor changed. */
static FILE *create_file(const char *path)
{
    FILE *file;
    int fd;

    if (unlink(path) && errno != ENOENT)
        return NULL;
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    file = fd < 0 ? NULL : fdopen(fd, "w");
    if (fd >= 0 && !file)
        close(fd);
    return file;
}

/* Write a new file and rename it, so that no reader sees half of one. */
static void write_file_locked(void)
{
    const char *folder = prs_env_text("PERSEUS_METRICS");
    struct prs_stats sums[MAX_ROWS], one;
    char path[sizeof(metrics.written)], partial[sizeof(path) + 20];
    FILE *file;

    if (!folder)
        return;
    for (uint32_t r = 0; r < metrics.rows; r++)
        sums[r] = metrics.row[r].closed;
    for (const struct metrics_source *source = metrics.sources; source; source = source->next) {
        read_source(source, &one);
        add_stats(&sums[source->row - 1], &one);
    }
    snprintf(path, sizeof(path), "%.500s/perseus-%d.prom", folder, (int)getpid());
    snprintf(partial, sizeof(partial), "%s.partial", path);
    file = create_file(partial);
    if (file)
        write_rows(file, sums);
    if (file && fclose(file) == 0 && rename(partial, path) == 0) {
        memcpy(metrics.written, path, sizeof(path));
    } else {
        if (!metrics.has_failed)
            PRS_WARN("PERSEUS_METRICS=%s: cannot write %s: %s; is it a folder that this user may write to?", folder,
                     path, strerror(errno));
        metrics.has_failed = true;
    }
}

/* The file is removed when the process ends, because its counters then belong to no process. A killed process leaves
 * its file. */
static __attribute__((destructor)) void remove_file(void)
{
    if (metrics.owner == getpid() && metrics.written[0])
        unlink(metrics.written);
}

static void *write_every_second(void *generation)
{
    pthread_mutex_lock(&metrics.lock);
    /* At exit() remove_file() comes after the last write, since exit() waits for prs_work_end(). */
    while (metrics.generation == (uintptr_t)generation && prs_work_begin()) {
        struct timespec until;

        write_file_locked();
        prs_work_end();
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&metrics.changed, &metrics.lock, &until);
    }
    pthread_mutex_unlock(&metrics.lock);
    return NULL;
}

/* ---- sources ---- */

static void name_rails(struct row *row, const struct prs_fabric *fabric, const struct prs_rail_set *rails)
{
    struct prs_rail_set all;

    prs_fabric_all_rails(fabric, rails, &all);
    row->rails = all.count;
    for (int i = 0; i < all.count; i++) {
        struct prs_rail_info info;

        if (prs_rail_query(fabric, all.rail[i], &info))
            snprintf(row->rail[i], sizeof(row->rail[i]), "rail%d", all.rail[i]);
        else
            snprintf(row->rail[i], sizeof(row->rail[i]), "%s:%d", info.name, info.port);
    }
}

/* Return the row of this table and these rails, plus 1; 0: there is no room for another. */
static uint32_t find_row_locked(const struct row *wanted)
{
    for (uint32_t r = 0; r < metrics.rows; r++)
        if (metrics.row[r].rails == wanted->rails && !strcmp(metrics.row[r].table, wanted->table) &&
            !memcmp(metrics.row[r].rail, wanted->rail, sizeof(wanted->rail)))
            return r + 1;
    if (metrics.rows == MAX_ROWS)
        return 0;
    metrics.row[metrics.rows] = *wanted;
    return ++metrics.rows;
}

/* Lets waits use a clock that nobody can set. */
static void init_changed(void)
{
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&metrics.changed, &attr);
    pthread_condattr_destroy(&attr);
}

void metrics_add(struct metrics_source *source, const char *table, const struct prs_fabric *fabric,
                 const struct prs_rail_set *rails)
{
    struct row row = {.table = table};

    if (!prs_env_text("PERSEUS_METRICS"))
        return;
    name_rails(&row, fabric, rails);
    pthread_mutex_lock(&metrics.lock);
    if (metrics.owner != getpid()) { /* at first, and in a forked child, where the old state belongs to the parent */
        metrics.owner = getpid();
        metrics.sources = NULL;
        metrics.rows = 0;
        metrics.is_writing = false;
        metrics.written[0] = 0;
        init_changed();
    }
    source->row = find_row_locked(&row);
    if (source->row) {
        metrics.row[source->row - 1].open++;
        source->next = metrics.sources;
        metrics.sources = source;
        if (!metrics.is_writing)
            metrics.is_writing =
                prs_thread_start(&metrics.writer, "prs-metrics", write_every_second, (void *)metrics.generation) == 0;
    }
    pthread_mutex_unlock(&metrics.lock);
}

void metrics_remove(struct metrics_source *source)
{
    struct metrics_source **link;
    struct prs_stats last;
    bool stop = false;
    pthread_t writer = 0;

    if (!source->row || metrics.owner != getpid())
        return;
    pthread_mutex_lock(&metrics.lock);
    for (link = &metrics.sources; *link && *link != source; link = &(*link)->next)
        ;
    if (*link) {
        *link = source->next;
        read_source(source, &last);
        add_stats(&metrics.row[source->row - 1].closed, &last);
        metrics.row[source->row - 1].open--;
        if (!metrics.sources) {
            write_file_locked();
            stop = metrics.is_writing;
            metrics.is_writing = false;
            metrics.generation++;
            writer = metrics.writer;
            pthread_cond_signal(&metrics.changed);
        }
    }
    source->row = 0;
    pthread_mutex_unlock(&metrics.lock);
    if (stop)
        pthread_join(writer, NULL);
}
