/* SPDX-License-Identifier: Apache-2.0 */
/* One of two processes that exchange device memory over an RC queue pair: CUDA and verbs of cuda_rw.c. */
#ifndef TEST_SOFTNIC_CUDA_SIDE_H
#define TEST_SOFTNIC_CUDA_SIDE_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* PRIVATE: no handle that another process could open; registered by DMA-BUF, as NCCL has it. */
enum memory { LEGACY, VMM, DMABUF, PRIVATE, PAGEABLE, PINNED, MEMORY_KINDS };
extern const char *const memory_names[MEMORY_KINDS];

struct side {
    bool initiator;
    int socket; /* to the other */
    bool fake;  /* the driver is fake_cuda: no kernels, no figures */
    int copier; /* pid of the process that copies device memory (softnic-run --copier); 0: none */
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    bool srd; /* by SRD (cuda_srd.h), then these two: */
    struct ibv_ah *ah;
    uint32_t peer_qpn;
};

/* Memory, registered. */
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

/** Tell the other side bytes and hear its own; ends the process when it is gone. */
void side_exchange(struct side *side, const void *mine, void *theirs, size_t bytes);
void side_barrier(struct side *side);

double now_s(void);

/** Until complete: the median of n times, which are sorted, and how far they lie apart. */
enum { TIMES_MOST = 2000 };
enum {
    PATIENCE_S = 60, /* for what must come: only a failure waits so long, and a machine may keep a thread off its cores
                        for seconds */
    LONG_S = 15,     /* for what ends soon; less than the NIC's patience with its copier, 20 s */
};
void times_print(const char *what, double *us, size_t n);

/** CUDA (GPU: rank modulo count) and a connected queue pair. False: cannot run here; the reason was printed. */
bool side_open(struct side *side);

/** One more queue pair on the same device, completion queue and socket, connected; close it with ibv_destroy_qp. */
void side_add(const struct side *side, struct side *more);
/** The same, connected to itself. */
void side_loop(const struct side *side, struct side *loop);

void buf_make(struct side *side, struct buf *buf, enum memory memory, size_t bytes);
void buf_free(struct buf *buf);
void buf_fill(const struct buf *buf, uint32_t seed);
void buf_zero(const struct buf *buf);

/** True when the first bytes are those of the seed and, unless whole, the rest is still zero; says where not. */
bool buf_check(const struct buf *buf, size_t bytes, uint32_t seed, const char *what);
void buf_read(const struct buf *buf, size_t offset, void *to, size_t bytes);

/** Connect the queue pairs (again): both sides call it. */
void side_connect(struct side *side);

/** With the driver of fake_cuda: its next call of that name fails. */
void fail_next(const char *call, int result);

/** The one behind so many that go well; and how often it was called so far. */
void fail_later(const char *call, int after, int result);
int driver_calls(const char *call);

/** With that driver: as if a kernel ran in this process, and how many calls had to wait for its end so far. */
void kernel_runs(bool runs);
int kernel_waits(void);

/** With that driver: as if a thread of this process waited with the driver's lock in hand, and how many copies of this
 * process had to wait for it so far. */
void driver_locked(bool locked);
int driver_lock_waits(void);

/** Wait for one completion, 20 s at most. */
struct ibv_wc side_poll(struct side *side);

enum { IMM = 0x1234abcd /* immediate of every request that has one */ };

/** Post a signaled request at the same offset of both buffers. */
void post(struct side *side, enum ibv_wr_opcode opcode, const struct buf *buf, size_t offset, size_t bytes,
          struct remote remote);
/** The next completion is a success, or the process ends and says what failed. */
void expect_success(struct side *side, const char *what);
/** Tell the other side where the buffer is, and hear where its is. */
struct remote swap_remote(struct side *side, const struct buf *buf);

/** Start a kernel on the legacy default stream that spins until the word at flag is not 0 or 10 s have passed, then
 * writes 1 (it was) or 2 to the word after it. False: no kernels here. */
bool spin_start(uint64_t flag);
/** Begin to ask over and over, in another thread, whether the kernel has come to its end; stop asking. */
void spin_watch(void);
void spin_watch_end(void);
/** Wait for the kernel with cuCtxSynchronize. */
void spin_wait(void);

int side_gpus(void);
/** Memory is made, and looked at, on the other of the first two GPUs from here on, in this thread; and back. */
void side_other_gpu(bool other);

/** Use the side's GPU in one more thread. */
void side_enter_thread(void);

#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            die(__FILE__, __LINE__, #condition);                                                                       \
    } while (0)
_Noreturn void die(const char *file, int line, const char *what);

#endif
