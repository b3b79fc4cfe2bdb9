# SPDX-License-Identifier: Apache-2.0
"""Contexts, one for each group of ranks, and the plans in them."""
from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Union

import torch
import torch.distributed as dist

from ._bootstrap import StoreExchange
from ._device import Cuda, Emulated
from ._library import Library, PerseusError, library

LEAST_ROWS = 16  # of a rank, in the smallest class of plans

_groups: dict[str, "Group"] = {}
_opened: dict[str, int] = {}  # how many contexts a name has had
_lock = threading.Lock()

GroupLike = Union["Group", "dist.ProcessGroup", str, None]


class Plan:
    """A plan of the library and the operands of its launches."""

    def __init__(self, handle: int, operands: ctypes.Structure, rows: int, close: Any) -> None:
        self.handle, self.operands, self.rows, self.close = handle, operands, rows, close
        self.reference = ctypes.byref(operands)
        self.info: Any = None  # MoE: struct prs_moe_info


class Group:
    """The ranks that work together: a context of libperseus-fused.

    Get one by perseus.init(), or let the first op of a torch process group make it. Attributes: name, rank, world, device (torch.device).
    All ranks make the same calls that open something in the same order, as with an NCCL communicator. One thread at a time may use a group;
    error(), check() and abort() may be called by any thread.
    """

    def __init__(self, name: str, rank: int, world: int, store: Any, process_group: Any, index: int, timeout_ms: int, generation: int) -> None:
        self.name, self.rank, self.world, self.process_group = name, rank, world, process_group
        self.library: Library = library()
        self.place = (Emulated if self.library.emulated else Cuda)(self.library, index)
        self.device = self.place.torch
        self.number = -1 if self.device.type == "cpu" else index  # as Tensor.get_device() says it
        self.thread = threading.get_ident()
        self._plans: dict[Any, Plan] = {}
        self._handle: int | None = None
        self._alive = threading.Lock()  # held while another thread asks or aborts, so that close() waits for it
        self.exchange = StoreExchange(store, f"perseus/{generation}", rank, world) if world > 1 else None
        config = self.library.prs_fused_config(rank=rank, world=world, device=index, timeout_ms=timeout_ms)
        if self.exchange:
            config.allgather = self.exchange.callback
        self._handle = self._open("prs_fused_open", ctypes.byref(config))
        traffic = self.library.structs["prs_fused_traffic"]()
        self.library.prs_fused_traffic(self._handle, ctypes.byref(traffic))
        self.nodes = traffic.nodes

    # ---- opening ----

    def _open(self, function: str, *arguments: Any) -> int:
        """Calls a collective function whose last parameter is an out pointer."""
        out = ctypes.c_void_p()
        status = getattr(self.library, function)(*arguments, ctypes.byref(out))
        if status != 0 and self.exchange and self.exchange.failure:
            failure, self.exchange.failure = self.exchange.failure, None
            raise PerseusError(f"{function}: rank {self.rank} of group {self.name}: the ranks could not meet: {failure}", status) from failure
        self.library.check(status, f"{function}: rank {self.rank} of group {self.name}")
        return out.value or 0

    def _new_plan(self, key: Any, kind: str, shape: ctypes.Structure, operands: ctypes.Structure, rows: int) -> Plan:
        if self.place.capturing():
            raise PerseusError(f"perseus: {kind} {key[1:]} has no plan yet, and none can be opened while a CUDA graph is captured: "
                               "run the op once with these sizes before the capture, on all ranks")
        handle = self._open(f"prs_{kind}_plan_open", self.handle, ctypes.byref(shape), None)
        plan = self._plans[key] = Plan(handle, operands, rows, getattr(self.library, f"prs_{kind}_plan_close"))
        return plan

    def product(self, op: int, m: int, n: int, k: int, b_is_n_k: bool, dtype: int, c_dtype: int) -> Plan:
        """The plan of a product; one serves all m up to the next power of two of rows a rank."""
        key = (op, n, k, b_is_n_k, dtype, c_dtype, self.rows(m))
        plan = self._plans.get(key)
        if plan is None:
            lib = self.library
            shape = lib.prs_gemm_shape(op=op, m=key[-1], n=n, k=k, b_transposed=b_is_n_k, c_anywhere=1, dtype=dtype, c_dtype=c_dtype)
            plan = self._new_plan(key, "gemm", shape, lib.prs_gemm_operands(), key[-1])
        return plan

    def rows(self, m: int) -> int:
        """The most rows of the plans that serve m: a power of two for each rank. Between nodes a plan whose rows the ranks divide serves no others."""
        most = self.world << (max(-(-m // self.world), LEAST_ROWS) - 1).bit_length()
        return most - 1 if self.nodes > 1 and m % self.world else most

    def moe(self, **fields: int) -> Plan:
        key = ("moe", *fields.items())
        lib = self.library
        return self._plans.get(key) or self._new_plan(key, "moe", lib.prs_moe_shape(**fields), lib.prs_moe_batch(), 0)

    def moe_of(self, sizes: tuple[int, ...]) -> Plan:
        """The plan with these fields of struct prs_moe_shape."""
        key = ("moe", *sizes)
        plan = self._plans.get(key)
        if plan is None:
            lib = self.library
            plan = self._new_plan(key, "moe", lib.prs_moe_shape(*sizes), lib.prs_moe_batch(), 0)
            plan.info = lib.prs_moe_info()
            lib.prs_moe_plan_query(plan.handle, ctypes.byref(plan.info))
        return plan

    def attention(self, **fields: Any) -> Plan:
        key = ("attention", *fields.items())
        return self._plans.get(key) or self._new_plan(key, "attention", self.library.prs_attention_shape(**fields), self.library.prs_gemm_shape(), 0)

    # ---- launching ----

    def launch(self, function: Any, *arguments: Any) -> None:
        """Calls a function of the library that takes the current stream last."""
        status = function(*arguments, self.place.stream())
        self.place.done()
        if status != 0:
            self.check()
            self.library.check(status, f"perseus: group {self.name}")

    def gather_rows(self, a: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, stacked, by torch.distributed. For weight gradients only."""
        if self.world == 1:
            return a
        if self.process_group is None:
            raise PerseusError(f"perseus: group {self.name} was made from a store alone; gathering rows needs a process group")
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
        """What a kernel of this rank stopped waiting for or found wrong; None: nothing. From any thread, and while kernels run."""
        e = self.library.prs_fused_error()
        with self._alive:
            if self._handle is None or self.library.prs_fused_poll_error(self._handle, ctypes.byref(e)) == 0:
                return None
        # -EINVAL (a number of rows), -ETIMEDOUT and -ECANCELED name a rank; the network's errors do not.
        rank = e.from_rank if e.want or e.seen or e.waited_ns or e.flag else None
        return PerseusError(f"perseus: rank {self.rank} of group {self.name}: {e.text.decode(errors='replace')}", e.code, rank)

    def check(self) -> None:
        """Raises the asynchronous error of this group, if there is one. Does not wait: torch.cuda.synchronize() first, to see those of all launches."""
        failure = self.error()
        if failure:
            raise failure

    def abort(self) -> None:
        """Ends the waits of this rank's kernels within milliseconds, now and later; nothing more is launched. From any thread."""
        with self._alive:
            if self._handle is not None:
                self.library.prs_fused_abort(self._handle)

    def close(self) -> None:
        """*Collective*, but local after an error or abort(). Frees everything, once the launches of this rank have ended. A process may also end
        without it."""
        if self._handle is None:
            return
        self.place.synchronize()
        for plan in self._plans.values():
            plan.close(plan.handle)
        self._plans.clear()
        with self._alive:
            handle, self._handle = self._handle, None
        self.library.prs_fused_close(handle)
        with _lock:
            if _groups.get(self.name) is self:
                del _groups[self.name]

    def __repr__(self) -> str:
        return f"perseus.Group({self.name!r}, rank {self.rank} of {self.world}, {self.place.kind} {self.place.index})"


def _device_index(device: Any, rank: int) -> int:
    if library().emulated:
        return rank if device is None else int(device if isinstance(device, int) else torch.device(device).index or 0)
    if device is None:
        return torch.cuda.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def init(group: Union["dist.ProcessGroup", tuple, None] = None, *, device: Any = None, timeout_ms: int = 0, name: str | None = None,
         watchdog: bool = True) -> Group:
    """*Collective.* Opens the context of a group of ranks, or returns the one that its name already has.

    group: a ProcessGroup of any backend (None: the default group), or (store, rank, world) with any torch Store.
    device: CUDA device of this rank; default: the current one.
    timeout_ms: how long a kernel waits for another rank; 0: the library's default.
    name: what ops call the group; default: the process group's name.
    watchdog: a thread raises asynchronous errors in the thread that calls this (see perseus.watch()).

    Example::

        torch.distributed.init_process_group("nccl")
        group = perseus.init()
        y = perseus.all_gather_matmul(x, weight.t(), group)
    """
    process_group = None
    if isinstance(group, Sequence) and not isinstance(group, str):
        store, rank, world = group
        name = name or "perseus"
    else:
        process_group = group if group is not None else dist.group.WORLD
        if process_group is None:
            raise PerseusError("perseus.init: there is no process group: call torch.distributed.init_process_group() first, or pass (store, rank, world)")
        store, rank, world = process_group.get_group_store(), process_group.rank(), process_group.size()
        name = name or process_group.group_name
    with _lock:
        if name in _groups:
            return _groups[name]
        generation = _opened[name] = _opened.get(name, 0) + 1
    opened = Group(name, rank, world, store, process_group, _device_index(device, rank), timeout_ms, generation)
    with _lock:
        _groups[name] = opened
    if watchdog:
        from .watchdog import watch
        watch(opened)
    return opened


def find(group: GroupLike) -> Group:
    """The open context of a group: by a Group, a ProcessGroup (None: the default one), or a name. Opened at first use: then collective."""
    if isinstance(group, str):
        return _groups.get(group) or init(torch._C._distributed_c10d._resolve_process_group(group))
    if isinstance(group, Group):
        return group
    return init(group)


def name_of(group: GroupLike) -> str:
    if isinstance(group, str):
        return group
    if isinstance(group, Group):
        return group.name
    process_group = group if group is not None else dist.group.WORLD
    if process_group is None:
        raise PerseusError("perseus: no group was given, and there is no default process group")
    return process_group.group_name


def world_of(name: str) -> int:
    """The number of ranks of a group; opens nothing, so that shapes can be traced."""
    known = _groups.get(name)
    return known.world if known else torch._C._distributed_c10d._resolve_process_group(name).size()


def close_all() -> None:
    """*Collective.* Closes all groups of this process, in the order in which they were opened."""
    for group in list(_groups.values()):
        try:
            group.close()
        except PerseusError as e:
            warnings.warn(str(e), stacklevel=2)
