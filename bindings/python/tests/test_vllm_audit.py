"""Audits of the connector, over the stand-in for vLLM."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kvbm_rs import ConfigInvalid
from vllm_stand_in import PROMPT, Engine, Request
from vllm_stand_in import vllm as vllm  # a fixture

#: An engine of another name is another process to the connector.
_NUMBERS = itertools.count()

IDS, OTHERS = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]


@pytest.fixture(params=["uni", "mp"])
def engine(vllm: Any, request: pytest.FixtureRequest) -> Iterator[Engine]:
    remote = request.param == "mp"
    engine = Engine(
        vllm,
        transfer={"engine_id": f"audited-{next(_NUMBERS)}"},
        executor=request.param,
        ranks=2 if remote else 1,
        extra={"audit": 1},
    )
    yield engine
    engine.close()


def settle(engine: Engine, blocks: int) -> None:
    """Steps until so many blocks were audited."""
    deadline = time.monotonic() + 20
    while engine.totals["audited_blocks"] < blocks:
        assert time.monotonic() < deadline, engine.totals
        engine.step()
        time.sleep(0.001)


def compute_wrong(engine: Engine, request: Request, ids: list[int], wrong: int) -> None:
    """Computes a request, and stores other bytes of block `wrong` than were computed."""
    worker, save = engine.workers[-1], engine.workers[-1].wait_for_save

    def spoil_and_save() -> None:
        engine.kv[-1][ids[wrong]] += 1
        save()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "wait_for_save", spoil_and_save)
        engine.compute(request, ids)


def test_vllm_computes_what_is_audited_and_finds_it_equal(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), IDS)
    again = Request("b", PROMPT)
    assert engine.match(again) == (0, False), "stored, and not promised"
    assert engine.match(again) == (0, False)
    # In chunks, of which one ends inside a block.
    for tokens in (6, 6, 5):
        engine.step({"b": (again, OTHERS, tokens)})
    settle(engine, 4)
    totals = engine.totals
    assert (totals["audited_requests"], totals["audited_blocks"]) == (1, 4)
    assert (totals["differing_blocks"], totals["loaded_blocks"], totals["errors"]) == (0, 0, 0)
    assert engine.manager.open_tickets == (0, 0)


def test_what_vllm_had_itself_is_not_compared(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), IDS)
    again = Request("b", PROMPT)
    again.num_computed_tokens = 8
    assert engine.match(again, 8) == (0, False)
    engine.step({"b": (again, [1, 2, 13, 14, 15], 9)})
    settle(engine, 2)
    assert engine.totals["audited_blocks"] == 2


def test_wrong_blocks_are_found_quarantined_and_replaced(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    compute_wrong(engine, Request("a", PROMPT), IDS, wrong=2)
    again = Request("b", [*PROMPT, 1, 2, 3])
    assert engine.match(again) == (0, False)
    ours = logging.getLogger("vllm.kvbm_rs.vllm")
    audit = engine.scheduler._process.audit
    assert audit is not None
    held: list[tuple[Any, ...]] = []
    compare = audit.compare
    with caplog.at_level(logging.ERROR, ours.name):
        with pytest.MonkeyPatch.context() as patch:
            # Not before the step has offered its blocks, or they replace the wrong one at once.
            patch.setattr(audit, "compare", lambda *call: held.append(call))
            engine.step({"b": (again, OTHERS, 17)})
        for call in held:
            compare(*call)
        settle(engine, 4)
    assert engine.totals["differing_blocks"] == 1
    assert engine.manager.status()["tiers"]["g2"]["quarantined"] == 1
    (record,) = [record for record in caplog.records if record.name == ours.name]
    text = record.getMessage()
    assert "1 of 4 stored blocks" in text and "g1_g2 slot 3" in text and "quarantined" in text
    tracked = engine.scheduler._requests["b"]
    assert len(engine.manager.places(tracked.sequence)) == 2
    # The request's next block brings the others along.
    engine.step({"b": (again, OTHERS, 3)})
    assert engine.manager.wait_offloads(10)
    assert len(engine.manager.places(tracked.sequence)) == 5
    third = Request("c", PROMPT)
    assert engine.match(third) == (0, False)
    engine.step({"c": (third, [21, 22, 23, 24, 25], 17)})
    settle(engine, 8)
    assert engine.totals["differing_blocks"] == 1, "what was stored in its place is right"


def test_a_share_of_requests_is_drawn_once_for_each(vllm: Any) -> None:
    engine = Engine(vllm, transfer={"engine_id": "audited-in-part"}, extra={"audit": 0.25})
    audit = engine.scheduler._process.audit
    assert audit is not None
    audit._random.seed(1)
    engine.compute(Request("a", PROMPT), IDS)
    drawn = []
    for number in range(40):
        request = Request(f"r{number}", PROMPT)
        first = engine.match(request)
        assert engine.match(request) == first
        drawn.append(first == (0, False))
        engine.scheduler.request_finished_all_groups(request, (IDS,))
    assert 3 <= sum(drawn) <= 20
    assert engine.totals["audited_requests"] == sum(drawn)
    engine.close()


def test_blocks_that_are_reused_before_they_were_compared_condemn_nothing(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), IDS)
    for number in range(20):
        again = Request(f"b{number}", PROMPT)
        assert engine.match(again) == (0, False)
        engine.step({again.request_id: (again, OTHERS, 17)})
        engine.scheduler.request_finished_all_groups(again, (OTHERS,))
        other = Request(f"c{number}", [number * 100 + at for at in range(17)])
        engine.match(other)
        engine.step({other.request_id: (other, OTHERS, 17)})
    audit = engine.scheduler._process.audit
    deadline = time.monotonic() + 20
    while audit is not None and audit.is_open:
        assert time.monotonic() < deadline
        engine.step()
    assert engine.totals["differing_blocks"] == 0
    assert engine.manager.status()["tiers"]["g2"]["quarantined"] == 0


@pytest.mark.parametrize(
    ("extra", "changes", "text"),
    [
        ({"audit": 2}, {}, "'audit' is 2: give a share of requests from 0 to 1"),
        ({"audit": "yes"}, {}, "'audit' is 'yes'"),
        ({"audit": True}, {}, "'audit' is True"),
        ({"audit": 0.1, "audit_tolerance": -1}, {}, "'audit_tolerance' is -1"),
        ({"audit": 0.1, "shadow": True}, {}, "options 'audit' and 'shadow'"),
    ],
)
def test_options_that_make_no_sense(
    vllm: Any, extra: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigInvalid, match=text):
        Engine(vllm, transfer={"engine_id": f"bad-{text}"}, extra=extra, **changes)


def test_numbers_of_one_byte_are_compared_exactly_or_not_at_all() -> None:
    from kvbm_rs.vllm.audit import comparison_of

    assert comparison_of("bfloat16", "auto", None) == ("bfloat16", 0.25)
    assert comparison_of("bfloat16", "float16", 0.1) == ("float16", 0.1)
    assert comparison_of("float32", "auto", 0) == ("bytes", 0.0)
    assert comparison_of("bfloat16", "fp8", 0) == ("bytes", 0.0)
    with pytest.raises(ConfigInvalid, match="a cache of fp8.*set 'audit_tolerance' to 0"):
        comparison_of("bfloat16", "fp8", None)
