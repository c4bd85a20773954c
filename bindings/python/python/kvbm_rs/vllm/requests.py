"""What the connector knows of each request."""

from __future__ import annotations

from .. import ExternalSequence, Namespace, TokenSequence
from ._vllm_compat import RequestView

__all__ = ["TrackedRequest"]


class TrackedRequest:
    """The blocks of a request, hashed as far as its tokens are known."""

    __slots__ = ("by_tier", "first", "offered", "own_hashes", "promised", "sequence", "view", "_hashed", "_image", "_page_size")

    def __init__(self, view: RequestView, namespace: Namespace, own_hashes: bool) -> None:
        self.view = view
        self.own_hashes = own_hashes
        self.sequence: TokenSequence | ExternalSequence
        self.sequence = TokenSequence(namespace) if own_hashes else ExternalSequence(namespace)
        self._page_size = namespace.page_size
        self._hashed = 0
        self._image = 0
        #: The first block that vLLM lacked at the last look-up.
        self.first = 0
        #: Blocks that were promised and are not being loaded yet.
        self.promised = 0
        #: Of these, by tier.
        self.by_tier = [0, 0, 0, 0]
        #: Blocks that were offered for a copy.
        self.offered = 0

    def hash(self) -> int:
        """Hashes what is new. How many blocks are hashed."""
        if isinstance(self.sequence, ExternalSequence):
            hashes = self.view.block_hashes
            if len(hashes) < self._hashed:
                # A streaming session cut its last tokens off.
                self.sequence.truncate(len(hashes))
                self._hashed = len(hashes)
            if len(hashes) > self._hashed:
                self._hashed = self.sequence.extend([bytes(hash) for hash in hashes[self._hashed :]])
            return self._hashed
        size, blocks = self._page_size, self.view.num_tokens // self._page_size
        if blocks > self._hashed:
            if self.view.has_extra_keys:
                for block in range(self._hashed, blocks):
                    keys, self._image = self.view.extra_keys(block * size, (block + 1) * size, self._image)
                    if keys is not None:
                        # One digest of bounded length.
                        self.sequence.add_extra_key(block * size, _digest(keys))
            self.sequence.add_tokens(self.view.tokens(self._hashed * size, blocks * size))
            self._hashed = blocks
        return self._hashed


def _digest(keys: bytes) -> bytes:
    import hashlib

    return hashlib.blake2b(keys, digest_size=32).digest()
