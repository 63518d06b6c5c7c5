"""What a function reads besides its arguments, so that a change of it is noticed.

A compiled program has the values that a function read when it was traced. They are found again by
going through the function: its code, its defaults, the variables of its closure, the globals that
its code names, the object that a method belongs to, the attributes of a callable object and of its
class, the parts of a `functools.partial`; and, from there on, through containers, functions and
objects. Of libraries, and of whatever is none of these, only the identity counts.
"""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import hashlib
import sys
import types
from array import array as PlainArray
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

# Values that are looked at, and how deep: what is beyond is not seen.
MOST, DEPTH = 4096, 24
# A list of nothing but numbers and text counts as one value up to this length.
NUMBERS = 1 << 16
# Of a larger array so many entries, evenly spread, and the sum of all are looked at.
ENTRIES = 1 << 20

_PLAIN = {type(None), bool, int, float, complex, str, bytes, type(Ellipsis)}
_SPACES = (types.SimpleNamespace, argparse.Namespace)
_WRAPPERS = (staticmethod, classmethod)
_OF_CLASSES = (types.FunctionType, property, *_WRAPPERS)
_INSTALLED = {"site-packages", "dist-packages"}


class Same:
    """An object of which only the identity counts; it is kept, so that no other one gets its id."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Reading(NamedTuple):
    """All values that were read, as a digest, and the objects and code that were met."""

    digest: bytes
    met: tuple[Any, ...]


def reading(function: Any) -> Reading:
    """What a function reads now."""
    reader = _Reader()
    reader.read(function, frozenset(), 0)
    return Reading(reader.digest.digest(), tuple(reader.met))


class _Names(NamedTuple):
    read: frozenset[str]  # as globals
    attributes: frozenset[str]  # of anything


@functools.lru_cache(4096)
def _names(code: types.CodeType) -> _Names:
    """The names that code reads, that of functions inside of it included."""
    read, attributes = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            read |= _names(inner).read
            attributes |= _names(inner).attributes
    return _Names(frozenset(read), frozenset(attributes))


@functools.cache
def _is_library(package: str) -> bool:
    """Whether a package is installed, of Python itself, or this one: it does not change."""
    if package in sys.stdlib_module_names or package == "bilevax":
        return True
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(_INSTALLED & set(Path(place).parts) for place in places if place is not None)


def _is_own(value: Any) -> bool:
    """Whether a function, a class or a module is the user's."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return not (isinstance(name, str) and _is_library(name.partition(".")[0]))


class _Reader:
    def __init__(self):
        self.digest = hashlib.blake2b(digest_size=16)
        self.met: list[Any] = []
        self.seen: dict[Any, tuple[int, Any]] = {}
        self.left = MOST

    def write(self, *parts: Any) -> None:
        self.digest.update(repr(parts).encode())

    def read(self, value: Any, names: frozenset[str], depth: int) -> None:
        """Take in a value; of a module what is named among attributes in the code that has it."""
        self.left -= 1
        kind = type(value)
        if kind in _PLAIN:
            self.write(kind.__name__, value)
        elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
            self.array(np.asarray(value))
        elif self.left <= 0 or depth > DEPTH:
            return
        elif isinstance(value, jax.Array):
            self.met.append(Same(value))
        elif (key := (id(value), names if kind is types.ModuleType else None)) in self.seen:
            self.write("again", self.seen[key][0])
        else:
            self.seen[key] = len(self.seen), value
            self.write(kind.__name__)
            self.go_into(value, names, depth + 1)

    def array(self, array: np.ndarray) -> None:
        self.write(str(array.dtype), array.shape)
        if array.size > ENTRIES:
            flat = array.reshape(-1)
            with np.errstate(all="ignore"):
                self.write(np.sum(array) if array.dtype.kind in "biufc" else None)
            array = flat[:: -(-flat.size // ENTRIES)]
        self.digest.update(array.tobytes())

    def go_into(self, value: Any, names: frozenset[str], depth: int) -> None:
        if isinstance(value, tuple | list):
            self.each(value, names, depth)
        elif isinstance(value, dict):
            self.items(value, names, depth)
        elif isinstance(value, collections.deque):
            self.each(list(value), names, depth)
        elif isinstance(value, bytearray | memoryview | PlainArray):
            self.write(type(value).__name__)
            self.digest.update(bytes(value))
        elif isinstance(value, set | frozenset):
            self.write(sorted(map(repr, value)))
        elif isinstance(value, types.FunctionType):
            self.function(value, depth)
        elif isinstance(value, types.MethodType):
            self.each((value.__func__, value.__self__), names, depth)
        elif isinstance(value, functools.partial):
            self.each((value.func, value.args, value.keywords), names, depth)
        elif isinstance(value, _WRAPPERS):
            self.read(value.__func__, names, depth)
        elif isinstance(value, property):
            self.each((value.fget,), names, depth)
        elif isinstance(value, types.ModuleType):
            self.module(value, names, depth)
        elif isinstance(value, type):
            self.met.append(Same(value))
            self.of_classes(value, depth)
        elif isinstance(value, _SPACES) or _is_own(type(value)):
            self.met.append(Same(type(value)))
            self.items(_attributes(value), names, depth)
            self.of_classes(type(value), depth)
        else:
            self.library(value, depth)
            if hasattr(value, "__wrapped__"):  # such as what `jax.jit` makes
                self.read(value.__wrapped__, names, depth)

    def library(self, value: Any, depth: int) -> None:
        """Only the identity counts; of the function itself not even that, which may have equals."""
        if depth > 1:
            self.met.append(Same(value))

    def each(self, values: Any, names: frozenset[str], depth: int) -> None:
        self.write(len(values))
        if len(values) <= NUMBERS and set(map(type, values)) <= _PLAIN:
            self.write(*values)
            return
        for value in values:
            if self.left <= 0:
                return
            self.read(value, names, depth)

    def items(self, values: dict, names: frozenset[str], depth: int) -> None:
        self.write(len(values))
        for key, value in list(values.items()):
            if self.left <= 0:
                return
            self.read(key, names, depth)
            self.read(value, names, depth)

    def function(self, function: types.FunctionType, depth: int) -> None:
        if not _is_own(function):
            self.library(function, depth)
            return
        self.met.append(function.__code__)
        found = _names(function.__code__)
        self.read(function.__defaults__, found.attributes, depth)
        self.read(function.__kwdefaults__, found.attributes, depth)
        for cell in function.__closure__ or ():
            try:
                self.read(cell.cell_contents, found.attributes, depth)
            except ValueError:
                self.write("empty")
        for name in sorted(found.read):
            if name in function.__globals__:
                self.write(name)
                self.read(function.__globals__[name], found.attributes, depth)
        if function.__dict__:
            self.items(function.__dict__, found.attributes, depth)

    def module(self, module: types.ModuleType, names: frozenset[str], depth: int) -> None:
        self.met.append(Same(module))
        if _is_own(module):
            for name in sorted(names & vars(module).keys()):
                self.write(name)
                self.read(vars(module)[name], names, depth)

    def of_classes(self, kind: type, depth: int) -> None:
        """The attributes of a class and of those above it, if they are the user's."""
        for cls in kind.__mro__:
            if not _is_own(cls):
                continue
            for name, value in list(vars(cls).items()):
                code = isinstance(value, _OF_CLASSES)
                if code or not name.startswith(("__", "_abc_")):
                    self.write(name)
                    self.read(value, frozenset(), depth)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [s for cls in type(value).__mro__ for s in cls.__dict__.get("__slots__", ())]
    held = {s: getattr(value, s) for s in slots if isinstance(s, str) and hasattr(value, s)}
    return held | getattr(value, "__dict__", {})
