#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pack_wheel.py VERSION PREFIX OUT: perseus-softnic's wheel, from what `meson install` put into the folder PREFIX.
pack_wheel.py --tag FILE...: the platform tag of a wheel with these libraries and programs.

The wheel has no Python: pip puts its files into the environment, where softnic-run finds its libraries as in any other
prefix. The tag is made of what the files ask of the system, as PEP 600 wants it: fused/python/setup.py uses it too."""
import argparse
import base64
import hashlib
import pathlib
import platform
import re
import subprocess
import sys
import zipfile

# Every system with this glibc has this libstdc++: the last numbers of GLIBCXX_3.4.N and CXXABI_1.3.N.
LIBSTDCXX = {(2, 17): (19, 7), (2, 28): (24, 11), (2, 31): (28, 12), (2, 34): (29, 13), (2, 35): (30, 13),
             (2, 38): (32, 14), (2, 39): (33, 15)}
MARKS = {"ABI_DT_RELR": (2, 36)}  # versions of glibc that have no number
# The libraries, other than its own, that PEP 600 lets a wheel expect.
SYSTEM = re.compile(r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-[\w-]+)\.so(\.\d+)?")


def readelf(option, files):
    return subprocess.run(["readelf", "-W", option, *map(str, files)], capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin:/usr/local/bin", "LC_ALL": "C"}).stdout


def platform_tag(files):
    """manylinux_2_N_MACHINE; ValueError if a file needs a library that is neither of every system nor of the wheel."""
    files = [file for file in files if file.open("rb").read(4) == b"\x7fELF"]
    needed = set(re.findall(r"\(NEEDED\)\s+Shared library: \[(.*)\]", readelf("-d", files)))
    names = {file.name for file in files}
    foreign = sorted(name for name in needed - names if not SYSTEM.fullmatch(name))
    if foreign:
        raise ValueError(f"a wheel for other systems cannot need {', '.join(foreign)}")
    # What the loader checks, which is more than what symbols ask for.
    versions = set(re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_(\S+)", readelf("--version-info", files)))
    glibc = [(2, 17)]
    for version in (version for kind, version in versions if kind == "GLIBC"):
        if version not in MARKS and not re.fullmatch(r"2(\.\d+)+", version):
            raise ValueError(f"a wheel for other systems cannot need GLIBC_{version}")
        glibc.append(MARKS.get(version) or tuple(map(int, version.split(".")[:2])))
    for place, (kind, before) in enumerate((("GLIBCXX", "3.4"), ("CXXABI", "1.3"))):
        numbers = [int(version[len(before) + 1:] or 0) if version.startswith(before) else 0
                   for which, version in versions if which == kind]
        fitting = [version for version, has in LIBSTDCXX.items() if has[place] >= max(numbers, default=0)]
        if not fitting:
            raise ValueError(f"no glibc is known that comes with each of {kind}_{before}.{numbers}")
        glibc.append(fitting[0])
    major, minor = max(glibc)
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def softnic(version, prefix, out):
    """Writes the wheel, and returns its path."""
    files = sorted(path for path in prefix.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:
        raise ValueError(f"{prefix}: a folder with what `meson install` put there is wanted, and it has no file")
    name = f"perseus_softnic-{version}"
    tag = f"py3-none-{platform_tag(files)}"
    contents = []  # (name in the wheel, bytes, mode)
    for path in files:
        below = path.relative_to(prefix)
        place = (f"{name}.data/scripts/{below.name}" if below.parts[0] == "bin" else f"{name}.data/data/{below}")
        contents.append((place, path.read_bytes(), 0o755 if below.parts[0] == "bin" else 0o644))
    root = pathlib.Path(__file__).resolve().parents[2]
    contents += [(f"{name}.dist-info/licenses/LICENSE", (root / "LICENSE").read_bytes(), 0o644),
                 (f"{name}.dist-info/METADATA",
                  f"Metadata-Version: 2.1\nName: perseus-softnic\nVersion: {version}\nLicense: Apache-2.0\n"
                  "Summary: RDMA programs without an RDMA NIC: softnic-run gives a command software NICs\n"
                  "Requires-Python: >=3.7\nDescription-Content-Type: text/markdown\n\n"
                  "`softnic-run -- ib_write_bw`; `softnic-run --help`. One machine, Linux, no root.\n".encode(), 0o644),
                 (f"{name}.dist-info/WHEEL",
                  f"Wheel-Version: 1.0\nGenerator: perseus\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(), 0o644)]
    record = f"{name}.dist-info/RECORD"
    lines = []
    path = out / f"{name}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        def add(place, data, mode):
            info = zipfile.ZipInfo(place, (2020, 1, 1, 0, 0, 0))
            info.external_attr, info.compress_type = (0o100000 | mode) << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
        for place, data, mode in contents:
            add(place, data, mode)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{place},sha256={digest},{len(data)}\n")
        add(record, "".join([*lines, f"{record},,\n"]).encode(), 0o644)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", nargs="+", type=pathlib.Path, metavar="FILE")
    parser.add_argument("what", nargs="*", metavar="VERSION PREFIX OUT")
    options = parser.parse_args()
    try:
        if options.tag:
            print(platform_tag(options.tag))
        elif len(options.what) == 3:
            print(softnic(options.what[0], *map(pathlib.Path, options.what[1:])))
        else:
            parser.error("want VERSION PREFIX OUT, or --tag FILE...")
    except (ValueError, OSError) as e:
        sys.exit(f"pack_wheel.py: {e}")


if __name__ == "__main__":
    main()
