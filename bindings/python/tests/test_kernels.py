"""Conversions of blocks, against what the frameworks' own permutations give."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from kvbm_rs import InvalidArgument, Tensor, kernels

LAYERS, OUTER, HEADS, TOKENS, ELEMENTS = 3, 2, 4, 8, 16

NUMPY_TYPES = ["uint8", "float16", "float32", "float64"]


class NumpyArrays:
    """Arrays of numpy."""

    types = NUMPY_TYPES

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        return (np.random.default_rng(1).random(shape) * 200).astype(dtype)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, dtype=dtype)

    def permute(self, array: Any, axes: tuple[int, ...]) -> Any:
        return np.transpose(array, axes)

    def equal(self, one: Any, other: Any) -> bool:
        return bool(np.array_equal(one, other))


class TorchTensors:
    """Tensors of torch, where it is installed."""

    types = ["uint8", "float16", "bfloat16", "float32", "float64"]

    def __init__(self) -> None:
        self.torch: Any = pytest.importorskip("torch")

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        generator = self.torch.Generator().manual_seed(1)
        values = self.torch.rand(shape, generator=generator) * 200
        return values.to(getattr(self.torch, dtype))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.zeros(shape, dtype=getattr(self.torch, dtype))

    def permute(self, tensor: Any, axes: tuple[int, ...]) -> Any:
        return tensor.permute(axes)

    def equal(self, one: Any, other: Any) -> bool:
        return bool(self.torch.equal(one, other))


@pytest.fixture(params=[NumpyArrays, TorchTensors], ids=["numpy", "torch"])
def arrays(request: pytest.FixtureRequest) -> Any:
    return request.param()


def parts(whole: Any) -> list[Any]:
    """The tensors of a block, out of `[layers, outer, ...]`."""
    return [whole[layer, part] for layer in range(LAYERS) for part in range(OUTER)]


@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_every_form_becomes_every_other_as_a_permutation_does(arrays: Any, order: str) -> None:
    inner = (TOKENS, HEADS) if order == "nhd" else (HEADS, TOKENS)
    stack = (LAYERS, OUTER, *inner, ELEMENTS)
    # [layers, outer, (tokens, heads | heads, tokens), elements] and back.
    to_universal = (3, 0, 1, 2, 4) if order == "nhd" else (2, 0, 1, 3, 4)
    for dtype in arrays.types:
        sources = [arrays.random(stack, dtype), arrays.random(stack, dtype) + 1]
        blocks = [parts(source) for source in sources]
        expected = [arrays.permute(source, to_universal) for source in sources]
        universals = [
            arrays.empty((HEADS, LAYERS, OUTER, TOKENS, ELEMENTS), dtype) for _ in sources
        ]
        kernels.block_to_universal(blocks, universals, order=order)
        assert all(itertools.starmap(arrays.equal, zip(universals, expected))), dtype
        back = [arrays.empty(stack, dtype) for _ in sources]
        kernels.universal_to_block(universals, [parts(block) for block in back], order=order)
        assert all(itertools.starmap(arrays.equal, zip(back, sources))), dtype

        flat = (LAYERS, OUTER, TOKENS * HEADS * ELEMENTS)
        operationals = [arrays.empty(flat, dtype) for _ in sources]
        kernels.block_to_operational(blocks, operationals)
        assert all(
            arrays.equal(operational, source.reshape(flat))
            for operational, source in zip(operationals, sources)
        )
        back = [arrays.empty(stack, dtype) for _ in sources]
        kernels.operational_to_block(operationals, [parts(block) for block in back])
        assert all(itertools.starmap(arrays.equal, zip(back, sources))), dtype

        again = [arrays.empty(flat, dtype) for _ in sources]
        kernels.universal_to_operational(universals, again, order=order)
        assert all(itertools.starmap(arrays.equal, zip(again, operationals))), dtype
        universals_again = [
            arrays.empty((HEADS, LAYERS, OUTER, TOKENS, ELEMENTS), dtype) for _ in sources
        ]
        kernels.operational_to_universal(operationals, universals_again, order=order)
        assert all(itertools.starmap(arrays.equal, zip(universals_again, expected))), dtype


def test_blocks_of_an_engines_tensors_are_converted_in_place() -> None:
    kv = np.random.default_rng(2).random((LAYERS, 2, 5, TOKENS, HEADS, ELEMENTS))
    before = kv.copy()
    chosen = [3, 1]
    blocks = [
        [kv[layer, part, block] for layer in range(LAYERS) for part in range(2)] for block in chosen
    ]
    universals = np.zeros((2, HEADS, LAYERS, 2, TOKENS, ELEMENTS))
    kernels.block_to_universal(blocks, list(universals))
    for at, block in enumerate(chosen):
        assert np.array_equal(universals[at], kv[:, :, block].transpose(3, 0, 1, 2, 4))
    kernels.universal_to_block(list(universals[::-1]), blocks)
    assert np.array_equal(kv[:, :, 3], before[:, :, 1])
    assert np.array_equal(kv[:, :, [0, 2, 4]], before[:, :, [0, 2, 4]]), "others are not touched"


def test_no_blocks_are_fine() -> None:
    kernels.block_to_universal([], [])
    kernels.operational_to_block([], [])


def good() -> tuple[list[list[Any]], list[Any]]:
    whole = np.ones((LAYERS, OUTER, TOKENS, HEADS, ELEMENTS), dtype=np.float32)
    universal = np.zeros((HEADS, LAYERS, OUTER, TOKENS, ELEMENTS), dtype=np.float32)
    return [parts(whole)], [universal]


def test_what_is_wrong_is_named_with_shape_type_and_place() -> None:
    blocks, universals = good()
    memory = np.zeros(1 << 16, dtype=np.float32)
    on_device = Tensor(
        memory.ctypes.data,
        [TOKENS, HEADS, ELEMENTS],
        dtype="float32",
        device="cuda:1",
        owner=memory,
    )
    read_only = universals[0].copy()
    read_only.flags.writeable = False
    apart = np.zeros((TOKENS, HEADS, 2 * ELEMENTS), dtype=np.float32)[:, :, ::2]
    other_order = np.zeros((HEADS, TOKENS, ELEMENTS), dtype=np.float32).transpose(1, 0, 2)
    cases: list[tuple[list[list[Any]], list[Any], str]] = [
        (
            [blocks[0][:5]],
            universals,
            "sources: 5 chunks, but each block in stacked NHD form has 6",
        ),
        (blocks, [*universals, universals[0].copy()], "sources are 1 blocks, destinations 2"),
        (
            [[*blocks[0][:5], blocks[0][5].astype(np.float16)]],
            universals,
            "sources, tensor 5: float16, expected float32",
        ),
        (
            [[*blocks[0][:5], blocks[0][5][:4]]],
            universals,
            r"sources: tensor 5: shape \[4, 4, 16\], expected \[8, 4, 16\]",
        ),
        (
            [[apart, *blocks[0][1:]]],
            universals,
            r"sources: tensor 0: strides \[128, 32, 2\].*make the tensor contiguous",
        ),
        ([[other_order, *blocks[0][1:]]], universals, "strides of the other axis order"),
        (
            [[*blocks[0][:5], on_device]],
            universals,
            r"sources, tensor 5: float32 of shape \[8, 4, 16\] in memory of cuda:1",
        ),
        (blocks, [read_only], "destinations, tensor 0: read-only memory"),
        (blocks, [universals[0][0]], "universals, tensor 0: shape"),
        (
            blocks,
            [universals[0].astype(np.complex128)],
            "expected float32|elements of 1, 2, 4 or 8",
        ),
    ]
    for sources, destinations, text in cases:
        with pytest.raises(InvalidArgument, match=text):
            kernels.block_to_universal(sources, destinations)
    with pytest.raises(InvalidArgument, match="order 'dhn': give 'nhd' or 'hnd'"):
        kernels.block_to_universal(blocks, universals, order="dhn")
    with pytest.raises(InvalidArgument, match="list has no __dlpack__|no __dlpack__"):
        kernels.block_to_universal([[[1], *blocks[0][1:]]], universals)
    with pytest.raises(InvalidArgument, match="1 blocks and 0 operationals"):
        kernels.block_to_operational(blocks, [])
    assert not universals[0].any(), "nothing was written"


def test_destinations_share_no_bytes() -> None:
    blocks, universals = good()
    flat = np.zeros(2 * universals[0].size, dtype=np.float32)
    shape = universals[0].shape
    overlapping = [
        flat[: universals[0].size].reshape(shape),
        flat[64 : 64 + universals[0].size].reshape(shape),
    ]
    with pytest.raises(InvalidArgument, match="destinations, tensor 1: it shares bytes"):
        kernels.block_to_universal(blocks * 2, overlapping)
    inside = flat[: universals[0].size].reshape(LAYERS, OUTER, TOKENS, HEADS, ELEMENTS)
    with pytest.raises(InvalidArgument, match="shares bytes"):
        kernels.block_to_universal([parts(inside)], [overlapping[0]])
    kernels.block_to_universal(blocks * 2, [universals[0], universals[0].copy()])
