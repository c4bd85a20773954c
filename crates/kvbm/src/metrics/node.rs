//! Engines of a node daemon.

use super::counters::Gauge;
use super::expose::Labels;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use std::fmt;

/// How many engines are attached to a node daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounts {
    /// Engines with a scheduler whose blocks can be copied on all ranks.
    pub ready: u64,
    /// Engines with a process that is missing, or that still maps host memory.
    pub attaching: u64,
}

/// The same as metrics.
#[derive(Debug, Default)]
pub struct EngineMetrics {
    /// See [`EngineCounts::ready`].
    pub ready: Gauge,
    /// See [`EngineCounts::attaching`].
    pub attaching: Gauge,
}

impl EngineMetrics {
    pub(super) fn set(&self, counts: EngineCounts) {
        self.ready.set(counts.ready);
        self.attaching.set(counts.attaching);
    }
}

pub(super) fn encode(engines: Option<&EngineMetrics>, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let Some(EngineMetrics { ready, attaching }) = engines else { return Ok(()) };
    let help = "Engines that are attached to the node daemon: ready, or with a process that is missing or still maps host memory";
    let mut metric = encoder.encode_descriptor("node_engines", help, None, MetricType::Gauge)?;
    for (state, gauge) in [("ready", ready), ("attaching", attaching)] {
        let labels: Labels<'_> = &[("state", state)];
        metric.encode_family(&labels)?.encode_gauge(&gauge.get())?;
    }
    Ok(())
}
