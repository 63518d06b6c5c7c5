"""Checks of single arguments, with messages that name them."""

from __future__ import annotations

from typing import Any

import jax.core
import numpy as np


def tracing(value: Any) -> bool:
    """Whether JAX is tracing this value, so that its numbers cannot be looked at now."""
    return isinstance(value, jax.core.Tracer)


def positive(value: Any, name: str) -> None:
    """Refuse what is not one finite number > 0. None means 'not given' and passes."""
    if value is None or tracing(value):
        return
    number = np.asarray(value)
    if number.ndim != 0 or number.dtype == bool or not np.issubdtype(number.dtype, np.number):
        raise TypeError(f"{name} must be one number, not {value!r}")
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be finite and > 0, not {value}")
