/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the CUDA runtime's interface that Perseus uses, for emulated Hopper GPUs. */
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <set>

#include "tools/hopper/hopper.h"
#include "tools/hopper/launch.h"
#include "tools/hopper/device_memory.h"
#include "tools/hopper/stream.h"
#include "tools/hopper/tile_map.h"
#include "tools/hopper/virtual.h"

using namespace hopper;

static thread_local int current_device;
static thread_local bool has_context; /* a new thread has no context until a call of the runtime needs one */
static thread_local cudaError_t last_error;

static cudaError_t result(cudaError_t e)
{
    if (e != cudaSuccess)
        last_error = e;
    return e;
}

static int device_here(void)
{
    has_context = true;
    return current_device;
}

static struct stream_state *stream_here(cudaStream_t stream)
{
    return stream_of(stream, device_here());
}

/* ---- errors, devices ---- */
cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
    case cudaSuccess:
        return "no error";
    case cudaErrorLaunchFailure:
        return "the emulated GPU found a violation";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidValue:
        return "invalid argument";
    default:
        return "an error of the emulated runtime";
    }
}

const char *cudaGetErrorName(cudaError_t e)
{
    return cudaGetErrorString(e);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= (int)hopper_devices())
        return result(cudaErrorInvalidDevice);
    current_device = device;
    has_context = true;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = (int)hopper_devices();
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    if (device < 0 || device >= (int)hopper_devices())
        return result(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = (int)hopper_sms();
        break;
    case cudaDevAttrClockRate:
        *value = 1980000;
        break;
    case cudaDevAttrPciDomainId:
    case cudaDevAttrPciDeviceId:
        *value = 0;
        break;
    case cudaDevAttrPciBusId:
        *value = device + 1;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = MOST_SHARED_BYTES;
        break;
    default:
        return result(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device)
{
    if (device < 0 || device >= (int)hopper_devices())
        return result(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof(*properties));
    strcpy(properties->name, "emulated Hopper GPU");
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int, int)
{
    *can = 1;
    return cudaSuccess;
}

static std::atomic<uint32_t> repeated_access;

uint32_t hopper_repeated_access(void)
{
    return repeated_access;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned)
{
    if (peer == device_here() || peer < 0 || peer >= (int)hopper_devices())
        return result(cudaErrorInvalidDevice);
    if (memory_peer_allowed(device_here(), peer)) {
        repeated_access++;
        return result(cudaErrorPeerAccessAlreadyEnabled);
    }
    memory_allow_peer(device_here(), peer);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    return result(stream_wait_device(device_here()));
}

/* Behaves like the driver's function, which does not know the runtime's device. */
static CUresult encode_here(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t dims, void *base,
                            const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                            const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                            CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    return has_context ? tile_map_encode(map, type, dims, base, size, stride, box, element_strides, interleave, swizzle,
                                         promotion, fill)
                       : CUDA_ERROR_INVALID_CONTEXT;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **fn, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
{
    *fn = strcmp(name, "cuTensorMapEncodeTiled") == 0 ? (void *)encode_here : virtual_call(name);
    if (found)
        *found = *fn ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- memory ---- */
cudaError_t cudaMalloc(void **out, size_t bytes)
{
    *out = bytes == 0 ? NULL : memory_allocate(bytes, device_here(), MEMORY_DEVICE);
    return result(bytes != 0 && !*out ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total)
{
    *unused = *total = (size_t)8 << 30; /* more than any test needs */
    return result(cudaSuccess);
}

cudaError_t cudaFree(void *p)
{
    cudaError_t e = cudaDeviceSynchronize(); /* in effect CUDA's cudaFree() also waits */
    if (p && !memory_free(p, MEMORY_DEVICE))
        return result(cudaErrorInvalidValue);
    return e;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned)
{
    *out = memory_allocate(bytes == 0 ? 1 : bytes, -1, MEMORY_HOST);
    return result(!*out ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    return cudaHostAlloc(out, bytes, 0);
}

cudaError_t cudaFreeHost(void *p)
{
    return result(!p || memory_free(p, MEMORY_HOST) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostGetDevicePointer(void **out, void *host, unsigned)
{
    *out = host;
    return cudaSuccess;
}

/* Reports ordinary host memory, because that is what the NIC sees. */
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *p)
{
    memset(attributes, 0, sizeof(*attributes));
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->hostPointer = const_cast<void *>(p);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *, int, int)
{
    return result(cudaErrorNotSupported); /* an emulated GPU is on no bus */
}

/* The handle holds the address, because only this process opens it. */
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p)
{
    struct allocation a;
    if (!memory_find(p, 1, &a))
        return result(cudaErrorInvalidValue);
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &a.base, sizeof(a.base));
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned)
{
    struct allocation a;
    memcpy(out, &handle, sizeof(*out));
    if (!memory_find(*out, 1, &a))
        return result(cudaErrorInvalidValue);
    memory_allow_peer(device_here(), a.device);
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *)
{
    return cudaSuccess;
}

/* Whether each side that is on a device, by the kind of the copy, has so many bytes of memory. */
static bool sides_exist(const void *to, size_t to_bytes, const void *from, size_t from_bytes, cudaMemcpyKind kind)
{
    struct allocation a;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return (!to_device || memory_find(to, to_bytes, &a)) && (!from_device || memory_find(from, from_bytes, &a));
}

static cudaError_t enqueue_copy(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t bytes,
                                size_t rows, cudaMemcpyKind kind, cudaStream_t stream)
{
    work w = {};
    if (bytes == 0 || rows == 0)
        return cudaSuccess;
    size_t last = rows - 1;
    if (bytes > to_pitch || bytes > from_pitch ||
        !sides_exist(to, last * to_pitch + bytes, from, last * from_pitch + bytes, kind))
        return result(cudaErrorInvalidValue);
    w.kind = WORK_COPY;
    w.to = (uint8_t *)to;
    w.from = (const uint8_t *)from;
    w.bytes = bytes;
    w.rows = rows;
    w.to_pitch = to_pitch;
    w.from_pitch = from_pitch;
    return result(stream_enqueue(stream_here(stream), w));
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    return enqueue_copy(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t bytes, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream)
{
    return enqueue_copy(to, to_pitch, from, from_pitch, bytes, rows, kind, stream);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream)
{
    return enqueue_copy(to, bytes, from, bytes, bytes, 1, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    cudaError_t e = cudaMemcpyAsync(to, from, bytes, kind, NULL);
    return e != cudaSuccess ? e : result(stream_wait(stream_here(NULL)));
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t bytes, size_t rows,
                         cudaMemcpyKind kind)
{
    cudaError_t e = enqueue_copy(to, to_pitch, from, from_pitch, bytes, rows, kind, NULL);
    return e != cudaSuccess ? e : result(stream_wait(stream_here(NULL)));
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    work w = {};
    struct allocation a;
    if (bytes == 0)
        return cudaSuccess;
    if (!memory_find(to, bytes, &a))
        return result(cudaErrorInvalidValue);
    w.kind = WORK_SET;
    w.to = (uint8_t *)to;
    w.bytes = w.to_pitch = bytes;
    w.rows = 1;
    w.value = value;
    return result(stream_enqueue(stream_here(stream), w));
}

/* Asynchronous to the host, as CUDA's cudaMemset() is for device memory. */
cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    return cudaMemsetAsync(to, value, bytes, NULL);
}

/* ---- streams, events ---- */
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    *out = (cudaStream_t)stream_open(device_here(), (flags & cudaStreamNonBlocking) == 0);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int)
{
    return cudaStreamCreateWithFlags(out, flags);
}

cudaError_t cudaStreamCreate(cudaStream_t *out)
{
    return cudaStreamCreateWithFlags(out, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaError_t e = stream_wait(stream_here(stream));
    stream_close(stream_here(stream));
    return result(e);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return result(stream_wait(stream_here(stream)));
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return stream_idle(stream_here(stream)) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    *out = (cudaEvent_t) new event_state();
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    return cudaEventCreateWithFlags(out, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    cudaError_t r = event_wait((struct event_state *)e);
    delete (struct event_state *)e;
    return result(r);
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream)
{
    return result(stream_record(stream_here(stream), (struct event_state *)e));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned)
{
    return result(stream_wait_event(stream_here(stream), (struct event_state *)e));
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    return result(event_wait((struct event_state *)e));
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    return event_reached((struct event_state *)e) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    *ms = (float)((double)((struct event_state *)to)->ns - (double)((struct event_state *)from)->ns) * 1e-6f;
    return cudaSuccess;
}

/* ---- kernels ---- */
static std::mutex limits_lock;
static std::map<const void *, uint32_t> shared_limits;

/* The code of a kernel is loaded on a device when it is first queried or launched there, as with CUDA unless
 * CUDA_MODULE_LOADING is EAGER. */
static std::mutex loaded_lock;
static std::set<std::pair<int, const void *>> loaded;

static bool load(const void *kernel)
{
    std::lock_guard<std::mutex> held(loaded_lock);
    return loaded.insert({device_here(), kernel}).second;
}

static std::atomic<uint32_t> late_loads;

uint32_t hopper_late_loads(void)
{
    return late_loads;
}

/* Loading at a launch waits for all kernels that run on the device. */
static cudaError_t load_for_launch(const void *kernel, struct stream_state *s)
{
    const char *mode = getenv("CUDA_MODULE_LOADING");
    if (!load(kernel))
        return cudaSuccess;
    late_loads++;
    if (stream_captures(s) || (mode && strcmp(mode, "EAGER") == 0))
        return cudaSuccess;
    return stream_wait_kernels(device_here());
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel)
{
    (void)load(kernel);
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value)
{
    std::lock_guard<std::mutex> held(limits_lock);
    (void)load(kernel);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    if (value < 0 || value > MOST_SHARED_BYTES)
        return result(cudaErrorInvalidValue);
    shared_limits[kernel] = (uint32_t)value;
    return cudaSuccess;
}

static uint32_t cluster_of(const cudaLaunchConfig_t *config)
{
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            return config->attrs[i].val.clusterDim.x;
    return 1;
}

static bool config_fits(const void *kernel, const cudaLaunchConfig_t *config)
{
    std::lock_guard<std::mutex> held(limits_lock);
    auto limit = shared_limits.find(kernel);
    uint32_t threads = config->blockDim.x * config->blockDim.y * config->blockDim.z, cluster = cluster_of(config);
    uint32_t ctas = config->gridDim.x * config->gridDim.y * config->gridDim.z;
    return config->dynamicSmemBytes <= (limit == shared_limits.end() ? 48u << 10 : limit->second) && threads != 0 &&
           threads <= 1024 && ctas != 0 && cluster != 0 && cluster <= 8 && config->gridDim.x % cluster == 0;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *count, const void *kernel, const cudaLaunchConfig_t *config)
{
    if (!config_fits(kernel, config))
        return result(cudaErrorInvalidConfiguration);
    (void)load(kernel);
    *count = (int)device_max_clusters(config->blockDim.x * config->blockDim.y * config->blockDim.z,
                                      (uint32_t)config->dynamicSmemBytes, cluster_of(config));
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int threads, size_t shared)
{
    *count = (int)(device_max_clusters((uint32_t)threads, (uint32_t)shared, 1) / hopper_sms());
    return cudaSuccess;
}

static bool launches_block(void)
{
    const char *asked = getenv("CUDA_LAUNCH_BLOCKING");
    return asked && strtol(asked, NULL, 10) != 0;
}

cudaError_t hopper::launch_enqueue(const cudaLaunchConfig_t *config, const void *kernel, std::function<void()> body)
{
    cudaLaunchConfig_t c = *config;
    uint32_t cluster = cluster_of(config);
    int device = device_here();
    work w = {};
    if (!config_fits(kernel, config))
        return result(cudaErrorInvalidConfiguration);
    w.kind = WORK_LAUNCH;
    w.make = [=] {
        auto l = std::make_unique<launch>();
        l->kernel = kernel;
        l->body = body;
        l->device = device;
        l->grid = c.gridDim;
        l->block = c.blockDim;
        l->cluster_size = cluster;
        l->shared_bytes = (uint32_t)c.dynamicSmemBytes;
        l->clusters = c.gridDim.x * c.gridDim.y * c.gridDim.z / cluster;
        return l;
    };
    struct stream_state *s = stream_here(config->stream);
    cudaError_t e = load_for_launch(kernel, s);
    if (e == cudaSuccess)
        e = stream_enqueue(s, w);
    return result(e == cudaSuccess && launches_block() ? stream_wait(s) : e);
}
