#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""wheel_tag.py WHEEL [NAME...]: the wheel's name says which glibc its files need, and it has a file that ends in each
NAME. tools/dev/pack_wheel.py made the name by readelf; here the files' tables of versions are read from their bytes."""
import re
import struct
import sys
import zipfile

VERNEED = 0x6ffffffe  # the kind of section that lists what the loader checks
# The N of glibc 2.N with which libstdc++ has GLIBCXX_3.4.KEY or CXXABI_1.3.KEY everywhere. A mark has no number.
LIBSTDCXX = {"GLIBCXX_3.4": {19: 17, 24: 28, 28: 31, 29: 34, 30: 35, 32: 38, 33: 39},
             "CXXABI_1.3": {7: 17, 11: 28, 12: 31, 13: 34, 14: 38, 15: 39}}
MARKS = {"GLIBC_ABI_DT_RELR": 36}


def sections(data):
    offset, = struct.unpack_from("<Q", data, 0x28)
    size, count, _ = struct.unpack_from("<3H", data, 0x3a)
    for i in range(count):
        yield struct.unpack_from("<2I4Q2I", data, offset + i * size)


def versions(data):
    """The names of versions that an ELF file needs of other libraries."""
    every = list(sections(data))
    for _, kind, _, _, offset, _, link, count in every:
        if kind != VERNEED:
            continue
        names = every[link][4]
        for _ in range(count):
            _, entries, _, first, following = struct.unpack_from("<2H3I", data, offset)
            entry = offset + first
            for _ in range(entries):
                _, _, _, name, step = struct.unpack_from("<I2H2I", data, entry)
                yield data[names + name:data.index(b"\0", names + name)].decode()
                entry += step
            offset += following


def needed(version):
    """The N of glibc 2.N that a version stands for; 0 if any will do."""
    if match := re.fullmatch(r"GLIBC_2\.(\d+)(\.\d+)?", version):
        return int(match[1])
    for name, table in LIBSTDCXX.items():
        if match := re.fullmatch(re.escape(name) + r"(?:\.(\d+))?", version):
            return min(glibc for number, glibc in table.items() if number >= int(match[1] or 0))
    if version.startswith("GLIBC_"):
        return MARKS[version]  # GLIBC_PRIVATE is in no other system
    return 0


def main(path, *wanted):
    said = re.search(r"-py3-none-manylinux_2_(\d+)_\w+\.whl$", path)
    if not said:
        sys.exit(f"{path}: no tag of manylinux")
    most, why = 17, "nothing"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for name in names:
            data = archive.read(name)
            for version in versions(data) if data[:4] == b"\x7fELF" else ():
                if needed(version) > most:
                    most, why = needed(version), f"{name} needs {version}"
    lacks = [end for end in wanted if not any(name.endswith(end) for name in names)]
    if lacks:
        sys.exit(f"{path}: lacks {', '.join(lacks)}")
    if int(said[1]) != most:
        sys.exit(f"{path}: its tag says 2.{said[1]}, and {why}")
    print(f"    needs glibc 2.{most}: {why}")


if __name__ == "__main__":
    main(*sys.argv[1:])
