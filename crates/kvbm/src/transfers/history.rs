//! The last copies of all blocks, for the history of one that turns out to be wrong.

use super::{Move, Tier};
use kvbm_plan::{BlockId, Failure, FailureKind, Path, SequenceHash};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::Instant;

/// Copies that are remembered: 4 MiB.
const MOST: usize = 65_536;
/// Copies of a block that its history names, the last ones.
const TOLD: usize = 6;

#[derive(Clone, Copy)]
struct Copy {
    hash: SequenceHash,
    path: Path,
    src: BlockId,
    dst: BlockId,
    at: Instant,
    failed: Option<FailureKind>,
}

/// See the module.
#[derive(Default)]
pub(super) struct CopyHistory(Mutex<VecDeque<Copy>>);

impl CopyHistory {
    /// Copies of a transfer are over.
    pub(super) fn add(&self, moves: &[Move], to: Tier, failures: &[Option<Failure>], now: Instant) {
        let mut copies = self.0.lock();
        for (&Move { identity, from, src, dst }, failure) in moves.iter().zip(failures) {
            if copies.len() == MOST {
                copies.pop_front();
            }
            let (path, failed) = (Path::new(from, to), failure.as_ref().map(|failure| failure.kind));
            copies.push_back(Copy { hash: identity.hash, path, src, dst, at: now, failed });
        }
    }

    /// The last copies of a block, oldest first, as text.
    pub(super) fn of(&self, hash: SequenceHash, now: Instant) -> String {
        let copies = self.0.lock();
        let mut of_block: Vec<Copy> =
            copies.iter().rev().filter(|copy| copy.hash == hash).take(TOLD).copied().collect();
        drop(copies);
        of_block.reverse();
        let mut story = String::new();
        for Copy { path, src, dst, at, failed, .. } in of_block {
            let ago = now.saturating_duration_since(at).as_secs_f64();
            let separator = if story.is_empty() { "" } else { ", " };
            // Writing to a text does not fail.
            let _ = write!(story, "{separator}{ago:.1} s ago {path} slot {src} to {dst}");
            if let Some(kind) = failed {
                let _ = write!(story, " ({kind})");
            }
        }
        if story.is_empty() {
            format!("none of the last {MOST} copies: on the tier since the start")
        } else {
            story
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{BlockIdentity, GroupId, NamespaceId};
    use std::time::Duration;

    fn block(byte: u8, from: Tier, slot: u32) -> Move {
        let hash = SequenceHash::from_bytes([byte; 16]);
        let identity =
            BlockIdentity { namespace: NamespaceId(0), group: GroupId(0), hash, parent: None, position: 0 };
        Move { identity, from, src: BlockId(slot), dst: BlockId(slot + 1) }
    }

    #[test]
    fn the_story_of_a_block_has_its_last_copies_in_order() {
        let (history, start) = (CopyHistory::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        history.add(&[block(1, Tier::G1, 5), block(2, Tier::G1, 6)], Tier::G2, &[None, None], start);
        let failed = Some(Failure::new(FailureKind::Io, "planted"));
        history.add(&[block(1, Tier::G2, 6)], Tier::G3, &[failed], after(2));
        let story = history.of(SequenceHash::from_bytes([1; 16]), after(3));
        assert_eq!(story, "3.0 s ago g1_g2 slot 5 to 6, 1.0 s ago g2_g3 slot 6 to 7 (io)");
        let unknown = history.of(SequenceHash::from_bytes([9; 16]), start);
        assert!(unknown.contains("since the start"), "{unknown}");
    }

    #[test]
    fn it_is_bounded() {
        let (history, now) = (CopyHistory::default(), Instant::now());
        let moves = vec![block(3, Tier::G1, 0); MOST / 2 + 1];
        let none = vec![None; moves.len()];
        for _ in 0..3 {
            history.add(&moves, Tier::G2, &none, now);
        }
        assert_eq!(history.0.lock().len(), MOST);
        let story = history.of(SequenceHash::from_bytes([3; 16]), now);
        assert_eq!(story.matches("g1_g2").count(), TOLD);
    }
}
