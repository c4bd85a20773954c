//! The counters as OpenMetrics.

use std::fmt;
use std::sync::Arc;

use kvbm_plan::{FailureKind, Tier};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::counters::{
    Counters, DropReason, EvictReason, LoadReason, PathMetrics, PrefetchOutcome, RecoveryOutcome, SlotState,
    TierMetrics, VolumeCounters,
};

/// Walks the counters at each scrape; every combination of labels appears from the start, at 0.
#[derive(Debug)]
pub(super) struct Exposition(pub(super) Arc<Counters>);

pub(super) type Labels<'a> = &'a [(&'a str, &'a str)];

impl Collector for Exposition {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.totals(&mut encoder)?;
        self.outcomes(&mut encoder)?;
        self.event_queue(&mut encoder)?;
        self.tiers(&mut encoder)?;
        self.paths(&mut encoder)?;
        super::ranks::encode(self.0.ranks(), &mut encoder)?;
        super::node::encode(self.0.engines(), &mut encoder)?;
        super::tenants::encode(self.0.tenants(), &mut encoder)?;
        self.0.disks.encode(&mut encoder)?;
        self.0.remote.encode(&mut encoder)?;
        self.volumes(&mut encoder)
    }
}

impl Exposition {
    fn totals(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counters = &self.0;
        for (name, help, counter) in [
            ("lookup_blocks", "Blocks that requests asked for", &counters.lookups),
            (
                "audited_blocks",
                "Stored blocks compared with what the engine computed again",
                &counters.audited,
            ),
            (
                "sync_offloads",
                "Allocations that had to wait for a transfer (0 by construction)",
                &counters.sync_offloads,
            ),
            ("events_published", "Events that the transport took", &counters.events_published),
            ("events_lost", "Events that nobody will get: overwritten or refused", &counters.events_lost),
            (
                "event_gaps",
                "Times that events were overwritten before they were published",
                &counters.event_gaps,
            ),
            (
                "events_without_tokens",
                "Stored blocks published without their tokens, in a format that carries tokens",
                &counters.events_without_tokens,
            ),
            (
                "events_without_hash",
                "Stored blocks published with kvbm's hash, in a format that carries an engine's",
                &counters.events_without_hash,
            ),
            (
                "event_transport_unavailable",
                "Batches that the transport could not take; they were kept",
                &counters.event_transport_unavailable,
            ),
            (
                "malformed_messages",
                "Messages of workers that could not be read",
                &counters.malformed_messages,
            ),
            ("ignored_reports", "Reports that were repeated, late or stale", &counters.ignored_reports),
        ] {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            counter_value(&mut metric, counter.get())?;
        }
        Ok(())
    }

    /// What became of recovered blocks, and of those that prefetches were asked for.
    fn outcomes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counters = &self.0;
        let help = "Blocks that the disks held at the start, by what became of them";
        let mut metric = encoder.encode_descriptor("recovered_blocks", help, None, MetricType::Counter)?;
        for outcome in RecoveryOutcome::ALL {
            let labels: Labels<'_> = &[("outcome", outcome.as_str())];
            counter_value(&mut metric.encode_family(&labels)?, counters.recovered(*outcome).get())?;
        }
        let help = "Blocks of G3 that prefetches were asked for, by what became of them";
        let mut metric = encoder.encode_descriptor("prefetch_blocks", help, None, MetricType::Counter)?;
        for outcome in PrefetchOutcome::ALL {
            let labels: Labels<'_> = &[("outcome", outcome.as_str())];
            counter_value(&mut metric.encode_family(&labels)?, counters.prefetches(*outcome).get())?;
        }
        Ok(())
    }

    /// Bytes of events that were published, and how many wait for how long.
    fn event_queue(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counters = &self.0;
        let (bytes, help) = (counters.event_bytes.get(), "Encoded bytes of events that the transport took");
        let unit = Some(&Unit::Bytes);
        counter_value(&mut encoder.encode_descriptor("events", help, unit, MetricType::Counter)?, bytes)?;
        let help = "Events that wait to be published";
        let mut metric = encoder.encode_descriptor("events_waiting", help, None, MetricType::Gauge)?;
        metric.encode_gauge(&counters.events_waiting.get())?;
        let (unit, help) = (Some(&Unit::Seconds), "How long the oldest event that waits has waited");
        let mut metric = encoder.encode_descriptor("event_lag", help, unit, MetricType::Gauge)?;
        metric.encode_gauge(&(counters.event_lag_us.get() as f64 / 1e6))
    }

    fn tiers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Read = fn(&TierMetrics) -> u64;
        let each: [(&str, &str, Read); 4] = [
            ("hit_blocks", "Blocks found, counted at the highest tier that holds them", |tier| {
                tier.hits.get()
            }),
            ("corrupt_blocks", "Blocks whose bytes did not match, never served", |tier| tier.corrupt.get()),
            ("quarantined_slots", "Slots taken out of use for wrong bytes", |tier| tier.quarantined.get()),
            ("lost_batch_refusals", "Batches of before a rank was lost that were not taken", |tier| {
                tier.lost_refusals.get()
            }),
        ];
        for (name, help, read) in each {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for tier in Tier::ALL {
                let labels: Labels<'_> = &[("tier", tier.as_str())];
                counter_value(&mut metric.encode_family(&labels)?, read(self.0.tier(tier)))?;
            }
        }
        let help = "Blocks that left a tier";
        let mut metric = encoder.encode_descriptor("evicted_blocks", help, None, MetricType::Counter)?;
        for tier in Tier::ALL {
            for reason in EvictReason::ALL {
                let labels: Labels<'_> = &[("tier", tier.as_str()), ("reason", reason.as_str())];
                let value = self.0.tier(tier).evictions(*reason).get();
                counter_value(&mut metric.encode_family(&labels)?, value)?;
            }
        }
        let help = "Blocks below G1 that requests had copied up or computed again, by the reason";
        let mut metric = encoder.encode_descriptor("load_decisions", help, None, MetricType::Counter)?;
        for tier in Tier::ALL {
            for reason in LoadReason::ALL {
                let labels: Labels<'_> = &[("tier", tier.as_str()), ("reason", reason.as_str())];
                let value = self.0.tier(tier).loads(*reason).get();
                counter_value(&mut metric.encode_family(&labels)?, value)?;
            }
        }
        let mut metric = encoder.encode_descriptor(
            "tier_slots",
            "Slots by what they are doing",
            None,
            MetricType::Gauge,
        )?;
        for tier in Tier::ALL {
            for state in SlotState::ALL {
                let labels: Labels<'_> = &[("tier", tier.as_str()), ("state", state.as_str())];
                metric.encode_family(&labels)?.encode_gauge(&self.0.tier(tier).slots(*state).get())?;
            }
        }
        Ok(())
    }

    /// Nothing where there never was a volume.
    fn volumes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let volumes: Vec<_> =
            self.0.volumes().into_iter().map(|(id, volume)| (id.to_string(), volume)).collect();
        if volumes.is_empty() {
            return Ok(());
        }
        volume_counters(&volumes, encoder)?;
        volume_gauges(&volumes, encoder)
    }

    fn paths(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Read = fn(&PathMetrics) -> u64;
        let counters: [(&str, &str, Option<Unit>, Read); 2] = [
            ("transfer_blocks", "Blocks that arrived", None, |path| path.blocks.get()),
            ("transfer", "Bytes that arrived", Some(Unit::Bytes), |path| path.bytes.get()),
        ];
        for (name, help, unit, read) in counters {
            let mut metric = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
            for (label, path) in self.0.paths() {
                let labels: Labels<'_> = &[("path", &label)];
                counter_value(&mut metric.encode_family(&labels)?, read(path))?;
            }
        }
        let gauges: [(&str, &str, Read); 2] = [
            ("transfer_queue_depth", "Blocks whose offload waits for its turn", |path| {
                path.queue_depth.get()
            }),
            ("transfer_in_flight", "Transfers that run", PathMetrics::in_flight),
        ];
        for (name, help, read) in gauges {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (label, path) in self.0.paths() {
                let labels: Labels<'_> = &[("path", &label)];
                metric.encode_family(&labels)?.encode_gauge(&read(path))?;
            }
        }
        self.path_times(encoder)?;
        self.path_losses(encoder)
    }

    fn path_times(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let unit = Some(&Unit::Seconds);
        let help = "Time during which at least one transfer ran";
        let mut metric = encoder.encode_descriptor("transfer_busy", help, unit, MetricType::Counter)?;
        for (label, path) in self.0.paths() {
            let labels: Labels<'_> = &[("path", &label)];
            let busy = path.busy().as_secs_f64();
            metric.encode_family(&labels)?.encode_counter::<NoLabelSet, f64, u64>(&busy, None)?;
        }
        let help = "From submission of a transfer to its completion";
        let mut metric = encoder.encode_descriptor("transfer_latency", help, unit, MetricType::Histogram)?;
        for (label, path) in self.0.paths() {
            let labels: Labels<'_> = &[("path", &label)];
            let (sum, count, buckets) = path.histogram().exposed();
            metric.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }

    fn path_losses(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Blocks that did not arrive";
        let mut metric =
            encoder.encode_descriptor("transfer_failed_blocks", help, None, MetricType::Counter)?;
        for (label, path) in self.0.paths() {
            for kind in FailureKind::ALL {
                let labels: Labels<'_> = &[("path", &label), ("reason", kind.as_str())];
                counter_value(&mut metric.encode_family(&labels)?, path.failures(kind).get())?;
            }
        }
        let help = "Blocks whose offload was given up";
        let mut metric =
            encoder.encode_descriptor("offload_dropped_blocks", help, None, MetricType::Counter)?;
        for (label, path) in self.0.paths() {
            for reason in DropReason::ALL {
                let labels: Labels<'_> = &[("path", &label), ("reason", reason.as_str())];
                counter_value(&mut metric.encode_family(&labels)?, path.dropped(*reason).get())?;
            }
        }
        Ok(())
    }
}

/// A volume's id, and what is counted of it.
type Named = (String, Arc<VolumeCounters>);
type ReadVolume = fn(&VolumeCounters) -> u64;

fn volume_counters(volumes: &[Named], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let each: [(&str, &str, ReadVolume); 10] = [
        ("volume_hit_blocks", "Blocks that came from the volume", |volume| volume.hits.get()),
        ("volume_missed_blocks", "Blocks that were gone from the volume or damaged", |volume| {
            volume.misses.get()
        }),
        ("volume_corrupt_blocks", "Blocks that were damaged on the volume", |volume| volume.corrupt.get()),
        ("volume_stored_blocks", "Blocks that were copied to the volume", |volume| volume.stored.get()),
        ("volume_full_blocks", "Blocks that were refused because the volume was full", |volume| {
            volume.full.get()
        }),
        ("volume_errors", "Blocks and questions that the volume's store failed", |volume| {
            volume.errors.get()
        }),
        ("volume_written_bytes", "Bytes of blocks that were written, by workers of this process", |volume| {
            volume.written_bytes.get()
        }),
        ("volume_written_stored_bytes", "Bytes that these take on the volume, compressed or not", |volume| {
            volume.written_stored_bytes.get()
        }),
        ("volume_read_bytes", "Bytes of blocks that were read, by workers of this process", |volume| {
            volume.read_bytes.get()
        }),
        ("volume_read_stored_bytes", "Bytes that these took on the volume, compressed or not", |volume| {
            volume.read_stored_bytes.get()
        }),
    ];
    for (name, help, read) in each {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (id, volume) in volumes {
            let labels: Labels<'_> = &[("volume", id)];
            counter_value(&mut metric.encode_family(&labels)?, read(volume))?;
        }
    }
    Ok(())
}

fn volume_gauges(volumes: &[Named], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let gauges: [(&str, &str, ReadVolume); 3] = [
        ("volume_compresses", "1 while new blocks are compressed", |volume| volume.compresses.get()),
        ("volume_blocks", "Blocks that the volume is known to hold", |volume| volume.blocks.get()),
        ("volume_down", "1 while the volume is left alone because it failed", |volume| volume.down.get()),
    ];
    for (name, help, read) in gauges {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (id, volume) in volumes {
            let labels: Labels<'_> = &[("volume", id)];
            metric.encode_family(&labels)?.encode_gauge(&read(volume))?;
        }
    }
    Ok(())
}

pub(super) fn counter_value(metric: &mut MetricEncoder<'_>, value: u64) -> fmt::Result {
    metric.encode_counter::<NoLabelSet, u64, u64>(&value, None)
}
