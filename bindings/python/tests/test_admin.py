"""Administration of a manager inside an engine."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path

from conftest import PAGE_SIZE, FakeEngine
from kvbm_rs import Config, KvBlockManager, Namespace, layout_of


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("kvbm", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def test_an_operator_sees_a_manager_inside_an_engine(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run" / "admin.sock"
    config = Config()
    config.set("host.capacity", "64")
    config.set("host.pinned", "false")
    config.set("admin.socket", str(path))
    layout = layout_of(engine.tensors, page_size=PAGE_SIZE)
    with KvBlockManager(config, layout, Namespace("test", page_size=PAGE_SIZE)):
        connection = UnixConnection(path)
        connection.request("GET", "/v1/status")
        answer = connection.getresponse()
        status = json.loads(answer.read())
        assert answer.status == 200
        assert status["model"] == "test"
        assert {tier["tier"]: tier["capacity"] for tier in status["tiers"]}["g2"] == 64
    assert not path.exists()
