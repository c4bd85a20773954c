//! A command line as a call.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use serde_json::{Map, Value, json};

use super::CtlCall;
use crate::args::WrongUsage;

/// Time for the answer to a call that waits for nothing.
const SHORT: Duration = Duration::from_secs(30);
/// Bytes of a file with tokens: a manager takes no longer bodies.
const MAX_TOKENS_FILE: u64 = 8 << 20;

/// Blocks of a prompt.
#[derive(Clone, Debug, Default, Args)]
pub struct ChainArgs {
    /// Tokens of the prompt, with commas.
    #[arg(long, value_name = "TOKEN,..", value_delimiter = ',')]
    pub tokens: Vec<u32>,

    /// File with the tokens, between commas or spaces; - for standard input.
    #[arg(long, value_name = "FILE")]
    pub tokens_file: Option<PathBuf>,

    /// Hashes of the blocks from the first one on, as events have them.
    #[arg(long, value_name = "HASH,..", value_delimiter = ',')]
    pub hashes: Vec<String>,

    /// Hashes of the blocks from the first one on, as the engine has them, in hexadecimal.
    #[arg(long, value_name = "HASH,..", value_delimiter = ',')]
    pub engine_hashes: Vec<String>,

    /// Cache salt of the request, with tokens.
    #[arg(long, value_name = "TEXT")]
    pub salt: Option<String>,

    /// Whose blocks.
    #[command(flatten)]
    pub namespace: NamespaceArgs,
}

/// A part of the manager's blocks.
#[derive(Clone, Debug, Default, Args)]
pub struct NamespaceArgs {
    /// A tenant of `tenants.shares`.
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<String>,

    /// An adapter, with its version, as the engine names it.
    #[arg(long, value_name = "NAME")]
    pub adapter: Option<String>,
}

/// A call as it is made.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) body: Option<Value>,
    /// Until the answer has to be there.
    pub(super) time: Duration,
}

/// The call that a command line means.
pub(super) fn call(call: &CtlCall) -> Result<Asked> {
    let get = |path| Asked { method: "GET", path, body: None, time: SHORT };
    Ok(match call {
        CtlCall::Status => get("/v1/status"),
        CtlCall::Volumes => get("/v1/volumes"),
        CtlCall::LookUp(chain) => post("/v1/look-up", chain.fields()?),
        CtlCall::Pin { chain, tiers, seconds, iterations } => {
            let mut fields = with_tiers(chain, tiers)?;
            put(&mut fields, "seconds", *seconds);
            put(&mut fields, "iterations", *iterations);
            post("/v1/pin", fields)
        }
        CtlCall::Unpin { chain, tiers } => post("/v1/unpin", with_tiers(chain, tiers)?),
        CtlCall::Ttl { namespace, iterations, seconds } => {
            let mut fields = namespace.fields();
            put(&mut fields, "seconds", *seconds);
            if let Some(iterations) = iterations.as_deref().filter(|iterations| *iterations != "off") {
                let number: u64 = iterations.parse().map_err(|_| {
                    WrongUsage(format!("'{iterations}': give a whole number of iterations, or off"))
                })?;
                put(&mut fields, "iterations", Some(number));
            }
            post("/v1/ttl", fields)
        }
        CtlCall::Quotas { tenant: Some(tenant), share: Some(share) } => {
            post("/v1/quotas", object(&json!({ "tenant": tenant, "share": share })))
        }
        CtlCall::Quotas { .. } => get("/v1/quotas"),
        CtlCall::Clear { tier } => waits("/v1/clear", object(&json!({ "tier": tier })), 60.0)?,
        CtlCall::Forget { namespace, model, timeout } => {
            let mut fields = namespace.fields();
            put(&mut fields, "model", model.as_deref());
            put(&mut fields, "timeout_s", Some(*timeout));
            waits("/v1/forget", fields, *timeout)?
        }
        CtlCall::Flush { timeout } => waits("/v1/flush", object(&json!({ "timeout_s": timeout })), *timeout)?,
        CtlCall::Drain { timeout } => waits("/v1/drain", object(&json!({ "timeout_s": timeout })), *timeout)?,
        CtlCall::Log { level: Some(level) } => post("/v1/log", object(&json!({ "level": level }))),
        CtlCall::Log { level: None } => get("/v1/log"),
    })
}

fn post(path: &'static str, fields: Map<String, Value>) -> Asked {
    Asked { method: "POST", path, body: Some(Value::Object(fields)), time: SHORT }
}

/// A call that waits for disks and volumes.
fn waits(path: &'static str, fields: Map<String, Value>, seconds: f64) -> Result<Asked> {
    let time = Duration::try_from_secs_f64(seconds)
        .map_err(|_| WrongUsage(format!("--timeout {seconds}: give seconds above 0")))?;
    // What is removed waits for the disks as long once more at most.
    Ok(Asked { time: time.saturating_mul(2).saturating_add(SHORT), ..post(path, fields) })
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap_or_default()
}

fn put<T: Into<Value>>(fields: &mut Map<String, Value>, name: &str, value: Option<T>) {
    if let Some(value) = value {
        fields.insert(name.to_owned(), value.into());
    }
}

fn with_tiers(chain: &ChainArgs, tiers: &[String]) -> Result<Map<String, Value>> {
    let mut fields = chain.fields()?;
    put(&mut fields, "tiers", Some(tiers.to_vec()).filter(|tiers| !tiers.is_empty()));
    Ok(fields)
}

impl NamespaceArgs {
    fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        put(&mut fields, "tenant", self.tenant.as_deref());
        put(&mut fields, "adapter", self.adapter.as_deref());
        fields
    }
}

impl ChainArgs {
    fn fields(&self) -> Result<Map<String, Value>> {
        let mut fields = self.namespace.fields();
        let mut tokens = self.tokens.clone();
        if let Some(path) = &self.tokens_file {
            tokens.extend(crate::token_file::read(path, MAX_TOKENS_FILE)?);
        }
        let given = [!tokens.is_empty(), !self.hashes.is_empty(), !self.engine_hashes.is_empty()];
        if given.into_iter().filter(|given| *given).count() != 1 {
            let why = "name the blocks by one of --tokens, --tokens-file, --hashes and --engine-hashes";
            return Err(WrongUsage(why.to_owned()).into());
        }
        put(&mut fields, "tokens", Some(tokens).filter(|tokens| !tokens.is_empty()));
        put(&mut fields, "hashes", Some(self.hashes.clone()).filter(|hashes| !hashes.is_empty()));
        put(
            &mut fields,
            "engine_hashes",
            Some(self.engine_hashes.clone()).filter(|hashes| !hashes.is_empty()),
        );
        put(&mut fields, "salt", self.salt.as_deref());
        Ok(fields)
    }
}
