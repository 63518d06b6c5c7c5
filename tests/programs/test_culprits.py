"""A line of a certificate is traced to an entry of a block, or to a constraint."""

import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax import terms
from bilevax.certificates.culprits import culprit
from bilevax.problems import Multipliers


def test_constraints_and_entries_are_named():
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y: jnp.sum((y["a"] - 1) ** 2) + jnp.sum(x**2),
        lower=lambda x, y: jnp.sum((y["a"] - x) ** 2) + jnp.sum(y["b"] ** 2),
        constraints=lambda x, y: {"cap": y["a"] - np.array([0.3, 0.1])},
        upper_constraints=lambda x, y: x - 5.0,
        x=terms.Box(-1.0, 1.0),
        y=terms.Box(-2.0, 2.0),
    )
    point = bx.Point(
        x=np.array([0.2, 0.2]),
        y={"a": np.array([0.2, 0.5]), "b": np.zeros(1)},
        z={"a": np.array([0.2, 0.1]), "b": np.array([0.3])},
        rho=np.asarray(1.0),
        multipliers=Multipliers(
            lam={"cap": np.array([2.5, 0.1])},
            lam_bar={"cap": np.array([0.0, 0.2])},
            upper_lam=np.array([0.0, 0.5]),
        ),
    )
    named = {line: culprit(problem, point, line) for line in bx.certify(problem, point).lines()}
    assert named == {
        "stationarity": "y['a'][0]",
        "response_z": "z['b'][0]",
        "feasibility_z": "",
        "complementarity_z": "",
        "lower_gap": "",
        "feasibility": "constraints['cap'][1]",
        "complementarity": "constraints['cap'][0]",  # 2.5·0.1 there, and 0.1·0.4
        "upper_feasibility": "",
        "upper_complementarity": "upper_constraints[1]",
    }
    # Stationarity is 2(y − 1) + 2ρ(y − x) + λ = (0.9, −0.3) in y['a'], 0 in y['b'] and
    # 2x − 2ρ(y − z) + λ_G = (0.4, 0.1) in x.
    moved = point.replace(x=np.array([0.2, -0.9]))
    assert culprit(problem, moved, "stationarity") == "x[1]"


def test_blocks_of_a_saddle_problem_are_named():
    problem = bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2: jnp.sum(x1**2) + jnp.sum(x2 * y1) - jnp.sum(x2**2),
        lower=lambda x1, y1, y2: jnp.sum(y1**2) / 2 + jnp.sum(y1 * y2) - jnp.sum(y2**2) / 2,
        x1=terms.Box(-1.0, 1.0),
        x2=terms.Box(-1.0, 1.0),
        y1=terms.Box(-1.0, 1.0),
        y2=terms.Box(-1.0, 1.0),
    )
    zero, off = np.zeros(2), np.array([0.0, 0.3])
    at = bx.Point(x1=zero, x2=zero, y1=zero, y2=zero, z1=zero, z2=zero, rho=np.asarray(2.0))
    assert culprit(problem, at.replace(x1=off), "stationarity") == "x1[1]"
    assert culprit(problem, at.replace(x2=off), "response_x2") == "x2[1]"
    assert culprit(problem, at.replace(z1=off), "response_z1") == "z1[1]"
    assert culprit(problem, at.replace(z2=off), "response_z2") == "z2[1]"
    assert culprit(problem, at, "stationarity") == ""
    assert culprit(problem, at.replace(z1=off), "gap") == ""
