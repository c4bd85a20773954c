//! Who holds a block, in a few bytes for each.

use kvbm_plan::{Location, Tier};
use std::collections::HashMap;

/// Number of a place that holds blocks, in [`Places`].
pub(super) type PlaceNumber = u32;

/// Where blocks are and whose events tell of them there, each place under a small number as long as
/// it holds anything.
#[derive(Debug, Default)]
pub(super) struct Places {
    numbers: HashMap<(u16, Location), PlaceNumber>,
    all: Vec<Place>,
    free: Vec<PlaceNumber>,
}

#[derive(Debug)]
struct Place {
    shard: u16,
    location: Location,
    /// How many it holds.
    blocks: u64,
}

impl Places {
    /// The number of a place that holds something.
    pub(super) fn find(&self, shard: u16, location: Location) -> Option<PlaceNumber> {
        self.numbers.get(&(shard, location)).copied()
    }

    /// One block more is there.
    pub(super) fn take(&mut self, shard: u16, location: Location) -> PlaceNumber {
        let number = *self.numbers.entry((shard, location)).or_insert_with(|| {
            let place = Place { shard, location, blocks: 0 };
            if let Some(number) = self.free.pop() {
                self.all[number as usize] = place;
                return number;
            }
            self.all.push(place);
            // So many places at a time would need as many volumes.
            (self.all.len() - 1) as PlaceNumber
        });
        self.all[number as usize].blocks += 1;
        number
    }

    /// One block less is there.
    pub(super) fn release(&mut self, number: PlaceNumber) {
        let place = &mut self.all[number as usize];
        place.blocks = place.blocks.saturating_sub(1);
        if place.blocks == 0 {
            self.numbers.remove(&(place.shard, place.location));
            self.free.push(number);
        }
    }

    pub(super) fn tier(&self, number: PlaceNumber) -> Tier {
        self.all[number as usize].location.tier
    }

    pub(super) fn shard(&self, number: PlaceNumber) -> u16 {
        self.all[number as usize].shard
    }
}

/// The places of one block: a few within it, any number outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Holders {
    /// Those of them that are not [`NONE`].
    Few([PlaceNumber; 4]),
    Many(Vec<PlaceNumber>),
}

const NONE: PlaceNumber = PlaceNumber::MAX;

impl Default for Holders {
    fn default() -> Self {
        Self::Few([NONE; 4])
    }
}

impl Holders {
    pub(super) fn iter(&self) -> impl Iterator<Item = PlaceNumber> + '_ {
        let places = match self {
            Self::Few(places) => &places[..],
            Self::Many(places) => places,
        };
        places.iter().copied().filter(|place| *place != NONE)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Adds one that is not there yet.
    pub(super) fn add(&mut self, place: PlaceNumber) {
        match self {
            Self::Few(places) => match places.iter_mut().find(|place| **place == NONE) {
                Some(free) => *free = place,
                None => *self = Self::Many(places.iter().copied().chain([place]).collect()),
            },
            Self::Many(places) => places.push(place),
        }
    }

    /// Whether it was there.
    pub(super) fn remove(&mut self, place: PlaceNumber) -> bool {
        let mut of_this = match self {
            Self::Few(places) => places.iter_mut(),
            Self::Many(places) => places.iter_mut(),
        };
        let Some(found) = of_this.find(|found| **found == place) else { return false };
        *found = NONE;
        if let Self::Many(places) = self {
            places.retain(|place| *place != NONE);
            if let Ok(few) = places.as_slice().try_into() {
                *self = Self::Few(few);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::NodeId;

    #[test]
    fn a_block_has_any_number_of_holders_and_few_cost_nothing_more() {
        assert!(size_of::<Holders>() <= 24);
        let mut holders = Holders::default();
        for place in 0..9 {
            holders.add(place);
        }
        assert_eq!(holders.iter().collect::<Vec<_>>(), (0..9).collect::<Vec<_>>());
        for place in [4, 0, 8, 2, 6] {
            assert!(holders.remove(place) && !holders.remove(place));
        }
        assert_eq!(holders, Holders::Few([1, 3, 5, 7]));
        for place in [1, 3, 5, 7] {
            assert!(!holders.is_empty() && holders.remove(place));
        }
        assert!(holders.is_empty());
    }

    #[test]
    fn places_that_hold_nothing_are_forgotten() {
        let mut places = Places::default();
        for node in 0..1000 {
            let location = Location::on(NodeId(node), Tier::G4);
            let number = places.take(1, location);
            assert_eq!((places.take(1, location), places.find(1, location)), (number, Some(number)));
            assert_eq!((places.shard(number), places.tier(number)), (1, Tier::G4));
            places.release(number);
            assert_eq!(places.find(1, location), Some(number));
            places.release(number);
            assert_eq!(places.find(1, location), None);
        }
        assert_eq!((places.all.len(), places.numbers.len()), (1, 0));
    }
}
