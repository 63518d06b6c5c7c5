"""Functions of x and y read from text by a whitelist of arithmetic; the text is never executed."""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

MAX_LENGTH = 20_000
MAX_NESTING = 200
# Whole exponents up to here stay Python ints, whose powers JAX differentiates without a logarithm.
_MAX_WHOLE = 1000

# Operators by their names in the module `operator`, and functions of constants.
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul"}
_OPERATORS |= {ast.Div: "truediv", ast.Pow: "pow"}
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    **{name: getattr(math, name) for name in ("exp", "log", "sqrt", "sin", "cos")},
    "abs": abs,
}

# One step of a program: ("number", value), ("x", i), ("y", i), ("neg", 0), (operator, 0),
# ("power", whole exponent) or (function, 0).
Step = tuple[str, float]


@dataclasses.dataclass(frozen=True)
class Expression:
    """One real function of the vectors x and y.

    It works on NumPy arrays and, traced or not, on JAX arrays, in the dtype of x and y. Two
    expressions are equal when their text and sizes are.
    """

    text: str
    n_x: int
    n_y: int
    # Postfix: evaluation needs a list for a stack and no recursion, however long the text.
    program: tuple[Step, ...] = dataclasses.field(repr=False, compare=False)

    def __call__(self, x: Any, y: Any) -> Any:
        if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
            value = _run(self.program, x, y, jnp)
            return value if not isinstance(value, float) else jnp.asarray(value, y.dtype)
        # Outside its domain a function is NaN or infinite, as in JAX; that is not worth a warning.
        with np.errstate(all="ignore"):
            value = _run(self.program, x, y, np)
        return value if not isinstance(value, float) else y.dtype.type(value)

    def linearised(self, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient in (x, y) jointly: float64, without JAX or its settings."""
        n = self.n_x + self.n_y
        seeds = [_Dual(value, unit) for value, unit in zip(np.concatenate([x, y]), np.eye(n))]
        with np.errstate(all="ignore"):
            value = _run(self.program, seeds[: self.n_x], seeds[self.n_x :], _Dual)
        dual = value if isinstance(value, _Dual) else _Dual(value, np.zeros(n))
        return float(dual.value), dual.gradient


def parse(text: str, n_x: int, n_y: int) -> Expression:
    """The function that a text like "x[0]*y[1]**2 - exp(y[0])" describes.

    Allowed are numbers, + - * / ** and parentheses, `x[i]` and `y[i]` with i in range, and exp,
    log, sqrt, sin, cos, abs. A ValueError shows what else it found, and where.
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression must be text, not {text!r}")
    if len(text) > MAX_LENGTH:
        raise ValueError(f"expression of {len(text)} characters; at most {MAX_LENGTH} are read")
    if not text.isascii():
        raise ValueError(f"expression with characters that are not ASCII: {text!r}")
    # One line without indentation, so that a node's column is its position in the text.
    source = text.translate(dict.fromkeys(map(ord, "\t\n\r\f\v"), " "))
    margin = len(source) - len(source.lstrip())
    if margin == len(text):
        raise ValueError("empty expression")
    try:
        tree = ast.parse(source[margin:], mode="eval")
    except SyntaxError as error:
        column = margin + (error.offset or 1) - 1
        raise ValueError(f"{_shown(text)}: {error.msg}, at position {column}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{_shown(text)}: nested too deeply") from None
    except ValueError as error:  # null bytes
        raise ValueError(f"{_shown(text)}: {error}") from None
    reader = _Reader(text, margin, n_x, n_y)
    reader.read(tree.body, 0)
    return Expression(text, n_x, n_y, tuple(reader.program))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


class _Reader:
    """Walks the syntax tree once, writes the program, and computes what is constant."""

    def __init__(self, text: str, margin: int, n_x: int, n_y: int):
        self.text, self.margin = text, margin
        self.sizes = {"x": n_x, "y": n_y}
        self.program: list[Step] = []

    def refuse(self, node: ast.expr, why: str) -> NoReturn:
        begin = self.margin + node.col_offset
        end = self.margin + (node.end_col_offset or node.col_offset + 1)
        piece = _shown(self.text[begin:end])
        raise ValueError(f"{_shown(self.text)}: {why}: {piece}, at position {begin}")

    def read(self, node: ast.expr, depth: int) -> None:
        if depth > MAX_NESTING:
            self.refuse(node, f"nested more than {MAX_NESTING} deep")
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                self.number(node, lambda: float(value))
            case ast.Subscript(value=ast.Name(id="x" | "y" as name), slice=index):
                if not (isinstance(index, ast.Constant) and type(index.value) is int):
                    self.refuse(node, "an index must be a whole number, written out")
                if index.value >= self.sizes[name]:
                    self.refuse(node, f"{name} has {self.sizes[name]} entries")
                self.program.append((name, index.value))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                self.read(operand, depth + 1)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self.read(operand, depth + 1)
                self.apply(node, "neg", 1, lambda a: -a)
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                self.binary(node, depth)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
                name in _FUNCTIONS and not isinstance(argument, ast.Starred)
            ):
                self.read(argument, depth + 1)
                self.apply(node, name, 1, _FUNCTIONS[name])
            case _:
                self.refuse(node, "not allowed in an expression")

    def binary(self, node: ast.BinOp, depth: int) -> None:
        """Read a + b + c + …, whose tree leans to the left, in a loop: long sums are not deep."""
        chain, first = [node], node.left
        while isinstance(first, ast.BinOp) and type(first.op) in _OPERATORS:
            chain.append(first)
            first = first.left
        self.read(first, depth + 1)
        for link in reversed(chain):
            self.read(link.right, depth + 1)
            self.operate(link)

    def operate(self, node: ast.BinOp) -> None:
        name = _OPERATORS[type(node.op)]
        exponent = self.program[-1]
        whole = exponent[0] == "number" and exponent[1] % 1 == 0 and abs(exponent[1]) <= _MAX_WHOLE
        if name != "pow":
            self.apply(node, name, 2, getattr(operator, name))
        elif whole and self.program[-2][0] != "number":
            self.program[-1] = ("power", int(exponent[1]))
        else:
            self.apply(node, name, 2, math.pow)

    def apply(self, node: ast.expr, name: str, arity: int, function: Callable[..., float]) -> None:
        """Append an operation; compute it at once where its operands are numbers.

        In postfix an operand that is a number is the last step, so the last `arity` steps tell.
        """
        operands = self.program[-arity:]
        if all(kind == "number" for kind, _ in operands):
            del self.program[-arity:]
            self.number(node, lambda: function(*(value for _, value in operands)))
        else:
            self.program.append((name, 0))

    def number(self, node: ast.expr, compute: Callable[[], float]) -> None:
        try:
            value = compute()
        except (ArithmeticError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            self.refuse(node, "a constant that overflows or is undefined")
        self.program.append(("number", value))


def _run(program: Sequence[Step], x: Any, y: Any, functions: Any) -> Any:
    """The value of a program; `functions` has exp, log, … for the kind of numbers in x and y."""
    stack: list[Any] = []
    for kind, payload in program:
        if kind == "number":
            stack.append(payload)
        elif kind == "x":
            stack.append(x[int(payload)])
        elif kind == "y":
            stack.append(y[int(payload)])
        elif kind == "neg":
            stack.append(-stack.pop())
        elif kind == "power":
            stack.append(stack.pop() ** payload)
        elif kind in _OPERATORS.values():
            right = stack.pop()
            stack.append(getattr(operator, kind)(stack.pop(), right))
        else:
            stack.append(getattr(functions, kind)(stack.pop()))
    return stack.pop()


class _Dual:
    """u with ∇u, carried through arithmetic: forward differentiation."""

    __slots__ = ("gradient", "value")

    def __init__(self, value: Any, gradient: np.ndarray):
        self.value, self.gradient = value, gradient

    def __neg__(self) -> _Dual:
        return _Dual(-self.value, -self.gradient)

    def __add__(self, other: _Dual | float) -> _Dual:
        if not isinstance(other, _Dual):
            return _Dual(self.value + other, self.gradient)
        return _Dual(self.value + other.value, self.gradient + other.gradient)

    __radd__ = __add__

    def __sub__(self, other: _Dual | float) -> _Dual:
        return self + -other

    def __rsub__(self, other: float) -> _Dual:
        return -self + other

    def __mul__(self, other: _Dual | float) -> _Dual:
        if not isinstance(other, _Dual):
            return _Dual(self.value * other, self.gradient * other)
        slope = self.value * other.gradient + other.value * self.gradient
        return _Dual(self.value * other.value, slope)

    __rmul__ = __mul__

    def __truediv__(self, other: _Dual | float) -> _Dual:
        if not isinstance(other, _Dual):
            return _Dual(self.value / other, self.gradient / other)
        ratio = self.value / other.value
        return _Dual(ratio, (self.gradient - ratio * other.gradient) / other.value)

    def __rtruediv__(self, other: float) -> _Dual:
        ratio = other / self.value
        return _Dual(ratio, -ratio / self.value * self.gradient)

    def __pow__(self, other: _Dual | float) -> _Dual:
        if isinstance(other, _Dual):
            return _Dual.exp(other * _Dual.log(self))
        # u⁰ is flat even where u⁻¹ is infinite.
        slope = other * self.value ** (other - 1) if other else 0.0
        return _Dual(self.value**other, slope * self.gradient)

    def __rpow__(self, other: float) -> _Dual:
        return _Dual.exp(self * np.log(other))

    def exp(self) -> _Dual:
        value = np.exp(self.value)
        return _Dual(value, value * self.gradient)

    def log(self) -> _Dual:
        return _Dual(np.log(self.value), self.gradient / self.value)

    def sqrt(self) -> _Dual:
        return self**0.5

    def sin(self) -> _Dual:
        return _Dual(np.sin(self.value), np.cos(self.value) * self.gradient)

    def cos(self) -> _Dual:
        return _Dual(np.cos(self.value), -np.sin(self.value) * self.gradient)

    def abs(self) -> _Dual:
        return _Dual(np.abs(self.value), np.sign(self.value) * self.gradient)
