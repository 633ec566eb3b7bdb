"""The one conversion of lists, arrays and tensors to integers on the CPU, and its checks.

Counts, ids, lengths and offsets all enter here. The caller passes what it calls the values
and which error it raises.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Ints = npt.NDArray[np.int64]
IntsLike: TypeAlias = "Sequence[int] | Ints | Tensor"

_LARGEST = int(np.iinfo(np.int64).max)
_MOST_EXACT = 2**53
"""Up to here float64 holds each integer."""


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor, without importing torch: before that is, nothing is one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_integer(value: object, *, lowest: int = 0, highest: int = _LARGEST) -> bool:
    """Whether a value is an integer (not a bool) from ``lowest`` to ``highest``."""
    is_integral = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integral and lowest <= int(value) <= highest  # type: ignore[call-overload]


def checked_integers(
    name: str,
    values: object,
    error: type[ValueError],
    *,
    lowest: int | None = None,
    length: int | None = None,
    squeeze: bool = False,
    expected: str = "integers in one dimension",
) -> Ints:
    """Copy to a contiguous int64 array of one dimension; ``squeeze``: from ``[1, n]`` too.

    ``expected``: what the message of another dtype or shape asks for.

    Raises ``error`` for other dtypes or shapes, for a value below ``lowest`` or above
    2^63 - 1, and for a length other than ``length``. A CUDA tensor costs one host sync.
    """
    if is_tensor(values):
        values = values.detach().cpu().numpy()
    elif isinstance(values, Iterator):
        values = list(values)
    try:
        array = np.asarray(values)
    except ValueError:  # a ragged list
        array = np.array(None)
    if squeeze and array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        has_numbers = array.ndim and array.dtype.kind in "biufc"
        got = f"{array.dtype} of shape {array.shape}" if has_numbers else reprlib.repr(values)
        raise error(f"{name}: got {got}, expected {expected}")
    if length is not None and len(array) != length:
        raise error(f"{name}: got {len(array)} entries, expected {length}, one per sequence")
    if array.dtype.kind == "u" and len(array) and array.max() > _LARGEST:
        raise error(f"{name}: got {array.max()}, the largest is 2^63 - 1")
    if lowest is not None and len(array) and array.min() < lowest:
        raise error(
            f"{name}: got {array.min()} at index {array.argmin()}, the smallest is {lowest}"
        )
    return np.array(array, dtype=np.int64)


def whole_numbers(values: object) -> object:
    """Convert counts that are whole numbers in another type to integers; others stay as they are.

    Sums of a float mask, in float16 or bfloat16 too; ``[n, 1]`` and ``[1, n]``; a generator.
    """
    if is_tensor(values):
        values = values.detach().cpu()
        values = values.double().numpy() if values.is_floating_point() else values.numpy()
    elif isinstance(values, Iterator):
        values = list(values)
    try:
        array = np.asarray(values)
    except ValueError:  # a ragged list
        return values
    if array.ndim == 2 and 1 in array.shape:
        array = array.ravel()
    if array.dtype.kind == "f":
        exact = array.astype(np.float64)
        if (exact == np.rint(exact)).all() and (np.abs(exact) <= _MOST_EXACT).all():
            array = exact.astype(np.int64)
    return array if array.ndim == 1 else values


def first_few(values: Sequence[object] | npt.NDArray[np.generic], most: int = 6) -> str:
    """Write the first values for a message: ``4, 5, 9, ...``."""
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")
