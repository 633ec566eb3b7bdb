"""A device without one: tensors whose data is on the CPU and that say they are elsewhere.

In a block of ``with DeviceDouble() as double``, ``tensor.to(double.device)`` is a tensor on torch's
``meta`` device that keeps its values. As a CUDA tensor it has no ``numpy()``, is not mixed with
tensors on the CPU, and comes back by ``cpu()``, ``tolist()`` or ``item()``. Each is a host sync, as
is what copies to the device from memory that is not pinned: ``to(device)`` without
``non_blocking`` (``moved`` pins; ``tests/test_device_copies.py`` holds all copies to it), a number
or a list that is written into a tensor, a list as an index. ``double.syncs`` counts them by file,
line and operation. Autograd and jagged tensors work in the block.

``torch.tensor(..., device=double.device)`` is an error: PyTorch makes one without values.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

import megatron_lossagg

PACKAGE, TORCH = (Path(module.__file__).parent for module in (megatron_lossagg, torch))
READING_OPERATIONS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
TAKES_BOTH = {"copy_", "_to_copy", "index", "index_put_"}
"""Operations that take tensors of the CPU next to the device's."""


class OnDevice(torch.Tensor):
    """A tensor on the device; made by ``.to(double.device)``."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_cpu):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=DeviceDouble.device,
        )

    def __init__(self, on_cpu):
        self.on_cpu = on_cpu

    def __repr__(self):
        return f"OnDevice({self.on_cpu})"

    def tolist(self):
        """Copy to the CPU, which PyTorch's own does not do for a subclass."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if {*types} - {cls}:
            return NotImplemented  # for the jagged tensor
        raise RuntimeError(f"{function} of a device's tensor outside of its DeviceDouble")


class DeviceDouble(TorchDispatchMode):
    """The device, for as long as the block lasts."""

    device = torch.device("meta")

    def __init__(self):
        super().__init__()
        self.syncs = Counter()
        self._writes = _NumbersInPython(self)

    def __enter__(self):
        self._writes.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self._writes.__exit__(*raised)

    def waits(self, name):
        """Count a host sync where the package, or else a test, asked for it."""
        self.syncs[f"{_place()}: {name}"] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(type(t) not in (torch.Tensor, torch.nn.Parameter, OnDevice) for t in tensors):
            return NotImplemented  # a jagged tensor, which calls with its parts
        name = function.overloadpacket.__name__
        if any(t.device == self.device and not isinstance(t, OnDevice) for t in tensors):
            raise RuntimeError(f"{name}: got a tensor on the device without values: use to(device)")
        came = any(isinstance(t, OnDevice) for t in tensors)
        goes = came
        if kwargs.get("device") is not None:
            goes = torch.device(kwargs["device"]) == self.device
            kwargs["device"] = torch.device("cpu")
        if name == "copy_":
            goes = isinstance(args[0], OnDevice)
        if came and name not in TAKES_BOTH:
            self._check_one_device(name, tensors)
        if came and (not goes or name in READING_OPERATIONS or _selects(name, args)):
            self.waits(name)
        arrives = goes and not came if name == "_to_copy" else _overwrites(name, args)
        if arrives and not (kwargs.get("non_blocking") or args[2:] == (True,)):
            self.waits(f"{name} from memory that is not pinned")
        own = (args, kwargs)
        args, kwargs = tree_map_only(OnDevice, lambda t: t.on_cpu, own)
        if name == "_to_copy" and came != goes:
            out = function(*args, **kwargs)
            return OnDevice(out) if goes else out
        out = function(*args, **kwargs)
        if not goes:
            return out
        out = tree_map_only(torch.Tensor, OnDevice, out)
        return return_and_correct_aliasing(function, *own, out) if came else out

    def _check_one_device(self, name, tensors):
        """Refuse what CUDA refuses: a tensor of the CPU that is more than a number."""
        if any(not isinstance(t, OnDevice) and t.dim() for t in tensors):
            raise RuntimeError(
                f"{name}: got tensors on cpu and on the device, expected all on the same device"
            )


def _selects(name, args):
    """Whether it is an index by a mask, whose number of entries is read."""
    leaves = tree_leaves(args[1]) if name in ("index", "index_put_") else []
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in leaves)


def _overwrites(name, args):
    """Whether a tensor of the CPU is copied over one of the device."""
    return name == "copy_" and isinstance(args[0], OnDevice) and not isinstance(args[1], OnDevice)


class _NumbersInPython(TorchFunctionMode):
    """Sees what becomes a tensor of the CPU before it is dispatched: on meta, none is made."""

    def __init__(self, double):
        super().__init__()
        self.double = double

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        is_indexed = name in ("__setitem__", "__getitem__") and isinstance(args[0], OnDevice)
        if is_indexed and len(args) > 2 and not isinstance(args[2], torch.Tensor):
            self.double.waits("a number or list written into a tensor")
        if is_indexed and any(isinstance(part, list) for part in _parts(args[1])):
            self.double.waits("a list as an index")
        return function(*args, **(kwargs or {}))


def _parts(index):
    return index if isinstance(index, tuple) else (index,)


def _place():
    """Return ``file:line`` of the innermost frame in the package, or else outside of torch."""
    frame, outside = sys._getframe(1), None
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            return f"{file.relative_to(PACKAGE.parent)}:{frame.f_lineno}"
        if outside is None and str(file) != __file__ and not file.is_relative_to(TORCH):
            outside = f"{file.name}:{frame.f_lineno}"
        frame = frame.f_back
    return outside


DEVICES = pytest.mark.parametrize("device", ["cpu", "device"])


@contextmanager
def on(device):
    """Give a function that brings a tensor to the device; the device double counts its syncs."""
    if device == "cpu":
        yield lambda values: torch.as_tensor(values)
        return
    with DeviceDouble() as double:

        def to(values):
            return torch.as_tensor(values).to(double.device, non_blocking=True)

        to.syncs = double.syncs
        yield to
