#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: pack_deb.py BUILD OUT

Debian packages of a build folder whose prefix is /usr, one a row of PACKAGES that was built. Each file that Meson
installs, but for the documents, goes into exactly one package. Dependencies come from dpkg-shlibdeps. DEBFULLNAME and
DEBEMAIL name the maintainer, as for Debian's own tools. For another processor: dpkg-architecture -aarm64 -c pack_deb.py
BUILD OUT."""
import collections
import email.utils
import fnmatch
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
Package = collections.namedtuple("Package", "name files section short long depends recommends", defaults=("", ""))
LIB = "usr/lib/*/"
# Files that match a row are not for the rows after it.
PACKAGES = [
    Package("perseus-softnic", ["usr/bin/softnic*", LIB + "perseus/softnic/*", "usr/share/man/man1/softnic*"], "utils",
            "RDMA programs without an RDMA NIC", "softnic-run starts a command with software NICs: a drop-in\n"
            "libibverbs.so.1 whose devices are memory of this machine. It needs\nneither root nor a kernel module."),
    Package("perseus-plugin", [LIB + "libnccl-net*.so"], "libs", "NCCL network plugin, ordered by the NIC",
            "NCCL loads it where NCCL_NET_PLUGIN names it. Signals follow their data\nby the order of the NIC, without "
            "waiting for completions.", recommends="libibverbs1, ibverbs-providers"),
    Package("libperseus-fused1", [LIB + "libperseus-fused.so.*"], "libs",
            "CUDA kernels that compute while their data travels", "Matrix products, MoE layers and ring attention for "
            "Hopper GPUs, fused with\ntheir communication. CUDA's driver is opened at run time."),
    Package("libperseus1", [LIB + "libperseus.so.*"], "libs", "RDMA puts and signals, ordered by the NIC",
            "One-sided transfers between ranks, from the CPU or from a running GPU\nkernel.",
            recommends="libibverbs1, ibverbs-providers"),
    Package("libperseus-dev", ["usr/include/perseus/*", LIB + "libperseus*.so", LIB + "pkgconfig/perseus*.pc"],
            "libdevel", "headers of Perseus", "Headers, links and pkg-config files of libperseus and "
            "libperseus-fused."),
    Package("perseus-tools", ["usr/bin/*", "usr/libexec/perseus/*", "usr/share/perseus/*", "usr/share/man/man1/*"],
            "utils", "measuring and checking RDMA networks and NCCL plugins",
            "perseus-info and perseus-hwcheck look at a machine and its network,\nperseus-nccl and perseus-netbench "
            "compare NCCL plugins, and perseus-sim\nmodels clusters.", depends="python3"),
]
NOT_A_LIBRARY = "# NCCL opens it by this name, on the loader's path; no program is linked with it.\n"
OVERRIDES = {  # what lintian should not say, and why
    "perseus-plugin": NOT_A_LIBRARY + "perseus-plugin: package-name-doesnt-match-sonames libnccl-net-perseus\n"
    "perseus-plugin: shared-library-lacks-version usr/lib/*/libnccl-net-perseus.so *\n",
}
OWN = "".join(f"{library} 1 {package} (>= {{v}})\n" for library, package in
              (("libperseus", "libperseus1"), ("libperseus-fused", "libperseus-fused1"),
               ("libibverbs", "perseus-softnic"), ("librdmacm", "perseus-softnic"), ("libefa", "perseus-softnic"),
               ("libmlx5", "perseus-softnic")))


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if done.returncode:
        sys.exit(f"pack_deb.py: {' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def is_elf(path):
    return path.is_file() and not path.is_symlink() and path.open("rb").read(4) == b"\x7fELF"


def gzipped(data):
    return gzip.compress(data, 9, mtime=0)


def take(everything, package, tree):
    """Moves the package's files into its tree; False if there are none."""
    for path in sorted(everything.rglob("*")):
        below = str(path.relative_to(everything))
        if (path.is_symlink() or path.is_file()) and any(fnmatch.fnmatch(below, glob) for glob in package.files):
            (tree / below).parent.mkdir(parents=True, exist_ok=True)
            path.rename(tree / below)
    return tree.exists()


def host(what):
    return run("dpkg-architecture", f"-qDEB_HOST_{what}").strip()


def finish_files(tree):
    strip = f"{host('GNU_TYPE')}-strip"
    for path in sorted(tree.rglob("*")):
        if is_elf(path):
            run(strip, "--strip-unneeded", "--remove-section=.comment", "--remove-section=.note", path)
            path.chmod(0o755 if "bin/" in str(path) or "libexec/" in str(path) else 0o644)
        elif path.match("man1/*.1"):
            path.with_name(path.name + ".gz").write_bytes(gzipped(path.read_bytes()))
            path.unlink()
        elif path.is_dir():
            path.chmod(0o755)


def depends(tree, package, version):
    """What the package's programs and libraries need, as dpkg-shlibdeps finds it."""
    files = [path for path in sorted(tree.rglob("*")) if is_elf(path)]
    if not files:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        debian = pathlib.Path(folder, "debian")
        debian.mkdir()
        (debian / "control").write_text(f"Source: perseus\n\nPackage: {package.name}\nArchitecture: any\n")
        (debian / "shlibs.local").write_text(OWN.format(v=version))
        own = sorted({f"-l{path.parent}" for path in tree.parent.rglob("*.so.*")})
        own.append(f"-l/usr/{host('GNU_TYPE')}/lib")  # of a cross compiler; the packages there name those of the target
        text = run("dpkg-shlibdeps", "-O", f"-x{package.name}", *own, *(f"-e{path}" for path in files), cwd=folder)
    return text.strip().partition("=")[2].replace(f":{host('ARCH')}", "")


def documents(tree, package, version, maintainer, date):
    folder = tree / "usr/share/doc" / package.name
    folder.mkdir(parents=True)
    (folder / "copyright").write_text(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: perseus\n\n"
        f"Files: *\nCopyright: {date.split()[3]} the authors of Perseus\nLicense: Apache-2.0\n "
        "On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.\n")
    text = (f"perseus ({version}) unstable; urgency=medium\n\n  * Release {version}: see CHANGELOG.md of the "
            f"sources.\n\n -- {maintainer}  {date}\n")
    (folder / "changelog.gz").write_bytes(gzipped(text.encode()))
    if package.name in OVERRIDES:
        overrides = tree / "usr/share/lintian/overrides" / package.name
        overrides.parent.mkdir(parents=True)
        overrides.write_text(OVERRIDES[package.name])


def control(tree, package, version, maintainer, architecture):
    debian = tree / "DEBIAN"
    debian.mkdir()
    files = sorted(path for path in tree.glob("usr/**/*") if path.is_file() and not path.is_symlink())
    needs = ", ".join(filter(None, [depends(tree, package, version), package.depends.format(v=version)]))
    lines = [f"Package: {package.name}", "Source: perseus", f"Version: {version}", f"Architecture: {architecture}",
             f"Maintainer: {maintainer}", f"Installed-Size: {sum(path.stat().st_size for path in files) // 1024 + 1}",
             f"Depends: {needs}", f"Recommends: {package.recommends}", f"Section: {package.section}",
             "Priority: optional", *(["Multi-Arch: same"] if package.section.startswith("lib") else []),
             f"Description: {package.short}", *(f" {line}" for line in package.long.splitlines())]
    (debian / "control").write_text("".join(f"{line}\n" for line in lines if not line.endswith(": ")))
    (debian / "md5sums").write_text("".join(
        f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}\n" for path in files))
    sonames = [re.fullmatch(r"(lib.+)\.so\.(\d+)", path.name) for path in tree.glob(LIB + "*.so.*")]
    shared = [match.groups() for match in sonames if match]
    if shared:
        (debian / "shlibs").write_text("".join(f"{name} {number} {package.name} (>= {version})\n"
                                               for name, number in shared))
    if any(path.is_file() for path in tree.glob(LIB + "*.so*")) and package.section != "libdevel":
        (debian / "triggers").write_text("activate-noawait ldconfig\n")
    for path in debian.iterdir():
        path.chmod(0o644)
    return needs


def main(build, out):
    build, out = pathlib.Path(build).resolve(), pathlib.Path(out).resolve()
    if not (build / "build.ninja").exists():
        sys.exit(f"pack_deb.py: {build}: no build folder of Meson")
    if not out.is_dir():
        sys.exit(f"pack_deb.py: {out}: no folder")
    version = json.loads(run("meson", "introspect", build, "--projectinfo"))["version"]
    maintainer = "{} <{}>".format(os.environ.get("DEBFULLNAME", "The Perseus maintainers"),
                                  os.environ.get("DEBEMAIL", "perseus@users.noreply.github.com"))
    date = email.utils.formatdate(int(run("git", "-C", ROOT, "log", "-1", "--format=%ct")), localtime=False)
    architecture = host("ARCH")
    with tempfile.TemporaryDirectory() as folder:
        everything = pathlib.Path(folder, "everything")
        run("meson", "install", "-C", build, "--no-rebuild", "--quiet", env=dict(os.environ, DESTDIR=str(everything)))
        shutil.rmtree(everything / "usr/share/doc")
        trees = [(package, pathlib.Path(folder, package.name)) for package in PACKAGES]
        trees = [(package, tree) for package, tree in trees if take(everything, package, tree)]
        left = [str(path.relative_to(everything)) for path in everything.rglob("*") if not path.is_dir()]
        if left:
            sys.exit(f"pack_deb.py: no package has {', '.join(left)}")
        for package, tree in trees:
            finish_files(tree)
        for package, tree in trees:
            documents(tree, package, version, maintainer, date)
            if package.section == "libdevel":
                package = package._replace(depends=", ".join(f"{other.name} (= {{v}})" for other, _ in trees
                                                             if re.fullmatch(r"lib.*\d", other.name)))
            needs = control(tree, package, version, maintainer, architecture)
            name = f"{package.name}_{version}_{architecture}.deb"
            run("dpkg-deb", "--root-owner-group", "-Zxz", "-b", tree, out / name)
            print(f"    {name}: {(out / name).stat().st_size >> 10} KB; needs {needs}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] == "--help":
        sys.exit(__doc__)
    main(*sys.argv[1:])
