#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""install.py SOURCE BUILD MESON...: install into a scratch folder, check that it has all that users need, uninstall,
and check that nothing is left. What a part installs is checked where the part is built: see CLAIMS."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SKIP = 77


def run(command, env=None):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Installed:
    def __init__(self, source, build, meson, root):
        self.source, self.build, self.root = map(pathlib.Path, (source, build, root))
        self.meson = meson
        self.options = {o["name"]: o["value"] for o in self.introspect("--buildoptions")}
        self.prefix = pathlib.Path(self.options["prefix"])
        self.version = json.loads(run([*self.meson, "introspect", str(self.build), "--projectinfo"]))["version"]
        self.plan = self.introspect("--installed")
        self.built = {pathlib.Path(name).name for name in self.plan}

    def introspect(self, what):
        return json.loads(run([*self.meson, "introspect", str(self.build), what]))

    def at(self, option, *below):
        """Where a path below the folder of a Meson option (libdir, includedir ...) lies in the scratch folder."""
        folder = self.prefix / self.options[option]
        return self.root.joinpath(folder.relative_to("/"), *below)

    def files(self):
        return [path for path in self.root.rglob("*") if path.is_symlink() or not path.is_dir()]


def everything_planned_is_there(it):
    for built, installed in it.plan.items():
        path = it.root / pathlib.Path(installed).relative_to("/")
        if not path.exists() or (path.is_file() and path.stat().st_size == 0):
            yield f"{built} was to be installed as {installed}: missing or empty"


def every_public_header_is_there(it):
    headers = [path for pattern in ("*.h", "*.cuh") for path in (it.source / "include/perseus").glob(pattern)]
    for header in headers:
        if not it.at("includedir", "perseus", header.name).exists():
            yield f"include/perseus/{header.name} is not installed"


def compilers(language):
    """Every compiler of this machine, so that a header that only one of them takes is found."""
    names = (("cc", "gcc", "clang", "gcc-14", "clang-19") if language == "c"
             else ("c++", "g++", "clang++", "g++-14", "clang++-19"))
    return [name for name in names if shutil.which(name)]


def each_public_header_compiles_alone(it):
    folder = it.at("includedir")
    for header in sorted(folder.glob("perseus/*.h")):
        text = f"#include <perseus/{header.name}>\n"
        for language, standard in (("c", "c11"), ("c++", "c++17")):
            for compiler in compilers(language):
                done = subprocess.run([compiler, f"-std={standard}", "-x", language, "-Wall", "-Wextra",
                                       "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{folder}", "-"], input=text,
                                      capture_output=True, text=True)
                if done.returncode != 0:
                    yield f"perseus/{header.name}, {compiler} -std={standard}:\n{done.stderr}"


def build_and_run(it, package, text):
    """A C11 program made with nothing but pkg-config's flags of one package, as a user makes it; what is wrong, or
    None."""
    pkgconfig = it.at("libdir", "pkgconfig")
    env = dict(os.environ, PKG_CONFIG_PATH=str(pkgconfig), PKG_CONFIG_SYSROOT_DIR=str(it.root))
    if not (pkgconfig / f"{package}.pc").exists():
        return f"{package}.pc is not installed"
    flags = run(["pkg-config", "--cflags", "--libs", package], env).split()
    source, program = it.root / "uses.c", it.root / "uses"
    source.write_text(text)
    done = subprocess.run(["cc", "-std=c11", "-Wall", "-Werror", str(source), "-o", str(program), *flags],
                          capture_output=True, text=True)
    if done.returncode == 0:
        done = subprocess.run([program], capture_output=True, text=True,
                              env=dict(os.environ, LD_LIBRARY_PATH=str(it.at("libdir"))))
    source.unlink()
    program.unlink(missing_ok=True)
    if done.returncode != 0 or done.stdout.strip() != it.version:
        return f"a program with {package}.pc's flags: exit {done.returncode}, {done.stdout}{done.stderr}"
    return None


PRINT = "#include <stdio.h>\n#include <perseus/%s>\nint main(void) { return puts(%s()) < 0; }\n"


def pkg_config_leads_to_the_transport(it):
    if shutil.which("pkg-config") and it.options["b_sanitize"] == "none":
        yield build_and_run(it, "perseus", PRINT % ("perseus.h", "prs_version"))


def pkg_config_leads_to_the_fused_library(it):
    if shutil.which("pkg-config") and it.options["b_sanitize"] == "none":
        yield build_and_run(it, "perseus-fused", PRINT % ("fused.h", "prs_fused_version"))


def each_example_compiles_by_its_command(it):
    """The first command of each head, as a user types it."""
    path = os.pathsep.join([os.environ["PATH"],
                            str(pathlib.Path(it.options["nvcc_root"] or "/usr/local/cuda") / "bin")])
    if not (shutil.which("pkg-config") and shutil.which("nvcc", path=path)) or it.options["b_sanitize"] != "none":
        return
    env = dict(os.environ, PATH=path, PKG_CONFIG_PATH=str(it.at("libdir", "pkgconfig")),
               PKG_CONFIG_SYSROOT_DIR=str(it.root))
    folder = it.at("datadir", "doc", "perseus", "doc", "examples")
    for example in sorted([*folder.glob("*.c"), *folder.glob("*.cu")]):
        command = next(line.removeprefix(" *").removesuffix("*/").strip() for line in example.read_text().splitlines()
                       if "$(pkg-config" in line)
        done = subprocess.run(["bash", "-euc", command], cwd=folder, env=env, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True)
        program = folder / example.stem
        if done.returncode != 0 or not program.exists():
            yield f"{example.name}: {command}: exit {done.returncode}\n{done.stderr}"
        program.unlink(missing_ok=True)


def the_name_that_nccl_tries_by_itself_is_left_alone(it):
    link = it.at("libdir", "libnccl-net.so")
    if not it.options["nccl_link"]:
        if link.is_symlink():
            yield ("libnccl-net.so is installed, so jobs that never asked for Perseus take it: "
                   "it must need -Dnccl_link=true")
    elif not link.is_symlink():
        yield "-Dnccl_link=true, and libnccl-net.so is not there as a symbolic link"
    elif os.path.isabs(os.readlink(link)) or link.resolve() != it.at("libdir", "libnccl-net-perseus.so").resolve():
        yield f"libnccl-net.so points to {os.readlink(link)}, not to libnccl-net-perseus.so beside it"


def programs(it):
    return sorted(it.at("bindir").iterdir())


def each_program_starts_from_where_it_is_installed(it):
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    for program in programs(it):
        done = subprocess.run([program, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              env=env, timeout=60)
        if done.returncode != 0 or "usage" not in done.stdout.lower() + program.name.replace("perseus-perf", "usage"):
            yield f"{program.name} --help: exit {done.returncode}, {done.stdout[:200]}{done.stderr}"


def scripts_find_the_plugin_wherever_the_prefix_is(it):
    """The scratch folder is a prefix that was moved."""
    plugin = it.at("libdir", "libnccl-net-perseus.so").resolve()
    for command in (["perseus-nccl", "--own", "--transports", "perseus", "--ops", "all_reduce", "--sizes", "8:8",
                     "--timeout", "20"], ["perseus-compare", "--peer", str(plugin)]):
        done = subprocess.run([it.at("bindir", command[0]), *command[1:]], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=120)
        if "No such file" in done.stderr or (command[0] == "perseus-compare" and done.returncode != 2):
            yield f"{' '.join(command)}: exit {done.returncode}, {done.stderr}"


def perf_finds_the_library_of_its_kernel(it):
    """It opens the library before it looks for a GPU, but after a NIC."""
    if "softnic-run" not in it.built:
        return
    done = subprocess.run([it.at("bindir", "softnic-run"), "--quiet", "--", it.at("bindir", "perseus-perf"),
                           "putsignal", "--gpu", "--peers", "1", "--iterations", "1", "--timeout", "60"],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    if done.returncode != 0 and "cudaGetDeviceCount" not in done.stderr:
        yield f"perseus-perf --gpu: exit {done.returncode}, {done.stdout}{done.stderr}"


def each_program_has_a_manual_page(it):
    if it.options["b_sanitize"] != "none":
        return
    for program in programs(it):
        page = it.at("mandir", "man1", program.name + ".1")
        if not page.exists() or ".TH" not in page.read_text() or len(page.read_text().splitlines()) < 10:
            yield f"{page.name} is missing or empty"
        elif not re.search(r"^\.SH NAME\n\S+ \\- [A-Z]\w* \w+ \w+", page.read_text(), re.M):
            yield f"{page.name}: its NAME does not say what the program does"


def licence_and_documents_are_there(it):
    folder = it.at("datadir", "doc", "perseus")
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "doc/variables.md"):
        if not (folder / name).exists():
            yield f"share/doc/perseus/{name} is not installed"


def libraries_are_hardened(it):
    """What meson.build asks the compiler and the linker for has reached each library of C that parses foreign bytes."""
    if it.options["b_sanitize"] != "none" or not shutil.which("readelf"):
        return
    for name in ("libperseus.so.1", "libperseus-fused.so.1", "libnccl-net-perseus.so"):
        path = it.at("libdir", name)
        if not path.exists():
            continue
        text = run(["readelf", "-W", "-d", "-l", "--dyn-syms", str(path)])
        wanted = {"BIND_NOW": "-z now", "GNU_RELRO": "-z relro", "__stack_chk_fail": "-fstack-protector"}
        if it.options["optimization"] in ("2", "3", "s"):
            wanted["_chk@"] = "_FORTIFY_SOURCE"
        for sign, flag in wanted.items():
            if sign not in text:
                yield f"{name} has no {sign}: {flag} did not reach it"


CLAIMS = [  # (checked when this is built; "" = always, what)
    ("", everything_planned_is_there),
    ("", licence_and_documents_are_there),
    ("", libraries_are_hardened),
    ("libperseus.so", every_public_header_is_there),
    ("libperseus.so", each_public_header_compiles_alone),
    ("libperseus.so", pkg_config_leads_to_the_transport),
    ("libperseus-fused.so", pkg_config_leads_to_the_fused_library),
    ("libperseus-fused.so", each_example_compiles_by_its_command),
    ("libnccl-net-perseus.so", the_name_that_nccl_tries_by_itself_is_left_alone),
    ("perseus-info", each_program_starts_from_where_it_is_installed),
    ("perseus-info", each_program_has_a_manual_page),
    ("libperseus-perf-gpu.so", perf_finds_the_library_of_its_kernel),
    ("libnccl-net-perseus.so", scripts_find_the_plugin_wherever_the_prefix_is),
]


def is_built(name, built):
    return not name or any(other == name or other.startswith(name + ".") for other in built)


def check(source, build, meson, root):
    it = Installed(source, build, meson, root)
    if not it.plan:
        print("nothing is installed by this build")
        return SKIP
    env = dict(os.environ, DESTDIR=str(root))
    run([*meson, "install", "-C", str(build), "--no-rebuild", "--quiet"], env)
    wrong = [text for name, claim in CLAIMS if is_built(name, it.built) for text in claim(it) if text]
    count = len(it.files())
    run([shutil.which("ninja") or "ninja-build", "-C", str(build), "uninstall"], env)
    wrong += [f"uninstall left {path.relative_to(root)}" for path in it.files()]
    print("\n".join(wrong) or f"{count} files installed and uninstalled")
    return 1 if wrong else 0


def main(source, build, meson):
    os.environ.pop("LD_LIBRARY_PATH", None)  # of the build's libraries: installed programs find their own
    log = pathlib.Path(build) / "meson-logs/install-log.txt"
    kept = log.read_bytes() if log.exists() else None
    with tempfile.TemporaryDirectory(prefix="perseus-install-") as root:
        try:
            return check(source, build, meson, pathlib.Path(root))
        finally:  # uninstall reads this file: it must still list what the user installed before
            if kept is not None:
                log.write_bytes(kept)
            else:
                log.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
