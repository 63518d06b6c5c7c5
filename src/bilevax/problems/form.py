"""What a problem form is: it answers for its blocks, its functions and its points."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax.arguments import positive
from bilevax.data import Source
from bilevax.problems.point import Point, declare_blocks
from bilevax.terms import Term
from bilevax.trees import Tree


class Call(NamedTuple):
    """One of the user's functions, by its name, and the blocks that it is called with."""

    name: str
    function: Any
    blocks: dict[str, Tree]

    def __call__(self, *blocks: Tree) -> Tree:
        return self.function(*blocks)


class Form(eqx.Module):
    """A problem form. Each block in `blocks` has a term of the same name, or None if it is absent.

    `witnesses` are what a point may carry besides its blocks, to show how good it is: each with the
    block whose shape and term it shares, or None. `function_names` are the attributes that hold
    the user's functions; those in `array_functions` return arrays, the others one number. Every
    function gets `data`, if there are any, as its last argument.

    What a form needs from the layers below it is registered (`register`): the `definition` of a
    certificate, the `solver` that `solve` takes by default (a function of the problem), and perhaps
    a `reformulation` for solvers of another form, and a `polisher`, a function of ρ that gives the
    method by which `polish` seeks, if it is another.
    """

    blocks: ClassVar[tuple[str, ...]] = ()
    witnesses: ClassVar[dict[str, str | None]] = {}
    function_names: ClassVar[tuple[str, ...]] = ()
    array_functions: ClassVar[tuple[str, ...]] = ()

    data: eqx.AbstractVar[Tree]

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        declare_blocks(*cls.blocks, *cls.witnesses)

    @abc.abstractmethod
    def calls(self, point: Point) -> list[Call]:
        """Each of the user's functions with the blocks of the point that it is called with."""

    def all_calls(self, point: Point) -> list[Call]:
        """Every place where methods evaluate the functions: `calls`, and those at witnesses."""
        return self.calls(point)

    @abc.abstractmethod
    def check(self, start: Any, *, samples: int = 32, seed: int = 0) -> Any:
        """Sample and report violations of what the theory assumes."""

    def first_witnesses(self, point: Point) -> Point:
        """The point with a block itself as the witness like it, where that is missing."""
        given = point.blocks
        missing = {
            name: given.get(owner)
            for name, owner in self.witnesses.items()
            if owner is not None and name not in given
        }
        return point.replace(**missing)

    def check_witnesses(self, point: Point, what: str) -> None:
        """Refuse witnesses that do not fit; those like a block have been compared with it."""

    @property
    def extra(self) -> tuple[Tree, ...]:
        """What every function gets behind the variables."""
        return () if self.data is None else (self.data,)

    def terms(self, point: Point) -> list[tuple[str, Term, Tree]]:
        """Each block and each witness like a block that the point has: its name, term and value."""
        owners = {name: name for name in self.blocks} | self.witnesses
        return [
            (name, getattr(self, owner), point.blocks[name])
            for name, owner in owners.items()
            if owner is not None and name in point.blocks
        ]

    # Minibatches. Where the data is a source of them, it is asked for here and nowhere else.

    @property
    def sampled(self) -> bool:
        """Whether the data is a source of minibatches."""
        return isinstance(self.data, Source)

    def within(self, radius: Any) -> Self:
        """The same problem, whose lower level is compared with what lies within this radius."""
        if radius is None:
            return self
        positive(radius, "radius")
        if "radius" not in {field.name for field in dataclasses.fields(self)}:
            raise ValueError(
                "radius is how far a lower level without bounds is looked at; a "
                f"{type(self).__name__} has none"
            )
        return eqx.tree_at(
            lambda p: p.radius, self, np.asarray(radius, float), is_leaf=lambda leaf: leaf is None
        )

    def on(self, batch: Tree) -> Self:
        """The same problem with these data in the place of its own."""
        return eqx.tree_at(lambda p: p.data, self, batch, is_leaf=lambda x: x is None)

    def complete(self) -> Self | None:
        """The problem with all samples as its data; None if these are not in memory."""
        if not isinstance(self.data, Source):
            return self
        everything = self.data.everything()
        return None if everything is None else self.on(everything)

    def reference(self, batches: int = 1) -> Self:
        """The problem to measure constants on: with all samples, or else the first minibatches."""
        known = self.complete()
        if known is not None:
            return known
        stream, drawn = self.data.refilled(self.data.init(0)), []
        for _ in range(batches):
            if not bool(self.data.ready(stream)):
                stream = self.data.refilled(stream)
            stream, batch = self.data.draw(stream)
            drawn.append(batch)
        return self.on(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *drawn))

    def first_stream(self, key: Any) -> Any:
        """Where the source begins for a key; None without a source."""
        return self.data.init(jax.random.key(key)) if self.sampled else None

    def drawn(self, stream: Any) -> tuple[Any, Self]:
        """The next minibatch: where the source is then, and the problem with that minibatch."""
        if stream is None:
            return None, self
        stream, batch = self.data.draw(stream)
        return stream, self.on(batch)

    def values(self, point: Point) -> dict[str, Array]:
        """What the functions return at a point, by name."""
        return {c.name: c(*c.blocks.values(), *self.extra) for c in self.calls(point)}


class Reformulation(eqx.Module):
    """How solvers of another form take a problem: as which problem, and points there and back.

    It may change during a run: at every check the compiled program gives `signals`, from which
    `reviewed` says, on the host, how to go on.
    """

    form: ClassVar[type[Form]]  # of the problem that the solver sees

    @classmethod
    @abc.abstractmethod
    def of(cls, stated: Any, start: Point) -> Self:
        """The one to begin with."""

    @abc.abstractmethod
    def problem(self, stated: Any) -> Form:
        """The problem that the solver sees."""

    @abc.abstractmethod
    def point(self, point: Point) -> Point:
        """A point of the stated problem as one of that problem."""

    @abc.abstractmethod
    def stated_point(self, point: Point) -> Point:
        """The way back."""

    def signals(self, point: Point) -> Tree:
        """What a point of `problem` says about the reformulation itself."""
        return ()

    def reviewed(self, stated: Any, signals: Tree) -> tuple[Self, bool]:
        """How to go on after these signals, and whether `problem` is another one now."""
        return self, False


_REGISTERED: dict[type[Form], dict[str, Any]] = {}


def register(form: type[Form], **services: Any) -> None:
    """Say what a form needs from the layers below, by the names in `Form`."""
    known = ("definition", "solver", "polisher", "reformulation")
    for name in services:
        if name not in known:
            raise TypeError(f"register: {name} must be one of {', '.join(known)}")
    _REGISTERED.setdefault(form, {}).update(services)


def registered(problem: Any, service: str) -> Any:
    """What is registered for the form of a problem; None if nothing is."""
    for form in type(problem).__mro__:
        if service in _REGISTERED.get(form, {}):
            return _REGISTERED[form][service]
    return None
