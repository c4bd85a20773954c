"""The stubs of the extension say what its own documentation says. `BLESS=1` writes it there."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbm_rs import _core

STUBS = Path(__file__).parents[1] / "python/kvbm_rs/_core.pyi"


def documented(nodes: list[ast.stmt], owner: Any) -> Iterator[tuple[Any, str]]:
    """Each class and function of the stubs with the text that the extension has for it."""
    for node in nodes:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        at = vars(owner)[node.name] if node.name in vars(owner) else getattr(owner, node.name)
        if isinstance(at, staticmethod):
            at = at.__func__
        if not node.name.startswith("_") and at.__doc__:
            yield node, at.__doc__.strip()
        if isinstance(node, ast.ClassDef):
            yield from documented(node.body, at)


def literal(text: str, indent: str) -> str:
    """A docstring as ruff formats it."""
    assert '"""' not in text and "\\" not in text, text
    lines = textwrap.indent(text, indent).strip().splitlines()
    end = f"\n{indent}" if len(lines) > 1 else ""
    return '"""' + "\n".join(line.rstrip() for line in lines) + end + '"""'


def with_documentation(source: str) -> str:
    """The stubs with the documentation of the extension."""
    lines = source.splitlines()
    found = documented(ast.parse(source).body, _core)
    # From the end, so that line numbers before stay what they are.
    for node, text in sorted(found, key=lambda pair: -pair[0].lineno):
        body, indent = node.body[0], " " * (node.col_offset + 4)
        is_constant = isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant)
        first, last = body.lineno - 1, body.end_lineno
        if not is_constant:
            lines[first:first] = [indent + literal(text, indent)]
        elif lines[first].strip() == "..." or ast.get_docstring(node) is not None:
            lines[first:last] = [indent + literal(text, indent)]
        else:
            head = lines[first].removesuffix("...").rstrip()
            lines[first:last] = [head, indent + literal(text, indent)]
    return "\n".join(lines) + "\n"


def test_the_stubs_have_the_documentation_of_the_extension() -> None:
    source = STUBS.read_text()
    wanted = with_documentation(source)
    if os.environ.get("BLESS"):
        STUBS.write_text(wanted)
        return
    assert source == wanted, "run this test with BLESS=1, then `ruff format`"


def test_every_call_is_documented() -> None:
    tree = ast.parse(STUBS.read_text())
    told = {id(node) for node, _ in documented(tree.body, _core)}
    silent = [
        f"{owner.name}.{node.name}"
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and id(node) not in told
    ]
    assert silent == []
