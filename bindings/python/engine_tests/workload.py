"""Requests that share prefixes: conversations of several turns below a few system prompts."""

from __future__ import annotations

import random

__all__ = ["conversations", "unrelated"]


def conversations(count: int, longest: int, seed: int) -> list[list[int]]:
    """`count` prompts of 1 to `longest` tokens, both among them, in an order in which conversations
    alternate.
    """
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, 1024) for _ in range(length)]

    systems = [text(length) for length in (64, 300, 700)]
    open_ones: list[list[int]] = []
    prompts = [text(1), text(longest)]
    while len(prompts) < count:
        choice = rng.random()
        if choice < 0.1:
            prompts.append(text(rng.randrange(1, 40)))
            continue
        if choice < 0.4 or not open_ones:
            prompt = rng.choice(systems) + text(rng.randrange(1, 200))
            open_ones.append(prompt)
        else:
            at = rng.randrange(len(open_ones))
            # A turn is a question, or one in ten times a document.
            most = longest if rng.random() < 0.1 else 400
            prompt = open_ones[at] = open_ones[at] + text(rng.randrange(1, most))
        if len(prompt) > longest:
            open_ones.remove(prompt)
            prompt = prompt[:longest]
        prompts.append(prompt)
        if rng.random() < 0.1:
            prompts.append(list(rng.choice(prompts)))
    return prompts[:count]


def unrelated(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 1024) for _ in range(length)] for _ in range(count)]
