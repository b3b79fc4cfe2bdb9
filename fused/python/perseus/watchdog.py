# SPDX-License-Identifier: Apache-2.0
"""A thread that looks for asynchronous errors: a kernel that waited for a rank until its limit, or the network between
nodes."""
from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import Callable

from ._bootstrap import raise_in
from ._checks import _check_kind
from ._group import Group
from ._library import PerseusError

PERIOD_S = 0.1
_watched: dict[int, tuple["weakref.ref[Group]", Callable[[Group, PerseusError], None]]] = {}
_lock = threading.Lock()
_thread: threading.Thread | None = None


def raise_in_its_thread(group: Group, error: PerseusError) -> None:
    """Raises the error in the thread that opened the group, when it next runs Python code. A thread that waits for the
    GPU in CUDA gets it after that wait, which ends when the kernels give up; one that waits for other ranks to open
    something, at once. Does nothing where a call has raised the error already."""
    if group.first_to_tell():
        raise_in(group.thread, error)


def watch(group: Group, act: Callable[[Group, PerseusError], None] = raise_in_its_thread) -> None:
    """Calls act(group, error) once, from the watchdog's thread, when the group has an asynchronous error.
    perseus.init() does this.

    Example::

        perseus.watch(group, lambda group, error: os._exit(1))   # end the process, as NCCL's watchdog does
    """
    global _thread
    _check_kind("watch", "group", group, Group)
    with _lock:
        _watched[id(group)] = (weakref.ref(group), act)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="perseus-watchdog", daemon=True)
            _thread.start()


def unwatch(group: Group) -> None:
    """Stops watching a group; does nothing if it is not watched."""
    with _lock:
        _watched.pop(id(group), None)


def _run() -> None:
    while True:
        time.sleep(PERIOD_S)
        with _lock:
            watched = list(_watched.items())
        for key, (reference, act) in watched:
            group = reference()
            if group and group.leaves_out and group.lost() != group.absent:
                print(f"watchdog: {group!r} goes on without ranks {group.leave_out()}", file=sys.stderr, flush=True)
            error = group.error() if group else None
            if group is None or error:
                with _lock:
                    _watched.pop(key, None)
            if group and error:
                print(f"watchdog: {error}", file=sys.stderr, flush=True)
                act(group, error)
