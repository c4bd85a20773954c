//! Room on a volume that is full of blocks that nobody here knows: an earlier life of this leader,
//! or somebody else, wrote them. What was not used in this life is used least, so it goes before
//! anything that was.

use super::VolumeTier;
use crate::ranks::requests::Request;
use kvbm_plan::{BlockIdentity, Rank, StoredBlock, VolumeAnswer, VolumeRequest};
use std::time::{Duration, Instant};

/// Blocks that may be looked for at a time.
const MOST: usize = 1024;
/// Pause after a list that failed.
const RETRY: Duration = Duration::from_secs(2);
/// How long a part of a list may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long removals take at most until they show: what was refused before that may find room.
const SETTLE: Duration = Duration::from_secs(5);
/// How long nothing is looked for after everything was found to be known.
const QUIET: Duration = Duration::from_secs(600);

/// The search for strangers.
#[derive(Default)]
pub(super) struct Reclaim {
    /// Blocks that found no room.
    needed: usize,
    /// Where the list goes on.
    after: Option<StoredBlock>,
    /// Whether there was a stranger since the list began.
    found: bool,
    /// When strangers were let go last.
    let_go: Option<Instant>,
    asked: Option<Request<VolumeAnswer>>,
    /// When a question is late, or may be asked again.
    next: Option<Instant>,
}

/// What the end of a part of the list calls for.
#[derive(Default)]
struct Outcome {
    strangers: Vec<BlockIdentity>,
    /// Blocks that must make room although they are known.
    known: usize,
}

impl Reclaim {
    fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// A part of the list came; none is the end.
    fn listed(
        &mut self,
        blocks: &[StoredBlock],
        now: Instant,
        is_known: impl Fn(&StoredBlock) -> bool,
    ) -> Outcome {
        self.after = blocks.last().copied();
        self.next = None;
        if blocks.is_empty() {
            let mut known = 0;
            if !self.found {
                let refused = std::mem::take(&mut self.needed);
                // Refused while strangers were on their way out is no reason to give up what is
                // known.
                if self.let_go.is_none_or(|then| now >= then + SETTLE) {
                    known = refused;
                }
            }
            if known > 0 {
                self.next = Some(now + QUIET);
            }
            self.found = false;
            return Outcome { strangers: Vec::new(), known };
        }
        let unknown = blocks.iter().filter(|block| !is_known(block)).take(self.needed);
        let strangers: Vec<BlockIdentity> = unknown.map(nobodys).collect();
        if !strangers.is_empty() {
            self.found = true;
            self.let_go = Some(now);
            // What was refused meanwhile may have room now; what has not will be refused again.
            self.needed = 0;
        }
        Outcome { strangers, known: 0 }
    }
}

/// The name of a block whose place in its chain is not known.
fn nobodys(block: &StoredBlock) -> BlockIdentity {
    let StoredBlock { namespace, group, hash } = *block;
    BlockIdentity { namespace, group, hash, parent: None, position: 0 }
}

impl VolumeTier {
    /// A volume was full for `refused` blocks, although no more are known there than may be: others
    /// make room, strangers first. Where nobody said how much of it is ours, its store is full, and
    /// nothing is removed.
    pub(super) fn reclaim(&self, refused: usize, now: Instant) {
        if refused == 0 || !self.is_limited() {
            return;
        }
        let mut reclaim = self.reclaim.lock();
        if reclaim.asked.is_none() && !reclaim.is_due(now) {
            drop(reclaim);
            self.yield_room(refused);
            return;
        }
        reclaim.needed = (reclaim.needed + refused).min(MOST);
    }

    /// Goes on with the search, where there is one. Called again and again.
    pub(super) fn tend_reclaim(&self, now: Instant) {
        let mut reclaim = self.reclaim.lock();
        let mut outcome = Outcome::default();
        if reclaim.asked.as_ref().is_some_and(|asked| asked.is_answered() || reclaim.is_due(now))
            && let Some(asked) = reclaim.asked.take()
        {
            let listed = asked.wait(now, "what a volume holds", |answer| match answer {
                VolumeAnswer::Listed(blocks) => Ok(blocks),
                VolumeAnswer::Failed(failure) => Err(failure),
                VolumeAnswer::Present(_) | VolumeAnswer::Removed(_) | VolumeAnswer::Done => Ok(Vec::new()),
            });
            match listed {
                Ok(ranks) => {
                    let blocks = ranks.into_iter().next().unwrap_or_default();
                    let strangers = self.let_go(|index| {
                        let is_known = |block: &StoredBlock| {
                            index.awaits(block.group, block.hash) || index.is_leaving(block.group, block.hash)
                        };
                        outcome = reclaim.listed(&blocks, now, is_known);
                        std::mem::take(&mut outcome.strangers)
                    });
                    outcome.strangers = strangers;
                }
                Err((_, failure)) => {
                    tracing::debug!(target: "kvbm", %failure, "a full volume could not be listed");
                    reclaim.next = Some(now + RETRY);
                }
            }
        }
        let ask = (reclaim.needed > 0 && reclaim.asked.is_none() && reclaim.is_due(now)).then(|| {
            // The first rank's objects stand for the blocks.
            let asked = self.requests.pending.start(1);
            let token = asked.token;
            reclaim.asked = Some(asked);
            reclaim.next = Some(now + PATIENCE);
            (token, reclaim.after)
        });
        // A link may answer from inside `send`.
        drop(reclaim);
        self.evicted(&outcome.strangers);
        self.yield_room(outcome.known);
        if let Some((token, after)) = ask {
            self.requests.send_to(Rank(0), self.descriptor.id, token, VolumeRequest::List(after));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{GroupId, NamespaceId, SequenceHash};

    fn block(number: u8) -> StoredBlock {
        StoredBlock {
            namespace: NamespaceId(1),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([number; 16]),
        }
    }

    #[test]
    fn strangers_go_first_and_what_is_known_only_where_there_are_none() {
        let now = Instant::now();
        let mut reclaim = Reclaim { needed: 2, ..Reclaim::default() };
        let known = |block: &StoredBlock| block.hash.as_bytes()[0] < 10;
        let outcome = reclaim.listed(&[1, 11, 2, 12, 13].map(block), now, known);
        assert_eq!(outcome.strangers, [11, 12].map(|number| nobodys(&block(number))));
        assert_eq!((reclaim.needed, reclaim.after), (0, Some(block(13))));
        reclaim.needed = 1;
        let outcome = reclaim.listed(&[], now, known);
        assert_eq!((outcome.known, reclaim.needed, reclaim.after), (0, 1, None), "from the beginning again");
        assert!(reclaim.listed(&[block(3)], now, known).strangers.is_empty());
        let outcome = reclaim.listed(&[], now, known);
        assert_eq!((outcome.known, reclaim.needed), (0, 0), "refused before there was room");
        assert!(reclaim.is_due(now));
        reclaim.needed = 1;
        let later = now + SETTLE;
        assert_eq!(reclaim.listed(&[], later, known).known, 1, "everything is known");
        assert!(!reclaim.is_due(later) && reclaim.is_due(later + QUIET));
    }

    /// Mutation that makes it fail: `reclaim` does not ask whether the volume is limited.
    #[cfg(feature = "worker")]
    #[test]
    fn a_store_without_room_whose_capacity_nobody_gave_keeps_what_it_holds() {
        use super::super::test_manager::{self, VOLUME, block};

        let (manager, sent) = test_manager::manager();
        let leader = &manager.leader;
        let volume = leader.volumes.get(VOLUME).expect("configured");
        let known = block();
        let since = volume.now();
        volume.index.lock().learn(&known, true, since);
        for seconds in 0..3 {
            let now = Instant::now() + Duration::from_secs(seconds);
            volume.reclaim(9, now);
            volume.tend_reclaim(now);
        }
        assert!(sent.tokens(|request| matches!(request, VolumeRequest::List(_))).is_empty());
        assert!(volume.contains(known.group, known.hash));
    }
}
