/* SPDX-License-Identifier: Apache-2.0 */
#include "test/hopper/ranks.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <perseus/perseus.h>
#include "tools/hopper/hopper.h"
#include "transport/util/clock.h"

/* ---- ranks ---- */
void *ranks_map_shared(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("ranks: mmap");
        abort();
    }
    return memory;
}

static struct ranks_team *open_team(uint32_t world)
{
    struct ranks_team *team = ranks_map_shared(sizeof(*team));
    pthread_barrierattr_t shared;
    team->world = world;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&team->barrier, &shared, world);
    pthread_barrierattr_destroy(&shared);
    return team;
}

int ranks_allgather(void *user, const void *mine, void *all, size_t bytes)
{
    struct ranks_self *self = user;
    struct ranks_team *team = self->team;
    if (bytes > sizeof(team->given[0]))
        return -E2BIG;
    memcpy(team->given[self->rank], mine, bytes);
    pthread_barrier_wait(&team->barrier);
    for (uint32_t r = 0; r < team->world; r++)
        memcpy((char *)all + r * bytes, team->given[r], bytes);
    pthread_barrier_wait(&team->barrier);
    return 0;
}

struct start {
    struct ranks_self self;
    ranks_body *body;
    void *user;
};

static void *rank_main(void *arg)
{
    struct start *s = arg;
    s->body(s->self.rank, &s->self, s->user);
    return NULL;
}

static void run_from(struct ranks_team *team, uint32_t first, uint32_t count, ranks_body *body, void *user)
{
    struct start starts[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    for (uint32_t i = 0; i < count; i++) {
        starts[i] = (struct start){{team, first + i}, body, user};
        pthread_create(&threads[i], NULL, rank_main, &starts[i]);
    }
    for (uint32_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

void ranks_run(uint32_t world, ranks_body *body, void *user)
{
    struct ranks_team *team = open_team(world);
    run_from(team, 0, world, body, user);
    pthread_barrier_destroy(&team->barrier);
    munmap(team, sizeof(*team));
}

/* Starts the ranks of a node in a process that ends with the test. */
static pid_t start_node(struct ranks_team *team, uint32_t node, uint32_t count, ranks_body *body, void *user)
{
    pid_t child = fork();
    char text[16];
    if (child != 0)
        return child;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)snprintf(text, sizeof(text), "%u", node);
    (void)setenv("SOFTNIC_NODE", text, 1);
    run_from(team, node * count, count, body, user);
    _exit(0);
}

void ranks_run_apart(uint32_t world, uint32_t nodes, ranks_body *body, void *user)
{
    struct ranks_team *team = open_team(world);
    pid_t child[RANKS_MAX];
    int status, bad = 0;
    for (uint32_t n = 0; n < nodes; n++)
        child[n] = start_node(team, n, world / nodes, body, user);
    for (uint32_t n = 0; n < nodes; n++) {
        cr_assert(wait(&status) > 0);
        if (status != 0 && bad == 0) {
            bad = status; /* the others would wait for its ranks */
            for (uint32_t i = 0; i < nodes; i++)
                (void)kill(child[i], SIGKILL);
        }
    }
    munmap(team, sizeof(*team));
    cr_assert_eq(bad, 0, "the process of a node ended with status %#x", bad);
}

void ranks_need_nodes(uint32_t nodes)
{
    struct prs_fabric *fabric;
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        char text[16];
        (void)snprintf(text, sizeof(text), "%u", nodes - 1);
        (void)setenv("SOFTNIC_NODE", text, 1);
        _exit(prs_fabric_open(NULL, &fabric) != 0 || prs_fabric_rails(fabric) == 0);
    }
    cr_assert(child > 0 && waitpid(child, &status, 0) == child);
    if (status != 0)
        cr_skip_test("needs softnic-run --nodes %u", nodes);
}

struct prs_fused *ranks_open_alone(void)
{
    struct prs_fused_config config = {.world = 1};
    struct prs_fused *ctx = NULL;
    hopper_setup(1, 4, 0);
    cr_assert_eq(prs_fused_open(&config, &ctx), 0);
    return ctx;
}

int ranks_open(struct ranks_self *self, uint32_t nodes, uint32_t timeout_ms, struct prs_fused **out)
{
    uint32_t world = self->team->world;
    struct prs_fused_config config = {.rank = self->rank,
                                      .world = world,
                                      .device = (int)self->rank,
                                      .timeout_ms = timeout_ms,
                                      .allgather = ranks_allgather,
                                      .user = self,
                                      .node = nodes == 0 ? 0 : self->rank / (world / nodes) + 1};
    (void)cudaSetDevice((int)self->rank);
    return prs_fused_open(&config, out);
}

void ranks_need_a_device(void)
{
    struct prs_fabric *fabric;
    if (prs_fabric_open(NULL, &fabric) != 0 || prs_fabric_rails(fabric) == 0)
        cr_skip_test("no verbs device: run it under softnic-run");
    prs_fabric_close(fabric);
}

/* ---- numbers ---- */
uint32_t ranks_mix(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 2654435761u ^ b * 40503u ^ c * 69069u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return x;
}

/* A short type has `fraction` bits after the first, and its exponents are less by `bias` than those of a float. Below
 * its least normal number it has multiples of `unit`. */
static uint32_t round_size(float size, uint32_t fraction, uint32_t bias, float unit)
{
    uint32_t bits, cut = 23 - fraction;
    memcpy(&bits, &size, sizeof(bits));
    if (bits >> 23 <= bias)
        return (uint32_t)rintf(size / unit);
    return ((bits + (1u << (cut - 1)) - 1 + (bits >> cut & 1)) >> cut) - (bias << fraction);
}

static float size_of(uint32_t bits, uint32_t fraction, uint32_t bias, float unit)
{
    float size;
    if (bits >> fraction == 0)
        return (float)bits * unit;
    bits = (bits + (bias << fraction)) << (23 - fraction);
    memcpy(&size, &bits, sizeof(size));
    return size;
}

/* binary16: numbers below 2^-14 are multiples of 2^-24; above, the last of 11 bits counts. */
static uint16_t to_f16(float v)
{
    uint16_t sign = signbit(v) ? 0x8000 : 0;
    float size = fabsf(v);
    if (isnan(v))
        return 0x7fff;
    if (size >= 65520) /* half-way between the largest number and 65536, to which the tie goes */
        return sign | 0x7c00;
    return (uint16_t)(sign + round_size(size, 10, 112, 0x1p-24f));
}

static float from_f16(uint16_t bits)
{
    float size =
        (bits & 0x7c00) == 0x7c00 ? (bits & 0x3ff ? NAN : INFINITY) : size_of(bits & 0x7fff, 10, 112, 0x1p-24f);
    return bits & 0x8000 ? -size : size;
}

/* e4m3: numbers below 2^-6 are multiples of 2^-9; above, the last of 4 bits counts. What is too large becomes 448. */
static uint8_t to_e4m3(float v)
{
    uint8_t sign = signbit(v) ? 0x80 : 0;
    float size = fabsf(v);
    if (isnan(v))
        return 0x7f;
    if (size >= 448)
        return sign | 0x7e;
    return (uint8_t)(sign + round_size(size, 3, 120, 0x1p-9f));
}

static float from_e4m3(uint8_t bits)
{
    float size = (bits & 0x7f) == 0x7f ? NAN : size_of(bits & 0x7f, 3, 120, 0x1p-9f);
    return bits & 0x80 ? -size : size;
}

uint16_t ranks_bits(uint32_t dtype, float v)
{
    if (dtype == PRS_DTYPE_E4M3)
        return to_e4m3(v);
    return dtype == PRS_DTYPE_FP16 ? to_f16(v) : ranks_bf16(v);
}

float ranks_value(uint32_t dtype, uint16_t bits)
{
    if (dtype == PRS_DTYPE_E4M3)
        return from_e4m3((uint8_t)bits);
    return dtype == PRS_DTYPE_FP16 ? from_f16(bits) : ranks_float(bits);
}

/* Before it is rounded. */
static float element_exact(uint32_t key, uint64_t at)
{
    float v = ranks_drawn(key, at);
    return key & RANKS_POSITIVE ? 1 + fabsf(v) * 0.999f : v;
}

float ranks_element_of(uint32_t dtype, uint32_t key, uint64_t at)
{
    float v = element_exact(key, at);
    if (dtype == PRS_DTYPE_BF16)
        return ranks_float(ranks_bf16(v));
    return dtype == PRS_DTYPE_FP32 ? v : ranks_value(dtype, ranks_bits(dtype, v));
}

void ranks_fp8_add(struct ranks_fp8_sum *s, const double *products, uint32_t count)
{
    const double bit = 0x1p-13; /* the value of the last of 14 bits, relative to the first */
    double most = fabs(s->held) + s->held_lost;
    for (uint32_t i = 0; i < count; i++) {
        most = fabs(products[i]) > most ? fabs(products[i]) : most;
        s->held += products[i];
    }
    s->held_lost += (count + 1) * bit * most;
    s->held_lost += bit * (fabs(s->held) + s->held_lost);
}

void ranks_fp8_promote(struct ranks_fp8_sum *s, double factor)
{
    s->sum += s->held * factor;
    s->lost += s->held_lost * fabs(factor);
    s->held = s->held_lost = 0;
}

void ranks_fill(void *at, int fill, size_t bytes)
{
    cr_assert_eq(cudaMemset(at, fill, bytes), cudaSuccess);
    cr_assert_eq(cudaStreamSynchronize(NULL), cudaSuccess);
}

void *ranks_device(size_t bytes, int fill)
{
    void *p = NULL;
    cr_assert_eq(cudaMalloc(&p, bytes + 256), cudaSuccess);
    ranks_fill(p, fill, bytes + 256);
    return p;
}

void *ranks_copy(const void *from, size_t bytes)
{
    void *p = ranks_device(bytes, 0xff);
    cr_assert_eq(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

void *ranks_upload(uint32_t key, uint64_t count)
{
    return ranks_upload_of(PRS_DTYPE_BF16, key, count);
}

void *ranks_upload_of(uint32_t dtype, uint32_t key, uint64_t count)
{
    uint64_t bytes = count * (dtype == PRS_DTYPE_FP32 ? 4 : dtype == PRS_DTYPE_E4M3 ? 1 : 2);
    void *host = malloc(bytes), *device = NULL;
    for (uint64_t i = 0; i < count; i++) {
        if (dtype == PRS_DTYPE_FP32)
            ((float *)host)[i] = element_exact(key, i);
        else if (dtype == PRS_DTYPE_E4M3)
            ((uint8_t *)host)[i] = to_e4m3(element_exact(key, i));
        else
            ((uint16_t *)host)[i] = ranks_bits(dtype, element_exact(key, i));
    }
    if (cudaMalloc(&device, bytes) != cudaSuccess ||
        cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice) != cudaSuccess) {
        fprintf(stderr, "ranks: upload of %llu elements failed\n", (unsigned long long)count);
        abort();
    }
    free(host);
    return device;
}
