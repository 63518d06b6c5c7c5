"""What a solve returns: the point, its certificate, what happened, and how it got there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevax.certificates import Certificate
from bilevax.problems import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bilevax.driver.checkpoint import RunState
    from bilevax.solvers.base import Task


@dataclasses.dataclass(frozen=True)
class Status:
    """How a solve ended: a code to test, and a sentence that says what to do."""

    code: str
    sentence: str

    CODES = (
        *("certified", "withdrawn", "budget spent", "not finite"),
        *("unbounded", "stalled", "interrupted", "running"),
    )

    def __post_init__(self):
        if self.code not in self.CODES:
            raise ValueError(f"{self.code!r} is not one of {self.CODES}")

    def __str__(self) -> str:
        return self.sentence

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.code == other
        return isinstance(other, Status) and dataclasses.astuple(self) == dataclasses.astuple(other)

    def __hash__(self) -> int:
        return hash(self.code)


@dataclasses.dataclass(frozen=True)
class History:
    """What each check saw, as arrays of equal length: `history["epsilon"]`, `history.names`."""

    columns: dict[str, np.ndarray]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.columns:
            raise KeyError(f"the history has no {name!r}; it has {', '.join(self.columns)}")
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __repr__(self) -> str:
        return f"History({len(self)} checks of {', '.join(self.columns)})"

    def plot(self, path: str | Path | None = None, ax: Axes | None = None) -> Axes:
        """Every residual against gradients, on logarithmic axes; saved to `path` if given."""
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
        others = {"gradients", "seconds", "objective", "rho", "gap_below"}
        others |= {"product_z", "product", "upper_product"}
        gradients = np.maximum(self["gradients"], 1)
        for name in self.names:
            if name in others or not np.any(self[name] > 0):
                continue
            bold = name == "epsilon"
            shown = np.where(self[name] > 0, self[name], np.nan)
            (curve,) = ax.plot(gradients, shown, linewidth=1.2, label=name.replace("_", " "))
            if bold:
                # The largest of the others: a broad band behind the line that it is.
                curve.set(color="0.75", linewidth=6, zorder=1, label="ε, the largest")
        ax.set(xscale="log", yscale="log", xlabel="gradient evaluations", ylabel="residual")
        # What lies far below the least ε is nothing but rounding: leave it out of the picture.
        seen = self["epsilon"][np.isfinite(self["epsilon"]) & (self["epsilon"] > 0)]
        if seen.size:
            ax.set_ylim(bottom=max(ax.get_ylim()[0], 1e-4 * seen.min()))
        ax.grid(alpha=0.3, which="both", linewidth=0.4)
        ax.legend(frameon=False, fontsize="small")
        if path is not None:
            ax.figure.savefig(path, dpi=150)  # pyright: ignore[reportAttributeAccessIssue]
        return ax


@dataclasses.dataclass(frozen=True)
class Solution:
    """The best point found, judged independently of the solver that found it.

    `gradients` counts the solver's gradient evaluations exactly, and `linear_solves` the linear
    systems that it solved, with a Hessian each; `check_gradients` counts the gradients of the
    certificates along the way. `state` continues the run: `solve(…, resume=solution.state)`.

    `point` is the point of least ε that a check has seen. `output` is where the method itself stood
    at the end: what its theorem is about. Of the paper's stochastic method it is the iterate that
    was drawn uniformly from all K, or from those so far, and `output_index` says which one, counted
    from 1; of methods that draw none that is None.
    """

    status: Status
    point: Point
    certificate: Certificate
    tolerance: float
    relative_tolerance: float
    gradients: int
    linear_solves: int
    check_gradients: int
    seconds: float
    compile_seconds: float
    history: History
    solver: Any
    state: RunState
    output: Point
    output_index: int | None

    @classmethod
    def of(
        cls,
        state: RunState,
        status: Status,
        certificate: Certificate,
        task: Task,
        output: Point,
        *,
        gradients: int,
        linear_solves: int,
        compile_seconds: float,
    ) -> Solution:
        """What a run returns that ends in this state."""
        index = state.solver.output_index(state.solver_state)
        columns = {name: np.asarray(column) for name, column in state.history.items()}
        return cls(
            status=status,
            point=state.best,
            certificate=certificate,
            tolerance=task.tolerance,
            relative_tolerance=task.relative,
            gradients=gradients,
            linear_solves=linear_solves,
            check_gradients=state.check_gradients,
            seconds=state.seconds,
            compile_seconds=compile_seconds,
            history=History(columns),
            solver=state.solver.part,
            state=state,
            output=output,
            output_index=None if index is None else int(index),
        )

    @property
    def certified(self) -> bool:
        """Whether the certificate holds at the tolerance that was asked for."""
        return self.certificate.certified(self.tolerance, self.relative_tolerance)

    @property
    def objective_shift(self) -> float:
        """How far the finite ρ may put the objective off: 2ρ·gap; 0 where there is no ρ.

        With a curved lower level the penalty ρ·gap is c/ρ up to O(1/ρ²) and takes as much from the
        least value of P, so that f falls short by twice that.
        """
        seen = self.certificate.as_dict()
        gap = seen.get("gap_below", seen.get("lower_gap", 0.0))
        return 2 * seen.get("rho", 0.0) * max(gap, 0.0)

    @property
    def extrapolated_objective(self) -> float:
        """The objective for ρ → ∞, to first order in 1/ρ: `objective` + `objective_shift`.

        It is sound where the lower level is curved and the penalty the last thing that is not
        exact; where the lower level is piecewise linear the shift is nearly 0.
        """
        return self.certificate.objective + self.objective_shift

    def save(self, path: str | Path) -> None:
        """Write the state of the run, from which `solve(…, resume=path)` goes on."""
        from bilevax.driver.checkpoint import save

        save(path, self.state)

    def __str__(self) -> str:
        return f"{self.status}\n{self.certificate}\n{self.point}"


class SolveError(RuntimeError):
    """Raised by `solve(…, throw=True)` when the answer is not certified; holds the solution."""

    def __init__(self, solution: Solution):
        super().__init__(str(solution.status))
        self.solution = solution

    def __reduce__(self):
        return SolveError, (self.solution,)
