"""What a wheel has and says, and what it does where pip has installed it and nothing else.

`WHEEL` names its file, `WHEEL_PYTHON` the interpreter of the environment that pip installed it
into.
"""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import os
import platform
import re
import subprocess
import zipfile
from email.message import Message
from pathlib import Path

import numpy
import pytest

#: The folder of the package's sources.
SOURCES = Path(__file__).parent.parent


def version() -> str:
    """That of the workspace."""
    manifest = (SOURCES.parent.parent / "Cargo.toml").read_text()
    (found,) = re.findall(r'^\[workspace\.package\]\nversion = "(.*)"', manifest, re.MULTILINE)
    return str(found)


ABOUT = f"kvbm_rs-{version()}.dist-info"


@pytest.fixture
def wheel() -> Path:
    return Path(os.environ["WHEEL"])


@pytest.fixture
def files(wheel: Path) -> dict[str, bytes]:
    """Contents of the wheel by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def installed() -> Path:
    return Path(os.environ["WHEEL_PYTHON"])


def message(files: dict[str, bytes], name: str) -> Message:
    return email.message_from_string(files[f"{ABOUT}/{name}"].decode())


def run(python: Path, program: str, **environment: str) -> str:
    """What the program prints. Nothing but the environment of `python` is on its path."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.run(
        [python, "-c", program], env=clean | environment, capture_output=True, text=True
    )
    assert output.returncode == 0, output.stderr
    return output.stdout


def test_the_tags_are_those_of_what_it_needs(wheel: Path, files: dict[str, bytes]) -> None:
    """The builder names the oldest C library that has all symbols, and `linux` where the extension
    needs another library than manylinux has.
    """
    machine = platform.machine()
    pattern = rf"kvbm_rs-{re.escape(version())}-(cp310-abi3-manylinux_2_(\d+)_{machine})\.whl"
    found = re.fullmatch(pattern, wheel.name)
    assert found is not None, wheel.name
    assert int(found[2]) <= int(platform.libc_ver()[1].split(".")[1])
    about = message(files, "WHEEL")
    assert about["Tag"] == found[1]
    assert about["Root-Is-Purelib"] == "false"


def test_the_metadata_is_that_of_the_project(files: dict[str, bytes]) -> None:
    about = message(files, "METADATA")
    assert (about["Name"], about["Version"]) == ("kvbm-rs", version())
    assert about["Requires-Python"] == ">=3.10"
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Dist"] is None
    assert str(about.get_payload()).rstrip() == (SOURCES / "README.md").read_text().rstrip()
    assert files[f"{ABOUT}/licenses/LICENSE"] == (SOURCES.parent.parent / "LICENSE").read_bytes()
    entry_points = files[f"{ABOUT}/entry_points.txt"].decode().split("\n\n")
    assert [point.strip() for point in entry_points] == [
        "[vllm.general_plugins]\nkvbm_rs=kvbm_rs.vllm.plugin:register"
    ]


def test_it_has_the_package_and_nothing_else(files: dict[str, bytes]) -> None:
    package = SOURCES / "python"
    sources = {
        str(file.relative_to(package)): file.read_bytes()
        for file in package.rglob("*")
        if file.suffix in (".py", ".pyi", ".typed")
    }
    names = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    others = {f"{ABOUT}/{name}" for name in names}
    assert files.keys() == sources.keys() | {"kvbm_rs/_core.abi3.so"} | others
    assert {name: files[name] for name in sources} == sources


def test_each_file_is_as_recorded(files: dict[str, bytes]) -> None:
    record = f"{ABOUT}/RECORD"
    rows = {
        name: (digest, size)
        for name, digest, size in csv.reader(files[record].decode().splitlines())
    }
    assert rows.keys() == files.keys()
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert rows[name] == (
            ("", "") if name == record else (f"sha256={digest}", str(len(content)))
        )


def test_no_text_names_the_folder_of_the_build(files: dict[str, bytes]) -> None:
    folder = str(SOURCES.parent.parent.resolve()).encode()
    texts = {name: content for name, content in files.items() if not name.endswith(".so")}
    assert not [name for name, content in texts.items() if folder in content]


def test_it_is_imported_from_where_pip_put_it(installed: Path) -> None:
    program = """
import importlib.metadata, sys, kvbm_rs, kvbm_rs.kernels
assert kvbm_rs.__file__.startswith(sys.prefix + "/"), kvbm_rs.__file__
print(importlib.metadata.version("kvbm-rs"), len(list(importlib.metadata.distributions())))
"""
    assert run(installed, program) == f"{version()} 1\n"


def test_the_plugin_of_vllm_is_found_and_harmless_without_vllm(installed: Path) -> None:
    program = """
import importlib.metadata, logging
logging.basicConfig(format="%(message)s")
(point,) = importlib.metadata.entry_points(group="vllm.general_plugins")
point.load()()
print(point.name)
"""
    assert run(installed, program) == "kvbm_rs\n"


def test_the_program_of_the_readme_runs(installed: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (SOURCES / "README.md").read_text(), re.DOTALL)
    # Its one requirement is lent to it.
    lent = str(Path(numpy.__file__).parent.parent)
    assert run(installed, program, PYTHONPATH=lent) == "4 of 4 blocks came back\n"
