#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bad_inputs.py BUILD [NUMBER...]: what each program says to a wrong input: the exit status, one clear reason, and no
wrong one.

Rows with a program that this build does not have are left out. --table prints a line a row for people."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

LIMIT_S = 120
ROOT = pathlib.Path(__file__).resolve().parents[2]
PLUGIN = "plugin/libnccl-net-perseus.so"
NETBENCH = "tools/perseus-netbench"
WORKING = [NETBENCH, "--plugin", PLUGIN]
RUN = "tools/softnic/softnic-run"
IN_WORLD = [RUN, "--quiet", "--"]
CTL = "tools/softnic/softnicctl"
PERF = "tools/perseus-perf"
INFO = "tools/perseus-info"
HWCHECK = "tools/perseus-hwcheck"
PLOT = "tools/perseus-plot"
FUSED = "tools/perseus-fused-bench"
NCCL = ["tools/perseus-nccl", "--ops", "all_reduce", "--transports", "perseus"]
NO_DEVICE = "no usable RDMA device|cannot list RDMA devices"


class Bad:
    """An input: its number, words, environment, exit status, what must be said, what must not be said, and most lines
    on stderr."""

    def __init__(self, number, words, status, said, env=None, never=None, lines=4):
        self.number, self.words, self.status, self.said = number, words, status, said
        self.env, self.never, self.lines = env or {}, never, lines


INPUTS = [
    Bad(1, [NETBENCH, "--plugin", "nothere.so"], 1, r"nothere\.so: cannot open shared object", lines=1),
    Bad(2, [NETBENCH, "--plugin", "/usr/lib/x86_64-linux-gnu/libm.so.6"], 1, r"libm\.so\.6 exports no table", lines=1),
    Bad(3, [*WORKING, "--op", "broadcast"], 2, r"--op 'broadcast': want one of sendrecv"),
    Bad(4, [*WORKING, "--sizes", "64M:8"], 2, r"--sizes '64M:8': "),
    Bad(5, [*WORKING, "--sizes", "abc"], 2, r"--sizes 'abc': "),
    Bad(6, [*WORKING, "--ranks", "1"], 2, r"--ranks '1': want a number from 2"),
    Bad(7, [*IN_WORLD, *WORKING, "--ranks", "2", "--sizes", "8:8"], 1,
        r"rank 0: init returned|no usable RDMA device|NCCL_IB_HCA", {"NCCL_IB_HCA": "none9"}, lines=9),
    Bad(8, [*IN_WORLD, *WORKING, "--ranks", "2", "--sizes", "8:8"], 1, r"PERSEUS_REQUIRED=1",
        {"PERSEUS_REQUIRED": "1", "NCCL_IB_HCA": "none9"}, lines=9),
    Bad(9, [*WORKING, "--api", "v13"], 2, r"--api 'v13': want v6\.\.v12"),
    Bad(10, [*WORKING, "--mem", "cuda"], 2, r"--mem 'cuda': want one of host"),
    Bad(11, [*WORKING, "--sizes", "8:8", "extra"], 2, r"'extra' is not an option"),
    Bad(12, [NETBENCH, "--plugin"], 2, r"--plugin: needs a value"),
    Bad(13, [RUN, "--nics", "0", "--", "true"], 2, r"--nics: '0' is not between 1 and 16"),
    Bad(14, [RUN, "--nics", "17", "--", "true"], 2, r"--nics: '17' is not between 1 and 16"),
    Bad(15, [RUN, "--rate", "400", "--", "true"], 2, r"'400' is not a rate"),
    Bad(16, [RUN, "--latency", "2", "--", "true"], 2, r"'2' is not a time"),
    Bad(17, [RUN, "--loss", "200%", "--", "true"], 2, r"--loss: '200%' is too large: the most is 1, or 100%"),
    Bad(18, [RUN, "--nodes", "65", "--", "true"], 2, r"--nodes: '65' is not between 1 and 64"),
    Bad(19, [RUN, "--seed", "abc", "--", "true"], 2, r"--seed: 'abc' is not a whole number"),
    Bad(20, [RUN, "--name", "a/b", "--", "true"], 2, r"--name: 'a/b' is not a name"),
    Bad(21, [RUN, "--nics", "4", "--rate", "1G,2G,3G,4G,5G", "--", "true"], 2, r"--rate: 5 values for 4 NICs"),
    Bad(22, [*IN_WORLD, "nosuchcommand"], 127, r"cannot run nosuchcommand"),
    Bad(23, [RUN, "--json", "--", "true"], 2, r"'--json'"),
    Bad(24, [CTL, "--version"], 0, r"^softnicctl \d+\.\d+"),
    Bad(25, [CTL, "--world", "nope", "status"], 1, r"softnic\.nope: No such file .*\(softnicctl worlds lists"),
    Bad(26, [CTL, "frobnicate"], 2, r"'frobnicate' is not a command: want worlds"),
    Bad(27, [CTL, "link"], 2, r"link: wants DEVICE up\|down"),
    Bad(28, [*IN_WORLD, CTL, "link", "softnic9", "down"], 1, r"no device 'softnic9'"),
    Bad(29, [*IN_WORLD, CTL, "link", "softnic0", "sideways"], 2, r"'sideways' is neither up nor down"),
    Bad(30, [*IN_WORLD, CTL, "set", "softnic0", "rate", "fast"], 2, r"'fast' is not a rate: .*such as 400G"),
    Bad(31, [*IN_WORLD, CTL, "qp-error", "99999"], 1, r"qp-error 99999: no such queue pair"),
    Bad(32, [PERF], 2, r"want one operation: putsignal"),
    Bad(33, [PERF, "frob"], 2, r"'frob': want putsignal"),
    Bad(34, [*IN_WORLD, PERF, "put", "--peers", "1"], 77, r"no usable (rail|RDMA device)", {"NCCL_IB_HCA": "none9"}),
    Bad(35, [PERF, "putsignal", "--peers", "0"], 2, r"--peers '0': "),
    Bad(36, [PERF, "putsignal", "--policy", "fifo"], 2, r"--policy 'fifo': "),
    Bad(37, [PERF, "putsignal", "--bytes", "7"], 2, r"--bytes '7': "),
    Bad(38, [*IN_WORLD, PERF, "putsignal", "--plot", "/nonexistent/x.svg"], 2, r"'--plot' is not an option"),
    Bad(39, [FUSED, "--help"], 0, r"usage: perseus-fused-bench"),
    Bad(40, [FUSED, "--kernel", "gem", "--shape", "8x8x8"], 2, r"--kernel 'gem': "),
    Bad(41, [FUSED, "--kernel", "gemm", "--shape", "8x8"], 2, r"--shape '8x8': "),
    Bad(42, [FUSED, "--kernel", "gemm"], 2, r"--kernel gemm: --shape MxNxK is missing"),
    Bad(43, [FUSED, "--kernel", "gemm", "--shape", "4096x4096x4096"], 1, r"no usable GPU|CUDA", never=r"ranks\.cu"),
    Bad(44, [FUSED, "--kernel", "attention", "--shape", "4096x4096x4096"], 2,
        r"--kernel attention: --shape BxHqxHkvxSxD is missing"),
    Bad(45, [FUSED, "--kernel", "gemm", "--shape", "8x8x8", "--gpus", "-3"], 2, r"--gpus '-3': want a number from 1"),
    Bad(46, [*NCCL, "--sizes", "foo"], 2, r"--sizes 'foo': want ", lines=1),
    Bad(47, ["tools/perseus-nccl", "--transports", "foo"], 2, r"--transports 'foo': want ", lines=1),
    Bad(48, ["tools/perseus-nccl", "--ops", "foo"], 2, r"--ops 'foo': want ", lines=1),
    Bad(49, [*NCCL, "--env", "FOO"], 2, r"--env 'FOO': want NAME=VALUE", lines=1),
    Bad(50, [*NCCL, "--nccl-tests", "/nonexistent"], 2, r"--nccl-tests '/nonexistent': no all_reduce_perf", lines=1),
    Bad(51, [*NCCL, "--nccl-tests", "/nonexistent", "--sizes", "8"], 2,
        r"--nccl-tests '/nonexistent': no all_reduce_perf", lines=1),
    Bad(52, [*NCCL, "--nccl", "/nonexistent/libnccl.so.2"], 2,
        r"--nccl '/nonexistent/libnccl.so.2': No such file", lines=1),
    Bad(53, ["tools/perseus-compare", "--peer", "/nonexistent.so"], 2,
        r"--peer '/nonexistent.so': No such file", lines=1),
    Bad(54, [INFO], 1, r"(?s)problems.*a setting cannot be used: PERSEUS_ORDER=bogus.*fix: ",
        {"PERSEUS_ORDER": "bogus"}, never="libibverbs"),
    Bad(55, [*IN_WORLD, INFO], 1, r"(?s)problems.*GID 77 \(NCCL_IB_GID_INDEX\)", {"NCCL_IB_GID_INDEX": "77"},
        never="load the NIC's driver"),
    Bad(56, [*IN_WORLD, INFO], 0, r"(?s)problems.*setting: NCCL_IB_TC=abc: must be a whole number",
        {"NCCL_IB_TC": "abc"}, never="libibverbs"),
    Bad(57, [*IN_WORLD, INFO], 1, r"(?s)problems.*NCCL_IB_HCA=mlx5_9 .*softnic0", {"NCCL_IB_HCA": "mlx5_9"},
        never="load the NIC's driver"),
    Bad(58, [*IN_WORLD, INFO], 1, r"(?s)problems.*NCCL_SOCKET_IFNAME=nope0", {"NCCL_SOCKET_IFNAME": "nope0"}),
    Bad(59, [*IN_WORLD, INFO], 0, r"(?s)problems.*PERSEUS_REQIRED.*PERSEUS_REQUIRED", {"PERSEUS_REQIRED": "1"}),
    Bad(60, [RUN, "--quiet", "--efa", "--", INFO], 1, r"(?s)problems.*policy in_order needs queues that keep order",
        {"PERSEUS_ORDER": "in_order"}),
    Bad(61, [*IN_WORLD, INFO], 1, r"(?s)problems.*a setting cannot be used: PERSEUS_LOG=verbose",
        {"PERSEUS_LOG": "verbose"}, never="libibverbs"),
    Bad(62, [*IN_WORLD, INFO], 1, r"(?s)problems.*a setting cannot be used: PERSEUS_TIMEOUT_MS=abc",
        {"PERSEUS_TIMEOUT_MS": "abc"}, never="libibverbs"),
    Bad(66, [HWCHECK, "--listen", "--port", "80000"], 2, r"--port '80000': want a number from 1 to 65535"),
    Bad(67, [HWCHECK, "--listen", "--port", "0"], 2, r"--port '0': want a number from 1 to 65535"),
    Bad(68, [HWCHECK, "--bind", "127.0.0.1", "host"], 2, r"--bind '127\.0\.0\.1': only with --listen"),
    Bad(69, [*IN_WORLD, HWCHECK, "--listen", "--bind", "192.0.2.1"], 1,
        r"cannot listen on 192\.0\.2\.1 port 18517: Cannot assign", lines=2),
    Bad(70, ["sh", "-c", "echo '{bad' | $0", PLOT], 1, r"perseus-plot: <stdin>, line 1: not JSON", lines=1),
    Bad(71, ["sh", "-c", "echo bad | $0", PLOT], 1, r"perseus-plot: <stdin>: no line of it is a JSON object", lines=1),
    Bad(79, ["sh", "-c", """echo '{"rows": 3}' | $0""", PLOT], 1, r"no row of putsignal", lines=1),
    Bad(80, ["sh", "-c", """echo '{"op": "putsignal"}' | $0""", PLOT], 1, r"a row cannot be drawn, KeyError 'policy'",
        lines=1),
    Bad(81, ["sh", "-c", r"printf '\377\377' | $0", PLOT], 1, r"<stdin>: (not text|no line)", lines=1),
    *(Bad(82 + i, ["sh", "-c", """printf '{"op": "x", "bytes": %d, "busbw_GBps": 1}\n' 8 64 | $0 """ + to, PLOT], 1,
          r"cannot write all of the output: No space left", lines=1)
      for i, to in enumerate(("-o /dev/full", ">/dev/full"))),
    *(Bad(116 + i, ["sh", "-c", f"{row} | $0", PLOT], 1, said, lines=1)
      for i, (row, said) in enumerate((
          ("""echo '{"op": "x", "bytes": 1e999, "busbw_GBps": 1}'""", "a row cannot be drawn, OverflowError"),
          ("""printf '{"a":%s\\n' "$(printf %099999d 0 | tr 0 '[')\"""", "<stdin>, line 1: not JSON: ")))),
    Bad(118, [INFO, "--job", ""], 2, "--job '': not the id of a process", lines=1),
    Bad(84, [PERF, "putsignal", "extra"], 2, r"'extra': one operation only", lines=1),
    Bad(85, ["tools/perseus-sim", "trace", "/x.trace"], 2, r"'/x\.trace': one workload only", lines=1),
    Bad(86, ["tools/perseus-sim", "trace"], 2, r"trace needs --trace FILE", lines=1),
    Bad(63, [INFO, "--jsn"], 2, r"'--jsn' is not an option"),
    Bad(64, [*IN_WORLD, *WORKING, "--ranks", "2", "--sizes", "8:8"], 1, r"NCCL_SOCKET_IFNAME",
        {"NCCL_SOCKET_IFNAME": "nope0"}, never=r"\blo\b.*\blo\b", lines=6),
    Bad(65, [*IN_WORLD, *WORKING, "--ranks", "2", "--sizes", "8:8"], 0,
        r"NCCL_IB_TIMEOUT=99: must be a whole number.*31 is used", {"NCCL_IB_TIMEOUT": "99"}, lines=6),
    Bad(87, [HWCHECK, "host"], 2, r"want --cookie, which --listen prints on the other host; or --launch 'ssh host'",
        lines=2),
    Bad(88, [HWCHECK, "--cookie", "", "host"], 2, r"--cookie '': want 1 to 64 characters"),
    Bad(89, [HWCHECK, "--launch", "ssh a", "--listen"], 2, r"--launch 'ssh a': not with --listen"),
    Bad(90, [*IN_WORLD, HWCHECK, "--launch", "false", "127.0.0.1"], 1,
        r"what --launch started does not listen", lines=1),
    Bad(91, ["sh", "-c", "$0 --quiet -- $1 --listen --cookie - </dev/null", RUN, HWCHECK], 1,
        r"no cookie on standard input", lines=1),
    Bad(92, [INFO], 1, r"libfabric offers no such provider[^\n]*\n *fix: name a provider that 'fi_info -l' lists|"
        r"Perseus was built without libfabric|cannot open libfabric",
        {"PERSEUS_PROVIDER": "nosuch", "SOFTNIC_LOG": "none"},  # libfabric asks devices for too much, to learn
        never="modprobe", lines=9),
    Bad(105, ["tools/perseus-sim", "putsignal", "--kernel", "moe"], 2, r"--kernel is not for putsignal: fused: ",
        lines=1),
    *(Bad(110 + i, ["tools/perseus-sim", *words.split()], 2, said, lines=1)
      for i, (words, said) in enumerate((
          ("fused --tokens 64", "--tokens is not for fused --kernel reduce_scatter: moe, fused moe: "),
          ("fused --kernel moe --size 512", "--size is not for fused --kernel moe: fused products, fused attention: "),
          ("fused --kernel attention --band-pairs 2", "--band-pairs is not for fused --kernel attention: fused pro"),
          ("fused --kernel attention --rows-per-put 2", "--rows-per-put is not for fused --kernel attention: fused m"),
          ("nccl --group peer", "--group is not for nccl: putsignal, moe, alltoall: "),
          ("moe --warmup 2", "--warmup is not for moe: putsignal: ")))),
    *(Bad(119 + i, ["tools/perseus-sim", *words.split()], 2, said, lines=1)
      for i, (words, said) in enumerate((
          ("nccl --iter=2", "--iterations is not for nccl: putsignal"),
          ("putsignal --set link_gbps=nan", "link_gbps nan: want 0.001 to "),
          ("putsignal --set link_gbps=1..nan", "link_gbps '1..nan': want a number"),
          ("putsignal --set link_gbps=" + 40 * "0" + "1", "link_gbps '0*1': want a number"),
          ("alltoall --lose-rail -1:0:1", "--lose-rail '-1:0:1': want R:N:US"),
          ("alltoall --lose-rail 4294967297:0:1", "--lose-rail '4294967297:0:1': want R:N:US")))),
    *(Bad(125 + i, ["sh", "-c", f"echo '{line}' | $0 trace --trace {file}", "tools/perseus-sim"], 1, said, lines=2)
      for i, (line, file, said) in enumerate((
          ("nan 0 put 1 8 0", "/dev/stdin", "/dev/stdin:1: a time is from 0"),
          ("inf 0 put 1 8 0", "/dev/stdin", "/dev/stdin:1: a time is from 0"),
          ("", "/tmp", "cannot read the trace '/tmp': Is a directory")))),
    *(Bad(128 + i, [FUSED, "--kernel", *words.split()], 2, said, lines=1)
      for i, (words, said) in enumerate((
          ("gemm --shape 8x8x8x8", "--shape '8x8x8x8': want "), ("gemm --shape 8x8x8,", "--shape '8x8x8,': want "),
          ("gemm --shape -8x8x8", "--shape '-8x8x8': want "), ("gemm --shape 0x8x8", "--shape '0x8x8': want "),
          ("moe --preset 8x8x8x8x8", "--preset '8x8x8x8x8': want "), ("moe --zipf nan", "--zipf 'nan': want "),
          ("moe --zipf -1", "--zipf '-1': want "), ("gemm --shape 8x8x8 --tokens 8", "--tokens, .*: want --kernel moe"),
          ("gemm --shape 8x8x8 --causal", "--causal, .*: want --kernel attention")))),
    *(Bad(106 + i, ["tools/perseus-sim", "putsignal", "--cluster", file], 2, file + ": has no .*is it a cluster file",
          lines=1) for i, file in enumerate(("/dev/null", "/tmp/"))),
    *(Bad(94 + i, [*IN_WORLD, "sh", "-c", '"$0" "$@" --peers 1 --iterations 2 >/dev/full', PERF, op], 1,
          "perseus-perf: cannot write all of the output") for i, op in enumerate(("put", "putsignal"))),
    Bad(96, [NETBENCH, "--plugin", ""], 2, r"--plugin FILE is missing", lines=1),
    Bad(97, [PERF, "put", "--peers", "1", "--nodes", "3"], 2, r"--nodes 3: want at most as many as ranks, 2", lines=1),
    Bad(98, [*IN_WORLD, INFO], 1, r"(?s)problems.*a setting cannot be used: PERSEUS_REQUIRED=yes",
        {"PERSEUS_REQUIRED": "yes"}),
    Bad(99, [*IN_WORLD, *WORKING, "--ranks", "2", "--sizes", "8:8"], 1, r"no usable device: PERSEUS_REQUIRED=yes: must",
        {"PERSEUS_REQUIRED": "yes"}, lines=9),
    Bad(100, [*IN_WORLD, INFO], 0, r"(?s)problems.*NCCL_SOCKET_FAMILY=AF_INET7: is not one of.*NCCL_IB_USE_INLINE=1 "
        r"has no effect", {"NCCL_SOCKET_FAMILY": "AF_INET7", "NCCL_IB_USE_INLINE": "1"}),
    *(Bad(101 + i, [*IN_WORLD, INFO], 0, r"(?s)problems.*plugin: NCCL_NET_PLUGIN=" + said, {"NCCL_NET_PLUGIN": name})
      for i, (name, said) in enumerate((("/nope.so", r"/nope\.so: No such file"),
                                        ("persus", r"persus: no folder of .* has libnccl-net-persus\.so")))),
    Bad(103, [PLOT, str(ROOT / "doc/results/coverage.json")], 1, r'a file of results without "rows"', lines=1),
    Bad(104, ["tools/perseus-compare", "--peer", "/etc/passwd"], 1, r"netbench: /etc/passwd: invalid ELF header",
        never=r"libnccl-net-perseus\.so: exit", lines=2),
    Bad(109, ["sh", "-c", 'd=$(mktemp -d); cp "$1" $d/p.so; "$0" --plugin "$1" --peer $d/p.so --sizes 8:8:x2@40 '
              "--messages 2000 >/dev/full; r=$?; rm -r $d; exit $r", "tools/perseus-compare", PLUGIN], 1,
        "perseus-compare: cannot write all of the output: No space left", lines=1),
    Bad(93, ["sh", "-c", f"exec {ROOT}/tools/dev/rooms.py /nonexistent"], 2, r"/nonexistent: no build folder with"),
    Bad(137, ["sh", "-c", f"echo '{{bad' | {ROOT}/tools/dev/record.py x --machine m --command c"], 1,
        "record: <stdin>, line 1: not JSON: ", lines=1),
    Bad(138, ["sh", "-c", f"exec {ROOT}/tools/sim/study.py"], 2, "want a name, or --list"),
]


def run(build, words, env=None):
    words = [str(build / word) if (build / word).is_file() else word for word in words]
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith(("PERSEUS_", "NCCL_", "SOFTNIC_"))}
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env={**clean, **(env or {})},
                          stdin=subprocess.DEVNULL, check=False)


def wrong_with(bad, done):
    """Why an answer is not good, or None."""
    text = done.stdout + done.stderr
    if done.returncode != bad.status:
        return f"exit {done.returncode}, not {bad.status}"
    if "Traceback" in text:
        return "a traceback"
    if not re.search(bad.said, text, re.M):
        return f"does not say {bad.said}"
    if bad.never and re.search(bad.never, text, re.M):
        return f"says {bad.never}"
    if len(done.stderr.splitlines()) > bad.lines:
        return f"{len(done.stderr.splitlines())} lines on stderr, more than {bad.lines}"
    if done.returncode == 2 and done.stdout:
        return "a refused command line, and yet there is output on stdout"
    return None


def is_built(build, bad):
    return all((build / word).is_file() for word in bad.words if word.startswith(("tools/", "plugin/")))


def common_style(build):
    """Every program: --help with an example, --version, and an unknown option by its name."""
    for path in sorted((build / "tools").glob("perseus-*")) + sorted((build / "tools/softnic").glob("softnic*")):
        if not path.is_file() or path.suffix or not os.access(path, os.X_OK) or path.name == "perseus-nccl-ranks":
            continue
        done = run(build, [path, "--help"])
        yield (f"{path.name} --help",
               None if done.returncode == 0 and re.match(r"(?i)usage: " + path.name, done.stdout)
               and re.search(r"(?im)^examples?\b.*:$", done.stdout) else
               f"exit {done.returncode}, no usage or no example")
        done = run(build, [path, "--version"])
        yield (f"{path.name} --version",
               None if done.returncode == 0 and re.fullmatch(path.name + r" \d+\.\d+\.\d+\S*\n", done.stdout) else
               f"exit {done.returncode}: {done.stdout}{done.stderr}")
        for option in ("--help", "--version"):
            done = run(build, ["sh", "-c", '"$0" "$1" >/dev/full', path, option])
            yield (f"{path.name} {option} >/dev/full",
                   None if done.returncode == 1 and len(done.stderr.splitlines()) == 1 and
                   "cannot write all of the output: No space left" in done.stderr else
                   f"exit {done.returncode}: {done.stderr}")
        done = run(build, [path, "--no-such-option"])
        yield f"{path.name} --no-such-option", None if done.returncode == 2 and "--no-such-option" in done.stderr and \
            len(done.stderr.splitlines()) <= 2 and not done.stdout else f"exit {done.returncode}: {done.stderr}"


def scripts():
    """Commands for people: --help is quick and starts with the command, and a wrong word is named before
    anything is built."""
    for name in ("check", "demo", "dev/release", "dev/site", "dev/arm64"):
        path = ROOT / "tools" / name
        done = run(path.parent, [path, "--help"])
        yield (f"tools/{name} --help",
               None if done.returncode == 0 and done.stdout.startswith(f"tools/{name}") else f"exit {done.returncode}")
        if name in ("check", "demo", "dev/release"):
            done = run(path.parent, [path, ""])
            yield f"tools/{name} ''", None if done.returncode == 2 and not done.stdout else f"exit {done.returncode}"
        done = run(path.parent, [path, "--no-such-option"])
        yield f"tools/{name} --no-such-option", None if done.returncode == 2 and "--no-such-option" in done.stderr and \
            len(done.stderr.splitlines()) == 1 and not done.stdout else f"exit {done.returncode}: {done.stderr}"


def json_of_any_name(build):
    """A file name with quotes, a backslash and a byte that is not UTF-8 still gives valid JSON."""
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(os.fsencode(folder), b'we"ird\\\xff.so')
        os.symlink((build / PLUGIN).resolve(), name)
        done = subprocess.run([build / RUN, "--quiet", "--", build / NETBENCH, "--plugin", name, "--sizes", "8:8",
                               "--iters", "2", "--json"],
                              capture_output=True, timeout=LIMIT_S, check=False)
        rows = [json.loads(line) for line in done.stdout.decode().splitlines()]
    yield ("perseus-netbench --json",
           None if rows and 'we"ird\\' in rows[0]["plugin"] else f"exit {done.returncode}: {done.stderr}")


def main():
    words = [word for word in sys.argv[1:] if word != "--table"]
    build, chosen = pathlib.Path(words[0]).resolve(), [int(word) for word in words[1:]]
    failed = ran = 0
    for bad in INPUTS:
        if not is_built(build, bad) or (chosen and bad.number not in chosen):
            continue
        ran += 1
        done = run(build, bad.words, bad.env)
        why = wrong_with(bad, done)
        failed += why is not None
        print(f"{'FAIL' if why else 'ok'} {bad.number}: {' '.join(bad.words)} "
              f"{bad.env or ''}{': ' + why if why else ''}", flush=True)
        if why and "--table" not in sys.argv:
            print("\n".join(("    " + line)[:220] for line in (done.stdout + done.stderr).splitlines()[:8]))
    for name, why in () if chosen else [*common_style(build), *scripts(), *json_of_any_name(build)]:
        ran += 1
        failed += why is not None
        print(f"{'FAIL' if why else 'ok'} {name}{': ' + why if why else ''}", flush=True)
    print(f"{ran} inputs, {failed} wrong answers")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
