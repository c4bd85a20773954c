"""What the connector knows of each request."""

from __future__ import annotations

import hashlib

from .. import ExternalSequence, Namespace, TokenSequence
from ._vllm_compat import RequestView

__all__ = ["TrackedRequest"]


class TrackedRequest:
    """The blocks of a request, hashed as far as its tokens are known."""

    __slots__ = (
        "audited",
        "by_tier",
        "first",
        "gave_up",
        "groups",
        "has_ticket",
        "is_audited",
        "is_by_layer",
        "is_cacheable",
        "offered",
        "promised",
        "sequence",
        "view",
        "was_counted",
        "_hashed",
        "_image",
        "_last",
        "_namespace",
        "_own",
    )

    def __init__(
        self,
        view: RequestView,
        namespace: Namespace,
        own_hashes: bool,
        is_cacheable: bool = True,
    ) -> None:
        self.view = view
        #: Whether blocks of it are loaded and stored: it has no hash otherwise.
        self.is_cacheable = is_cacheable
        #: Whether a load of it brought nothing, or not all that several cache groups need. vLLM
        #: asks for it again, and it is computed.
        self.gave_up = False
        self._namespace, self._own = namespace, own_hashes
        #: The first block that vLLM lacked at the last look-up.
        self.first = 0
        #: Blocks that were promised and are not being loaded yet.
        self.promised = 0
        #: Whether vLLM was told that its step begins before all of that is there.
        self.is_by_layer = False
        #: Whether the manager keeps an answer, or asks volumes, for this request.
        self.has_ticket = False
        #: With several cache groups: for each the blocks that its part has, as first and end.
        self.groups: list[tuple[int, int]] = []
        #: Of these, by tier.
        self.by_tier = [0, 0, 0, 0]
        #: Blocks that were offered for a copy.
        self.offered = 0
        #: Whether vLLM computes what could have been served; `None` before it is drawn.
        self.is_audited: bool | None = None
        #: The blocks that are compared then.
        self.audited = range(0)
        #: Whether shadow mode has counted what was found.
        self.was_counted = False
        self._begin()

    def _begin(self) -> None:
        self.sequence: TokenSequence | ExternalSequence
        self.sequence = (
            TokenSequence(self._namespace) if self._own else ExternalSequence(self._namespace)
        )
        self._hashed = 0
        self._image = 0
        #: What the last hashed block was made of: vLLM's hash, or tokens.
        self._last: bytes | list[int] | None = None

    def hash(self) -> int:
        """Hashes what is new. How many blocks are hashed."""
        if not self.is_cacheable:
            return 0
        if self._hashed and self._changed():
            # A streaming session replaced its last tokens.
            self._begin()
            self.offered = 0
        if isinstance(self.sequence, ExternalSequence):
            self._follow(self.sequence)
        else:
            self._hash_tokens(self.sequence)
        return self._hashed

    def _changed(self) -> bool:
        """Whether what was hashed is no longer the beginning of the request."""
        if not self._own:
            hashes = self.view.block_hashes
            return len(hashes) < self._hashed or hashes[self._hashed - 1] != self._last
        size = self._namespace.page_size
        return self.view.tokens((self._hashed - 1) * size, self._hashed * size) != self._last

    def _follow(self, sequence: ExternalSequence) -> None:
        hashes = self.view.block_hashes
        if len(hashes) > self._hashed:
            self._hashed = sequence.extend([bytes(hash) for hash in hashes[self._hashed :]])
            self._last = hashes[-1]

    def _hash_tokens(self, sequence: TokenSequence) -> None:
        size = self._namespace.page_size
        blocks = self.view.num_tokens // size
        if blocks <= self._hashed:
            return
        if self.view.has_extra_keys:
            for block in range(self._hashed, blocks):
                keys, self._image = self.view.extra_keys(
                    block * size, (block + 1) * size, self._image
                )
                if keys is not None:
                    # Of bounded length, whatever the images are called.
                    sequence.add_extra_key(
                        block * size, hashlib.blake2b(keys, digest_size=32).digest()
                    )
        sequence.add_tokens(self.view.tokens(self._hashed * size, blocks * size))
        self._hashed = blocks
        self._last = self.view.tokens((blocks - 1) * size, blocks * size)
