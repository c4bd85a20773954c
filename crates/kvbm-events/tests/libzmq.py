"""The other side of tests/libzmq.rs, over libzmq and written from docs/formats.md alone.

  follow EVENTS REPLAY    follows kvbm's own payloads; answers lines on its standard input:
                            state        -> what it knows, as JSON
  follow-vllm EVENTS REPLAY  the same for events in vLLM's format
  engine EVENTS REPLAY F...  publishes the payloads of files, as vLLM does; answers lines on its standard input:
                            publish N    -> publishes N messages, file after file, from the beginning again at the end
  forward EVENTS HERE     forwards what is published there to whoever subscribes here
"""

import json
import select
import struct
import sys
import time

import msgpack
import zmq

END = b"\xff" * 8


def lines():
    """Whether something stands on the standard input."""
    return select.select([sys.stdin], [], [], 0)[0]


class Streams:
    """What the native payloads say: which blocks are where, and which numbers never came."""

    def __init__(self):
        self.streams = {}
        self.missing = 0
        self.replayed = 0

    def take(self, payload):
        version, source, epoch, shard, after, events = msgpack.unpackb(payload)[:6]
        assert version == 1
        stream = self.streams.setdefault((source, epoch, shard), {"next": 0, "held": set()})
        for event in events:
            number, kind = event[0], event[1]
            if number < stream["next"]:
                continue
            self.missing += number - stream["next"]
            stream["next"] = number + 1
            if kind == 2:
                stream["held"].clear()
                continue
            _namespace, _group, digest, _parent, _position, _prefix, _bytes, _tokens, tier = event[3:12]
            (stream["held"].add if kind == 0 else stream["held"].discard)((digest.hex(), tier))
        self.missing += max(0, after - stream["next"])
        stream["next"] = max(stream["next"], after)

    def restart(self):
        """Nothing: a new life has a new source."""

    def state(self):
        held = sorted(block for stream in self.streams.values() for block in stream["held"])
        numbers = [stream["next"] for stream in self.streams.values()]
        return {"held": held, "next": max(numbers, default=0), "missing": self.missing, "replayed": self.replayed}


class Engine:
    """What vLLM's payloads say: which blocks are on which medium."""

    STORED = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    TIERS = {"GPU": 0, "CPU": 1, "STORAGE": 2}

    def __init__(self):
        self.held, self.events, self.replayed = set(), 0, 0

    def take(self, payload):
        timestamp, events, rank = msgpack.unpackb(payload)
        assert isinstance(timestamp, float) and timestamp > 0 and rank in (None, 0), (timestamp, rank)
        for event in events:
            self.events += 1
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
                continue
            blocks = {(digest.hex(), self.TIERS[event["medium"]]) for digest in event["block_hashes"]}
            if event["type"] == "BlockStored":
                assert list(event)[:8] == self.STORED, list(event)
                assert len(event["token_ids"]) in (0, event["block_size"] * len(event["block_hashes"]))
                self.held |= blocks
            else:
                assert list(event)[:3] == ["type", "block_hashes", "medium"] and event["type"] == "BlockRemoved", event
                self.held -= blocks

    def restart(self):
        """The numbers went back: the engine is another, and holds nothing yet."""
        self.held.clear()

    def state(self):
        return {"held": sorted(self.held), "events": self.events, "replayed": self.replayed}


def replay(context, address, start, end, take):
    """Asks for the messages from `start` on and takes those before `end`."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 60000)
    socket.connect(address)
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    count = 0
    while True:
        empty, _topic, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == END:
            break
        if int.from_bytes(number, "big") < end:
            take(payload)
            count += 1
    socket.close(linger=0)
    return count


def follow(events, replays, streams):
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv-events")
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    # Heartbeats of libzmq's own: the publisher has to answer them.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 200)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
    socket.connect(events)
    expected = 0
    print(json.dumps({"ready": True}), flush=True)
    while True:
        if socket.poll(20):
            topic, number, payload = socket.recv_multipart()
            assert topic == b"kv-events"
            number = int.from_bytes(number, "big")
            if number < expected:
                streams.restart()
                expected = 0
            start = expected
            if number > start:
                streams.replayed += replay(context, replays, start, number, streams.take)
            streams.take(payload)
            expected = number + 1
        elif lines():
            line = sys.stdin.readline()
            if not line:
                return
            print(json.dumps(streams.state()), flush=True)


def stamped(payload):
    """The payload with the time of now, as an engine's: no two lives say the same. It begins with
    an array of three and a float.
    """
    assert payload[:2] == b"\x93\xcb", payload[:2]
    return payload[:2] + struct.pack(">d", time.time()) + payload[10:]


def engine(events, replays, files):
    context = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    payloads = [open(name, "rb").read() for name in files]
    pub.bind(events)
    router.bind(replays)
    sent = []
    print(json.dumps({"ready": True}), flush=True)
    while True:
        while router.poll(5):
            client, empty, start = router.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(sent)):
                router.send_multipart([client, empty, b"kv", number.to_bytes(8, "big"), sent[number]])
            router.send_multipart([client, empty, b"", END, b""])
        if lines():
            line = sys.stdin.readline()
            if not line:
                return
            for _ in range(int(line.split()[1])):
                payload = stamped(payloads[len(sent) % len(payloads)])
                pub.send_multipart([b"kv@engine", len(sent).to_bytes(8, "big"), payload])
                sent.append(payload)
            print(json.dumps({"sent": len(sent)}), flush=True)
            time.sleep(0.001)


def forward(events, here):
    context = zmq.Context()
    front, back = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    front.setsockopt(zmq.RECONNECT_IVL, 20)
    front.connect(events)
    back.bind(here)
    print(json.dumps({"ready": True}), flush=True)
    zmq.proxy(front, back)


if sys.argv[1] == "follow":
    follow(sys.argv[2], sys.argv[3], Streams())
elif sys.argv[1] == "follow-vllm":
    follow(sys.argv[2], sys.argv[3], Engine())
elif sys.argv[1] == "forward":
    forward(sys.argv[2], sys.argv[3])
else:
    engine(sys.argv[2], sys.argv[3], sys.argv[4:])
