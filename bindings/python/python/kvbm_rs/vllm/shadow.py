"""Shadow mode: what kvbm would find, what that would save, and how much memory it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..prefill_speed import PrefillSpeed

__all__ = ["DistinctBlocks", "ShadowReport"]

#: Seconds between two lines of the log.
REPORT_INTERVAL = 60.0


class DistinctBlocks:
    """Counts different blocks by a sample of their hashes, in bounded memory.

    The sample keeps every block until it has `most` of them, then every second one, and so on. The
    count is exact before that. After it, its relative error is about 1 / sqrt(most / 2).
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most, self._shift = most, 0
        self._seen: set[bytes] = set()

    def add(self, hashes: Sequence[bytes]) -> None:
        """Counts blocks by their hashes, which are uniform."""
        self._seen.update(hash for hash in hashes if self._is_sampled(hash))
        while len(self._seen) > self._most:
            self._shift += 1
            self._seen = {hash for hash in self._seen if self._is_sampled(hash)}

    def _is_sampled(self, hash: bytes) -> bool:
        return int.from_bytes(hash[:8], "little") & ((1 << self._shift) - 1) == 0

    @property
    def count(self) -> int:
        """Different blocks so far."""
        return len(self._seen) << self._shift


class ShadowReport:
    """What look-ups of different requests would have found."""

    def __init__(
        self, block_size: int, block_bytes: int, prefill_tokens_per_s: float | None
    ) -> None:
        self._block_size, self._block_bytes = block_size, block_bytes
        self.speed = PrefillSpeed(prefill_tokens_per_s)
        self._looked_up, self._found = DistinctBlocks(), DistinctBlocks()
        self.prompt_tokens = self.requests = self.requests_with_hits = 0
        self.hit_tokens = [0, 0, 0, 0]
        self._reported = time.monotonic()

    def add(
        self, prompt_tokens: int, hashes: Sequence[bytes], first: int, by_tier: Sequence[int]
    ) -> None:
        """A request: the hashes of its blocks, the first block that the engine lacked, and how many
        blocks from there on each tier would have had.
        """
        blocks = sum(by_tier)
        self.requests += 1
        self.requests_with_hits += blocks > 0
        self.prompt_tokens += prompt_tokens
        for tier, count in enumerate(by_tier):
            self.hit_tokens[tier] += count * self._block_size
        self._looked_up.add(hashes)
        self._found.add(hashes[first : first + blocks])

    @property
    def saved_seconds(self) -> float | None:
        """Time that the engine would not have computed; `None` before its speed is known."""
        speed = self.speed.tokens_per_s
        return None if speed is None else sum(self.hit_tokens) / speed

    @property
    def found_bytes(self) -> int:
        """Bytes of the different blocks that were found: a tier of that size would serve the hits
        if it knew which blocks come again.
        """
        return self._found.count * self._block_bytes

    @property
    def all_bytes(self) -> int:
        """Bytes of all different blocks of the prompts: a tier of that size never evicts."""
        return self._looked_up.count * self._block_bytes

    def is_due(self, now: float) -> bool:
        """Whether a line for the log is due; once in `REPORT_INTERVAL`."""
        if now < self._reported + REPORT_INTERVAL or not self.requests:
            return False
        self._reported = now
        return True

    def line(self) -> str:
        """The report in a line."""
        hits, tokens = sum(self.hit_tokens), max(1, self.prompt_tokens)
        tiers = ", ".join(
            f"{name} {self.hit_tokens[tier]:,}"
            for tier, name in ((1, "host memory"), (2, "disk"), (3, "volumes"))
            if self.hit_tokens[tier]
        )
        seconds = self.saved_seconds
        saved = "prefill speed not known yet" if seconds is None else f"{seconds:.1f} s of prefill"
        return (
            f"shadow mode: {hits:,} of {self.prompt_tokens:,} prompt tokens ({100 * hits / tokens:.1f} %) would be loaded"
            f"{f' ({tiers})' if tiers else ''}, {saved} saved; blocks that came again take "
            f"{_gib(self.found_bytes)}, all blocks {_gib(self.all_bytes)}; {self.requests_with_hits:,} of "
            f"{self.requests:,} requests had a hit"
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
