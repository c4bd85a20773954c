//! A dashboard for Grafana: the questions of an operator first, then every metric.

use kvbm::metrics::{MetricFamily, MetricKind, Metrics};
use serde_json::{Value, json};

/// Columns of a dashboard, and of a panel; lines of a panel.
const COLUMNS: usize = 24;
const WIDTH: usize = 8;
const HEIGHT: usize = 8;

/// A panel: title, unit, what it means, and expressions with their legends. `SELECT` stands for the
/// selection of managers, `WINDOW` for the time of a rate.
struct Panel {
    title: &'static str,
    unit: &'static str,
    help: &'static str,
    series: &'static [(&'static str, &'static str)],
}

/// Panels of the rows that are open.
const ROWS: &[(&str, &[Panel])] = &[
    (
        "Cache",
        &[
            Panel {
                title: "Hit ratio by tier",
                unit: "percentunit",
                help: "Share of the blocks that requests asked for, at the highest tier that held each, or at a peer.",
                series: &[
                    (
                        "sum by (tier) (rate(kvbm_hit_blocks_total{SELECT}[WINDOW])) / ignoring (tier) group_left sum(rate(kvbm_lookup_blocks_total{SELECT}[WINDOW]))",
                        "{{tier}}",
                    ),
                    (
                        "sum(rate(kvbm_remote_hit_blocks_total{SELECT}[WINDOW])) / sum(rate(kvbm_lookup_blocks_total{SELECT}[WINDOW]))",
                        "peers",
                    ),
                ],
            },
            Panel {
                title: "Slots",
                unit: "short",
                help: "What the slots of each tier do.",
                series: &[("sum by (tier, state) (kvbm_tier_slots{SELECT})", "{{tier}} {{state}}")],
            },
            Panel {
                title: "Evictions",
                unit: "ops",
                help: "Blocks that left a tier a second, by the reason.",
                series: &[(
                    "sum by (tier, reason) (rate(kvbm_evicted_blocks_total{SELECT}[WINDOW])) > 0",
                    "{{tier}} {{reason}}",
                )],
            },
            Panel {
                title: "Loaded or computed",
                unit: "ops",
                help: "Blocks below G1 that requests found, and why each was loaded or computed again.",
                series: &[(
                    "sum by (tier, reason) (rate(kvbm_load_decisions_total{SELECT}[WINDOW])) > 0",
                    "{{tier}} {{reason}}",
                )],
            },
            Panel {
                title: "Prefetch",
                unit: "ops",
                help: "Blocks of the disk that prefetches were asked for, by what became of them.",
                series: &[(
                    "sum by (outcome) (rate(kvbm_prefetch_blocks_total{SELECT}[WINDOW]))",
                    "{{outcome}}",
                )],
            },
            Panel {
                title: "Tenants",
                unit: "short",
                help: "Blocks of each tenant beside its share.",
                series: &[
                    ("sum by (tenant, tier) (kvbm_tenant_blocks{SELECT})", "{{tenant}} {{tier}}"),
                    ("sum by (tenant, tier) (kvbm_tenant_limit_blocks{SELECT})", "{{tenant}} {{tier}} share"),
                ],
            },
        ],
    ),
    (
        "Transfers",
        &[
            Panel {
                title: "Bytes",
                unit: "Bps",
                help: "Bytes that arrived a second, by path.",
                series: &[(
                    "sum by (path) (rate(kvbm_transfer_bytes_total{SELECT}[WINDOW])) > 0",
                    "{{path}}",
                )],
            },
            Panel {
                title: "Speed while busy",
                unit: "Bps",
                help: "Bytes a second of the time in which a path had transfers: what the path can do.",
                series: &[(
                    "sum by (path) (rate(kvbm_transfer_bytes_total{SELECT}[WINDOW])) / sum by (path) (rate(kvbm_transfer_busy_seconds_total{SELECT}[WINDOW]) > 0)",
                    "{{path}}",
                )],
            },
            Panel {
                title: "Latency",
                unit: "s",
                help: "From submission of a transfer to its completion: half, and 99 of 100, are below.",
                series: &[
                    (
                        "histogram_quantile(0.5, sum by (le, path) (rate(kvbm_transfer_latency_seconds_bucket{SELECT}[WINDOW])))",
                        "{{path}} p50",
                    ),
                    (
                        "histogram_quantile(0.99, sum by (le, path) (rate(kvbm_transfer_latency_seconds_bucket{SELECT}[WINDOW])))",
                        "{{path}} p99",
                    ),
                ],
            },
            Panel {
                title: "Queues",
                unit: "short",
                help: "Blocks whose offload waits, and transfers that run.",
                series: &[
                    ("sum by (path) (kvbm_transfer_queue_depth{SELECT}) > 0", "{{path}} waiting"),
                    ("sum by (path) (kvbm_transfer_in_flight{SELECT}) > 0", "{{path}} running"),
                ],
            },
            Panel {
                title: "Blocks that did not arrive",
                unit: "ops",
                help: "Requests computed them again. docs/operate.md has the reasons.",
                series: &[(
                    "sum by (path, reason) (rate(kvbm_transfer_failed_blocks_total{SELECT}[WINDOW])) > 0",
                    "{{path}} {{reason}}",
                )],
            },
            Panel {
                title: "Offloads that were dropped",
                unit: "ops",
                help: "The path below is the limit, or a store is down.",
                series: &[(
                    "sum by (path, reason) (rate(kvbm_offload_dropped_blocks_total{SELECT}[WINDOW])) > 0",
                    "{{path}} {{reason}}",
                )],
            },
        ],
    ),
    (
        "Health",
        &[
            Panel {
                title: "Open breakers and lost ranks",
                unit: "short",
                help: "1 while a directory, a volume or a peer is left alone, or a rank is given up.",
                series: &[
                    (
                        "max by (directory, operation) (kvbm_disk_directory_down{SELECT})",
                        "directory {{directory}} {{operation}}",
                    ),
                    ("max by (volume) (kvbm_volume_down{SELECT})", "volume {{volume}}"),
                    ("max by (peer) (kvbm_remote_down{SELECT})", "peer {{peer}}"),
                    ("max by (rank) (kvbm_rank_lost{SELECT})", "rank {{rank}}"),
                ],
            },
            Panel {
                title: "Damage",
                unit: "short",
                help: "Damaged blocks were never served. More than a few on one disk mean that it is dying.",
                series: &[
                    (
                        "sum by (tier) (increase(kvbm_corrupt_blocks_total{SELECT}[WINDOW]))",
                        "{{tier}} damaged",
                    ),
                    (
                        "sum by (rank, dir) (increase(kvbm_disk_errors_total{SELECT}[WINDOW]))",
                        "rank {{rank}} {{dir}} errors",
                    ),
                    (
                        "sum by (volume) (increase(kvbm_volume_errors_total{SELECT}[WINDOW]))",
                        "volume {{volume}} errors",
                    ),
                ],
            },
            Panel {
                title: "Events",
                unit: "s",
                help: "How long the oldest event waits to be published.",
                series: &[("max by (instance) (kvbm_event_lag_seconds{SELECT})", "{{instance}}")],
            },
            Panel {
                title: "Engines of node daemons",
                unit: "short",
                help: "Engines that are attached: ready, or without a process that can copy.",
                series: &[("sum by (instance, state) (kvbm_node_engines{SELECT})", "{{instance}} {{state}}")],
            },
        ],
    ),
];

/// What managers are shown.
const SELECT: &str = "instance=~\"$instance\"";
/// What Grafana puts in place of this suits the time between two scrapes.
const WINDOW: &str = "$__rate_interval";

fn filled(expr: &str) -> String {
    expr.replace("SELECT", SELECT).replace("WINDOW", WINDOW)
}

/// The expressions for one metric.
fn of_family(family: &MetricFamily) -> (String, String, &'static str) {
    let by = if family.labels.is_empty() { "instance".to_owned() } else { family.labels.join(", ") };
    let legend = by.split(", ").map(|label| format!("{{{{{label}}}}}")).collect::<Vec<_>>().join(" ");
    let name = &family.name;
    let is_seconds = name.ends_with("_seconds");
    match family.kind {
        MetricKind::Counter => {
            let unit = if name.ends_with("_bytes") { "Bps" } else { "ops" };
            (format!("sum by ({by}) (rate({name}_total{{SELECT}}[WINDOW]))"), legend, unit)
        }
        MetricKind::Gauge => {
            let unit = if is_seconds { "s" } else { "short" };
            (format!("sum by ({by}) ({name}{{SELECT}})"), legend, unit)
        }
        MetricKind::Histogram => {
            let sum = format!("sum by (le, {by}) (rate({name}_bucket{{SELECT}}[WINDOW]))");
            (format!("histogram_quantile(0.99, {sum})"), legend, if is_seconds { "s" } else { "short" })
        }
    }
}

fn panel(
    at: (usize, usize),
    id: usize,
    title: &str,
    unit: &str,
    help: &str,
    series: &[(String, String)],
) -> Value {
    let target = |(number, (expr, legend)): (u8, &(String, String))| {
        json!({
            "refId": char::from(b'A' + number).to_string(), "expr": expr, "legendFormat": legend,
            "datasource": { "type": "prometheus", "uid": "${datasource}" },
        })
    };
    json!({
        "id": id, "type": "timeseries", "title": title, "description": help,
        "datasource": { "type": "prometheus", "uid": "${datasource}" },
        "gridPos": { "x": at.0, "y": at.1, "w": WIDTH, "h": HEIGHT },
        "fieldConfig": { "defaults": { "unit": unit, "min": 0 }, "overrides": [] },
        "targets": (0..).zip(series).map(target).collect::<Vec<_>>(),
    })
}

/// Puts panels below line `top`, and says where the next ones go.
fn placed(top: usize, count: usize) -> (impl Iterator<Item = (usize, usize)>, usize) {
    let columns = COLUMNS / WIDTH;
    let places = (0..count).map(move |at| (at % columns * WIDTH, top + at / columns * HEIGHT));
    (places, top + count.div_ceil(columns) * HEIGHT)
}

fn row(id: usize, top: usize, title: &str, closed: &[Value]) -> Value {
    json!({
        "id": id, "type": "row", "title": title, "collapsed": !closed.is_empty(), "panels": closed,
        "gridPos": { "x": 0, "y": top, "w": COLUMNS, "h": 1 },
    })
}

/// The dashboard.
pub(super) fn json() -> String {
    let (mut panels, mut top, mut id) = (Vec::new(), 0, 0);
    let mut next = || {
        id += 1;
        id
    };
    for (title, each) in ROWS {
        panels.push(row(next(), top, title, &[]));
        let (places, below) = placed(top + 1, each.len());
        for (Panel { title, unit, help, series }, at) in each.iter().zip(places) {
            let series: Vec<_> =
                series.iter().map(|(expr, legend)| (filled(expr), (*legend).to_owned())).collect();
            panels.push(panel(at, next(), title, unit, help, &series));
        }
        top = below;
    }
    let schema = Metrics::schema();
    let number = next();
    let (places, _) = placed(top + 1, schema.len());
    let all = schema.iter().zip(places).map(|(family, at)| {
        let (expr, legend, unit) = of_family(family);
        panel(at, next(), &family.name, unit, &family.help, &[(filled(&expr), legend)])
    });
    let all: Vec<_> = all.collect();
    panels.push(row(number, top, "Every metric", &all));
    let dashboard = json!({
        "title": "kvbm", "uid": "kvbm", "tags": ["kvbm"], "schemaVersion": 39, "editable": true,
        "refresh": "10s", "time": { "from": "now-1h", "to": "now" },
        "description": "Made by `kvbm dashboard` of the metrics that kvbm has.",
        "templating": { "list": [
            { "name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus" },
            {
                "name": "instance", "label": "Manager", "type": "query", "multi": true, "includeAll": true,
                "allValue": ".*", "refresh": 2, "current": { "text": "All", "value": "$__all" },
                "datasource": { "type": "prometheus", "uid": "${datasource}" },
                "query": "label_values(kvbm_lookup_blocks_total, instance)",
            },
        ] },
        "panels": panels,
    });
    // A JSON value is always text.
    format!("{dashboard:#}\n")
}

/// Every expression of the dashboard.
#[cfg(test)]
pub(super) fn expressions() -> Vec<String> {
    let schema = Metrics::schema();
    let shown = ROWS.iter().flat_map(|(_, each)| *each).flat_map(|panel| panel.series);
    let shown = shown.map(|(expr, _)| filled(expr));
    shown.chain(schema.iter().map(|family| filled(&of_family(family).0))).collect()
}
