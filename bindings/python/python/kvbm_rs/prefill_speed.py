"""How fast an engine computes prompts."""

from __future__ import annotations

__all__ = ["LEAST_TOKENS", "PrefillSpeed"]

#: A step of fewer tokens says little about prompts.
LEAST_TOKENS = 128


class PrefillSpeed:
    """How fast the engine computes prompts, in tokens a second: given, or measured from steps."""

    #: A longer pause between two steps is not one step.
    LONGEST = 30.0

    def __init__(self, given: float | None = None) -> None:
        self._given, self._tokens, self._began = given, 0, 0.0
        self._all_tokens, self._all_seconds = 0, 0.0

    def step(self, tokens: int, now: float) -> tuple[int, float] | None:
        """A step of so many tokens begins; the one before it is over. The tokens and seconds of
        that one, where it computed prompts.
        """
        before, seconds = self._tokens, now - self._began
        self._tokens, self._began = tokens, now
        if before < LEAST_TOKENS or not 0 < seconds < self.LONGEST:
            return None
        self._all_tokens += before
        self._all_seconds += seconds
        return before, seconds

    @property
    def tokens_per_s(self) -> float | None:
        """`None` before a step was measured."""
        if self._given:
            return self._given
        return self._all_tokens / self._all_seconds if self._all_seconds else None
