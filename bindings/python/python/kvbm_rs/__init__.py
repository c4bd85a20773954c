"""kvbm for engines that are written in Python.

A block manager keeps what an engine computed (keys and values of attention, in blocks of some
tokens) in host memory, on SSD and in blob
stores, and brings it back:

    config = Config()
    config.set("host.capacity", "8GiB")
    layout = layout_of(kv_tensors, page_size=16)
    with KvBlockManager(config, layout, Namespace("llama-3-8b", weights="2026-11-01")) as manager:
        tokens = TokenSequence(manager.namespace, prompt)
        found = manager.look_up("request-1", tokens)
        if found and found.blocks:
            manager.commit("request-1", block_ids[: found.blocks])
        ...
        manager.offload(block_ids, tokens)

The distribution is called `kvbm-rs`. `kvbm` on PyPI is another product; both fit into one
environment.
"""

from . import kernels
from ._core import (
    Config,
    Event,
    ExternalSequence,
    Fence,
    FinishedLoad,
    FinishedPlan,
    Gap,
    KvIndex,
    Layout,
    Namespace,
    OffloadStarted,
    Parked,
    Tensor,
    Ticket,
    TokenSequence,
    __version__,
)
from ._core import Events as Events
from .errors import (
    BuildFailed,
    BusyError,
    ClosedError,
    ConfigInvalid,
    ForkedError,
    InternalError,
    InvalidArgument,
    KvbmError,
    LostError,
    NoRoomError,
)
from .manager import KvBlockManager, Onboarding
from .metrics import Metrics
from .node import NodeEngine, NodeMover, NodeServer
from .tensors import layout_of
from .worker import Worker

__all__ = [
    "BuildFailed",
    "BusyError",
    "ClosedError",
    "Config",
    "ConfigInvalid",
    "Event",
    "Events",
    "ExternalSequence",
    "Fence",
    "FinishedLoad",
    "FinishedPlan",
    "ForkedError",
    "Gap",
    "InternalError",
    "InvalidArgument",
    "KvBlockManager",
    "KvIndex",
    "KvbmError",
    "Layout",
    "LostError",
    "Metrics",
    "Namespace",
    "NoRoomError",
    "NodeEngine",
    "NodeMover",
    "NodeServer",
    "OffloadStarted",
    "Onboarding",
    "Parked",
    "Tensor",
    "Ticket",
    "TokenSequence",
    "Worker",
    "__version__",
    "kernels",
    "layout_of",
]
