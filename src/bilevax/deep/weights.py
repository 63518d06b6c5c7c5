"""Weights from and to `.safetensors` files, in the naming that torchvision and timm share."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.deep.networks import Encoder, Model, named_arrays
from bilevax.deep.tables import few
from bilevax.files import replaced

#: Keys of their files that an encoder has no use for: the last layer, and counters of batches.
OTHERS = ("fc.", "classifier.")
COUNTER = ".num_batches_tracked"


def load_encoder(encoder: Encoder, path: str | Path) -> Encoder:
    """The same encoder with the weights of a file, which must have every one of its keys.

    Files of torchvision's and timm's ResNets fit as they are. What does not fit is named.
    """
    stored, wanted = _read(Path(path)), named_arrays(encoder)
    ignored = lambda name: name.startswith(OTHERS) or name.endswith(COUNTER)
    unused = [name for name in stored if name not in wanted and not ignored(name)]
    missing = [name for name in wanted if name not in stored]
    if missing or unused:
        both = {"it lacks": missing, "the network has no": unused}
        wrong = "; ".join(f"{what} {few(names)}" for what, names in both.items() if names)
        raise ValueError(f"{path} does not fit this network: {wrong}")
    for name, array in wanted.items():
        if stored[name].shape != array.shape:
            raise ValueError(
                f"{path}: {name} has the shape {list(stored[name].shape)}, but this network's is "
                f"{list(array.shape)}"
            )
        if stored[name].dtype.kind == "c":
            raise ValueError(f"{path}: {name} is of {stored[name].dtype}, not of real numbers")
        with np.errstate(over="ignore"):
            stored[name] = stored[name].astype(np.float32)
        if not np.isfinite(stored[name]).all():
            raise ValueError(f"{path}: {name} has NaN or infinity")
        if name.endswith("running_var") and (stored[name] < 0).any():
            raise ValueError(f"{path}: {name} has negative variances")
    leaves = [jnp.asarray(stored[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(encoder), leaves)


def save_model(model: Model, path: str | Path) -> None:
    """Write the encoder, and the head as `fc.weight`."""
    from safetensors.numpy import save_file

    arrays = {name: np.asarray(a) for name, a in named_arrays(model.encoder).items()}
    with replaced(path) as temporary:
        save_file({**arrays, "fc.weight": np.asarray(model.head)}, temporary)


def _read(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return load_file(path)
    except (SafetensorError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None
