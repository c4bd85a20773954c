//! What a call asks for: the JSON of its body.

use crate::http::HttpResponse;
use kvbm_plan::Tier;
use kvbm_pool::TierMask;
use kvbm_tokens::{BlockChain, BlockHasher, ExternalSequence, Namespace, SequenceHash, TokenSequence};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::time::Duration;

/// Names of what [`Fields::chain`] reads.
pub(super) const CHAIN: &[&str] = &["tokens", "hashes", "engine_hashes", "salt", "tenant", "adapter"];
/// Longest wait that a call may ask for.
const MAX_WAIT_S: f64 = 3600.0;
/// Longest time for which a chain may be pinned: a year.
pub(super) const MAX_PIN_S: f64 = 365.0 * 86_400.0;
/// Bytes of a hash of an engine.
const MAX_ENGINE_HASH: usize = 64;

/// A call that is not carried out.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: u16,
    pub(super) why: String,
}

impl Refusal {
    /// The call says something wrong.
    pub(super) fn wrong(why: impl Display) -> Self {
        Self { status: 400, why: why.to_string() }
    }

    /// The manager cannot do it as it is.
    pub(super) fn conflict(why: impl Display) -> Self {
        Self { status: 409, why: why.to_string() }
    }

    pub(super) fn response(&self) -> HttpResponse {
        HttpResponse::error(self.status, &self.why)
    }
}

/// The fields of a body.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads an object with fields of these names; an empty body has none.
    pub(super) fn parse(body: &[u8], known: &[&[&str]]) -> Result<Self, Refusal> {
        if body.trim_ascii().is_empty() {
            return Ok(Self(Map::new()));
        }
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| Refusal::wrong(format!("the body is no JSON: {error}")))?;
        let Value::Object(fields) = value else {
            return Err(Refusal::wrong("the body is no JSON object: send {\"name\": value, ..}"));
        };
        let known = known.concat();
        if let Some(other) = fields.keys().find(|name| !known.contains(&name.as_str())) {
            let other: String = other.chars().take(40).collect();
            return Err(Refusal::wrong(format!("'{other}' is not known; there are: {}", known.join(", "))));
        }
        Ok(Self(fields))
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A text.
    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, Refusal> {
        let text = |value| Value::as_str(value).ok_or_else(|| wrong_type(name, value, "a text"));
        self.get(name).map(text).transpose()
    }

    /// A whole number from 0.
    pub(super) fn whole(&self, name: &str) -> Result<Option<u64>, Refusal> {
        let whole = |value: &Value| value.as_u64().ok_or_else(|| wrong_type(name, value, "a whole number"));
        self.get(name).map(whole).transpose()
    }

    /// A number.
    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, Refusal> {
        let number = |value: &Value| value.as_f64().ok_or_else(|| wrong_type(name, value, "a number"));
        self.get(name).map(number).transpose()
    }

    /// A time in seconds, above 0 and at most `most`.
    pub(super) fn seconds(&self, name: &str, most: f64) -> Result<Option<Duration>, Refusal> {
        let Some(seconds) = self.number(name)? else { return Ok(None) };
        let allowed = Some(seconds).filter(|seconds| *seconds > 0.0 && *seconds <= most);
        let time = allowed.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        time.map(Some).ok_or_else(|| {
            Refusal::wrong(format!("{name} = {seconds}: give seconds, above 0 and at most {most}"))
        })
    }

    /// How long the caller waits.
    pub(super) fn timeout(&self, default: Duration) -> Result<Duration, Refusal> {
        Ok(self.seconds("timeout_s", MAX_WAIT_S)?.unwrap_or(default))
    }

    /// One tier.
    pub(super) fn tier(&self) -> Result<Tier, Refusal> {
        let name = self.text("tier")?.ok_or_else(|| Refusal::wrong("tier is missing: g1, g2, g3 or g4"))?;
        name.parse().map_err(|_| Refusal::wrong(format!("tier = '{name}': give g1, g2, g3 or g4")))
    }

    /// Tiers with slots; all of them where none are named.
    pub(super) fn tiers(&self) -> Result<TierMask, Refusal> {
        let Some(value) = self.get("tiers") else { return Ok(TierMask::ALL) };
        let names = value.as_array().ok_or_else(|| wrong_type("tiers", value, "a list like [\"g2\"]"))?;
        let tier = |name: &Value| {
            let tier = name.as_str().and_then(|name| name.parse::<Tier>().ok());
            tier.filter(|tier| *tier != Tier::G4).ok_or_else(|| {
                Refusal::wrong(format!(
                    "tiers: {} is none of g1, g2 and g3, where blocks are pinned",
                    shown(name)
                ))
            })
        };
        let tiers = names.iter().map(tier).collect::<Result<TierMask, Refusal>>()?;
        if tiers.is_empty() {
            Err(Refusal::wrong("tiers is empty: name some, or leave it out"))
        } else {
            Ok(tiers)
        }
    }

    /// The blocks that a call is about. `namespace` is that of the tenant and the adapter that it
    /// names.
    pub(super) fn chain(&self, namespace: &Namespace) -> Result<ChainArgument, Refusal> {
        let hasher = namespace.hasher().map_err(Refusal::wrong)?;
        let given: Vec<_> = CHAIN[..3].iter().copied().filter(|name| self.get(name).is_some()).collect();
        let salt = self.text("salt")?.unwrap_or_default();
        match given.as_slice() {
            ["tokens"] => {
                let token = |value: &Value| {
                    let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
                    token.ok_or_else(|| {
                        Refusal::wrong(format!("tokens: {} is no token, a number below 2^32", shown(value)))
                    })
                };
                let tokens = self.list("tokens", token)?;
                let mut sequence = if salt.is_empty() {
                    TokenSequence::new(hasher)
                } else {
                    TokenSequence::with_salt(hasher, salt.as_bytes()).map_err(Refusal::wrong)?
                };
                sequence.add_tokens(&tokens);
                Ok(ChainArgument::Tokens(sequence))
            }
            _ if !salt.is_empty() => {
                Err(Refusal::wrong("salt goes with tokens: hashes have it in them already"))
            }
            ["hashes"] => {
                let hash = |value: &Value| match value.as_str().unwrap_or_default().parse::<SequenceHash>() {
                    Ok(hash) => Ok(hash),
                    Err(error) => Err(Refusal::wrong(format!("hashes: {error}"))),
                };
                Ok(ChainArgument::Hashes(hasher, self.list("hashes", hash)?))
            }
            ["engine_hashes"] => {
                let hashes = self.list("engine_hashes", engine_hash)?;
                Ok(ChainArgument::Engine(ExternalSequence::from_hashes(hasher, hashes)))
            }
            _ => Err(Refusal::wrong(
                "give the blocks by one of: tokens [1, 2, ..], hashes [\"32 hexadecimal digits\", ..] as events have \
                 them, engine_hashes [\"hexadecimal digits\", ..] as the engine has them",
            )),
        }
    }

    fn list<T>(&self, name: &str, item: impl Fn(&Value) -> Result<T, Refusal>) -> Result<Vec<T>, Refusal> {
        let value = self.get(name).unwrap_or(&Value::Null);
        let list = value.as_array().ok_or_else(|| wrong_type(name, value, "a list"))?;
        if list.is_empty() {
            return Err(Refusal::wrong(format!("{name} is empty")));
        }
        list.iter().map(item).collect()
    }
}

/// Blocks of a call.
#[derive(Debug)]
pub(super) enum ChainArgument {
    /// By their tokens.
    Tokens(TokenSequence),
    /// By the hashes that kvbm has.
    Hashes(BlockHasher, Vec<SequenceHash>),
    /// By the hashes that an engine has.
    Engine(ExternalSequence),
}

impl ChainArgument {
    pub(super) fn chain(&self) -> BlockChain<'_> {
        match self {
            Self::Tokens(sequence) => sequence.chain(),
            Self::Hashes(hasher, hashes) if hasher.is_flat() => BlockChain::flat(hasher.tag(), hashes),
            Self::Hashes(hasher, hashes) => BlockChain::of_hashes(hashes).in_namespace(hasher.tag()),
            Self::Engine(sequence) => sequence.chain(),
        }
    }
}

fn engine_hash(value: &Value) -> Result<Vec<u8>, Refusal> {
    let text = value.as_str().unwrap_or_default();
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
    let digits = digits.filter(|digits| {
        !digits.is_empty() && digits.len().is_multiple_of(2) && digits.len() <= 2 * MAX_ENGINE_HASH
    });
    let bytes = |digits: Vec<u8>| digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    digits.map(bytes).ok_or_else(|| {
        let most = 2 * MAX_ENGINE_HASH;
        Refusal::wrong(format!("engine_hashes: {} is not 2 to {most} hexadecimal digits", shown(value)))
    })
}

fn wrong_type(name: &str, value: &Value, expected: &str) -> Refusal {
    Refusal::wrong(format!("{name} = {}: expected {expected}", shown(value)))
}

/// The start of a value, for messages.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(fields) => format!("an object of {}", fields.len()),
        other => other.to_string().chars().take(40).collect(),
    }
}
