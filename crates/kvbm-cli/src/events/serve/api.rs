//! What may be asked; `docs/events.md` is its description.

use kvbm::plan::GroupId;
use kvbm::{SequenceHash, Tier};
use serde_json::{Map, Value, json};

use super::http::{Request, Response};
use super::index::Index;

/// Most hashes of a question.
const MAX_HASHES: usize = 100_000;

/// The answer to a request.
pub(super) fn answer(index: &Index, request: &Request) -> Response {
    match (request.method.as_str(), request.path.as_str()) {
        ("GET", "/health") => Response::ok(health(index)),
        ("GET", "/sources") => Response::ok(sources(index)),
        ("GET", "/sizes") => Response::ok(sizes(index)),
        ("GET", "/find") => asked(index, query(&request.query)),
        ("POST", "/find") => asked(index, body(&request.body)),
        (_, "/health" | "/sources" | "/sizes") => Response::error(405, "ask with GET"),
        (_, "/find") => Response::error(405, "ask with GET or POST"),
        _ => Response::error(404, "there is /health, /sources, /sizes and /find"),
    }
}

fn asked(index: &Index, question: Result<Question, String>) -> Response {
    match question {
        Ok(question) => find(index, &question),
        Err(message) => Response::error(400, &message),
    }
}

/// A chain to look for.
#[derive(Debug, PartialEq, Eq)]
struct Question {
    group: GroupId,
    hashes: Vec<SequenceHash>,
}

/// `hashes=H1,H2,..[&group=N]`
fn query(text: &str) -> Result<Question, String> {
    let (mut group, mut hashes) = (GroupId(0), None);
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("group", number)) => {
                group = GroupId(number.parse().map_err(|_| format!("group={number} is not a group"))?);
            }
            Some(("hashes", list)) => {
                let list = list.split(',').filter(|hash| !hash.is_empty());
                hashes = Some(list.map(hash).collect::<Result<Vec<_>, _>>()?);
            }
            _ => return Err(format!("{pair} is not known: write hashes=H1,H2,..&group=0")),
        }
    }
    limited(group, hashes.ok_or("hashes are missing: write hashes=H1,H2,..")?)
}

/// `{"hashes": ["..", ..], "group": 0}`
fn body(bytes: &[u8]) -> Result<Question, String> {
    let wanted = r#"send {"hashes": ["..", ..], "group": 0}"#;
    let value: Value = serde_json::from_slice(bytes).map_err(|error| format!("{error}; {wanted}"))?;
    let group = match &value["group"] {
        Value::Null => 0,
        group => group.as_u64().and_then(|group| u16::try_from(group).ok()).ok_or("group is not a group")?,
    };
    let list = value["hashes"].as_array().ok_or_else(|| format!("hashes are missing; {wanted}"))?;
    let text = |value: &Value| hash(value.as_str().unwrap_or_default());
    limited(GroupId(group), list.iter().map(text).collect::<Result<_, _>>()?)
}

fn limited(group: GroupId, hashes: Vec<SequenceHash>) -> Result<Question, String> {
    if hashes.len() > MAX_HASHES {
        return Err(format!("{} hashes are too many: at most {MAX_HASHES}", hashes.len()));
    }
    Ok(Question { group, hashes })
}

fn hash(text: &str) -> Result<SequenceHash, String> {
    text.parse().map_err(|_| format!("'{text}' is not a sequence hash: 32 hex digits"))
}

fn find(index: &Index, question: &Question) -> Response {
    let mut found = index.find(question.group, &question.hashes);
    found.sort_by_key(|found| (std::cmp::Reverse(found.blocks), found.source));
    let matches = found.iter().map(|found| {
        let by_tier = found.by_tier.map(u64::from);
        json!({ "source": found.source.to_string(), "blocks": found.blocks, "by_tier": tiers(by_tier) })
    });
    Response::ok(json!({ "asked": question.hashes.len(), "matches": matches.collect::<Vec<_>>() }))
}

fn tiers(blocks: [u64; Tier::ALL.len()]) -> Value {
    let pairs = Tier::ALL.iter().zip(blocks).map(|(tier, blocks)| (tier.as_str().to_owned(), json!(blocks)));
    pairs.collect::<Map<_, _>>().into()
}

fn sources(index: &Index) -> Value {
    let one = |known: &super::index::Known| {
        json!({
            "source": known.source.to_string(),
            "blocks": tiers(known.blocks),
            "suspect": known.suspect,
            "silent_s": known.silent.map(|silent| silent.as_secs_f64()),
        })
    };
    json!({ "sources": index.sources().iter().map(one).collect::<Vec<_>>() })
}

fn sizes(index: &Index) -> Value {
    let mut sum = [0; Tier::ALL.len()];
    for known in index.sources() {
        sum.iter_mut().zip(known.blocks).for_each(|(sum, blocks)| *sum += blocks);
    }
    json!({ "blocks": tiers(sum) })
}

fn health(index: &Index) -> Value {
    let health = index.health();
    let tracker = health.subscriber.tracker;
    json!({
        "status": if health.suspects == 0 { "ok" } else { "resyncing" },
        "suspects": health.suspects,
        "sources": health.index.workers,
        "blocks": health.index.blocks,
        "refused_blocks": health.index.refused,
        "index_bytes": health.index.bytes,
        "events": tracker.events,
        "gaps": tracker.gaps,
        "missing": tracker.missing,
        "duplicates": tracker.duplicates,
        "malformed": health.subscriber.malformed,
        "dropped": health.subscriber.dropped,
        "resyncs": health.follow.resyncs,
        "restarts": health.follow.restarts,
        "forgotten": health.forgotten,
        "lag_batches": health.waiting,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::KvBlockManager;
    use kvbm::config::{Blocks, ModelConfig};
    use kvbm::events_plane::{EventTransport, KvIndex, Subscriber};
    use std::time::{Duration, Instant};

    fn ask(index: &Index, method: &str, target: &str, body: &str) -> (u16, Value) {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let request = Request {
            method: method.into(),
            path: path.into(),
            query: query.into(),
            body: body.as_bytes().to_vec(),
        };
        let Response { status, body } = answer(index, &request);
        (status, body)
    }

    /// Follows a manager that was there before: its blocks come by a snapshot.
    #[test]
    fn who_comes_late_is_told_what_is_there() {
        let model = ModelConfig { num_layers: 1, num_kv_heads: 1, head_dim: 16, ..ModelConfig::default() };
        let manager = KvBlockManager::<kvbm::Owned>::builder()
            .model(model)
            .namespace(kvbm::Namespace::new("m"))
            .device(Blocks(8))
            .build_metadata_only()
            .unwrap();
        let tokens = manager.sequence(&[7; 64], b"").unwrap();
        let (done, _) = manager.commit(manager.allocate(4).unwrap(), &tokens, 0).unwrap();
        drop(manager.register(done).unwrap());
        assert!(manager.events().pump());

        let subscriber = manager.events().subscribe().unwrap();
        let transport = manager.events().transport();
        let index = Index::new(subscriber, transport, KvIndex::default(), Duration::from_secs(60)).unwrap();
        // One more, so that there is something to hear.
        let more = manager.sequence(&[8; 16], b"").unwrap();
        let (done, _) = manager.commit(manager.allocate(1).unwrap(), &more, 0).unwrap();
        drop(manager.register(done).unwrap());
        assert!(manager.events().pump());
        let deadline = Instant::now() + Duration::from_secs(20);
        while ask(&index, "GET", "/sizes", "").1["blocks"]["g1"] != 5 {
            assert!(Instant::now() < deadline, "{:?}", ask(&index, "GET", "/health", ""));
            index.follow(Duration::from_millis(5)).unwrap();
        }
        let source = manager.events().source().to_string();
        let hashes: Vec<String> = tokens.hashes().iter().map(ToString::to_string).collect();
        let (status, found) = ask(&index, "POST", "/find", &json!({ "hashes": hashes }).to_string());
        assert_eq!((status, &found["asked"]), (200, &json!(4)));
        assert_eq!(found["matches"][0]["source"], source);
        assert_eq!(
            (&found["matches"][0]["blocks"], &found["matches"][0]["by_tier"]["g1"]),
            (&json!(4), &json!(4))
        );
        let (_, again) = ask(&index, "GET", &format!("/find?group=0&hashes={}", hashes.join(",")), "");
        assert_eq!(again, found);
        let (_, none) = ask(&index, "GET", &format!("/find?hashes={}", "0".repeat(32)), "");
        assert_eq!(none["matches"], json!([]));

        let (_, health) = ask(&index, "GET", "/health", "");
        assert_eq!(
            (&health["status"], &health["blocks"], &health["resyncs"]),
            (&json!("ok"), &json!(5), &json!(1))
        );
        let (_, sources) = ask(&index, "GET", "/sources", "");
        assert_eq!(
            (&sources["sources"][0]["source"], &sources["sources"][0]["suspect"]),
            (&json!(source), &json!(false))
        );
    }

    #[test]
    fn who_asks_wrongly_is_told_how() {
        let transport = std::sync::Arc::new(kvbm::events_plane::InProcessTransport::default());
        let subscriber = Subscriber::new(transport.subscribe().unwrap());
        let index = Index::new(subscriber, transport, KvIndex::default(), Duration::ZERO).unwrap();
        for (method, target, body, status, part) in [
            ("GET", "/", "", 404, "/health"),
            ("POST", "/sizes", "", 405, "GET"),
            ("PUT", "/find", "", 405, "POST"),
            ("GET", "/find", "", 400, "hashes=H1"),
            ("GET", "/find?hashes=xyz", "", 400, "'xyz' is not a sequence hash: 32 hex digits"),
            ("GET", "/find?group=x&hashes=", "", 400, "group=x"),
            ("GET", "/find?hash=1", "", 400, "hash=1 is not known"),
            ("POST", "/find", "[", 400, "send {"),
            ("POST", "/find", "{}", 400, "hashes are missing"),
            ("POST", "/find", r#"{"hashes": [7]}"#, 400, "not a sequence hash"),
            ("POST", "/find", r#"{"hashes": [], "group": 70000}"#, 400, "not a group"),
        ] {
            let (got, answer) = ask(&index, method, target, body);
            let message = answer["error"].as_str().unwrap();
            assert!(got == status && message.contains(part), "{method} {target} {body}: {got} {message}");
        }
        assert_eq!(ask(&index, "GET", "/sizes", "").1["blocks"]["g3"], 0);
        assert_eq!(ask(&index, "GET", "/find?hashes=", "").0, 200);
    }

    #[test]
    fn a_source_that_is_silent_is_forgotten() {
        use kvbm::events_plane::{EventBatch, EventKind, KvEvent, StreamId, wire};
        let transport = std::sync::Arc::new(kvbm::events_plane::InProcessTransport::default());
        let subscriber = Subscriber::new(transport.subscribe().unwrap());
        let asked = transport.clone();
        let index = Index::new(subscriber, asked, KvIndex::default(), Duration::from_nanos(1)).unwrap();
        let stream =
            StreamId { source: kvbm::events_plane::SourceId(3), epoch: kvbm::plan::Epoch(1), shard: 0 };
        let batch = EventBatch::new(stream, 1, vec![KvEvent::new(0, EventKind::Cleared)]);
        transport.publish(&wire::encode(&batch).unwrap().into(), Duration::ZERO).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while ask(&index, "GET", "/health", "").1["forgotten"] != 1 {
            assert!(Instant::now() < deadline);
            index.follow(Duration::from_millis(5)).unwrap();
        }
        assert_eq!(ask(&index, "GET", "/sources", "").1["sources"], json!([]));
    }
}
