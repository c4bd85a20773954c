"""The scenario `audit`: wrong bytes behind a right checksum, and an audit that finds them.

python audits.py audit '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import logging
import random
from typing import Any

from engine import Engine
from scenarios import left_over, main, scenario, settle
from workload import unrelated


def judge(suite: Any) -> None:
    """Runs the scenario and says what must hold of it."""
    prompts, wrong = (6, 2) if suite.quick else (20, 6)
    kinds = {"whole prompts": 2048, "prompts in chunks": 256}
    if suite.quick:
        # The quick form has one engine less.
        del kinds["whole prompts"]
    for label, tokens in kinds.items():
        options = {
            "host": "128MiB",
            "disk": suite.fresh("disk-audit"),
            "disk_capacity": "1GiB",
            "disk.drive_writes_per_day": 0,
        }
        found = suite.run(
            f"audit, {label}",
            "audit",
            program="audits.py",
            model=suite.tiny,
            prompts=prompts,
            length=420,
            wrong=wrong,
            options=options,
            max_model_len=1024,
            max_num_batched_tokens=tokens,
        )
        first, third, alarm = (found.get(name, {}) for name in ("first", "third", "alarm"))
        # 13 whole blocks of 32 tokens. What follows a wrong block is compared in the same step; in
        # later ones it is not found, since the block before it is quarantined by then.
        whole = {"audited_requests": prompts, "audited_blocks": 13 * prompts}
        least = 13 * (prompts - wrong) + wrong
        clean = {"differing_blocks": 0, "loaded_blocks": 0, "errors": 0}
        for what, holds in {
            "bits of stored blocks were flipped": found.get("flipped") == wrong,
            "it finds each of them, and nothing else": first
            == whole
            | clean
            | {"differing_blocks": wrong, "audited_blocks": first.get("audited_blocks")},
            "what is not behind one of them is compared": least
            <= first.get("audited_blocks", 0)
            <= 13 * prompts,
            "both copies of each are quarantined": found.get("quarantined") == [wrong, wrong],
            "an alarm names the history of the block": "g1_g2 slot" in alarm
            and "g2_g3 slot" in alarm,
            "what is stored in their place is right": third == whole | clean,
            "nothing is left": not any(found.get("left", {"nothing": 1}).values()),
        }.items():
            suite.check(f"audit, {label}: {what}", holds, found)


@scenario
def audit(
    model: str, prompts: int, length: int, wrong: int, options: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """Stores prompts, of some of which a bit of one block is flipped before it is stored; then vLLM
    computes all of them again and each stored block is compared.
    """
    engine = Engine(model, Engine.kvbm(**options, audit=1.0), **settings)
    free = engine.free_blocks()
    texts = unrelated(prompts, length, 5)
    process = engine.connector._process
    manager, totals = process.manager, process.counters.totals

    flipped, alarms = StoredBits(engine, random.Random(3)), Alarms()
    logging.getLogger("vllm.kvbm_rs.vllm").addHandler(alarms)
    for text in texts[:wrong]:
        flipped.is_due = True
        engine.tokens([text], 4)
        settle(engine)
    flipped.is_due = False
    for text in texts[wrong:]:
        engine.tokens([text], 4)
        settle(engine)
    stored = manager.status()["tiers"]["g2"]

    def again() -> dict[str, float]:
        before = dict(totals)
        engine.forget_own_prefixes()
        for text in texts:
            engine.tokens([text], 4)
        while process.audit.is_open:
            engine.loader._collect()
        settle(engine)
        names = (
            "audited_requests",
            "audited_blocks",
            "differing_blocks",
            "loaded_blocks",
            "errors",
        )
        return {name: totals[name] - before[name] for name in names}

    first = again()
    quarantined = [manager.status()["tiers"][tier]["quarantined"] for tier in ("g2", "g3")]
    # What vLLM computed is stored in the place of what was wrong.
    again()
    third = again()
    return {
        "flipped": flipped.count,
        "stored_blocks": stored["inactive"] + stored["active"],
        "first": first,
        "quarantined": quarantined,
        "third": third,
        "alarms": len(alarms.texts),
        "alarm": alarms.texts[0] if alarms.texts else "",
        "left": left_over(engine, free),
    }


class StoredBits:
    """Flips one bit of a block before the copy of its step starts, and flips it back when the copy
    is over: the stored bytes are wrong, and their checksum is right.
    """

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.is_due, self.count = False, 0
        self._rng, self._worker = rng, get_kv_transfer_group()
        self._save = self._worker.wait_for_save
        self._worker.wait_for_save = self._flip_and_save

    def _flip_and_save(self) -> None:
        import torch

        plan = self._worker._get_connector_metadata()
        if not self.is_due or not plan.saves:
            self._save()
            return
        self.is_due = False
        process = self._worker._process
        block = self._rng.choice(plan.saves[0].ids)
        tensor = self._rng.choice(list(process._tensors.values()))[block]
        # The sign of the largest number.
        bits, place = tensor.view(torch.int32).flatten(), int(tensor.flatten().abs().argmax())
        bits[place] ^= -(1 << 31)
        self._save()
        assert process.manager.wait_offloads(60)
        bits[place] ^= -(1 << 31)
        self.count += 1


class Alarms(logging.Handler):
    """What the connector says of audits."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


if __name__ == "__main__":
    main()
