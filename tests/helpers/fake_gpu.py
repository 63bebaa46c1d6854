"""Tensors that say they are on a GPU and have no memory, on a torch without CUDA.

Mixing devices in one operation fails as it would with a GPU, and so does a result on the wrong one.
"""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

FAKE_GPU = torch.device("cuda", 0)
"""With its index: without, torch asks the driver for the current device."""


class _Operators(TorchFunctionMode):
    """Calls operators in place of methods that ask the driver to change the current device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return _index(*args)
        if func is torch.Tensor.__setitem__:
            tensor, key, value = args
            return _fill(_index(tensor, key), value)
        if func is torch.Tensor.copy_:
            return _fill(*args)
        if func is torch.Tensor.contiguous:
            return torch.ops.aten.clone.default(*args, memory_format=torch.contiguous_format)
        kwargs = dict(kwargs or {})
        out = kwargs.pop("out", None)
        result = func(*args, **kwargs)
        return result if out is None else _fill(out, result)


def _fill(tensor, value):
    if isinstance(value, torch.Tensor):
        return torch.ops.aten.copy_.default(tensor, value)
    return torch.ops.aten.fill_.Scalar(tensor, value)


def _index(tensor, key):
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [each for each in keys if not isinstance(each, torch.Tensor)]:
        at = next(idx for idx, each in enumerate(keys) if each is Ellipsis)
        num_named = sum(each is not None and each is not Ellipsis for each in keys)
        keys[at : at + 1] = [slice(None)] * (tensor.dim() - num_named)
    dim = 0
    for each in keys:
        if each is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(each, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, each.start, each.stop, each.step or 1)
            dim += 1
        elif isinstance(each, torch.Tensor):
            tensor = torch.ops.aten.index.Tensor(tensor, [None] * dim + [each])
            dim += 1
        else:
            tensor = torch.select(tensor, dim, each)
    return tensor


@contextlib.contextmanager
def fake_gpu():
    """Make tensors of the body fake; those on FAKE_GPU and on the CPU do not mix."""
    with torch.inference_mode(), FakeTensorMode(), _Operators():
        yield FAKE_GPU
