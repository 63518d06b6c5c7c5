"""Checks of single arguments, with messages that name them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.core
import numpy as np

# Frames that are not the caller's own code: this package, and the wrappers of equinox's methods.
_OURS = (str(Path(__file__).parent), str(Path(eqx.__file__).parent))


def tracing(value: Any) -> bool:
    """Whether JAX is tracing this value, so that its numbers cannot be looked at now."""
    return isinstance(value, jax.core.Tracer)


def one_number(value: Any, name: str) -> float | None:
    """The argument as a float; None while JAX traces it. Refuses what is not one real number."""
    if tracing(value):
        if value.ndim != 0:
            raise TypeError(f"{name} must be one number, not an array of shape {value.shape}")
        return None
    number = np.asarray(value)
    real = np.issubdtype(number.dtype, np.floating) or np.issubdtype(number.dtype, np.integer)
    if number.ndim != 0 or not real:
        raise TypeError(f"{name} must be one number, not {value!r}")
    return float(number)


def positive(value: Any, name: str) -> None:
    """Refuse what is not one finite number > 0. None means 'not given' and passes."""
    number = None if value is None else one_number(value, name)
    if number is not None and not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be finite and > 0, not {value}")


def non_negative(value: Any, name: str) -> None:
    """Refuse what is not one finite number ≥ 0."""
    number = one_number(value, name)
    if number is not None and not (np.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be finite and ≥ 0, not {value}")


def probability(value: Any, name: str) -> None:
    """Refuse what is not one number between 0 and 1, without these two."""
    number = one_number(value, name)
    if number is not None and not 0 < number < 1:
        raise ValueError(f"{name} must be a probability between 0 and 1, not {value}")


def one_of(value: Any, name: str, *choices: str) -> None:
    """Refuse what is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")


def whole(value: Any, name: str, least: int) -> None:
    """Refuse what is not a whole number ≥ `least`."""
    is_whole = isinstance(value, int | np.integer) or (isinstance(value, float) and value % 1 == 0)
    if isinstance(value, bool) or not is_whole:
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be a whole number ≥ {least}, not {value}")


def numbers(value: Any, name: str) -> np.ndarray | None:
    """The argument as an array of real numbers; None while JAX traces it."""
    if tracing(value):
        return None
    array = np.asarray(value)
    if not (np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"{name} must be a number or an array of numbers, not {value!r}")
    return array


def finite(value: Any, name: str) -> None:
    """Refuse an array that holds NaN or infinity."""
    array = numbers(value, name)
    if array is not None and not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite, not {value}")


def interval(lower: Any, upper: Any, name: str) -> None:
    """Refuse bounds that are not numbers, do not fit each other, or are not in order."""
    low, high = numbers(lower, f"{name}: lower"), numbers(upper, f"{name}: upper")
    if low is None or high is None:
        return
    try:
        np.broadcast_shapes(low.shape, high.shape)
    except ValueError:
        raise ValueError(
            f"{name}: lower has shape {low.shape} and upper {high.shape}, which do not fit"
        ) from None
    if np.isnan(low).any() or np.isnan(high).any():
        raise ValueError(f"{name}: lower and upper must not be NaN")
    if not np.all((low <= high) & (low < np.inf) & (high > -np.inf)):
        raise ValueError(
            f"{name}: lower must be ≤ upper everywhere and leave room between, not {low} and {high}"
        )


def axis_or_none(value: Any, name: str) -> None:
    """Refuse an axis that is neither a whole number nor None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name}: axis must be a whole number or None, not {value!r}")


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the caller's own code, however deep in the package this is called."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
