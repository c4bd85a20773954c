"""Writes the corpus anew, from docs/formats.md alone: journals that are right, damaged, or lie with
checksums that match.
"""

from pathlib import Path
from struct import pack

HEADER, RECORD, JOURNAL_ID, BLOCK = 4096, 80, 0x0123456789ABCDEF, 8192
HERE = Path(__file__).parent


def crc64(data):
    """CRC-64/NVME."""
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFFFFFFFFFF


def header(version=2, header_bytes=HEADER, record_bytes=RECORD, slots=8, block=BLOCK, stride=BLOCK, geometry_bytes=0):
    text = b"KVBMG3\r\n" + pack("<IIIIQ", version, header_bytes, record_bytes, slots, JOURNAL_ID)
    text += bytes([7]) * 16 + pack("<QQI", block, stride, geometry_bytes)
    text = text.ljust(HEADER - 8, b"\0")
    return text + pack("<Q", crc64(text))


def hash_of(number):
    return (number + 1).to_bytes(16, "little")


def record(slot=0, number=0, generation=1, kind=1, flags=None, length=BLOCK, group=0, word=0xC0FFEE, tag=b""):
    parent = hash_of(number - 1) if number else bytes(16)
    flags = int(number > 0) if flags is None else flags
    text = pack("<BBHIQ", kind, flags, group, slot, generation) + hash_of(number) + parent
    text += pack("<IIQQ", number, 1, word, length) + tag
    return text + pack("<Q", crc64(pack("<Q", JOURNAL_ID) + text))


def plain(kind, slot=0, generation=0):
    text = pack("<BBHIQ", kind, 0, 0, slot, generation).ljust(RECORD - 8, b"\0")
    return text + pack("<Q", crc64(pack("<Q", JOURNAL_ID) + text))


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


three = [record(slot, slot, slot + 1) for slot in range(3)]
whole = header() + b"".join(three)
tagged = header(version=4, record_bytes=96) + b"".join(
    record(slot, slot, slot + 1, word=5, tag=bytes(range(16))) for slot in range(3)
)
corpus = {
    "whole": whole,
    "closed_in_order": whole + plain(4),
    "closed_and_gone_on": header() + three[0] + plain(4) + three[1],
    "closed_before_unknown": whole + plain(4) + plain(9),
    "empty": b"",
    "magic_only": whole[:8],
    "header_cut": whole[: HEADER - 1],
    "header_only": header(),
    "header_flipped": flipped(whole, 100),
    "keyed": header(version=3),
    "encrypted": tagged,
    "version_6": header(version=6),
    "version_max": header(version=0xFFFFFFFF),
    "header_bytes_lie": header(header_bytes=64) + three[0],
    "record_bytes_lie": header(record_bytes=0) + three[0],
    "geometry_bytes_lie": header(geometry_bytes=0xFFFFFFFF) + three[0],
    "slots_lie": header(slots=0xFFFFFFFF) + three[0],
    "block_bytes_lie": header(block=1 << 63, stride=1 << 63) + three[0],
    "torn_tail": whole[:-1],
    "torn_to_garbage": whole[:-RECORD] + bytes(range(RECORD)),
    "damaged_middle": flipped(whole, HEADER + RECORD + 20),
    "all_records_damaged": header() + b"".join(flipped(one, 5) for one in three),
    "zeros_behind": whole + bytes(3 * RECORD + 7),
    "unknown_kind": header() + three[0] + record(1, 1, 2, kind=9) + three[2],
    "kind_0": header() + plain(0, 1, 1) + three[0],
    "unknown_flags": header() + record(flags=0xFE) + three[1],
    "no_bytes": header() + record(length=0) + three[1],
    "too_many_bytes": header() + record(length=1 << 63) + three[1],
    "slot_beyond": header() + record(slot=0xFFFFFFFF) + three[1],
    "last_generation": header() + record(generation=0xFFFFFFFFFFFFFFFF) + three[1],
    "same_generation_twice": header() + record(0, 0, 5) + record(0, 3, 5),
    "older_record_later": header() + record(0, 3, 9) + record(0, 0, 5),
    "one_block_in_two_slots": header() + record(0, 0, 1) + record(1, 0, 2),
    "freed_and_quarantined": whole + plain(2, 0, 10) + plain(3, 1, 11),
    "of_another_journal": header() + flipped(three[0], RECORD - 1) + three[1],
}
for name, data in corpus.items():
    (HERE / f"{name}.kvbm").write_bytes(data)
