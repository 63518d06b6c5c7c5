"""Convolution and batch normalisation of whole batches, as torchvision's networks have them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

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
            moved = dataclasses.replace(
                self,
                running_mean=_tenth(self.running_mean, mean),
                running_var=_tenth(self.running_var, unbiased),
            )
        scale = self.weight * lax.rsqrt(variance + 1e-5)
        shift = self.bias - mean * scale
        row = (1, 1, 1, x.shape[-1])
        normal = x.astype(jnp.float32) * scale.reshape(row) + shift.reshape(row)
        return normal.astype(x.dtype), moved


def _tenth(old: Array, new: Array) -> Array:
    return 0.9 * old + 0.1 * lax.stop_gradient(new)


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
