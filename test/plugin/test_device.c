/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts, devices, registrations; the plugin loaded again, and in children of a fork. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test/plugin/pair.h"
#include "plugin/abi_gin.h"
#include "test/support/settled_threads.h"
#include "transport/util/clock.h"

TestSuite(device, .timeout = 300);

static void transfer(const struct plugin *plugin, int device)
{
    struct pair pair = pair_open(plugin, device);
    void *recv = recv_bytes(plugin, &pair, 0, 100000, 1), *send = send_bytes(plugin, &pair, 0, 100000, 1);

    cr_assert_eq(finish(plugin, send, NULL), NET_SUCCESS);
    cr_assert_eq(finish(plugin, recv, NULL), NET_SUCCESS);
    cr_assert_eq(memcmp(pair.source, pair.target, 100000), 0);
    pair_close(plugin, &pair);
}

Test(device, every_table_has_all_that_nccl_calls)
{
    struct plugin plugin = plugin_open();

    for (int version = 7; version <= 12; version++) {
        /* The first 17 members are the same in all tables. reg_dmabuf could be NULL, but is not. */
        void *const *member;
        char symbol[32];

        snprintf(symbol, sizeof(symbol), "ncclNetPlugin_v%d", version);
        member = dlsym(plugin.library, symbol);
        cr_assert_not_null(member, "%s", symbol);
        for (int i = 0; i < 17; i++)
            cr_assert_not_null(member[i], "%s member %d", symbol, i);
        cr_assert_str_eq((const char *)member[0], "Perseus");
    }
    cr_assert_not_null(plugin.net->finalize);
    plugin_close(&plugin);
}

Test(device, properties_are_what_nccl_needs)
{
    struct plugin plugin = plugin_open();
    struct net_properties_v12 properties;
    int count = 0;

    cr_assert_eq(plugin.net->devices(&count), NET_SUCCESS);
    cr_assert_gt(count, 0);
    for (int i = 0; i < count; i++) {
        cr_assert_eq(plugin.net->properties(i, &properties), NET_SUCCESS);
        cr_assert(properties.name && properties.name[0]);
        cr_assert(properties.ptr_support & NET_PTR_HOST);
        cr_assert_gt(properties.speed, 0);
        cr_assert_eq(properties.max_recvs, 8);
        cr_assert_eq(properties.device_type, NET_DEVICE_HOST);
        cr_assert_eq(properties.latency, 0, "as NCCL's IB transport, for which its model was tuned");
        cr_assert(properties.max_p2p_bytes > 0 && properties.max_p2p_bytes <= 1ull << 40);
        cr_assert_eq(properties.max_coll_bytes, properties.max_p2p_bytes);
        cr_assert(properties.vdevice.count == 1 && properties.vdevice.device[0] == i);
    }
    cr_assert_neq(plugin.net->properties(count, &properties), NET_SUCCESS);
    cr_assert_neq(plugin.net->properties(-1, &properties), NET_SUCCESS);
    plugin_close(&plugin);
}

Test(device, contexts_are_counted_and_null_is_finalized)
{
    struct plugin first = plugin_open(), second = plugin_open();

    cr_assert_eq(first.net->finalize(NULL), NET_SUCCESS);
    plugin_close(&first);
    transfer(&second, 0);
    plugin_close(&second);
}

Test(device, the_plugin_may_be_unloaded_and_loaded_again)
{
    for (int i = 0; i < 5; i++) {
        struct plugin plugin = plugin_open();

        transfer(&plugin, 0);
        plugin_close(&plugin);
    }
}

static int other_lines;

static void count_lines(int level, unsigned long subsystems, const char *file, int line, const char *format, ...)
{
    other_lines++;
}

/* The code of a finished context's log may be unloaded. */
Test(device, the_log_of_a_context_that_was_finalized_is_not_called)
{
    struct plugin first = plugin_open();
    struct net_properties_v12 properties;
    void *second = NULL;
    int lines, before;

    cr_assert_eq(first.net->init(&second, 2, NULL, count_lines, NULL), NET_SUCCESS);
    first.net->properties(-1, &properties);
    cr_assert_gt(other_lines, 0, "the log of the newest context is in use");
    cr_assert_eq(first.net->finalize(second), NET_SUCCESS);
    lines = other_lines;
    before = warnings;
    first.net->properties(-1, &properties);
    cr_assert_eq(other_lines, lines);
    cr_assert_gt(warnings, before, "then that of the remaining context is");
    plugin_close(&first);
}

/* Two NCCLs in one process, each linked into a library of its own. The init of the second must not close the devices
 * that the comms of the first use. */
Test(device, a_second_nccl_of_an_old_version_leaves_the_first_its_comms)
{
    struct plugin plugin = {.library = dlopen(getenv("PERSEUS_TEST_PLUGIN"), RTLD_NOW | RTLD_LOCAL)};
    const struct net_v8 *old = dlsym(plugin.library, "ncclNetPlugin_v8");
    uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS;
    uint8_t handle[NET_HANDLE_BYTES];
    struct pair pair = {.listen = NULL};
    void *recv, *send;

    plugin.net = dlsym(plugin.library, "ncclNetPlugin_v12");
    cr_assert_eq(old->init(keep_warning), NET_SUCCESS, "%s", last_warning);
    cr_assert_eq(old->init(keep_warning), NET_SUCCESS, "init again, while there are no comms");
    cr_assert_eq(old->listen(0, handle, &pair.listen), NET_SUCCESS);
    cr_assert_eq(old->connect(0, handle, &pair.send, NULL), NET_SUCCESS);
    cr_assert_eq(old->init(count_lines), NET_SUCCESS);
    while (!pair.send || !pair.recv) {
        if (!pair.send)
            cr_assert_eq(old->connect(0, handle, &pair.send, NULL), NET_SUCCESS);
        if (!pair.recv)
            cr_assert_eq(old->accept(pair.listen, &pair.recv, NULL), NET_SUCCESS);
        cr_assert_lt(prs_clock_ms(), give_up);
    }
    pair.source = calloc(1, PAIR_BYTES);
    pair.target = malloc(PAIR_BYTES);
    cr_assert_eq(old->init(keep_warning), NET_SUCCESS);
    cr_assert_eq(old->reg(pair.send, pair.source, PAIR_BYTES, NET_PTR_HOST, &pair.source_mhandle), NET_SUCCESS);
    cr_assert_eq(old->reg(pair.recv, pair.target, PAIR_BYTES, NET_PTR_HOST, &pair.target_mhandle), NET_SUCCESS);
    recv = recv_bytes(&plugin, &pair, 0, PAIR_BYTES, 1);
    send = send_bytes(&plugin, &pair, 0, PAIR_BYTES, 1);
    cr_assert_eq(finish(&plugin, send, NULL), NET_SUCCESS);
    cr_assert_eq(finish(&plugin, recv, NULL), NET_SUCCESS);
    cr_assert_eq(memcmp(pair.source, pair.target, PAIR_BYTES), 0);
    old->close_listen(pair.listen);
    pair_close(&plugin, &pair);
    cr_assert_eq(old->init(keep_warning), NET_SUCCESS, "init after the comms are closed");
}

/* Calls that only older tables have, and how they refuse them. */
Test(device, old_tables_refuse_what_is_impossible_by_name)
{
    void *library = dlopen(getenv("PERSEUS_TEST_PLUGIN"), RTLD_NOW | RTLD_LOCAL), *comm = library, *mhandle = library;
    const struct net_v7 *v7 = dlsym(library, "ncclNetPlugin_v7");
    const struct net_v8 *v8 = dlsym(library, "ncclNetPlugin_v8");
    const struct net_v9 *v9 = dlsym(library, "ncclNetPlugin_v9");
    const struct net_v10 *v10 = dlsym(library, "ncclNetPlugin_v10");
    const struct net_v11 *v11 = dlsym(library, "ncclNetPlugin_v11");
    uint8_t handle[NET_HANDLE_BYTES] = {0};
    struct net_properties_v11 properties;
    struct net_properties_v9 narrow;
    struct net_vdevice_v9 members = {.count = NET_VDEVICE_MAX_V9 + 1};
    int device = -1;

    cr_assert_eq(v8->listen(0, handle, &comm), NET_INVALID_ARGUMENT, "listen before init");
    cr_assert_eq(v8->connect(0, handle, &comm, NULL), NET_INVALID_ARGUMENT, "connect before init");
    cr_assert_eq(v10->connect(0, NULL, handle, &comm, NULL), NET_INVALID_ARGUMENT, "connect before init, v10");
    cr_assert_eq(v10->init(keep_warning, NULL), NET_SUCCESS, "%s", last_warning);
    cr_assert_eq(v7->reg(NULL, handle, -1, NET_PTR_HOST, &mhandle), NET_INVALID_ARGUMENT);
    cr_assert(!mhandle && strstr(last_warning, "-1 bytes"), "%s", last_warning);
    for (; members.count >= -1; members.count -= NET_VDEVICE_MAX_V9 + 2) {
        cr_assert_eq(v9->make_vdevice(&device, &members), NET_INVALID_ARGUMENT, "%d members", members.count);
        cr_assert(strstr(last_warning, "at most 4"), "%s", last_warning);
    }
    members = (struct net_vdevice_v9){.count = 2, .device = {0, 1}};
    cr_assert_eq(v9->make_vdevice(&device, &members), NET_SUCCESS, "%s", last_warning);
    cr_assert_eq(v9->properties(device, &narrow), NET_SUCCESS);
    cr_assert(narrow.vdevice.count == 2 && narrow.vdevice.device[1] == 1);
    cr_assert_neq(v9->properties(99, &narrow), NET_SUCCESS);
    cr_assert_neq(v11->properties(99, &properties), NET_SUCCESS);
}

/* A communicator of one rank: how the tables of GIN and RMA refuse impossible and missing numbers. */
Test(device, gin_and_rma_tables_refuse_what_is_impossible_by_name)
{
    void *library = dlopen(getenv("PERSEUS_TEST_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
    const struct gin_v12 *v12 = dlsym(library, "ncclGinPlugin_v12");
    const struct rma_v14 *v14 = dlsym(library, "ncclRmaPlugin_v14");
    const struct rma_v15 *v15 = dlsym(library, "ncclRmaPlugin_v15");
    struct rma_config_v14 config = {.contexts = 1, .traffic_class = -1, .rank_stride = -1};
    struct net_properties_v11 properties11;
    struct net_properties_v12 properties12;
    uint8_t handle[NET_HANDLE_BYTES];
    void *handles[] = {handle}, *context, *listen, *comm, *set = library;

    cr_assert_eq(v12->init(&context, 1, keep_warning), NET_SUCCESS, "%s", last_warning);
    cr_assert_neq(v12->properties(99, &properties11), NET_SUCCESS);
    cr_assert_neq(v14->properties(99, &properties12), NET_SUCCESS);
    cr_assert_eq(v12->listen(context, 0, handle, &listen), NET_SUCCESS, "%s", last_warning);
    cr_assert_eq(v12->connect(NULL, handles, 1, 1, 1, 1, listen, &comm), NET_INVALID_ARGUMENT, "rank 1 of 1");
    cr_assert_null(comm);
    cr_assert_eq(v12->connect(NULL, handles, 1, 0, 0, 1, listen, &comm), NET_SUCCESS, "no connections: one is made");
    cr_assert_eq(v14->create_context(comm, &config, &set), NET_INVALID_ARGUMENT);
    cr_assert(!set && strstr(last_warning, "stride -1"), "%s", last_warning);
    set = library;
    cr_assert_eq(v15->create_context(comm, &config, &set), NET_INVALID_ARGUMENT);
    cr_assert_null(set);
    config = (struct rma_config_v14){.traffic_class = 256};
    cr_assert_eq(v14->create_context(comm, &config, &set), NET_INVALID_ARGUMENT);
    cr_assert(strstr(last_warning, "256"), "%s", last_warning);
    config.traffic_class = -1;
    cr_assert_eq(v14->create_context(comm, &config, &set), NET_SUCCESS, "no contexts: one is made");
    cr_assert_eq(v14->destroy_context(set), NET_SUCCESS);
    cr_assert_eq(v12->close_coll(comm), NET_SUCCESS);
    cr_assert_eq(v12->close_listen(listen), NET_SUCCESS);
    cr_assert_eq(v12->finalize(context), NET_SUCCESS);
}

Test(device, a_virtual_device_joins_its_members)
{
    struct plugin plugin = plugin_open();
    struct net_vdevice_v12 members = {.count = 2, .device = {0, 1}};
    struct net_properties_v12 one, both;
    int device = -1, again = -1, count = 0;

    plugin.net->devices(&count);
    if (count < 2)
        cr_skip("one device only");
    cr_assert_eq(plugin.net->make_vdevice(&device, &members), NET_SUCCESS, "%s", last_warning);
    cr_assert_eq(plugin.net->make_vdevice(&again, &members), NET_SUCCESS);
    cr_assert_eq(device, again, "the same members make the same device");
    cr_assert_eq(plugin.net->properties(0, &one), NET_SUCCESS);
    cr_assert_eq(plugin.net->properties(device, &both), NET_SUCCESS);
    cr_assert_eq(both.vdevice.count, 2);
    cr_assert_eq(both.speed, 2 * one.speed);
    cr_assert_not_null(strchr(both.name, '+'));
    transfer(&plugin, device);
    members.device[1] = 0;
    cr_assert_eq(plugin.net->make_vdevice(&again, &members), NET_INVALID_ARGUMENT, "a member twice");
    members.device[1] = 99;
    cr_assert_eq(plugin.net->make_vdevice(&again, &members), NET_INVALID_ARGUMENT, "no such member");
    members.count = 9;
    cr_assert_eq(plugin.net->make_vdevice(&again, &members), NET_INVALID_ARGUMENT, "too many");
    plugin_close(&plugin);
}

Test(device, a_wide_device_talks_to_a_narrow_one)
{
    struct plugin plugin = plugin_open();
    struct net_vdevice_v12 members = {.count = 2, .device = {0, 1}};
    struct pair pair = {.listen = NULL};
    uint8_t handle[NET_HANDLE_BYTES];
    int device = -1;

    cr_assert_eq(plugin.net->make_vdevice(&device, &members), NET_SUCCESS, "%s", last_warning);
    cr_assert_eq(plugin.net->listen(plugin.context, device, handle, &pair.listen), NET_SUCCESS);
    pair_connect(&plugin, 0, handle, &pair);
    plugin.net->close_send(pair.send);
    plugin.net->close_recv(pair.recv);
    plugin_close(&plugin);
}

/* A child of a fork cannot free what its parent has allocated, so the leak checker must not check it. */
static bool is_child;
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void)
{
    return is_child;
}

Test(device, a_child_of_a_fork_disturbs_nobody)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *recv, *send;
    int status = -1;
    pid_t child;

    cr_assert(other_threads_settle(), "idle threads are still running after 60 s");
    child = fork();
    if (child == 0) {
        is_child = true;
        memset(pair.target, 1, PAIR_BYTES); /* its own copy */
        pair_close(&plugin, &pair);
        plugin.net->finalize(plugin.context);
        exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x", status);
    recv = recv_bytes(&plugin, &pair, 0, PAIR_BYTES, 1);
    send = send_bytes(&plugin, &pair, 0, PAIR_BYTES, 1);
    cr_assert_eq(finish(&plugin, send, NULL), NET_SUCCESS);
    cr_assert_eq(finish(&plugin, recv, NULL), NET_SUCCESS);
    cr_assert_eq(memcmp(pair.source, pair.target, PAIR_BYTES), 0);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(device, a_child_of_a_fork_may_open_the_plugin_again)
{
    struct plugin plugin = plugin_open();
    int status = -1;
    pid_t child;

#ifdef __SANITIZE_THREAD__
    cr_skip("a child of a process with threads cannot start threads under this sanitizer");
#endif
    cr_assert(other_threads_settle(), "idle threads are still running after 60 s");
    child = fork();
    if (child == 0) {
        struct plugin own = plugin_open();

        is_child = true;
        transfer(&own, 0);
        plugin_close(&own);
        exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x", status);
    transfer(&plugin, 0);
    plugin_close(&plugin);
}

static bool is_stopping;

/* Holds the plugin's locks nearly all the time. */
static void *query_forever(void *arg)
{
    const struct plugin *plugin = arg;
    struct net_properties_v12 properties;

    while (!__atomic_load_n(&is_stopping, __ATOMIC_RELAXED))
        plugin->net->properties(-1, &properties);
    return NULL;
}

Test(device, a_child_forked_while_a_thread_is_inside_does_not_hang)
{
    struct plugin plugin = plugin_open();
    pthread_t thread;

#ifdef __SANITIZE_THREAD__
    cr_skip("a child of a process with threads cannot start threads under this sanitizer");
#endif
#ifdef __SANITIZE_ADDRESS__
    cr_skip(
        "a child would inherit locks of the sanitizer's allocator that the thread holds: it allocates all the time");
#endif
    cr_assert_eq(pthread_create(&thread, NULL, query_forever, &plugin), 0);
    for (int i = 0; i < 20; i++) {
        int status = -1;
        pid_t child = fork();

        if (child == 0) {
            struct plugin own;

            alarm(100);
            own = plugin_open();
            plugin_close(&own);
            _exit(0);
        }
        cr_assert_eq(waitpid(child, &status, 0), child);
        cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child %d: status %#x", i, status);
    }
    __atomic_store_n(&is_stopping, true, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    plugin_close(&plugin);
}

Test(device, memory_that_cannot_be_written_is_refused_by_name)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *unmapped = (void *)0x10000, *mhandle = &plugin, *readable; /* below all that malloc() returns */

    warnings = 0;
    cr_assert_neq(plugin.net->reg(pair.recv, unmapped, 8192, NET_PTR_HOST, &mhandle), NET_SUCCESS, "not mapped");
    cr_assert_null(mhandle);
    cr_assert_gt(warnings, 0);
    readable = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(plugin.net->reg(pair.recv, readable, 8192, NET_PTR_HOST, &mhandle), NET_SUCCESS, "read-only");
    cr_assert_null(mhandle);
    cr_assert(strstr(last_warning, "writable"), "%s", last_warning);
    munmap(readable, 8192);
    cr_assert_neq(plugin.net->reg(pair.recv, pair.target, 64, 77, &mhandle), NET_SUCCESS, "type 77");
    cr_assert_eq(plugin.net->dereg(pair.recv, NULL), NET_SUCCESS);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

Test(device, the_same_memory_may_be_registered_many_times)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    void *mhandle[64];

    for (int i = 0; i < 64; i++)
        cr_assert_eq(
            plugin.net->reg(i % 2 ? pair.send : pair.recv, pair.target + i * 100, 5000, NET_PTR_HOST, &mhandle[i]),
            NET_SUCCESS);
    for (int i = 0; i < 64; i++)
        cr_assert_eq(plugin.net->dereg(pair.send, mhandle[i]), NET_SUCCESS);
    pair_close(&plugin, &pair);
    plugin_close(&plugin);
}

static void init_fails(const char *name, const char *value)
{
    void *library = dlopen(getenv("PERSEUS_TEST_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
    const struct net_v12 *net = dlsym(library, "ncclNetPlugin_v12");
    struct net_properties_v12 properties;
    void *context = library;

    setenv(name, value, 1);
    cr_assert_neq(net->init(&context, 1, NULL, keep_warning, NULL), NET_SUCCESS, "%s=%s", name, value);
    cr_assert_null(context);
    cr_assert_eq(net->finalize(context), NET_SUCCESS, "NCCL 2.28 finalizes what failed");
    cr_assert(strstr(last_warning, name), "%s=%s: %s", name, value, last_warning);
    unsetenv(name);
    warnings = 0;
    net->properties(-1, &properties);
    cr_assert_eq(warnings, 0, "the log of a failed init is still in use");
}

Test(device, impossible_values_of_variables_are_named)
{
    static const char *const wrong[][2] = {
        {"NCCL_IB_HCA", "mlx5_0:x"}, {"PERSEUS_ORDER", "gossip"}, {"PERSEUS_TIMEOUT_MS", "soon"}};

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        init_fails(wrong[i][0], wrong[i][1]);
}

/* The first listen fails, so that the job ends: when init fails, NCCL takes another network. */
static void expect_no_listen(const char *said)
{
    struct plugin plugin;
    uint8_t handle[NET_HANDLE_BYTES];
    void *comm = NULL;
    int count = 0;

    plugin = plugin_open();
    cr_assert_eq(plugin.net->devices(&count), NET_SUCCESS);
    cr_assert_eq(count, 1, "with 0 devices NCCL would use another network");
    cr_assert_eq(plugin.net->listen(plugin.context, 0, handle, &comm), NET_SYSTEM_ERROR);
    cr_assert_null(comm);
    cr_assert(strstr(last_warning, said), "%s", last_warning);
    plugin_close(&plugin);
}

Test(device, required_without_a_device_refuses_to_listen)
{
    setenv("NCCL_IB_HCA", "=nosuch", 1);
    setenv("PERSEUS_REQUIRED", "1", 1);
    expect_no_listen("PERSEUS_REQUIRED");
}

Test(device, a_wrong_value_of_required_is_taken_as_required)
{
    setenv("PERSEUS_REQUIRED", "perhaps", 1);
    expect_no_listen("PERSEUS_REQUIRED=perhaps: must be a whole number from 0 to 1");
}

/* Runs over EFA, too. */
Test(device, protocols_with_flags_in_the_data_are_left_to_rails_that_keep_order)
{
    struct plugin plugin;
    struct net_properties_v12 properties;
    bool in_order;

    unsetenv("NCCL_PROTO");
    plugin = plugin_open();
    cr_assert_eq(plugin.net->properties(0, &properties), NET_SUCCESS);
    in_order = !properties.force_flush;
    cr_assert_eq(!getenv("NCCL_PROTO"), in_order);
    cr_assert(in_order || strcmp(getenv("NCCL_PROTO"), "Simple") == 0);
    plugin_close(&plugin);

    setenv("NCCL_PROTO", "LL,Simple", 1);
    last_warning[0] = 0;
    plugin = plugin_open();
    cr_assert_str_eq(getenv("NCCL_PROTO"), "LL,Simple", "the user's setting stays");
    cr_assert_eq(!strstr(last_warning, "NCCL_PROTO"), in_order, "%s", last_warning);
    plugin_close(&plugin);
}
