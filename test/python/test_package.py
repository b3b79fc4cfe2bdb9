# SPDX-License-Identifier: Apache-2.0
"""pip builds a wheel that has all modules and what is built, and the commands run from it."""
import ast
import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import zipfile

import ranks

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "fused/python"


def wheel(folder, build):
    """The names in the wheel, and its path."""
    root, copy = SOURCE.parents[1], pathlib.Path(folder, "source/fused/python")  # pip leaves files in the source
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    (copy.parents[1] / "tools/dev").mkdir(parents=True)
    for name in ("LICENSE", "tools/dev/pack_wheel.py"):
        shutil.copy(root / name, copy.parents[1] / name)
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
                           "--no-index", "-w", folder, str(copy)],
                          env=dict(os.environ, PERSEUS_BUILD=str(build)), capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    path, = pathlib.Path(folder).glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist()), path


class Interpreters:
    """Interpreters that have imported torch and nothing else: forks of one. To import it anew takes each three seconds
    of the CPU. What they run ends as it would in an interpreter of its own."""
    SERVER = """
import gc, io, json, os, runpy, sys
import torch.distributed.tensor.parallel
gc.freeze()  # else a fork that ends takes a second to look through torch's objects
own_path = sys.path[1:]
for line in sys.stdin:
    given = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, path in enumerate((os.devnull, given["stdout"], given["stderr"])):
    os.dup2(os.open(path, os.O_RDWR), number)
os.environ.clear()
os.environ.update(given["env"])
if os.environ.get("PYTHONUNBUFFERED"):  # Python itself looks only when it starts
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0), write_through=True)
first = os.path.dirname(given["what"]) if given["how"] == "file" else ""
sys.path[:] = [first, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *own_path]
sys.argv = [given["what"], *given["arguments"]]
if given["how"] == "module":
    runpy.run_module(given["what"], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(given["what"], run_name="__main__")
"""
    server = None

    @classmethod
    def start(cls):
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONUNBUFFERED")}
        cls.server = subprocess.Popen([sys.executable, "-c", cls.SERVER], env=env, text=True, stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE)

        def stop():
            cls.server.stdin.close()
            cls.server.stdout.close()
            cls.server.wait()
        unittest.addModuleCleanup(stop)

    @classmethod
    def run(cls, how, what, *arguments, env, stdout=None):
        if not cls.server:
            cls.start()
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            given = {"how": how, "what": str(what), "arguments": arguments, "env": env,
                     "stdout": stdout or out.name, "stderr": err.name}
            print(json.dumps(given), file=cls.server.stdin, flush=True)
            status = int(cls.server.stdout.readline())
            return subprocess.CompletedProcess([what, *arguments], status, out.read(), err.read())


def command(module, *arguments, path=None, stdout=None, **variables):
    env = dict(os.environ, **variables)
    env["PYTHONPATH"] = str(path) if path else env["PYTHONPATH"]
    return Interpreters.run("module", module, *arguments, env=env, stdout=stdout)


def refusal(module, *arguments, **variables):
    """How a command ends, and what it says. In this process: an interpreter that imports torch takes seconds."""
    said, status = io.StringIO(), 0
    with unittest.mock.patch.dict(os.environ, variables), contextlib.redirect_stderr(said):
        try:
            status = module.main(list(arguments))
        except SystemExit as end:
            status = end.code
    return (status, said.getvalue()) if isinstance(status, int) else (1, said.getvalue() + status)


class Wheel(unittest.TestCase):
    def test_it_has_every_module_and_the_library_and_runs_from_where_it_is_unpacked(self):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as build:
            for library in ("fused/libperseus-fused.so", "tools/hopper/libperseus-fused-emulated.so"):
                path = pathlib.Path(build, library)  # the emulated one stands for the other too: no GPU is here
                path.parent.mkdir(parents=True)
                path.symlink_to(os.environ["PERSEUS_FUSED_LIBRARY"])
            names, path = wheel(folder, build)
            for module in (SOURCE / "perseus").rglob("*.py"):
                self.assertIn(str(module.relative_to(SOURCE)), names)
            self.assertLessEqual({"perseus/lib/libperseus-fused.so", "perseus/lib/libperseus-fused-emulated.so",
                                  "perseus/LICENSE", "perseus/py.typed"}, names)
            self.assertRegex(path.name, r"^perseus_fused-.*-py3-none-manylinux_2_\d+_")
            unpacked = pathlib.Path(folder, "unpacked")
            with zipfile.ZipFile(path) as archive:
                archive.extractall(unpacked)
            said, = unpacked.glob("*.dist-info/METADATA")
            self.assertIn("\nLicense: Apache-2.0\n", said.read_text())
            for variable, name in (("", "libperseus-fused.so"), ("emulated", "libperseus-fused-emulated.so")):
                done = command("perseus.info", "--json", path=unpacked, PERSEUS_FUSED_LIBRARY=variable)
                self.assertEqual(json.loads(done.stdout)["library"], str(unpacked / "perseus/lib" / name))

    def test_without_a_library_it_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(AssertionError, "no .*libperseus-fused.so: build it first"):
                wheel(folder, folder)


class Syntax(unittest.TestCase):
    def test_every_module_is_of_the_oldest_python_that_the_package_asks_for(self):
        asked = re.search(r'requires-python = ">= 3\.(\d+)"', (SOURCE / "pyproject.toml").read_text())
        for module in (SOURCE / "perseus").rglob("*.py"):
            tree = ast.parse(module.read_text(), str(module), feature_version=(3, int(asked[1])))
            for node in ast.walk(tree):  # feature_version lets stars in [] pass, which are of 3.11
                parts = getattr(node.slice, "elts", [node.slice]) if isinstance(node, ast.Subscript) else []
                self.assertFalse(any(isinstance(part, ast.Starred) for part in parts), f"{module}:{node}")


class Library(unittest.TestCase):
    """Which file is opened. Folders above the package may belong to anybody."""

    def look(self, package, library, variable=""):
        library.parent.mkdir(parents=True)
        library.touch()
        shutil.copytree(SOURCE / "perseus", package, ignore=shutil.ignore_patterns("__pycache__"))
        text = package.parent / "look.py"
        text.write_text("from perseus._library import library_path; print(library_path())")
        env = dict(os.environ, PYTHONPATH=str(package.parent), PERSEUS_FUSED_LIBRARY=variable)
        done = Interpreters.run("file", text, env=env)
        return (done.stdout + done.stderr).strip().splitlines()[-1]

    def test_not_one_of_a_folder_above_the_installation(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            self.assertEqual(self.look(root / "user/venv/perseus", root / "build/fused/libperseus-fused.so"),
                             "libperseus-fused.so")

    def test_that_of_the_checkout_that_the_package_is_in(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            header = root / "include/perseus/fused.h"
            header.parent.mkdir(parents=True)
            header.touch()
            library = root / "build/fused/libperseus-fused.so"
            self.assertEqual(self.look(root / "fused/python/perseus", library), str(library))

    def test_an_emulator_that_is_not_installed_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            self.assertRegex(self.look(root / "venv/perseus", root / "build/x", "emulated"), "has no emulated library")


class Commands(unittest.TestCase):
    def test_info_says_what_is_installed(self):
        done = subprocess.run([sys.executable, "-m", "perseus.info"], capture_output=True, text=True)
        self.assertIn("emulator of Hopper GPUs", done.stdout)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_each_command_prints_its_help_and_nothing_else(self):
        for name in ("info", "bench", "tuning"):
            done = command(f"perseus.{name}", "--help")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn(f"perseus.{name}", done.stdout)

    def test_tuning_refuses_what_it_cannot_do(self):
        from perseus import tuning
        good = "all_gather_matmul:64x96x64"
        for words, said, file in ((["matmul:1x2x3"], "invalid shape value: 'matmul:1x2x3'", "x"),
                                  (["all_gather_matmul:0x2x3"], "'all_gather_matmul:0x2x3'", "x"),
                                  (["all_gather_matmul:64"], "'all_gather_matmul:64'", "x"),
                                  ([good, "--rounds", "0"], "--rounds 0", "x"),
                                  ([good], "PERSEUS_FUSED_TUNING is not set", ""), ([good], "no times", "x")):
            status, text = refusal(tuning, *words, PERSEUS_FUSED_TUNING=file)
            self.assertEqual(status, 2, text)
            self.assertIn(said, text)

    def test_without_torch_it_says_so_and_prints_no_traceback(self):
        for before, status in ((["-m", "perseus.info"], 1), (["-c", "import perseus"], 1)):
            done = subprocess.run([sys.executable, "-S", *before], capture_output=True, text=True,
                                  env=dict(os.environ, PYTHONPATH=str(SOURCE)))
            self.assertEqual(done.returncode, status)
            self.assertIn("perseus needs PyTorch", done.stderr)
            self.assertEqual("Traceback" in done.stderr, before[0] == "-c")

    def test_info_says_what_is_missing(self):
        for library in ("/nowhere/libperseus-fused.so", "libc.so.6"):
            done = command("perseus.info", PERSEUS_FUSED_LIBRARY=library)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stdout, f"problem .*{library}")

    def test_output_that_is_lost_is_an_error(self):
        for words, unbuffered in (([], ""), (["--json"], "1"), (["--help"], ""), (["--help"], "1")):
            done = command("perseus.info", *words, stdout="/dev/full", PYTHONUNBUFFERED=unbuffered)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (1, 1), done.stderr)
            self.assertIn("perseus.info: cannot write all of the output: No space left", done.stderr)

    def test_an_example_for_gpus_says_how_to_start_it_and_what_it_lacks(self):
        for name, rank, said in (("train", None, "start it by torchrun"), ("moe_block", None, "start it by torchrun"),
                                 ("train", "97", "no GPU for local rank 97"), ("moe_block", "97", "no GPU for local")):
            env = {key: value for key, value in os.environ.items() if key != "LOCAL_RANK"}
            done = Interpreters.run("file", SOURCE / f"examples/{name}.py",
                                    env=dict(env, LOCAL_RANK=rank) if rank else env)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (1, 1), done.stderr)
            self.assertIn(f"{name}.py: {said}", done.stderr)

    def test_the_example_without_a_gpu(self):
        done = Interpreters.run("file", SOURCE / "examples/emulated.py", env=dict(os.environ))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual((done.stdout.count("are right"), done.stdout.count("as one kernel, is right")), (2, 2))

    def test_the_host_cost_is_measured_without_a_gpu(self):
        done = command("perseus.bench", "--host-cost", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLessEqual({"empty", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
                              "a node, both passes", "matmul_reduce_scatter, both passes"},
                             set(json.loads(done.stdout)["host_us"]))

    def test_bench_refuses_what_it_cannot_do(self):
        from perseus import bench
        for arguments, said in ((["--shape", "3x4"], "wants MxNxK"), (["--shape", "0x3x4"], "wants MxNxK"),
                                (["--rounds", "0"], "--rounds 0: want 1"), ([], "the emulator has no times")):
            status, text = refusal(bench, *arguments)
            self.assertNotEqual(status, 0)
            self.assertIn(said, text)


class Docs(unittest.TestCase):
    def test_each_op_has_a_docstring_with_an_example(self):
        import perseus
        for name, what in [(name, getattr(module, name)) for module in (perseus.ops, perseus.moe)
                           for name in module.__all__]:
            if callable(what) and not isinstance(what, type) and name not in ("moe_capacity", "moe_ends"):
                self.assertIn("Example::", what.__doc__ or "", name)


if __name__ == "__main__":
    ranks.main()
