#!/usr/bin/env python3
"""Computes vectors.json from the text of the specification (crate documentation), independently of
the Rust code.

    pip install blake3 xxhash
    python3 make_vectors.py > vectors.json

The tests read the committed vectors.json and need neither Python nor these packages. The vectors
never change: files, events and other deployments depend on them.
"""

import json
import struct

from blake3 import blake3
from xxhash import xxh3_64_intdigest, xxh3_128_digest

CONTEXT = "kvbm 2026-11 namespace tag v1"
ROOT = bytes(16)
EXTERNAL = b"kvbm external v1"


def field(data):
    return struct.pack("<Q", 2**64 - 1) if data is None else struct.pack("<Q", len(data)) + data


def text(namespace, key, default=None):
    value = namespace.get(key, default)
    return None if value is None else value.encode()


def raw(namespace, key):
    return None if key not in namespace else bytes.fromhex(namespace[key])


def tag(ns):
    kind = ns.get("chain_root_kind", "fixed")
    fields = [
        text(ns, "model"),
        text(ns, "weights", ""),
        text(ns, "dtype", ""),
        struct.pack("<I", ns["page_size"]),
        text(ns, "rope_scaling"),
        text(ns, "kv_quantization"),
        text(ns, "adapter"),
        raw(ns, "tenant_salt"),
        ns.get("algorithm", "blake3").encode(),
        kind.encode(),
        raw(ns, "chain_root"),
        raw(ns, "deployment_secret"),
    ]
    return blake3(b"".join(map(field, fields)), derive_key_context=CONTEXT).digest()[:16]


def tokens(seed, count):
    return [(seed + i * 2654435761) % 2**32 for i in range(count)]


def extra_key(key):
    if key["kind"] == "salt":
        return b"\x00" + bytes.fromhex(key["bytes"])
    if key["kind"] == "image":
        return b"\x01" + struct.pack("<q", key["offset"]) + bytes.fromhex(key["content_hash"])
    data = bytes.fromhex(key["bytes"])
    return b"\x02" + struct.pack("<Q", len(data)) + blake3(data).digest()


def message(block, keys):
    encoded = sorted(map(extra_key, keys))
    return struct.pack(f"<{len(block)}I", *block) + b"".join(struct.pack("<I", len(k)) + k for k in encoded)


def link(algorithm, parent, namespace_tag, data):
    if algorithm == "xxh3-128":
        return xxh3_128_digest(parent + namespace_tag + data)
    return blake3(data, key=parent + namespace_tag).digest()[:16]


def sequence(ns, seed, count, keys):
    ids = tokens(seed, count)
    size, parent, hashes, local = ns["page_size"], ROOT, [], []
    for block in range(count // size):
        mine = [k for k in keys if k["at"] // size == block]
        data = message(ids[block * size : (block + 1) * size], mine)
        parent = link(ns.get("algorithm", "blake3"), parent, tag(ns), data)
        hashes.append(parent.hex())
        local.append(f"{xxh3_64_intdigest(data, seed=1337):016x}")
    return hashes, local


NAMESPACES = {
    "plain": {"model": "llama-3-8b", "weights": "2026-11-01", "dtype": "bf16", "page_size": 16},
    "defaults": {"model": "m", "page_size": 1},
    "everything": {
        "model": "modèle", "weights": "7", "dtype": "fp8_e4m3", "page_size": 4, "rope_scaling": "yarn:4", "kv_quantization": "kv8",
        "adapter": "lora-3@2", "tenant_salt": "00ff", "chain_root_kind": "external", "chain_root": "0123456789abcdef",
        "deployment_secret": "73656372657400",
    },
    "empty_options": {"model": "m", "page_size": 1, "rope_scaling": "", "kv_quantization": "", "adapter": "", "tenant_salt": "",
                      "deployment_secret": ""},
    "per_process": {"model": "m", "page_size": 2, "chain_root_kind": "per-process", "chain_root": "aa"},
    "xxh3": {"model": "llama-3-8b", "weights": "2026-11-01", "dtype": "bf16", "page_size": 16, "algorithm": "xxh3-128"},
    "pages_of_100": {"model": "m", "page_size": 100},
    "pages_of_512": {"model": "m", "page_size": 512},
    "pages_of_512_xxh3": {"model": "m", "page_size": 512, "algorithm": "xxh3-128"},
    "pages_of_100_xxh3": {"model": "m", "page_size": 100, "algorithm": "xxh3-128"},
}

EXTRA = [
    {"at": 0, "kind": "salt", "bytes": "73616c74"},
    {"at": 3, "kind": "image", "offset": -3, "content_hash": "cafe"},
    {"at": 16, "kind": "image", "offset": 13, "content_hash": "cafe"},
    {"at": 20, "kind": "image", "offset": -4, "content_hash": "beef"},
    {"at": 17, "kind": "embeddings", "bytes": "00112233"},
]

SEQUENCES = [("plain", 0, 50, []), ("plain", 7, 64, EXTRA), ("defaults", 1, 3, []), ("everything", 9, 13, []),
             ("xxh3", 0, 50, []), ("xxh3", 7, 64, EXTRA), ("pages_of_100", 3, 210, []), ("pages_of_512", 5, 1100, []),
             ("pages_of_512_xxh3", 5, 1100, []), ("pages_of_100_xxh3", 3, 210, [])]

EXTERNALS = [("plain", ""), ("plain", "0102030405060708"), ("plain", "ab" * 32), ("xxh3", "0102030405060708")]


def main():
    result = {"namespaces": [], "sequences": [], "external": []}
    for name, ns in NAMESPACES.items():
        result["namespaces"].append({"name": name, **ns, "tag": tag(ns).hex()})
    for name, seed, count, keys in SEQUENCES:
        hashes, local = sequence(NAMESPACES[name], seed, count, keys)
        result["sequences"].append({"namespace": name, "seed": seed, "count": count, "extra": keys, "hashes": hashes,
                                    "local_hashes": local})
    for name, engine_hash in EXTERNALS:
        ns = NAMESPACES[name]
        ours = link(ns.get("algorithm", "blake3"), EXTERNAL, tag(ns), bytes.fromhex(engine_hash))
        result["external"].append({"namespace": name, "engine_hash": engine_hash, "hash": ours.hex()})
    print(json.dumps(result, indent=1, ensure_ascii=False))


main()
