#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_perseus_nccl.py PERSEUS-NCCL CLAIM: perseus-nccl runs nccl-tests programs. Here scripts replace them, so no GPU
is needed."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

LIMIT_S = 100
ROW = "{bytes} {count} float sum -1 {usec} 1.5 2.5 {wrong} 7.0 1.0 2.0 0"


def program(folder, op, script):
    path = pathlib.Path(folder) / f"{op}_perf"
    path.write_text("#!/bin/sh\n" + script + "\n")
    path.chmod(0o755)


def table(*rows):
    """A script that prints rows (bytes, usec, wrong) as nccl-tests do, among its other lines."""
    lines = ["# nThread 1", *(ROW.format(bytes=b, count=b // 4, usec=u, wrong=w) for b, u, w in rows),
             "# Out of bounds values : 0 OK"]
    return "cat <<END\n" + "\n".join(lines) + "\nEND"


def command(folder, ops):
    return [sys.executable, sys.argv[1], "--nccl-tests", folder, "--transports", "socket", "--ops", ops, "--sizes",
            "8:1K:x4", "--json"]


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def tables_are_read(folder):
    program(folder, "all_reduce", table((8, 12.5, 0), (1024, 14.0, 0)))
    done = subprocess.run(command(folder, "all_reduce"), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    rows = {(row["bytes"], row["in_place"]): row for row in rows_of(done.stdout)}
    assert done.returncode == 0 and len(rows) == 4, done
    assert (rows[8, False]["usec_p50"] == 12.5 and rows[1024, False]["usec_p50"] == 14.0
            and rows[8, True]["usec_p50"] == 7.0), rows
    assert rows[8, False]["busbw_GBps"] == 2.5 and rows[8, True]["busbw_GBps"] == 2.0, rows


def rounds_become_medians(folder):
    program(folder, "all_reduce", 'n=$(cat "$0.n" 2>/dev/null || echo 0); echo $((n + 1)) > "$0.n"\n' +
            'case $n in 0) u=90.0 ;; 1) u=10.0 ;; *) u=20.0 ;; esac\necho '
            f'"{ROW.format(bytes=8, count=2, usec="$u", wrong=0)}"')
    done = subprocess.run([*command(folder, "all_reduce"), "--rounds", "3"], capture_output=True, text=True,
                          timeout=LIMIT_S, check=False)
    row = next(row for row in rows_of(done.stdout) if not row["in_place"])
    assert row["usec_p50"] == 20.0 and row["rounds"] == 3, row


def wrong_data_is_a_failure(folder):
    program(folder, "all_reduce", table((8, 12.5, 3)))
    done = subprocess.run(command(folder, "all_reduce"), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1 and max(row["wrong"] for row in rows_of(done.stdout)) == 3, done


def a_table_that_cannot_be_written_is_an_error(folder):
    program(folder, "all_reduce", table((8, 12.5, 0)))
    for words in (command(folder, "all_reduce"), command(folder, "all_reduce")[:-1]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
        said = "perseus-nccl: cannot write all of the output: No space left on device\n"
        assert done.returncode == 1 and done.stderr.endswith(said) and "OSError" not in done.stderr, done


def finished_rows_are_printed_when_it_is_stopped(folder):
    program(folder, "all_reduce", table((8, 12.5, 0)))
    started = pathlib.Path(folder) / "started"
    program(folder, "all_gather", f'echo > "{started}.fifo"; exec sleep {LIMIT_S}')
    os.mkfifo(f"{started}.fifo")
    with subprocess.Popen(command(folder, "all_reduce,all_gather"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        pathlib.Path(f"{started}.fifo").read_text()  # until the second op runs
        process.send_signal(signal.SIGTERM)
        text, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and "stopped" in said, (process.returncode, said)
    assert [row["op"] for row in rows_of(text)] == ["all_reduce"] * 2, text


def lines_of(path):
    return pathlib.Path(path).read_text().splitlines()


def keep_environment(folder):
    """A program that leaves the variables it was given in FOLDER/env."""
    program(folder, "all_reduce", f'env | grep -E "^(NCCL|PERSEUS|LD_LIBRARY)_" >> "{folder}/env"\n'
            + table((8, 12.5, 0)))


def run(folder, *more, **env):
    plugin = pathlib.Path(folder, "libnccl-net-perseus.so")
    plugin.touch()
    words = [sys.executable, sys.argv[1], "--nccl-tests", folder, "--ops", "all_reduce", "--sizes", "8", "--plugin",
             plugin, *more]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "PERSEUS_"))}
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**clean, **env})


def the_users_environment_wins(folder):
    keep_environment(folder)
    mine = {"NCCL_IB_GID_INDEX": "3", "NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_NVLS_ENABLE": "1",
            "PERSEUS_REQUIRED": "0"}
    done = run(folder, "--transports", "perseus", **mine)
    assert (done.returncode == 0 and {f"{name}={value}" for name, value in mine.items()}
            <= set(lines_of(folder + "/env"))), done
    os.remove(folder + "/env")
    run(folder, "--transports", "perseus", "--env", "NCCL_P2P_DISABLE=7", NCCL_P2P_DISABLE="0")
    told = lines_of(folder + "/env")
    assert ("NCCL_P2P_DISABLE=7" in told and "NCCL_SHM_DISABLE=1" in told
            and not any("GID_INDEX" in line for line in told)), told


def the_plugin_is_named_as_every_nccl_takes_it(folder):
    keep_environment(folder)
    run(folder, "--transports", "perseus")
    told = lines_of(folder + "/env")
    assert "NCCL_NET_PLUGIN=perseus" in told and "NCCL_NET=Perseus" in told, told
    assert any(line.startswith(f"LD_LIBRARY_PATH={folder}") for line in told), told


def a_launcher_gets_the_variables_as_words(folder):
    keep_environment(folder)
    launcher = pathlib.Path(folder, "launch")
    launcher.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/launched"\n[ "$1" = -N2 ] && shift\nexec env -i '
                        'PATH="$PATH" "$@"\n')
    launcher.chmod(0o755)
    done = run(folder, "--launcher", f"{launcher} -N2", "--ranks", "8", "--transports", "perseus,socket",
               NCCL_IB_HCA="mlx5_1")
    told = lines_of(folder + "/env")
    assert done.returncode == 0 and len(lines_of(folder + "/launched")) == 2, done
    assert {"NCCL_NET=Perseus", "NCCL_NET=Socket", "NCCL_IB_HCA=mlx5_1"} <= set(told), told
    assert not any(line.startswith(("NCCL_P2P", "NCCL_SHM", "NCCL_SOCKET_IFNAME")) for line in told), told
    assert all(line.endswith("-g 1") for line in lines_of(folder + "/launched"))


def rounds_go_by_turns_and_end_in_a_verdict(folder):
    program(folder, "all_reduce",
            f'echo $NCCL_NET >> "{folder}/order"\n'
            'case $NCCL_NET in Perseus) u=10.0 ;; *) u=12.0 ;; esac\n'
            f'echo "{ROW.format(bytes=8, count=2, usec="$u", wrong=0)}"')
    done = run(folder, "--transports", "perseus,ib", "--rounds", "2")
    assert lines_of(folder + "/order") == ["Perseus", "IB", "IB", "Perseus"], done
    said = [line for line in done.stdout.splitlines() if line.startswith("all_reduce: Perseus is ")]
    # Two placements: 1.2 out of place, 1.0 in place.
    assert (len(said) == 1 and " 1.10x as fast as NCCL IB" in said[0] and "2 rounds" in said[0]
            and "spread 0.0 %" in said[0]), done


def programs_in_path_are_preferred(folder):
    program(folder, "all_reduce", table((8, 12.5, 0)))
    words = [sys.executable, sys.argv[1], "--ops", "all_reduce", "--transports", "socket", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          env=dict(os.environ, PATH=f"{folder}:/usr/bin:/bin"))
    assert done.returncode == 0 and rows_of(done.stdout)[0]["program"] == "nccl-tests", done


def what_fails_everywhere_is_said_once(folder):
    for op in ("all_reduce", "all_gather"):
        program(folder, op, "echo no GPU here >&2; exit 3")
    done = run(folder, "--ops", "all_reduce,all_gather", "--transports", "ib,socket", "--rounds", "3")
    assert done.returncode == 1 and done.stderr.count("no GPU here") == 2 and "nothing runs here" in done.stderr, done


def what_a_late_program_started_ends_too(folder):
    program(folder, "all_reduce", f'sleep {LIMIT_S} & echo $! > "{folder}/pid"; wait')
    done = run(folder, "--transports", "ib", "--timeout", "2")
    assert done.returncode == 1 and "not done within 2 s" in done.stderr and "Traceback" not in done.stderr, done
    state = pathlib.Path(f"/proc/{lines_of(folder + '/pid')[0]}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z", "its child still runs"


with tempfile.TemporaryDirectory() as temporary:
    globals()[sys.argv[2]](temporary)
