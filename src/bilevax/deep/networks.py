"""Encoders, images to features, and files of their weights.

Images are [batch, height, width, channels]. Fields, and the keys of `.safetensors` files, are named
as torchvision and timm name them.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax.deep.tables import few
from bilevax.files import replaced
from bilevax.trees import Tree

#: Whose mean and variance a batch is normalised with: its own, or those collected so far.
Statistics: TypeAlias = Literal["batch", "running"]


class Conv(eqx.Module):
    """A convolution without bias; images are [batch, height, width, channels].

    The weight is kept in the layout of torch's files, [out, in, height, width].
    """

    weight: Array
    stride: int = eqx.field(static=True)

    @classmethod
    def new(cls, inputs: int, outputs: int, side: int, stride: int = 1, *, key: Array) -> Conv:
        # He et al. 2015, for the outputs: the variance of gradients stays the same.
        scale = math.sqrt(2 / (outputs * side * side))
        normal = jax.random.normal(key, (outputs, inputs, side, side), jnp.float32)
        return cls(scale * normal, stride)

    def __call__(self, x: Array) -> Array:
        edge = self.weight.shape[-1] // 2
        return lax.conv_general_dilated(
            x,
            self.weight.astype(x.dtype),
            window_strides=(self.stride, self.stride),
            padding=((edge, edge), (edge, edge)),
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        )


class BatchNorm(eqx.Module):
    """(x − mean)/√(variance + 1e-5)·weight + bias, channel by channel, in float32.

    With `batch` statistics it also returns itself with running ones that have moved a tenth of the
    way. A batch spread over devices is one batch: the mean is over all of them.
    """

    weight: Array
    bias: Array
    running_mean: Array
    running_var: Array

    @classmethod
    def new(cls, channels: int) -> BatchNorm:
        one, zero = jnp.ones(channels, jnp.float32), jnp.zeros(channels, jnp.float32)
        return cls(weight=one, bias=zero, running_mean=zero, running_var=one)

    def __call__(self, x: Array, statistics: Statistics) -> tuple[Array, BatchNorm]:
        moved = self
        if statistics == "running":
            mean, variance = self.running_mean, self.running_var
        else:
            count = math.prod(x.shape[:-1])
            # Both sums in one pass over the batch, which is what this costs; about a value near
            # the mean, or their difference would lose its digits where the mean is large.
            near = self.running_mean
            wide = x.astype(jnp.float32) - near.reshape(1, 1, 1, -1)
            off = jnp.mean(wide, axis=(0, 1, 2))
            mean = near + off
            variance = jnp.maximum(jnp.mean(wide * wide, axis=(0, 1, 2)) - off * off, 0)
            unbiased = variance * (count / max(1, count - 1))
            tenth = lambda old, new: 0.9 * old + 0.1 * lax.stop_gradient(new)
            means, variances = tenth(near, mean), tenth(self.running_var, unbiased)
            moved = dataclasses.replace(self, running_mean=means, running_var=variances)
        scale = self.weight * lax.rsqrt(variance + 1e-5)
        shift = self.bias - mean * scale
        row = (1, 1, 1, x.shape[-1])
        normal = x.astype(jnp.float32) * scale.reshape(row) + shift.reshape(row)
        return normal.astype(x.dtype), moved


def max_pool(x: Array) -> Array:
    """The largest of 3 × 3, every second pixel.

    As maxima of shifted pictures, first down, then across: the gradient of a window's maximum is a
    scatter, which takes longer on an accelerator than all the rest of this, in no fixed order.
    """
    for axis in (1, 2):
        out = (x.shape[axis] + 1) // 2
        edges = [(1, 1) if a == axis else (0, 0) for a in range(4)]
        padded = jnp.pad(x, edges, constant_values=-jnp.inf)
        parts = [lax.slice_in_dim(padded, k, k + 2 * out - 1, 2, axis) for k in range(3)]
        x = jnp.maximum(jnp.maximum(parts[0], parts[1]), parts[2])
    return x


class Encoder(eqx.Module):
    """Enc(a; x1) of the paper. Parameters are float32; it computes in the dtype of its images."""

    features: eqx.AbstractVar[int]

    @abc.abstractmethod
    def __call__(self, images: Array, statistics: Statistics) -> tuple[Array, Encoder]:
        """Features in float32, [batch, features], and itself with what batch norm has seen."""


class CNN(Encoder):
    """Three 3 × 3 convolutions with stride 2, batch norm and ReLU; the mean over the picture."""

    layers: tuple[tuple[Conv, BatchNorm], ...]
    features: int = eqx.field(static=True)

    @classmethod
    def new(cls, *, key: Array, channels: tuple[int, ...] = (3, 32, 64, 128)) -> CNN:
        keys = jax.random.split(key, len(channels) - 1)
        sizes = zip(channels, channels[1:], keys)
        layers = tuple((Conv.new(a, b, 3, 2, key=k), BatchNorm.new(b)) for a, b, k in sizes)
        return cls(layers=layers, features=channels[-1])

    def __call__(self, images: Array, statistics: Statistics) -> tuple[Array, CNN]:
        x, layers = images, []
        for conv, norm in self.layers:
            x, norm = norm(conv(x), statistics)
            x = jax.nn.relu(x)
            layers.append((conv, norm))
        return pooled(x), dataclasses.replace(self, layers=tuple(layers))


#: The sides of a block's convolutions: of ResNet-18 and 34, and of ResNet-50.
BASIC, BOTTLENECK = (3, 3), (1, 3, 1)
#: A block's outputs over its width.
WIDER = {BASIC: 1, BOTTLENECK: 4}


class Block(eqx.Module):
    """Convolutions beside a shortcut, with the stride in the first one that is 3 × 3."""

    conv1: Conv
    bn1: BatchNorm
    conv2: Conv
    bn2: BatchNorm
    conv3: Conv | None
    bn3: BatchNorm | None
    downsample: tuple[Conv, BatchNorm] | None

    @classmethod
    def new(cls, sides: Any, inputs: int, width: int, stride: int, *, key: Array) -> Block:
        outputs = WIDER[sides] * width
        *keys, last = jax.random.split(key, len(sides) + 1)
        sizes = [inputs, *[width] * (len(sides) - 1), outputs]
        layers: dict[str, Any] = {"conv3": None, "bn3": None, "downsample": None}
        for n, side in enumerate(sides):
            step = stride if n == sides.index(3) else 1
            layers[f"conv{n + 1}"] = Conv.new(sizes[n], sizes[n + 1], side, step, key=keys[n])
            layers[f"bn{n + 1}"] = BatchNorm.new(sizes[n + 1])
        if stride > 1 or inputs != outputs:
            short = Conv.new(inputs, outputs, 1, stride, key=last)
            layers["downsample"] = short, BatchNorm.new(outputs)
        return cls(**layers)

    def __call__(self, x: Array, statistics: Statistics) -> tuple[Array, Block]:
        y, bn1 = self.bn1(self.conv1(x), statistics)
        y, bn2 = self.bn2(self.conv2(jax.nn.relu(y)), statistics)
        moved: dict[str, Any] = {"bn1": bn1, "bn2": bn2}
        if self.conv3 is not None and self.bn3 is not None:
            y, moved["bn3"] = self.bn3(self.conv3(jax.nn.relu(y)), statistics)
        if self.downsample is not None:
            conv, norm = self.downsample
            x, norm = norm(conv(x), statistics)
            moved["downsample"] = conv, norm
        return jax.nn.relu(y + x), dataclasses.replace(self, **moved)


STAGES = ("layer1", "layer2", "layer3", "layer4")


class ResNet(Encoder):
    """He et al. 2016, without the last layer."""

    conv1: Conv
    bn1: BatchNorm
    layer1: tuple[Any, ...]
    layer2: tuple[Any, ...]
    layer3: tuple[Any, ...]
    layer4: tuple[Any, ...]
    features: int = eqx.field(static=True)

    @classmethod
    def new(cls, sides: Any, depths: tuple[int, ...], *, key: Array) -> ResNet:
        first, *keys = jax.random.split(key, 1 + sum(depths))
        layers: dict[str, Any] = {"conv1": Conv.new(3, 64, 7, 2, key=first)}
        layers["bn1"] = BatchNorm.new(64)
        inputs, left = 64, iter(keys)
        for number, (name, depth) in enumerate(zip(STAGES, depths)):
            layers[name] = ()
            for place in range(depth):
                stride = 2 if number > 0 and place == 0 else 1
                block = Block.new(sides, inputs, 64 << number, stride, key=next(left))
                layers[name] += (block,)
                inputs = WIDER[sides] * (64 << number)
        return cls(**layers, features=inputs)

    def __call__(self, images: Array, statistics: Statistics) -> tuple[Array, ResNet]:
        x, bn1 = self.bn1(self.conv1(images), statistics)
        x = max_pool(jax.nn.relu(x))
        moved: dict[str, Any] = {"bn1": bn1}
        for name in STAGES:
            moved[name] = ()
            for block in getattr(self, name):
                x, block = block(x, statistics)
                moved[name] += (block,)
        return pooled(x), dataclasses.replace(self, **moved)


def pooled(x: Array) -> Array:
    """The mean over the picture."""
    return jnp.mean(x.astype(jnp.float32), axis=(1, 2))


ENCODERS: dict[str, Callable[[Array], Encoder]] = {
    "cnn": lambda key: CNN.new(key=key),
    "resnet18": lambda key: ResNet.new(BASIC, (2, 2, 2, 2), key=key),
    "resnet34": lambda key: ResNet.new(BASIC, (3, 4, 6, 3), key=key),
    "resnet50": lambda key: ResNet.new(BOTTLENECK, (3, 4, 6, 3), key=key),
}


def encoder(name: str, key: Array) -> Encoder:
    """A new encoder with random parameters."""
    if name not in ENCODERS:
        raise ValueError(f"there is no network {name!r}; there are {', '.join(ENCODERS)}")
    return ENCODERS[name](key)


def scores(features: Array, head: Array) -> Array:
    """In full float32: the bilevel method takes differences of nearly equal losses."""
    return jnp.matmul(features, head.T, precision="highest")


class Model(eqx.Module):
    """An encoder (x1) and a linear head without bias (y1), [classes, features]."""

    encoder: Encoder
    head: Array

    def logits(self, images: Array) -> Array:
        """With the statistics of batch norm collected in training."""
        features, _ = self.encoder(images, "running")
        return scores(features, self.head)


def model(name: str, classes: int, key: Array) -> Model:
    """A new encoder, and a head as torch begins it: uniform in ±1/√features."""
    below, above = jax.random.split(key)
    made = encoder(name, below)
    edge = made.features**-0.5
    head = jax.random.uniform(above, (classes, made.features), jnp.float32, -edge, edge)
    return Model(made, head)


def named_arrays(tree: Tree) -> dict[str, Array]:
    """All arrays by the names of torchvision: `layer1.0.conv1.weight`."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in named}


def split(tree: Tree) -> tuple[Tree, Tree]:
    """What is trained, and the running statistics of batch norm; `eqx.combine` joins them."""
    last = lambda path: jax.tree_util.keystr(path[-1:], simple=True)
    trained = lambda path, _: not last(path).startswith("running_")
    return eqx.partition(tree, jax.tree_util.tree_map_with_path(trained, tree))


#: Keys of a file that an encoder has no use for: of the last layer, and counters of batches.
OTHERS = ("fc.", "classifier.")
COUNTER = ".num_batches_tracked"


def load_encoder(encoder: Encoder, path: str | Path) -> Encoder:
    """The same encoder with the weights of a file, which must have every one of its keys.

    Files of torchvision's and timm's ResNets fit as they are. What does not fit is named.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        stored = load_file(path)
    except (SafetensorError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None
    wanted = named_arrays(encoder)
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
