"""Writes the corpus anew, from docs/formats.md alone: objects that are right, damaged, or lie with
checksums that match.
"""

from pathlib import Path
from struct import pack

HERE = Path(__file__).parent
PAYLOAD = bytes(range(40, 60))


def crc64(data):
    """CRC-64/NVME."""
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFFFFFFFFFF


def blob(payload=PAYLOAD, pieces=1, order=0, version=1, group=3, offset=None, length=None, namespace=0xA1, block=0xB2,
         layers=(1, 2), heads=(3, 4), label=0x08070605, claimed=None, table=None, zero=0, key=None,
         stamp=b""):
    """An object of the key in the test, unless something else is said; `claimed` pieces are not
    those that it has.
    """
    offset = 96 + 8 * pieces + len(stamp) if offset is None else offset
    length = len(payload) if length is None else length
    head = b"kvbmblob" + pack("<HHI", version, group, offset) + bytes([namespace]) * 16 + bytes([block]) * 16
    head += pack("<IIIIQIHHII", *layers, *heads, length, label, order, zero, pieces if claimed is None else claimed,
                 zero if key is None else key)
    if table is None:
        cuts = [payload[len(payload) * at // pieces:len(payload) * (at + 1) // pieces] for at in range(pieces)]
        table = [crc64(head + pack("<I", at) + cut) for at, cut in enumerate(cuts)]
    sums = b"".join(pack("<Q", sum) for sum in table)
    sums += stamp
    return (head + pack("<Q", crc64(head + sums)) + sums).ljust(offset, b"\0") + payload


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1:]


whole = blob()
halves = blob(pieces=2, order=1)
corpus = {
    "whole": whole,
    "universal": halves,
    "padded": blob(offset=4096),
    "no_payload": blob(payload=b""),
    "empty": b"",
    "magic_only": whole[:8],
    "header_cut": whole[:95],
    "table_cut": whole[:100],
    "payload_cut": whole[:-1],
    "trailing": whole + b"x",
    "magic_flipped": flipped(whole, 3),
    "header_flipped": flipped(whole, 50),
    "header_sum_flipped": flipped(whole, 90),
    "table_flipped": flipped(whole, 97),
    "payload_flipped": flipped(whole, 110),
    "version_0": blob(version=0),
    "signed": blob(version=2, key=0x0076617A),
    "encrypted": blob(version=3, stamp=bytes([0xC3]) * 16 + bytes([0xD4]) * 16),
    "stamp_cut": blob(version=3),
    "compressed": blob(version=5),
    "version_9": blob(version=9),
    "version_max": blob(version=0xFFFF),
    "order_2": blob(order=2),
    "pieces_0": blob(claimed=0),
    "pieces_5000": blob(claimed=5000),
    "pieces_max": blob(claimed=0xFFFFFFFF),
    "more_pieces_than_table": blob(claimed=2),
    "uneven_pieces": blob(pieces=3),
    "offset_in_header": blob(offset=40),
    "offset_in_table": blob(offset=96),
    "offset_max": flipped(blob(), 12)[:12] + pack("<I", 0xFFFFFFFF) + whole[16:],
    "length_max": blob(length=0xFFFFFFFFFFFFFFFF),
    "length_beyond": blob(length=1 << 40),
    "length_short": blob(length=19),
    "other_namespace": blob(namespace=0xA2),
    "other_label": blob(label=7),
    "other_group": blob(group=4),
    "other_block": blob(block=0xB3),
    "other_layers": blob(layers=(0, 2)),
    "other_heads": blob(heads=(3, 5)),
    "pieces_changed_places": halves[:-20] + halves[-10:] + halves[-20:-10],
    "sums_changed_places": blob(pieces=2, order=1, table=[2, 1]),
    "unknown_bytes": blob(zero=1),
}

for name, data in corpus.items():
    (HERE / f"{name}.blob").write_bytes(data)
