//! What travels on the event plane, as JSON and as lines for people.

use kvbm::events_plane::{Delivery, EventBlock, EventKind, KvEvent, StreamId};
use serde_json::{Map, Value, json};

/// An event as JSON.
pub(super) fn event_json(event: &KvEvent) -> Value {
    let mut fields = Map::new();
    let kind = match &event.kind {
        EventKind::Store(_) => "store",
        EventKind::Remove(_) => "remove",
        EventKind::Cleared => "cleared",
    };
    fields.insert("sequence".into(), json!(event.sequence));
    fields.insert("event_type".into(), json!(kind));
    if let Some(block) = event.kind.block() {
        block_json(block, &mut fields);
    }
    let extra: Map<String, Value> =
        event.extra.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
    fields.insert("extra_metadata".into(), extra.into());
    fields.insert("unknown_fields".into(), json!(event.unknown.values()));
    fields.into()
}

fn block_json(block: &EventBlock, fields: &mut Map<String, Value>) {
    let identity = &block.identity;
    let location = json!({
        "tier": block.location.tier.as_str(),
        "node": block.location.node.0,
        "volume": block.location.volume.map(|volume| volume.0),
    });
    let of_block = [
        ("sequence_hash", json!(identity.hash.to_string())),
        ("prefix_hash", json!(block.prefix_hash.to_string())),
        ("parent_hash", json!(identity.parent.map(|parent| parent.to_string()))),
        ("local_hash", json!(block.local_hash.map(|hash| hash.0))),
        ("position", json!(identity.position)),
        ("namespace", json!(format!("{:08x}", identity.namespace.0))),
        ("group", json!(identity.group.0)),
        ("block_bytes", json!(block.block_bytes)),
        ("block_tokens", json!(block.block_tokens)),
        ("storage_location", location),
    ];
    fields.extend(of_block.map(|(name, value)| (name.to_owned(), value)));
}

/// A delivery as JSON, one value for each event.
pub(super) fn delivery_json(delivery: &Delivery) -> Vec<Value> {
    match delivery {
        Delivery::Events { stream, events } => {
            let one = |event: &KvEvent| {
                let mut value = of_stream("event", *stream);
                if let (Some(fields), Value::Object(event)) = (value.as_object_mut(), event_json(event)) {
                    fields.extend(event);
                }
                value
            };
            events.iter().map(one).collect()
        }
        Delivery::Gap { stream, missing } => {
            let mut value = of_stream("gap", *stream);
            value["first"] = json!(missing.start);
            value["missing"] = json!(missing.end - missing.start);
            vec![value]
        }
        Delivery::Restarted { source, previous, epoch } => vec![json!({
            "type": "restarted",
            "source": source.to_string(),
            "previous_epoch": previous.0,
            "epoch": epoch.0,
        })],
    }
}

/// Where a stream was joined, as JSON: nothing unless something came before.
pub(super) fn joined_json(stream: StreamId, joined_at: u64) -> Option<Value> {
    let mut value = of_stream("joined", stream);
    value["joined_at"] = json!(joined_at);
    (joined_at > 0).then_some(value)
}

fn of_stream(kind: &str, stream: StreamId) -> Value {
    json!({
        "type": kind,
        "source": stream.source.to_string(),
        "epoch": stream.epoch.0,
        "shard": stream.shard,
    })
}

/// A delivery for people, one line for each event.
pub(super) fn delivery_lines(delivery: &Delivery) -> Vec<String> {
    match delivery {
        Delivery::Events { stream, events } => events.iter().map(|event| line(*stream, event)).collect(),
        Delivery::Gap { stream, missing } => vec![format!(
            "{}  GAP: {} events from number {} on are missing",
            stream.source,
            missing.end - missing.start,
            missing.start
        )],
        Delivery::Restarted { source, epoch, .. } => {
            vec![format!("{source}  RESTARTED: epoch {}; what it held before is gone", epoch.0)]
        }
    }
}

/// Where a stream was joined, for people: nothing unless something came before.
pub(super) fn joined_line(stream: StreamId, joined_at: u64) -> Option<String> {
    (joined_at > 0)
        .then(|| format!("{}  JOINED at number {joined_at}: what came before is not shown", stream.source))
}

fn line(stream: StreamId, event: &KvEvent) -> String {
    let (source, number) = (stream.source, event.sequence);
    let (kind, block) = match &event.kind {
        EventKind::Store(block) => ("store ", block),
        EventKind::Remove(block) => ("remove", block),
        EventKind::Cleared => return format!("{source}  {number:>8}  cleared: it holds nothing any more"),
    };
    let place = match block.location.volume {
        Some(volume) => format!("{} volume {}", block.location.tier, volume.0),
        None => block.location.tier.to_string(),
    };
    format!(
        "{source}  {number:>8}  {kind}  {place}  node {}  {}  position {} of {}  {} tokens, {}",
        block.location.node.0,
        block.identity.hash,
        block.identity.position,
        block.prefix_hash,
        block.block_tokens,
        crate::human::bytes(block.block_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::events_plane::{SourceId, wire};
    use kvbm::plan::Epoch;

    const OURS: &[u8] = include_bytes!("../../../kvbm-events/tests/golden/batch_v1.bin");

    #[test]
    fn every_delivery_has_a_line_and_a_value() {
        let batch = wire::decode(OURS).unwrap();
        let (stream, count) = (batch.stream, batch.events.len());
        let events = Delivery::Events { stream, events: batch.events };
        let (lines, values) = (delivery_lines(&events), delivery_json(&events));
        assert_eq!((lines.len(), values.len()), (count, count));
        assert!(lines[0].starts_with("1122334455667788 ") && lines[0].contains("store   G"), "{}", lines[0]);
        assert!(lines[3].contains("cleared"), "{}", lines[3]);
        assert_eq!(
            (values[0]["type"].as_str(), values[0]["event_type"].as_str()),
            (Some("event"), Some("store"))
        );

        let gap = Delivery::Gap { stream, missing: 5..9 };
        assert!(delivery_lines(&gap)[0].ends_with("GAP: 4 events from number 5 on are missing"));
        assert_eq!(delivery_json(&gap)[0]["missing"], 4);
        assert!(joined_line(stream, 5).unwrap().contains("JOINED at number 5"));
        assert_eq!(joined_json(stream, 5).unwrap()["joined_at"], 5);
        assert!(joined_json(stream, 0).is_none() && joined_line(stream, 0).is_none(), "nothing was before");
        let restarted = Delivery::Restarted { source: SourceId(7), previous: Epoch(1), epoch: Epoch(2) };
        assert!(delivery_lines(&restarted)[0].contains("RESTARTED: epoch 2"));
        assert_eq!(delivery_json(&restarted)[0]["previous_epoch"], 1);
    }
}
