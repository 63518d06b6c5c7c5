"""Hyper-cleaning, a weight for every training row: problem 5."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax, softmax

import bilevax as bx
from bilevax.terms import Box
from people_data import Split, digits
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_search import descent

RIDGE, CLASSES, ROWS = 1e-3, 10, 300


@functools.cache
def data() -> Split:
    return digits(0, ROWS, 0.3)


def losses(W: Array, X: Array, t: Array) -> Array:
    """The cross-entropy of every row."""
    scores = jax.nn.log_softmax(X @ W)
    return -jnp.take_along_axis(scores, t[:, None], axis=1)[:, 0]


def trained(x: np.ndarray, first: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The weights that training with the row weights x gives, by Newton's method; the Hessian."""
    X, t = data().train, data().target
    rows, columns = X.shape
    wanted = np.eye(CLASSES)[t]
    weights = np.maximum(x, 0.0) / rows

    def value(W: np.ndarray) -> float:
        return float(
            -weights @ (wanted * log_softmax(X @ W, axis=1)).sum(1) + RIDGE * (W**2).sum() / 2
        )

    W = np.zeros((columns, CLASSES)) if first is None else first
    hessian = np.eye(W.size)
    for _ in range(100):
        p = softmax(X @ W, axis=1)
        gradient = X.T @ (weights[:, None] * (p - wanted)) + RIDGE * W
        hessian = _hessian(X, p, weights)
        if np.linalg.norm(gradient) < 1e-12:
            break
        step = np.linalg.solve(hessian, gradient.ravel()).reshape(W.shape)
        size, fall = 1.0, float(np.sum(gradient * step))
        while value(W - size * step) > value(W) - 1e-4 * size * fall + 1e-15 and size > 1e-8:
            size /= 2
        W = W - size * step
    return W, hessian


def _hessian(X: np.ndarray, p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Σ weightᵣ·(xᵣxᵣᵀ) ⊗ (diag(pᵣ) − pᵣpᵣᵀ), and the ridge."""
    rows, columns = X.shape
    outer = (np.sqrt(weights)[:, None, None] * X[:, :, None] * p[:, None]).reshape(rows, -1)
    hessian = (-outer.T @ outer).reshape(columns, CLASSES, columns, CLASSES)
    for k in range(CLASSES):
        hessian[:, k, :, k] += (X * (weights * p[:, k])[:, None]).T @ X
    size = columns * CLASSES
    return hessian.reshape(size, size) + RIDGE * np.eye(size)


class Cleaning:
    """The validation loss of x and its derivative; each training begins where the last ended."""

    def __init__(self):
        self.W: np.ndarray | None = None

    def value_and_slope(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        d = data()
        self.W, hessian = trained(x, self.W)
        scores = log_softmax(d.held @ self.W, axis=1)
        wanted = np.eye(CLASSES)[d.held_target]
        value = -float(np.mean((wanted * scores).sum(1)))
        of_W = d.held.T @ (np.exp(scores) - wanted) / len(scores)
        adjoint = np.linalg.solve(hessian, of_W.ravel()).reshape(self.W.shape)
        rest = softmax(d.train @ self.W, axis=1) - np.eye(CLASSES)[d.target]
        return value, -np.sum((d.train @ adjoint) * rest, axis=1) / ROWS


def _ipopt() -> Answer:
    import casadi as ca

    d = data()
    columns = d.train.shape[1]
    x, y = ca.MX.sym("x", ROWS), ca.MX.sym("y", columns * CLASSES)
    W = ca.reshape(y, columns, CLASSES)

    def entropies(X: np.ndarray, t: np.ndarray) -> Array:
        scores = ca.DM(X) @ W
        wanted = ca.DM(np.eye(CLASSES)[t])
        return ca.log(ca.sum2(ca.exp(scores))) - ca.sum2(wanted * scores)

    below = ca.dot(x, entropies(d.train, d.target)) / ROWS + 0.5 * RIDGE * ca.sumsqr(y)
    upper = ca.sum1(entropies(d.held, d.held_target)) / ROWS
    return relaxed(x, upper, [Level(y, below)], np.ones(ROWS), (0.0, 1.0))


def cleaning() -> Person:
    shape = (data().train.shape[1], CLASSES)
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: jnp.mean(losses(y, d["V"], d["s"])),
        lower=lambda x, y, d: jnp.mean(x * losses(y, d["X"], d["t"])) + 0.5 * RIDGE * jnp.sum(y**2),
        x=Box(0.0, 1.0),
        y=Box(-20.0, 20.0),
        data=data().arrays(),
    )
    nested = lambda: descent(Cleaning().value_and_slope, np.ones(ROWS), (0.0, 1.0), 500)
    return Person(
        number=5,
        name="hyper-cleaning",
        problem=problem,
        starts=(bx.Point(x=jnp.ones(ROWS), y=jnp.zeros(shape)),),
        repaired=lambda x: Cleaning().value_and_slope(np.ravel(x))[0],
        reference=lambda: nested().F,
        published=0.253177,
        nested=nested,
        ipopt=_ipopt,
    )
