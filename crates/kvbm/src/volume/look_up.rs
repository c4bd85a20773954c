//! Finding chains: from what is known of each volume, and for what is not, from the volumes in a
//! few round trips whatever the length.

use super::{VolumeTier, Volumes};
use crate::circuit_breaker::RequestResults;
use kvbm_plan::{
    BlockIdentity, Failure, GroupId, NamespaceId, SequenceHash, VolumeAnswer, VolumeId, VolumeRequest,
};
use kvbm_pool::Prefix;
use kvbm_tokens::{BlockChain, ChainOrigin};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// Blocks that one round asks for, beside the doubling of the first.
const FAN_OUT: usize = 16;
/// Rounds at most: 16 to the power of four is more than any chain has.
const ROUNDS: usize = 5;
/// Blocks without parents that one look-up asks for.
const MAX_FLAT: usize = 256;
/// Blocks that are remembered as missing.
const MAX_ABSENCES: usize = 65_536;

/// Blocks that the volume did not have lately.
#[derive(Default)]
pub(super) struct Absences(HashMap<(GroupId, SequenceHash), Instant>);

impl Absences {
    fn note(&mut self, block: &BlockIdentity, now: Instant) {
        if self.0.len() >= MAX_ABSENCES {
            self.0.clear();
        }
        self.0.insert((block.group, block.hash), now);
    }

    fn is_recent(&self, block: &BlockIdentity, now: Instant, recheck: Duration) -> bool {
        let seen = self.0.get(&(block.group, block.hash));
        seen.is_some_and(|seen| now.saturating_duration_since(*seen) < recheck)
    }

    pub(super) fn forget(&mut self, block: &BlockIdentity) {
        self.0.remove(&(block.group, block.hash));
    }
}

/// Whether volumes are asked for blocks that are not known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Probe {
    /// They are, and the caller waits.
    Wait,
    /// What is known must do.
    Never,
}

impl Volumes {
    /// A use of these blocks of a chain.
    pub(crate) fn touch(&self, group: GroupId, hashes: &[SequenceHash]) {
        for volume in self.all() {
            volume.index.lock().touch(group, hashes);
        }
    }

    /// Adds to `prefix` what one volume has of `chain` beyond it, the one that has most, and counts
    /// a use of what volumes have. Whether a volume was asked, or would be.
    pub(crate) fn extend(&self, prefix: &mut Prefix, chain: BlockChain<'_>, probe: Probe) -> bool {
        let (group, hashes, namespace) =
            (prefix.group(), chain.hashes(), NamespaceId::from(chain.namespace()));
        let Some(&root) = hashes.first() else { return false };
        let from = prefix.len();
        self.touch(group, hashes);
        let volumes = if from < hashes.len() { self.usable(root, namespace) } else { Vec::new() };
        let rest = hashes.len().saturating_sub(from);
        let known: Vec<usize> =
            volumes.iter().map(|volume| volume.index.lock().prefix(group, &hashes[from..])).collect();
        // Nobody is asked where a volume is known to have all of it.
        let ask = self.policy.probe && known.iter().all(|known| *known < rest);
        let recheck = self.policy.recheck;
        let mut best: Option<(usize, VolumeId)> = None;
        for (volume, mut found) in volumes.iter().zip(known) {
            let most = best.map_or(0, |(most, _)| most);
            if ask && probe == Probe::Wait && most < rest {
                let unknown = BlockIdentity::run(namespace, group, chain.origin(), hashes);
                let unknown: Vec<_> = unknown.skip(from + found).collect();
                found += match chain.origin() {
                    ChainOrigin::Flat => volume.probe_flat(recheck, &unknown),
                    ChainOrigin::Root | ChainOrigin::After { .. } => volume.probe_chain(recheck, &unknown),
                };
            }
            if found > most {
                best = Some((found, volume.descriptor.id));
            }
        }
        if let Some((found, volume)) = best {
            prefix.extend_on_volume(volume, namespace, found);
        }
        ask && !volumes.is_empty()
    }
}

impl VolumeTier {
    /// How many of `identities`, from the first on, the volume seems to have. It is asked for a few
    /// of them. What is before one that is there counts as there, since chains are written from
    /// their beginning.
    pub(super) fn probe_chain(&self, recheck: Duration, identities: &[BlockIdentity]) -> usize {
        let now = kvbm_plan::clock::now();
        // What is being removed is there no more, whatever the volume says; nor is what continues
        // it.
        let (staying, since) = {
            let index = self.index.lock();
            let since = index.now();
            (index.staying(identities, since), since)
        };
        let identities = &identities[..staying];
        let Some(first) = identities.first() else { return 0 };
        if self.absences.lock().is_recent(first, now, recheck) {
            return 0;
        }
        let deadline = kvbm_plan::deadline_after(now, self.descriptor.deadline);
        // All before `low` is there; `high` is not, or is the end.
        let (mut low, mut high) = (0, identities.len());
        let mut seen = HashSet::new();
        for round in 0..ROUNDS {
            let picks = picks(low, high, round == 0);
            if picks.is_empty() {
                break;
            }
            let asked: Vec<BlockIdentity> = picks.iter().map(|&at| identities[at]).collect();
            let there = match self.probe(&asked, deadline) {
                Ok(there) => there,
                Err(failure) => {
                    tracing::debug!(target: "kvbm", %failure, "the look-up in the volume failed");
                    return 0;
                }
            };
            for (&at, there) in picks.iter().zip(there) {
                if there {
                    seen.insert(at);
                    low = low.max(at + 1);
                } else {
                    high = high.min(at);
                    break;
                }
            }
        }
        if let Some(missing) = identities.get(low) {
            self.absences.lock().note(missing, now);
        }
        let mut index = self.index.lock();
        // Some of it may have been removed, or be about to be, since it was asked for.
        let found = &identities[..index.staying(&identities[..low], since)];
        // Parents first, so that the index knows the chain.
        for (at, identity) in found.iter().enumerate() {
            index.learn(identity, seen.contains(&at), since);
        }
        found.len()
    }

    /// How many of `identities`, from the first on, the volume has: none of them says anything
    /// about another, so it is asked for each.
    fn probe_flat(&self, recheck: Duration, identities: &[BlockIdentity]) -> usize {
        let asked = &identities[..identities.len().min(MAX_FLAT)];
        let is_recent = |first| self.absences.lock().is_recent(first, kvbm_plan::clock::now(), recheck);
        if asked.first().is_none_or(is_recent) {
            return 0;
        }
        self.probe_each(recheck, asked).into_iter().take_while(|there| *there).count()
    }

    /// Which of `identities`, at most [`Command::MAX_VOLUME_BLOCKS`], the volume has. It is not
    /// asked for what it did not have lately, nor for what is being removed.
    pub(super) fn probe_each(&self, recheck: Duration, identities: &[BlockIdentity]) -> Vec<bool> {
        let now = kvbm_plan::clock::now();
        let mut there = vec![false; identities.len()];
        let (places, since) = {
            let (index, absences) = (self.index.lock(), self.absences.lock());
            let since = index.now();
            let is_open = |at: &usize| {
                let block = &identities[*at];
                index.stays(block, since) && !absences.is_recent(block, now, recheck)
            };
            ((0..identities.len()).filter(is_open).collect::<Vec<_>>(), since)
        };
        if places.is_empty() {
            return there;
        }
        let asked: Vec<BlockIdentity> = places.iter().map(|&at| identities[at]).collect();
        let deadline = kvbm_plan::deadline_after(now, self.descriptor.deadline);
        let found = match self.probe(&asked, deadline) {
            Ok(found) => found,
            Err(failure) => {
                tracing::debug!(target: "kvbm", %failure, "the look-up in the volume failed");
                return there;
            }
        };
        let (mut index, mut absences) = (self.index.lock(), self.absences.lock());
        for ((at, block), found) in places.into_iter().zip(&asked).zip(found) {
            if !found {
                absences.note(block, now);
            } else if index.stays(block, since) {
                index.learn(block, true, since);
                there[at] = true;
            }
        }
        there
    }

    /// Which of these blocks every rank finds on the self.
    pub(super) fn probe(&self, blocks: &[BlockIdentity], deadline: Instant) -> Result<Vec<bool>, Failure> {
        // Where one rank is away nothing comes of it, however often somebody looks: the others are
        // not asked for nothing.
        if let Some(failure) = self.requests.ranks.away() {
            return Err(failure);
        }
        let began = kvbm_plan::clock::now();
        self.note_request();
        let request = VolumeRequest::Probe(blocks.to_vec());
        let answers =
            self.requests.wait(self.descriptor.id, request, deadline, "what a volume holds", |answer| {
                match answer {
                    VolumeAnswer::Present(found) => Ok(found),
                    VolumeAnswer::Failed(failure) => Err(failure),
                    VolumeAnswer::Removed(_) | VolumeAnswer::Listed(_) | VolumeAnswer::Done => Ok(Vec::new()),
                }
            });
        let mut results = RequestResults::default();
        match &answers {
            Ok(_) => results.add(None),
            Err(unanswered) if !unanswered.is_away => results.add(Some(&unanswered.failure)),
            Err(_) => {}
        }
        self.note(&results, began);
        let mut there = vec![true; blocks.len()];
        for found in answers.map_err(|unanswered| unanswered.failure)? {
            for (at, there) in there.iter_mut().enumerate() {
                *there &= found.get(at).copied().unwrap_or(false);
            }
        }
        Ok(there)
    }
}

/// Which of `low..high` to ask for, in order: at first doubling distances and the last, later
/// evenly spread.
fn picks(low: usize, high: usize, first: bool) -> Vec<usize> {
    let length = high - low;
    let mut picks: Vec<usize> = if first {
        let doubling = (0..usize::BITS).map(|power| (1_usize << power) - 1);
        doubling.take_while(|step| *step < length).chain(length.checked_sub(1)).collect()
    } else {
        let step = length.div_ceil(FAN_OUT).max(1);
        (0..length).step_by(step).collect()
    };
    picks.dedup();
    picks.into_iter().map(|step| low + step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_chain_is_found_in_a_few_rounds() {
        for length in [1, 2, 3, 16, 17, 100, 1000, 9000] {
            for there in [0, 1, 2, length / 3, length / 2, length - 1, length] {
                let there = there.min(length);
                let (mut low, mut high, mut rounds, mut asked) = (0, length, 0, 0);
                while rounds < ROUNDS {
                    let picks = picks(low, high, rounds == 0);
                    if picks.is_empty() {
                        break;
                    }
                    rounds += 1;
                    asked += picks.len();
                    for at in picks {
                        if at < there { low = low.max(at + 1) } else { high = high.min(at) }
                    }
                }
                assert_eq!(low, there, "{there} of {length}");
                assert!(asked <= 80, "{asked} for {there} of {length}");
            }
        }
    }

    #[test]
    fn absences_are_remembered_for_a_while_and_not_without_bound() {
        let (mut absences, now) = (Absences::default(), Instant::now());
        let block = |group: u16, number: u32| {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            let (namespace, hash) = (NamespaceId(1), SequenceHash::from_bytes(bytes));
            BlockIdentity { namespace, group: GroupId(group), hash, parent: None, position: 0 }
        };
        let recheck = Duration::from_secs(5);
        let is_recent =
            |absences: &Absences, group, number, now| absences.is_recent(&block(group, number), now, recheck);
        absences.note(&block(0, 1), now);
        let found = [(0, 1), (0, 2), (1, 1)].map(|(group, number)| is_recent(&absences, group, number, now));
        assert_eq!(found, [true, false, false], "of this group alone");
        assert!(!is_recent(&absences, 0, 1, now + recheck));
        absences.forget(&block(0, 1));
        assert!(!is_recent(&absences, 0, 1, now));
        for number in 0..=MAX_ABSENCES as u32 {
            absences.note(&block(0, number), now);
        }
        assert_eq!(absences.0.len(), 1);
    }

    /// Mutation that makes it fail: `probe_chain` learns of what was found whatever happened since
    /// it asked.
    #[cfg(feature = "worker")]
    #[test]
    fn what_is_removed_while_it_is_looked_for_is_not_found() {
        use super::super::test_manager::{self, VOLUME, block};
        use kvbm_plan::Rank;

        let (manager, sent) = test_manager::manager();
        let leader = &manager.leader;
        let volume = leader.volumes.get(VOLUME).expect("configured");
        let block = block();
        let probes = || sent.tokens(|request| matches!(request, VolumeRequest::Probe(_)));
        for (at, removed) in [true, false].into_iter().enumerate() {
            let found = std::thread::scope(|scope| {
                let looking = scope.spawn(|| volume.probe_chain(Duration::ZERO, &[block]));
                let until = Instant::now() + Duration::from_secs(60);
                while probes().len() <= at {
                    assert!(Instant::now() < until, "it is asked for");
                    std::thread::yield_now();
                }
                if removed {
                    volume.index.lock().begin_removal(&[block]);
                    volume.index.lock().end_removal(&[(block.group, block.hash)]);
                }
                leader.volumes.pending.answer(Rank(0), probes()[at], VolumeAnswer::Present(vec![true]));
                looking.join().expect("it ends")
            });
            let known = volume.contains(block.group, block.hash);
            assert_eq!((found, known), (usize::from(!removed), !removed));
        }
    }
}
