#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every NCCL of a folder over Perseus on a host with two GPUs and without a NIC: one JSON object a version.

For each version: which of its tables NCCL takes; collectives with one process a GPU, one process for both GPUs, and one
thread a GPU; communicators that are made and destroyed again and again, so that NCCL unloads and loads the plugin;
device-initiated traffic where the version has it. All data is checked. --tables needs no GPU: it only says which tables
each version asks for, and which it will take.
"""
import argparse
import ctypes
import json
import lzma
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# NCCL must use the network although both GPUs are on this host; multicast stays off, since the host may be shared.
COMMON = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_IB_GID_INDEX": "1",
          "NCCL_GIN_TYPE": "2", "NCCL_NET_GDR_LEVEL": "SYS"}
KINDS = {"net": b"ncclNetPlugin_v", "gin": b"ncclGinPlugin_v", "rma": b"ncclRmaPlugin_v"}
PARTS = ["processes", "one_process", "threads", "reload", "device_api"]
WORDS = 1 << 18
ROUNDS = 3  # of reload


# ---- which tables ----

def versions_in(data, prefix):
    """The versions of a table whose symbol names a library holds, newest first, which is the order in which NCCL
    asks."""
    return sorted({int(number) for number in re.findall(prefix + rb"(\d+)\0", data)}, reverse=True)


def tables(nccl, plugin):
    """What NCCL asks for, and what it takes: the newest that both know. NCCL 2.30.7 and newer run their own proxy over
    RMA and skip a GIN plugin that is a proxy; RMA v13 never became usable."""
    asks = {kind: versions_in(nccl, prefix) for kind, prefix in KINDS.items()}
    has = {kind: versions_in(plugin, prefix) for kind, prefix in KINDS.items()}
    takes = {kind: next((version for version in asks[kind] if version in has[kind]), None) for kind in KINDS}
    if takes["rma"]:
        device = f"rma v{takes['rma']}"
    else:
        device = f"gin v{takes['gin']}" if takes["gin"] else None
    return {"asks": asks, "takes": takes, "device_traffic_over": device}


def loaded(logs):
    """What NCCL's log says it has loaded, by kind."""
    found = {}
    for kind, version in re.findall(r"Loaded (net|gin|rma) plugin Perseus \(v(\d+)\)", logs, re.IGNORECASE):
        found[kind.lower()] = int(version)
    return found


# ---- libraries ----

def find_libraries(folder):
    """Yield (name, path) for each NAME.so, NAME.so.xz, wheel, or folder with libnccl.so.2."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".so", ".so.xz")):
            yield path.name.split(".so")[0], path
        elif path.suffix == ".whl":
            package, version = path.name.split("-")[:2]
            yield f"{version}-{package.rsplit('_', 1)[-1]}", path
        elif (path / "libnccl.so.2").exists():
            yield path.name, path / "libnccl.so.2"


def unpack(path, folder):
    """Put the library into the folder as libnccl.so.2."""
    target = folder / "libnccl.so.2"
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith("/libnccl.so.2"))
            target.write_bytes(wheel.read(name))
    elif path.suffix == ".xz":
        target.write_bytes(lzma.decompress(path.read_bytes()))
    else:
        target.symlink_to(path.resolve())
    return target


# ---- inside a process that uses NCCL: started by this script, with --child ----

class Cuda:
    """The calls of CUDA's driver that the checks need."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name, *arguments):
        result = getattr(self.driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} failed: {result}")

    def use(self, device):
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def alloc(self, values):
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(ctypes.sizeof(values)))
        self.call("cuMemcpyHtoD_v2", pointer, values, ctypes.c_size_t(ctypes.sizeof(values)))
        self.call("cuCtxSynchronize")  # cuMemcpyHtoD returns before the bytes are in place
        return pointer

    def read(self, pointer, values):
        self.call("cuMemcpyDtoH_v2", values, pointer, ctypes.c_size_t(ctypes.sizeof(values)))

    def stream(self):
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream


class Nccl:
    """One libnccl.so.2."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.ncclGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        result = getattr(self.library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} failed: {result} ({self.library.ncclGetErrorString(result).decode()})")


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def prepare(cuda, device):
    """Buffers of a rank on its device: (send, receive, stream)."""
    cuda.use(device)
    send = cuda.alloc((ctypes.c_float * WORDS)(*([float(device + 1)] * WORDS)))
    return send, cuda.alloc((ctypes.c_float * WORDS)()), cuda.stream()


def count_wrong(cuda, device, receive, stream):
    got = (ctypes.c_float * WORDS)()
    cuda.use(device)
    cuda.call("cuStreamSynchronize", stream)
    cuda.read(receive, got)
    return sum(value != 3.0 for value in got)


def enqueue_sum(nccl, comm, send, receive, stream):
    nccl.call("ncclAllReduce", send, receive, ctypes.c_size_t(WORDS), 7, 0, comm, stream)  # float, sum


def both_in_one_thread(nccl, cuda):
    """Make communicators for two GPUs, sum, check, destroy. Return how many words are wrong."""
    comms = (ctypes.c_void_p * 2)()
    buffers = [prepare(cuda, device) for device in range(2)]
    nccl.call("ncclCommInitAll", comms, 2, (ctypes.c_int * 2)(0, 1))
    nccl.call("ncclGroupStart")
    for device in range(2):
        cuda.use(device)
        enqueue_sum(nccl, ctypes.c_void_p(comms[device]), *buffers[device])
    nccl.call("ncclGroupEnd")
    for device in range(2):  # both before any copy, which would hold a lock of the driver that the software NIC needs
        cuda.use(device)
        cuda.call("cuStreamSynchronize", buffers[device][2])
    wrong = sum(count_wrong(cuda, device, *buffers[device][1:]) for device in range(2))
    for device in range(2):
        nccl.call("ncclCommDestroy", ctypes.c_void_p(comms[device]))
    return wrong


def thread_a_gpu(nccl, cuda):
    """As both_in_one_thread(), with a thread for each GPU."""
    unique, wrong, errors = UniqueId(), [0, 0], []
    nccl.call("ncclGetUniqueId", ctypes.byref(unique))

    def rank(device):
        try:
            buffers, comm = prepare(cuda, device), ctypes.c_void_p()
            nccl.call("ncclCommInitRank", ctypes.byref(comm), 2, unique, device)
            enqueue_sum(nccl, comm, *buffers)
            wrong[device] = count_wrong(cuda, device, *buffers[1:])
            nccl.call("ncclCommDestroy", comm)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError("; ".join(errors))
    return sum(wrong)


def child(part, path):
    try:
        nccl, cuda = Nccl(path), Cuda()
    except OSError as error:
        sys.exit(f"nccl_matrix.py: NCCL or CUDA's driver cannot be used: {error}")
    version = ctypes.c_int()
    nccl.call("ncclGetVersion", ctypes.byref(version))
    if part == "threads":
        wrong = thread_a_gpu(nccl, cuda)
    else:
        wrong = sum(both_in_one_thread(nccl, cuda) for _ in range(ROUNDS if part == "reload" else 1))
    print(json.dumps({"version": version.value, "wrong": wrong}))
    return 1 if wrong else 0


# ---- the parts ----

class Version:
    """One NCCL, unpacked, and the row that it gets."""

    def __init__(self, args, name, path, folder):
        self.args, self.name, self.folder = args, name, folder
        self.library = unpack(path, folder)
        # 2.28 to 2.29.3 forget the plugin's own name when they unload it
        (folder / "libnccl-net.so").symlink_to(args.plugin)
        self.row = {"nccl": name, **tables(self.library.read_bytes(), args.plugin.read_bytes()), "errors": []}

    def run(self, part, command, plugin="perseus", softnic=True):
        """Run the command, over the software NIC. Return (its output, seconds), or None after noting why it failed."""
        level = "WARN" if part == "device_api" else "INFO"  # that part is timed
        env = dict(os.environ, **COMMON, NCCL_DEBUG=level, NCCL_DEBUG_SUBSYS="INIT,NET",
                   NCCL_DEBUG_FILE=str(self.folder / f"{part}-{plugin}.log.%p"))
        paths = [str(self.folder), str(self.args.plugin.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        env["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        # By its short name: NCCL up to 2.20 takes no path. With a name in NCCL_NET no other transport can stand in.
        env.update({"NCCL_NET_PLUGIN": "perseus", "NCCL_NET": "Perseus", "PERSEUS_REQUIRED": "1"}
                   if plugin == "perseus" else {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "IB"})
        command = (([str(self.args.softnic), "--quiet", "--nics", "2", "--"] if softnic else [])
                   + [str(word) for word in command])
        began = time.monotonic()
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=self.args.timeout,
                                  check=False)
        except subprocess.TimeoutExpired as error:
            self.fail(part, f"not done within {self.args.timeout} s", (error.stdout or b"").decode(errors="replace"))
            return None
        if done.returncode != 0:
            self.fail(part, f"exit {done.returncode}", done.stdout + done.stderr)
            return None
        return done.stdout, round(time.monotonic() - began, 1)

    def fail(self, part, why, text=""):
        self.row["errors"].append(f"{part}: {why}")
        tail = "\n".join(text.splitlines()[-15:])
        warnings = [line for line in self.logs(part).splitlines() if " WARN " in line or "Perseus" in line
                    and "error" in line.lower()]
        print(f"{self.name}: {part}: {why}\n{tail}\n" + "\n".join(warnings[-10:]), file=sys.stderr)

    def logs(self, part):
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(f"{part}-perseus.log.*")))

    def processes(self):
        got = self.run("processes", [self.args.ranks, "--label", self.name, "--ranks", 2, "--nccl", self.library,
                                     "--sizes", "8:1M:x16", "--iters", 5, "--warmup", 1, "--timeout",
                                     self.args.timeout - 5])
        if not got:
            return
        rows = [json.loads(line) for line in got[0].splitlines() if line.startswith("{")]
        wrong = sum(row["wrong"] for row in rows)
        self.row["processes"] = {"ops": sorted({row["op"] for row in rows}), "rows": len(rows), "wrong": wrong,
                                 "seconds": got[1]}
        if wrong or not rows:
            self.fail("processes", f"{len(rows)} rows, {wrong} wrong")
        self.check_tables("processes")

    def check_tables(self, part):
        """Do the logs say what the symbols foretell?"""
        self.row["loaded"] = found = loaded(self.logs(part))
        names = self.library.read_bytes()
        for kind in ("net", "rma") if self.row["takes"]["rma"] else ("net", "gin"):
            expected = self.row["takes"][kind]
            says = f"Loaded {kind} plugin %s (v{expected})".encode() in names  # 2.19 does not say v7
            if expected and says and found.get(kind) != expected:
                self.fail(part, f"{kind} v{expected} was expected, and {found.get(kind)} was loaded")

    def in_child(self, part):
        got = self.run(part, [sys.executable, __file__, "--child", part, self.library])
        if got:
            self.row[part] = {**json.loads(got[0].splitlines()[-1]), "seconds": got[1]}
            unloads = len(re.findall(r"Unloading plugin", self.logs(part), re.IGNORECASE))
            if part == "reload":
                self.row[part].update(rounds=ROUNDS, unloads=unloads)

    def device_api(self):
        binary = self.args.tests / f"alltoall_perf-{self.name.split('-')[0]}" if self.args.tests else None
        if not self.row["device_traffic_over"] or not binary or not binary.exists():
            return
        self.row["device_api"] = result = {}
        for device in (3, 4):
            medians = {"perseus": [], "ib": []}
            for _ in range(self.args.rounds):
                for transport, usec in medians.items():
                    got = self.run("device_api", [binary, "-b", 8, "-e", "1M", "-f", 8, "-g", 2, "-R", 2, "-D", device],
                                   transport)
                    if not got:
                        continue
                    rows = [line.split() for line in got[0].splitlines() if re.match(r"\s+\d+\s+\d+\s", line)]
                    wrong = sum(int(row[8]) for row in rows if row[8].isdigit())
                    usec += [statistics.median(float(row[5]) for row in rows)] if rows else []
                    if wrong or not rows:
                        self.fail("device_api", f"{transport} -D {device}: {len(rows)} rows, {wrong} wrong")
            result[f"D{device}"] = {name: [round(value, 1) for value in usec] for name, usec in medians.items()}

    def all(self):
        for part in self.args.parts.split(","):
            began = time.monotonic()
            (getattr(self, part) if part in ("processes", "device_api") else lambda p=part: self.in_child(p))()
            print(f"{self.name}: {part}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        return self.row


def parse_arguments():
    build = ROOT / "build"
    parser = argparse.ArgumentParser(prog="nccl_matrix.py", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="?",
                        help="VERSION.so, VERSION.so.xz, wheels, or folders with libnccl.so.2")
    parser.add_argument("--only", help="comma list of versions of the folder (all)")
    parser.add_argument("--tables", action="store_true", help="only which tables; needs no GPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma list (%(default)s)")
    parser.add_argument("--plugin", type=pathlib.Path, default=build / "plugin/libnccl-net-perseus.so")
    parser.add_argument("--ranks", type=pathlib.Path, default=build / "tools/perseus-nccl-ranks")
    parser.add_argument("--softnic", type=pathlib.Path, default=build / "tools/softnic/softnic-run")
    parser.add_argument("--tests", type=pathlib.Path,
                        help="folder with nccl-tests' alltoall_perf-VERSION, built with its headers")
    parser.add_argument("--rounds", type=int, default=1,
                        help="processes of each transport for the device API, by turns (%(default)s)")
    parser.add_argument("--timeout", type=int, default=90, help="seconds for one run (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="append the rows to this file, too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = parse_arguments()
    if args.child:
        return child(*args.child)
    if not args.folder or not args.folder.is_dir():
        sys.exit(f"nccl_matrix.py: {args.folder}: give a folder with NCCL libraries")
    if not args.plugin.exists():
        sys.exit(f"nccl_matrix.py: there is no plugin {args.plugin}: build it, or give --plugin FILE")
    args.plugin = args.plugin.resolve()
    failed = seen = 0
    for name, path in find_libraries(args.folder):
        if args.only and name not in args.only.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            version = Version(args, name, path, pathlib.Path(folder))
            row = version.row if args.tables else version.all()
        seen += 1
        failed += bool(row["errors"])
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
    if not seen:
        sys.exit(f"nccl_matrix.py: no library in {args.folder}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
