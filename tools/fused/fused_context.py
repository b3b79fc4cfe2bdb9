# SPDX-License-Identifier: Apache-2.0
"""libperseus-fused by ctypes, for scripts that compare its times with torch's: a context whose all-gather is
that of the CPU side of a process group."""
import ctypes
import faulthandler
import importlib.util
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("header", ROOT / "fused/python/perseus/_header.py")
header = importlib.util.module_from_spec(spec)
spec.loader.exec_module(header)

pointer, ALLGATHER = ctypes.c_void_p, header.ALLGATHER
HEADERS = ("common", "fused", "gemm", "moe", "attention", "quantise")
# The structs of the public headers, by name: read from their text, as the Python package does.
structs = header.Header("".join((ROOT / f"include/perseus/{name}.h").read_text() for name in HEADERS)).structs
Config, Error = structs["prs_fused_config"], structs["prs_fused_error"]


def bounded(seconds):
    """After so many seconds the script prints where each of its threads is, and ends."""
    faulthandler.dump_traceback_later(seconds, exit=True)


class Context:
    """rank and world are those of `group` (a gloo group); group None: a single rank. node: 0 is this machine."""

    def __init__(self, library, device, group=None, timeout_ms=600000, node=0):
        self.lib = ctypes.CDLL(library)
        self.lib.prs_fused_error_text.restype = ctypes.c_char_p
        self.group, self.handle = group, pointer()
        self.callback = ALLGATHER(self.allgather)
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        config = Config(rank, world, device, timeout_ms, self.callback, None, node)
        self.check(self.lib.prs_fused_open(ctypes.byref(config), ctypes.byref(self.handle)), "prs_fused_open")

    def allgather(self, _, mine, everyone, count):
        import torch
        import torch.distributed as dist

        try:
            given = torch.frombuffer(bytearray(ctypes.string_at(mine, count)), dtype=torch.uint8)
            taken = [torch.empty_like(given) for _ in range(self.group.size())]
            dist.all_gather(taken, given, group=self.group)
            ctypes.memmove(everyone, b"".join(t.numpy().tobytes() for t in taken), count * len(taken))
            return 0
        except Exception as e:  # an exception cannot cross C
            print(f"fused_context: allgather: {e}", file=sys.stderr)
            return -5

    def check(self, status, what):
        if status != 0:
            sys.exit(f"{what}: status {status}: {self.lib.prs_fused_error_text().decode()}")

    def error(self):
        """What a kernel waited for until its limit; empty: no error."""
        e = Error()
        return e.text.decode() if self.lib.prs_fused_poll_error(self.handle, ctypes.byref(e)) != 0 else ""

    def close(self):
        self.lib.prs_fused_close.restype = None
        self.lib.prs_fused_close(self.handle)
