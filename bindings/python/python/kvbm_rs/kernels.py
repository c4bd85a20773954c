"""Conversions between the forms of a KV block, on tensors in host memory.

A block has `layers` layers, `outer` parts of each (2: keys and values; 1: MLA), `heads` heads,
`tokens` tokens and `elements` elements of a head. Its forms:

* **block**: a tensor for each layer and outer part, layer by layer: `[tokens, heads, elements]`
  (`order="nhd"`) or `[heads, tokens, elements]` (`order="hnd"`). So engines keep it.
* **operational**: one tensor `[layers, outer, tokens * heads * elements]`: the tensors of a block
  one behind the other.
* **universal**: one tensor `[heads, layers, outer, tokens, elements]`. The part of a tensor
  parallel rank is a contiguous slice of it.

Each function takes several blocks: `blocks[b]` is the list of the tensors of block `b`. Tensors are
`kvbm_rs.Tensor` objects or whatever speaks DLPack (torch, numpy, JAX), contiguous, of one type of
1, 2, 4 or 8 bytes, in host memory. The destinations are written; nobody else may touch any of the
tensors during the call, which runs without the GIL. What is wrong with a tensor is an
`InvalidArgument` that names it, and nothing is written then.

    blocks = [[kv[layer][part][b] for layer in range(32) for part in range(2)] for b in (3, 7)]
    universals = [torch.empty(8, 32, 2, 16, 128, dtype=torch.bfloat16) for _ in blocks]
    block_to_universal(blocks, universals)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._core import Tensor, convert_blocks
from .errors import InvalidArgument

__all__ = [
    "block_to_operational",
    "block_to_universal",
    "operational_to_block",
    "operational_to_universal",
    "universal_to_block",
    "universal_to_operational",
]


def block_to_universal(
    blocks: Sequence[Sequence[Any]], universals: Sequence[Any], *, order: str = "nhd"
) -> None:
    """Writes block `b` to `universals[b]`."""
    shape = _universal(universals, "universals")
    convert_blocks(shape, _checked(order), _flat(blocks), "universal", universals)


def universal_to_block(
    universals: Sequence[Any], blocks: Sequence[Sequence[Any]], *, order: str = "nhd"
) -> None:
    """Writes `universals[b]` to the tensors of block `b`."""
    shape = _universal(universals, "universals")
    convert_blocks(shape, "universal", universals, _checked(order), _flat(blocks))


def block_to_operational(blocks: Sequence[Sequence[Any]], operationals: Sequence[Any]) -> None:
    """Writes block `b` to `operationals[b]`. The tensors of a block are copied as they are, in
    whatever order their tokens and heads lie.
    """
    shape = _operational(blocks, operationals)
    convert_blocks(shape, "nhd", _flat(blocks), "operational_nhd", operationals)


def operational_to_block(operationals: Sequence[Any], blocks: Sequence[Sequence[Any]]) -> None:
    """Writes `operationals[b]` to the tensors of block `b`, as they are."""
    shape = _operational(blocks, operationals)
    convert_blocks(shape, "operational_nhd", operationals, "nhd", _flat(blocks))


def universal_to_operational(
    universals: Sequence[Any], operationals: Sequence[Any], *, order: str = "nhd"
) -> None:
    """Writes `universals[b]` to `operationals[b]`, whose tokens and heads lie in this order."""
    shape = _universal(universals, "universals")
    convert_blocks(shape, "universal", universals, f"operational_{_checked(order)}", operationals)


def operational_to_universal(
    operationals: Sequence[Any], universals: Sequence[Any], *, order: str = "nhd"
) -> None:
    """Writes `operationals[b]`, whose tokens and heads lie in this order, to `universals[b]`."""
    shape = _universal(universals, "universals")
    convert_blocks(shape, f"operational_{_checked(order)}", operationals, "universal", universals)


def _checked(order: str) -> str:
    if order not in ("nhd", "hnd"):
        raise InvalidArgument(f"order {order!r}: give 'nhd' or 'hnd'")
    return order


def _flat(blocks: Sequence[Sequence[Any]]) -> list[Any]:
    return [tensor for block in blocks for tensor in block]


def _universal(universals: Sequence[Any], name: str) -> list[int]:
    """Layers, outer parts, heads, tokens and elements."""
    if not universals:
        return [1, 1, 1, 1, 1]
    shape = Tensor.of(universals[0]).shape
    if len(shape) != 5:
        raise InvalidArgument(
            f"{name}, tensor 0: shape {shape}, expected [heads, layers, outer, tokens, elements]"
        )
    heads, layers, outer, tokens, elements = shape
    return [layers, outer, heads, tokens, elements]


def _operational(blocks: Sequence[Sequence[Any]], operationals: Sequence[Any]) -> list[int]:
    """As `_universal`, with the first two axes of a block's tensors for tokens and heads."""
    if len(blocks) != len(operationals):
        raise InvalidArgument(
            f"{len(blocks)} blocks and {len(operationals)} operationals: give as many of each"
        )
    if not blocks or not blocks[0]:
        return [1, 1, 1, 1, 1]
    whole, part = Tensor.of(operationals[0]).shape, Tensor.of(blocks[0][0]).shape
    if len(whole) != 3:
        raise InvalidArgument(
            f"operationals, tensor 0: shape {whole}, expected [layers, outer, tokens * heads * elements]"
        )
    if len(part) != 3:
        raise InvalidArgument(
            f"blocks, tensor 0: shape {part}, expected [tokens, heads, elements] or [heads, tokens, elements]"
        )
    return [whole[0], whole[1], part[1], part[0], part[2]]
