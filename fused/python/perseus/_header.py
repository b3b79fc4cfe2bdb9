# SPDX-License-Identifier: Apache-2.0
"""Reads the text of the headers of libperseus-fused: their structs, enumerators and functions, as ctypes. So no layout
is written down a second time."""
from __future__ import annotations

import ctypes
import operator
import re
from typing import Any

_SCALARS = {"int": ctypes.c_int, "unsigned": ctypes.c_uint, "float": ctypes.c_float, "double": ctypes.c_double,
            "char": ctypes.c_char, "size_t": ctypes.c_size_t, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32,
            "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64}
ALLGATHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_CALLBACKS = {"prs_allgather_fn": ALLGATHER}

_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_STRUCT = re.compile(r"\bstruct (\w+) \{(.*?)\};", re.S)
_ENUM = re.compile(r"\benum(?: \w+)? \{(.*?)\};", re.S)
_FUNCTION = re.compile(r"\bPRS_API\s+(const char \*|int|void|size_t|uint64_t)\s*(\w+)\((.*?)\);", re.S)
_DECLARATION = re.compile(r"(?:const )?(?:(struct|enum) )?(\w+)\s*(.+)", re.S)


def _limits(kind: Any) -> tuple[int, int] | None:
    """The least and the most that an integer type holds; None: it is none."""
    if kind is ctypes.c_char or getattr(kind, "_type_", None) not in tuple("bBhHiIlLqQ"):
        return None
    bits, signed = 8 * ctypes.sizeof(kind), kind(-1).value < 0
    return (-1 << bits - 1, (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


_NUMBERS = frozenset((int, bool))


class Struct(ctypes.Structure):
    """ctypes alone would store a number that does not fit as another one, -1 as 4294967295, and take a field that the
    struct does not have, as one of a newer library's, for an attribute."""
    __slots__ = ()  # nor are attributes made by an assignment
    limits: dict[str, tuple[int, int] | None] = {}  # of every field; None: it is no integer

    def __init__(self, *values: Any, **fields: Any) -> None:
        if values:
            fields |= dict(zip((field[0] for field in self._fields_), values))
        known = self.limits
        for name, value in fields.items():  # in each launch
            if name not in known:
                raise TypeError(f"perseus: {type(self).__name__} has no field {name}: the library is of another "
                                "version than this package")
            limits = known[name]
            if limits and not (type(value) in _NUMBERS and limits[0] <= value <= limits[1]):
                self._refuse(name, value, limits)
        super().__init__(**fields)

    def _refuse(self, name: str, value: Any, limits: tuple[int, int]) -> None:
        try:
            number = operator.index(value)
        except TypeError as e:
            raise TypeError(f"perseus: {name} of {type(self).__name__} is {value!r}, of type {type(value).__name__}; "
                            "it must be a whole number") from e
        if not limits[0] <= number <= limits[1]:
            raise ValueError(f"perseus: {name} of {type(self).__name__} is {value}; it must be a number from "
                             f"{limits[0]} to {limits[1]}")


class Header:
    """structs: ctypes.Structure by C name. constants: int by name. functions: (restype, argtypes) by name."""

    def __init__(self, text: str) -> None:
        text = _COMMENT.sub(" ", text)
        self.structs: dict[str, type[ctypes.Structure]] = {}
        self.constants: dict[str, int] = {}
        for body in _ENUM.findall(text):
            self._enumerators(body)
        for name, body in _STRUCT.findall(text):
            fields = [field for line in body.split(";") if line.strip() for field in self._fields(line.strip())]
            limits = {field: _limits(kind) for field, kind in fields}
            self.structs[name] = type(name, (Struct,), {"_fields_": fields, "limits": limits, "__slots__": ()})
        self.functions = {name: (_RESULTS[result], self._parameters(parameters))
                          for result, name, parameters in _FUNCTION.findall(text)}

    def _enumerators(self, body: str) -> None:
        following = 0
        for item in filter(None, (part.strip() for part in body.split(","))):
            name, _, value = (part.strip() for part in item.partition("="))
            following = int(value, 0) if value else following
            self.constants[name] = following
            following += 1

    def _fields(self, line: str) -> list[tuple[str, Any]]:
        """The fields of one declaration, which may name several: const void *a, *b."""
        match = _DECLARATION.fullmatch(line)
        if not match:
            raise ValueError(f"perseus: cannot read the declaration {line!r}")
        keyword, base, names = match.groups()
        fields = []
        for declarator in names.split(","):
            declarator = declarator.strip()
            name, _, count = declarator.lstrip("* ").rstrip("]").partition("[")
            kind = self._kind(keyword, base, declarator.startswith("*"))
            fields.append((name.strip(), kind * self._count(count) if count else kind))
        return fields

    def _count(self, text: str) -> int:
        name, _, less = (part.strip() for part in text.partition("-"))
        return (self.constants[name] if name in self.constants else int(name, 0)) - int(less or 0)

    def _kind(self, keyword: str | None, base: str, pointer: bool) -> Any:
        if pointer:
            return _CALLBACKS.get(base, ctypes.c_char_p if base == "char" else ctypes.c_void_p)
        if keyword == "enum":
            return ctypes.c_uint
        return self.structs[base] if keyword == "struct" else _SCALARS[base]

    def _parameters(self, text: str) -> list[Any]:
        text = " ".join(text.split())
        return ([] if text == "void" else [ctypes.c_void_p if "*" in p else self._fields(p.strip())[0][1]
                                           for p in text.split(",")])


_RESULTS = {"int": ctypes.c_int, "void": None, "size_t": ctypes.c_size_t, "uint64_t": ctypes.c_uint64,
            "const char *": ctypes.c_char_p}
