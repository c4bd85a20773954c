//! For tests: a manager with a volume whose worker answers nothing by itself.

use crate::config::{Blocks, ModelConfig};
use crate::worker::{Lane, LinkError, WorkerLink};
use crate::{KvBlockManager, Namespace, Owned};
use kvbm_plan::{BlockIdentity, Command, GroupId, NamespaceId, SequenceHash, VolumeId, VolumeRequest, wire};
use parking_lot::Mutex;
use std::sync::Arc;

/// Requests about volumes that the worker was sent, in order, with the tokens under which it could
/// answer.
#[derive(Clone, Default)]
pub(super) struct Sent(Arc<Mutex<Vec<(u64, VolumeRequest)>>>);

impl Sent {
    /// The tokens of such requests.
    pub(super) fn tokens(&self, of: impl Fn(&VolumeRequest) -> bool) -> Vec<u64> {
        self.0.lock().iter().filter(|(_, request)| of(request)).map(|(token, _)| *token).collect()
    }

    /// Blocks to discard because they are damaged.
    pub(super) fn damaged(&self) -> Vec<BlockIdentity> {
        let damaged = |(_, request): &(u64, VolumeRequest)| match request {
            VolumeRequest::DiscardDamaged(blocks) => blocks.clone(),
            _ => Vec::new(),
        };
        self.0.lock().iter().flat_map(damaged).collect()
    }
}

/// The only volume there is.
pub(super) const VOLUME: VolumeId = VolumeId(0);

struct NoAnswer(Sent);

impl WorkerLink for NoAnswer {
    fn send(&self, _lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        if let Command::Volume { token, request, .. } = wire::decode_command(command).expect("sound") {
            self.0.0.lock().push((token, request));
        }
        Ok(())
    }
}

/// The manager, and what its worker was sent.
pub(super) fn manager() -> (KvBlockManager<Owned>, Sent) {
    let sent = Sent::default();
    let manager = KvBlockManager::<Owned>::builder()
        .model(ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() })
        .namespace(Namespace::new("test-model").weights("1"))
        .device(Blocks(4))
        .host(Blocks(4))
        .volume("memory:")
        .build_with_workers(|_, _, _| Box::new(NoAnswer(sent.clone())))
        .expect("a manager");
    (manager, sent)
}

/// The first block of some chain.
pub(super) fn block() -> BlockIdentity {
    BlockIdentity {
        namespace: NamespaceId(0),
        group: GroupId(0),
        hash: SequenceHash::from_bytes([1; 16]),
        parent: None,
        position: 0,
    }
}
