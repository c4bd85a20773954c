"""The part `speculation`: vLLM drafts tokens and takes few of them. Only blocks of tokens that it
took are saved.

python speculation.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from engine import Engine
from scenarios import in_batches, left_over, main, scenario, settle

__all__ = ["judge"]

#: Tokens of an answer: it fills a block or two.
_ANSWER = 48

#: vLLM drafts what followed the last token before.
_DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def judge(suite: Any) -> None:
    """Runs the scenario and says what must hold of it."""
    right = str(suite.work / "right-speculation.json")
    size = {"count": 12 if suite.quick else 60, "max_model_len": 1024, "program": "speculation.py"}
    suite.run("speculation reference", "spoken", model=suite.tiny, out=right, **size)
    found = suite.run("speculation", "speculation", model=suite.tiny, reference=right, **size)
    for what, holds in {
        "tokens are those without it": found.get("unequal") == 0,
        "drafts were taken": found.get("accepted", 0) > 0,
        "drafts were rejected": found.get("accepted", 0) < found.get("drafted", 0),
        "each block of taken tokens was saved, and no other": found.get("saved_blocks", -1)
        == found.get("whole_blocks"),
        "the next turn loads all of them": found.get("hit_blocks", -1) == found.get("whole_blocks"),
        "no error inside the connector": found.get("errors") == 0,
        "nothing is left behind": not any(found.get("left", {"": 1}).values()),
    }.items():
        suite.check(f"speculation: {what}", holds, found)


# --------------------------------------------------------------- the scenarios


def texts(count: int) -> list[list[int]]:
    """Prompts in which tokens come again, so that something is drafted."""
    rng = random.Random(11)
    return [[rng.randrange(3, 200) for _ in range(rng.randrange(40, 90))] * 3 for _ in range(count)]


def next_turn(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """Each prompt with its answer, and a question."""
    return [prompt + answer + [7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]


@scenario
def spoken(model: str, out: str, count: int, **settings: Any) -> dict[str, Any]:
    """Two turns of each conversation, without a connector and without drafts: what is right."""
    engine = Engine(model, None, **(settings | {"enable_prefix_caching": False}))
    prompts = texts(count)
    answers = in_batches(engine, prompts, 4, _ANSWER)
    Path(out).write_text(
        json.dumps([answers, in_batches(engine, next_turn(prompts, answers), 4, 8)])
    )
    return {"conversations": count}


@scenario
def speculation(model: str, reference: str, count: int, **settings: Any) -> dict[str, Any]:
    """The same with drafts, and with kvbm: the second turn finds in host memory what the first one
    computed.
    """
    drafts = {"speculative_config": _DRAFTS}
    engine = Engine(model, Engine.kvbm(host="256MiB"), **settings, **drafts)
    free, totals = engine.free_blocks(), engine.connector._process.counters.totals
    prompts = texts(count)
    right = json.loads(Path(reference).read_text())
    answers = in_batches(engine, prompts, 4, _ANSWER)
    settle(engine)
    saved = totals["saved_blocks"]
    engine.forget_own_prefixes()
    got = [answers, in_batches(engine, next_turn(prompts, right[0]), 4, 8)]
    return {
        "unequal": sum(
            one != two
            for mine, theirs in zip(got, right, strict=True)
            for one, two in zip(mine, theirs, strict=True)
        ),
        "drafted": engine.count("vllm:spec_decode_num_draft_tokens"),
        "accepted": engine.count("vllm:spec_decode_num_accepted_tokens"),
        # The last token of an answer is not computed.
        "whole_blocks": sum((len(prompt) + _ANSWER - 1) // 32 for prompt in prompts),
        "saved_blocks": saved,
        "hit_blocks": totals["hit_tokens_g2"] // 32,
        "errors": totals["errors"],
        "left": left_over(engine, free),
    }


if __name__ == "__main__":
    main()
