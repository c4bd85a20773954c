//! A small cache that keeps what was used last, the blocks of a request by their order in it.

use super::index::{Index, NONE};

#[derive(Clone, Copy)]
struct Link {
    older: u16,
    younger: u16,
}

pub(super) struct Recent {
    index: Index,
    links: Box<[Link]>,
    oldest: u16,
    youngest: u16,
    /// The block of the request that was used last: the next one is a little older, as those behind
    /// it leave first.
    above: u16,
}

impl Recent {
    pub(super) fn new(size: usize) -> Self {
        let links = vec![Link { older: NONE, younger: NONE }; size].into_boxed_slice();
        Self { index: Index::new(size), links, oldest: NONE, youngest: NONE, above: NONE }
    }

    /// A request begins.
    pub(super) fn begin(&mut self) {
        self.above = NONE;
    }

    /// The next block of a request. Says whether it was there.
    pub(super) fn used(&mut self, tag: u64) -> bool {
        let found = self.index.find(tag);
        if let Some(at) = found {
            if at != self.above {
                self.unlink(at);
                self.link(at);
            }
            return true;
        }
        if let Some(at) = self.index.add(tag).or_else(|| self.replace(tag)) {
            self.link(at);
        }
        false
    }

    /// The number of the oldest, unless that is of this request too.
    fn replace(&mut self, tag: u64) -> Option<u16> {
        let oldest = self.oldest;
        if oldest == NONE || oldest == self.above {
            return None;
        }
        self.unlink(oldest);
        self.index.remove(oldest);
        self.index.add(tag)
    }

    fn unlink(&mut self, at: u16) {
        let Link { older, younger } = self.links[usize::from(at)];
        *self.younger_of(older) = younger;
        *self.older_of(younger) = older;
    }

    /// Right behind the last block of the request, or at the young end.
    fn link(&mut self, at: u16) {
        let younger = self.above;
        let older = std::mem::replace(self.older_of(younger), at);
        *self.younger_of(older) = at;
        self.links[usize::from(at)] = Link { older, younger };
        self.above = at;
    }

    fn younger_of(&mut self, at: u16) -> &mut u16 {
        match self.links.get_mut(usize::from(at)) {
            Some(link) => &mut link.younger,
            None => &mut self.oldest,
        }
    }

    fn older_of(&mut self, at: u16) -> &mut u16 {
        match self.links.get_mut(usize::from(at)) {
            Some(link) => &mut link.older,
            None => &mut self.youngest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// The same as a list that is rebuilt for each request: its blocks, then the others as they
    /// were, cut off.
    #[test]
    fn agrees_with_a_list() {
        let (mut recent, mut list, mut random) = (Recent::new(10), Vec::<u64>::new(), Random::new(3));
        for _ in 0..3000 {
            let (branch, length) = (random.below(6) as u64, 1 + random.below(14));
            // Branches part behind their third block.
            let request: Vec<u64> =
                (0..length as u64).map(|at| if at < 3 { at } else { 100 * (branch + 1) + at }).collect();
            recent.begin();
            for &tag in &request {
                assert_eq!(recent.used(tag), list.contains(&tag), "{tag} of {request:?} in {list:?}");
            }
            let kept: Vec<u64> = request.iter().copied().take(10).collect();
            list.retain(|tag| !kept.contains(tag));
            list.splice(0..0, kept);
            list.truncate(10);
        }
    }
}
