"""The part `events`: what followers of vLLM's events hear of blocks that kvbm keeps, and a reset of
the cache.

python events.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from typing import Any

import model as models
from engine import Engine
from scenarios import left_over, main, scenario, settle
from workload import unrelated

__all__ = ["judge"]


def judge(suite: Any) -> None:
    """Runs the scenario and says what must hold of it."""
    adapter = None
    if not suite.quick:
        # The quick form has an engine without adapters, which is sooner there.
        adapter = str(suite.work / "adapter")
        models.write_adapter(suite.work / "adapter", "tiny")
    found = suite.run(
        "events and a reset",
        "events_and_reset",
        program="events.py",
        model=suite.tiny,
        # Host memory for 64 blocks: it gives blocks up.
        options={
            "host": "8MiB",
            "disk": suite.fresh("disk-events"),
            "disk_capacity": "1GiB",
            "disk.drive_writes_per_day": 0,
        },
        adapter=adapter,
        max_model_len=1024,
    )
    if not found:
        return
    view, held = found["view"], found["held"]
    for what, holds in {
        "every batch arrived": found["missing_batches"] == 0,
        "followers know what host memory has": view.get("CPU", 0) == held.get("g2", 0) > 0,
        "followers know what the disk has": view.get("STORAGE", 0) == held.get("g3", 0) > 0,
        "they heard what host memory gave up": found["removed"].get("CPU", 0) > 0,
        "nothing is told twice, and nothing removed that was not stored": found["wrong"] == 0,
        "parent, tokens and adapter are those of vLLM's own event": found["differing"] == 0,
        "a salt makes other blocks": found["salted"] > 0,
        **(
            {}
            if adapter is None
            else {"an adapter's blocks have its name": found["of_adapter"] > 0}
        ),
        "the prompt is found before the reset": found["hits_before"] > 0,
        "the reset is done": found["was_reset"] is True,
        "followers hear that all of it is gone": found["view_after"] == {},
        "no hit after the reset": found["hits_after"] == 0,
        "it fills again": found["hits_again"] > 0,
        "no error inside the connector": found["errors"] == 0,
        "nothing is left behind": not any(found["left"].values()),
    }.items():
        suite.check(f"events: {what}", holds, found)


# --------------------------------------------------------------- the scenarios


class Follower:
    """Follows the events that vLLM publishes, as a router does."""

    def __init__(self, endpoint: str) -> None:
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._next = 0
        #: By medium: the blocks that are there.
        self.view: dict[str, set[Any]] = {}
        #: By medium and block: parent, tokens and adapter.
        self.about: dict[str, dict[Any, tuple[Any, ...]]] = {}
        self.removed: Counter[str] = Counter()
        self.missing_batches = self.wrong = 0

    def follow(self) -> int:
        """Takes what came; how many batches."""
        taken = 0
        while self._socket.poll(300):
            _, number, payload = self._socket.recv_multipart()
            at = int.from_bytes(number, "big")
            self.missing_batches += at - self._next
            self._next, taken = at + 1, taken + 1
            for event in self._decode(payload).events:
                self._apply(event)
        return taken

    def _apply(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            # vLLM's own blocks: of kvbm's each is taken back.
            self.view.pop("GPU", None)
            return
        blocks = self.view.setdefault(event.medium, set())
        # vLLM tells of its own blocks again where it computes them again.
        is_ours = event.medium != "GPU"
        for at, block in enumerate(event.block_hashes):
            if kind == "BlockRemoved":
                self.wrong += is_ours and block not in blocks
                self.removed[event.medium] += 1
                blocks.discard(block)
                continue
            self.wrong += is_ours and block in blocks
            blocks.add(block)
            parent = event.block_hashes[at - 1] if at else event.parent_block_hash
            size = event.block_size
            tokens = tuple(event.token_ids[at * size : (at + 1) * size])
            known = self.about.setdefault(event.medium, {})
            known[block] = (parent, tokens, event.lora_name, size)

    def kept(self) -> dict[str, int]:
        """How many blocks are on each medium that is not vLLM's own."""
        return {
            medium: len(blocks)
            for medium, blocks in self.view.items()
            if blocks and medium != "GPU"
        }


def held_by(engine: Engine) -> dict[str, int]:
    """How many blocks kvbm has, by tier."""
    return dict(Counter(event.tier for event in engine.connector._process.manager.held_blocks()))


def follow_until(engine: Engine, follower: Follower, expected: dict[str, int]) -> None:
    """Steps the engine until followers know of so many blocks, or for half a minute: vLLM publishes
    in its steps.
    """
    end = time.monotonic() + 30
    while follower.kept() != expected and time.monotonic() < end:
        engine.connector._process.manager.pump_events()
        # Shorter than a block: nothing is saved.
        engine.tokens([[5] * 8], 1)
        follower.follow()


@scenario
def events_and_reset(
    model: str, options: dict[str, Any], adapter: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Prompts, one of them with a salt and one with an adapter; then a reset of the cache, vLLM's
    and kvbm's.
    """
    from vllm.config import KVEventsConfig

    if adapter is not None:
        settings |= {"enable_lora": True, "max_lora_rank": 8}
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        published = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
        follower = Follower(endpoint)
        engine = Engine(model, Engine.kvbm(**options), kv_events_config=published, **settings)
        free = engine.free_blocks()
        # The subscription may reach vLLM some time after its socket is there.
        time.sleep(1)
        prompts = unrelated(6, 700, 3)
        for prompt in prompts:
            engine.generate([prompt], 1)
            settle(engine)
        engine.generate([prompts[0]], 1, salt="a tenant")
        if adapter is not None:
            engine.generate([prompts[0]], 1, adapter=adapter)
        settle(engine)
        manager = engine.connector._process.manager
        manager.flush(60)
        held = held_by(engine)
        mediums = {"CPU": held.get("g2", 0), "STORAGE": held.get("g3", 0)}
        follow_until(engine, follower, {name: count for name, count in mediums.items() if count})
        view, result = follower.kept(), _about(follower)
        removed = dict(follower.removed)

        def hits(prompt: list[int]) -> int:
            settle(engine)
            engine.forget_own_prefixes()
            (output,) = engine.generate([prompt], 1)
            return int(output.num_cached_tokens)

        hits_before = hits(prompts[-1])
        settle(engine)
        was_reset = engine.llm.reset_prefix_cache(reset_connector=True)
        follow_until(engine, follower, {})
        view_after = follower.kept()
        result |= {
            "view": view,
            "held": held,
            "removed": removed,
            "hits_before": hits_before,
            "was_reset": was_reset,
            "view_after": view_after,
            "hits_after": hits(prompts[-1]),
            "hits_again": hits(prompts[-1]),
            "missing_batches": follower.missing_batches,
            "wrong": follower.wrong,
            "errors": engine.connector._process.counters.totals["errors"],
            "left": left_over(engine, free),
        }
        engine.close()
    return result


def _about(follower: Follower) -> dict[str, int]:
    """What events of kvbm's blocks say, beside those of vLLM's own."""
    own = follower.about.get("GPU", {})
    # By medium: what one says of a block may differ from what another says.
    events = [
        (block, about)
        for name in ("CPU", "STORAGE")
        for block, about in follower.about.get(name, {}).items()
    ]
    ours = dict(events)
    prompts = Counter(about[1:] for about in ours.values() if about[0] is None)
    return {
        "differing": sum(own.get(block) != about for block, about in events),
        "of_adapter": sum(about[2] == "adapter" for about in ours.values()),
        # First blocks of the same tokens and adapter, and of another hash.
        "salted": sum(count - 1 for count in prompts.values()),
    }


if __name__ == "__main__":
    main()
