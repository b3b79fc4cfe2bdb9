/* SPDX-License-Identifier: Apache-2.0 */
/* One of two processes that exchange device memory over an RC queue pair: CUDA and verbs of test_cuda_rw.c. */
#ifndef TEST_SOFTNIC_CUDA_SIDE_H
#define TEST_SOFTNIC_CUDA_SIDE_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* PRIVATE: no handle that another process could open; registered by DMA-BUF, as NCCL does. */
enum memory { LEGACY, VMM, DMABUF, PRIVATE, PAGEABLE, PINNED, MEMORY_KINDS };
extern const char *const memory_names[MEMORY_KINDS];

struct side {
    bool initiator;
    int socket; /* to the other side */
    bool fake;  /* the driver is fake_cuda: no kernels, no figures */
    int copier; /* pid of the process that copies device memory (softnic-run --copier); 0: none */
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    bool srd; /* uses SRD (test_cuda_srd.h), with these two: */
    struct ibv_ah *ah;
    uint32_t peer_qpn;
};

/* Registered memory. */
struct buf {
    enum memory memory;
    uint64_t addr;
    size_t bytes;
    struct ibv_mr *mr;
    unsigned long long handles[4];
    int num_handles;
    int dmabuf;
};

struct remote {
    uint64_t addr;
    uint32_t rkey;
};

/* Send bytes to the other side and receive its own; end the process if the other side has ended. */
void side_exchange(struct side *side, const void *mine, void *theirs, size_t bytes);
void side_barrier(struct side *side);

double now_s(void);

/* Capacity of the array of times that a test hands to times_print(). */
enum { TIMES_MOST = 2000 };
enum {
    /* Limit for what must come: only a failure waits this long, but a machine may keep a thread off its cores. */
    PATIENCE_S = 60,
    LONG_S = 15, /* limit for what ends soon; less than the 20 s that the NIC waits for its copier */
};
void times_print(const char *what, double *us, size_t n);

/* Start CUDA (GPU: rank modulo count) and connect a queue pair. False: cannot run here; the reason was printed. */
bool side_open(struct side *side);

/* Connect one more queue pair on the same device, completion queue and socket; close it with ibv_destroy_qp. */
void side_add(const struct side *side, struct side *more);
/* As side_add(), but connected to itself. */
void side_loop(const struct side *side, struct side *loop);

void buf_make(struct side *side, struct buf *buf, enum memory memory, size_t bytes);
void buf_free(struct buf *buf);
void buf_fill(const struct buf *buf, uint32_t seed);
void buf_zero(const struct buf *buf);

/* True if the first bytes are those of the seed and, unless whole, the rest is still zero; prints the first
 * difference. */
bool buf_check(const struct buf *buf, size_t bytes, uint32_t seed, const char *what);
void buf_read(const struct buf *buf, size_t offset, void *to, size_t bytes);

/* Connect the queue pairs, for the first time or again: both sides call it. */
void side_connect(struct side *side);

/* With fake_cuda: make the next call of that name fail. */
void fail_next(const char *call, int result);

/* Let the next `after` calls succeed and the one after them fail; and return how often it was called so far (0 with a
 * real driver). */
void fail_later(const char *call, int after, int result);
int driver_calls(const char *call);

/* With fake_cuda: act as if a kernel ran in this process; and count the calls that waited for its end so far. */
void kernel_runs(bool runs);
int kernel_waits(void);

/* With fake_cuda: act as if a thread of this process waited and held the driver's lock; and count the copies of this
 * process that waited for it so far. */
void driver_locked(bool locked);
int driver_lock_waits(void);

/* Wait for one completion, 20 s at most. */
struct ibv_wc side_poll(struct side *side);

enum { IMM = 0x1234abcd /* immediate of every request that has one */ };

/* Post a signaled request at the same offset of both buffers. */
void post(struct side *side, enum ibv_wr_opcode opcode, const struct buf *buf, size_t offset, size_t bytes,
          struct remote remote);
/* Expect that the next completion is a success; otherwise print what failed and end the process. */
void expect_success(struct side *side, const char *what);
/* Exchange the addresses and keys of both sides' buffers; return the other side's. */
struct remote swap_remote(struct side *side, const struct buf *buf);

/* Start a kernel on the legacy default stream that spins until the word at flag is not 0 or 10 s have passed, then
 * writes 1 (it was) or 2 to the word after it. False: no kernels here. */
bool spin_start(uint64_t flag);
/* Start, or stop, a thread that polls whether the kernel has ended. */
void spin_watch(void);
void spin_watch_end(void);
/* Wait for the kernel with cuCtxSynchronize. */
void spin_wait(void);

int side_gpus(void);
/* Make and access memory on the other of the first two GPUs from here on, in this thread; or on the first one
 * again. */
void side_other_gpu(bool other);
/* Memory of the virtual memory API that is made from here on is mapped for its own GPU only. */
void side_own_gpu_only(bool only);

/* Use the side's GPU in this additional thread. */
void side_enter_thread(void);

#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            die(__FILE__, __LINE__, #condition);                                                                       \
    } while (0)
_Noreturn void die(const char *file, int line, const char *what);

#endif
