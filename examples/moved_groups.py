"""A group whose rows move after training: group DRO against group DRO with tuned radii.

Two classes and a mark that agrees with the class for most rows, so that there are four groups. In
the validation and test rows one of the two small groups has moved towards the other class. Each
group's rows may move by a radius when the model is trained, and the radii are tuned with η and l2.
That the worst move has a closed form is checked by random moves of the same length.

python examples/moved_groups.py
"""

from __future__ import annotations

import numpy as np

from bilevax.learn import TunedGroupDROClassifier, TunedHierarchicalDROClassifier

SIZES = {"train": (400, 40, 40, 400), "validation": (100, 100, 100, 100), "test": (1000,) * 4}
MOVE = np.array([-0.8, 0.0])


def rows(draw: np.random.Generator, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features (signal, mark), classes, and groups 0 … 3: class and mark."""
    group = np.repeat(np.arange(4), SIZES[part])
    label, mark = group // 2, group % 2
    x = np.column_stack([2.0 * label - 1, 2.0 * mark - 1]) + 0.8 * draw.standard_normal(
        (len(group), 2)
    )
    if part != "train":
        x[group == 2] += MOVE
    return x, label, group


def worst(model: object, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> float:
    """The accuracy in the worst group."""
    right = model.predict(x) == y
    return min(float(right[group == g].mean()) for g in range(4))


def main() -> dict[str, float]:
    draw = np.random.default_rng(0)
    parts = {part: rows(draw, part) for part in SIZES}
    held = dict(zip(("X_val", "y_val", "groups_val"), parts["validation"]))
    plain = TunedGroupDROClassifier().fit(*parts["train"], **held)
    moved = TunedHierarchicalDROClassifier().fit(*parts["train"], **held)
    print(moved.certificate_)
    print("radii", dict(zip(moved.groups_.tolist(), np.round(moved.radii_, 2).tolist())))
    print("worst validation loss", plain.validation_losses_.max(), moved.validation_losses_.max())
    found = {name: worst(m, *parts["test"]) for name, m in (("plain", plain), ("moved", moved))}
    print("worst group's accuracy on test rows", found)

    # No move within a group's radius has a larger loss than the closed form says.
    x, y, group = parts["train"]
    w, radius = moved.coef_[0], moved.radii_[group]
    score = lambda at: (2 * y - 1) * (at @ w + moved.intercept_[0])
    closed = np.logaddexp(0, -score(x) + radius * np.linalg.norm(w))
    way = draw.standard_normal((200, *x.shape))
    way *= (radius / np.linalg.norm(way, axis=2))[..., None]
    losses = np.logaddexp(0, -score(x + way))
    assert (losses <= closed + 1e-12).all()
    assert np.abs(losses.max(axis=0) - closed).max() < 0.05
    assert moved.converged_
    assert moved.validation_losses_.max() <= plain.validation_losses_.max() + 1e-4
    return found


if __name__ == "__main__":
    main()
