from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, final

from typing_extensions import Buffer, disjoint_base

__version__: str

@final
class Config:
    """Every setting of a manager: docs/config.md has the reference.

    `Config()` holds the defaults; `Config.load(path)` reads a TOML file, then `KVBM_*` variables.
    """

    def __init__(self) -> None: ...
    @staticmethod
    def from_toml(text: str, name: str = "<string>") -> Config:
        """The settings of a TOML text; `name` names it in errors."""
    @staticmethod
    def load(path: str | PathLike[str] | None = None) -> Config:
        """The defaults, then the file, then the process's `KVBM_*` variables; checked."""
    def set(self, key: str, value: str) -> None:
        """Sets one key, such as `"host.capacity"`, from text, as a `KVBM_*` variable would."""
    def apply_environment(self) -> None:
        """Applies `KVBM_*` variables of the process."""
    def to_toml(self) -> str:
        """The settings as TOML, without secrets and unset settings."""

@final
class Namespace:
    """What must be equal, beside the tokens, for two blocks to be the same: model, weights, dtype,
    page size, adapter, tenant. Blocks of different namespaces never meet.
    """

    def __new__(
        cls,
        model: str,
        *,
        weights: str = "",
        dtype: str = "",
        page_size: int = 16,
        rope_scaling: str | None = None,
        kv_quantization: str | None = None,
        adapter: str | None = None,
        tenant_salt: bytes | None = None,
        algorithm: str = "blake3",
        chain_root: bytes | None = None,
        persistent: bool = True,
        deployment_secret: bytes | None = None,
        flat: bool = False,
    ) -> Namespace: ...
    def with_adapter(self, adapter: str) -> Namespace:
        """The same with an adapter, such as `LoRA`: its name and what it holds, in any fixed spelling."""
    def with_config(self, config: Config) -> Namespace:
        """The same with what an operator adds in `[namespace]` of `config`: `weights`, `tenant_salt`
        and `deployment_secret`. Any other setting there is an error. A manager does it by itself.
        """
    @property
    def tag(self) -> bytes:
        """The 16 bytes that stand for the namespace in every block's identity."""
    @property
    def model(self) -> str:
        """The model id."""
    @property
    def page_size(self) -> int:
        """Tokens of a block."""
    @property
    def flat(self) -> bool:
        """Whether blocks have no parents."""
    @property
    def persistent(self) -> bool:
        """Whether its hashes mean anything to another process."""

@final
class TokenSequence:
    """The tokens of a request and the hashes of its blocks."""

    def __new__(
        cls,
        namespace: Namespace,
        tokens: Sequence[int] | Buffer | None = None,
        salt: bytes | None = None,
    ) -> TokenSequence: ...
    def add_tokens(self, tokens: Sequence[int] | Buffer) -> int:
        """Adds tokens. How many blocks are complete now."""
    def add_image(self, first: int, count: int, content_hash: bytes) -> None:
        """Adds an image (or audio, video) under the tokens `first..first + count`: whoever has another
        one there has other blocks.
        """
    def add_extra_key(self, at: int, key: bytes) -> None:
        """Adds bytes to the hash of the block of token `at`, which must not be complete yet."""
    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""
    @property
    def num_blocks(self) -> int:
        """Complete blocks."""
    @property
    def page_size(self) -> int:
        """Tokens of a block."""
    @property
    def hashes(self) -> list[bytes]:
        """The sequence hash of each complete block, 16 bytes each."""
    @property
    def tail(self) -> list[int]:
        """The tokens behind the last complete block."""
    def __len__(self) -> int: ...

@final
class ExternalSequence:
    """The blocks of a request that the engine hashed itself, first block first."""

    def __new__(
        cls, namespace: Namespace, engine_hashes: Sequence[bytes] = ()
    ) -> ExternalSequence: ...
    def push(self, engine_hash: bytes) -> int:
        """Adds the engine's hash of the next block. How many blocks there are now."""
    def extend(self, engine_hashes: Sequence[bytes]) -> int:
        """Adds the engine's hashes of the next blocks. How many blocks there are now."""
    def truncate(self, blocks: int) -> None:
        """Keeps the first `blocks` blocks."""
    @property
    def num_blocks(self) -> int:
        """Blocks."""
    @property
    def hashes(self) -> list[bytes]:
        """The sequence hash of each block, 16 bytes each."""
    def __len__(self) -> int: ...

@final
class Tensor:
    """A view of memory that somebody else owns: where it lies, what it holds, and what keeps it alive.

    `Tensor.of(tensor)` takes whatever speaks DLPack: torch, numpy, CuPy, JAX. The constructor takes
    an address. Strides count elements, as torch's do.
    """

    def __new__(
        cls,
        address: int,
        shape: Sequence[int],
        *,
        dtype: str,
        owner: Any,
        strides: Sequence[int] | None = None,
        device: str = "cpu",
    ) -> Tensor: ...
    @staticmethod
    def of(tensor: Any) -> Tensor:
        """A view of whatever speaks DLPack. A `Tensor` is returned as it is."""
    @property
    def address(self) -> int:
        """Where the first element lies."""
    @property
    def shape(self) -> list[int]:
        """Elements along each axis."""
    @property
    def strides(self) -> list[int]:
        """Elements from one to its neighbour along each axis."""
    @property
    def dtype(self) -> str:
        """Type of the elements, such as `"bfloat16"`."""
    @property
    def device(self) -> str:
        """`"cpu"`, or `"cuda:0"` and so on."""
    @property
    def read_only(self) -> bool:
        """Whether its owner refuses writes."""

@final
class Layout:
    """Where the engine's blocks lie, in host memory or on one CUDA device: for each tensor an address,
    a block stride and a number of bytes. A block is the bytes at its place in every tensor; kvbm
    copies them as they are and knows no axes.

    A model whose layers cache differently has several cache groups (`begin_group`). They share the
    block ids: an id means a block of one group at a time, so tensors of groups may overlap.
    """

    def __new__(cls, num_blocks: int, page_size: int) -> Layout: ...
    def add(
        self,
        address: int,
        length: int,
        *,
        block_stride: int,
        block_bytes: int,
        owner: Any,
        device: str = "cpu",
    ) -> None:
        """Adds a tensor: block `i` is the `block_bytes` bytes at `address + i * block_stride`. The
        memory is `length` bytes long and stays valid while `owner` lives, which the manager keeps
        alive. `device` is `"cpu"`, or `"cuda:0"` and so on, one for all tensors of a layout.

        Whoever calls this promises that the address is right: kvbm reads and writes there.
        """
    def add_tensor(self, tensor: Any, *, block_axis: int = 0) -> None:
        """Adds a tensor with one axis of blocks: a `Tensor`, or whatever speaks DLPack. The bytes of a
        block must lie together, in any order of the other axes. The manager keeps the tensor alive.
        """
    def begin_group(self, kind: str) -> None:
        """The tensors that are added from now on are those of a cache group of this kind: `"full"`
        (each token's data, of all tokens), `"window=TOKENS"` (of the last tokens) or `"state"` (a
        state after the block's last token). Tensors of one group have blocks of the same bytes.
        Without a call, all tensors are one `"full"` group.
        """
    @staticmethod
    def of_workers(
        num_blocks: int,
        page_size: int,
        tensor_bytes: Sequence[int] = (),
        *,
        groups: Sequence[tuple[str, Sequence[int]]] = (),
    ) -> Layout:
        """The layout of blocks that workers in other processes hold: `tensor_bytes[i]` bytes of each
        block lie in tensor `i` of every rank. For `KvBlockManager(..., workers=...)`. Of a model
        with several cache groups give `groups`: for each its kind, as `begin_group` takes it, and
        its `tensor_bytes`.
        """
    @property
    def num_blocks(self) -> int:
        """Blocks."""
    @property
    def page_size(self) -> int:
        """Tokens of a block."""
    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all tensors; of the longest group's block, where there are several."""
    @property
    def daemon_model(self) -> str:
        """What a node daemon has to be told of these blocks: the section `[model]` of its
        configuration.
        """
    @property
    def tensor_bytes(self) -> list[int]:
        """Bytes of a block in each tensor: what `of_workers` takes."""
    @property
    def groups(self) -> list[tuple[str, list[int]]]:
        """Kind of each cache group, and bytes of its block in each of its tensors: what `of_workers`
        takes as `groups`. Empty for a layout without `begin_group`.
        """
    @property
    def num_tensors(self) -> int:
        """Tensors of all groups."""
    @property
    def replicas(self) -> int:
        """Ranks, one after another, whose tensors hold the same bytes: all ranks with MLA, those that
        share a KV head else. Disk and volumes then have one copy of their blocks. 1 unless it is
        set; it must divide the number of ranks.
        """
    @replicas.setter
    def replicas(self, replicas: int) -> None:
        """Ranks, one after another, whose tensors hold the same bytes: all ranks with MLA, those that
        share a KV head else. Disk and volumes then have one copy of their blocks. 1 unless it is
        set; it must divide the number of ranks.
        """
    @property
    def device(self) -> str | None:
        """`"cpu"`, or the device that the tensors lie on; `None` before there is one, or where they
        are in workers' processes.
        """

@final
class Ticket:
    """What a look-up promises to its request: so many blocks from the first that the engine lacks."""

    @property
    def blocks(self) -> int:
        """Blocks."""
    @property
    def by_tier(self) -> list[int]:
        """Of these, blocks by tier, G1 to G4."""
    @property
    def groups(self) -> list[tuple[int, int]]:
        """For each cache group the first of the sequence's blocks that a load brings, and the one
        behind the last; empty where nothing was found.
        """

@final
class FinishedLoad:
    """A load that is over: no copy can write to the engine's blocks any more."""

    @property
    def request(self) -> str:
        """Who asked for it."""
    @property
    def arrived(self) -> int:
        """Blocks from the front that hold verified bytes."""
    @property
    def wanted(self) -> int:
        """Blocks asked for."""
    @property
    def failed(self) -> int:
        """Blocks that did not arrive; of an audit, those that are not the same or were not compared."""
    @property
    def differing(self) -> int:
        """Of an audit: blocks whose stored copies are not what the engine computed."""
    @property
    def failures(self) -> list[str]:
        """Why they did not arrive, a text for each, 16 at most."""

@final
class FinishedPlan:
    """A part of a load that is over on the rank of a worker: no copy of it touches the memory of its
    blocks any more.
    """

    @property
    def tag(self) -> int:
        """One of its load (`KvBlockManager.load_tags`). A load may have several plans with it."""
    @property
    def path(self) -> str:
        """From which tier to which, such as `"g2_g1"`."""
    @property
    def arrived(self) -> int:
        """Blocks that arrived on this rank."""
    @property
    def failed(self) -> int:
        """Blocks that did not."""

@final
class OffloadStarted:
    """What an offload began with."""

    @property
    def started(self) -> int:
        """Blocks that are being copied."""
    @property
    def present(self) -> int:
        """Blocks that host memory has, or is about to have."""
    @property
    def refused(self) -> list[tuple[int, str]]:
        """Blocks that were not taken, each with the reason."""

@final
class Parked:
    """Private blocks of a preempted request, in host memory. `KvBlockManager.resume` brings them
    back, `resume_groups` those of several cache groups. Dropping it, or `close`, forgets them.
    """

    def __len__(self) -> int: ...
    def close(self) -> None:
        """Forgets the blocks. A second call does nothing."""

@final
class Fence:
    """A point of the engine's work, named by `fence` or `fence_after` of the object that it is given
    to.
    """

@disjoint_base
class Worker:
    """The worker of one rank: it has the engine's tensors of that rank and listens at a socket for the
    manager, which is in another process.

    Close it (or use it in a `with` statement): the socket's file is removed then.
    """

    def __new__(
        cls,
        config: Config,
        layout: Layout,
        *,
        model: str,
        rank: int,
        ranks: int,
        socket: str | PathLike[str],
    ) -> Worker: ...
    @property
    def socket(self) -> Path:
        """Where it listens."""
    @property
    def closed(self) -> bool:
        """Whether it was closed."""
    def signal(self, number: int, after: Any = None) -> None:
        """The engine has passed the point that the manager calls `number` (`KvBlockManager.fence`), or
        has when `after` is complete: copies that wait for it start then. `after` is for tensors on
        a CUDA device: a `torch.cuda.Event` or the number of a `CUevent`, recorded once on the
        engine's stream and not destroyed before it is complete; an object is kept until then.
        """
    def wait_idle(self, ids: Sequence[int] | Buffer, timeout: float) -> list[int]:
        """Waits until no copy of this rank touches these blocks. The ids that are still busy after
        `timeout` seconds.
        """
    def drain_finished(self) -> list[FinishedPlan]:
        """Parts of loads that are over on this rank, oldest first, each once.
        `KvBlockManager.load_tags` says which load one belongs to. The last 4096 are kept until they
        are taken.
        """
    def close(self, timeout: float = 0.0) -> bool:
        """Stops when no copy touches the engine's tensors any more. With a `timeout`, the manager is
        told before, and saves what only this worker holds: that is waited for, so many seconds at
        most. Whether the manager let it go, or there is none; the manager's log says what it
        could not save. A second call does nothing.
        """
    def __enter__(self) -> Any: ...
    def __exit__(self, *_raised: object) -> None: ...

@disjoint_base
class KvBlockManager:
    """A block manager over blocks that the engine allocates and names.

    Close it (or use it in a `with` statement): what is not on disk by then is lost.
    """

    def __new__(
        cls,
        config: Config,
        layout: Layout,
        namespace: Namespace,
        *,
        shadow: bool = False,
        workers: Sequence[str | PathLike[str]] = (),
    ) -> KvBlockManager: ...
    @property
    def namespace(self) -> Namespace:
        """The namespace of the manager, complete: sequences are made in it."""
    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
    @property
    def capacity(self) -> list[int]:
        """Blocks that each tier holds at most, G1 to G4."""
    @property
    def finished_fd(self) -> int | None:
        """A file descriptor that is readable when `finished` may have something: for `select`, `poll`
        and event loops. It is the manager's, and closed with it. `None` where the system has none
        to give.
        """
    def busy(self, ids: Sequence[int] | Buffer) -> list[int]:
        """The ids that a copy may still read or write."""
    @property
    def open_tickets(self) -> tuple[int, int]:
        """Tickets and loads that are open."""
    @property
    def closed(self) -> bool:
        """Whether it was closed."""
    def look_up(
        self,
        request: str,
        sequence: TokenSequence | ExternalSequence,
        first: int = 0,
        *,
        end: int | None = None,
    ) -> Ticket | None:
        """What can be loaded of `sequence` from its block `first` on, the first that the engine lacks.
        The same answer and the same pins for the same request until `commit`, `abandon`, or the
        ticket is too old. `None`: ask again later. `end`: the sequence's blocks from this one on
        are not asked for. With several cache groups, as far as all of them can serve it.
        """
    def stage(
        self,
        request: str,
        sequence: TokenSequence | ExternalSequence,
        first: int = 0,
        *,
        timeout: float,
    ) -> int:
        """Like `look_up`, for engines that have no way to learn of a failed load: only blocks whose
        verified bytes are in host memory are promised. Blocks on disk are copied there first; what
        has not arrived after `timeout` seconds is not promised. How many blocks are.
        """
    def fence(self, number: int) -> Fence:
        """Names a point of the engine's work that every worker has passed when it was told so
        (`Worker.signal(number)`). For workers in other processes. Numbers grow from call to call.
        """
    def fence_after(self, event: Any) -> Fence:
        """Names a point of the engine's work on a CUDA device of this process: what the engine had
        submitted to a stream when it recorded `event` there, a `torch.cuda.Event` or the number of
        a `CUevent`. The event is recorded once, and is not destroyed before it is complete; an
        object is kept until then.
        """
    def commit(
        self,
        request: str,
        ids: Sequence[int] | Buffer,
        after: Fence | None = None,
        *,
        timeout: float | None = None,
        by_layer: bool = False,
    ) -> None:
        """Starts the load of the first `len(ids)` promised blocks into the engine's blocks `ids`, when
        the engine has passed `after`. With `timeout` the load is over after so many seconds, with
        what has arrived. `by_layer`: what host memory has is copied tensor by tensor, the first of
        the layout first, and `layer_ready` says what is in place.
        """
    def commit_groups(
        self,
        request: str,
        ids: Sequence[Sequence[int] | Buffer],
        after: Fence | None = None,
        *,
        timeout: float | None = None,
        by_layer: bool = False,
    ) -> None:
        """Like `commit`, for models with several cache groups: `ids[g]` has an engine block for each
        block that `Ticket.groups[g]` names. All arrive or none does. Blocks are copied whole:
        `layer_ready` says the same of all tensors.
        """
    def layer_ready(self, request: str, layer: int) -> bool:
        """Whether the bytes of all blocks of the request's load that lie in tensor `layer` of the
        layout are in place, verified: the engine may compute with them. `False` where a block
        failed, and where the request has no load or `finished` has told its end.
        """
    def wait_layer(self, request: str, layer: int, timeout: float) -> bool:
        """Waits until it is known whether tensor `layer` of all blocks of the request's load arrives,
        at most `timeout` seconds. Whether it has arrived, as `layer_ready` says.
        """
    def hides_load(self, blocks: int, tokens: int) -> bool:
        """Whether a load of `blocks` blocks from host memory with `by_layer` takes no longer than
        computing `tokens` tokens, so that the engine may begin its step at once. `False` where too
        little was loaded lately, where `prefilled` has not said what computing takes, and where
        such blocks go whole.
        """
    def load_tags(self, request: str) -> list[int]:
        """By which workers in other processes name the plans of the request's load
        (`Worker.drain_finished`): a number for each part of it that has plans. Empty where the
        request has no load, and when `finished` has told its end.
        """
    def audit(
        self,
        request: str,
        ids: Sequence[int] | Buffer,
        after: Fence | None = None,
        *,
        elements: str = "bytes",
        tolerance: float = 0.0,
    ) -> None:
        """Like `commit`, where the engine has computed the promised blocks into `ids` and wants to
        know whether the stored copies are the same. Nothing is written to `ids`. The outcome comes
        from `finished`; copies that are not the same are quarantined.

        `elements` says what the bytes are: `"float32"`, `"float16"`, `"bfloat16"`, or `"bytes"`.
        Numbers may differ by `tolerance` times the larger of their magnitudes or of the root mean
        square of the block's numbers in the same tensor.
        """
    def abandon(self, request: str) -> bool:
        """Drops the request's ticket, or gives up its load, which comes from `finished` when no copy
        can write to its blocks any more. Whether there was one.
        """
    def finished(self) -> list[FinishedLoad]:
        """Loads that are over, each once, and only when no copy can write to their blocks any more."""
    def offload(
        self,
        ids: Sequence[int] | Buffer,
        sequence: TokenSequence | ExternalSequence,
        first: int = 0,
        after: Fence | None = None,
        *,
        group: int = 0,
        priority: int = 0,
    ) -> OffloadStarted:
        """Copies engine blocks to host memory in the background: `ids[i]` holds block `first + i` of
        `sequence`. The blocks hold their final bytes when this is called, or when the engine has
        passed `after`. `group` is the cache group of the blocks, where the layout has several;
        those of a window or state may begin anywhere in the sequence. The larger `priority` (0 to
        255) is, the longer blocks stay that are on no tier yet, on every tier.
        """
    def offload_by_layer(
        self,
        ids: Sequence[int] | Buffer,
        sequence: TokenSequence | ExternalSequence,
        first: int = 0,
    ) -> OffloadStarted:
        """Like `offload`, for blocks that the running iteration computes: tensor by tensor, each as
        soon as `layer_done` says that it is written, and all when `step` ends the iteration. The
        blocks count as read from now on: call `before_reuse(ids, timeout)` before they are given to
        something else.
        """
    def layer_done(self, layer: int, event: object | None = None) -> None:
        """The running iteration has written tensor `layer` of the layout, and those before it, in all
        its blocks: not submitted, written. With `event`, as of `fence_after`, it has when the
        engine's stream has passed that.
        """
    def offload_down(self, sequence: TokenSequence | ExternalSequence, to: str) -> int:
        """Copies what host memory has of `sequence` to a tier below, `"g3"` or `"g4"`, in the
        background and now, rather than when a trigger says so. How many blocks host memory has;
        those that are on the tier are not copied again. Of a model with several cache groups, those
        of the first.
        """
    def park(
        self,
        ids: Sequence[int] | Buffer,
        after: Fence | None = None,
        *,
        position: int = 0,
        group: int = 0,
        namespace: Namespace | None = None,
    ) -> Parked:
        """Copies blocks to host memory as they are, for a request that is preempted: blocks that are
        not whole, or that no other request may find. They count for the tenant of `namespace`, or
        of the manager's own. Waits until the copies are over, at most the deadline of transfers;
        then the engine may reuse the blocks. With `after` the copies wait for a fence first. Where
        it fails, a late copy may still read the blocks: call `before_reuse(ids, timeout)` before
        then.
        """
    def park_groups(
        self,
        ids: Sequence[Sequence[int] | Buffer],
        after: Fence | None = None,
        *,
        positions: Sequence[int] | None = None,
        namespace: Namespace | None = None,
    ) -> Parked:
        """Like `park`, for a request with private blocks in several cache groups: `ids[g]` has
        those of group `g`, from block `positions[g]` of the sequence on (0 where `positions` is
        `None`). All groups are parked or none is.
        """
    def resume(
        self, parked: Parked, ids: Sequence[int] | Buffer, after: Fence | None = None
    ) -> None:
        """Copies parked blocks into the engine's blocks `ids`, one for each, in order, and ends the
        parking. Waits as `park` does. Where it fails, the blocks stay parked, and a late copy may
        still write to `ids`: call `before_reuse(ids, timeout)` before another request gets them.
        """
    def resume_groups(
        self,
        parked: Parked,
        ids: Sequence[Sequence[int] | Buffer],
        after: Fence | None = None,
    ) -> None:
        """Like `resume`, for what `park_groups` parked: `ids[g]` has an engine block for each block
        of group `g`. All arrive, or all stay parked.
        """
    def places(self, sequence: TokenSequence | ExternalSequence) -> list[list[str]]:
        """Whether blocks of `sequence` are on a tier: for each block up to the first that is nowhere,
        the tiers' names.
        """
    def released(self, ids: Sequence[int] | Buffer) -> list[int]:
        """The engine has no more use for what these blocks hold. The ids that a copy still touches."""
    def before_reuse(self, ids: Sequence[int] | Buffer, timeout: float) -> list[int]:
        """Makes sure that these blocks can be overwritten: discards copies of them and waits until no
        copy touches them. The ids that are still busy after `timeout` seconds; wait again for
        these.
        """
    def step(self) -> int:
        """An iteration of the engine is over. Its number."""
    @property
    def iteration(self) -> int:
        """The number of the running iteration of the engine."""
    def pin(
        self,
        sequence: TokenSequence | ExternalSequence,
        tiers: Sequence[str],
        until: int,
    ) -> int:
        """Keeps what is there of `sequence` on `tiers` (`"g2"`, `"g3"`) from eviction until iteration
        `until`, or until it is unpinned. How many blocks are pinned. A block that comes to a tier
        later is not. More than half of a tier is refused (`NoRoomError`), and nothing changes.
        """
    def pin_for(
        self,
        sequence: TokenSequence | ExternalSequence,
        tiers: Sequence[str],
        seconds: float,
    ) -> int:
        """Like `pin`, for so many seconds."""
    def unpin(self, sequence: TokenSequence | ExternalSequence, tiers: Sequence[str]) -> int:
        """Takes the pins of `sequence` on `tiers` back, but for blocks that another pinned one
        continues. How many ended; a block on two tiers has two.
        """
    def set_ttl(self, namespace: Namespace, iterations: int | None) -> None:
        """Blocks of `namespace` leave every tier after so many iterations (`step`) without use; `None`
        lifts that. Blocks in use, pinned ones and those that another continues stay until they are
        not.
        """
    def set_ttl_time(self, namespace: Namespace, seconds: float | None) -> None:
        """Like `set_ttl`, after so many seconds without use, from 1 to a year. Both may be set."""
    def branch_ends(self, sequence: TokenSequence | ExternalSequence) -> None:
        """Nothing will continue `sequence`: a hint to the eviction policy."""
    def prefilled(self, tokens: int, elapsed: float) -> bool:
        """The engine computed `tokens` tokens of prompts in a step of so many seconds: what computing
        costs, where `policy.prefill_tokens_per_s` does not say it. Whether the step counts: one of
        fewer than 64 tokens, or of more than 30 s, does not.
        """
    def prefetch(self, sequence: TokenSequence | ExternalSequence) -> int:
        """A request for `sequence` will come: copies what only the disk has of it to host memory, in
        the background and within `policy.prefetch_share`. How many blocks are copied.
        """
    def session_resumes(self, sequence: TokenSequence | ExternalSequence) -> int:
        """The session of `sequence` goes on soon: its blocks count as used now, and a prefetch begins.
        How many blocks it copies.
        """
    def wait_offloads(self, timeout: float) -> bool:
        """Waits until no offload is queued or running. Whether that was reached within `timeout`
        seconds.
        """
    def flush(self, timeout: float) -> int:
        """Makes what is on disk and volumes durable. How many blocks are."""
    def clear(self, tier: str, *, wait: bool = True) -> int:
        """Removes every block that nobody uses from a tier (`"g2"` or `"g3"`). How many went. With
        `wait=False` the disks make it durable later; `flush` waits for that.
        """
    def forget(self, namespace: Namespace, *, wait: bool = True) -> int:
        """Removes a namespace from all tiers. How many blocks went. `wait` as with `clear`."""
    def events(self) -> Events:
        """A subscriber that sees every event from now on."""
    def held_blocks(self) -> list[Event]:
        """The blocks that the tiers of this machine hold now, parents first: `"store"` events with the
        number of the next event. It repairs what is known after a `Gap`. Blocks of volumes are not
        among them.
        """
    def pump_events(self) -> bool:
        """Publishes what happened so far rather than at the next tick. Whether that worked within a
        second.
        """
    def metrics_text(self) -> str:
        """All metrics in the OpenMetrics text format."""
    def status(self) -> dict[str, Any]:
        """Tiers and their blocks, the volumes' ids, and whether the disk is down."""
    def close(self, timeout: float = 10.0) -> str | None:
        """Saves what time allows and stops the threads. What could not be saved, as text; `None` where
        all was. A second call does nothing.
        """
    def __enter__(self) -> Any: ...
    def __exit__(self, *_raised: object) -> None: ...

@disjoint_base
class NodeEngine:
    """The scheduler of an engine whose cache a node daemon keeps (`kvbm serve`). Its calls are those
    of `KvBlockManager`.

    It attaches in the background, and again whenever the daemon was gone; everything is a miss
    meanwhile. Close it, or use it in a `with` statement: the engine's tensors may go away then.
    """

    def __new__(
        cls,
        socket: str | PathLike[str],
        layout: Layout,
        namespace: Namespace,
        *,
        engine: str,
        ranks: int = 1,
    ) -> NodeEngine: ...
    @property
    def namespace(self) -> Namespace:
        """The namespace of the engine, complete: sequences are made in it."""
    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
    @property
    def finished_fd(self) -> int | None:
        """A file descriptor that is readable when `finished` may have something. It is closed with
        this object.
        """
    @property
    def open_tickets(self) -> tuple[int, int]:
        """Tickets and loads that are open, of all engines of the daemon."""
    @property
    def closed(self) -> bool:
        """Whether it was closed."""
    def status(self) -> dict[str, Any]:
        """How it is attached: `attached`, `ready` (movers of all ranks can copy), `pid` of the daemon,
        and the `reason` where it is not attached.
        """
    def wait_ready(self, timeout: float) -> bool:
        """Waits until it is attached and movers of all ranks can copy. Whether that was reached within
        `timeout` seconds.
        """
    def look_up(
        self,
        request: str,
        sequence: TokenSequence | ExternalSequence,
        first: int = 0,
        *,
        end: int | None = None,
    ) -> Ticket | None:
        """As of a manager. Nothing is found while there is no daemon, or where it does not answer in
        half a second.
        """
    def fence(self, number: int) -> Fence:
        """Names a point of the engine's work that every mover has passed when it was told so
        (`NodeMover.signal(number)`). Numbers grow from call to call.
        """
    def fence_after(self, event: Any) -> Fence:
        """As of a manager: a point of the engine's work on a CUDA device of this process."""
    def commit(
        self,
        request: str,
        ids: Sequence[int] | Buffer,
        after: Fence | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """As of a manager. Raises `KvbmError` where there is no daemon: nothing was started then."""
    def commit_groups(
        self,
        request: str,
        ids: Sequence[Sequence[int] | Buffer],
        after: Fence | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """As of a manager, for models with several cache groups. Raises `KvbmError` where there is no
        daemon: nothing was started then.
        """
    def abandon(self, request: str) -> bool:
        """As of a manager."""
    def finished(self) -> list[FinishedLoad]:
        """As of a manager. Where the daemon goes, its loads end here without a block."""
    def busy(self, ids: Sequence[int] | Buffer) -> list[int]:
        """The ids that a copy may still read or write, as far as the daemon says."""
    def offload(
        self,
        ids: Sequence[int] | Buffer,
        sequence: TokenSequence | ExternalSequence,
        first: int = 0,
        after: Fence | None = None,
        *,
        group: int = 0,
    ) -> OffloadStarted:
        """As of a manager. Nothing is started while there is no daemon."""
    def released(self, ids: Sequence[int] | Buffer) -> list[int]:
        """As of a manager: the engine may overwrite these blocks when it returns."""
    def before_reuse(self, ids: Sequence[int] | Buffer, timeout: float) -> list[int]:
        """As of a manager."""
    def step(self) -> None:
        """An iteration of the engine is over."""
    def prefilled(self, tokens: int, elapsed: float) -> None:
        """As of a manager; whether the daemon counts the step is not known here."""
    def prefetch(self, sequence: TokenSequence | ExternalSequence) -> int:
        """As of a manager. 0 while there is no daemon."""
    def session_resumes(self, sequence: TokenSequence | ExternalSequence) -> int:
        """As of a manager. 0 while there is no daemon."""
    def wait_offloads(self, timeout: float) -> bool:
        """As of a manager: of all engines of the daemon."""
    def forget(self, namespace: Namespace, *, wait: bool = False) -> int:
        """Removes a namespace from all tiers, for all engines of the daemon. How many blocks went. The
        disks make it durable later: nobody waits for them.
        """
    def close(self, timeout: float = 10.0) -> str | None:
        """Detaches; returns when nothing is copied any more. A second call does nothing. `timeout` is
        for callers that also know a manager: nothing has to be saved.
        """
    def __enter__(self) -> Any: ...
    def __exit__(self, *_raised: object) -> None: ...

@disjoint_base
class NodeMover:
    """The mover of one rank, in a process of its own: it copies between the engine's tensors and the
    daemon's host memory, as the scheduler (`NodeEngine`) asks for.

    It attaches in the background, and again whenever the daemon was gone. Close it, or use it in a
    `with` statement: the engine's tensors may go away then.
    """

    def __new__(
        cls, socket: str | PathLike[str], layout: Layout, *, engine: str, rank: int, ranks: int
    ) -> NodeMover: ...
    @property
    def closed(self) -> bool:
        """Whether it was closed."""
    def signal(self, number: int, after: Any = None) -> None:
        """The engine has passed the point that the scheduler calls `number` (`NodeEngine.fence`) on
        this rank, or has when `after` is complete: see `Worker.signal`.
        """
    def wait_idle(self, ids: Sequence[int] | Buffer, timeout: float) -> list[int]:
        """Waits until no copy of this rank touches these blocks. The ids that are still busy after
        `timeout` seconds.
        """
    def status(self) -> dict[str, Any]:
        """How it is attached: see `NodeEngine.status`. `ready` is always false: the scheduler knows."""
    def close(self) -> None:
        """Detaches; returns when nothing is copied any more. A second call does nothing."""
    def __enter__(self) -> Any: ...
    def __exit__(self, *_raised: object) -> None: ...

@disjoint_base
class NodeServer:
    """A node daemon in this process, as `kvbm serve` is: engines attach to its socket.

    Close it, or use it in a `with` statement: what is not on disk by then is lost.
    """

    def __new__(cls, config: Config, socket: str | PathLike[str] | None = None) -> NodeServer: ...
    @property
    def socket(self) -> Path:
        """Where it listens."""
    @property
    def closed(self) -> bool:
        """Whether it was closed."""
    @property
    def handed_over(self) -> bool:
        """Whether another daemon has taken its place (`kvbm serve --take-over`): close it then, and
        end the process.
        """
    def engines(self) -> list[tuple[str, int, list[int], bool]]:
        """The engines that are attached: name, blocks on each rank, processes, and whether all its
        movers can copy.
        """
    def status(self) -> dict[str, Any]:
        """As of a manager: tiers and their blocks."""
    def metrics_text(self) -> str:
        """All metrics in the OpenMetrics text format."""
    def close(self, timeout: float = 30.0) -> str | None:
        """Closes the lines of engines, saves what time allows and stops. What could not be saved, as
        text; `None` where all was, or where another daemon has taken over. A second call does
        nothing.
        """
    def __enter__(self) -> Any: ...
    def __exit__(self, *_raised: object) -> None: ...

@final
class Events:
    """A subscriber of a manager's events, from the time it was made on."""

    MOST: ClassVar[int]
    def take(self, timeout: float = 0.0) -> list[Event | Gap]:
        """The events that came, in order, each an `Event` or a `Gap`; at most `timeout` seconds of
        waiting for the first.
        """

@final
class Event:
    """A block that was stored or removed, or everything of a source that was."""

    @property
    def kind(self) -> str:
        """`"store"`, `"remove"` or `"cleared"`."""
    @property
    def sequence(self) -> int:
        """Number within its stream."""
    @property
    def source(self) -> int:
        """Who published it."""
    @property
    def hash(self) -> bytes | None:
        """The block's sequence hash; `None` for `"cleared"`."""
    @property
    def parent(self) -> bytes | None:
        """The sequence hash of the block before it."""
    @property
    def tier(self) -> str | None:
        """`"g1"` to `"g4"`; `None` for `"cleared"`."""
    @property
    def position(self) -> int | None:
        """The block's index in its sequence; `None` for `"cleared"`."""
    @property
    def group(self) -> int | None:
        """The block's cache group; `None` for `"cleared"`."""

@final
class Gap:
    """Events that will not come: what is known of their stream may be wrong."""

    @property
    def source(self) -> int:
        """Who published them."""
    @property
    def first(self) -> int:
        """The first missing number."""
    @property
    def end(self) -> int:
        """The number behind the last missing one."""
    @property
    def restarted(self) -> bool:
        """Whether the source began a new life instead: forget all that came from it."""

@final
class KvIndex:
    """Who holds which prefix: fed with `Event` objects of any number of managers."""

    def __new__(cls, max_blocks: int = ...) -> KvIndex: ...
    def apply(self, events: Sequence[Event | Gap]) -> None:
        """Applies events in their order. A gap has its source forgotten, so that nothing wrong is
        answered.
        """
    def find(self, sequence: TokenSequence | ExternalSequence) -> list[tuple[int, int, list[int]]]:
        """For each source that has the first block: `(source, blocks, by_tier)`, blocks from the
        front.
        """
    def forget(self, source: int) -> None:
        """Forgets a source."""
    def __len__(self) -> int: ...
    @property
    def refused(self) -> int:
        """Blocks that were not taken in because the index is full."""

def convert_blocks(
    shape: Sequence[int],
    from_form: str,
    sources: Sequence[Any],
    to_form: str,
    destinations: Sequence[Any],
) -> None:
    """Converts blocks from the form `from_form` to the form `to_form`: each of `"nhd"`, `"hnd"` (a
    tensor for each layer and outer part), `"operational_nhd"`, `"operational_hnd"`, `"universal"`
    (a tensor for each block). `shape` is `[layers, outer, heads, tokens, elements]`.
    """

def drain_logs() -> tuple[list[tuple[int, str, str]], int]:
    """Takes the waiting records: `[(level, target, message)]`, and how many were dropped since the
    last call.
    """

def wait_logs(timeout: float) -> bool:
    """Waits until a record is there or `timeout` seconds are over; whether one is there. Releases the
    GIL.
    """

def set_log_level(level: int) -> None:
    """Sets the lowest level that is kept, as `logging` numbers levels."""

def _panic_for_tests() -> None: ...
