# SPDX-License-Identifier: Apache-2.0
"""Contexts, one for each group of ranks, and the plans in them. _registry.py says which context an op gets."""
from __future__ import annotations

import ctypes
import errno
import operator
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ._bootstrap import Late, StoreExchange, rendezvous
from ._device import Cuda, Emulated
from ._library import Library, PerseusError, library

LEAST_ROWS = 16  # of a rank, in the smallest class of plans
LEAST_POSITIONS = 256  # of a rank, in the smallest plan of attention that was opened for more than one length
DEFAULT_TIMEOUT_MS = 600000  # the library's, where timeout_ms is 0
# Ops that prepare() knows: enum prs_gemm_op, and whether rows are normalised. _quant shares the plans of its op.
PREPARED = {"matmul_reduce_scatter": (1, 0), "all_gather_matmul": (2, 0), "matmul_all_reduce": (3, 0),
            "reduce_scatter": (1, 0), "reduce_scatter_rms_norm": (1, 1), "matmul_reduce_scatter_rms_norm": (1, 1),
            "all_reduce": (3, 0), "all_reduce_rms_norm": (3, 1), "matmul_all_reduce_rms_norm": (3, 1)}
PRODUCTS = ("matmul", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")  # by enum prs_gemm_op


def _listed(what: str, given: Any) -> list:
    """A list of what may be iterated only once, with the whole numbers of numpy and torch as Python's."""
    if not isinstance(given, Iterable):
        raise TypeError(f"perseus.Group.{what} is {given!r}; it must be a list of whole numbers")
    return [operator.index(number) if hasattr(number, "__index__") else number for number in given]


class Plan:
    """A plan of the library and the operands of its launches."""

    def __init__(self, handle: int, operands: ctypes.Structure, rows: int, close: Any) -> None:
        self.handle, self.operands, self.rows, self.close = handle, operands, rows, close
        self.reference = ctypes.byref(operands)
        self.info: Any = None  # MoE: struct prs_moe_info


class Products(dict):
    """What was found for operands of some sizes; begins anew where programs have too many of them."""

    MOST = 4096

    def __setitem__(self, sizes: tuple, found: tuple) -> None:
        if len(self) == self.MOST:
            self.clear()
        super().__setitem__(sizes, found)


def _sizes(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


class Group:
    """The ranks that work together: a context of libperseus-fused.

    Get one by perseus.init(), or let the first op of a torch process group make it. Attributes: name, rank, world,
    device (torch.device). All ranks make the same calls that open something in the same order, as with an NCCL
    communicator. One thread at a time may use a group; error(), check() and abort() may be called by any thread.
    """

    def __init__(self, name: str, rank: int, world: int, store: Any, process_group: Any, index: int, timeout_ms: int,
                 keys: str, mesh: Any = None, sleeps: bool = False) -> None:
        """keys: the beginning of the store's keys, which says which group this is."""
        self.name, self.rank, self.world, self.store, self.process_group = name, rank, world, store, process_group
        self.timeout_ms = timeout_ms or DEFAULT_TIMEOUT_MS
        self.of_torch = self.named = False  # whether torch knows the process group; whether its name was given
        self._mesh = mesh
        self.library: Library = library()
        self.place = (Emulated if self.library.emulated else Cuda)(self.library, index)
        self.device = self.place.torch
        self.number = -1 if self.device.type == "cpu" else index  # as Tensor.get_device() says it
        # one of autograd's, where the first op of a group may run
        dummy = isinstance(threading.current_thread(), threading._DummyThread)
        self.thread = threading.main_thread().ident if dummy else threading.get_ident()
        self._plans: dict[Any, Plan] = {}
        self.products = Products()  # by sizes, for ops that were called with them
        self.frozen = False
        self.ended: Any = None  # called by close()
        self.absent: list[int] = []  # ranks that were left out
        self.leaves_out = False  # the watchdog leaves out ranks that are lost
        self.sleeps, self.asleep = sleeps, False
        self._handle: int | None = None
        self._untold = threading.Lock()  # taken by who raises the asynchronous error first
        self._alive = threading.Lock()  # held while another thread asks or aborts, so that close() waits for it
        self.exchange = None
        if world > 1:
            limit_s = self.timeout_ms / 1000
            prefix = rendezvous(store, keys, name, rank, world,
                                limit_s if timeout_ms else store.timeout.total_seconds())
            self.exchange = StoreExchange(store, prefix, rank, world, limit_s)
        config = self.library.prs_fused_config(rank=rank, world=world, device=index, timeout_ms=timeout_ms,
                                               sleeps=sleeps)
        if self.exchange:
            config.allgather = self.exchange.callback
        self._handle = self._open("opening", "prs_fused_open", ctypes.byref(config))
        traffic = self.library.structs["prs_fused_traffic"]()
        self.library.prs_fused_traffic(self._handle, ctypes.byref(traffic))
        self.nodes = traffic.nodes

    # ---- opening ----

    def _open(self, what: str, function: str, *arguments: Any) -> int:
        """Calls a collective function whose last parameter is an out pointer."""
        out = ctypes.c_void_p()
        self._together(what, function, *arguments, ctypes.byref(out))
        return out.value or 0

    def _together(self, what: str, function: str, *arguments: Any) -> None:
        """Calls a collective function."""
        call = getattr(self.library, function)
        if self.exchange is None:
            self.library.check(call(*arguments), f"perseus: {what}: rank {self.rank} of group {self.name}")
            return
        with self.exchange.entered():
            status = call(*arguments)
        failure, self.exchange.failure = self.exchange.failure, None
        if status != 0 and failure:
            if not isinstance(failure, Exception):
                raise failure
            advice = (": does every rank call the same ops with the same sizes in the same order?"
                      if isinstance(failure, Late) else "")
            raise PerseusError(f"perseus: {what}: rank {self.rank} of group {self.name}: {failure}{advice}",
                               getattr(failure, "code", status), getattr(failure, "rank", None)) from failure
        self.library.check(status, f"perseus: {what}: rank {self.rank} of group {self.name}")

    def _retried(self, call: Any, *arguments: Any) -> Any:
        """call(*arguments), once more without what torch keeps and nothing uses, where memory was short."""
        try:
            return call(*arguments)
        except PerseusError as e:
            if e.code != -errno.ENOMEM:  # which all ranks see
                raise
            self.place.free_cache()
            return call(*arguments)

    def _new_plan(self, key: Any, kind: str, what: str, shape: ctypes.Structure, operands: ctypes.Structure,
                  rows: int) -> Plan:
        """what: the op and its sizes, for errors."""
        if self.frozen:
            raise PerseusError(f"perseus: {what} has no plan, no larger plan serves it, and group {self.name} is "
                               "frozen: open it before freeze(), by prepare() or by running the op", -errno.EPERM)
        if self.place.capturing():
            raise PerseusError(f"perseus: {what} has no plan yet, and none can be opened while a CUDA graph is "
                               "captured: run the op once with these sizes before the capture, on all ranks")
        handle = self._retried(self._open, f"plan of {what}", f"prs_{kind}_plan_open", self.handle,
                               ctypes.byref(shape), None)
        plan = self._plans[key] = Plan(handle, operands, rows, getattr(self.library, f"prs_{kind}_plan_close"))
        return plan

    def product(self, op: int, m: int, n: int, k: int, b_is_n_k: bool, dtype: int, c_dtype: int, scaling: int = 0,
                fast_accumulation: int = 0, norm: int = 0, activation: int = 0, gated: int = 0) -> Plan:
        """The plan of a product; one serves all m up to the next power of two of rows a rank. k 0: of a sum alone."""
        key = (op, n, k, b_is_n_k, dtype, c_dtype, scaling, fast_accumulation, norm, activation, gated, self.rows(m))
        plan = self._plans.get(key)
        if plan is None and self.frozen:
            plan = self._plans.get(self._larger(key, m))
        if plan is None:
            lib = self.library
            shape = lib.prs_gemm_shape(op=op, m=key[-1], n=n, k=k, b_transposed=b_is_n_k, c_anywhere=1, dtype=dtype,
                                       c_dtype=c_dtype, scaling=scaling, fast_accumulation=fast_accumulation, norm=norm,
                                       activation=activation, gated=gated, fewest_m=self._fewest(key[-1]))
            what = PRODUCTS[op].removeprefix("matmul_" if k == 0 else "") + ("_rms_norm" if norm else "")
            plan = self._new_plan(key, "gemm", f"{what} with at most {key[-1]} rows, n {n}, k {k}", shape,
                                  lib.prs_gemm_operands(), key[-1])
        return plan

    def _larger(self, key: tuple, m: int) -> Any:
        """The key of the smallest plan of that product for more rows than key's; None: there is none. Between nodes as
        rows() says."""
        divided = m % self.world == 0
        return min((other for other in self._plans if len(other) == len(key) and other[:-1] == key[:-1]
                    and other[-1] > key[-1] and (self.nodes == 1 or (other[-1] % self.world == 0) == divided)),
                   key=lambda other: other[-1], default=None)

    def prepare(self, rows: Iterable[int], *products: tuple[str, int, int], dtype: torch.dtype = torch.bfloat16,
                transposed: bool = True) -> None:
        """*Collective.* Opens the plans of ops for all these numbers of rows, before a server captures its graphs.

        rows: of the op's largest side: of the result of all_gather_matmul, of a in the others. products: (op, n, k),
        as ("matmul_all_reduce_rms_norm", hidden, inner // world); k is 0 for those without a product.
        transposed: b is weight.t().

        Example::

            group.prepare([1, 2, 4, 8, 16, 32], ("matmul_all_reduce_rms_norm", 8192, 2048), ("all_reduce", 8192, 0))
            group.freeze()
        """
        dtypes = {torch.bfloat16: 1, torch.float16: 2}
        if dtype not in dtypes:
            raise TypeError(f"perseus.Group.prepare: dtype is {dtype}; it must be torch.bfloat16 or torch.float16")
        numbers = _listed("prepare: rows", rows)
        wrong = [m for m in numbers if not isinstance(m, int) or m < 1]
        if wrong:
            raise ValueError(f"perseus.Group.prepare: rows has {wrong[0]!r}; they must be whole numbers of at least 1")
        for product in products:
            if not isinstance(product, (tuple, list)) or len(product) != 3:
                raise TypeError(f"perseus.Group.prepare: a product is {product!r}; it must be (op, n, k)")
            op, n, k = product
            if op not in PREPARED or (k == 0) != ("matmul" not in op):
                raise ValueError(f"perseus.Group.prepare: ({op!r}, {n}, {k}): op is one of {', '.join(PREPARED)}, and "
                                 "k is 0 for those without a product only")
            number, norm = PREPARED[op]
            for m in sorted({self.rows(m) for m in numbers}):
                self.product(number, m, n, k, transposed or k == 0, dtypes[dtype], 0, norm=norm)

    def freeze(self) -> None:
        """From now on no plan is opened, so no op is collective beyond its launch. A product of a size that has no plan
        is served by the smallest larger one of its kind, n and k, and perseus.moe_plan() returns the one with the least
        max_tokens that is enough; what none serves is refused by name. All ranks freeze after the same ops."""
        self.frozen = True

    def rows(self, m: int) -> int:
        """The most rows of the plans that serve m: a power of two for each rank. Between nodes a plan whose rows the
        ranks divide serves no others."""
        most = self.world << (max(-(-m // self.world), LEAST_ROWS) - 1).bit_length()
        return most - 1 if self.nodes > 1 and m % self.world else most

    def _fewest(self, most: int) -> int:
        """The fewest rows that a plan of rows() serves, unless the group is frozen."""
        return most // 2 + 1 if most > self.world * LEAST_ROWS else 0

    def moe(self, **fields: int) -> Plan:
        key = ("moe", *fields.items())
        lib = self.library
        return (self._plans.get(key) or self._new_plan(key, "moe", f"moe_dispatch_gemm, {_sizes(fields)}",
                                                       lib.prs_moe_shape(**fields),
                                                              lib.prs_moe_batch(), 0))

    def moe_of(self, sizes: tuple[int, ...]) -> Plan:
        """The plan with these fields of struct prs_moe_shape."""
        key = ("moe", *sizes)
        plan = self._plans.get(key)
        if plan is None:
            lib = self.library
            shape = lib.prs_moe_shape(*sizes)
            fields = _sizes({field: getattr(shape, field) for field, _ in shape._fields_[:len(sizes)]})
            plan = self._new_plan(key, "moe", f"MoE, {fields}", shape, lib.prs_moe_batch(), 0)
            plan.info = lib.prs_moe_info()
            lib.prs_moe_plan_query(plan.handle, ctypes.byref(plan.info))
        return plan

    def moe_for(self, sizes: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        """What such a plan has decided, and its sizes, of which the first is the most tokens. In a frozen group it may
        be a plan for more tokens."""
        key = ("moe", *sizes)
        if self.frozen and key not in self._plans:
            larger = [other for other in self._plans if other[0] == "moe" and len(other) == len(key)
                      and other[2:] == key[2:] and other[1] > key[1]]
            sizes = min(larger, default=key)[1:]
        return self.moe_of(sizes).info, sizes

    def attention(self, **fields: Any) -> Plan:
        return self._attention("attention", "ring_attention", "prs_attention_operands", fields)

    def attention_backward(self, **fields: Any) -> Plan:
        return self._attention("attention_backward", "ring_attention, backward", "prs_attention_gradients", fields)

    def _attention(self, kind: str, what: str, operands: str, fields: dict[str, Any]) -> Plan:
        """A plan for this batch and length. Its batch may be larger. It may be longer, but less than twice as long,
        since it was tuned for its own length. The first of a kind has the batch and the length of its call. Further
        ones have powers of two: of sequences, or of positions, which are two stripes for each rank where there are
        stripes. So batches and lengths do not open a plan each."""
        seq, batch = size = fields["seq"], fields["batch"]
        if not seq or not batch:
            raise ValueError(f"perseus.{what}: a batch of {batch} sequences of {seq} positions is empty")
        kinds = (kind, *((name, value) for name, value in fields.items() if name not in ("seq", "batch")))
        plan = self._plans.get(kinds + size)
        if plan is None:
            others = [key[-2:] for key in self._plans if key[:-2] == kinds]
            unit = self.world * max(LEAST_POSITIONS, 2 * fields.get("stripe", 0))
            rounded, whatever = unit << (-(-seq // unit) - 1).bit_length(), self.frozen or self.place.capturing()
            longer = [(most, sequences) for most, sequences in others
                      if most >= seq and (most < 2 * seq or most == rounded or whatever)]
            larger = min((other for other in longer if other[1] >= batch), default=None)
            if larger:
                return self._plans[kinds + larger]
            if longer:
                size = min(longer)[0], 1 << (batch - 1).bit_length()
            elif others:
                size = rounded, batch
        return plan or self._new_attention(kinds, size, fields, what, operands)

    def _new_attention(self, kinds: tuple, size: tuple[int, int], fields: dict[str, Any], what: str,
                       operands: str) -> Plan:
        sizes, exactly = {**fields, "seq": size[0], "batch": size[1]}, (fields["seq"], fields["batch"])
        try:
            return self._new_plan(kinds + size, kinds[0], f"{what}, {_sizes(sizes)}",
                                  self.library.prs_attention_shape(**sizes), getattr(self.library, operands)(), 0)
        except PerseusError as e:
            if e.code not in (-errno.ENOMEM, -errno.EINVAL) or size == exactly:  # which all ranks see
                raise
            return self._new_attention(kinds, exactly, fields, what, operands)

    # ---- the mesh ----

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks as a DeviceMesh of one dimension: that of perseus.init(mesh["tp"]), else one of the process group's
        own. None: torch does not know the process group, or there is none."""
        if self._mesh is None and self.of_torch:
            self._mesh = DeviceMesh.from_group(self.process_group, self.device.type, mesh_dim_names=("tp",))
        return self._mesh

    def adopt(self, mesh: DeviceMesh) -> None:
        """Takes the mesh that later layers lie on: the first that is given."""
        if self._mesh is None:
            self._mesh = mesh

    # ---- launching ----

    def launch(self, function: Any, *arguments: Any) -> None:
        """Calls a function of the library that takes the current stream last."""
        status = function(*arguments, self.place.stream())
        self.place.done()
        if status != 0:
            self.check()
            self.library.check(status, f"perseus: group {self.name}")

    def replay(self, graph: Any) -> None:
        """Replays a CUDA graph (torch.cuda.CUDAGraph) with launches of this group, on the current stream: after the
        group's launches on other streams, and before those that follow. graph.replay() alone is not ordered with
        them."""
        self.place.stream()
        graph.replay()

    def gather_rows(self, a: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, stacked, by torch.distributed. For weight gradients only."""
        if self.world == 1:
            return a
        if self.process_group is None:
            raise PerseusError(f"perseus: group {self.name} was made from a store alone; gathering rows needs a "
                               "process group")
        out = torch.empty(self.world * a.shape[0], *a.shape[1:], dtype=a.dtype, device=a.device)
        self.process_group._allgather_base(out.view(torch.uint8), a.contiguous().view(torch.uint8)).wait()
        return out

    # ---- errors and the end ----

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise PerseusError(f"perseus: group {self.name} is closed")
        return self._handle

    def error(self) -> PerseusError | None:
        """What a kernel of this rank stopped waiting for or found wrong; None: nothing. From any thread, and while
        kernels run."""
        e = self.library.prs_fused_error()
        with self._alive:
            if self._handle is None or self.library.prs_fused_poll_error(self._handle, ctypes.byref(e)) == 0:
                return None
        rank = e.blamed - 1 if e.blamed else None
        return PerseusError(f"perseus: rank {self.rank} of group {self.name}: {e.text.decode(errors='replace')}",
                            e.code, rank)

    def check(self) -> None:
        """Raises the asynchronous error of this group, if there is one. Does not wait: torch.cuda.synchronize() first,
        to see those of all launches."""
        failure = self.error()
        if failure:
            if not self.first_to_tell():
                (lambda: None)()  # takes what the watchdog has raised in this thread, which is then the only error
            raise failure

    def first_to_tell(self) -> bool:
        """Whether nobody has raised the error of this group yet: a caller's exception and the watchdog's are one."""
        return self._untold.acquire(blocking=False)

    def abort(self) -> None:
        """Ends the waits of this rank's kernels within milliseconds, now and later; nothing more is launched. From any
        thread."""
        with self._alive:
            if self._handle is not None:
                self.library.prs_fused_abort(self._handle)

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory that this group has taken, and how many of them open plans use. It takes no more once
        all plans are open: after prepare() and freeze(), or after one step of each size. Asleep it has taken
        none."""
        m = self.library.structs["prs_fused_memory"]()
        self.library.prs_fused_memory(self.handle, ctypes.byref(m))
        return m.held, m.used

    def sleep(self) -> None:
        """*Collective*, for a group of perseus.init(sleeps=True). Gives the device memory of the group back to CUDA
        until wake(). Plans stay open, and CUDA graphs with their launches can be replayed afterwards, not before. Lost
        is what one call has left for a later one: rows that were not combined, what a backward pass needs.

        Example::

            group = perseus.init(sleeps=True)
            ...                # plans are opened, graphs captured
            group.sleep()      # group.memory()[0] is 0
            group.wake()
        """
        self._together("sleep", "prs_fused_sleep", self.handle)
        self.asleep = True

    def wake(self) -> None:
        """*Collective.* Takes the memory again. After an error the group is still asleep; if memory was short, this may
        be tried again."""
        self._retried(self._together, "wake", "prs_fused_wake", self.handle)
        self.asleep = False

    def lost(self) -> list[int]:
        """The ranks that can write nothing any more: their processes have ended, or they have closed this group. Of one
        node; from any thread."""
        with self._alive:
            bits = 0 if self._handle is None else self.library.prs_fused_lost(self._handle)
        return [rank for rank in range(self.world) if bits >> rank & 1]

    def leave_out(self, ranks: Iterable[int] | int | None = None) -> list[int]:
        """MoE layers as one kernel (`plan.path`) go on without these ranks, by default all that are lost(), also in
        launches that run and in graphs that were captured: their experts count as absent. All else of this group raises
        from then on. A rank comes back in a new group. Returns those that are left out by now. From any thread; every
        rank that goes on calls it, or perseus.init(leave_out=True) does."""
        ranks = [ranks] if isinstance(ranks, int) else ranks
        ranks = self.lost() if ranks is None else _listed("leave_out: ranks", ranks)
        wrong = [rank for rank in ranks if not isinstance(rank, int) or not 0 <= rank < self.world]
        if wrong:
            raise ValueError(f"perseus.Group.leave_out: {wrong[0]!r} is no rank of group {self.name}: they are 0 to "
                             f"{self.world - 1}")
        new = [rank for rank in ranks if rank not in self.absent]
        with self._alive:
            if new and self._handle is not None:
                self.library.check(self.library.prs_fused_leave_out(self._handle, sum(1 << rank for rank in set(new))),
                                   f"perseus.Group.leave_out: rank {self.rank} of group {self.name}")
                self.absent = sorted({*self.absent, *new})
        return self.absent

    def close(self) -> None:
        """*Collective*, but local after an error or abort(). Frees everything, once the launches of this rank have
        ended. A process may also end without it."""
        if self._handle is None:
            return
        self.place.synchronize()
        for plan in self._plans.values():
            plan.close(plan.handle)
        self._plans.clear()
        self.products.clear()
        with self._alive:
            handle, self._handle = self._handle, None
        self.library.prs_fused_close(handle)
        if self.ended:
            self.ended(self)

    def __repr__(self) -> str:
        return f"perseus.Group({self.name!r}, rank {self.rank} of {self.world}, {self.place.kind} {self.place.index})"
