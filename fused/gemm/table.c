/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/table.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fused/gemm/schedule.h"
#include "fused/gemm/tuning.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

static const double NEAR = 0.5, OTHER_LAYOUT = 0.25, OTHER_SCALING = 0.25, OTHER_GPU = 0.3;

enum { MOST_LINE = 256, MOST_FILE = 16 << 20 /* bytes: some 160000 lines */ };

/* Version, GPU, SMs, operation, m, n, k, B is [n, k], world, nodes : struct prs_gemm_tuning, microseconds, scaling,
 * microseconds of the other path, columns of a tile. Lines of version 7 have no columns, which are 256, those of
 * version 6 no other path, and those of version 5 no scaling, which is that of 16-bit types; a line of another version
 * does not fit. */
static const char LINE[] = "v%u %63s %u %u %u %u %u %u %u %u : %u %u %u %u %u %u %u %u %lf %u %lf %u";
enum { FIRST_VERSION = 5, VERSION = 8, FIRST_FIELDS = 19 };

struct entry {
    char gpu[64];
    unsigned version, sms, op, m, n, k, b_transposed, world, nodes, scaling; /* scaling: enum prs_scaling */
    struct prs_gemm_tuning tuning;
    double us, other_us; /* other_us: 0: unknown */
};

struct search {
    const struct prs_fused *ctx;
    const struct prs_gemm_shape *shape;
    char gpu[sizeof(((struct prs_fused *)NULL)->gpu)];
    double nearest[PRS_TABLE_CLASSES];
    struct prs_table_found *found;
};

/* The name of the GPU as one word of a line. */
static void gpu_word(const struct prs_fused *ctx, char word[sizeof(ctx->gpu)])
{
    memcpy(word, ctx->gpu[0] ? ctx->gpu : "?", ctx->gpu[0] ? sizeof(ctx->gpu) : 2);
    for (char *c = word; *c; c++)
        if (*c == ' ')
            *c = '_';
}

const struct prs_place *prs_table_place(const struct prs_fused *ctx, const struct prs_gemm_shape *shape)
{
    static const struct prs_place alone = {.world = 1, .nodes = 1, .local_ranks = 1};
    return shape->op == PRS_GEMM_ALONE ? &alone : &ctx->place;
}

static bool parse(const char *line, struct entry *e)
{
    struct prs_gemm_tuning *t = &e->tuning;
    int fields = sscanf(line, LINE, &e->version, e->gpu, &e->sms, &e->op, &e->m, &e->n, &e->k, &e->b_transposed,
                        &e->world, &e->nodes, &t->path, &t->clusters, &t->band, &t->mover, &t->segments, &t->paced,
                        &t->spread, &t->tiles_per_signal, &e->us, &e->scaling, &e->other_us, &t->columns);
    if (e->version < VERSION)
        t->columns = PRS_TILE_N;
    return e->version >= FIRST_VERSION && e->version <= VERSION &&
           fields == FIRST_FIELDS + (int)(e->version - FIRST_VERSION) && t->path <= PRS_GEMM_PATH_UNFUSED &&
           t->mover <= PRS_MOVED_BY_CTAS && e->scaling <= PRS_SCALING_BLOCKS &&
           (t->columns == 0 || t->columns == PRS_TILE_N || t->columns == PRS_NARROW_N);
}

static bool same_ranks(const struct search *s, const struct entry *e)
{
    const struct prs_place *at = prs_table_place(s->ctx, s->shape);
    return e->op == (unsigned)s->shape->op && e->world == at->world && e->nodes == at->nodes && e->sms == s->ctx->sms &&
           !e->scaling == !s->shape->scaling;
}

/* How far the entry is from the shape; consider() adds the distance of the rows. */
static double distance(const struct search *s, const struct entry *e)
{
    const struct prs_gemm_shape *shape = s->shape;
    return fabs(log2((double)shape->n / e->n)) + fabs(log2((double)shape->k / e->k)) +
           ((shape->b_transposed != 0) != (e->b_transposed != 0) ? OTHER_LAYOUT : 0) +
           (shape->scaling != e->scaling ? OTHER_SCALING : 0) + (strcmp(e->gpu, s->gpu) != 0 ? OTHER_GPU : 0);
}

static uint32_t pairs_of(uint32_t m, uint32_t world)
{
    return prs_ceil_div(prs_ceil_div(m, world), PRS_PAIR_M);
}

/* The entry is the nearest so far to this class, which has `rows` rows. The model carries its times over to these rows,
 * for each path separately: with a few more rows the fused path takes the same time or a wave of units longer, and the
 * unfused path a little longer. So the faster path may differ from the entry's. */
static void take(const struct search *s, const struct entry *e, uint32_t class, uint32_t rows)
{
    enum prs_gemm_path path = e->tuning.path;
    enum prs_gemm_path other = path == PRS_GEMM_PATH_FUSED ? PRS_GEMM_PATH_UNFUSED : PRS_GEMM_PATH_FUSED;
    struct prs_table_found *found = s->found;
    struct prs_gemm_tuning *t = &found->tuning[class];
    struct prs_gemm_shape from = *s->shape, to = *s->shape;
    double us[PRS_GEMM_PATH_UNFUSED + 1] = {0};
    from.m = e->m, from.n = e->n, from.k = e->k;
    to.m = rows;
    us[path] = e->us > 0 && e->us < 1e9 ? e->us : 0;
    us[other] = us[path] > 0 && path != PRS_GEMM_PATH_AUTO ? e->other_us : 0;
    prs_tuning_carry(&from, &to, prs_table_place(s->ctx, s->shape), s->ctx->sms / 2, &e->tuning, us);
    *t = e->tuning;
    if (us[other] > 0 && us[other] < us[path] && (e->m != rows || e->n != to.n || e->k != to.k)) {
        *t = (struct prs_gemm_tuning){.path = other};
        other = path;
    }
    found->us[class] = (float)us[t->path];
    found->ratio[class] = prs_table_ratio(t, us[t->path], us[other]);
    /* If a band was a whole block, it is a whole block in every launch. */
    if (t->band >= pairs_of(e->m, e->world))
        t->band = pairs_of(s->shape->m, e->world);
}

static void consider(struct search *s, const char *line, enum prs_table_source source)
{
    struct entry e = {.us = 0}; /* what a line does not have is 0 */
    double apart, far;
    if (!parse(line, &e) || !same_ranks(s, &e) || e.m == 0 || e.n == 0 || e.k == 0)
        return;
    apart = distance(s, &e);
    for (uint32_t i = 0; i < PRS_TABLE_CLASSES && s->shape->m >> i != 0 && apart <= NEAR; i++) {
        far = apart + fabs(log2((double)(s->shape->m >> i) / e.m));
        if (far > s->nearest[i])
            continue;
        s->nearest[i] = far;
        take(s, &e, i, s->shape->m >> i);
        if (i == 0)
            s->found->source = source;
    }
}

static void search_text(struct search *s, const char *text)
{
    char line[MOST_LINE];
    while (*text) {
        size_t length = strcspn(text, "\n");
        if (length < sizeof(line)) {
            memcpy(line, text, length);
            line[length] = 0;
            consider(s, line, PRS_TABLE_SHIPPED);
        }
        text += length + (text[length] == '\n');
    }
}

/* Opens the file if it can be read to its end: a device has no end, and a pipe may wait for a writer. NULL: there is no
 * file, or the log says why it is not used. */
static FILE *open_to_read(const char *path)
{
    struct stat at;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    FILE *f = NULL;
    if (fd < 0)
        return NULL; /* nothing has been tuned yet */
    if (fstat(fd, &at) || !S_ISREG(at.st_mode))
        PRS_WARN("fused: PERSEUS_FUSED_TUNING names %s, which is not a file: it is not read", path);
    else if (at.st_size > MOST_FILE)
        PRS_WARN("fused: PERSEUS_FUSED_TUNING names %s, of more than %d bytes: it is not read", path, MOST_FILE);
    else
        f = fdopen(fd, "r");
    if (!f)
        (void)close(fd);
    return f;
}

static void search_file(struct search *s, const char *path)
{
    char line[MOST_LINE];
    FILE *f = open_to_read(path);
    if (!f)
        return;
    while (fgets(line, sizeof(line), f))
        consider(s, line, PRS_TABLE_FILE);
    (void)fclose(f);
}

void prs_table_find(const struct prs_fused *ctx, const struct prs_gemm_shape *shape, struct prs_table_found *found)
{
    struct search s = {.ctx = ctx, .shape = shape, .found = found};
    const char *path = getenv("PERSEUS_FUSED_TUNING");
    *found = (struct prs_table_found){.source = PRS_TABLE_NONE};
    if (shape->k == 0) /* no line is for a sum without a product */
        return;
    for (uint32_t i = 0; i < PRS_TABLE_CLASSES; i++)
        s.nearest[i] = NEAR;
    gpu_word(ctx, s.gpu);
    search_text(&s, prs_table_shipped());
    if (path)
        search_file(&s, path);
}

/* The entry's path was the faster one. So the times count as equal if other_us is smaller. */
float prs_table_ratio(const struct prs_gemm_tuning *t, double us, double other_us)
{
    bool fused = t->path == PRS_GEMM_PATH_FUSED;
    double more = us > 0 && other_us > us ? other_us / us : 1;
    if (t->path == PRS_GEMM_PATH_AUTO)
        return 0;
    if (other_us <= 0)
        return fused ? PRS_RATIO_FUSED : PRS_RATIO_UNFUSED;
    return (float)(fused ? more : 1 / more);
}

int prs_table_append(const struct prs_fused *ctx, const struct prs_gemm_shape *shape, const struct prs_gemm_tuning *t,
                     double us, double other_us)
{
    const struct prs_place *at = prs_table_place(ctx, shape);
    char gpu[sizeof(ctx->gpu)];
    const char *path = getenv("PERSEUS_FUSED_TUNING");
    FILE *f;
    int fd, written;
    if (!path || shape->k == 0)
        return 0;
    fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666); /* a pipe may have no reader */
    f = fd < 0 ? NULL : fdopen(fd, "a");
    if (!f)
        return prs_fail(-errno, "fused: PERSEUS_FUSED_TUNING names %s, which cannot be written: %s", path,
                        strerror(errno));
    gpu_word(ctx, gpu);
    written = fprintf(f, "v%u %s %u %u %u %u %u %u %u %u : %u %u %u %u %u %u %u %u %.2f %u %.2f %u\n", VERSION, gpu,
                      ctx->sms, (unsigned)shape->op, shape->m, shape->n, shape->k, shape->b_transposed != 0, at->world,
                      at->nodes, t->path, t->clusters, t->band, t->mover, t->segments, t->paced, t->spread,
                      t->tiles_per_signal, us, shape->scaling, other_us, t->columns);
    if (fclose(f) != 0 || written < 0)
        return prs_fail(-EIO, "fused: writing %s failed: disk full?", path);
    return 0;
}
