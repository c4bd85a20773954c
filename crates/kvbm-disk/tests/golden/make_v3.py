"""Writes journal_v3.kvbm from journal_v2.kvbm and docs/formats.md: the same journal, signed."""

from pathlib import Path

from blake3 import derive_key, keyed_hash

HEADER, RECORD = 4096, 80
HERE = Path(__file__).parent
key = derive_key("kvbm 2026-11-25 the deployment's key from its secret", b"golden secret")
key_id = derive_key("kvbm 2026-11-25 the public name of a deployment's key", key)[:16]
journal_key = derive_key("kvbm 2026-11-25 disk: headers and records of journals", key)


def signed(data, before=b""):
    return data + keyed_hash(journal_key, before + data)[:8]


plain = (HERE / "journal_v2.kvbm").read_bytes()
header = signed(plain[:8] + b"\3\0\0\0" + plain[12:68] + key_id + plain[84 : HEADER - 8])
records = [plain[at : at + RECORD - 8] for at in range(HEADER, len(plain), RECORD)]
(HERE / "journal_v3.kvbm").write_bytes(header + b"".join(signed(one, plain[24:32]) for one in records))
