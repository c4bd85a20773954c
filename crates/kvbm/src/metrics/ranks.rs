//! Which ranks are there.

use super::counters::{Counter, Gauge};
use super::expose::{Labels, counter_value};
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use std::fmt;

/// Metrics of one rank.
#[derive(Debug, Default)]
pub struct RankMetrics {
    /// 1 while it is given up.
    pub lost: Gauge,
    /// Times that it was given up.
    pub losses: Counter,
}

pub(super) fn encode(ranks: &[RankMetrics], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    if ranks.is_empty() {
        return Ok(());
    }
    let help = "1 while the rank is given up: nothing is sent to it until its worker starts again";
    let mut metric = encoder.encode_descriptor("rank_lost", help, None, MetricType::Gauge)?;
    for (rank, metrics) in ranks.iter().enumerate() {
        let labels: Labels<'_> = &[("rank", &rank.to_string())];
        metric.encode_family(&labels)?.encode_gauge(&metrics.lost.get())?;
    }
    let mut metric = encoder.encode_descriptor(
        "rank_losses",
        "Times that the rank was given up",
        None,
        MetricType::Counter,
    )?;
    for (rank, metrics) in ranks.iter().enumerate() {
        let labels: Labels<'_> = &[("rank", &rank.to_string())];
        counter_value(&mut metric.encode_family(&labels)?, metrics.losses.get())?;
    }
    Ok(())
}
