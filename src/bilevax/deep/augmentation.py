"""From stored pixels to what the network sees, on the device.

A crop that is resized is A X Bᵀ with an interpolation matrix for each side: two matrix products an
image, which is what accelerators are made for. A flip is B with its rows in reversed order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

#: Of the channels red, green and blue, on the scale 0 to 1, over ImageNet's training images.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)

Size = tuple[int, int]  # height and width


def prepare(pixels: Array, size: Size, dtype: Any = jnp.float32) -> Array:
    """The middle of each image, normalised: what the network sees without augmentation."""
    (_, high, wide, _), (height, width) = pixels.shape, size
    if height > high or width > wide:
        raise ValueError(
            f"size is {height}×{width}, but the images are only {high}×{wide}; load them larger"
        )
    top, left = (high - height) // 2, (wide - width) // 2
    middle = pixels[:, top : top + height, left : left + width]
    return _normalised(middle.astype(jnp.float32), dtype)


def augmented(
    key: Array,
    pixels: Array,
    size: Size,
    dtype: Any = jnp.float32,
    *,
    scale: tuple[float, float] = (0.7, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
) -> Array:
    """A random part of each image, resized, flipped with probability `flip`, and normalised.

    `scale` is the share of the area that is kept, and `ratio` the width over the height as the
    network sees them: 1 distorts nothing where the stored images have the shape of `size`.
    """
    (count, high, wide, _), (height, width) = pixels.shape, size
    area, shape, up, across, side = jax.random.split(key, 5)

    def draw(of: Array, low: float, most: float) -> Array:
        return jax.random.uniform(of, (count,), jnp.float32, low, most)

    kept = draw(area, *scale) * (high * wide)
    ratios = jnp.exp(draw(shape, *np.log(ratio).tolist())) * (width / height)
    # Where the drawn ratio leaves the image, its longer side is cut.
    tall = jnp.minimum(jnp.sqrt(kept / ratios), float(high))
    broad = jnp.minimum(jnp.sqrt(kept * ratios), float(wide))
    top = draw(up, 0.0, 1.0) * (high - tall)
    left = draw(across, 0.0, 1.0) * (wide - broad)
    flipped = draw(side, 0.0, 1.0) < flip
    return _normalised(resampled(pixels, top, left, tall, broad, flipped, size, dtype), dtype)


def resampled(
    pixels: Array,
    top: Array,
    left: Array,
    height: Array,
    width: Array,
    flipped: Array,
    size: Size,
    dtype: Any = jnp.float32,
) -> Array:
    """The part of each image at (top, left) of height × width pixels, resized, in float32.

    All of these are arrays with one number an image, and need not be whole. The products are in
    `dtype`; pixels are exact in bfloat16 too.
    """
    rows = interpolation(top, height, size[0], pixels.shape[1])
    columns = interpolation(left, width, size[1], pixels.shape[2])
    columns = jnp.where(flipped[:, None, None], columns[:, ::-1], columns)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    half = product("noh,nhwc->nowc", rows.astype(dtype), pixels.astype(dtype))
    return product("npw,nowc->nopc", columns.astype(dtype), half.astype(dtype))


def interpolation(start: Array, length: Array, out: int, into: int) -> Array:
    """The matrices [n, out, into] that resize the interval [start, start + length] of pixels.

    Linear between the centres of the pixels; where the interval shrinks, the triangle of weights
    widens as much, so that fine patterns are averaged rather than sampled.
    """
    step = (length / out)[:, None]
    places = jnp.arange(out, dtype=jnp.float32)[None, :] + 0.5
    centres = start[:, None] + places * step - 0.5
    apart = jnp.abs(centres[:, :, None] - jnp.arange(into, dtype=jnp.float32)[None, None, :])
    weights = jnp.maximum(1.0 - apart / jnp.maximum(step, 1.0)[:, :, None], 0.0)
    return weights / weights.sum(axis=2, keepdims=True)


def _normalised(values: Array, dtype: Any) -> Array:
    mean, deviation = (np.asarray(v, np.float32) for v in (IMAGENET_MEAN, IMAGENET_DEVIATION))
    one = (1, 1, 1, 3)
    return (values / (255 * deviation).reshape(one) - (mean / deviation).reshape(one)).astype(dtype)
