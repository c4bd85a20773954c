//! What each volume has under way of a path that all of them share.

use kvbm_plan::VolumeId;
use std::collections::BTreeMap;

/// Blocks under way, by volume, of a path that has room for so many.
pub(super) struct Shares {
    depth: usize,
    under_way: BTreeMap<VolumeId, usize>,
}

impl Shares {
    pub(super) fn new(depth: usize) -> Self {
        Self { depth, under_way: BTreeMap::new() }
    }

    /// How many blocks more `volume` may have where there is room for `free`; `alone` says that
    /// there is no other.
    ///
    /// Of several each gets half of what would make its share as large as what is left. Those that
    /// never give back what they have leave half of it each, down to one block: seven use up a room
    /// of 64. One that is alone leaves an eighth, and at least a block, for one that comes later,
    /// perhaps in its place because it hangs.
    pub(super) fn room(&self, volume: VolumeId, free: usize, alone: bool) -> usize {
        let others = self.under_way.keys().any(|known| *known != volume);
        if alone && !others {
            let reserve = (self.depth / 8).max(1).min(self.depth.saturating_sub(1));
            return free.saturating_sub(reserve);
        }
        free.saturating_sub(self.under_way.get(&volume).copied().unwrap_or(0)).div_ceil(2)
    }

    pub(super) fn took(&mut self, volume: VolumeId, blocks: usize) {
        *self.under_way.entry(volume).or_default() += blocks;
    }

    pub(super) fn returned(&mut self, volume: VolumeId, blocks: usize) {
        if let Some(under_way) = self.under_way.get_mut(&volume) {
            *under_way = under_way.saturating_sub(blocks);
            if *under_way == 0 {
                self.under_way.remove(&volume);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_that_never_give_anything_back_leave_room_for_another() {
        let (mut shares, mut free) = (Shares::new(64), 64);
        for hanging in 0..5 {
            let volume = VolumeId(hanging);
            loop {
                let room = shares.room(volume, free, false);
                if room == 0 {
                    break;
                }
                shares.took(volume, room);
                free -= room;
            }
        }
        let works = VolumeId(9);
        assert!(free > 0, "nothing is left");
        for _ in 0..10 {
            let room = shares.room(works, free, false);
            assert!(room > 0, "{free} are left");
            shares.took(works, room);
            shares.returned(works, room);
        }
        assert_eq!(shares.under_way.len(), 5);
    }

    #[test]
    fn one_that_is_alone_leaves_some_room_unless_there_is_one_place_only() {
        let (alone, later) = (VolumeId(1), VolumeId(2));
        for (depth, most) in [(64, 56), (8, 7), (4, 3), (2, 1), (1, 1)] {
            let mut shares = Shares::new(depth);
            assert_eq!(shares.room(alone, depth, true), most);
            shares.took(alone, most);
            assert_eq!(shares.room(alone, depth - most, true), 0);
            // Whether it is registered still makes no difference.
            let room = [true, false].map(|only| shares.room(later, depth - most, only));
            assert!(room.iter().all(|room| (*room > 0) == (depth > 1)), "{room:?} of {depth}");
        }
    }
}
