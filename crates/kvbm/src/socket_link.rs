//! Links to workers in other processes, over Unix sockets or TCP with TLS.
//!
//! The worker listens (`WorkerServer`, `kvbm worker`). The leader connects
//! in [`Builder::build`](crate::Builder::build), in either order of birth, and connects again when
//! a worker was started again.

use crate::config::Config;
use crate::worker::{Lane, LinkError, MessageSink, WorkerLink};
use kvbm_link::{LeaderLine, LineSendError, LineTimes};
pub use kvbm_link::{
    LeaderTerms, LineStatus, PeerId, ProcessState, SharedSetting, TlsFiles, WorkerAddress,
    WorkerAddressError, WorkerNotice,
};
use kvbm_plan::{Epoch, Rank};
use kvbm_tokens::NamespaceTag;
use std::io;
use std::sync::Arc;

/// A link to the worker that listens somewhere. Clones are the same link.
#[derive(Clone, Debug)]
pub struct SocketLink {
    line: Arc<LeaderLine>,
}

impl SocketLink {
    /// A link to the worker that listens, or will listen, at `address`. Returns at once. `notice`
    /// hears that a worker is about to end, and what became of its process when the line ended:
    /// over TCP that it has ended is never known.
    ///
    /// # Errors
    /// A certificate of this end cannot be used; the system refuses a thread.
    pub fn connect(
        address: impl Into<WorkerAddress>,
        terms: LeaderTerms,
        sink: MessageSink,
        notice: impl Fn(WorkerNotice) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let line =
            LeaderLine::connect(address, terms, LineTimes::default(), move |bytes| sink(bytes), notice)?;
        Ok(Self { line: Arc::new(line) })
    }

    /// How the line stands.
    pub fn status(&self) -> LineStatus {
        self.line.status()
    }
}

impl WorkerLink for SocketLink {
    fn send(&self, lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        self.line.send(lane, command).map_err(|error| match error {
            LineSendError::Closed { .. } => LinkError::Closed,
            other => LinkError::Refused(other.to_string()),
        })
    }

    fn dismiss(&self) {
        self.line.dismiss();
    }
}

/// What the leader of a deployment says of itself to the worker of `rank`. `g1_blocks`: blocks of
/// G1 on each rank, kvbm's or the engine's.
pub fn leader_terms(
    config: &Config,
    g1_blocks: u32,
    tag: NamespaceTag,
    rank: Rank,
    epoch: Epoch,
) -> LeaderTerms {
    LeaderTerms {
        deployment: deployment(config),
        namespace: *tag.as_bytes(),
        rank,
        ranks: config.parallelism.tensor_parallel as u16,
        epoch,
        settings: settings(config, g1_blocks),
    }
}

/// The name of a deployment: that of its model, as much of it as a handshake takes.
pub(crate) fn deployment(config: &Config) -> String {
    const MOST: usize = 64;
    config.namespace.model.chars().take(MOST).collect()
}

/// Settings that leader and workers must have alike. The namespace's tag covers what opaque blocks
/// hold.
pub(crate) fn settings(config: &Config, g1_blocks: u32) -> Vec<SharedSetting> {
    let (model, [_, g2, g3]) = (&config.model, config.tier_blocks());
    let directories = config.disk.dir.iter().count() + config.disk.more_dirs.as_slice().len();
    let key = config.deployment_key().map_or("none".to_owned(), |key| key.id().to_string());
    [
        ("key of namespace.deployment_secret", key),
        ("model.num_layers", model.num_layers.to_string()),
        ("model.num_kv_heads", model.num_kv_heads.to_string()),
        ("model.head_dim", model.head_dim.to_string()),
        ("model.page_size", model.page_size.to_string()),
        ("model.outer_dim", model.outer_dim.to_string()),
        ("model.dtype", model.dtype.name().to_owned()),
        ("model.groups", model.groups_fingerprint()),
        ("model.replicas", model.replicas.to_string()),
        ("bytes of a block", config.rank_block_bytes().to_string()),
        ("blocks of G1", g1_blocks.to_string()),
        ("blocks of G2", g2.to_string()),
        ("blocks of G3", g3.to_string()),
        ("directories of disk", directories.to_string()),
        ("disk.encrypt", config.disk.encrypt.to_string()),
        ("volumes.encrypt", config.volumes.encrypt.to_string()),
        ("volumes.lossy", config.volumes.lossy.to_string()),
        ("volumes.lossy_dtype", config.volumes.lossy_dtype.map_or("none", |dtype| dtype.name()).to_owned()),
    ]
    .map(|(name, value)| SharedSetting { name: name.to_owned(), value })
    .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_names_and_values_fit_into_an_offer() {
        let mut config = Config::default();
        config.namespace.model = "\u{10348}".repeat(5000);
        config.host.capacity = crate::config::Blocks(u32::MAX).into();
        config.parallelism.tensor_parallel = 1024;
        let terms =
            leader_terms(&config, u32::MAX, NamespaceTag::from_bytes([9; 16]), Rank(1023), Epoch(u64::MAX));
        let bytes: usize =
            terms.settings.iter().map(|setting| setting.name.len() + setting.value.len() + 9).sum();
        assert!(terms.deployment.len() <= 256 && bytes < 3500, "{} {bytes}", terms.deployment.len());
    }
}
