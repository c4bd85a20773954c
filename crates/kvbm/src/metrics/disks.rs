//! Metrics of the disk tiers of this process. They are updated from the engines before they are
//! read.

use super::counters::{Counter, Gauge};
use super::expose::{Labels, counter_value};
use kvbm_plan::Rank;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Counters of the disk tier of each rank, and of each of its directories.
#[derive(Debug, Default)]
pub struct DiskMetrics {
    /// 1 while the circuit breaker for reads of a directory is not closed.
    pub down: Gauge,
    /// Blocks that were not offered meanwhile.
    pub left_out: Counter,
    /// By directory: whether the circuit breakers for reads and for writes are not closed.
    directories: Mutex<Vec<[bool; 2]>>,
    /// By rank and name.
    dirs: Mutex<BTreeMap<(Rank, String), Arc<Counter>>>,
    ranks: Mutex<BTreeMap<Rank, Arc<DiskCounters>>>,
}

/// Counters of the disk tier of a rank.
#[derive(Debug, Default)]
pub struct DiskCounters {
    /// Times that its journal could not be replaced by a shorter one, as on a full disk.
    pub failed_snapshots: Counter,
    /// Blocks that are served and whose sync failed: not durable before they are written again.
    pub unsynced: Gauge,
    /// Blocks that were written again for that.
    pub renewed: Counter,
    /// Blocks that could not be, and are gone.
    pub given_up: Counter,
    /// Records that the journal had at its opening and that another key had signed, or none where
    /// there is one now: their blocks are not used.
    pub other_key: Counter,
}

impl DiskMetrics {
    /// Operations that the device of a directory failed: reads, writes, syncs, the journal.
    pub fn errors(&self, rank: Rank, dir: &str) -> Arc<Counter> {
        // Nothing panics while it is held, here and below.
        let mut dirs = self.dirs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(dirs.entry((rank, dir.to_owned())).or_default())
    }

    /// Those of a rank.
    pub fn rank(&self, rank: Rank) -> Arc<DiskCounters> {
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(ranks.entry(rank).or_default())
    }

    pub(crate) fn set_directories(&self, down: Vec<[bool; 2]>) {
        *self.directories.lock().unwrap_or_else(PoisonError::into_inner) = down;
    }

    fn encode_directories(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let directories = self.directories.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if directories.is_empty() {
            return Ok(());
        }
        let help = "1 while the circuit breaker of a directory of the disk tier is open or half-open";
        let mut metric = encoder.encode_descriptor("disk_directory_down", help, None, MetricType::Gauge)?;
        for (number, down) in directories.iter().enumerate() {
            for (operation, &is_down) in ["read", "write"].into_iter().zip(down) {
                let labels: Labels<'_> = &[("directory", &number.to_string()), ("operation", operation)];
                metric.encode_family(&labels)?.encode_gauge(&u64::from(is_down))?;
            }
        }
        Ok(())
    }

    /// Of directories and ranks nothing where no worker of this process has a disk.
    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Read = fn(&DiskCounters) -> &Counter;
        let help = "1 while reads from a directory of the disk tier are stopped because they failed";
        let mut metric = encoder.encode_descriptor("disk_down", help, None, MetricType::Gauge)?;
        metric.encode_gauge(&self.down.get())?;
        let help = "Blocks of the disk tier that were not offered while their directory was not read";
        let mut metric =
            encoder.encode_descriptor("disk_left_out_blocks", help, None, MetricType::Counter)?;
        counter_value(&mut metric, self.left_out.get())?;
        self.encode_directories(encoder)?;
        let dirs = self.dirs.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if dirs.is_empty() {
            return Ok(());
        }
        let help = "Operations that the device of a directory failed";
        let mut metric = encoder.encode_descriptor("disk_errors", help, None, MetricType::Counter)?;
        for ((rank, dir), errors) in &dirs {
            let labels: Labels<'_> = &[("rank", &rank.0.to_string()), ("dir", dir)];
            counter_value(&mut metric.encode_family(&labels)?, errors.get())?;
        }
        let each: [(&str, &str, Read); 4] = [
            (
                "disk_failed_snapshots",
                "Times that the journal of the disk tier could not be replaced by a shorter one",
                |disk| &disk.failed_snapshots,
            ),
            ("disk_renewed_blocks", "Blocks that were written again because their sync had failed", |disk| {
                &disk.renewed
            }),
            (
                "disk_given_up_blocks",
                "Blocks that are gone because their sync had failed and they could not be written again",
                |disk| &disk.given_up,
            ),
            (
                "disk_other_key_records",
                "Records of a journal that the deployment's key has not signed: their blocks are not used",
                |disk| &disk.other_key,
            ),
        ];
        for (name, help, read) in each {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (rank, disk) in &ranks {
                let labels: Labels<'_> = &[("rank", &rank.0.to_string())];
                counter_value(&mut metric.encode_family(&labels)?, read(disk).get())?;
            }
        }
        let help = "Blocks that are served and not durable, because their sync failed";
        let mut metric = encoder.encode_descriptor("disk_unsynced_blocks", help, None, MetricType::Gauge)?;
        for (rank, disk) in &ranks {
            let labels: Labels<'_> = &[("rank", &rank.0.to_string())];
            metric.encode_family(&labels)?.encode_gauge(&disk.unsynced.get())?;
        }
        Ok(())
    }
}
