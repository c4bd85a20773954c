//! How long bytes take on hardware that is not there.
//!
//! A path is a [`Link`] with a bandwidth and a latency: `time = latency + bytes / bandwidth`. The
//! model [`TransferModel::reference`] holds the figures of the tiering article among the reference
//! documents (1 GB = 10^9 bytes). There a block of 5,242,880 bytes takes 187 us over the host link
//! (28 GB/s) and 749 us to or from disk (7). From disk through the host to the device it takes 936
//! us. From a peer it takes 5.8 us over a peer link (900) and 105 us over the network (50).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::Clock;

/// One kind of path that bytes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelPath {
    /// Host memory to device memory.
    HostToDevice,
    /// Device memory to host memory. The link is full duplex: this direction has a bandwidth of its
    /// own.
    DeviceToHost,
    /// Inside device memory.
    DeviceMemory,
    /// Disk to host memory.
    DiskRead,
    /// Host memory to disk.
    DiskWrite,
    /// To or from another device of this node.
    Peer,
    /// To or from another node.
    Network,
}

impl ModelPath {
    /// Every path.
    pub const ALL: [Self; 7] = [
        Self::HostToDevice,
        Self::DeviceToHost,
        Self::DeviceMemory,
        Self::DiskRead,
        Self::DiskWrite,
        Self::Peer,
        Self::Network,
    ];
}

/// Bandwidth and latency of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Link {
    /// Bytes per second; `None`: as fast as this machine copies.
    pub bytes_per_s: Option<u64>,
    /// Time before the first byte of an operation.
    pub latency: Duration,
}

impl Link {
    /// As fast as this machine copies.
    pub const UNLIMITED: Self = Self { bytes_per_s: None, latency: Duration::ZERO };

    /// `gb_per_s` * 10^9 bytes per second, no latency.
    pub const fn gb_per_s(gb_per_s: u64) -> Self {
        Self { bytes_per_s: Some(gb_per_s * 1_000_000_000), latency: Duration::ZERO }
    }

    /// The time that `bytes` occupy the link, without latency.
    pub fn occupancy(&self, bytes: u64) -> Duration {
        match self.bytes_per_s {
            None | Some(0) => Duration::ZERO,
            Some(rate) => {
                let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
                Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
            }
        }
    }

    /// The time that one operation of `bytes` takes on an idle link.
    pub fn time(&self, bytes: u64) -> Duration {
        self.latency + self.occupancy(bytes)
    }
}

/// The links of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TransferModel {
    /// Host memory <-> device memory, each direction.
    pub host_link: Link,
    /// Inside device memory.
    pub device_memory: Link,
    /// Disk <-> host memory, each direction.
    pub disk: Link,
    /// Device <-> device of one node.
    pub peer: Link,
    /// Node <-> node.
    pub network: Link,
}

impl TransferModel {
    /// No limits: everything takes as long as this machine needs to copy it.
    pub const fn unlimited() -> Self {
        let link = Link::UNLIMITED;
        Self { host_link: link, device_memory: link, disk: link, peer: link, network: link }
    }

    /// The machine of the tiering article: host link 28, disk 7, peer 900, network 50, device
    /// memory 3,350 GB/s.
    pub const fn reference() -> Self {
        Self {
            host_link: Link::gb_per_s(28),
            device_memory: Link::gb_per_s(3_350),
            disk: Link::gb_per_s(7),
            peer: Link::gb_per_s(900),
            network: Link::gb_per_s(50),
        }
    }

    /// The link of a path.
    pub fn link(&self, path: ModelPath) -> Link {
        match path {
            ModelPath::HostToDevice | ModelPath::DeviceToHost => self.host_link,
            ModelPath::DeviceMemory => self.device_memory,
            ModelPath::DiskRead | ModelPath::DiskWrite => self.disk,
            ModelPath::Peer => self.peer,
            ModelPath::Network => self.network,
        }
    }

    /// The time that `bytes` take over `paths` one after the other, each idle.
    pub fn time(&self, paths: &[ModelPath], bytes: u64) -> Duration {
        paths.iter().map(|path| self.link(*path).time(bytes)).sum()
    }
}

/// The links of a running machine. Operations on one path share its bandwidth: each takes its turn
/// in order of arrival.
#[derive(Clone)]
pub struct SharedLinks {
    model: TransferModel,
    clock: Arc<dyn Clock>,
    busy_until: Arc<[Mutex<Duration>; ModelPath::ALL.len()]>,
}

impl SharedLinks {
    /// Idle links of `model` on `clock`.
    pub fn new(model: TransferModel, clock: Arc<dyn Clock>) -> Self {
        Self { model, clock, busy_until: Arc::new(std::array::from_fn(|_| Mutex::new(Duration::ZERO))) }
    }

    /// The model.
    pub fn model(&self) -> &TransferModel {
        &self.model
    }

    /// The clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Occupies the link of `path` for `bytes` after everything before it, and returns the time at
    /// which the last byte is through. Does not sleep. Large operations should come in parts, so
    /// that concurrent ones share the link.
    pub fn reserve(&self, path: ModelPath, bytes: u64) -> Duration {
        let occupancy = self.model.link(path).occupancy(bytes);
        let now = self.clock.now();
        let mut busy_until = self.busy_until[path as usize].lock();
        *busy_until = now.max(*busy_until) + occupancy;
        *busy_until
    }

    /// Occupies the link for one whole operation and sleeps until it is through, latency included.
    pub fn pass(&self, path: ModelPath, bytes: u64) {
        let link = self.model.link(path);
        if link != Link::UNLIMITED {
            self.clock.sleep_until(self.reserve(path, bytes) + link.latency);
        }
    }
}

impl fmt::Debug for SharedLinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedLinks").field("model", &self.model).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ManualClock;

    /// 16 tokens x 2 (K, V) x 80 layers x 8 heads x 128 x 2 bytes.
    const BLOCK: u64 = 5_242_880;

    #[test]
    fn reference_model_reproduces_the_tiering_article() {
        use ModelPath::{DeviceMemory, DeviceToHost, DiskRead, DiskWrite, HostToDevice, Network, Peer};
        let rows: [(&str, &[ModelPath], f64); 7] = [
            ("HBM read (local)", &[DeviceMemory], 1.6),
            ("HBM to CPU DRAM", &[DeviceToHost], 187.0),
            ("CPU DRAM to HBM", &[HostToDevice], 187.0),
            ("CPU to NVMe SSD", &[DiskWrite], 749.0),
            ("NVMe to CPU to HBM", &[DiskRead, HostToDevice], 936.0),
            ("remote GPU via NVLink", &[Peer], 5.8),
            ("remote GPU via IB NDR", &[Network], 105.0),
        ];
        for (name, paths, expected_us) in rows {
            let us = TransferModel::reference().time(paths, BLOCK).as_secs_f64() * 1e6;
            assert!((us / expected_us - 1.0).abs() < 0.05, "{name}: {us} us, the article says {expected_us}");
        }
    }

    #[test]
    fn unlimited_takes_no_modelled_time() {
        for path in ModelPath::ALL {
            assert_eq!(TransferModel::unlimited().time(&[path], BLOCK), Duration::ZERO);
        }
    }

    #[test]
    fn operations_on_one_path_share_it_and_paths_are_independent() {
        let clock = Arc::new(ManualClock::new());
        let links = SharedLinks::new(TransferModel::reference(), Arc::clone(&clock) as Arc<dyn Clock>);
        let alone = links.model().time(&[ModelPath::HostToDevice], BLOCK);
        assert_eq!(links.reserve(ModelPath::HostToDevice, BLOCK), alone);
        assert_eq!(links.reserve(ModelPath::HostToDevice, BLOCK), alone * 2);
        assert_eq!(links.reserve(ModelPath::DeviceToHost, BLOCK), alone, "full duplex");
        clock.advance(alone * 10);
        assert_eq!(
            links.reserve(ModelPath::HostToDevice, BLOCK),
            alone * 11,
            "an idle link does not save up"
        );
        links.pass(ModelPath::HostToDevice, BLOCK);
        assert_eq!(clock.now(), alone * 12);
    }

    #[test]
    fn latency_is_paid_per_operation_and_huge_sizes_do_not_overflow() {
        let link = Link { latency: Duration::from_micros(3), ..Link::gb_per_s(1) };
        assert_eq!(link.time(1_000), Duration::from_micros(4));
        assert!(link.time(u64::MAX) > Duration::from_secs(1 << 33));
    }
}
