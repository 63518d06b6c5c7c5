"""Small data sets with groups, and the same convex programs as cvxpy has them."""

from pathlib import Path

import cvxpy as cp
import numpy as np
import pytest

from bilevax.learn import datasets
from bilevax.learn.table import encoder

SHARED = Path(__file__).parents[3] / "shared" / "data"


def blobs(n=200, d=5, classes=2, seed=0):
    """Classes that overlap, with an attribute that goes with one of the features."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, classes, n)
    attribute = (draw.random(n) < 0.2 + 0.6 * (y == 0)).astype(int)
    x = draw.standard_normal((n, d))
    x[:, 0] += y
    x[:, 1] += 1.5 * attribute
    return x, y, 2 * y + attribute


def some_rows(name, count=240, seed=0):
    """So many rows of a data set, of every group as many: features, labels 0 and 1, groups."""
    if name == "digits":
        data = datasets.load_digits()
    else:
        files = {"adult": "adult.csv.gz", "law": "law_school.csv", "compas": "compas.csv"}
        path = SHARED / files[name]
        if not path.exists():
            pytest.skip(f"needs {path.name} beside the checkout")
        load = {"adult": "load_adult", "law": "load_law_school", "compas": "load_compas"}[name]
        data = getattr(datasets, load)(path)
    groups, code = np.unique(data.groups, return_inverse=True)
    draw = np.random.default_rng(seed)
    each = count // len(groups)
    kept = [draw.permutation(np.flatnonzero(code == g))[:each] for g in range(len(groups))]
    kept = np.concatenate(kept)
    table = data.X.iloc[kept]
    for column in table.select_dtypes(exclude="number"):
        table = table.assign(**{column: table[column].astype(object).fillna("none").astype(str)})
    y = np.unique(data.y[kept], return_inverse=True)[1]
    return encoder(table).fit_transform(table), y, code[kept]


def row_losses(x, y, classes):
    """Parameters and losses of the rows, for cvxpy."""
    if classes == 2:
        w, c = cp.Variable(x.shape[1]), cp.Variable()
        return w, c, cp.logistic(cp.multiply(1 - 2 * y, x @ w + c))
    w, c = cp.Variable((x.shape[1], classes)), cp.Variable(classes)
    scores = x @ w + cp.reshape(c, (1, classes), order="C")
    own = cp.sum(cp.multiply(np.eye(classes)[y], scores), axis=1)
    return w, c, cp.log_sum_exp(scores, axis=1) - own


def solve_program(x, y, weigh, l2, classes=2):
    """min over w of weigh(losses) + (l2/2)‖w‖², by Clarabel: its value and its scores."""
    w, c, losses = row_losses(x, y, classes)
    cost, constraints = weigh(losses)
    problem = cp.Problem(cp.Minimize(cost + l2 / 2 * cp.sum_squares(w)), constraints)
    problem.solve(solver="CLARABEL")
    return problem.value, x @ w.value + c.value


def group_program(groups, eta, weight=None):
    """max over q in the simplex of ⟨q, L⟩ − (η/2)‖q − 1/G‖², as its Lagrangian dual.

    min over ν of ν + (η/2)·Σ [(1/G + (L_g − ν)/η)₊² − 1/G²]
    """
    count = groups.max() + 1
    weight = np.ones(len(groups)) if weight is None else weight
    mean = np.stack([(groups == g) * weight / weight[groups == g].sum() for g in range(count)])

    def weigh(losses):
        level = cp.Variable()
        free = cp.pos(1 / count + (mean @ losses - level) / eta)
        return level + eta / 2 * (cp.sum_squares(free) - 1 / count), []

    return weigh


def tail_program(n, share, eta):
    """max over 0 ≤ q ≤ 1/(share·n), Σq = 1, of ⟨q, ℓ⟩ − (η/2)·n‖q − 1/n‖², as its dual.

    min over ν and m ≥ 0 of ν + Σ mᵢ/(share·n) + (η/2n)·Σ [(1 + (ℓᵢ − ν − mᵢ)/η)₊² − 1]
    """

    def weigh(losses):
        level, over = cp.Variable(), cp.Variable(n, nonneg=True)
        free = cp.pos(1 + (losses - level - over) / eta)
        cost = level + cp.sum(over) / (share * n) + eta / (2 * n) * (cp.sum_squares(free) - n)
        return cost, []

    return weigh
