# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a context find each other, by any torch.distributed Store (a ProcessGroup of any backend has one),
and exchange what opens things.

rendezvous() agrees on who the ranks are: keys of the store have the group's name, world and members, and each process
comes with a token of its own, so that nothing left by an earlier process, an earlier context or another group is taken
for a rank. What it gives is the prefix of StoreExchange.
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from typing import Any, Callable, Iterator

from ._header import ALLGATHER
from ._library import PerseusError

_lock = threading.Lock()
_exchanging: dict[int, "StoreExchange"] = {}  # by thread: whose callback may be running


class Late(PerseusError):
    """A rank did not come in time. `rank` is the first of those that are missing."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text, -errno.ETIMEDOUT, rank)


def _polls(limit_s: float) -> Iterator[float]:
    """Polls with growing pauses, at most 20 ms, until limit_s is over. Gives the seconds that have passed."""
    began, pause = time.monotonic(), 0.0002
    while True:
        passed = time.monotonic() - began
        yield passed
        if passed > limit_s:
            return
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def _read(store: Any, key: str) -> Any:
    """The value of a key as JSON; None: there is none."""
    return json.loads(store.get(key)) if store.check([key]) else None


def _myself() -> str:
    return f"process {os.getpid()} of {socket.gethostname()}"


# ---- who the ranks are ----

def identity(label: str, world: int, members: list[int] | None) -> str:
    """The beginning of a group's keys. members: ranks of torch's default group; None: not known."""
    who = "" if members is None else hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
    return f"perseus/{label}/{world}/{who}"


def rendezvous(store: Any, keys: str, name: str, rank: int, world: int, limit_s: float) -> str:
    """Waits until all ranks have come, at most limit_s, and returns the prefix of this context's keys, which no other
    context has had.

    Rank 0 proposes the tokens that it sees, the others confirm theirs, and rank 0 closes the list. A token that changes
    (a process failed before all had come, or was replaced, and came again) makes a new proposal, so nobody counts how
    often a rank has tried."""
    token = uuid.uuid4().hex
    store.set(f"{keys}/here/{rank}", json.dumps({"token": token, "who": _myself()}))
    step: Callable[[], str | None] = (_Leader(store, keys, world).step if rank == 0
                                      else _Follower(store, keys, rank, token).step)
    for _ in _polls(limit_s):
        agreed = step()
        if agreed:
            store.delete_key(f"{keys}/here/{rank}")
            return f"{keys}/{agreed}"
        mine = _read(store, f"{keys}/here/{rank}")
        if mine and mine["token"] != token:
            raise PerseusError(f"group {name}: {mine['who']} has come as rank {rank}, which is this one ({_myself()}): "
                               "two groups of one name over one store? Give each a name= of its own", -errno.EEXIST)
    raise _missing(store, keys, name, rank, world, limit_s)


def _missing(store: Any, keys: str, name: str, rank: int, world: int, limit_s: float) -> Late:
    absent = [r for r in range(world) if not store.check([f"{keys}/here/{r}"])] or [0 if rank else 1]
    store.delete_key(f"{keys}/here/{rank}")
    before = _read(store, f"{keys}/list")
    text = f"rank {rank} of group {name}: {_ranks(absent)} did not come within {limit_s:g} s"
    if before and before.get("closed"):
        text += (". The group has been opened before, with "
                 f"{'; '.join(f'rank {r}: {who}' for r, who in enumerate(before['who']))}: if a process was replaced "
                 "since, every other rank must close() its group and call perseus.init() again, too")
    else:
        text += (f": every rank must call perseus.init() with this name, world {world}, the same members and "
                 "the same store")
    return Late(absent[0], text)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"ranks {', '.join(map(str, ranks[:16]))}{more}"


class _Leader:
    def __init__(self, store: Any, keys: str, world: int) -> None:
        self.store, self.keys, self.world = store, keys, world
        self.proposed: list[str] = []
        self.number = ""

    def step(self) -> str | None:
        here = [f"{self.keys}/here/{r}" for r in range(self.world)]
        if not self.store.check(here):
            return None
        came = [json.loads(self.store.get(key)) for key in here]
        tokens = [c["token"] for c in came]
        entry = {"tokens": tokens, "who": [c["who"] for c in came], "closed": False}
        if tokens != self.proposed:
            self.proposed, self.number = tokens, uuid.uuid4().hex
            self.store.set(f"{self.keys}/list", json.dumps({**entry, "number": self.number}))
        if not self.store.check([f"{self.keys}/{self.number}/yes/{r}" for r in range(1, self.world)]):
            return None
        self.store.set(f"{self.keys}/list", json.dumps({**entry, "number": self.number, "closed": True}))
        return self.number


class _Follower:
    def __init__(self, store: Any, keys: str, rank: int, token: str) -> None:
        self.store, self.keys, self.rank, self.token = store, keys, rank, token
        self.confirmed = ""

    def step(self) -> str | None:
        entry = _read(self.store, f"{self.keys}/list")
        if not entry or entry["tokens"][self.rank] != self.token:
            return None
        key = f"{self.keys}/{entry['number']}/yes/{self.rank}"
        if entry["closed"]:
            self.store.delete_key(key)
            return entry["number"]
        if self.confirmed != entry["number"]:
            self.confirmed = entry["number"]
            self.store.set(key, "")
        return None


# ---- exchanges ----

class StoreExchange:
    """The all-gather of prs_fused_config over a store. `prefix` must be the same on all ranks, and new for each
    context. A wait lasts limit_s at most, and ends early when another rank says in the store that it has failed, or
    interrupt() is called."""

    def __init__(self, store: Any, prefix: str, rank: int, world: int, limit_s: float = 600.0) -> None:
        self.store, self.prefix, self.rank, self.world, self.limit_s = store, prefix, rank, world, limit_s
        self.round = 0
        self.failure: BaseException | None = None
        self.interrupted: BaseException | None = None
        self.callback = ALLGATHER(self._allgather)

    def _key(self, number: int, rank: int) -> str:
        return f"{self.prefix}/{number}/{rank}"

    def _wait(self, number: int, rank: int) -> bytes:
        key, failed = self._key(number, rank), f"{self.prefix}/failed"
        for _ in _polls(self.limit_s):
            if self.store.check([key]):
                return self.store.get(key)
            if self.interrupted:
                raise self.interrupted
            said = _read(self.store, failed)
            if said:
                raise PerseusError(f"rank {said['from']} gave up: {said['text']}", said["code"], said["rank"])
        late = [r for r in range(self.world) if not self.store.check([self._key(number, r)])] or [rank]
        raise Late(late[0], f"{_ranks(late)} did not come within {self.limit_s:g} s")

    def _allgather(self, _: Any, mine: int, everyone: int, count: int) -> int:
        try:
            number, self.round = self.round, self.round + 1
            self.store.set(self._key(number, self.rank), ctypes.string_at(mine, count))
            for rank in range(self.world):
                given = self._wait(number, rank)
                if len(given) != count:
                    raise RuntimeError(f"rank {rank} gave {len(given)} bytes and rank {self.rank} {count} to exchange "
                                       f"{number}: they are in different calls")
                ctypes.memmove(everyone + rank * count, given, count)
            # a rank that is in exchange `number` has seen all others enter the one before, so all have read this key
            if number >= 2:
                self.store.delete_key(self._key(number - 2, self.rank))
            return 0
        except BaseException as e:  # an exception cannot cross C: the caller raises it
            self.failure = e
            if not isinstance(e, Exception):
                traceback.print_exc(file=sys.stderr)
            self._tell(e)
            return -5

    def _tell(self, e: BaseException) -> None:
        """The others need not wait for their limits."""
        with contextlib.suppress(Exception):  # the store may be what failed
            if not self.store.check([f"{self.prefix}/failed"]):
                self.store.set(f"{self.prefix}/failed",
                               json.dumps({"from": self.rank, "text": str(e), "code": getattr(e, "code", -errno.EIO),
                                           "rank": getattr(e, "rank", None)}))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Around a call of the library that may exchange. Errors for this thread then end the exchange rather than be
        raised in a callback, where they would be lost."""
        thread = threading.get_ident()
        with _lock:
            _exchanging[thread] = self
        try:
            (lambda: None)()  # takes what was raised in this thread before: Python looks for it where a function begins
            yield
        finally:
            with _lock:
                _exchanging.pop(thread, None)
        interrupted, self.interrupted = self.interrupted, None
        if interrupted and not self.failure:
            raise interrupted


def raise_in(thread: int, error: PerseusError) -> None:
    """Raises an error in a thread: at once if it is in an exchange, else when it next runs Python code."""
    with _lock:
        exchange = _exchanging.get(thread)
        if exchange:
            exchange.interrupted = error
            return
        kind = type("PerseusError", (PerseusError,),
                    {"__init__": lambda self: PerseusError.__init__(self, str(error), error.code, error.rank)})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
