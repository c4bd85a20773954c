//! What may be asked; `docs/events.md` is its description.

use std::time::Duration;

use anyhow::Result;
use kvbm::Tier;
use kvbm::events_plane::vllm::{Adapter, EngineHash};
use kvbm::http::HttpRequest;
use kvbm::plan::GroupId;
use serde_json::{Map, Value, json};

/// An answer: a status and JSON.
#[derive(Debug, PartialEq)]
pub(super) struct Response {
    pub(super) status: u16,
    pub(super) body: Value,
}

impl Response {
    const fn ok(body: Value) -> Self {
        Self { status: 200, body }
    }

    fn error(status: u16, message: &str) -> Self {
        Self { status, body: json!({ "error": message }) }
    }
}

/// An index that follows its sources and answers.
pub(super) trait Served: Send + Sync {
    /// Takes in what comes for about `time`.
    fn follow(&self, time: Duration) -> Result<()>;

    /// For each source that has the first block of the chain, how much of it it has, the longest
    /// first.
    fn find(&self, question: &Question) -> Result<Vec<Found>, String>;

    /// Each source as it is known.
    fn sources(&self) -> Vec<Value>;

    /// Blocks on each tier, of all sources together.
    fn sizes(&self) -> [u64; 4];

    /// How the index is doing.
    fn health(&self) -> Value;
}

/// What a source has of a chain.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) source: String,
    pub(super) blocks: u32,
    pub(super) by_tier: [u64; 4],
}

/// A chain to look for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) group: GroupId,
    pub(super) chain: Chain,
}

/// A prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Chain {
    /// By the hashes of its blocks.
    Hashes(Vec<EngineHash>),
    /// By its tokens.
    Tokens {
        tokens: Vec<u32>,
        adapter: Adapter,
        /// Of the first blocks, as JSON.
        extra_keys: Vec<Option<String>>,
    },
}

/// Most hashes or tokens of a question.
const MAX_HASHES: usize = 100_000;
const MAX_TOKENS: usize = 1 << 20;

/// The answer to a request.
pub(super) fn answer(index: &dyn Served, request: &HttpRequest) -> Response {
    match (request.method.as_str(), request.path.as_str()) {
        ("GET", "/health") => Response::ok(index.health()),
        ("GET", "/sources") => Response::ok(json!({ "sources": index.sources() })),
        ("GET", "/sizes") => Response::ok(json!({ "blocks": tiers(index.sizes()) })),
        ("GET", "/find") => asked(index, query(&request.query)),
        ("POST", "/find") => asked(index, body(&request.body)),
        (_, "/health" | "/sources" | "/sizes") => Response::error(405, "use GET"),
        (_, "/find") => Response::error(405, "use GET or POST"),
        _ => Response::error(404, "there is /health, /sources, /sizes and /find"),
    }
}

fn asked(index: &dyn Served, question: Result<Question, String>) -> Response {
    let answer = question.and_then(|question| Ok((index.find(&question)?, question)));
    match answer {
        Ok((found, question)) => Response::ok(matches(&found, &question)),
        Err(message) => Response::error(400, &message),
    }
}

fn matches(found: &[Found], question: &Question) -> Value {
    let matches: Vec<Value> = found
        .iter()
        .map(|found| {
            json!({ "source": found.source, "blocks": found.blocks, "by_tier": tiers(found.by_tier) })
        })
        .collect();
    match &question.chain {
        Chain::Hashes(hashes) => json!({ "asked": hashes.len(), "matches": matches }),
        Chain::Tokens { tokens, .. } => json!({ "asked_tokens": tokens.len(), "matches": matches }),
    }
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
    by_hashes(group, hashes.ok_or("hashes are missing: write hashes=H1,H2,..")?)
}

/// `{"hashes": [.., ..], "group": 0}` or `{"tokens": [.., ..], "lora_name": "..", "lora_id": 1,
/// "extra_keys": [null, ..], "group": 0}`
fn body(bytes: &[u8]) -> Result<Question, String> {
    let wanted = r#"send {"hashes": ["..", ..], "group": 0}, or {"tokens": [1, ..]} to an index of engines"#;
    let value: Value = serde_json::from_slice(bytes).map_err(|error| format!("{error}; {wanted}"))?;
    let group = match &value["group"] {
        Value::Null => 0,
        group => group.as_u64().and_then(|group| u16::try_from(group).ok()).ok_or("group is not a group")?,
    };
    let fields = value.as_object().ok_or_else(|| format!("hashes are missing; {wanted}"))?;
    let known = ["hashes", "tokens", "lora_name", "lora_id", "extra_keys", "group"];
    if let Some(other) = fields.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(format!("'{other}' is not known; {wanted}"));
    }
    match (&value["hashes"], &value["tokens"]) {
        (Value::Array(hashes), Value::Null) => {
            let one = |value: &Value| match value {
                Value::String(text) => hash(text),
                other => hash(&other.to_string()),
            };
            by_hashes(GroupId(group), hashes.iter().map(one).collect::<Result<_, _>>()?)
        }
        (Value::Null, Value::Array(tokens)) => by_tokens(GroupId(group), tokens, &value),
        _ => Err(format!("hashes are missing; {wanted}")),
    }
}

fn by_hashes(group: GroupId, hashes: Vec<EngineHash>) -> Result<Question, String> {
    if hashes.len() > MAX_HASHES {
        return Err(format!("{} hashes are too many: at most {MAX_HASHES}", hashes.len()));
    }
    Ok(Question { group, chain: Chain::Hashes(hashes) })
}

fn by_tokens(group: GroupId, tokens: &[Value], value: &Value) -> Result<Question, String> {
    if tokens.len() > MAX_TOKENS {
        return Err(format!("{} tokens are too many: at most {MAX_TOKENS}", tokens.len()));
    }
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        token.ok_or_else(|| format!("{value} is not a token: a number below 2^32"))
    };
    let lora_name = match &value["lora_name"] {
        Value::Null => None,
        Value::String(name) => Some(name.clone()),
        other => return Err(format!("lora_name: {other} is not a name")),
    };
    let lora_id = match &value["lora_id"] {
        Value::Null => None,
        other => Some(other.as_u64().ok_or_else(|| format!("lora_id: {other} is not an adapter's number"))?),
    };
    let extra_keys = match &value["extra_keys"] {
        Value::Null => Vec::new(),
        Value::Array(keys) => keys.iter().map(|keys| (!keys.is_null()).then(|| keys.to_string())).collect(),
        other => return Err(format!("extra_keys: {other} is not a list with an entry for each block")),
    };
    let tokens = tokens.iter().map(token).collect::<Result<_, _>>()?;
    Ok(Question {
        group,
        chain: Chain::Tokens { tokens, adapter: Adapter { id: lora_id, name: lora_name }, extra_keys },
    })
}

/// A number as engines write it, or bytes in hex: 32 digits for a sequence hash of kvbm's.
fn hash(text: &str) -> Result<EngineHash, String> {
    // Twenty digits hold every number; bytes have more digits.
    if text.len() <= 20 {
        if let Ok(number) = text.parse() {
            return Ok(EngineHash::Uint(number));
        }
        if let Ok(number) = text.parse() {
            return Ok(EngineHash::Int(number));
        }
    }
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let is_hex = !text.is_empty() && text.len() <= 128 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    let bytes =
        (is_hex && text.len().is_multiple_of(2)).then(|| text.as_bytes().chunks(2).map(pair).collect());
    let wrong =
        || format!("'{text}' is not a sequence hash: 32 hex digits, or an engine's number or hex bytes");
    bytes.flatten().map(EngineHash::Bytes).ok_or_else(wrong)
}

/// Numbers by the names of the tiers.
pub(super) fn tiers(blocks: [u64; Tier::ALL.len()]) -> Value {
    let pairs = Tier::ALL.iter().zip(blocks).map(|(tier, blocks)| (tier.as_str().to_owned(), json!(blocks)));
    pairs.collect::<Map<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use super::super::index::Index;
    use super::*;
    use kvbm::KvBlockManager;
    use kvbm::config::{Blocks, ModelConfig};
    use kvbm::events_plane::{EventTransport, KvIndex, Subscriber};
    use std::time::Instant;

    fn ask(index: &Index, method: &str, target: &str, body: &str) -> (u16, Value) {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let request = HttpRequest {
            method: method.into(),
            path: path.into(),
            query: query.into(),
            authorization: None,
            body: body.as_bytes().to_vec(),
        };
        let Response { status, body } = answer(index, &request);
        (status, body)
    }

    /// Follows a manager that was there before: its blocks come by a snapshot.
    #[test]
    fn a_late_subscriber_receives_what_is_there() {
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
        let index = Index::new(subscriber, transport, KvIndex::default(), Duration::from_secs(60));
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
    fn wrong_requests_get_an_error_with_the_way_out() {
        let transport = std::sync::Arc::new(kvbm::events_plane::InProcessTransport::default());
        let subscriber = Subscriber::new(transport.subscribe().unwrap());
        let index = Index::new(subscriber, transport, KvIndex::default(), Duration::ZERO);
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
            ("POST", "/find", r#"{"hashes": [7]}"#, 400, "'7' is not a sequence hash"),
            ("POST", "/find", r#"{"hashes": [true]}"#, 400, "'true' is not a sequence hash"),
            ("POST", "/find", r#"{"hashes": [], "tokens": []}"#, 400, "hashes are missing"),
            ("POST", "/find", r#"{"hash": []}"#, 400, "'hash' is not known"),
            ("POST", "/find", r#"{"tokens": [-1]}"#, 400, "-1 is not a token"),
            ("POST", "/find", r#"{"tokens": [1], "lora_name": 7}"#, 400, "lora_name: 7"),
            ("POST", "/find", r#"{"tokens": [1], "lora_id": "x"}"#, 400, "lora_id: \"x\" is not"),
            ("POST", "/find", r#"{"tokens": [1], "lora_id": -1}"#, 400, "lora_id: -1 is not"),
            ("POST", "/find", r#"{"tokens": [1], "extra_keys": "x"}"#, 400, "an entry for each block"),
            ("POST", "/find", r#"{"tokens": [1]}"#, 400, "tokens are for engines"),
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
        let index = Index::new(subscriber, asked, KvIndex::default(), Duration::from_nanos(1));
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
