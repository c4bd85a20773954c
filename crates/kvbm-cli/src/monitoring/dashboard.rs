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
    axis: Axis,
    help: &'static str,
    series: &'static [(&'static str, &'static str)],
}

/// The vertical axis of a panel.
#[derive(Clone, Copy)]
enum Axis {
    /// From 0 to the highest value.
    FromZero,
    /// From 0 to 1 or more: values that are 0 as a rule.
    FromZeroToOne,
    /// 0 and 1.
    Switch,
    /// Powers of ten.
    Logarithmic,
}

impl Axis {
    /// What a panel's fields have by default.
    fn fields(self, unit: &str) -> Value {
        match self {
            Self::FromZero => json!({ "unit": unit, "min": 0 }),
            Self::FromZeroToOne => json!({ "unit": unit, "min": 0, "custom": { "axisSoftMax": 1 } }),
            Self::Switch => json!({ "unit": unit, "min": 0, "max": 1, "decimals": 0 }),
            Self::Logarithmic => {
                json!({ "unit": unit, "custom": { "scaleDistribution": { "type": "log", "log": 10 } } })
            }
        }
    }
}

/// Panels of the rows that are open.
const ROWS: &[(&str, &[Panel])] = &[
    (
        "Cache",
        &[
            Panel {
                title: "Hit ratio by tier",
                unit: "percentunit",
                axis: Axis::FromZero,
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
                unit: "percentunit",
                axis: Axis::FromZero,
                help: "What the slots of each tier do, as a share of the tier.",
                series: &[(
                    "sum by (tier, state) (avg_over_time(kvbm_tier_slots{SELECT}[WINDOW])) / ignoring (state) group_left sum by (tier) (avg_over_time(kvbm_tier_slots{SELECT}[WINDOW])) > 0",
                    "{{tier}} {{state}}",
                )],
            },
            Panel {
                title: "Evictions",
                unit: "ops",
                axis: Axis::FromZero,
                help: "Blocks that left a tier a second, by the reason.",
                series: &[(
                    "sum by (tier, reason) (rate(kvbm_evicted_blocks_total{SELECT}[WINDOW])) > 0",
                    "{{tier}} {{reason}}",
                )],
            },
            Panel {
                title: "Loaded or computed",
                unit: "ops",
                axis: Axis::FromZero,
                help: "Blocks below G1 that requests found, and why each was loaded or computed again.",
                series: &[(
                    "sum by (tier, reason) (rate(kvbm_load_decisions_total{SELECT}[WINDOW])) > 0",
                    "{{tier}} {{reason}}",
                )],
            },
            Panel {
                title: "Prefetch",
                unit: "ops",
                axis: Axis::FromZeroToOne,
                help: "Blocks of the disk that prefetches were asked for, by what became of them.",
                series: &[(
                    "sum by (outcome) (rate(kvbm_prefetch_blocks_total{SELECT}[WINDOW]))",
                    "{{outcome}}",
                )],
            },
            Panel {
                title: "Tenants",
                unit: "percentunit",
                axis: Axis::FromZero,
                help: "Blocks of each tenant as a part of its share. Above 100 %, it has what others leave.",
                series: &[(
                    "sum by (tenant, tier) (kvbm_tenant_blocks{SELECT}) / sum by (tenant, tier) (kvbm_tenant_limit_blocks{SELECT}) > 0",
                    "{{tenant}} {{tier}}",
                )],
            },
        ],
    ),
    (
        "Transfers",
        &[
            Panel {
                title: "Bytes",
                unit: "Bps",
                axis: Axis::FromZero,
                help: "Bytes that arrived a second, by path.",
                series: &[(
                    "sum by (path) (rate(kvbm_transfer_bytes_total{SELECT}[WINDOW])) > 0",
                    "{{path}}",
                )],
            },
            Panel {
                title: "Speed while busy",
                unit: "Bps",
                axis: Axis::FromZero,
                help: "Bytes a second of the time in which a path had transfers: what the path can do.",
                series: &[(
                    "sum by (path) (rate(kvbm_transfer_bytes_total{SELECT}[WINDOW])) / sum by (path) (rate(kvbm_transfer_busy_seconds_total{SELECT}[WINDOW]) > 0)",
                    "{{path}}",
                )],
            },
            Panel {
                title: "Latency",
                unit: "s",
                axis: Axis::Logarithmic,
                help: "From submission of a transfer to its completion: half, and 99 of 100, are below.",
                series: &[
                    (
                        "histogram_quantile(0.5, sum by (le, path) (rate(kvbm_transfer_latency_seconds_bucket{SELECT}[WINDOW]))) > 0",
                        "{{path}} p50",
                    ),
                    (
                        "histogram_quantile(0.99, sum by (le, path) (rate(kvbm_transfer_latency_seconds_bucket{SELECT}[WINDOW]))) > 0",
                        "{{path}} p99",
                    ),
                ],
            },
            Panel {
                title: "Queues",
                unit: "short",
                axis: Axis::FromZero,
                help: "Blocks whose offload waits, and transfers that run.",
                series: &[
                    (
                        "sum by (path) (avg_over_time(kvbm_transfer_queue_depth{SELECT}[WINDOW])) > 0",
                        "{{path}} waiting",
                    ),
                    (
                        "sum by (path) (avg_over_time(kvbm_transfer_in_flight{SELECT}[WINDOW])) > 0",
                        "{{path}} running",
                    ),
                ],
            },
            Panel {
                title: "Blocks that did not arrive",
                unit: "ops",
                axis: Axis::FromZero,
                help: "Requests computed them again. docs/operate.md has the reasons.",
                series: &[(
                    "sum by (path, reason) (rate(kvbm_transfer_failed_blocks_total{SELECT}[WINDOW])) > 0",
                    "{{path}} {{reason}}",
                )],
            },
            Panel {
                title: "Offloads that were dropped",
                unit: "ops",
                axis: Axis::FromZero,
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
                axis: Axis::Switch,
                help: "1 while a directory, a volume or a peer is left alone, or a rank is given up.",
                series: &[
                    (
                        "max by (instance, directory, operation) (kvbm_disk_directory_down{SELECT})",
                        "{{instance}} directory {{directory}} {{operation}}",
                    ),
                    (
                        "max by (instance, volume) (kvbm_volume_down{SELECT})",
                        "{{instance}} volume {{volume}}",
                    ),
                    ("max by (instance, peer) (kvbm_remote_down{SELECT})", "{{instance}} peer {{peer}}"),
                    ("max by (instance, rank) (kvbm_rank_lost{SELECT})", "{{instance}} rank {{rank}}"),
                ],
            },
            Panel {
                title: "Damage",
                unit: "short",
                axis: Axis::FromZeroToOne,
                help: "Damaged blocks were never served. More than a few on one disk mean that it is dying.",
                series: &[
                    (
                        "sum by (instance, tier) (increase(kvbm_corrupt_blocks_total{SELECT}[WINDOW])) > 0",
                        "{{instance}} {{tier}} damaged",
                    ),
                    (
                        "sum by (instance, rank) (increase(kvbm_disk_errors_total{SELECT}[WINDOW]))",
                        "{{instance}} rank {{rank}} disk errors",
                    ),
                    (
                        "sum by (instance, volume) (increase(kvbm_volume_errors_total{SELECT}[WINDOW]))",
                        "{{instance}} volume {{volume}} errors",
                    ),
                ],
            },
            Panel {
                title: "Events",
                unit: "s",
                axis: Axis::FromZeroToOne,
                help: "How long the oldest event waits to be published.",
                series: &[("max by (instance) (kvbm_event_lag_seconds{SELECT})", "{{instance}}")],
            },
            Panel {
                title: "Engines of node daemons",
                unit: "short",
                axis: Axis::FromZero,
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

/// Title, expression, legend and unit of the panel for one metric.
fn of_family(family: &MetricFamily) -> (String, String, String, &'static str) {
    let by = if family.labels.is_empty() { "instance".to_owned() } else { family.labels.join(", ") };
    let legend = by.split(", ").map(|label| format!("{{{{{label}}}}}")).collect::<Vec<_>>().join(" ");
    let name = &family.name;
    let is_seconds = name.ends_with("_seconds");
    // Most reasons never occur.
    let shown = if family.labels.iter().any(|label| label == "reason") { " > 0" } else { "" };
    match family.kind {
        MetricKind::Counter => {
            // Of seconds: seconds a second.
            let of_others = if is_seconds { "percentunit" } else { "ops" };
            let unit = if name.ends_with("_bytes") { "Bps" } else { of_others };
            let expr = format!("sum by ({by}) (rate({name}_total{{SELECT}}[WINDOW])){shown}");
            (name.clone(), expr, legend, unit)
        }
        MetricKind::Gauge => {
            let unit = if is_seconds { "s" } else { "short" };
            let sum = if family.help.starts_with("1 while") { "max" } else { "sum" };
            (name.clone(), format!("{sum} by ({by}) ({name}{{SELECT}}){shown}"), legend, unit)
        }
        MetricKind::Histogram => {
            let sum = format!("sum by (le, {by}) (rate({name}_bucket{{SELECT}}[WINDOW]))");
            let unit = if is_seconds { "s" } else { "short" };
            (format!("{name}, p99"), format!("histogram_quantile(0.99, {sum}) > 0"), legend, unit)
        }
    }
}

fn panel(
    at: (usize, usize),
    id: usize,
    title: &str,
    fields: &Value,
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
        "fieldConfig": { "defaults": fields, "overrides": [] },
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
        for (Panel { title, unit, axis, help, series }, at) in each.iter().zip(places) {
            let series: Vec<_> =
                series.iter().map(|(expr, legend)| (filled(expr), (*legend).to_owned())).collect();
            panels.push(panel(at, next(), title, &axis.fields(unit), help, &series));
        }
        top = below;
    }
    let schema = Metrics::schema();
    let number = next();
    let (places, _) = placed(top + 1, schema.len());
    let all = schema.iter().zip(places).map(|(family, at)| {
        let (title, expr, legend, unit) = of_family(family);
        let fields = Axis::FromZero.fields(unit);
        panel(at, next(), &title, &fields, &family.help, &[(filled(&expr), legend)])
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
    shown.chain(schema.iter().map(|family| filled(&of_family(family).1))).collect()
}
