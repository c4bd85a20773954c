//! What each volume has under way of a path that all of them share.

use kvbm_plan::VolumeId;
use std::collections::BTreeMap;

/// Blocks under way, by volume.
#[derive(Default)]
pub(super) struct Shares(BTreeMap<VolumeId, usize>);

impl Shares {
    /// How many blocks more `volume` may have where there is room for `free`: half of what would make its share as large as what is left,
    /// so that there is always room for one that has nothing, however many never give back what they have.
    pub(super) fn room(&self, volume: VolumeId, free: usize) -> usize {
        free.saturating_sub(self.0.get(&volume).copied().unwrap_or(0)).div_ceil(2)
    }

    pub(super) fn took(&mut self, volume: VolumeId, blocks: usize) {
        *self.0.entry(volume).or_default() += blocks;
    }

    pub(super) fn returned(&mut self, volume: VolumeId, blocks: usize) {
        if let Some(under_way) = self.0.get_mut(&volume) {
            *under_way = under_way.saturating_sub(blocks);
            if *under_way == 0 {
                self.0.remove(&volume);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_that_never_give_anything_back_leave_room_for_another() {
        let (mut shares, mut free) = (Shares::default(), 64);
        for hanging in 0..5 {
            let volume = VolumeId(hanging);
            loop {
                let room = shares.room(volume, free);
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
            let room = shares.room(works, free);
            assert!(room > 0, "{free} are left");
            shares.took(works, room);
            shares.returned(works, room);
        }
        assert_eq!(shares.0.len(), 5);
    }
}
