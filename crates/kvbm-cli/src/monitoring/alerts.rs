//! Alert rules for Prometheus.

use std::fmt::Write;

use serde_json::Value;

/// A rule: name, expression, how long it has to hold, severity, what is wrong, what to do.
struct Rule {
    name: &'static str,
    expr: &'static str,
    lasts: &'static str,
    severity: &'static str,
    summary: &'static str,
    action: &'static str,
}

const RULES: &[Rule] = &[
    Rule {
        name: "KvbmWrongBytesStored",
        expr: "sum by (instance, path) (increase(kvbm_transfer_failed_blocks_total{reason=\"differs\"}[15m])) > 0",
        lasts: "0m",
        severity: "critical",
        summary: "An audit found stored blocks that differ from what the engine computes",
        action: "Clear the cache and look for the cause: docs/vllm.md, section Audit.",
    },
    Rule {
        name: "KvbmRankLost",
        expr: "max by (instance, rank) (kvbm_rank_lost) == 1",
        lasts: "1m",
        severity: "critical",
        summary: "Rank {{ $labels.rank }} is given up: nothing is found or stored",
        action: "Start its worker again.",
    },
    Rule {
        name: "KvbmWaitsForOffloads",
        expr: "sum by (instance) (increase(kvbm_sync_offloads_total[15m])) > 0",
        lasts: "0m",
        severity: "critical",
        summary: "Allocations waited for a transfer, which must never happen",
        action: "Report it with the log.",
    },
    Rule {
        name: "KvbmDirectoryDown",
        expr: "max by (instance, directory, operation) (kvbm_disk_directory_down) == 1",
        lasts: "5m",
        severity: "warning",
        summary: "Directory {{ $labels.directory }} of the disk takes no {{ $labels.operation }}s",
        action: "`kvbm ctl status` has the failure, `kvbm doctor --dir` names the device.",
    },
    Rule {
        name: "KvbmVolumeDown",
        expr: "max by (instance, volume) (kvbm_volume_down) == 1",
        lasts: "5m",
        severity: "warning",
        summary: "Volume {{ $labels.volume }} is left alone because it failed",
        action: "`kvbm ctl volumes` has the failure.",
    },
    Rule {
        name: "KvbmPeerDown",
        expr: "max by (instance, peer) (kvbm_remote_down) == 1",
        lasts: "10m",
        severity: "warning",
        summary: "Peer {{ $labels.peer }} is left alone because it failed",
        action: "`kvbm ctl status` has the failure. See whether that node runs.",
    },
    Rule {
        name: "KvbmEngineGone",
        expr: "kvbm_node_engines{state=\"ready\"} < max_over_time(kvbm_node_engines{state=\"ready\"}[1h])",
        lasts: "5m",
        severity: "warning",
        summary: "Fewer engines of the node daemon {{ $labels.instance }} are ready than in the last hour",
        action: "`kvbm ctl status` names the engines that are attached, and whether they are ready; the log of an engine says why it is not. The alert ends an hour after the engine was last ready, mended or not.",
    },
    Rule {
        name: "KvbmDamagedBlocks",
        expr: "sum by (instance, tier) (increase(kvbm_corrupt_blocks_total[1h])) > 0",
        lasts: "0m",
        severity: "warning",
        summary: "Damaged blocks on {{ $labels.tier }}; none was served",
        action: "`kvbm disk verify` finds more. Several on one disk mean that it is dying.",
    },
    Rule {
        name: "KvbmSlotsQuarantined",
        expr: "sum by (instance, tier) (kvbm_tier_slots{state=\"quarantined\"}) / sum by (instance, tier) (kvbm_tier_slots) > 0.01",
        lasts: "5m",
        severity: "warning",
        summary: "More than 1 % of the slots of {{ $labels.tier }} are out of use",
        action: "Replace the disk or the memory.",
    },
    Rule {
        name: "KvbmNotDurable",
        expr: "sum by (instance, rank) (kvbm_disk_unsynced_blocks) > 0",
        lasts: "5m",
        severity: "warning",
        summary: "Blocks of rank {{ $labels.rank }} are readable and not durable: their sync failed",
        action: "See the log of the worker and the disk's health.",
    },
    Rule {
        name: "KvbmTransfersFail",
        expr: "sum by (instance, path) (rate(kvbm_transfer_failed_blocks_total[10m])) / (sum by (instance, path) (rate(kvbm_transfer_failed_blocks_total[10m])) + sum by (instance, path) (rate(kvbm_transfer_blocks_total[10m]))) > 0.05",
        lasts: "10m",
        severity: "warning",
        summary: "More than 5 % of the blocks on {{ $labels.path }} do not arrive",
        action: "The reasons are in kvbm_transfer_failed_blocks_total; docs/operate.md explains them.",
    },
    Rule {
        name: "KvbmEventsLost",
        expr: "sum by (instance) (increase(kvbm_events_lost_total[15m])) > 0",
        lasts: "0m",
        severity: "warning",
        summary: "Events were lost: followers resynchronise",
        action: "Raise events.ring_capacity, or see whether the transport is up.",
    },
    Rule {
        name: "KvbmEventsLate",
        expr: "max by (instance) (kvbm_event_lag_seconds) > 10",
        lasts: "5m",
        severity: "warning",
        summary: "Events are published more than 10 s late",
        action: "See whether the transport of events.url is up.",
    },
    Rule {
        name: "KvbmTenantRefused",
        expr: "sum by (instance, tenant, tier) (rate(kvbm_tenant_refused_blocks_total[10m])) > 0",
        lasts: "15m",
        severity: "info",
        summary: "Tenant {{ $labels.tenant }} is refused blocks on {{ $labels.tier }}: it is over its share",
        action: "`kvbm ctl quotas` shows shares and changes them.",
    },
];

/// The rules.
pub(super) fn yaml() -> String {
    let mut out = String::from(
        "# Made by `kvbm alerts` of the metrics that kvbm has.\ngroups:\n  - name: kvbm\n    rules:\n",
    );
    // A JSON text is a YAML text.
    let quoted = |text: &str| Value::from(text).to_string();
    for Rule { name, expr, lasts, severity, summary, action } in RULES {
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "      - alert: {name}\n        expr: {}\n        for: {lasts}\n        labels:\n          severity: {severity}\n        \
             annotations:\n          summary: {}\n          description: {}\n",
            quoted(expr),
            quoted(summary),
            quoted(action)
        );
    }
    out
}

/// Every expression of the rules.
#[cfg(test)]
pub(super) fn expressions() -> Vec<String> {
    RULES.iter().map(|rule| rule.expr.to_owned()).collect()
}
