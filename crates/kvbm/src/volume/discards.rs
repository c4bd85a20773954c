//! Removing single blocks from volumes: for want of room, because they are damaged, or because they were forgotten while they were on
//! their way. They [leave](super::index::Index::leave) until the removal is over.

use super::VolumeTier;
use super::removal::{PATIENCE, RETRY};
use crate::leader::Leader;
use crate::leader::gather::Asked;
use kvbm_plan::{BlockIdentity, Command, GroupId, SequenceHash, VolumeAnswer, VolumeRequest};
use std::time::Instant;

/// Forgotten blocks whose removal is tried again and again, on one volume; what is more is removed once.
const MOST_FORGOTTEN: usize = 1 << 16;

/// Removals of single blocks that are not over.
#[derive(Default)]
pub(super) struct Discards(Vec<Discard>);

impl Discards {
    /// Forgotten blocks that may still be there.
    pub(super) fn forgotten(&self) -> usize {
        self.0.iter().filter(|one| one.confirmed.is_some()).map(|one| one.blocks.len()).sum()
    }

    /// `confirmed`, where there is room for so many more of them.
    fn keeping(&self, more: usize, confirmed: Confirmed) -> Option<Confirmed> {
        Some(confirmed).filter(|_| self.forgotten() + more <= MOST_FORGOTTEN)
    }
}

/// How often the removal of what was forgotten has to succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Confirmed {
    Once,
    /// Again after the volume's deadline: a store whose answer was late may write the block after the first time.
    Twice,
}

struct Discard {
    request: fn(Vec<BlockIdentity>) -> VolumeRequest,
    blocks: Vec<BlockIdentity>,
    /// Asked for until it succeeded so often; where there is nothing, once, whatever comes of it.
    confirmed: Option<Confirmed>,
    /// While it is under way.
    asked: Option<Asked<VolumeAnswer>>,
    /// When it is asked for; while it is under way, when a rank that has not answered, and was not given up, counts as one that never
    /// will: its process was replaced.
    next: Instant,
}

impl Discard {
    /// Whether it is over.
    fn tend(&mut self, volume: &VolumeTier, now: Instant) -> bool {
        let over = |asked: &mut Asked<VolumeAnswer>| asked.is_answered() || now >= self.next;
        let Some(asked) = self.asked.take_if(over) else { return false };
        let removed = asked.wait(now, "a removal", |answer| match answer {
            VolumeAnswer::Failed(failure) => Err(failure),
            _ => Ok(()),
        });
        let again = self.confirmed.is_some();
        match (removed, self.confirmed) {
            (Ok(_), Some(Confirmed::Twice)) => {
                self.confirmed = Some(Confirmed::Once);
                self.next = now + volume.descriptor.deadline;
                return false;
            }
            (Ok(_), _) => return true,
            (Err((rank, failure)), _) => {
                tracing::warn!(target: "kvbm", %rank, %failure, again, "blocks not removed from the volume");
            }
        }
        self.next = now + RETRY;
        !again
    }
}

impl Leader {
    /// Removes blocks from the volume, which [leave](super::index::Index::leave), because there is no room for them. Not asked for again
    /// where it fails: what stays is found.
    pub(super) fn discard_on_volume(&self, volume: &VolumeTier, blocks: &[BlockIdentity]) {
        self.remove_on_volume(volume, blocks, VolumeRequest::Discard, None);
    }

    /// Removes what is damaged of blocks, which [leave](super::index::Index::leave). Not asked for again where it fails: what stays is
    /// found to be damaged again.
    pub(super) fn discard_damaged_on_volume(&self, volume: &VolumeTier, blocks: &[BlockIdentity]) {
        self.remove_on_volume(volume, blocks, VolumeRequest::DiscardDamaged, None);
    }

    /// Removes blocks, which [leave](super::index::Index::leave), because they were forgotten while they were on their way. Asked for until
    /// it succeeds: they must not be found.
    pub(super) fn discard_forgotten_on_volume(
        &self,
        volume: &VolumeTier,
        blocks: &[BlockIdentity],
        confirmed: Confirmed,
    ) {
        if blocks.is_empty() {
            return;
        }
        let confirmed = volume.discards.lock().keeping(blocks.len(), confirmed);
        if confirmed.is_none() {
            tracing::warn!(
                target: "kvbm", volume = %volume.descriptor.id,
                "too many forgotten blocks wait for their removal: these are removed once, and may be found where that fails"
            );
        }
        self.remove_on_volume(volume, blocks, VolumeRequest::Discard, confirmed);
    }

    fn remove_on_volume(
        &self,
        volume: &VolumeTier,
        blocks: &[BlockIdentity],
        request: fn(Vec<BlockIdentity>) -> VolumeRequest,
        confirmed: Option<Confirmed>,
    ) {
        let now = Instant::now();
        let new = blocks.chunks(Command::MAX_VOLUME_BLOCKS).map(|part| Discard {
            request,
            blocks: part.to_vec(),
            confirmed,
            asked: None,
            next: now,
        });
        volume.discards.lock().0.extend(new);
        self.tend_discards(volume, now);
    }

    /// Goes on with removals of single blocks; those whose removal is over may come again. Called again and again.
    pub(super) fn tend_discards(&self, volume: &VolumeTier, now: Instant) {
        let mut due = Vec::new();
        for one in &mut volume.discards.lock().0 {
            if one.asked.is_none() && now >= one.next {
                let asked = self.volumes.asks.start(self.settings.ranks);
                due.push((asked.token, (one.request)(one.blocks.clone())));
                one.asked = Some(asked);
                one.next = now + PATIENCE;
            }
        }
        // A link may answer from inside `send`.
        for (token, request) in due {
            let command = Command::Volume { token, volume: volume.descriptor.id, request };
            for (rank, failure) in self.broadcast(&command) {
                // It has removed nothing and will not.
                self.volumes.asks.answer(rank, token, VolumeAnswer::Failed(failure));
            }
        }
        let over: Vec<Discard> =
            volume.discards.lock().0.extract_if(.., |one| one.tend(volume, now)).collect();
        let names = |one: &Discard| -> Vec<(GroupId, SequenceHash)> {
            one.blocks.iter().map(|block| (block.group, block.hash)).collect()
        };
        for one in &over {
            volume.index.lock().left(&names(one));
        }
    }
}

#[cfg(all(test, feature = "worker"))]
mod tests {
    use super::*;
    use crate::config::{Blocks, ModelConfig};
    use crate::worker::{LinkError, WorkerLink};
    use crate::{KvBlockManager, Namespace, Owned};
    use kvbm_plan::{Failure, FailureKind, NamespaceId, Rank, VolumeId, wire};
    use parking_lot::Mutex;
    use std::sync::Arc;
    use std::time::Duration;

    /// A worker that answers nothing: the tokens of the removals that it was told of.
    struct Silent(Arc<Mutex<Vec<u64>>>);

    impl WorkerLink for Silent {
        fn send(&self, command: &[u8]) -> Result<(), LinkError> {
            let command = wire::decode_command(command).expect("sound");
            if let Command::Volume { token, request: VolumeRequest::Discard(_), .. } = command {
                self.0.lock().push(token);
            }
            Ok(())
        }
    }

    fn block() -> BlockIdentity {
        BlockIdentity {
            namespace: NamespaceId(0),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([1; 16]),
            parent: None,
            position: 0,
        }
    }

    /// How often a block's removal is asked for, and whether it is still leaving, after each of `answers`.
    fn asked(confirmed: Option<Confirmed>, answers: &[Result<u64, FailureKind>]) -> Vec<(usize, bool)> {
        let tokens = Arc::<Mutex<Vec<_>>>::default();
        let manager = KvBlockManager::<Owned>::builder()
            .model(ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() })
            .namespace(Namespace::new("test-model").weights("1"))
            .device(Blocks(4))
            .host(Blocks(4))
            .volume("memory:")
            .build_with_workers(|_, _, _| Box::new(Silent(Arc::clone(&tokens))))
            .expect("a manager");
        let leader = &manager.leader;
        let volume = leader.volumes.get(VolumeId(0)).expect("configured");
        volume.index.lock().leave(&[block()]);
        leader.remove_on_volume(&volume, &[block()], VolumeRequest::Discard, confirmed);
        let after = |answer: &Result<u64, FailureKind>| {
            let token = *tokens.lock().last().expect("asked for");
            let answer = match answer {
                Ok(removed) => VolumeAnswer::Removed(*removed),
                Err(kind) => VolumeAnswer::Failed(Failure::new(*kind, "planted")),
            };
            leader.volumes.asks.answer(Rank(0), token, answer);
            leader.tend_discards(&volume, Instant::now());
            // Every pause is over.
            leader.tend_discards(&volume, Instant::now() + Duration::from_secs(500));
            (tokens.lock().len(), volume.index.lock().is_leaving(block().group, block().hash))
        };
        answers.iter().map(after).collect()
    }

    #[test]
    fn what_was_forgotten_is_removed_until_it_is_confirmed_and_it_does_not_come_before() {
        let (down, done) = (Err(FailureKind::Io), Ok(1));
        let (leaving, over) = (true, false);
        assert_eq!(asked(None, &[down]), [(1, over)], "what stays is found, and costs no more than its room");
        assert_eq!(
            asked(Some(Confirmed::Once), &[down, down, done]),
            [(2, leaving), (3, leaving), (3, over)]
        );
        // The store may have written it after it said that there is nothing.
        let twice = [down, Ok(0), down, done];
        let seen = [(2, leaving), (3, leaving), (4, leaving), (4, over)];
        assert_eq!(asked(Some(Confirmed::Twice), &twice), seen);
    }

    #[test]
    fn so_many_forgotten_blocks_wait_and_no_more() {
        let held = Discards(vec![Discard {
            request: VolumeRequest::Discard,
            blocks: vec![block(); 3],
            confirmed: Some(Confirmed::Once),
            asked: None,
            next: Instant::now(),
        }]);
        assert_eq!(held.forgotten(), 3);
        assert_eq!(held.keeping(MOST_FORGOTTEN - 3, Confirmed::Twice), Some(Confirmed::Twice));
        assert_eq!(held.keeping(MOST_FORGOTTEN - 2, Confirmed::Twice), None);
    }
}
