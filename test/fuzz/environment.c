/* SPDX-License-Identifier: Apache-2.0 */
/* Values of the environment, and of softnic-run's options. An input is a name, a newline, and a value. */
#include <math.h>

#include "test/fuzz/fuzz.h"
#include "tools/softnic/world/quantity.h"
#include "tools/softnic/world/world.h"
#include "transport/host/config.h"
#include "transport/order/order.h"

static const char *const names[] = {
    "NCCL_IB_HCA",        "NCCL_SOCKET_IFNAME",         "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID",
    "NCCL_IB_ADDR_RANGE", "NCCL_IB_ADDR_FAMILY",        "NCCL_IB_GID_INDEX",  "NCCL_IB_TIMEOUT",
    "NCCL_IB_RETRY_CNT",  "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_TC",         "NCCL_IB_AR_THRESHOLD",
    "PERSEUS_ORDER",      "PERSEUS_TIMEOUT_MS",         "quantity",
};
enum { NAMES = sizeof(names) / sizeof(names[0]) };

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    return n < NAMES ? (size_t)snprintf((char *)out, room, "%s\n1", names[n]) : 0;
}

static void read_config(const char *name, const char *value)
{
    struct prs_config config;

    setenv(name, value, 1);
    if (!prs_config_read(NULL, &config)) {
        fuzz_accepted++;
        fuzz_require(config.queues_per_rail >= 1 && config.queues_per_rail <= PRS_ORDER_MAX_QUEUES_PER_RAIL,
                     "%d queues", config.queues_per_rail);
        fuzz_require(config.timeout >= 0 && config.timeout <= 31 && config.retry_count >= 0 && config.retry_count <= 7,
                     "timeout %d, retry_count %d", config.timeout, config.retry_count);
        fuzz_require(!config.gid_range_set || (config.gid_range_bits >= 0 && config.gid_range_bits <= 128), "%d bits",
                     config.gid_range_bits);
        fuzz_require(config.hca.count >= 0 && config.hca.count <= HCA_FILTER_ITEMS && config.ifname.count >= 0 &&
                         config.ifname.count <= HCA_FILTER_ITEMS,
                     "%d and %d names", config.hca.count, config.ifname.count);
        for (int port = 0; port < 3; port++)
            (void)prs_hca_filter_admits(&config.hca, "mlx5_1", port);
    }
    unsetenv(name);
}

static void read_quantity(const char *text)
{
    uint64_t value = 0;

    (void)sn_quantity_rate(text, &value);
    (void)sn_quantity_duration(text, &value);
    if (!sn_quantity_fraction(text, &value))
        fuzz_require(value <= 1000000000, "a fraction of %llu ppb", (unsigned long long)value);
    if (!sn_quantity_count(text, 3, 16, &value))
        fuzz_require(value >= 3 && value <= 16, "%llu", (unsigned long long)value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char *text = malloc(bytes + 1), *value;

    fuzz_require(text, "no memory");
    if (bytes)
        memcpy(text, data, bytes);
    text[bytes] = 0;
    value = strchr(text, '\n');
    if (value) {
        *value++ = 0;
        read_quantity(value);
        for (int i = 0; i < NAMES - 1; i++)
            if (!strcmp(text, names[i]))
                read_config(names[i], value);
    }
    free(text);
    return 0;
}
