"""What near-optimality means for a problem form, and the certificate that says how near."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax.certificates.around import Answer
from bilevax.certificates.breaches import Claim
from bilevax.certificates.certificate import Certificate
from bilevax.problems import Form, Point, registered
from bilevax.programs import quick
from bilevax.trees import Tree


class Definition(eqx.Module):
    """The definition of an ε-solution of one form: residual lines, of which ε is the largest.

    It holds nothing; `bilevax.problems.register(form, definition=…)` makes it known.
    """

    @property
    @abc.abstractmethod
    def certificate(self) -> type[Certificate]:
        """The class of the certificate, whose fields `residuals` fills."""

    @abc.abstractmethod
    def residuals(self, problem: Any, point: Point) -> dict[str, Any]:
        """Every field of the certificate, at a point with all its witnesses. It is compiled."""

    @abc.abstractmethod
    def sizes(self, problem: Any, point: Point) -> dict[str, Array]:
        """For each line the size of what it is a difference of. It is compiled."""

    def slope(self, problem: Any, point: Point) -> Array:
        """The size of slopes at a point, which a relative tolerance is a share of."""
        return next(iter(self.sizes(problem, point).values()))

    def with_witnesses(self, problem: Any, point: Point, rho: Any = None) -> Point:
        """The point with all that the definition asks for; what is missing is sought."""
        if rho is not None:
            raise ValueError(
                f"rho is the penalty of a bilevel problem; a {type(problem).__name__} has none"
            )
        return point

    # What a certificate rests on, and what it does not say.

    def claims(self, problem: Any, point: Point) -> list[Claim]:
        """What the bounds in the certificate assume of the functions."""
        return []

    def shares(self, problem: Any, point: Point) -> dict[str, dict[str, Tree]]:
        """For each line the vectors that it is the size of, by the names of blocks or constraints.

        Lines that are not the size of a vector are left out. It is compiled.
        """
        return {}

    #: For `look_around`: the block of the upper level, which is moved, and those of the lower one,
    #: which answers. None where there is no lower level.
    moving: ClassVar[tuple[str, ...]] = ()

    def upper_slope(self, problem: Any, point: Point) -> Tree:
        """The gradient of the upper function in the first of these. It is compiled."""
        raise TypeError(f"a {type(problem).__name__} has no lower level to look around")

    def answer(self, problem: Any, point: Point, x: Tree, epsilon: Array, steps: Array) -> Answer:
        """What the lower level answers at another x, begun at the point. It is compiled."""
        raise TypeError(f"a {type(problem).__name__} has no lower level to look around")

    # A certificate from minibatches: what varies between them, and what that does to the lines.

    def sampled_parts(self, problem: Any, point: Point) -> tuple[Tree, Array]:
        """Of one minibatch: the gradient that the lines are made of, and a value (zero if none).

        Every line is a convex function of these, as distances, norms and conjugates are.
        """
        raise TypeError(
            f"a {type(problem).__name__} is not certified from minibatches; give it a source that "
            "has all samples in memory"
        )

    def radii(
        self, problem: Any, point: Point, lines: dict[str, float], slope: float, value: float
    ) -> dict[str, float]:
        """How far each line may be off, if the gradient is off by `slope` and the value by `value`.

        Both are standard errors over the square root of the share of draws that may be worse.
        """
        return dict.fromkeys(lines, slope)

    def own_slopes(self, gradient: Tree) -> dict[str, Tree]:
        """For lines that depend on some parts of the gradient in `sampled_parts` only: these."""
        return {}

    def of_samples(self, problem: Any, point: Point, estimate: Any) -> Any:
        """The certificate on some minibatches with what it rests on, whatever the others say."""
        return estimate

    def statements(self) -> int:
        """How many of `slope` and `value` are used: they share the probability of an error."""
        return 1

    def least_variance(self, problem: Any, point: Point) -> float:
        """What the user says that the variance of a minibatch's gradient is at least."""
        return 0.0


def definition_of(problem: Form) -> Definition:
    """The definition that is registered for a form."""
    found = registered(problem, "definition")
    if found is None:
        name = type(problem).__name__
        raise TypeError(
            f"no certificate is known for a {name}; bilevax.problems.register({name}, "
            "definition=…) makes one known"
        )
    return found


# Two programs: a point gets the same lines, bit for bit, whether sizes are asked for or not.
@quick
def _lines(definition: Definition, problem: Form, point: Point) -> dict[str, Any]:
    return definition.residuals(problem, point)


@quick
def _sizes(definition: Definition, problem: Form, point: Point) -> dict[str, Array]:
    return definition.sizes(problem, point)


def judge(problem: Form, point: Point, *, sizes: bool = False) -> Certificate:
    """The certificate of a point that has all its witnesses; with `sizes`, those of its lines."""
    definition = definition_of(problem)
    measured = jax.device_get(
        (
            _lines(definition, problem, point),
            _sizes(definition, problem, point) if sizes else {},
        )
    )
    fields, found = jax.tree.map(float, measured)
    return definition.certificate(**fields, sizes=found)


def compile_judge(problem: Form, point: Any, sizes: bool) -> None:
    """Compile the programs of `judge` for a point of these shapes."""
    programs = [_lines, _sizes] if sizes else [_lines]
    for compiled in [p.ahead(definition_of(problem), problem, point) for p in programs]:
        compiled.result()


@quick
def _slope(definition: Definition, problem: Form, point: Point) -> Array:
    return definition.slope(problem, problem.first_witnesses(point))


def slope_at(problem: Form, start: Point) -> float:
    """The size of slopes at a start; 1 where there is none."""
    problem = problem.reference()
    slope = float(_slope(definition_of(problem), problem, start))
    return slope if jnp.isfinite(slope) and slope > 0 else 1.0


def bounded(
    lines: dict[str, Array], allowances: dict[str, Array], inside: Array, dtype: Any = None
) -> dict[str, Any]:
    """The lines with their allowances for rounding on top, and these by themselves.

    A line is infinite outside of the domain and where it is not a number.
    """
    total = {name: line + allowances[name] for name, line in lines.items()}
    claimed = {k: jnp.where(inside & ~jnp.isnan(v), v, jnp.inf) for k, v in total.items()}
    both = claimed | {"allowances": allowances}
    return both if dtype is None else jax.tree.map(lambda v: v.astype(dtype), both)


def term_values(problem: Form, point: Point) -> dict[str, Array]:
    """The term's value at every block and every witness like a block: infinite outside a domain."""
    return {name: term.value(block) for name, term, block in problem.terms(point)}
