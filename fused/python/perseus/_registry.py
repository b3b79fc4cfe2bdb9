# SPDX-License-Identifier: Apache-2.0
"""Which context an op gets. A group is a process group (or a store, a rank and a world), its members, and a name; a
name that has come to mean another group gets a new context, or is refused by an error that says what differs."""
from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._bootstrap import identity
from ._group import Group
from ._library import PerseusError, library

GroupLike = Union[Group, "dist.ProcessGroup", DeviceMesh, str, None]


class Ranks(dict):
    """Groups by rank, where ranks of one name are threads of this process. A thread has the one that it opened."""

    @property
    def world(self) -> int:
        return next(iter(self.values())).world

    def mine(self) -> Group | None:
        thread = threading.get_ident()
        return next((group for group in self.values() if group.thread == thread), None)

    def pick(self) -> Group:
        mine = self.mine()
        if mine is None and not library().emulated:  # in one of autograd's threads, which belong to devices
            index = torch.cuda.current_device()
            mine = next((group for group in self.values() if group.place.index == index), None)
        if mine is None:
            group = next(iter(self.values()))
            raise PerseusError(f"perseus: group {group.name} is open as ranks {', '.join(map(str, self))} in this "
                               "process, and not in this thread: call perseus.init() in the thread that uses it",
                               -errno.EINVAL)
        return mine


_groups: dict[str, Union[Group, Ranks]] = {}
_opening: set[tuple[str, int]] = set()
_lock = threading.Lock()
# the process groups that torch knows: destroy_process_group() takes them out
_of_torch: Any = getattr(dist.distributed_c10d, "_pg_map", {})


def _gone(group: Group) -> bool:
    """Whether the process group was destroyed."""
    return group.of_torch and group.process_group not in _of_torch


def _remove(group: Group) -> None:
    with _lock:
        found = _groups.get(group.name)
        if isinstance(found, Ranks):
            if found.get(group.rank) is group:
                del found[group.rank]
            if len(found) == 1:
                _groups[group.name] = next(iter(found.values()))
        elif found is group:
            del _groups[group.name]


def _add(group: Group) -> None:
    with _lock:
        found = _groups.get(group.name)
        if found is None:
            _groups[group.name] = group
        elif isinstance(found, Ranks):
            found[group.rank] = group
        else:
            _groups[group.name] = Ranks({found.rank: found, group.rank: group})
    group.ended = _remove


def _close_here(group: Group) -> None:
    """Ends a context whose group is gone: waits for no rank."""
    group.abort()
    group.close()


def _no_group(given: Any) -> TypeError:
    return TypeError(f"perseus: a group was given as {type(given).__name__}; it must be a ProcessGroup, a DeviceMesh "
                     "of one dimension, a Group of perseus.init(), a name, or None")


def _check_triple(store: Any, rank: Any, world: Any) -> None:
    """Whether what was given to perseus.init() as (store, rank, world) is that."""
    if not isinstance(store, dist.Store):
        raise TypeError(f"perseus.init: the store of (store, rank, world) is of type {type(store).__name__}; it must "
                        "be a torch.distributed.Store, such as TCPStore or HashStore")
    for what, number in (("rank", rank), ("world", world)):
        if not isinstance(number, int):
            raise TypeError(f"perseus.init: the {what} of (store, rank, world) is {number!r}, of type "
                            f"{type(number).__name__}; it must be a whole number")
    if world < 1:
        raise PerseusError(f"perseus.init: a group of {world} ranks: at least 1", -errno.EINVAL)


class _Wanted:
    """What perseus.init() was asked for."""

    def __init__(self, group: Any, name: str | None) -> None:
        self.mesh = self.process_group = self.members = None
        self.named = name is not None
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise PerseusError(f"perseus.init: the mesh has dimensions {group.mesh_dim_names or group.ndim}: take "
                                   "one of them, as in mesh[\"tp\"]", -errno.EINVAL)
            self.mesh, group = group, group.get_group()
        if isinstance(group, Sequence) and not isinstance(group, str):
            if len(group) != 3:
                raise TypeError(f"perseus.init: a tuple of {len(group)} was given; it must be (store, rank, world)")
            self.store, self.rank, self.world = group
            _check_triple(*group)
            self.name = name or "perseus"
            label = self.name
        else:
            self.process_group = group if group is not None else dist.group.WORLD
            if self.process_group is None:
                raise PerseusError("perseus.init: there is no process group: call "
                                   "torch.distributed.init_process_group() first, or pass (store, rank, world)")
            if not hasattr(self.process_group, "get_group_store"):
                raise _no_group(self.process_group)
            self.store, self.rank, self.world = (self.process_group.get_group_store(), self.process_group.rank(),
                                                 self.process_group.size())
            self.name = name or self.process_group.group_name
            label = name or ""  # torch's store has the process group in its keys
            if self.process_group in _of_torch:
                self.members = dist.get_process_group_ranks(self.process_group)
        if not 0 <= self.rank < self.world:
            raise PerseusError(f"perseus.init: rank {self.rank} of group {self.name}: its {self.world} ranks are 0 to "
                               f"{self.world - 1}", -errno.EINVAL)
        self.keys = identity(label, self.world, self.members)

    def same(self, group: Group) -> bool:
        here = (self.process_group, self.rank, self.world) == (group.process_group, group.rank, group.world)
        return here and (self.process_group is not None or self.store is group.store)

    def differs(self, group: Group) -> str:
        return next(text for text, differ in (
            (f"rank {group.rank} of {group.world}, and is asked for as rank {self.rank} of {self.world}",
             (self.rank, self.world) != (group.rank, group.world)),
            ("that of another process group", self.process_group is not group.process_group),
            ("that of another store", True)) if differ)

    def known(self) -> Group | None:
        """The open group of this name in this thread, if it is the one that is wanted. One that is gone is closed."""
        found = _groups.get(self.name)
        group = found.get(self.rank) or found.mine() if isinstance(found, Ranks) else found
        if group is None or self.same(group):
            return group
        # torch's names are unique: another process group of the same name says that the first is gone.
        if (_gone(group) or (not self.named and self.process_group is not None and group.process_group is not None
                             and not group.named)):
            _close_here(group)
            return self.known()
        threads = group.rank != self.rank and group.world == self.world and group.thread != threading.get_ident()
        if threads:
            return None
        raise PerseusError(f"perseus.init: the name {group.name!r} is open here as {self.differs(group)}: close() the "
                           "first, or give name=", -errno.EEXIST)


def _device_index(device: Any, rank: int, process_group: Any) -> int:
    if library().emulated:
        return rank if device is None else int(device if isinstance(device, int) else torch.device(device).index or 0)
    if device is None:
        device = getattr(process_group, "bound_device_id", None)  # init_process_group(device_id=)
    if device is None:
        return torch.cuda.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def init(group: Union["dist.ProcessGroup", DeviceMesh, tuple, None] = None, *, device: Any = None, timeout_ms: int = 0,
         name: str | None = None, watchdog: bool = True, leave_out: bool = False, sleeps: bool = False) -> Group:
    """*Collective.* Opens the context of a group of ranks, or returns the one that is open.

    group: a ProcessGroup of any backend (None: the default group), a DeviceMesh of one dimension, or (store, rank,
    world) with any torch Store. Ranks may be threads of one process.
    device: CUDA device of this rank; default: the process group's device_id, or the current one.
    timeout_ms: how long a kernel waits for another rank, and how long this call and the opening of plans do; 0: the
    library's default, 600000, and for this call the store's timeout.
    name: what ops call the group; default: the process group's name. All ranks give the same: it is in the store's
    keys.
    watchdog: a thread raises asynchronous errors in the thread that calls this (see perseus.watch()).
    leave_out: that thread also leaves out ranks whose process has ended (see Group.leave_out()).
    sleeps: the group's memory can be given back for a time (see Group.sleep()). Of one node; the same on all ranks.

    After torch.distributed.destroy_process_group() the group is closed at the next use of its name, without waiting for
    other ranks, and a new process group of that name gets a context of its own. Raises PerseusError: ranks that did not
    come (`.rank` is the first), a name that is open here for another rank, world, store or process group, or two
    processes that come as one rank.

    Example::

        torch.distributed.init_process_group("nccl")
        group = perseus.init()
        y = perseus.all_gather_matmul(x, weight.t(), group)
    """
    if not isinstance(timeout_ms, int):
        raise TypeError(f"perseus.init: timeout_ms is {timeout_ms!r}; it must be a whole number")
    if not 0 <= timeout_ms < 1 << 32:
        raise ValueError(f"perseus.init: timeout_ms is {timeout_ms}; it must be 0 to {(1 << 32) - 1}")
    wanted = _Wanted(group, name)
    known = wanted.known()
    if known is not None:
        if wanted.mesh is not None:
            known.adopt(wanted.mesh)
        if timeout_ms not in (0, known.timeout_ms):
            warnings.warn(f"perseus.init: group {known.name} is open already, with timeout_ms={known.timeout_ms}: "
                          f"{timeout_ms} is not used", stacklevel=2)
        if sleeps and not known.sleeps:
            warnings.warn(f"perseus.init: group {known.name} is open already, without sleeps: it cannot sleep",
                          stacklevel=2)
        return known
    place = (wanted.name, wanted.rank)
    with _lock:
        if place in _opening:
            raise PerseusError(f"perseus.init: another thread of this process opens group {wanted.name} as rank "
                               f"{wanted.rank}", -errno.EEXIST)
        _opening.add(place)
    try:
        opened = Group(wanted.name, wanted.rank, wanted.world, wanted.store, wanted.process_group,
                       _device_index(device, wanted.rank, wanted.process_group), timeout_ms, wanted.keys, wanted.mesh,
                       sleeps)
        opened.of_torch, opened.named = wanted.members is not None, wanted.named
        _add(opened)
    finally:
        with _lock:
            _opening.discard(place)
    opened.leaves_out = leave_out
    if watchdog or leave_out:
        from .watchdog import watch
        watch(opened)
    return opened


def sleepers() -> list[Group]:
    """The open groups of this process, or of this thread of it, that can sleep, in the order of their opening."""
    with _lock:
        found = [group.mine() if isinstance(group, Ranks) else group for group in _groups.values()]
    return [group for group in found if group is not None and group.sleeps]


def find(group: GroupLike) -> Group:
    """The open context of a group: by a Group, a ProcessGroup (None: the default one), a DeviceMesh, or a name. Opened
    at first use: then collective."""
    if isinstance(group, str):
        found = _groups.get(group)
        if found.__class__ is Group and not (found.of_torch and found.process_group not in _of_torch):
            return found
        return _find(group, found)
    if isinstance(group, Group):
        return group
    return init(group)


def _find(name: str, found: Any) -> Group:
    if isinstance(found, Ranks):
        found = found.pick()
    if found is not None and not _gone(found):
        return found
    try:
        process_group = torch._C._distributed_c10d._resolve_process_group(name)
    except RuntimeError as e:
        if found is None:
            raise PerseusError(f"perseus: no group and no process group is called {name!r}", -errno.ENOENT) from e
        _close_here(found)
        raise PerseusError(f"perseus: group {name}: its process group was destroyed", -errno.ENOENT) from e
    return init(process_group)


def name_of(group: GroupLike) -> str:
    if isinstance(group, str):
        return group
    if isinstance(group, Group):
        if _groups.get(group.name) is not group:
            _check_own(group)
        return group.name
    if isinstance(group, DeviceMesh):
        return init(group).name
    process_group = group if group is not None else dist.group.WORLD
    if process_group is None:
        raise PerseusError("perseus: no group was given, and there is no default process group")
    if not hasattr(process_group, "group_name"):
        raise _no_group(process_group)
    found = _groups.get(process_group.group_name)
    if found.__class__ is Group and found.process_group is not process_group:
        return init(process_group).name
    return process_group.group_name


def _check_own(group: Group) -> None:
    """A Group that ops would not find by its name."""
    found = _groups.get(group.name)
    group.handle  # raises where it is closed
    if not isinstance(found, Ranks) or found.pick() is not group:
        raise PerseusError(f"perseus: {group} is not what its name means in this thread", -errno.EINVAL)


def world_of(name: str) -> int:
    """The number of ranks of a group; opens nothing, so that shapes can be traced."""
    known = _groups.get(name)
    if known is not None and not (known.__class__ is Group and _gone(known)):
        return known.world
    return torch._C._distributed_c10d._resolve_process_group(name).size()


def close_all() -> None:
    """*Collective.* Closes all groups of this process, in the order in which they were opened."""
    for found in list(_groups.values()):
        for group in list(found.values()) if isinstance(found, Ranks) else [found]:
            try:
                group.close()
            except PerseusError as e:
                warnings.warn(str(e), stacklevel=2)
