//! When this leader wrote blocks to a volume and removed them. The answer of a volume arrives after
//! the volume has looked. Meanwhile a block that it found may have been removed, and one that it
//! missed may have been written. So each request keeps the moment when it began. What happened to a
//! block since then says whether the answer still counts.

use kvbm_plan::SequenceHash;

/// Blocks share so many entries. What happened to one block counts for all of its entry; the cost
/// is a request that is repeated.
const PLACES: usize = 1 << 14;

/// A point in the history of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

/// See the module.
pub(super) struct History {
    now: Moment,
    came: Box<[Moment]>,
    went: Box<[Moment]>,
    /// When the removal of a whole namespace ended last.
    purged: Moment,
}

impl Default for History {
    fn default() -> Self {
        let never = || vec![Moment::default(); PLACES].into_boxed_slice();
        Self { now: Moment::default(), came: never(), went: never(), purged: Moment::default() }
    }
}

impl History {
    pub(super) fn now(&self) -> Moment {
        self.now
    }

    /// A block was written.
    pub(super) fn came(&mut self, hash: SequenceHash) {
        self.came[place(hash)] = self.next();
    }

    /// The removal of a block is over.
    pub(super) fn went(&mut self, hash: SequenceHash) {
        self.went[place(hash)] = self.next();
    }

    /// The removal of a namespace, or of everything, is over.
    pub(super) fn purged(&mut self) {
        self.purged = self.next();
    }

    /// Whether a look that began at `since` may have missed a block because it was not written yet.
    pub(super) fn has_come(&self, hash: SequenceHash, since: Moment) -> bool {
        self.came[place(hash)] > since
    }

    /// Whether a look that began at `since` may have found a block that is removed by now.
    pub(super) fn has_gone(&self, hash: SequenceHash, since: Moment) -> bool {
        self.went[place(hash)] > since || self.purged > since
    }

    fn next(&mut self) -> Moment {
        self.now.0 += 1;
        self.now
    }
}

fn place(hash: SequenceHash) -> usize {
    let mut first = [0; 8];
    first.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(first) as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_before_a_look_does_not_touch_it() {
        let mut history = History::default();
        let [one, two] = [1, 2].map(|first| SequenceHash::from_bytes([first; 16]));
        let early = history.now();
        history.came(one);
        history.went(two);
        let late = history.now();
        let of =
            |history: &History, hash, since| (history.has_come(hash, since), history.has_gone(hash, since));
        assert_eq!([of(&history, one, early), of(&history, two, early)], [(true, false), (false, true)]);
        assert_eq!([of(&history, one, late), of(&history, two, late)], [(false, false); 2]);
        history.purged();
        assert_eq!([of(&history, one, late), of(&history, two, late)], [(false, true); 2]);
        assert_eq!(of(&history, one, history.now()), (false, false));
    }
}
