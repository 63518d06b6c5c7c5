"""Functions of x and y read from text by a whitelist of arithmetic; the text is never executed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

MAX_LENGTH = 20_000
MAX_NESTING = 200
# Whole exponents up to here stay Python ints, whose powers JAX differentiates without a logarithm.
_MAX_WHOLE = 1000

# Operators by their names in the module `operator`, and functions by those in `math`.
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul"}
_OPERATORS |= {ast.Div: "truediv", ast.Pow: "pow"}
_FUNCTIONS = ("exp", "log", "sqrt", "sin", "cos", "abs")

# Values and slopes of functions, the matrix and the sides of a system, and the like.
Linear = tuple[np.ndarray, np.ndarray]
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
            value = _run(self.program, x, y, functools.partial(_operation, jnp))
            return value if not isinstance(value, float) else jnp.asarray(value, y.dtype)
        # Outside its domain a function is NaN or infinite, as in JAX; that is not worth a warning.
        with np.errstate(all="ignore"):
            value = _run(self.program, x, y, functools.partial(_operation, np))
        return value if not isinstance(value, float) else y.dtype.type(value)

    def linearised(self, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient in (x, y) jointly: float64, without JAX or its settings."""
        n = self.n_x + self.n_y
        seeds = [_Dual(value, unit) for value, unit in zip(np.concatenate([x, y]), np.eye(n))]
        with np.errstate(all="ignore"):
            value = _run(self.program, seeds[: self.n_x], seeds[self.n_x :], _differentiated)
        dual = value if isinstance(value, _Dual) else _Dual(value, np.zeros(n))
        return float(dual.value), dual.gradient


def parse(text: str, n_x: int, n_y: int) -> Expression:
    """The function that a text like "x[0]*y[1]**2 - exp(y[0])" describes.

    Allowed are numbers, pi, + - * / ** and parentheses, `x[i]` and `y[i]` with i in range, and
    exp, log, sqrt, sin, cos, abs. A ValueError shows what else it found, and where.
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
            case ast.Name(id="pi"):
                self.number(node, lambda: math.pi)
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
                self.apply(node, "neg", 1)
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                self.binary(node, depth)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
                name in _FUNCTIONS and not isinstance(argument, ast.Starred)
            ):
                self.read(argument, depth + 1)
                self.apply(node, name, 1)
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
        kind, exponent = self.program[-1]
        whole = kind == "number" and exponent % 1 == 0 and abs(exponent) <= _MAX_WHOLE
        if name == "pow" and whole and self.program[-2][0] != "number":
            self.program[-1] = ("power", int(exponent))
        else:
            self.apply(node, name, 2)

    def apply(self, node: ast.expr, name: str, arity: int) -> None:
        """Append an operation; compute it at once where its operands are numbers.

        In postfix an operand that is a number is the last step, so the last `arity` steps tell.
        """
        operands = self.program[-arity:]
        if all(kind == "number" for kind, _ in operands):
            del self.program[-arity:]
            compute = math.pow if name == "pow" else functools.partial(_operation, math, name, 0)
            self.number(node, lambda: compute(*(value for _, value in operands)))
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


def _run(program: Sequence[Step], x: Any, y: Any, operation: Callable[..., Any]) -> Any:
    """The value of a program; `operation` computes one step from its kind and operands."""
    stack: list[Any] = []
    for kind, payload in program:
        if kind == "number":
            stack.append(payload)
        elif kind in ("x", "y"):
            stack.append((x if kind == "x" else y)[int(payload)])
        else:
            many = 2 if kind in _OPERATORS.values() else 1
            stack[-many:] = [operation(kind, payload, *stack[-many:])]
    return stack.pop()


def _operation(functions: Any, kind: str, payload: float, *operands: Any) -> Any:
    """One step; `functions` has exp, log, … for the kind of numbers that the operands are."""
    if kind == "power":
        return operands[0] ** payload
    return getattr(operator if hasattr(operator, kind) else functions, kind)(*operands)


class _Dual(NamedTuple):
    """u with ∇u, carried through arithmetic: forward differentiation."""

    value: Any
    gradient: np.ndarray


# The derivatives of u, the value of an operation, in its operands a and b; n is a whole exponent.
_SLOPES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "neg": lambda u, n, a: (-1.0,),
    "add": lambda u, n, a, b: (1.0, 1.0),
    "sub": lambda u, n, a, b: (1.0, -1.0),
    "mul": lambda u, n, a, b: (b, a),
    "truediv": lambda u, n, a, b: (1 / b, -u / b),
    "pow": lambda u, n, a, b: (b * a ** (b - 1), u * np.log(a)),
    "power": lambda u, n, a: (n * a ** (n - 1) if n else 0.0,),  # u⁰ is flat where u⁻¹ is infinite
    "exp": lambda u, n, a: (u,),
    "log": lambda u, n, a: (1 / a,),
    "sqrt": lambda u, n, a: (0.5 / u,),
    "sin": lambda u, n, a: (np.cos(a),),
    "cos": lambda u, n, a: (-np.sin(a),),
    "abs": lambda u, n, a: (np.sign(a),),
}


def _differentiated(kind: str, payload: float, *operands: _Dual | float) -> _Dual:
    """One step on numbers of which at least one has a gradient, by the chain rule."""
    values = [np.float64(o.value if isinstance(o, _Dual) else o) for o in operands]
    value = _operation(np, kind, payload, *values)
    pairs = zip(_SLOPES[kind](value, payload, *values), operands)
    parts = [slope * o.gradient for slope, o in pairs if isinstance(o, _Dual)]
    return _Dual(value, functools.reduce(operator.add, parts))
