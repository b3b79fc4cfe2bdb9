/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-nccl-ranks: forks the ranks of one NCCL job under the environment that it was given; perseus-nccl runs it
 * once a transport. */
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/nccl/job.h"
#include "tools/nccl/values.h"

static const char usage[] =
    "usage: perseus-nccl-ranks [options]\n"
    "  --ranks N           processes, one GPU each (2)\n"
    "  --ops a,b,..        all_reduce all_gather reduce_scatter broadcast reduce sendrecv alltoall (all)\n"
    "  --types a,b,..      int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 (float)\n"
    "  --sizes A:B[:xF]    bytes from A to B, times F each (8:64M:x4); suffixes K M G\n"
    "  --place in|out|both (out)     --iters N (20)     --warmup N (3)\n"
    "  --hosts             a NCCL_HOSTID for each rank: NCCL takes them for different nodes\n"
    "  --register          register the buffers with ncclCommRegister\n"
    "  --label NAME        goes into each result     --nccl FILE (libnccl.so.2)     --timeout SECONDS (120)\n";

#define MAX_BYTES (1ull << 40) /* so that a size times a factor fits */

static void refuse(const char *option, const char *value)
{
    fprintf(stderr, "perseus-nccl-ranks: --%s: cannot use '%s'\n%s", option, value, usage);
    exit(2);
}

static uint64_t parse_bytes(const char *text, const char *option, const char **end)
{
    const char *suffixes = "KMG", *suffix;
    char *rest = NULL;
    uint64_t value = strtoull(text, &rest, 10);
    unsigned shift = 0;

    if (*text < '0' || *text > '9') /* strtoull takes signs and spaces */
        refuse(option, text);
    suffix = *rest ? strchr(suffixes, *rest) : NULL;
    if (suffix) {
        shift = 10 * (unsigned)(suffix - suffixes + 1);
        rest++;
    }
    if (value > MAX_BYTES >> shift)
        refuse(option, text);
    *end = rest;
    return value << shift;
}

static void parse_sizes(struct job *job, const char *text)
{
    const char *rest;

    job->min_bytes = parse_bytes(text, "sizes", &rest);
    job->max_bytes = job->min_bytes;
    job->factor = 4;
    if (*rest == ':')
        job->max_bytes = parse_bytes(rest + 1, "sizes", &rest);
    if (rest[0] == ':' && rest[1] == 'x')
        job->factor = parse_bytes(rest + 2, "sizes", &rest);
    if (*rest != '\0' || job->min_bytes == 0 || job->max_bytes < job->min_bytes || job->factor < 2 ||
        job->factor > 1 << 20)
        refuse("sizes", text);
}

static void parse_lists(struct job *job, const char *option, char *text)
{
    bool types = strcmp(option, "types") == 0;

    if (types)
        job->type_count = 0;
    else
        memset(job->ops, 0, sizeof(job->ops));
    for (char *save = NULL, *name = strtok_r(text, ",", &save); name != NULL; name = strtok_r(NULL, ",", &save)) {
        int value = types ? values_type_parse(name) : job_op_parse(name);

        if (value < 0 || (types && job->type_count == JOB_MAX_TYPES))
            refuse(option, name);
        if (types)
            job->types[job->type_count++] = (enum nccl_type)value;
        else
            job->ops[value] = true;
    }
}

static int parse_count(const char *option, const char *text, int least, int most)
{
    char *rest = NULL;
    long value = strtol(text, &rest, 10);

    if (*text == '\0' || *rest != '\0' || value < least || value > most)
        refuse(option, text);
    return (int)value;
}

static void parse_place(struct job *job, const char *text)
{
    job->in_place = strcmp(text, "in") == 0 || strcmp(text, "both") == 0;
    job->out_of_place = strcmp(text, "out") == 0 || strcmp(text, "both") == 0;
    if (!job->in_place && !job->out_of_place)
        refuse("place", text);
}

static const struct option long_options[] = {
    {"ranks", required_argument, NULL, 'n'},
    {"ops", required_argument, NULL, 'o'},
    {"types", required_argument, NULL, 't'},
    {"sizes", required_argument, NULL, 's'},
    {"place", required_argument, NULL, 'p'},
    {"iters", required_argument, NULL, 'i'},
    {"warmup", required_argument, NULL, 'w'},
    {"hosts", no_argument, NULL, 'h'},
    {"register", no_argument, NULL, 'r'},
    {"label", required_argument, NULL, 'l'},
    {"nccl", required_argument, NULL, 'L'},
    {"timeout", required_argument, NULL, 'T'},
    {NULL, 0, NULL, 0},
};

static void take_option(struct job *job, int which)
{
    switch (which) {
    case 'n':
        job->ranks = parse_count("ranks", optarg, 1, JOB_MAX_RANKS);
        break;
    case 'o':
        parse_lists(job, "ops", optarg);
        break;
    case 't':
        parse_lists(job, "types", optarg);
        break;
    case 's':
        parse_sizes(job, optarg);
        break;
    case 'p':
        parse_place(job, optarg);
        break;
    case 'i':
        job->iterations = parse_count("iters", optarg, 1, 1000);
        break;
    case 'w':
        job->warmup = parse_count("warmup", optarg, 0, 1000);
        break;
    case 'h':
        job->hosts = true;
        break;
    case 'r':
        job->register_buffers = true;
        break;
    case 'l':
        job->label = optarg;
        break;
    case 'L':
        job->nccl_path = optarg;
        break;
    case 'T':
        job->timeout_s = parse_count("timeout", optarg, 1, 86400);
        break;
    default:
        fputs(usage, stderr);
        exit(2);
    }
}

static void parse_options(struct job *job, int argc, char **argv)
{
    int which;

    while ((which = getopt_long(argc, argv, "", long_options, NULL)) != -1)
        take_option(job, which);
    if (optind != argc)
        refuse("argument", argv[optind]);
}

/* Wait for all; when one fails the others have no way to end well, so they are ended. */
static int reap(const struct job *job, struct job_meeting *meeting, pid_t *pids)
{
    int failed = 0;

    for (int left = job->ranks; left > 0; left--) {
        int status = 0, rank = 0;
        pid_t pid = wait(&status);

        while (rank < job->ranks && pids[rank] != pid)
            rank++;
        if (rank == job->ranks)
            break;      /* no child is left */
        pids[rank] = 0; /* the system may give the number to somebody else now */
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;
        if (WIFSIGNALED(status) && !failed)
            fprintf(stderr, "perseus-nccl: rank %d (%s) was ended by signal %d\n", rank, job->label, WTERMSIG(status));
        failed = 1;
        atomic_store(&meeting->failed, true);
        sleep(1); /* the others may still be telling why */
        for (int r = 0; r < job->ranks; r++)
            if (pids[r] > 0)
                kill(pids[r], SIGKILL);
    }
    return failed;
}

int main(int argc, char **argv)
{
    struct job job = {.label = "nccl",
                      .ranks = 2,
                      .out_of_place = true,
                      .types = {NCCL_FLOAT32},
                      .type_count = 1,
                      .iterations = 20,
                      .warmup = 3,
                      .timeout_s = 120,
                      .min_bytes = 8,
                      .max_bytes = 64 << 20,
                      .factor = 4};
    struct job_meeting *meeting;
    pid_t pids[JOB_MAX_RANKS];

    memset(job.ops, 1, sizeof(job.ops));
    parse_options(&job, argc, argv);
    meeting = mmap(NULL, sizeof(*meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (meeting == MAP_FAILED) {
        perror("perseus-nccl-ranks: shared memory");
        return 1;
    }
    for (int r = 0; r < job.ranks; r++) {
        pids[r] = fork();
        if (pids[r] == 0)
            exit(job_run_rank(&job, meeting, r));
        if (pids[r] < 0) {
            perror("perseus-nccl-ranks: fork");
            atomic_store(&meeting->failed, true);
            job.ranks = r;
        }
    }
    return reap(&job, meeting, pids);
}
