//! Removing single blocks from volumes: for want of room, or because they are damaged. They
//! [leave](super::index::Index::leave) until the removal is over. One that fails is not asked for
//! again: what stays is found.

use super::VolumeTier;
use super::removal::PATIENCE;
use super::requests::followed;
use crate::ranks::requests::Request;
use kvbm_plan::{BlockIdentity, Command, GroupId, SequenceHash, VolumeAnswer, VolumeRequest};
use std::time::Instant;

/// Removals of single blocks that are not over.
#[derive(Default)]
pub(super) struct Discards(Vec<Discard>);

struct Discard {
    blocks: Vec<(GroupId, SequenceHash)>,
    asked: Option<Request<VolumeAnswer>>,
    /// When a rank that has not answered, and was not given up, counts as one that never will: its
    /// process was replaced.
    late: Instant,
}

impl Discard {
    /// Whether it is over, whatever came of it.
    fn is_over(&mut self, now: Instant) -> bool {
        let over = |asked: &mut Request<VolumeAnswer>| asked.is_answered() || now >= self.late;
        let Some(asked) = self.asked.take_if(over) else { return false };
        if let Err((rank, failure)) = asked.wait(now, "a removal", followed) {
            tracing::warn!(target: "kvbm", %rank, %failure, "blocks not removed from the volume");
        }
        true
    }
}

impl VolumeTier {
    /// Removes blocks from the volume, which [leave](super::index::Index::leave), because there is
    /// no room for them.
    pub(super) fn discard(&self, blocks: &[BlockIdentity]) {
        self.remove(blocks, VolumeRequest::Discard);
    }

    /// Removes what is damaged of blocks, which [leave](super::index::Index::leave). What stays is
    /// found to be damaged again.
    pub(super) fn discard_damaged(&self, blocks: &[BlockIdentity]) {
        self.remove(blocks, VolumeRequest::DiscardDamaged);
    }

    fn remove(&self, blocks: &[BlockIdentity], request: fn(Vec<BlockIdentity>) -> VolumeRequest) {
        let now = kvbm_plan::clock::now();
        for part in blocks.chunks(Command::MAX_VOLUME_BLOCKS) {
            let asked = self.requests.pending.start(self.requests.ranks.len());
            let token = asked.token;
            let blocks = part.iter().map(|block| (block.group, block.hash)).collect();
            // A link may answer from inside `send`.
            self.discards.lock().0.push(Discard { blocks, asked: Some(asked), late: now + PATIENCE });
            // What was not reached is reported at the end, with the other failures.
            let _unreached = self.requests.send(self.descriptor.id, token, request(part.to_vec()));
        }
        self.tend_discards(now);
    }

    /// Ends removals of single blocks that are over: their blocks may come again. Called again and
    /// again.
    pub(super) fn tend_discards(&self, now: Instant) {
        let over: Vec<Discard> = self.discards.lock().0.extract_if(.., |one| one.is_over(now)).collect();
        for one in &over {
            self.index.lock().end_removal(&one.blocks);
        }
    }
}

#[cfg(all(test, feature = "worker"))]
mod tests {
    use super::super::test_manager::{self, VOLUME, block};
    use super::*;
    use kvbm_plan::{Failure, FailureKind, Rank};

    #[test]
    fn what_is_removed_does_not_come_before_that_is_over_whatever_came_of_it() {
        let (manager, sent) = test_manager::manager();
        let leader = &manager.leader;
        let volume = leader.volumes.get(VOLUME).expect("configured");
        let is_leaving = || volume.index.lock().is_leaving(block().group, block().hash);
        let tokens = || sent.tokens(|request| matches!(request, VolumeRequest::Discard(_)));
        for answer in [Some(Ok(1)), Some(Err(FailureKind::Io)), None] {
            volume.index.lock().begin_removal(&[block()]);
            volume.discard(&[block()]);
            let now = kvbm_plan::clock::now();
            volume.tend_discards(now);
            assert!(is_leaving());
            let answer = answer.map(|answer| match answer {
                Ok(removed) => VolumeAnswer::Removed(removed),
                Err(kind) => VolumeAnswer::Failed(Failure::new(kind, "planted")),
            });
            let token = *tokens().last().expect("asked for");
            match answer {
                Some(answer) => assert!(leader.volumes.pending.answer(Rank(0), token, answer)),
                // Its process was replaced.
                None => volume.discards.lock().0[0].late = now,
            }
            volume.tend_discards(now);
            assert!(!is_leaving());
        }
        assert_eq!(tokens().len(), 3, "each once");
    }
}
