"""What a certificate is: named residuals, their maximum ε, a table when printed."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

from bilevax.certificates.around import Around


@dataclasses.dataclass(frozen=True)
class Certificate(abc.ABC):
    """Residuals whose maximum is `epsilon`: the point satisfies its definition to that ε.

    A line that could not be bounded, or is not a number, is infinite.
    """

    objective: float = dataclasses.field(metadata={"says": "the objective there"})
    #: How much of each line is an allowance for rounding.
    allowances: dict[str, float] = dataclasses.field(
        default_factory=dict, kw_only=True, repr=False, compare=False
    )
    #: How large the things are whose difference each line is; empty where nobody asked.
    sizes: dict[str, float] = dataclasses.field(
        default_factory=dict, kw_only=True, repr=False, compare=False
    )

    #: What a function was caught at that is outside of the stated class; empty if none was.
    breach: str = dataclasses.field(default="", kw_only=True, compare=False)
    #: What was seen around the point; None where nobody looked.
    looked_around: Around | None = dataclasses.field(default=None, kw_only=True, compare=False)
    #: Which entry of x has run away where there are no bounds, in a sentence; empty if none has.
    ran_away: str = dataclasses.field(default="", kw_only=True, compare=False)

    @abc.abstractmethod
    def lines(self) -> dict[str, float]:
        """The residuals of the definition, by name."""

    def notes(self) -> dict[str, float]:
        """What else is worth knowing, by name; not part of ε."""
        return {}

    def assumptions(self) -> list[str]:
        """What a line rests on that the user gave, in words."""
        return []

    def provisos(self) -> list[str]:
        """What the certificate rests on, in sentences."""
        sentences = [f"This assumes that {assumption}." for assumption in self.assumptions()]
        return [*sentences, self.ran_away] if self.ran_away else sentences

    def advice(self, line: str) -> tuple[str, str]:
        """A line in the words of a sentence, and what to try where it stays too large."""
        return line, "look at problem.check(start)"

    @property
    def epsilon(self) -> float:
        """The least ε for which this certifies the point; infinite if it was withdrawn."""
        if self.breach:
            return math.inf
        return max(math.inf if math.isnan(v) else v for v in self.lines().values())

    def certified(self, tolerance: float, relative_tolerance: float = 0.0) -> bool:
        """Whether every line is at most `tolerance` + `relative_tolerance` times its size.

        Not where a function is outside of its class, nor where F falls nearby.
        """
        if self.breach or (self.looked_around is not None and self.looked_around.falls):
            return False
        if not relative_tolerance:
            return self.epsilon <= tolerance
        allowed = self.allowed(tolerance, relative_tolerance)
        return all(value <= allowed[name] for name, value in self.lines().items())

    def allowed(self, tolerance: float, relative_tolerance: float) -> dict[str, float]:
        """What every line may be; a size that is infinite, or no number, allows nothing more."""
        sizes = {name: self.sizes.get(name, 0.0) for name in self.lines()}
        finite = {name: size if math.isfinite(size) else 0.0 for name, size in sizes.items()}
        return {name: tolerance + relative_tolerance * size for name, size in finite.items()}

    def as_dict(self) -> dict[str, float]:
        """Everything in the table, as plain numbers."""
        return {"epsilon": self.epsilon, **self.lines(), **self.notes()}

    def __str__(self) -> str:
        described = {f.name: f.metadata.get("says", "") for f in dataclasses.fields(self)}
        rows = [(name, value, described.get(name, "")) for name, value in self.lines().items()]
        rows.append(("epsilon", self.epsilon, "the largest of the lines above"))
        rows += [(name, value, described.get(name, "")) for name, value in self.notes().items()]
        width = max(len(name) for name, _, _ in rows)
        table = [f"{name:<{width}}  {value:>10.3e}  {text}".rstrip() for name, value, text in rows]
        table.insert(len(self.lines()), "─" * max(len(row) for row in table))
        return "\n".join([f"{type(self).__name__}", *table, *self._remarks()])

    def _remarks(self) -> list[str]:
        """What no number says."""
        assumed = [f"assumes that {assumption}" for assumption in self.assumptions()]
        if self.breach:
            return [*assumed, f"withdrawn: {self.breach}"]
        around = self.looked_around
        seen = [] if around is None else [f"looked around: {around}"]
        return [*assumed, *seen, *([f"ran away: {self.ran_away}"] if self.ran_away else [])]


def strong_convexity(modulus: float) -> list[str]:
    """The assumption that a modulus is; none if it is zero."""
    return [f"the lower level is m-strongly convex, m = {modulus:.4g}"] if modulus else []


def compared_within(radius: float) -> list[str]:
    """The sentence that a radius is; none if there is no radius."""
    if not 0 < radius < math.inf:
        return []
    return [f"The lower level has no bounds: y is compared with all within {radius:.3g} of it."]


def line(says: str, default: Any = dataclasses.MISSING) -> float:
    """A field of a certificate, with the words that stand beside it in the table."""
    return dataclasses.field(default=default, metadata={"says": says})
