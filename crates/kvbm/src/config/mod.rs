//! Configuration: from TOML and `KVBM_*` variables, declared once.
//!
//! `sections.rs` declares every setting; the structs, their defaults, the parser, the variables and
//! `docs/config.md` follow from it. Anything that is not declared is an error, which names the
//! nearest thing that is.
//!
//! ```
//! use kvbm::config::{Bytes, Capacity, Config};
//!
//! let text = r#"
//!     [model]
//!     num_layers = 32
//!     num_kv_heads = 8
//!     head_dim = 128
//!     [namespace]
//!     model = "llama-3-8b"
//!     [host]
//!     capacity = "8GiB"
//! "#;
//! let mut config = Config::from_toml(text, "kvbm.toml")?;
//! config.apply_variables([("KVBM_DEVICE_CAPACITY".into(), "2048".into())])?;
//! config.validate()?;
//! assert_eq!(config.host.capacity, Capacity::Bytes(Bytes::gib(8)));
//!
//! let error = Config::from_toml("[host]\ncapcity = 1", "kvbm.toml").unwrap_err();
//! assert!(error.to_string().starts_with("kvbm.toml:2:1: unknown key 'host.capcity'; the nearest known one is 'host.capacity'"));
//! # Ok::<(), kvbm::config::ConfigError>(())
//! ```

mod choices;
mod env;
mod error;
mod groups;
mod http;
mod hugging_face;
mod lossy;
mod model;
mod nearest;
mod offload;
mod parse;
mod reference;
mod schema;
mod sections;
mod several;
#[cfg(test)]
mod tests;
mod units;
mod validate;
mod value;
mod volumes;
mod workers;

use std::ffi::OsString;
use std::path::Path;

use kvbm_keys::DeploymentKey;
use kvbm_plan::{Tier, VolumeDescriptor};
use kvbm_pool::RegistryConfig;
use kvbm_tokens::{ChainRoot, HashAlgorithm, Namespace};

pub use choices::{
    Admission, Algorithm, BandwidthModel, ChainRootKind, CopyWay, DeviceKind, DeviceOrder, DiskEngine,
    DiskMode, EvictionPolicy, HostOrder, LayoutKind, NixlFiles, RemoteAgentKind, VerifyHost, VolumeCompress,
    VolumeLookup, VolumeLossy, VolumeOffload, WhenFull,
};
pub use error::{ConfigError, Origin};
pub use groups::{CacheGroup, CacheGroups, LayerContent, ScaledPart, Scales, UnknownScales};
pub use offload::{EdgeConfig, OffloadConfig};
pub use schema::{Key, Section};
pub(crate) use volumes::{stored_bytes, volumes};

/// Group of all blocks of a model whose layers are alike, and the first one of any other.
pub(crate) const FIRST_GROUP: kvbm_plan::GroupId = kvbm_plan::GroupId(0);

pub use sections::{
    AdminConfig, DeviceConfig, DiskConfig, EncryptionConfig, EventsConfig, HostConfig, MetricsConfig,
    ModelConfig, NamespaceConfig, NodeConfig, ParallelismConfig, PolicyConfig, RemoteConfig, TenantsConfig,
    TransferConfig, VolumeConfig, VolumesConfig,
};
pub use several::{CommandLine, Parameters, Paths, RankNodes, TenantShares, TensorBytes};
pub use units::{Blocks, Bytes, Capacity, ParseBytesError, ParseCapacityError};
pub use value::Secret;

/// Alignment of blocks in host memory and on disk, in bytes.
pub(crate) const PAGE: u64 = 4096;

/// Every setting of a manager. The fields are plain data; [`validate`](Self::validate) holds the
/// rules.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// `[model]`
    pub model: ModelConfig,
    /// `[namespace]`
    pub namespace: NamespaceConfig,
    /// `[parallelism]`
    pub parallelism: ParallelismConfig,
    /// `[node]`
    pub node: NodeConfig,
    /// `[admin]`
    pub admin: AdminConfig,
    /// `[metrics]`
    pub metrics: MetricsConfig,
    /// `[device]`: tier G1
    pub device: DeviceConfig,
    /// `[host]`: tier G2
    pub host: HostConfig,
    /// `[disk]`: tier G3
    pub disk: DiskConfig,
    /// `[encryption]`: the key for encryption at rest
    pub encryption: EncryptionConfig,
    /// `[[volume]]`: tier G4, each volume
    pub volume: Vec<VolumeConfig>,
    /// `[volumes]`: tier G4, what goes for all of them
    pub volumes: VolumesConfig,
    /// `[remote]`: memory of other nodes
    pub remote: RemoteConfig,
    /// `[offload.g1_g2]` and `[offload.g2_g3]`
    pub offload: OffloadConfig,
    /// `[transfer]`
    pub transfer: TransferConfig,
    /// `[events]`
    pub events: EventsConfig,
    /// `[policy]`
    pub policy: PolicyConfig,
    /// `[tenants]`
    pub tenants: TenantsConfig,
}

impl Config {
    /// Defaults, then the file if one is given, then the process's `KVBM_*` variables; validated.
    ///
    /// # Errors
    /// [`ConfigError`]: the file cannot be read or is not TOML. Or a key or variable does not
    /// exist, a key cannot take its value, a required key is missing, or a rule between settings is
    /// broken.
    pub fn load(file: Option<&Path>) -> Result<Self, ConfigError> {
        Self::load_with(file, |_| ())
    }

    /// The same, with what `change` sets: options of a program go before file and variables.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_with(file: Option<&Path>, change: impl FnOnce(&mut Self)) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        if let Some(path) = file {
            let text = std::fs::read_to_string(path)
                .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
            parse::apply(&mut config, &text, &path.display().to_string())?;
        }
        config.apply_variables(std::env::vars_os())?;
        change(&mut config);
        config.validate()?;
        Ok(config)
    }

    /// Defaults, overlaid with `text`, which messages call `name`. Rules between settings are left
    /// to [`validate`](Self::validate), since variables may still come.
    ///
    /// # Errors
    /// Text that is not TOML, a key that there is not, a value that its key cannot take: with the
    /// line.
    pub fn from_toml(text: &str, name: &str) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        parse::apply(&mut config, text, name)?;
        Ok(config)
    }

    /// Overlays the `KVBM_*` variables among `variables`; the others are ignored.
    ///
    /// # Errors
    /// A `KVBM_*` variable that there is not, with the nearest one; a value that its key cannot
    /// take.
    pub fn apply_variables(
        &mut self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<(), ConfigError> {
        env::apply(self, variables)
    }

    /// Sets one key, such as `host.capacity`, from text, as a variable would.
    ///
    /// # Errors
    /// A key that there is not, with the nearest one; a value that it cannot take. Nothing changed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        let known = Self::key(key).ok_or_else(|| parse::unknown_key(Origin::Call, key))?;
        parse::write(self, known, value::Raw::Bare(value), || Origin::Call)
    }

    /// The volumes, as they are registered.
    pub fn volume_descriptors(&self) -> Vec<VolumeDescriptor> {
        volumes(self).map(|(descriptor, _)| descriptor).collect()
    }

    /// Every section with its keys.
    pub fn schema() -> &'static [Section] {
        sections::SECTIONS
    }

    fn key(path: &str) -> Option<&'static Key> {
        Self::schema().iter().flat_map(Section::keys).find(|key| key.path() == path)
    }

    /// The identity of this configuration's blocks.
    pub fn namespace(&self) -> Namespace {
        let ours = &self.namespace;
        let seed = || ours.chain_root_seed.clone().unwrap_or_default().into_bytes();
        let mut namespace = Namespace::new(&ours.model)
            .weights(&ours.weights)
            .dtype(self.content())
            .page_size(self.model.page_size)
            .algorithm(match ours.algorithm {
                Algorithm::Blake3 => HashAlgorithm::Blake3,
                Algorithm::Xxh3_128 => HashAlgorithm::Xxh3_128,
            })
            .chain_root(match ours.chain_root {
                ChainRootKind::Fixed => ChainRoot::Fixed,
                ChainRootKind::External => ChainRoot::External(seed()),
                ChainRootKind::PerProcess => ChainRoot::PerProcess(seed()),
            });
        if ours.flat {
            namespace = namespace.flat();
        }
        if let Some(scaling) = &ours.rope_scaling {
            namespace = namespace.rope_scaling(scaling);
        }
        if let Some(scheme) = &ours.kv_quantization {
            namespace = namespace.kv_quantization(scheme);
        }
        if let Some(adapter) = &ours.adapter {
            namespace = namespace.adapter(adapter);
        }
        if let Some(salt) = &ours.tenant_salt {
            namespace = namespace.tenant_salt(salt.expose());
        }
        if let Some(secret) = &ours.deployment_secret {
            namespace = namespace.deployment_secret(secret.expose());
        }
        namespace
    }

    /// What signs blocks on disk and on volumes, and announcements: derived from
    /// `namespace.deployment_secret`.
    pub(crate) fn deployment_key(&self) -> Option<DeploymentKey> {
        let secret = self.namespace.deployment_secret.as_ref()?;
        Some(DeploymentKey::from_secret(secret.expose()))
    }

    /// Blocks that a rank holds on G1, G2 and G3; a capacity in bytes is never exceeded.
    pub fn capacity_blocks(&self) -> [u64; 3] {
        let capacities = [self.device.capacity, self.host.capacity, self.disk.capacity];
        let tiers = [Tier::G1, Tier::G2, Tier::G3];
        std::array::from_fn(|at| capacities[at].blocks(self.slot_bytes(tiers[at])))
    }

    /// The same of a configuration that is valid: the capacities fit.
    pub(crate) fn tier_blocks(&self) -> [u32; 3] {
        self.capacity_blocks().map(|blocks| blocks.min(u64::from(RegistryConfig::MAX_CAPACITY)) as u32)
    }

    /// Bytes that one rank's slice of a block takes on `tier`: below G1 it is padded to pages,
    /// which the disk takes as they are.
    pub fn slot_bytes(&self, tier: Tier) -> u64 {
        let bytes = self.rank_block_bytes();
        if tier == Tier::G1 && self.model.groups.as_slice().len() > 1 {
            // Elements of every group are aligned in every slot.
            return bytes.checked_next_multiple_of(8).unwrap_or(u64::MAX);
        }
        if tier == Tier::G1 { bytes } else { bytes.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX) }
    }

    /// Bytes of one rank's slice of a block, without padding: of the largest group, where the model
    /// has several.
    pub fn rank_block_bytes(&self) -> u64 {
        let model = &self.model;
        if model.is_opaque() {
            return model
                .opaque_tensors
                .as_slice()
                .iter()
                .fold(0, |sum, &bytes| sum.saturating_add(bytes.into()));
        }
        self.group_block_bytes().into_iter().max().unwrap_or(0)
    }
}
