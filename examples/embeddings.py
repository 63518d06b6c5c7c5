"""Retrain the last layer of any network so that its worst group does well.

All that is needed is a matrix of embeddings, a label and a group for each row: from PyTorch
`network(images).detach().numpy()`, from ONNX `session.run(…)`, from JAX `np.asarray(…)`. Here a
small network of scikit-learn's stands for yours.

python examples/embeddings.py
"""

from __future__ import annotations

import numpy as np
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from bilevax.learn import TunedGroupDROClassifier, datasets


def embeddings(network: MLPClassifier, pixels: np.ndarray) -> np.ndarray:
    """What the network's last hidden layer says."""
    hidden = pixels
    for weights, bias in zip(network.coefs_[:-1], network.intercepts_[:-1]):
        hidden = np.maximum(hidden @ weights + bias, 0)
    return hidden


def worst_group(right: np.ndarray, groups: np.ndarray) -> float:
    return min(float(right[groups == g].mean()) for g in np.unique(groups))


def main() -> dict[str, float]:
    data = datasets.load_digits(correlation=0.95)
    pixels = data.X.drop(columns="mark").to_numpy() / 16
    pixels = np.column_stack([pixels, data.X["mark"] == "yes"])
    rows = np.arange(len(pixels))
    train, test = train_test_split(rows, test_size=0.3, stratify=data.groups, random_state=0)
    train, held = train_test_split(
        train, test_size=0.35, stratify=data.groups[train], random_state=0
    )
    network = MLPClassifier((32,), max_iter=1000, random_state=0)
    network.fit(pixels[train], data.y[train])

    seen = embeddings(network, pixels)
    head = TunedGroupDROClassifier().fit(
        seen[train], data.y[train], data.groups[train],
        X_val=seen[held], y_val=data.y[held], groups_val=data.groups[held],
    )  # fmt: skip

    before = network.predict(pixels[test]) == data.y[test]
    after = head.predict(seen[test]) == data.y[test]
    for name, right in (("the network", before), ("with a new head", after)):
        worst = worst_group(right, data.groups[test])
        print(f"{name:<16} average accuracy {right.mean():.3f}, worst group {worst:.3f}")
    print(
        f"η = {head.eta_:.3g}, l2 = {head.l2_:.3g}, certified ε = {head.certificate_.epsilon:.1e}"
    )
    return {
        "before": worst_group(before, data.groups[test]),
        "after": worst_group(after, data.groups[test]),
        "epsilon": head.certificate_.epsilon,
    }


if __name__ == "__main__":
    main()
