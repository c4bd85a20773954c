"""The other side of tests/libzmq.rs, over libzmq and written from docs/formats.md alone.

  follow EVENTS REPLAY    follows kvbm's own payloads; answers lines on its standard input:
                            state        -> what it knows, as JSON
  engine EVENTS REPLAY F...  publishes the payloads of files, as vLLM does; answers lines on its standard input:
                            publish N    -> publishes N messages, file after file, from the beginning again at the end
"""

import json
import select
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

    def state(self):
        held = sorted(block for stream in self.streams.values() for block in stream["held"])
        numbers = [stream["next"] for stream in self.streams.values()]
        return {"held": held, "next": max(numbers, default=0), "missing": self.missing, "replayed": self.replayed}


def replay(context, address, start, end, take):
    """Asks for the messages from `start` on and takes those before `end`."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
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


def follow(events, replays):
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv-events")
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    # Heartbeats of libzmq's own: the publisher has to answer them.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 200)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
    socket.connect(events)
    streams, expected = Streams(), 0
    print(json.dumps({"ready": True}), flush=True)
    while True:
        if socket.poll(20):
            topic, number, payload = socket.recv_multipart()
            assert topic == b"kv-events"
            number = int.from_bytes(number, "big")
            start = 0 if number < expected else expected
            if number > start:
                streams.replayed += replay(context, replays, start, number, streams.take)
            streams.take(payload)
            expected = number + 1
        elif lines():
            line = sys.stdin.readline()
            if not line:
                return
            print(json.dumps(streams.state()), flush=True)


def engine(events, replays, files):
    context = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    pub.bind(events)
    router.bind(replays)
    payloads = [open(name, "rb").read() for name in files]
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
                payload = payloads[len(sent) % len(payloads)]
                pub.send_multipart([b"kv@engine", len(sent).to_bytes(8, "big"), payload])
                sent.append(payload)
            print(json.dumps({"sent": len(sent)}), flush=True)
            time.sleep(0.001)


if sys.argv[1] == "follow":
    follow(sys.argv[2], sys.argv[3])
else:
    engine(sys.argv[2], sys.argv[3], sys.argv[4:])
