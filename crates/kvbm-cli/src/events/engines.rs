//! Messages of engines as they come.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use kvbm::events_plane::EventReceiver;
use kvbm::events_plane::url::OpenError;
use kvbm::events_plane::vllm::{
    self, BlockStored, Continuity, EngineBatch, EngineEvent, EngineHash, SequenceTracker,
};
use kvbm::events_plane::zmq::{MessageReceiver, ZmqTransport};
use serde_json::{Map, Value, json};

/// Engines that publish for themselves, each at an address of its own.
pub(super) struct Engines {
    /// In the order of the URL.
    pub(super) addresses: Vec<String>,
    pub(super) receiver: MessageReceiver,
    /// Its connections end with it.
    pub(super) transport: ZmqTransport,
}

impl Engines {
    pub(super) fn open(transport: ZmqTransport) -> Result<Self, OpenError> {
        let addresses = transport.addresses().into_iter().map(|address| address.events).collect();
        Ok(Self { addresses, receiver: transport.messages()?, transport })
    }

    pub(super) fn dropped(&self) -> u64 {
        self.receiver.dropped()
    }

    pub(super) fn waiting(&self) -> usize {
        self.receiver.waiting()
    }
}

/// What engines said, message by message, with what their numbers mean.
pub(super) struct Listener {
    engines: Engines,
    /// By engine; none before the first message. Who comes late has lost nothing.
    numbers: Vec<Option<SequenceTracker>>,
    /// By engine, as its messages say.
    lives: Vec<u64>,
}

/// A message of an engine.
pub(super) struct Spoken {
    /// Which one.
    pub(super) engine: usize,
    pub(super) topic: String,
    /// The message's number.
    pub(super) sequence: u64,
    pub(super) continuity: Continuity,
    pub(super) bytes: usize,
    pub(super) batch: Result<EngineBatch, vllm::Error>,
}

impl Listener {
    pub(super) fn new(engines: Engines) -> Self {
        let count = engines.addresses.len();
        Self { numbers: vec![None; count], lives: vec![0; count], engines }
    }

    pub(super) const fn engines(&self) -> &Engines {
        &self.engines
    }

    /// The next message, or `None` when none came within `timeout`.
    pub(super) fn next(&mut self, timeout: Duration) -> Result<Option<Spoken>> {
        let Some(message) = self.engines.receiver.next(timeout)? else { return Ok(None) };
        let engine = message.publisher as usize;
        let (Some(numbers), Some(life)) = (self.numbers.get_mut(engine), self.lives.get_mut(engine)) else {
            return Ok(None);
        };
        if std::mem::replace(life, message.life) != message.life
            && let Some(numbers) = numbers
        {
            numbers.expect_restart();
        }
        let sequence = message.sequence;
        let continuity =
            numbers.get_or_insert_with(|| SequenceTracker::starting_at(sequence)).accept(sequence);
        Ok(Some(Spoken {
            engine,
            topic: String::from_utf8_lossy(&message.topic).into_owned(),
            sequence,
            continuity,
            bytes: message.payload.len(),
            batch: vllm::decode(&message.payload),
        }))
    }
}

/// Seconds from the engine's timestamp to now, by both clocks; clocks that differ may make it 0.
pub(super) fn age(timestamp: f64) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    (now - timestamp).max(0.0)
}

/// A message as JSON: a value for a loss or a new life, and one for each event.
pub(super) fn values(spoken: &Spoken, address: &str) -> Vec<Value> {
    let of = |kind: &str| json!({ "type": kind, "source": address, "topic": spoken.topic, "sequence": spoken.sequence });
    let mut values = Vec::new();
    match &spoken.continuity {
        Continuity::Next => {}
        Continuity::Gap { missing } => {
            let mut value = of("gap");
            value["first"] = json!(missing.start);
            value["missing"] = json!(missing.end - missing.start);
            values.push(value);
        }
        Continuity::Restarted { expected } => {
            let mut value = of("restarted");
            value["expected"] = json!(expected);
            values.push(value);
        }
    }
    match &spoken.batch {
        Ok(batch) => values.extend(batch.events.iter().map(|event| {
            let mut value = of("event");
            if let Some(fields) = value.as_object_mut() {
                fields.insert("ts".into(), json!(batch.timestamp));
                fields.insert("data_parallel_rank".into(), json!(batch.data_parallel_rank));
                fields.extend(event_fields(event));
            }
            value
        })),
        Err(error) => {
            let mut value = of("malformed");
            value["error"] = json!(error.to_string());
            values.push(value);
        }
    }
    values
}

/// The event's fields as the engine names them, its type as `event_type`.
fn event_fields(event: &EngineEvent) -> Map<String, Value> {
    let Ok(Value::Object(mut fields)) = serde_json::from_str(&event.to_string()) else { return Map::new() };
    if let Some(kind) = fields.remove("type") {
        fields.insert("event_type".into(), kind);
    }
    fields
}

/// A message for people, a line for each event, loss and new life.
pub(super) fn lines(spoken: &Spoken, address: &str) -> Vec<String> {
    let mut lines = match &spoken.continuity {
        Continuity::Next => Vec::new(),
        Continuity::Gap { missing } => {
            let many = missing.end - missing.start;
            vec![format!("{address}  GAP: {many} messages from number {} on are missing", missing.start)]
        }
        Continuity::Restarted { .. } => {
            vec![format!("{address}  RESTARTED: what it held before is gone")]
        }
    };
    match &spoken.batch {
        Ok(batch) => {
            let one = |event| format!("{address}  {:>8}  {}", spoken.sequence, line(event));
            lines.extend(batch.events.iter().map(one));
        }
        Err(error) => lines.push(format!("{address}  {:>8}  UNREADABLE: {error}", spoken.sequence)),
    }
    lines
}

fn line(event: &EngineEvent) -> String {
    match event {
        EngineEvent::AllBlocksCleared => "cleared: it holds nothing any more".into(),
        EngineEvent::Unknown(event) => format!("not known: {event}"),
        EngineEvent::Stored(stored) => {
            let after = stored.parent_block_hash.as_ref();
            let after = after.map_or_else(String::new, |parent| format!("  after {parent}"));
            let blocks = blocks(stored.medium.as_deref(), &stored.block_hashes);
            format!("stored   {blocks}{after}  {}", tokens(stored))
        }
        EngineEvent::Removed(removed) => {
            format!("removed  {}", blocks(removed.medium.as_deref(), &removed.block_hashes))
        }
    }
}

fn blocks(medium: Option<&str>, hashes: &[EngineHash]) -> String {
    let medium = medium.unwrap_or("-");
    match hashes {
        [] => format!("{medium}  no block"),
        [one] => format!("{medium}  block {one}"),
        [first, .., last] => format!("{medium}  {} blocks {first} .. {last}", hashes.len()),
    }
}

fn tokens(stored: &BlockStored) -> String {
    let adapter = stored.lora_name.as_ref().map_or_else(String::new, |name| format!("  adapter {name}"));
    let known = if stored.token_ids.is_empty() { "tokens not given" } else { "tokens" };
    format!("{} {known} a block{adapter}", stored.block_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENGINE: &[u8] = include_bytes!("../../../kvbm-events/tests/golden/vllm/gpu_evict_int_003.msgpack");

    fn spoken(continuity: Continuity, payload: &[u8]) -> Spoken {
        let batch = vllm::decode(payload);
        Spoken { engine: 0, topic: "kv@tiny".into(), sequence: 7, continuity, bytes: payload.len(), batch }
    }

    #[test]
    fn every_event_of_a_message_has_a_line_and_a_value() {
        let spoken = spoken(Continuity::Gap { missing: 4..7 }, ENGINE);
        let (lines, values) = (lines(&spoken, "tcp://a:1"), values(&spoken, "tcp://a:1"));
        assert_eq!((lines.len(), values.len()), (5, 5), "a gap, three removals, a store");
        assert_eq!(lines[0], "tcp://a:1  GAP: 3 messages from number 4 on are missing");
        assert_eq!(lines[1], "tcp://a:1         7  removed  GPU  block 17487227652846051583");
        let last = "stored   GPU  4 blocks 10061185277226539087 .. 12098315282913225177  32 tokens a block";
        assert!(lines[4].ends_with(last), "{}", lines[4]);
        assert_eq!((&values[0]["type"], &values[0]["missing"]), (&json!("gap"), &json!(3)));
        assert_eq!((&values[1]["type"], &values[1]["event_type"]), (&json!("event"), &json!("BlockRemoved")));
        assert_eq!((&values[4]["sequence"], &values[4]["topic"]), (&json!(7), &json!("kv@tiny")));
        assert_eq!(values[4]["block_hashes"][0], json!(10_061_185_277_226_539_087_u64));
        assert_eq!(values[4]["token_ids"].as_array().unwrap().len(), 128);
        assert!(values[4]["ts"].is_f64() && values[4]["data_parallel_rank"] == 0);
    }

    #[test]
    fn a_new_life_and_what_cannot_be_read_are_reported() {
        let broken = spoken(Continuity::Restarted { expected: 9 }, &ENGINE[..20]);
        let (lines, values) = (lines(&broken, "a"), values(&broken, "a"));
        assert!(lines[0].contains("RESTARTED") && lines[1].contains("UNREADABLE: malformed"), "{lines:?}");
        assert_eq!((&values[0]["expected"], &values[1]["type"]), (&json!(9), &json!("malformed")));
        assert!(age(0.0) > 1e9 && age(f64::MAX) == 0.0);
    }
}
