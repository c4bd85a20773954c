//! Which metrics there are: what dashboards and alerts are made of.

use super::{Counters, Metrics};
use kvbm_plan::{NodeId, Rank, VolumeId};

/// How a metric counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Grows.
    Counter,
    /// Is what it is now.
    Gauge,
    /// Has buckets.
    Histogram,
}

/// A metric with all its series.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricFamily {
    /// Its name, without `_total` and the like.
    pub name: String,
    /// How it counts.
    pub kind: MetricKind,
    /// What it says.
    pub help: String,
    /// Names of its labels, `le` left out.
    pub labels: Vec<String>,
}

impl MetricFamily {
    /// Names of its series.
    pub fn series(&self) -> Vec<String> {
        let with = |suffix: &str| format!("{}{suffix}", self.name);
        match self.kind {
            MetricKind::Counter => vec![with("_total")],
            MetricKind::Gauge => vec![self.name.clone()],
            MetricKind::Histogram => vec![with("_bucket"), with("_sum"), with("_count")],
        }
    }

    /// The metrics of a text in the OpenMetrics format. Lines that are none of it are left out.
    pub fn parse(text: &str) -> Vec<Self> {
        let mut families: Vec<Self> = Vec::new();
        let mut help = String::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                rest.split_once(' ').map_or("", |(_, help)| help).clone_into(&mut help);
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let Some((name, kind)) = rest.split_once(' ') else { continue };
                let kind = match kind {
                    "counter" => MetricKind::Counter,
                    "histogram" => MetricKind::Histogram,
                    _ => MetricKind::Gauge,
                };
                let (name, help) = (name.to_owned(), help.trim_end_matches('.').to_owned());
                families.push(Self { name, kind, help, labels: Vec::new() });
            } else if let (Some(family), Some((_, labels))) = (families.last_mut(), line.split_once('{'))
                && family.labels.is_empty()
            {
                let names = labels.split("\",").filter_map(|pair| pair.split_once('=')).map(|(name, _)| name);
                family.labels = names.filter(|name| *name != "le").map(str::to_owned).collect();
            }
        }
        families
    }
}

impl Metrics {
    /// Every metric that a manager can have: with volumes, disks, tenants, workers, peers
    /// and the engines of a node daemon.
    pub fn schema() -> Vec<MetricFamily> {
        let metrics = Self::new();
        let counters: &Counters = &metrics;
        counters.set_ranks(1);
        counters.engines_or_new();
        counters.set_tenants(["tenant".to_owned()].into_iter());
        drop((counters.volume(VolumeId(0)), counters.remote.peer(NodeId(0))));
        drop((counters.disks.errors(Rank(0), "dir"), counters.disks.rank(Rank(0))));
        counters.disks.set_directories(vec![[false; 2]]);
        MetricFamily::parse(&metrics.encode())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_has_names_kinds_help_and_labels() {
        let schema = Metrics::schema();
        let find = |name: &str| schema.iter().find(|family| family.name == name).cloned().unwrap();
        assert_eq!(find("kvbm_hit_blocks").kind, MetricKind::Counter);
        assert_eq!(find("kvbm_hit_blocks").series(), ["kvbm_hit_blocks_total"]);
        assert_eq!(find("kvbm_tier_slots").labels, ["tier", "state"]);
        assert_eq!(find("kvbm_transfer_latency_seconds").labels, ["path"]);
        assert_eq!(find("kvbm_transfer_latency_seconds").kind, MetricKind::Histogram);
        assert_eq!(find("kvbm_disk_errors").labels, ["rank", "dir"]);
        assert_eq!(find("kvbm_volume_down").labels, ["volume"]);
        assert_eq!(find("kvbm_tenant_blocks").labels, ["tenant", "tier"]);
        assert!(find("kvbm_lookup_blocks").labels.is_empty());
        for family in &schema {
            assert!(family.help.len() > 10 && family.name.starts_with("kvbm_"), "{family:?}");
        }
    }
}
