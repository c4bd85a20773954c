//! The status as JSON.

use super::host::{AdminEngine, AdminHost};
use crate::circuit_breaker::CircuitState;
use crate::leader::{ForgetReceipt, ForgottenKey, Leader, ShutdownReport};
use crate::metrics::EvictReason;
use crate::places::Places;
use crate::remote::PeerStatus;
use crate::slots::DirectoryStatus;
use crate::tenants::TenantStatus;
use crate::volume::VolumeStatus;
use kvbm_plan::{Failure, Tier, shown_uri};
use kvbm_pool::TierStatus;
use kvbm_tokens::BlockChain;
use serde_json::{Map, Value, json};

/// All of a manager, without what only the process knows.
pub(super) fn status(leader: &Leader) -> Map<String, Value> {
    let status = leader.status();
    let ranks = status
        .ranks
        .iter()
        .map(|rank| json!({ "rank": rank.rank.0, "lost": rank.is_lost, "unanswered_plans": rank.plans }));
    let paths = status.paths.iter().map(|on| {
        let summary = leader.metrics.path(on.path).summary();
        json!({
            "path": on.path.to_string(), "unanswered_plans": on.plans,
            "queued_blocks": on.backlog.queued_blocks, "running_blocks": on.backlog.running_blocks,
            "blocks": summary.blocks, "bytes": summary.bytes, "busy_s": summary.busy_s,
            "p50_us": summary.latency.p50_us, "p99_us": summary.latency.p99_us,
        })
    });
    let fields = json!({
        "epoch": leader.transfers.settings.epoch.0,
        "iteration": leader.registry.iteration(),
        "draining": leader.transfers.refuses_callers(),
        "shut_down": status.shut_down,
        "lookup_blocks": leader.metrics.lookups.get(),
        "peer_hit_blocks": leader.metrics.remote.hits(),
        "tiers": status.tiers.iter().map(|tier_status| tier(leader, tier_status)).collect::<Vec<_>>(),
        "paths": paths.collect::<Vec<_>>(),
        "disk": {
            "down": status.disk_down, "failure": failure(status.disk_failure.as_ref()),
            "directories": status.disk_directories.iter().map(directory).collect::<Vec<_>>(),
        },
        "ranks": ranks.collect::<Vec<_>>(),
        "volumes": volumes(&status.volumes),
        "peers": leader.peers.get().map_or_else(Vec::new, |peers| peers.status().iter().map(|it| peer(leader, it)).collect()),
        "tenants": tenants(&status.tenants),
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn tier(leader: &Leader, status: &TierStatus) -> Value {
    let metrics = leader.metrics.tier(status.tier);
    let evicted: u64 = match status.tier {
        Tier::G4 => metrics.evictions(EvictReason::Capacity).get(),
        tier => leader.registry.counters(tier).evicted,
    };
    json!({
        "tier": status.tier.as_str(), "capacity": status.capacity, "free": status.free,
        "used": status.capacity.saturating_sub(status.free),
        "held": status.held, "arriving": status.arriving, "active": status.active,
        "cached": status.inactive, "detached": status.detached, "quarantined": status.quarantined,
        "pinned": status.pinned, "transfer_pins": status.transfer_pins,
        "hit_blocks": metrics.hits.get(), "evicted_blocks": evicted,
        "corrupt_blocks": metrics.corrupt.get(),
    })
}

fn peer(leader: &Leader, status: &PeerStatus) -> Value {
    json!({
        "node": status.node.0, "circuit": circuit(status.circuit), "failure": status.failure,
        "reading": status.reading, "hit_blocks": leader.metrics.peer(status.node).hits.get(),
    })
}

/// Engines in other processes.
pub(super) fn engines(host: &dyn AdminHost) -> Vec<Value> {
    let engine = |engine: AdminEngine| json!({ "name": engine.name, "blocks": engine.blocks, "pids": engine.pids, "ready": engine.ready });
    host.engines().into_iter().map(engine).collect()
}

fn directory(status: &DirectoryStatus) -> Value {
    json!({
        "reads": circuit(status.reads), "writes": circuit(status.writes),
        "withheld_slots": status.withheld_slots, "failure": failure(status.failure.as_ref()),
    })
}

const fn circuit(state: CircuitState) -> &'static str {
    match state {
        CircuitState::Closed => "closed",
        CircuitState::Open => "open",
        CircuitState::HalfOpen => "half-open",
    }
}

fn failure(failure: Option<&Failure>) -> Option<String> {
    failure.map(ToString::to_string)
}

/// Every volume; URIs without what may be a secret.
pub(super) fn volumes(all: &[VolumeStatus]) -> Vec<Value> {
    let volume = |status: &VolumeStatus| {
        let descriptor = &status.descriptor;
        json!({
            "id": descriptor.id.0, "uri": shown_uri(&descriptor.uri), "capacity_bytes": descriptor.capacity_bytes,
            "state": if status.down { "down" } else if status.refusal.is_some() { "read-only" } else { "up" },
            "failure": failure(status.failure.as_ref()), "refusal": failure(status.refusal.as_ref()),
            "blocks": status.blocks, "bytes": status.bytes, "hit_blocks": status.hits,
            "missed_blocks": status.misses, "errors": status.errors, "full_blocks": status.full,
        })
    };
    all.iter().map(volume).collect()
}

/// Every tenant with a share, first the blocks of all others.
pub(super) fn tenants(all: &[TenantStatus]) -> Vec<Value> {
    let tenant = |status: &TenantStatus| {
        let on = |(tier, on): (Tier, &crate::tenants::TenantOnTier)| {
            json!({
                "tier": tier.as_str(), "limit": on.limit, "blocks": on.blocks, "held": on.held,
                "evicted": on.evicted, "refused": on.refused,
            })
        };
        let tiers: Vec<_> = Tier::SLOTTED.into_iter().zip(&status.tiers).map(on).collect();
        json!({ "name": status.name, "share": status.share.get(), "tiers": tiers })
    };
    all.iter().map(tenant).collect()
}

/// Where the blocks of a chain are.
pub(super) fn places(chain: BlockChain<'_>, found: &[Places]) -> Value {
    let on = |tier: Tier| found.iter().filter(|place| place.contains(tier)).count();
    let blocks = chain.hashes().iter().zip(found).map(|(hash, place)| {
        let tiers: Vec<_> = place.tiers.iter().map(Tier::as_str).collect();
        json!({ "hash": hash.to_string(), "tiers": tiers, "volume": place.volume.map(|id| id.0), "peer": place.node.map(|node| node.0) })
    });
    let by_tier: Map<String, Value> =
        Tier::ALL.into_iter().map(|tier| (tier.as_str().to_owned(), on(tier).into())).collect();
    json!({
        "asked": chain.len(), "found": found.len(), "by_tier": by_tier,
        "at_peers": found.iter().filter(|place| place.node.is_some()).count(), "blocks": blocks.collect::<Vec<_>>(),
    })
}

/// What a `forget` did.
pub(super) fn receipt(receipt: &ForgetReceipt) -> Value {
    let [g1, g2, g3] = receipt.copies;
    let volumes: Vec<_> = receipt.volumes_unconfirmed.iter().map(|id| id.0).collect();
    json!({
        "complete": receipt.is_complete(), "blocks": receipt.blocks,
        "removed": { "g1": g1, "g2": g2, "g3": g3, "g4": receipt.on_volumes },
        "slots_in_use": receipt.in_use, "disks_unconfirmed": receipt.disks_unconfirmed,
        "volumes_unconfirmed": volumes,
        "keys": { "destroyed": keys(receipt, true), "pending": keys(receipt, false) },
    })
}

fn keys(receipt: &ForgetReceipt, is_destroyed: bool) -> Vec<Value> {
    let key = |key: &ForgottenKey| {
        let (id, tier) = (key.id.to_string(), key.tier().as_str());
        json!({ "id": id, "tier": tier, "rank": key.rank.0, "volume": key.volume.map(|id| id.0) })
    };
    receipt.keys.iter().filter(|key| key.is_destroyed == is_destroyed).map(key).collect()
}

/// How a drain ended.
pub(super) fn drained(report: &ShutdownReport) -> Value {
    json!({
        "complete": report.is_complete(), "drained": report.drained, "durable_blocks": report.durable_blocks,
        "not_saved_blocks": report.not_saved,
        "flush_error": report.flush_error.as_ref().map(ToString::to_string),
        "removals_unconfirmed": report.removals_unconfirmed, "events_unpublished": report.events_unpublished,
    })
}
