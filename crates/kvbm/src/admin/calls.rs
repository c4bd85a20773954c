//! Each call, carried out.

use super::call_arguments::{CHAIN, Fields, MAX_PIN_S, Refusal};
use super::host::{AdminHost, Unknown};
use super::status_json;
use crate::http::{HttpRequest, HttpResponse};
use crate::leader::{Commit, FlushError, Leader};
use crate::places;
use kvbm_plan::{NamespaceId, deadline_after};
use kvbm_pool::Registry;
use kvbm_tokens::Namespace;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// How long calls wait that name no time.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bodies above this are taken one at a time: JSON in memory is larger than its text.
const LARGE: usize = 64 << 10;

/// What is called.
type Call = fn(&AdminCalls, &Leader, &[u8]) -> Result<Value, Refusal>;

/// Every call beside `GET /metrics`.
const CALLS: &[(&str, &str, Call)] = &[
    ("GET", "/v1/status", AdminCalls::status),
    ("GET", "/v1/volumes", AdminCalls::volumes),
    ("GET", "/v1/quotas", AdminCalls::quotas),
    ("POST", "/v1/quotas", AdminCalls::set_quota),
    ("POST", "/v1/look-up", AdminCalls::look_up),
    ("POST", "/v1/pin", AdminCalls::pin),
    ("POST", "/v1/unpin", AdminCalls::unpin),
    ("POST", "/v1/ttl", AdminCalls::set_ttl),
    ("POST", "/v1/clear", AdminCalls::clear),
    ("POST", "/v1/forget", AdminCalls::forget),
    ("POST", "/v1/flush", AdminCalls::flush),
    ("POST", "/v1/drain", AdminCalls::drain),
    ("GET", "/v1/log", AdminCalls::log),
    ("POST", "/v1/log", AdminCalls::set_log),
];

/// The calls to one manager.
pub(crate) struct AdminCalls {
    /// It keeps the leader alive while a call runs, and not between calls.
    leader: Weak<Leader>,
    namespace: Namespace,
    model: String,
    host: OnceLock<Arc<dyn AdminHost>>,
    began: Instant,
    one_large: Mutex<()>,
}

impl fmt::Debug for AdminCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminCalls").field("model", &self.model).finish_non_exhaustive()
    }
}

impl AdminCalls {
    pub(crate) fn new(leader: Weak<Leader>, namespace: Namespace, model: &str) -> Self {
        Self {
            leader,
            namespace,
            model: model.to_owned(),
            host: OnceLock::new(),
            began: Instant::now(),
            one_large: Mutex::new(()),
        }
    }

    pub(super) fn set_host(&self, host: Arc<dyn AdminHost>) {
        // The first one counts.
        let _other = self.host.set(host);
    }

    fn host(&self) -> &dyn AdminHost {
        self.host.get().map_or(&Unknown, Arc::as_ref)
    }

    /// Carries out a call of somebody who may make it.
    pub(super) fn answer(&self, request: &HttpRequest) -> HttpResponse {
        let HttpRequest { method, path, body, .. } = request;
        let Some(leader) = self.leader.upgrade() else {
            return HttpResponse::error(503, "the manager has ended");
        };
        if path == "/metrics" && matches!(method.as_str(), "GET" | "HEAD") {
            return leader.metrics.response();
        }
        let Some((.., call)) = CALLS.iter().find(|(verb, at, _)| *verb == method && *at == path) else {
            return unknown(method, path);
        };
        if method == "POST" {
            tracing::info!(target: "kvbm", call = path.as_str(), "an operator calls");
        }
        let _one = (body.len() > LARGE).then(|| self.one_large.lock());
        match call(self, &leader, body) {
            Ok(value) => HttpResponse::json(200, &value),
            Err(refusal) => refusal.response(),
        }
    }

    /// The namespace of the tenant and the adapter that a call names: the manager's where it names
    /// none.
    fn namespace(&self, leader: &Leader, fields: &Fields) -> Result<Namespace, Refusal> {
        let mut namespace = self.namespace.clone();
        if let Some(adapter) = fields.text("adapter")? {
            namespace = namespace.adapter(adapter);
        }
        if let Some(tenant) = fields.text("tenant")? {
            leader.tenants.id(tenant).map_err(Refusal::wrong)?;
            namespace = namespace.tenant(tenant);
        }
        Ok(namespace)
    }
}

/// The calls, all of the type [`Call`].
#[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "they stand in one table")]
impl AdminCalls {
    fn status(&self, leader: &Leader, _body: &[u8]) -> Result<Value, Refusal> {
        let mut fields = status_json::status(leader);
        let of_process = [
            ("version", json!(env!("CARGO_PKG_VERSION"))),
            ("pid", json!(std::process::id())),
            ("uptime_s", json!(self.began.elapsed().as_secs())),
            ("model", json!(self.model)),
            ("namespace", json!(self.namespace.tag().to_string())),
            ("engines", json!(status_json::engines(self.host()))),
            ("host_pages", json!(self.host().host_pages())),
            ("log_level", json!(self.host().log_level())),
        ];
        fields.extend(of_process.map(|(name, value)| (name.to_owned(), value)));
        Ok(Value::Object(fields))
    }

    fn volumes(&self, leader: &Leader, _body: &[u8]) -> Result<Value, Refusal> {
        Ok(json!({ "volumes": status_json::volumes(&leader.status().volumes) }))
    }

    fn quotas(&self, leader: &Leader, _body: &[u8]) -> Result<Value, Refusal> {
        Ok(json!({ "tenants": status_json::tenants(&leader.tenants.status()) }))
    }

    fn set_quota(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let fields = Fields::parse(body, &[&["tenant", "share"]])?;
        let (tenant, share) = (fields.text("tenant")?, fields.number("share")?);
        let (Some(tenant), Some(share)) = (tenant, share) else {
            return Err(Refusal::wrong("give tenant and share, like {\"tenant\": \"acme\", \"share\": 0.5}"));
        };
        leader.tenants.set_share(tenant, share).map_err(Refusal::wrong)?;
        self.quotas(leader, body)
    }

    fn look_up(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let fields = Fields::parse(body, &[CHAIN])?;
        let chain = fields.chain(&self.namespace(leader, &fields)?)?;
        let (chain, group) = (chain.chain(), leader.full_group());
        let Leader { registry, volumes, peers, .. } = leader;
        let peers = peers.get().map(|peers| &**peers);
        Ok(status_json::places(chain, &places::look_up_with_peers(registry, volumes, peers, group, chain)))
    }

    fn pin(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let fields = Fields::parse(body, &[CHAIN, &["tiers", "iterations", "seconds"]])?;
        let chain = fields.chain(&self.namespace(leader, &fields)?)?;
        let (chain, tiers) = (chain.chain(), fields.tiers()?);
        let pinned = match (fields.whole("iterations")?, fields.seconds("seconds", MAX_PIN_S)?) {
            (Some(iterations), None) => {
                let until = leader.registry.iteration().saturating_add(iterations);
                leader.pin(chain, tiers, until).map_err(Refusal::conflict)?
            }
            (None, Some(time)) => {
                let until = deadline_after(kvbm_plan::clock::now(), time);
                leader.pin_until(chain, tiers, until).map_err(Refusal::conflict)?
            }
            _ => return Err(Refusal::wrong("give seconds or iterations: how long the blocks stay pinned")),
        };
        Ok(json!({ "asked": chain.len(), "pinned": pinned }))
    }

    fn unpin(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let fields = Fields::parse(body, &[CHAIN, &["tiers"]])?;
        let chain = fields.chain(&self.namespace(leader, &fields)?)?;
        Ok(json!({ "ended": leader.unpin(chain.chain(), fields.tiers()?) }))
    }

    fn set_ttl(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let fields = Fields::parse(body, &[&["tenant", "adapter", "iterations", "seconds"]])?;
        let namespace = NamespaceId::from(self.namespace(leader, &fields)?.tag());
        let (iterations, seconds) = (fields.whole("iterations")?, fields.whole("seconds")?);
        let time = seconds.map(Duration::from_secs);
        // Both or none.
        Registry::check_ttl(iterations, time).map_err(Refusal::wrong)?;
        leader.registry.set_ttl_time(namespace, time).map_err(Refusal::wrong)?;
        leader.registry.set_ttl(namespace, iterations).map_err(Refusal::wrong)?;
        Ok(json!({ "iterations": iterations, "seconds": seconds }))
    }

    fn clear(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let tier = Fields::parse(body, &[&["tier"]])?.tier()?;
        let removed = leader.clear(tier, Commit::Await).map_err(Refusal::conflict)?;
        Ok(json!({ "tier": tier.as_str(), "removed": removed }))
    }

    fn forget(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let fields = Fields::parse(body, &[&["tenant", "adapter", "model", "timeout_s"]])?;
        let names_part = fields.text("tenant")?.is_some() || fields.text("adapter")?.is_some();
        match fields.text("model")? {
            Some(model) if model != self.model => {
                let why = format!(
                    "model = '{model}': this manager's is '{}', and nothing was forgotten",
                    self.model
                );
                return Err(Refusal::wrong(why));
            }
            None if !names_part => {
                let why = "name what to forget: tenant, adapter, or the manager's own namespace by its model";
                return Err(Refusal::wrong(why));
            }
            _ => {}
        }
        let namespace = NamespaceId::from(self.namespace(leader, &fields)?.tag());
        let deadline = deadline_after(kvbm_plan::clock::now(), fields.timeout(TIMEOUT)?);
        Ok(status_json::receipt(&leader.forget_with_receipt(namespace, deadline)))
    }

    fn flush(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let timeout = Fields::parse(body, &[&["timeout_s"]])?.timeout(TIMEOUT)?;
        match leader.flush(deadline_after(kvbm_plan::clock::now(), timeout)) {
            Ok(report) => Ok(json!({ "durable_blocks": report.durable_blocks })),
            Err(error @ FlushError::NoDisk) => Err(Refusal::conflict(error)),
            Err(error) => Err(Refusal { status: 503, why: error.to_string() }),
        }
    }

    fn drain(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let timeout = Fields::parse(body, &[&["timeout_s"]])?.timeout(TIMEOUT)?;
        let deadline = deadline_after(kvbm_plan::clock::now(), timeout);
        let mut report = leader.shut_down(deadline);
        if let Some(events) = leader.events.get().and_then(Weak::upgrade) {
            report.events_unpublished = events.flush_last(deadline);
        }
        Ok(status_json::drained(&report))
    }

    fn log(&self, _leader: &Leader, _body: &[u8]) -> Result<Value, Refusal> {
        Ok(json!({ "level": self.host().log_level() }))
    }

    fn set_log(&self, leader: &Leader, body: &[u8]) -> Result<Value, Refusal> {
        let fields = Fields::parse(body, &[&["level"]])?;
        let levels = ["error", "warn", "info", "debug", "trace"];
        let level = fields.text("level")?.unwrap_or_default();
        if !levels.contains(&level) {
            let shown: String = level.chars().take(40).collect();
            return Err(Refusal::wrong(format!("level = '{shown}': give one of {}", levels.join(", "))));
        }
        self.host().set_log_level(level).map_err(|why| Refusal { status: 501, why })?;
        self.log(leader, body)
    }
}

/// There is no such call: what there is.
fn unknown(method: &str, path: &str) -> HttpResponse {
    let verbs: Vec<_> = CALLS.iter().filter(|(_, at, _)| *at == path).map(|(verb, ..)| *verb).collect();
    if !verbs.is_empty() {
        let method: String = method.chars().take(20).collect();
        return HttpResponse::error(405, &format!("{path} takes {}, not {method}", verbs.join(" and ")));
    }
    let calls: Vec<_> = CALLS.iter().map(|(verb, at, _)| format!("{verb} {at}")).collect();
    HttpResponse::error(404, &format!("there is no such call; there are GET /metrics, {}", calls.join(", ")))
}
