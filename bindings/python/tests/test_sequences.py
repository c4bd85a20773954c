"""Namespaces, sequences and what enters as integers."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from kvbm_rs import ExternalSequence, InvalidArgument, KvbmError, Namespace, TokenSequence

SPACE = Namespace("m", page_size=4)


def test_tokens_enter_as_lists_tuples_arrays_and_numpy() -> None:
    wanted = TokenSequence(SPACE, list(range(10))).hashes
    assert len(wanted) == 2 and all(len(hash) == 16 for hash in wanted)
    given: tuple[Any, ...] = (
        tuple(range(10)),
        array("i", range(10)),
        array("Q", range(10)),
        np.arange(10),
        np.arange(10, dtype=np.int32),
        np.arange(20, dtype=np.uint16)[:10],
        np.arange(0, 20, dtype=np.int64)[::2] // 2,
        memoryview(bytes(range(10))),
        range(10),
    )
    for tokens in given:
        assert TokenSequence(SPACE, tokens).hashes == wanted, type(tokens)


@pytest.mark.parametrize(
    "tokens",
    [[1, -1], [1 << 32], ["a"], [1.5], np.array([-1]), np.array([0.5]), np.zeros((2, 2), int)],
)
def test_what_is_no_token_is_named(tokens: object) -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        TokenSequence(SPACE, tokens)  # type: ignore[arg-type]


def test_a_sequence_grows_and_shrinks() -> None:
    sequence = TokenSequence(SPACE, [1, 2, 3])
    assert (len(sequence), sequence.num_blocks, sequence.tail, sequence.page_size) == (
        3,
        0,
        [1, 2, 3],
        4,
    )
    assert sequence.add_tokens([4, 5]) == 1
    first = sequence.hashes
    sequence.truncate(3)
    assert sequence.hashes == []
    sequence.add_tokens([4])
    assert sequence.hashes == first


def test_salts_images_extra_keys_and_namespaces_keep_blocks_apart() -> None:
    tokens = list(range(8))
    plain = TokenSequence(SPACE, tokens)
    salted = TokenSequence(SPACE, tokens, b"tenant")
    image = TokenSequence(SPACE)
    image.add_image(2, 3, b"picture")
    image.add_tokens(tokens)
    keyed = TokenSequence(SPACE)
    keyed.add_extra_key(4, b"adapter")
    keyed.add_tokens(tokens)
    others = [
        Namespace("n", page_size=4),
        Namespace("m", page_size=4, weights="2"),
        Namespace("m", page_size=4, adapter="a"),
        Namespace("m", page_size=4, kv_quantization="fp8"),
        Namespace("m", page_size=4, chain_root=b"seed"),
        Namespace("m", page_size=4, tenant_salt=b"t"),
    ]
    last = [sequence.hashes[1] for sequence in (plain, salted, image, keyed)]
    last += [TokenSequence(space, tokens).hashes[1] for space in others]
    assert len(set(last)) == len(last)
    assert keyed.hashes[0] == plain.hashes[0], "the extra key is the second block's"
    with pytest.raises(InvalidArgument, match="block 0"):
        keyed.add_extra_key(0, b"late")


def test_hashes_of_an_engine() -> None:
    root = Namespace("m", page_size=4, chain_root=b"r", persistent=False)
    assert not root.persistent and SPACE.persistent
    sequence = ExternalSequence(root, [b"a" * 32])
    assert sequence.push(b"b" * 32) == 2
    assert sequence.extend([b"c", b"d"]) == 4
    sequence.truncate(2)
    assert len(sequence) == 2 == len(sequence.hashes)
    assert sequence.hashes == ExternalSequence(root, [b"a" * 32, b"b" * 32]).hashes


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"page_size": 0}, "page_size 0"),
        ({"algorithm": "md5"}, "md5"),
        ({"persistent": False}, "chain_root"),
    ],
)
def test_a_namespace_that_makes_no_sense(keywords: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as raised:
        Namespace("m", **keywords)  # type: ignore[arg-type]
    assert isinstance(raised.value, KvbmError) and isinstance(raised.value, ValueError)
