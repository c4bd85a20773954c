"""From an engine's tensors to a `Layout`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._core import Layout, Tensor
from .errors import InvalidArgument

__all__ = ["layout_of"]


def layout_of(tensors: Iterable[Any], *, page_size: int, block_axis: int = 0) -> Layout:
    """The layout of tensors that have one axis of blocks, one tensor for each layer.

    Takes `Tensor` objects, and whatever speaks DLPack: torch, numpy, CuPy, JAX. All lie in host
    memory, or on one CUDA device. The bytes of a block must lie together in each tensor, in any
    order of the other axes. The manager keeps the tensors alive.
    """
    layout: Layout | None = None
    for index, tensor in enumerate(tensors):
        view = tensor if isinstance(tensor, Tensor) else _view(tensor, index)
        if layout is None:
            shape = view.shape
            if not -len(shape) <= block_axis < len(shape):
                raise InvalidArgument(f"tensor {index}: no axis {block_axis} in the shape {shape}")
            layout = Layout(shape[block_axis], page_size)
        layout.add_tensor(view, block_axis=block_axis)
    if layout is None:
        raise InvalidArgument("no tensors: give the engine's KV tensors")
    return layout


def _view(tensor: Any, index: int) -> Tensor:
    try:
        return Tensor.of(tensor)
    except InvalidArgument as error:
        raise InvalidArgument(f"tensor {index}: {error}") from None
