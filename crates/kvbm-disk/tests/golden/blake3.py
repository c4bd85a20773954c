"""BLAKE3 as its specification describes it, slowly: hash, keyed hash and key derivation."""

from struct import pack, unpack

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
CHUNK_START, CHUNK_END, PARENT, ROOT, KEYED, CONTEXT, MATERIAL = 1, 2, 4, 8, 16, 32, 64
CHUNK, BLOCK, MASK = 1024, 64, 0xFFFFFFFF


def compress(chain, words, counter, length, flags):
    state = [*chain, *IV[:4], counter & MASK, counter >> 32, length, flags]

    def mix(a, b, c, d, x, y):
        for add, right, left in ((x, 16, 12), (y, 8, 7)):
            state[a] = state[a] + state[b] + add & MASK
            turned = state[d] ^ state[a]
            state[d] = (turned >> right | turned << 32 - right) & MASK
            state[c] = state[c] + state[d] & MASK
            turned = state[b] ^ state[c]
            state[b] = (turned >> left | turned << 32 - left) & MASK

    for turn in range(7):
        for at in range(4):
            mix(at, at + 4, at + 8, at + 12, words[2 * at], words[2 * at + 1])
        for at in range(4):
            columns = at, (at + 1) % 4 + 4, (at + 2) % 4 + 8, (at + 3) % 4 + 12
            mix(*columns, words[2 * at + 8], words[2 * at + 9])
        words = [words[at] for at in PERMUTATION]
    return [state[at] ^ state[at + 8] for at in range(8)]


def chunk(data, key, counter, flags, root):
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)] or [b""]
    chain = key
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        marks = flags | (0 if number else CHUNK_START) | (CHUNK_END | (ROOT if root else 0) if last else 0)
        chain = compress(chain, unpack("<16I", block.ljust(BLOCK, b"\0")), counter, len(block), marks)
    return chain


def tree(data, key, counter, flags, root):
    if len(data) <= CHUNK:
        return chunk(data, key, counter, flags, root)
    left = CHUNK
    while 2 * left < len(data):
        left *= 2
    both = tree(data[:left], key, counter, flags, False)
    both += tree(data[left:], key, counter + left // CHUNK, flags, False)
    return compress(key, both, 0, BLOCK, flags | PARENT | (ROOT if root else 0))


def plain_hash(data):
    return pack("<8I", *tree(data, IV, 0, 0, True))


def keyed_hash(key, data):
    return pack("<8I", *tree(data, unpack("<8I", key), 0, KEYED, True))


def derive_key(context, material):
    context_key = tree(context.encode(), IV, 0, CONTEXT, True)
    return pack("<8I", *tree(material, context_key, 0, MATERIAL, True))


# What the specification's authors publish for the empty input.
assert plain_hash(b"").hex().startswith("af1349b9f5f9a1a6a0404dea36dcc949")
