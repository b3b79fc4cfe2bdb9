/* SPDX-License-Identifier: Apache-2.0 */
/* PERSEUS_FUSED_TUNING names a file that anyone may have edited or cut off. What is chosen from it can be played. */
#include <sys/mman.h>
#include <unistd.h>

#include "fused/gemm/plan.h"
#include "fused/gemm/table.h"
#include "fused/gemm/tuning.h"
#include "test/fuzz/fuzz.h"

enum { CLUSTERS = 66 };

const char *prs_table_shipped(void)
{
    return "";
}

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    return 0; /* corpus/tuning */
}

static void play(const struct prs_gemm_shape *shape, const struct prs_gemm_tuning *t)
{
    struct prs_schedule s;

    fuzz_accepted++;
    fuzz_require(t->path == PRS_GEMM_PATH_FUSED || t->path == PRS_GEMM_PATH_UNFUSED, "path %u", t->path);
    fuzz_require(t->clusters > 0 && t->clusters <= CLUSTERS, "%u clusters", t->clusters);
    fuzz_require(t->columns == PRS_TILE_N || t->columns == PRS_NARROW_N, "tiles of %u columns", t->columns);
    prs_schedule_init(&s, shape->op, 0, 4, 1, shape->m, prs_column_tiles(shape, t->columns), prs_k_steps(shape),
                      t->band);
    s.segments = t->segments;
    s.group = t->tiles_per_signal;
    fuzz_require(prs_schedule_segment_steps(&s) > 0 && prs_schedule_band_groups(&s) > 0, "a schedule without steps");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static int fd = -1;
    struct prs_fused ctx = {.config = {.world = 4}, .place = {.world = 4, .nodes = 1, .local_ranks = 4}, .sms = 132};
    struct prs_gemm_shape shapes[] = {{PRS_GEMM_ALLGATHER, 8192, 2048, 8192, 0},
                                      {PRS_GEMM_REDUCE_SCATTER, 4096, 4096, 1024, 0},
                                      {PRS_GEMM_ALLREDUCE, 4096, 4096, 1024, 0}};
    char path[64];

    if (fd < 0) {
        fd = memfd_create("tuning", MFD_CLOEXEC);
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        setenv("PERSEUS_FUSED_TUNING", path, 1);
    }
    fuzz_require(ftruncate(fd, 0) == 0 && pwrite(fd, data, bytes, 0) == (ssize_t)bytes, "no memory");
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct prs_gemm_info info;
        struct prs_table_found found;

        prs_gemm_shape_fill(&shapes[i]);
        prs_table_find(&ctx, &shapes[i], &found);
        for (uint32_t j = 0; j < PRS_TABLE_CLASSES; j++) {
            struct prs_table_found own = {.source = PRS_TABLE_FILE, .tuning = {found.tuning[j]}};

            fuzz_require(found.us[j] >= 0 && found.us[j] < 1e12f, "%f us", (double)found.us[j]);
            fuzz_require(found.ratio[j] >= 0, "ratio %f", (double)found.ratio[j]);
            if (j == 0 && found.source == PRS_TABLE_NONE)
                continue;
            memset(&info, 0, sizeof(info));
            fuzz_require(!prs_tuning_choose(&ctx, &shapes[i], NULL, &own, CLUSTERS, &info), "what is found cannot run");
            play(&shapes[i], &info.tuning);
        }
    }
    return 0;
}
