"""Tensors through DLPack and by address, and layouts of them."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from kvbm_rs import (
    Config,
    InvalidArgument,
    KvBlockManager,
    Layout,
    Namespace,
    Tensor,
    TokenSequence,
    layout_of,
)


def test_a_view_says_what_the_array_is() -> None:
    whole = np.zeros((6, 4, 8), dtype=np.float32)
    part = whole[1:4, :, ::2]
    view = Tensor.of(part)
    assert view.address == part.ctypes.data and view.device == "cpu" and view.dtype == "float32"
    assert (view.shape, view.strides) == ([3, 4, 4], [32, 8, 2])
    assert Tensor.of(view) is view, "a view is returned as it is"
    assert "float32" in repr(view) and "[3, 4, 4]" in repr(view)
    assert Tensor.of(np.zeros(3, dtype=np.uint8)).dtype == "uint8"
    assert Tensor.of(np.zeros(())).shape == []


def test_an_array_lives_as_long_as_its_view() -> None:
    array = np.zeros((4, 64), dtype=np.uint8)
    gone = weakref.ref(array)
    view: Tensor | None = Tensor.of(array)
    del array
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_arrays_live_as_long_as_the_manager() -> None:
    array = np.zeros((4, 64), dtype=np.uint8)
    gone = weakref.ref(array)
    config = Config()
    config.set("host.capacity", "8")
    config.set("host.pinned", "false")
    manager = KvBlockManager(config, layout_of([array], page_size=4), Namespace("m", page_size=4))
    del array
    gc.collect()
    assert gone() is not None
    manager.close()
    del manager
    gc.collect()
    assert gone() is None


class Described(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = [("tensor", Described), ("manager", ctypes.c_void_p), ("deleter", _DELETER)]


class Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", _DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Described),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = (
    ctypes.py_object,
    [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
)


class Producer:
    """A framework of which every field can be wrong."""

    def __init__(self, *, version: tuple[int, int] | None = (1, 0), **wrong: Any) -> None:
        self.memory = np.zeros(4096, dtype=np.uint8)
        self.deleted = 0
        self.asked: list[dict[str, Any]] = []
        self._deleter = _DELETER(self._delete)
        shape = wrong.pop("shape", (4, 8))
        strides = wrong.pop("strides", None)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        fields: dict[str, Any] = {
            "data": self.memory.ctypes.data,
            "device_type": 1,
            "device_id": 0,
            "ndim": len(shape),
            "code": 2,
            "bits": 32,
            "lanes": 1,
            "shape": self._shape,
            "strides": self._strides,
            "byte_offset": 0,
        }
        self.device = wrong.pop("says", (1, 0))
        flags, self._name = wrong.pop("flags", 0), wrong.pop("name", None)
        tensor = Described(**(fields | wrong))
        self._managed: Any
        if version is None:
            self._managed = Managed(tensor, None, self._deleter)
        else:
            self._managed = Versioned(*version, None, self._deleter, flags, tensor)
        self._is_versioned = version is not None

    def _delete(self, _managed: int) -> None:
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device  # type: ignore[no-any-return]

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        if not self._is_versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        # A capsule does not copy its name.
        self._name = self._name or (b"dltensor_versioned" if self._is_versioned else b"dltensor")
        return _new_capsule(ctypes.addressof(self._managed), self._name, None)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 9)])
def test_a_tensor_is_given_back_once(version: tuple[int, int] | None) -> None:
    producer = Producer(version=version, byte_offset=256)
    view = Tensor.of(producer)
    assert (view.address, view.shape) == (producer.memory.ctypes.data + 256, [4, 8])
    assert view.strides == [8, 1], "no strides are C order"
    assert producer.deleted == 0
    layout = Layout(4, 4)
    layout.add_tensor(view)
    del view
    gc.collect()
    assert producer.deleted == 0, "the layout keeps it"
    del layout
    gc.collect()
    assert producer.deleted == 1
    asked = [{"max_version": (1, 1)}] + ([] if version else [{}])
    assert producer.asked == asked


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"version": (2, 0)}, r"DLPack 2\.0: versions 0 and 1 are known"),
        ({"name": b"used_dltensor_versioned"}, "no capsule with a tensor, or one that was taken"),
        ({"name": b"something"}, "no capsule with a tensor"),
        ({"ndim": -1}, "-1 axes"),
        ({"ndim": 65}, "65 axes"),
        ({"shape": (4, -8)}, "size -8 of axis 1"),
        ({"strides": (8, -1)}, "stride -1 of axis 1"),
        ({"bits": 4}, "elements of 4 bits"),
        ({"bits": 0}, "elements of 0 bits"),
        ({"lanes": 2}, "2 lanes"),
        ({"byte_offset": 2**64 - 1}, "byte offset"),
        ({"shape": (2**62, 2**62)}, "beyond the address space"),
        ({"strides": (2**62, 1)}, "beyond the address space"),
        ({"data": None}, "address 0"),
        ({"shape": (4,), "ndim": 1, "device_type": 10, "says": (10, 0)}, "DLPack device type 10"),
        ({"device_type": 2, "says": (2, -1)}, "DLPack device type 2, number -1"),
        ({"device_type": 2}, "its __dlpack_device__ says cpu, its capsule cuda:0"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_named_and_it_is_given_back(
    wrong: dict[str, Any], text: str
) -> None:
    producer = Producer(**wrong)
    with pytest.raises(InvalidArgument, match=text):
        Tensor.of(producer)
    gc.collect()
    is_taken = not any(name in wrong for name in ("version", "name")) and wrong.get(
        "says", (1, 0)
    ) == (1, 0)
    assert producer.deleted == int(is_taken)


def test_an_empty_tensor_needs_no_memory() -> None:
    view = Tensor.of(Producer(data=None, shape=(0, 8)))
    assert view.shape == [0, 8]


def test_objects_that_are_no_tensors() -> None:
    with pytest.raises(InvalidArgument, match="list has no __dlpack__"):
        Tensor.of([1, 2])

    class Refuses:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_options: Any) -> Any:
            raise BufferError("requires grad")

    with pytest.raises(InvalidArgument, match="refuses: requires grad; give a detached"):
        layout_of([Refuses()], page_size=4)
    with pytest.raises(InvalidArgument, match="tensor 0: object has no __dlpack__"):
        layout_of([object()], page_size=4)


def test_a_tensor_by_address() -> None:
    memory = np.zeros((4, 64), dtype=np.uint16)
    view = Tensor(memory.ctypes.data, [4, 64], dtype="bfloat16", owner=memory)
    assert (view.strides, view.dtype) == ([64, 1], "bfloat16")
    apart = Tensor(memory.ctypes.data, [4, 8], strides=[64, 1], dtype="torch.uint16", owner=memory)
    layout = layout_of([view], page_size=4)
    assert (layout.num_blocks, layout.block_bytes, layout.device) == (4, 128, "cpu")
    assert layout_of([apart], page_size=4).block_bytes == 16
    for wrong, text in (
        ({"dtype": "float7"}, "dtype 'float7'|dtype \"float7\""),
        ({"dtype": "uint8", "device": "tpu"}, "device \"tpu\": give 'cpu'"),
        ({"dtype": "uint8", "strides": [1]}, "1 strides for the shape"),
        ({"dtype": "uint8", "strides": [2**63, 1]}, "beyond the address space"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            Tensor(memory.ctypes.data, [4, 64], owner=memory, **wrong)
    with pytest.raises(InvalidArgument, match="address 0"):
        Tensor(0, [4, 64], dtype="uint8", owner=memory)


def test_tensors_of_torch_are_what_torch_says() -> None:
    torch: Any = pytest.importorskip("torch")
    for dtype in ("uint8", "float16", "bfloat16", "float32", "float8_e4m3fn"):
        whole = torch.zeros(6, 4, 8, dtype=getattr(torch, dtype))
        part = whole[1:5]
        view = Tensor.of(part)
        assert (view.address, view.device) == (part.data_ptr(), "cpu"), dtype
        assert (view.shape, view.strides) == (list(part.shape), list(part.stride())), dtype
        layout = layout_of([part], page_size=4)
        assert (layout.num_blocks, layout.block_bytes) == (4, 32 * part.element_size()), dtype
    permuted = torch.zeros(4, 8, 6).permute(2, 0, 1)
    with pytest.raises(InvalidArgument, match="is not contiguous"):
        layout_of([permuted], page_size=4)
    assert layout_of([permuted], page_size=4, block_axis=1).num_blocks == 4
    with pytest.raises(InvalidArgument, match="grad"):
        Tensor.of(torch.zeros(4, 8, requires_grad=True))


def test_a_block_of_torch_comes_back_as_it_was() -> None:
    torch: Any = pytest.importorskip("torch")
    tensors = [torch.randn(8, 2, 4, 16).to(torch.bfloat16) for _ in range(2)]
    before = [tensor.clone() for tensor in tensors]
    config = Config()
    config.set("host.capacity", "8")
    config.set("host.pinned", "false")
    config.set("policy.admission", "all")
    with KvBlockManager(
        config, layout_of(tensors, page_size=4), Namespace("m", page_size=4)
    ) as manager:
        tokens = TokenSequence(manager.namespace, list(range(8)))
        assert manager.offload([3, 1], tokens).started == 2
        assert manager.wait_offloads(20)
        assert manager.look_up("r", tokens) is not None
        assert manager.load("r", [6, 7]).wait(20).arrived == 2
    for tensor, was in zip(tensors, before):
        assert torch.equal(tensor[6], was[3]) and torch.equal(tensor[7], was[1])
        assert torch.equal(tensor[:6], was[:6]), "others are not touched"


def test_layouts_of_tensors_that_make_no_sense() -> None:
    blocks = np.zeros((4, 2, 8), dtype=np.float32)
    for tensors, axis, text in (
        ([blocks, np.zeros((5, 8))], 0, "tensor 1: 5 blocks, and the layout has 4"),
        ([blocks], 3, r"tensor 0: no axis 3 in the shape \[4, 2, 8\]"),
        ([np.zeros(())], 0, "tensor 0: no axis 0"),
        (
            [np.zeros((4, 8, 8), dtype=np.float16)[:, :, ::2]],
            0,
            r"tensor 0: a block of the shape \[4, 8, 4\], strides \[64, 8, 2\] of float16 on cpu, is not contiguous",
        ),
    ):
        with pytest.raises(InvalidArgument, match=text):
            layout_of(tensors, page_size=4, block_axis=axis)
    second = layout_of([blocks[:1]], page_size=4, block_axis=-2)
    assert second.num_blocks == 2, "an axis counts from the end too"
    mixed = Layout(4, 4)
    mixed.add(1 << 40, 1 << 20, block_stride=64, block_bytes=64, owner=None, device="cuda:0")
    assert mixed.device == "cuda:0"
    with pytest.raises(InvalidArgument, match="memory of cpu, and tensor 0 lies on cuda:0"):
        mixed.add_tensor(blocks)
