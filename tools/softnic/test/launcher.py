#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""softnic-run and softnicctl from outside: options, exit status, signals, clean-up, the fake sysfs.

usage: launcher.py SOFTNIC_RUN SOFTNICCTL CLAIM      (exit 77: cannot run here, with the reason)
"""
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SKIP = 77
LIMIT_S = 100  # a longer wait is a failure; a busy machine may take seconds for anything
SHM = pathlib.Path("/dev/shm")
RUN, CTL = None, None


class Skip(Exception):
    pass


def run(*words, **more):
    return subprocess.run([RUN, *words], capture_output=True, text=True, timeout=LIMIT_S, **more)


def ctl(*words, **more):
    return subprocess.run([CTL, *words], capture_output=True, text=True, timeout=LIMIT_S, **more)


def start(*words):
    """A launcher whose command prints its world first; return (process, path of the world)."""
    process = subprocess.Popen([RUN, "--quiet", *words], stdout=subprocess.PIPE, text=True)
    return process, pathlib.Path(process.stdout.readline().strip())


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.02)


SAY_WORLD = 'echo "$SOFTNIC_WORLD"; '


def bad_options_are_refused_by_name_and_value():
    for words, telling in (
            (["--rate", "400X", "--", "true"], "--rate: '400X'"), (["--rate", "-1G", "--", "true"], "--rate: '-1G'"),
            (["--rate", "0x10G", "--", "true"], "--rate: '0x10G'"), (["--rate", "nan", "--", "true"], "--rate: 'nan'"),
            (["--rate", "1e30T", "--", "true"], "too large"),
            (["--latency", "2", "--", "true"], "--latency: '2'"),
            (["--latency", "2 us", "--", "true"], "--latency: '2 us'"),
            (["--jitter", "", "--", "true"], "--jitter: ''"), (["--nics", "0", "--", "true"], "--nics: '0'"),
            (["--nics", "2x", "--", "true"], "--nics: '2x'"), (["--nodes", "65", "--", "true"], "--nodes: '65'"),
            (["--nics", "16", "--nodes", "64", "--", "true"], "--nics 16 and --nodes 64"),
            (["--seed", "99999999999999999999", "--", "true"], "--seed"),
            (["--fence", "never", "--", "true"], "--fence: 'never'"),
            (["--atomic-cap", "all", "--", "true"], "--atomic-cap: 'all' is neither none nor hca nor glob"),
            (["--name", "../x", "--", "true"], "--name: '../x'"), (["--wr-cost"], "wr-cost"),
            (["--unheard-of"], "unheard-of"), (["--rate", "1G,,2G", "--nics", "3", "--", "true"], "--rate: '1G,,2G'"),
            (["--rate", "1G,2G", "--", "true"], "--rate: 2 values"),
            (["--loss", "1.5", "--", "true"], "--loss: '1.5'"), (["--loss", "lots", "--", "true"], "--loss: 'lots'"),
            ([], "no command")):
        done = run(*words)
        assert done.returncode in (2, 125), (words, done)
        assert telling in done.stderr, (words, telling, done.stderr)


def good_options_reach_the_world():
    done = run("--quiet", "--nics", "2", "--nodes", "3", "--rate", "12.5G", "--latency", "1.5us", "--wr-cost", "50ns",
               "--doorbell-cost", "200ns", "--fence-cost", "1us", "--jitter", "1ms", "--retry-cap", "3s", "--seed", "7",
               "--fence", "strict", "--", CTL, "status", "--json")
    world = json.loads(done.stdout)
    want = {"nics": 2, "nodes": 3, "rate_bps": 12500000000, "latency_ns": 1500, "wr_cost_ns": 50,
            "doorbell_cost_ns": 200, "copier": 0, "fence_cost_ns": 1000, "jitter_ns": 1000000,
            "retry_cap_ns": 3000000000, "seed": 7, "fence": "strict"}
    assert {k: world[k] for k in want} == want, world
    assert [d["node"] for d in world["devices"]] == [0, 0, 1, 1, 2, 2], world["devices"]
    assert len({d["gid"] for d in world["devices"]}) == 6, world["devices"]


def links_may_differ_and_change():
    def links(text):
        return [(d["rate_bps"], d["latency_ns"], d["loss_ppb"]) for d in json.loads(text)["devices"]]

    options = ("--nics", "3", "--nodes", "2", "--rate", "40G,10G", "--latency", "1us,2us,3us", "--loss", "0.1%,0")
    done = run("--quiet", *options, "--", CTL, "status", "--json")
    node = [(40000000000, 1000, 1000000), (10000000000, 2000, 0), (10000000000, 3000, 0)]
    assert links(done.stdout) == 2 * node, done
    told = run(*options, "--", "true").stderr
    assert "rate 40,10" in told.replace("G", "") and "latency 1us,2us,3us" in told and "loss 0.1%,0%" in told, told
    script = (f'"{CTL}" set softnic1 rate 1G && "{CTL}" set softnic1 latency 9us && '
              f'"{CTL}" set softnic0 loss 1% && "{CTL}" status --json')
    done = run("--quiet", "--nics", "2", "--", "sh", "-c", script)
    assert links(done.stdout) == [(0, 0, 10000000), (1000000000, 9000, 0)], done
    for words, status in ((["set", "nosuch", "rate", "1G"], 1), (["set", "softnic0", "rate", "fast"], 2),
                          (["set", "softnic0", "colour", "1"], 2), (["set", "softnic0", "loss", "2"], 2),
                          (["set", "softnic0"], 2)):
        done = run("--quiet", "--", CTL, *words)
        assert done.returncode == status and done.stderr, (words, done)


def the_status_is_the_commands():
    assert run("--quiet", "--", "sh", "-c", "exit 7").returncode == 7
    assert run("--quiet", "--", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL
    assert run("--quiet", "--", "/no/such/program").returncode == 127
    assert run("--quiet", "--", "/etc/passwd").returncode == 126
    assert run("--quiet", "--", "echo", "--nics", "0").stdout == "--nics 0\n"


def signals_are_passed_on():
    process, world = start("--", "sh", "-c",
                           "trap 'echo caught; exit 3' USR1; " + SAY_WORLD + "while :; do sleep 0.05; done")
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=LIMIT_S)[0] == "caught\n"
    assert process.returncode == 3
    assert not world.exists()


def the_world_goes_with_the_command():
    process, world = start("--", "sh", "-c", SAY_WORLD + "exec sleep 1000")
    process.terminate()
    assert process.wait(timeout=LIMIT_S) == 128 + signal.SIGTERM
    assert not world.exists(), world


def gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def a_killed_launcher_leaves_nothing_for_long():
    process, world = start("--", "sh", "-c", SAY_WORLD + "echo $$; exec sleep 1000")
    command = int(process.stdout.readline())
    assert world.exists()
    process.kill()
    process.wait()

    wait_until(lambda: gone(command), f"command {command} to end with its launcher")
    assert run("--quiet", "--", "true").returncode == 0  # any later launcher sweeps
    assert not world.exists(), world


def copier_of(world):
    processes = json.loads(ctl("--world", str(world), "status", "--json").stdout)["processes"]
    return next(p["pid"] for p in processes if p.get("copier"))


def the_copier_goes_with_the_launcher():
    for end in (signal.SIGTERM, signal.SIGKILL):
        process, world = start("--copier", "--", "sh", "-c", SAY_WORLD + "echo $$; exec sleep 1000")
        command, copier = int(process.stdout.readline()), copier_of(world)
        assert not gone(copier)
        process.send_signal(end)
        process.wait()
        wait_until(lambda: gone(command), f"command {command} to end with its launcher")
        wait_until(lambda: gone(copier), f"copier {copier} to end with its launcher")
        assert run("--quiet", "--", "true").returncode == 0  # sweeps
        assert not world.exists(), world
    # Signals from the terminal to the command's group must not reach the copier.
    process, world = start("--copier", "--", "sh", "-c", SAY_WORLD + "echo $$; exec sleep 1000")
    command, copier = int(process.stdout.readline()), copier_of(world)
    assert os.getpgid(copier) == copier and os.getpgid(command) != copier
    process.kill()
    process.wait()


def a_copier_that_ends_early_is_told_of():
    # Wait until the launcher has reaped the copier: then it reports that before it handles the command's end.
    kill = f"""pid=$("{CTL}" status --json | sed 's/.*"pid": \\([0-9]*\\)[^}}]*"copier": true.*/\\1/'); kill -9 $pid
while [ -e /proc/$pid ]; do sleep 0.02; done; exit 5"""
    done = run("--quiet", "--copier", "--", "sh", "-c", kill)
    assert done.returncode == 5 and "the copier, pid" in done.stderr and "signal 9" in done.stderr, done


def without_a_cuda_driver_nothing_is_loaded_into_the_command():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        done = run("--quiet", "--", "sh", "-c", 'echo "<$LD_AUDIT>"')
        assert done.stdout == "<>\n", done
    else:
        raise Skip("this host has a CUDA driver")


def sweep_spares_worlds_in_use():
    process, world = start("--", "sh", "-c", SAY_WORLD + "exec sleep 1000")
    try:
        assert ctl("sweep").returncode == 0
        assert world.exists(), world
    finally:
        process.terminate()
        process.wait()


def worlds_of_another_process_namespace_are_left_alone():
    elsewhere = ["unshare", "-Urpf", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*elsewhere, "true"], capture_output=True).returncode:
        raise Skip("no process namespace can be made here (unshare -Urpf)")
    process, world = start("--name", f"container{os.getpid()}", "--", "sh", "-c", SAY_WORLD + "exec sleep 1000")
    try:
        name = world.name.removeprefix("softnic.")
        subprocess.run([*elsewhere, RUN, "--quiet", "--no-sysfs", "--", "true"], check=True, timeout=LIMIT_S)
        assert world.exists(), "its processes cannot be seen from there, and live"
        for words in [RUN, "--name", name, "--", "true"], [CTL, "--world", name, "status"]:
            done = subprocess.run([*elsewhere, *words], capture_output=True, text=True, timeout=LIMIT_S)
            assert done.returncode and "another process namespace" in done.stderr, done
    finally:
        process.terminate()
        process.wait()


def a_foreign_file_is_no_world_and_is_left_alone():
    path = SHM / f"softnic.foreign{os.getpid()}"
    try:
        path.write_bytes(b"something else" * 1000)
        path.chmod(0o600)
        done = ctl("--world", str(path), "status")
        assert done.returncode == 1 and "not a world" in done.stderr, done
        ctl("sweep")
        assert path.exists()
    finally:
        path.unlink()


NOBODY = 65534


def as_nobody():
    """The words that make a command run as an unprivileged user; none if this one is."""
    if os.geteuid():
        return []
    words = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    if (not shutil.which("setpriv")
        or subprocess.run([*words, RUN, "--quiet", "--no-sysfs", "--", "true"], capture_output=True).returncode):
        raise Skip("no other user can run softnic-run here (setpriv, or the build folder is closed to others)")
    return words


def have_shm_of_our_own():
    """Give this process and its children a /dev/shm that no other sees. False: that cannot be done here."""
    clone_newns = 0x20000
    steps = ["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(SHM)]
    return ctypes.CDLL(None).unshare(clone_newns) == 0 and all(
        subprocess.run(["mount", *words], capture_output=True).returncode == 0 for words in steps)


def a_world_that_another_user_planted_is_refused():
    """Root's programs open a world of a known name without a launcher, and any user may make it first."""
    if os.geteuid():
        raise Skip("needs root and another user")
    library = pathlib.Path(os.path.realpath(RUN)).parent / "lib"
    header = pathlib.Path(__file__).parents[1] / "world/world.h"
    default = "0.v" + re.search(r"SN_WORLD_VERSION = (\d+)", header.read_text())[1]
    names = [f"plant{os.getpid()}"]
    if have_shm_of_our_own():  # else other tests would meet the default world
        names.append(default)
    else:
        print("not tried: the default world, since no mount namespace can be made here")
    for name in names:
        process = subprocess.Popen([*as_nobody(), RUN, "--quiet", "--no-sysfs", "--name", name, "--", "sh", "-c",
                                    SAY_WORLD + "exec sleep 1000"],
                                   stdout=subprocess.PIPE, text=True)
        world = pathlib.Path(process.stdout.readline().strip())
        try:
            for done in run("--name", name, "--", "true"), ctl("--world", name, "status"):
                assert done.returncode and f"user {NOBODY}, mode 600" in done.stderr, done
            if name == default and not os.environ.get("SOFTNIC_SANITIZED") and shutil.which("ibv_devices"):
                done = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=LIMIT_S,
                                      env={**os.environ, "LD_LIBRARY_PATH": str(library)})
                assert "softnic0" not in done.stdout and f"user {NOBODY}, mode 600" in done.stderr, done
            process.kill()  # now it is stale, and still not root's
            process.wait()
            assert ctl("sweep").returncode == 0 and world.exists(), "another user's file was removed"
        finally:
            process.kill()
            process.wait()
            world.unlink(missing_ok=True)


def a_world_that_others_may_open_is_refused():
    process, world = start("--", "sh", "-c", SAY_WORLD + "exec sleep 1000")
    link = SHM / f"softnic.link{os.getpid()}"
    try:
        link.symlink_to(world)
        for path, mode, telling in ((world, 0o620, "mode 620"), (world, 0o604, "mode 604"),
                                    (link, 0o600, "symbolic link")):
            world.chmod(mode)
            done = ctl("--world", str(path), "status")
            assert done.returncode == 1 and telling in done.stderr, done
        process.kill()
        process.wait()
        assert ctl("sweep").returncode == 0
        assert link.is_symlink() and not world.exists(), "only the world itself is swept, not by way of a link"
    finally:
        process.kill()
        process.wait()
        link.unlink(missing_ok=True)
        world.unlink(missing_ok=True)


def who_joins_is_where_the_maker_is():
    """In one user namespace: between two, processes of an unprivileged user cannot copy."""
    name, folder = f"meet{os.getpid()}", tempfile.gettempdir()
    report = 'echo "$SOFTNIC_WORLD $(readlink /proc/self/ns/user) $(readlink /proc/self/ns/mnt) $PWD"; '
    for no_sysfs in [], ["--no-sysfs"]:
        process = subprocess.Popen([*as_nobody(), RUN, "--quiet", *no_sysfs, "--name", name, "--", "sh", "-c",
                                    report + "exec sleep 1000"],
                                   stdout=subprocess.PIPE, text=True, cwd=folder)
        try:
            made = process.stdout.readline()  # before that, the one who is to join could be the one who makes it
            joined = subprocess.run([*as_nobody(), RUN, "--name", name, "--", "sh", "-c", report], cwd=folder,
                                    capture_output=True, text=True, timeout=LIMIT_S)
            assert joined.stdout == made != "", (joined, made)
            beside = subprocess.run([*as_nobody(), RUN, "--no-sysfs", "--name", name, "--", "sh", "-c", report],
                                    cwd="/", capture_output=True, text=True, timeout=LIMIT_S)
            assert (beside.stdout.split()[:2] == joined.stdout.split()[:2]
                    and beside.stdout.split()[3] == "/"), (beside, joined)
        finally:
            process.terminate()
            process.wait()


def a_folder_that_the_library_path_cannot_hold_is_refused():
    """Else the command would run without the NIC, and without a word."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "a:b")
        copy.mkdir()
        shutil.copy(os.path.realpath(RUN), copy / "softnic-run")
        (copy / "lib").symlink_to(pathlib.Path(os.path.realpath(RUN)).parent / "lib")
        done = subprocess.run([copy / "softnic-run", "--", "true"], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 125 and "LD_LIBRARY_PATH cannot hold" in done.stderr, done


def a_named_world_is_joined():
    name = f"test{os.getpid()}"
    process, world = start("--name", name, "--nics", "2", "--", "sh", "-c", SAY_WORLD + "exec sleep 1000")
    try:
        joined = run("--quiet", "--name", name, "--", "sh", "-c", SAY_WORLD)
        assert joined.stdout.strip() == str(world), joined
        assert world.exists(), "the one who joined must not remove it"
        refused = run("--name", name, "--rate", "1G", "--", "true")
        assert refused.returncode == 125 and "exists already" in refused.stderr, refused
    finally:
        process.terminate()
        process.wait()
    assert not world.exists()


def the_link_goes_down_and_up():
    script = f'"{CTL}" link softnic0 down && "{CTL}" status --json && "{CTL}" link softnic0 up && "{CTL}" status --json'
    done = run("--quiet", "--", "sh", "-c", script)
    states = [json.loads(line)["devices"][0]["link"] for line in done.stdout.splitlines()]
    assert states == ["down", "up"], done
    for words, status in ((["link", "nosuch", "up"], 1), (["link", "softnic0", "sideways"], 2), (["qp-error", "77"], 1),
                          (["qp-error", "x"], 2), (["frobnicate"], 2)):
        done = run("--quiet", "--", CTL, *words)
        assert done.returncode == status and done.stderr, (words, done)


def sysfs_is_private_and_complete():
    before = sorted(os.listdir("/sys/class"))
    script = ("cd /sys/class/infiniband/ && ls && cat */node_type */ports/1/gid_attrs/types/1 */ports/1/gids/1 && "
              "for d in */device; do realpath $d; done && realpath /sys/class/net/lo")
    done = run("--nics", "2", "--", "sh", "-c", script)
    if "refused" in done.stderr or "failed" in done.stderr:
        raise Skip(done.stderr.strip().splitlines()[-1])
    lines = done.stdout.splitlines()
    assert lines[:6] == ["softnic0", "softnic1", "1: CA", "1: CA", "RoCE v2", "RoCE v2"], done
    assert all(re.fullmatch(r"(0000:){5}ffff:[0-9a-f]{4}:[0-9a-f]{4}", gid) for gid in lines[6:8]), lines
    assert all(re.search(r"/[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]$", device) for device in lines[8:10]), lines
    assert lines[8] != lines[9]
    assert lines[10] == os.path.realpath("/sys/class/net/lo"), "the other classes are as they were"
    assert sorted(os.listdir("/sys/class")) == before, "and outside nothing has changed"


def each_nic_has_a_character_device():
    """UCX looks for it. A user who may not make the folder gets it where there is one."""
    done = run("--nics", "3", "--", "sh", "-c",
               "cd /dev/infiniband && for f in *; do test -c $f -a -r $f -a -w $f && echo $f; done")
    if "refused" in done.stderr or not os.path.isdir("/dev/infiniband"):
        raise Skip("no /dev/infiniband can be made here")
    assert done.stdout.split() == ["uverbs0", "uverbs1", "uverbs2"], done
    assert not os.path.exists("/dev/infiniband/uverbs2"), "and outside there is nothing"


def sysfs_is_there_in_a_chroot_too():
    """Whose root is no mount point, so that its mounts cannot be made private all at once."""
    elsewhere = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if not shutil.which("unshare") or subprocess.run([*elsewhere, "true"], capture_output=True).returncode:
        raise Skip(f"no mount namespace can be made here ({' '.join(elsewhere)})")
    script = """mount --make-rprivate / && cd "$1" || exit 1
        for x in /*; do
            if [ -L "$x" ]; then cp -P "$x" .
            elif [ -d "$x" ]; then mkdir ".$x" && mount --rbind "$x" ".$x" || exit 1; fi
        done
        exec chroot . "$2" -- cat /sys/class/infiniband/softnic0/node_type"""
    root = tempfile.mkdtemp()
    try:
        done = subprocess.run([*elsewhere, "sh", "-c", script, "sh", root, os.path.realpath(RUN)], capture_output=True,
                              text=True, timeout=LIMIT_S)
    finally:
        for entry in os.scandir(root):  # empty folders; nothing is mounted here, and whatever is would stay
            (os.unlink if entry.is_symlink() else os.rmdir)(entry.path)
        os.rmdir(root)
    if "refused" in done.stderr:
        raise Skip(done.stderr.strip().splitlines()[-1])
    assert done.stdout.strip() == "1: CA", done


def sysfs_holds_as_many_nics_as_there_can_be():
    done = run("--nodes", "16", "--nics", "4", "--", "sh", "-c", "cat /sys/class/infiniband/*/ports/1/state")
    assert "No space" not in done.stderr, done
    if "refused" in done.stderr or "failed" in done.stderr:
        raise Skip(done.stderr.strip().splitlines()[-1])
    assert done.stdout.splitlines() == ["4: ACTIVE"] * 64, done


def an_efa_looks_like_one():
    script = ("cd /sys/class/infiniband/ && ls && cat efa_0/node_type efa_0/ports/1/link_layer && ls "
              "efa_0/ports/1/gids && cat /sys/class/infiniband_verbs/abi_version")
    done = run("--efa", "--nics", "2", "--", "sh", "-c", script)
    assert "(EFA)" in done.stderr, done
    status = json.loads(run("--quiet", "--efa", "--", CTL, "status", "--json").stdout)
    assert status["devices"][0]["name"] == "efa_0" and status["efa"] == 1, status
    if "refused" in done.stderr or "failed" in done.stderr:
        raise Skip(done.stderr.strip().splitlines()[-1])
    assert done.stdout.split() == ["efa_0", "efa_1", "7:", "unspecified", "Unspecified", "0", "6"], done


def without_proc_nothing_runs_and_worlds_are_left_alone():
    """As in a chroot in which nobody has mounted it: every process looks dead there."""
    bare = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*bare, "true"], capture_output=True).returncode:
        raise Skip("/proc cannot be covered here (unshare -Urm)")
    process, world = start("--name", f"proc{os.getpid()}", "--", "sh", "-c", SAY_WORLD + "exec sleep 1000")
    try:
        done = subprocess.run([*bare, RUN, "--", "true"], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 125 and "is /proc mounted?" in done.stderr, done
        assert world.exists(), "softnic-run has removed a world in use"
        subprocess.run([*bare, CTL, "sweep"], check=True, capture_output=True, timeout=LIMIT_S)
        assert world.exists(), "softnicctl has removed a world in use"
    finally:
        process.terminate()
        process.wait()


def a_process_sees_the_nics_of_its_node():
    def devices(**environment):
        clean = {k: v for k, v in os.environ.items()
                 if not re.match(r"(OMPI_COMM|PMI_|SLURM_|RANK$|WORLD_SIZE$|SOFTNIC_)", k)}
        done = run("--quiet", "--nics", "2", "--nodes", "3", "--", "ibv_devices", env={**clean, **environment})
        return re.findall(r"softnic\d+", done.stdout), done.stderr

    if not shutil.which("ibv_devices"):
        raise Skip("ibv_devices is not installed (apt-get install ibverbs-utils)")
    for environment, want in (
            ({}, [0, 1, 2, 3, 4, 5]), ({"SOFTNIC_NODE": "1"}, [2, 3]),
            ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, [4, 5]),
            ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "6"}, [0, 1]),
            ({"PMI_RANK": "1", "PMI_SIZE": "3"}, [2, 3]),
            ({"RANK": "2", "WORLD_SIZE": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, [4, 5]),
            ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, [4, 5]),
            ({"SLURM_PROCID": "9", "SLURM_NTASKS": "4"}, [0, 1, 2, 3, 4, 5]),
            ({"SOFTNIC_NODE": "0", "RANK": "2", "WORLD_SIZE": "3"}, [0, 1])):
        have, _ = devices(**environment)
        assert have == [f"softnic{i}" for i in want], (environment, have)
    for wrong in ("3", "x", "-1"):
        have, said = devices(SOFTNIC_NODE=wrong)
        assert have == [] and f"SOFTNIC_NODE={wrong}" in said, (wrong, have, said)


def streams_get_all_hardware_queues_unless_the_user_chose():
    for chosen, want in ({}, "32"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "4"}, "4"):
        clean = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
        done = run("--quiet", "--no-sysfs", "--", "printenv", "CUDA_DEVICE_MAX_CONNECTIONS", env={**clean, **chosen})
        assert done.stdout.strip() == want, done


def counters_are_json():
    done = run("--quiet", "--nics", "2", "--", CTL, "counters", "--json")
    devices = json.loads(done.stdout)["devices"]
    assert [d["name"] for d in devices] == ["softnic0", "softnic1"]
    for field in ("send_wrs", "recv_wrs", "doorbells", "cqes_send", "cqes_recv", "bytes_tx", "bytes_rx",
                  "fences", "errors", "flushed"):
        assert devices[0][field] == 0, (field, devices)


CLAIMS = [a_folder_that_the_library_path_cannot_hold_is_refused, bad_options_are_refused_by_name_and_value,
          good_options_reach_the_world, links_may_differ_and_change,
          the_status_is_the_commands, signals_are_passed_on, the_world_goes_with_the_command,
          a_killed_launcher_leaves_nothing_for_long, the_copier_goes_with_the_launcher,
          a_copier_that_ends_early_is_told_of, without_a_cuda_driver_nothing_is_loaded_into_the_command,
          sweep_spares_worlds_in_use, worlds_of_another_process_namespace_are_left_alone,
          a_foreign_file_is_no_world_and_is_left_alone, a_named_world_is_joined,
          the_link_goes_down_and_up, a_world_that_another_user_planted_is_refused,
          a_world_that_others_may_open_is_refused, who_joins_is_where_the_maker_is,
          sysfs_is_private_and_complete, each_nic_has_a_character_device, sysfs_is_there_in_a_chroot_too,
          sysfs_holds_as_many_nics_as_there_can_be, an_efa_looks_like_one, a_process_sees_the_nics_of_its_node,
          without_proc_nothing_runs_and_worlds_are_left_alone,
          streams_get_all_hardware_queues_unless_the_user_chose, counters_are_json]


def main():
    global RUN, CTL
    RUN, CTL = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    os.environ.pop("SOFTNIC_WORLD", None)
    for claim in CLAIMS if sys.argv[3] == "all" else [c for c in CLAIMS if c.__name__ == sys.argv[3]]:
        try:
            claim()
        except Skip as reason:
            print(f"skipped: {reason}")
            return SKIP
    return 0


if __name__ == "__main__":
    sys.exit(main())
