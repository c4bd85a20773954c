//! Rules over values and between settings.
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `model` | rules of the model's section | - |
//! | `remote` | rules of the section about other nodes | - |

mod model;
mod remote;

use std::time::Duration;

use super::choices::{BandwidthModel, ChainRootKind, CopyWay, DeviceKind, VolumeCompress, VolumeOffload};
use super::sections::VolumeConfig;
use super::{Config, ConfigError, Section, http};
use kvbm_events::EventUrl;
use kvbm_link::WorkerAddress;
use kvbm_plan::{Tier, VolumeDescriptor, shown_uri};
use kvbm_pool::{RegistryConfig, Share};

/// The system takes no longer ones.
const MAX_SOCKET_PATH: usize = 107;
/// Of payloads in the objects of volumes.
const MAX_ALIGNMENT: u32 = 1 << 20;
const MAX_EVENT_WAIT: Duration = Duration::from_secs(10);

impl Config {
    /// Checks every rule; the first broken one is returned.
    ///
    /// # Errors
    /// The first rule that is broken: a required key that is not set ([`ConfigError::Missing`]), or
    /// a value that contradicts a rule or another key, with what is allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        Self::schema().iter().try_for_each(|section| self.validate_required(section))?;
        Self::schema().iter().try_for_each(|section| self.validate_ranges(section))?;
        model::check(self)?;
        self.validate_namespace()?;
        self.validate_device()?;
        self.validate_workers()?;
        let (nodes, ranks) = (&self.node.numa_nodes, self.parallelism.tensor_parallel as usize);
        if !(nodes.count() <= 1 || nodes.count() == ranks) {
            let rule = format!("must be one node, or one for each of the {ranks} ranks");
            return broken("node.numa_nodes", nodes, &rule);
        }
        self.validate_admin()?;
        self.validate_encryption()?;
        self.validate_compression()?;
        self.validate_lossy()?;
        http::validate("metrics", self.metrics.http, &self.metrics.security())?;
        self.validate_tiers()?;
        self.validate_volumes()?;
        remote::check(self)?;
        let offload = &self.offload;
        share(
            "offload.g1_g2.watermark",
            offload.g1_g2.watermark,
            "must be above 0 and at most 1 (1: never)",
        )?;
        share(
            "offload.g2_g3.watermark",
            offload.g2_g3.watermark,
            "must be above 0 and at most 1 (1: never)",
        )?;
        share("offload.g1_g2.queue_share", offload.g1_g2.queue_share, "must be above 0 and at most 1")?;
        share("offload.g2_g3.queue_share", offload.g2_g3.queue_share, "must be above 0 and at most 1")?;
        ahead("offload.g1_g2.ahead_share", offload.g1_g2.ahead_share)?;
        ahead("offload.g2_g3.ahead_share", offload.g2_g3.ahead_share)?;
        if self.transfer.staging.get() == 0 {
            return broken("transfer.staging", &0, "must be more than 0");
        }
        positive("transfer.deadline", self.transfer.deadline)?;
        let speed = self.policy.prefill_tokens_per_s;
        if speed != 0.0 && !(1.0..=1e12).contains(&speed) {
            return broken("policy.prefill_tokens_per_s", &speed, "must be 0 (not known), or from 1 to 1e12");
        }
        let patience = self.policy.onboard_patience;
        if !(0.0..=1000.0).contains(&patience) {
            return broken("policy.onboard_patience", &patience, "must be from 0 (no limit) to 1000");
        }
        let share = self.policy.prefetch_share;
        if !(0.0..=1.0).contains(&share) {
            return broken("policy.prefetch_share", &share, "must be from 0 (no prefetch) to 1");
        }
        self.validate_tenants()?;
        self.validate_events()
    }

    fn validate_workers(&self) -> Result<(), ConfigError> {
        const KEY: &str = "parallelism.workers";
        let (sockets, ranks) = (self.parallelism.workers.as_slice(), self.parallelism.tensor_parallel);
        if !sockets.is_empty() && sockets.len() != ranks as usize {
            let rule = format!("must name one socket for each of the {ranks} ranks, in order, or none");
            return broken(KEY, &format!("{} sockets", sockets.len()), &rule);
        }
        self.parallelism.tls_files()?;
        for (at, socket) in sockets.iter().enumerate() {
            let is_path = matches!(self.parallelism.worker_address(socket)?, WorkerAddress::Unix(_));
            if is_path && socket.as_os_str().len() > MAX_SOCKET_PATH {
                let rule = format!("must have paths of at most {MAX_SOCKET_PATH} bytes");
                return broken(KEY, &socket.display(), &rule);
            }
            if sockets[..at].contains(socket) {
                return broken(KEY, &socket.display(), "must name each socket once");
            }
        }
        Ok(())
    }

    fn validate_admin(&self) -> Result<(), ConfigError> {
        let admin = &self.admin;
        if let Some(socket) = &admin.socket
            && socket.as_os_str().len() > MAX_SOCKET_PATH
        {
            let rule = format!("must have at most {MAX_SOCKET_PATH} bytes");
            return broken("admin.socket", &socket.display(), &rule);
        }
        if let (Some(addr), None) = (admin.http, &admin.token_file) {
            let rule = "needs admin.token_file: without a token any user could call";
            return broken("admin.http", &addr, rule);
        }
        http::validate("admin", admin.http, &admin.security())
    }

    fn validate_encryption(&self) -> Result<(), ConfigError> {
        let encryption = &self.encryption;
        let show = |command: &super::CommandLine| format!("{:?}", command.as_slice());
        let is_set = |command: &super::CommandLine| !command.as_slice().is_empty();
        let no_use = "has no use without disk.encrypt or volumes.encrypt";
        let encrypts = self.disk.encrypt || self.volumes.encrypt;
        for (names, file, command) in [
            (
                ["encryption.key_file", "encryption.key_command"],
                &encryption.key_file,
                &encryption.key_command,
            ),
            (
                ["encryption.previous_key_file", "encryption.previous_key_command"],
                &encryption.previous_key_file,
                &encryption.previous_key_command,
            ),
        ] {
            if file.is_some() && is_set(command) {
                return broken(
                    names[1],
                    &show(command),
                    &format!("must not be set together with {}", names[0]),
                );
            }
            if let Some(file) = file.as_ref().filter(|_| !encrypts) {
                return broken(names[0], &file.display(), no_use);
            }
            if is_set(command) && !encrypts {
                return broken(names[1], &show(command), no_use);
            }
        }
        if encrypts && encryption.key_file.is_none() && !is_set(&encryption.key_command) {
            let key = if self.disk.encrypt { "disk.encrypt" } else { "volumes.encrypt" };
            return broken(key, &true, "needs encryption.key_file or encryption.key_command");
        }
        if encryption.command_timeout.is_zero() {
            return broken("encryption.command_timeout", &"0s", "must be above 0");
        }
        Ok(())
    }

    fn validate_compression(&self) -> Result<(), ConfigError> {
        let compress = self.volumes.compress;
        // A leader alone compresses nothing: its workers do.
        let lacks = cfg!(all(feature = "worker", not(feature = "compress")));
        if lacks && compress != VolumeCompress::Off {
            return broken("volumes.compress", &compress, "needs a build with the feature compress");
        }
        Ok(())
    }

    fn validate_tenants(&self) -> Result<(), ConfigError> {
        const KEY: &str = "tenants.shares";
        let tenants = self.tenants.shares.as_slice();
        if tenants.len() > RegistryConfig::MAX_TENANTS {
            let rule = format!("must be at most {} tenants", RegistryConfig::MAX_TENANTS);
            return broken(KEY, &tenants.len(), &rule);
        }
        for (at, (name, share)) in tenants.iter().enumerate() {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
            if name.is_empty() || name.len() > 64 || !name.chars().all(allowed) {
                return broken(KEY, name, "must name tenants by 1 to 64 letters, digits, '_', '-' or '.'");
            }
            if tenants[..at].iter().any(|(other, _)| other == name) {
                return broken(KEY, name, "must name a tenant once");
            }
            if Share::new(*share).is_none() {
                return broken(KEY, &format!("{name}={share}"), "must have shares from 0 to 1");
            }
        }
        // As the shares are kept, in millionths, so that 0.1 ten times are 1.
        let sum: f64 = tenants.iter().map(|(_, share)| (share * 1e6).round()).sum();
        if sum > 1e6 {
            return broken(
                KEY,
                &format!("{} in all", sum / 1e6),
                "must be at most 1 in all: lower some shares",
            );
        }
        Ok(())
    }

    fn validate_required(&self, section: &Section) -> Result<(), ConfigError> {
        if section.path() == "model" && (self.model.is_opaque() || self.model.has_groups()) {
            return Ok(());
        }
        for config in section.each(self) {
            if let Some(key) = section.keys().iter().find(|key| key.is_required() && (key.is_unset)(&config))
            {
                let (key, doc, variable) = (key.path(), key.doc().trim(), key.variable());
                return Err(ConfigError::Missing { key, doc, variable });
            }
        }
        Ok(())
    }

    /// Whole numbers lie in the ranges that the schema declares.
    fn validate_ranges(&self, section: &Section) -> Result<(), ConfigError> {
        for config in section.each(self) {
            for key in section.keys() {
                if let Some((value, (min, max))) = key.out_of_range(&config) {
                    return broken(key.path(), &value, &format!("must be from {min} to {max}"));
                }
            }
        }
        Ok(())
    }

    fn validate_events(&self) -> Result<(), ConfigError> {
        let events = &self.events;
        positive("events.heartbeat", events.heartbeat)?;
        positive("events.publish_timeout", events.publish_timeout)?;
        for (key, value) in [
            ("events.batch_age", events.batch_age),
            ("events.full_wait", events.full_wait),
            ("events.publish_timeout", events.publish_timeout),
        ] {
            if value > MAX_EVENT_WAIT {
                return broken(key, &format!("{value:?}"), "must be at most 10s");
            }
        }
        if let Some(url) = &events.url
            && let Err(error) = url.text().parse::<EventUrl>()
        {
            // It may hold a password.
            return broken("events.url", "(not shown)", &error.to_string());
        }
        Ok(())
    }

    fn validate_namespace(&self) -> Result<(), ConfigError> {
        let kind = self.namespace.chain_root;
        match (&self.namespace.chain_root_seed, kind) {
            (None, ChainRootKind::External | ChainRootKind::PerProcess) => {
                broken("namespace.chain_root", &kind, "needs namespace.chain_root_seed")
            }
            (Some(seed), ChainRootKind::Fixed) => {
                let rule = "has no meaning with chain_root = \"fixed\": leave it out, or set chain_root = \"external\"";
                broken("namespace.chain_root_seed", seed, rule)
            }
            (_, ChainRootKind::PerProcess) if !self.disk.capacity.is_none() || !self.volume.is_empty() => {
                let rule = "changes with every process, so nothing can be kept on disk or on a volume: remove [disk] and [[volume]], or give the \
                            engine a fixed hash seed and use \"external\"";
                broken("namespace.chain_root", &kind, rule)
            }
            _ => Ok(()),
        }
    }

    fn validate_device(&self) -> Result<(), ConfigError> {
        let device = &self.device;
        match device.kind {
            DeviceKind::Emulated if device.ordinal != 0 => {
                broken("device.ordinal", &device.ordinal, "has a meaning only with device.kind = \"cuda\"")
            }
            DeviceKind::Emulated if self.transfer.copies != CopyWay::Auto => {
                let rule = "chooses among the ways of a GPU: leave it out, or set device.kind = \"cuda\"";
                broken("transfer.copies", &self.transfer.copies, rule)
            }
            DeviceKind::Cuda if device.bandwidth_model != BandwidthModel::Unlimited => {
                let rule = "slows the emulated device only: leave it out with device.kind = \"cuda\"";
                broken("device.bandwidth_model", &device.bandwidth_model, rule)
            }
            _ => Ok(()),
        }
    }

    fn validate_tiers(&self) -> Result<(), ConfigError> {
        let disk = &self.disk;
        match (&disk.dir, disk.capacity.is_none()) {
            (None, false) => {
                return broken("disk.capacity", &disk.capacity, "needs disk.dir, the directory to use");
            }
            (Some(dir), true) => {
                return broken("disk.dir", &dir.display(), "needs disk.capacity, such as \"100GiB\"");
            }
            _ => {}
        }
        let dirs: Vec<_> = disk.dir.iter().chain(disk.more_dirs.as_slice()).collect();
        if dirs.iter().enumerate().any(|(index, dir)| dirs[..index].contains(dir)) {
            return broken(
                "disk.more_dirs",
                &"a directory twice",
                "names directories that differ, and from disk.dir",
            );
        }
        if disk.dir.is_none() && !dirs.is_empty() {
            return broken(
                "disk.more_dirs",
                &"without disk.dir",
                "needs disk.dir, the directory with the journal",
            );
        }
        positive("disk.read_deadline", disk.read_deadline)?;
        positive("disk.flush_deadline", disk.flush_deadline)?;
        if !(disk.drive_writes_per_day >= 0.0 && disk.drive_writes_per_day.is_finite()) {
            return broken(
                "disk.drive_writes_per_day",
                &disk.drive_writes_per_day,
                "must be 0 (no limit) or more",
            );
        }
        for (key, tier, capacity) in [
            ("device.capacity", Tier::G1, self.device.capacity),
            ("host.capacity", Tier::G2, self.host.capacity),
            ("disk.capacity", Tier::G3, disk.capacity),
        ] {
            let block_bytes = self.slot_bytes(tier);
            let blocks = capacity.blocks(block_bytes);
            if !capacity.is_none() && blocks == 0 {
                let rule =
                    format!("holds not one block of {block_bytes} bytes: raise it, or 0 for no such tier");
                return broken(key, &capacity, &rule);
            }
            let most = RegistryConfig::MAX_CAPACITY;
            if blocks > u64::from(most) {
                let rule =
                    format!("is more than {most} blocks, the most of a tier: lower it, or use larger blocks");
                return broken(key, &capacity, &rule);
            }
        }
        Ok(())
    }
}

impl Config {
    fn validate_volumes(&self) -> Result<(), ConfigError> {
        for (at, volume) in self.volume.iter().enumerate() {
            self.validate_volume(volume)?;
            let earlier = &self.volume[..at];
            if earlier.iter().any(|other| other.id == volume.id) {
                let rule = "is the id of two volumes: give each one of its own, and leave it as it is";
                return broken("volume.id", &volume.id, rule);
            }
            if let Some(other) = earlier.iter().find(|other| other.uri == volume.uri) {
                let rule = format!("is both volume {} and volume {}: name it once", other.id, volume.id);
                return broken("volume.uri", &shown_uri(&volume.uri), &rule);
            }
        }
        let all = &self.volumes;
        let is_victims = all.offload == VolumeOffload::Victims;
        if is_victims && self.host.capacity.is_none() && !self.disk.capacity.is_none() {
            let rule = "needs host.capacity where there is a disk: what leaves the device stays on the disk; use write-through";
            return broken("volumes.offload", &all.offload.to_string(), rule);
        }
        positive("volumes.longest_pause", all.longest_pause)?;
        share("volumes.queue_share", all.queue_share, "must be above 0 and at most 1")
    }

    fn validate_volume(&self, volume: &VolumeConfig) -> Result<(), ConfigError> {
        let VolumeConfig { id, capacity, alignment, deadline, .. } = volume;
        if !capacity.is_none() && capacity.blocks(self.rank_block_bytes()) == 0 {
            let rule = format!("holds not one block of volume {id}: raise it, or 0 for no limit");
            return broken("volume.capacity", capacity, &rule);
        }
        if !alignment.is_power_of_two() || *alignment > MAX_ALIGNMENT {
            let rule = format!("of volume {id} must be a power of two from 1 to {MAX_ALIGNMENT}");
            return broken("volume.alignment", alignment, &rule);
        }
        if deadline.is_zero() || *deadline > VolumeDescriptor::MAX_DEADLINE {
            let rule = format!("of volume {id} must be more than 0 and at most 1h");
            return broken("volume.deadline", &format!("{deadline:?}"), &rule);
        }
        Ok(())
    }
}

fn broken(
    key: &'static str,
    value: &(impl std::fmt::Display + ?Sized),
    rule: &str,
) -> Result<(), ConfigError> {
    Err(ConfigError::Rule { key, value: value.to_string(), rule: rule.to_owned() })
}

fn positive(key: &'static str, value: Duration) -> Result<(), ConfigError> {
    if value.is_zero() { broken(key, "0", "must be more than 0") } else { Ok(()) }
}

fn share(key: &'static str, value: f64, rule: &str) -> Result<(), ConfigError> {
    if value > 0.0 && value <= 1.0 { Ok(()) } else { broken(key, &value, rule) }
}

fn ahead(key: &'static str, value: f64) -> Result<(), ConfigError> {
    if (0.0..=1.0).contains(&value) {
        Ok(())
    } else {
        broken(key, &value, "must be from 0 (none) to 1 (all)")
    }
}
