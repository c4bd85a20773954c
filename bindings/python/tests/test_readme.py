"""The program of the README runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_program_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out == "4 of 4 blocks came back\n"
