"""From an engine's tensors to a `Layout`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._core import Layout
from .errors import InvalidArgument

__all__ = ["layout_of"]


def layout_of(tensors: Iterable[Any], *, page_size: int, block_axis: int = 0) -> Layout:
    """The layout of tensors that have one axis of blocks, one tensor for each layer.

    Takes `torch.Tensor` objects in host memory and numpy arrays. The bytes of a block must be
    contiguous in each tensor, in any order of
    the axes. The manager keeps the tensors alive.
    """
    layout: Layout | None = None
    for index, tensor in enumerate(tensors):
        address, shape, strides, item = _describe(tensor, index)
        if not shape or not -len(shape) <= block_axis < len(shape):
            raise InvalidArgument(f"tensor {index}: no axis {block_axis} in the shape {shape}")
        axis = block_axis % len(shape)
        inner = [
            (stride, size)
            for at, (stride, size) in enumerate(zip(strides, shape))
            if at != axis and size != 1
        ]
        elements = 1
        for stride, size in sorted(inner):
            if stride != elements:
                raise InvalidArgument(
                    f"tensor {index}: a block of shape {shape} and strides {strides} is not contiguous; "
                    "give tensors in which the bytes of a block lie together"
                )
            elements *= size
        num_blocks = shape[axis]
        if layout is None:
            layout = Layout(num_blocks, page_size)
        elif num_blocks != layout.num_blocks:
            raise InvalidArgument(
                f"tensor {index}: {num_blocks} blocks, and tensor 0 has {layout.num_blocks}"
            )
        block_bytes = elements * item
        block_stride = strides[axis] * item if num_blocks > 1 else block_bytes
        length = (num_blocks - 1) * block_stride + block_bytes
        layout.add(
            address, length, block_stride=block_stride, block_bytes=block_bytes, owner=tensor
        )
    if layout is None:
        raise InvalidArgument("no tensors: give the engine's KV tensors")
    return layout


def _describe(tensor: Any, index: int) -> tuple[int, list[int], list[int], int]:
    """Address, shape, strides in elements, and bytes of an element."""
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size"):
        device = str(getattr(tensor, "device", "cpu"))
        if device != "cpu":
            raise InvalidArgument(
                f"tensor {index}: memory of {device}; give tensors in host memory"
            )
        return tensor.data_ptr(), list(tensor.shape), list(tensor.stride()), tensor.element_size()
    interface = getattr(tensor, "__array_interface__", None)
    if interface is None:
        raise InvalidArgument(
            f"tensor {index}: {type(tensor).__name__} is neither a torch tensor nor a numpy array"
        )
    address, read_only = interface["data"]
    if read_only:
        raise InvalidArgument(f"tensor {index}: read-only memory; kvbm writes loaded blocks there")
    item = int(interface["typestr"][2:])
    shape = list(interface["shape"])
    strides = interface["strides"]
    if strides is None:
        strides, step = [], item
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
    if any(stride % item for stride in strides):
        raise InvalidArgument(
            f"tensor {index}: strides {list(strides)} are no multiples of {item} bytes"
        )
    return address, shape, [stride // item for stride in strides], item
