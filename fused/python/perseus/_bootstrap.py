# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a context meet: by any torch.distributed Store. A ProcessGroup of any backend has one."""
from __future__ import annotations

import ctypes
import sys
import traceback
from typing import Any

from ._header import ALLGATHER


class StoreExchange:
    """The all-gather of prs_fused_config over a store. `prefix` must be the same on all ranks, and new for each context."""

    def __init__(self, store: Any, prefix: str, rank: int, world: int) -> None:
        self.store, self.prefix, self.rank, self.world = store, prefix, rank, world
        self.round = 0
        self.failure: BaseException | None = None
        self.callback = ALLGATHER(self._allgather)

    def _key(self, number: int, rank: int) -> str:
        return f"{self.prefix}/{number}/{rank}"

    def _allgather(self, _: Any, mine: int, everyone: int, count: int) -> int:
        try:
            number, self.round = self.round, self.round + 1
            self.store.set(self._key(number, self.rank), ctypes.string_at(mine, count))
            for rank in range(self.world):
                given = self.store.get(self._key(number, rank))
                if len(given) != count:
                    raise RuntimeError(f"rank {rank} gave {len(given)} bytes and rank {self.rank} {count} to exchange {number} of {self.prefix}: "
                                       "they are in different calls")
                ctypes.memmove(everyone + rank * count, given, count)
            if number >= 2:  # a rank that is in exchange `number` has seen all others enter the one before, so all have read this key
                self.store.delete_key(self._key(number - 2, self.rank))
            return 0
        except BaseException as e:  # an exception cannot cross C: the caller raises it
            self.failure = e
            if not isinstance(e, Exception):
                traceback.print_exc(file=sys.stderr)
            return -5
