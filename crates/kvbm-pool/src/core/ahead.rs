//! Finding the entries of many blocks, those of a chain most often, ahead of who needs them.
//!
//! Looking up one block waits for memory twice: for a line of the table, then for the entry that it names. Here blocks go by
//! parts through steps, and what a step reads was asked for in an earlier one, while other parts had their turn: the machine
//! has many reads under way and waits for none of them alone.
//!
//! Most blocks cost no line of the table. Blocks that were registered together mostly have entries in a row, up or down: entries
//! are handed out in a row, and come back from a chain that is evicted in the order in which the next chain takes them. So the
//! table is asked for a few blocks of a part, and where two of them are as far apart as their entries, those between most likely
//! are too. Whether they are is seen in the entries, which have to be compared anyway, all 128 bits: a guess that is wrong costs
//! a look at the table, and never finds another block. That a block has no entry is only ever said by the table.

use super::index::LOOKUPS;
use super::table::{Guess, Looked, Table};
use super::{Core, NONE, Store};
use crate::near;
use kvbm_plan::{GroupId, SequenceHash};
use std::ops::Range;

/// Parts that are under way: one has just asked for its first lines, those behind it read them, ask for more lines, wait for their
/// entries, and compare them.
const PARTS: usize = 5;

/// The table is asked for one block of so many, and the last of a part, before it is known whether the entries of those between are
/// in a row.
const STRIDE: usize = 16;

const HASHES_PER_LINE: usize = 64 / size_of::<SequenceHash>();

/// The entries of blocks of a group, found part by part, in the order in which `parts` names them.
pub(super) struct Ahead<'a, I> {
    group: GroupId,
    parts: I,
    /// The part that begins next.
    next: &'a [SequenceHash],
    /// Parts that have begun, the one that was first from `oldest` on, in a ring.
    begun: [Part<'a>; PARTS],
    oldest: usize,
    found: [u32; LOOKUPS],
}

impl<'a, I: Iterator<Item = &'a [SequenceHash]>> Ahead<'a, I> {
    /// Each of `parts` has at most [`LOOKUPS`] blocks, and at least one.
    pub(super) fn new(core: &Core<'_>, group: GroupId, mut parts: I) -> Self {
        let mut begun = [Part::NONE; PARTS];
        for (at, (part, hashes)) in begun.iter_mut().zip(&mut parts).enumerate() {
            // Who needs the first has nothing to do meanwhile.
            part.begin(core.table(), group, hashes, if at == 0 { 1 } else { STRIDE });
        }
        let next = parts.next().unwrap_or_default();
        Self { group, parts, next, begun, oldest: 0, found: [NONE; LOOKUPS] }
    }

    /// The entries of the blocks of the next part, `NONE` for those that have none. As with [`Core::find`] what belongs to a
    /// shard that is not held is a hint. The hold may be another one each time.
    #[inline]
    pub(super) fn next(&mut self, core: &Core<'_>) -> Option<&[u32]> {
        let Self { group, parts, next, begun, oldest, found } = self;
        let (table, store) = (core.table(), core.store);
        // What the youngest asked for is still on its way.
        for at in 0..PARTS - 1 {
            begun[(*oldest + at) % PARTS].go_on(table, store, *group);
        }
        while !begun[*oldest].is_ready() {
            for part in begun.iter_mut() {
                part.go_on(table, store, *group);
            }
        }
        let part = &mut begun[*oldest];
        *oldest = (*oldest + 1) % PARTS;
        let count = part.hashes.len();
        part.verify(table, store, *group, found);
        part.begin(table, *group, next, STRIDE);
        *next = parts.next().unwrap_or_default();
        next.iter().step_by(HASHES_PER_LINE).for_each(near::prefetch);
        (count > 0).then(|| &found[..count])
    }
}

/// Blocks that are looked up together.
#[derive(Clone, Copy)]
struct Part<'a> {
    hashes: &'a [SequenceHash],
    /// Their entries most likely; `NONE` where that is not known, or there is none.
    guesses: [u32; LOOKUPS],
    /// Blocks whose home lines in the table were asked for and have not been read, a bit for each; and those of which it is the
    /// next line, for the home line was full.
    asked: u32,
    asked_further: u32,
    /// Whether it is known which entries are in a row.
    is_divided: bool,
}

const _: () = assert!(LOOKUPS <= u32::BITS as usize);

impl<'a> Part<'a> {
    const NONE: Self =
        Part { hashes: &[], guesses: [NONE; LOOKUPS], asked: 0, asked_further: 0, is_divided: true };

    /// Asks for the lines of every `stride`th block of `hashes`, and of the last one.
    #[inline]
    fn begin(&mut self, table: &Table, group: GroupId, hashes: &'a [SequenceHash], stride: usize) {
        (self.hashes, self.guesses) = (hashes, [NONE; LOOKUPS]);
        self.is_divided = stride == 1 || hashes.is_empty();
        self.ask(table, group, probes(hashes.len(), stride));
    }

    fn is_ready(&self) -> bool {
        self.is_divided && self.asked | self.asked_further == 0
    }

    /// Asks for the lines of these blocks.
    #[inline]
    fn ask(&mut self, table: &Table, group: GroupId, asked: u32) {
        self.asked = asked;
        for at in ones(asked) {
            table.prefetch(table.mix(group, self.hashes[at]));
        }
    }

    /// Reads what was asked for and asks for what that leads to.
    #[inline]
    fn go_on(&mut self, table: &Table, store: &Store, group: GroupId) {
        for at in ones(std::mem::take(&mut self.asked_further)) {
            if let Guess::Entry(guess) = table.guess(table.mix(group, self.hashes[at]), Looked::Next) {
                self.expect(store, at, guess);
            }
        }
        for at in ones(std::mem::take(&mut self.asked)) {
            let key = table.mix(group, self.hashes[at]);
            match table.guess(key, Looked::Home) {
                Guess::Entry(guess) => self.expect(store, at, guess),
                Guess::Further => {
                    table.prefetch_line(key, Looked::Next);
                    self.asked_further |= 1 << at;
                }
                Guess::Nothing => {}
            }
        }
        if !self.is_divided {
            self.is_divided = true;
            let rest = self.divide(store);
            self.ask(table, group, rest);
        }
    }

    /// Notes which entry a block most likely has, and asks for it.
    #[inline]
    fn expect(&mut self, store: &Store, at: usize, guess: u32) {
        self.guesses[at] = guess;
        near::prefetch(&store.entries[guess]);
    }

    /// Guesses the entries of the blocks between and beside those of which the table's lines said something, where these are in a row.
    /// Returns the others. (Of one key of twenty its line says nothing: it is in the next one.)
    #[inline]
    fn divide(&mut self, store: &Store) -> u32 {
        let (mut rest, mut done, mut known) = (0, 0, 0);
        let (mut from, mut step) = (None, None);
        for at in ones(probes(self.hashes.len(), STRIDE)) {
            if self.guesses[at] == NONE {
                continue;
            }
            if let Some(from) = from {
                step = self.step(from, at);
                rest |= self.fill(store, done..at, from, step);
                done = at;
            }
            from = Some(at);
            known |= 1 << at;
        }
        rest |= self.fill(store, done..self.hashes.len(), from.unwrap_or_default(), step);
        rest & !known
    }

    /// What is added from each block's entry to the next one's, modulo 2^32, where those of these two are as far apart as the blocks.
    #[inline]
    fn step(&self, from: usize, to: usize) -> Option<u32> {
        let (distance, first, last) = ((to - from) as u32, self.guesses[from], self.guesses[to]);
        let difference = last.wrapping_sub(first);
        [1, u32::MAX].into_iter().find(|step| step.wrapping_mul(distance) == difference)
    }

    /// Guesses the entries of some blocks from that of `from`, and asks for them. Returns the blocks, if there is no step to go by.
    #[inline]
    fn fill(&mut self, store: &Store, blocks: Range<usize>, from: usize, step: Option<u32>) -> u32 {
        let entries = store.entries.len() as u32;
        let guess = |at: usize, step: u32| {
            self.guesses[from].wrapping_add(step.wrapping_mul((at as u32).wrapping_sub(from as u32)))
        };
        let is_row = |step: &u32| guess(blocks.start, *step).max(guess(blocks.end - 1, *step)) < entries;
        let Some(step) = step.filter(is_row) else { return bits(blocks) };
        let mut next = guess(blocks.start, step);
        for at in &mut self.guesses[blocks] {
            *at = next;
            near::prefetch(&store.entries[next]);
            next = next.wrapping_add(step);
        }
        0
    }

    /// The entries for certain.
    #[inline]
    fn verify(&self, table: &Table, store: &Store, group: GroupId, found: &mut [u32; LOOKUPS]) {
        for ((&hash, &guess), found) in self.hashes.iter().zip(&self.guesses).zip(found) {
            let is_right = guess != NONE && store.entries[guess].is_block(group, hash);
            *found = if is_right {
                guess
            } else {
                table.find(&table.key(group, hash), &store.entries).unwrap_or(NONE)
            };
        }
    }
}

/// A bit for each of these blocks.
#[inline]
fn bits(blocks: Range<usize>) -> u32 {
    blocks.fold(0, |bits, at| bits | 1 << at)
}

/// A bit for every `stride`th of so many blocks, and for the last.
#[inline]
fn probes(blocks: usize, stride: usize) -> u32 {
    let Some(last) = blocks.checked_sub(1) else { return 0 };
    (0..last).step_by(stride).fold(1 << last, |bits, at| bits | 1 << at)
}

/// The bits that are set, from the lowest on.
#[inline]
fn ones(mut bits: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = (bits != 0).then(|| bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        at
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::chains::{GROUP, register};
    use crate::policy::Random;
    use crate::{G1, Registry, RegistryConfig};

    fn hash(number: u128) -> SequenceHash {
        SequenceHash::from_bytes(number.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835).to_le_bytes())
    }

    fn registry(capacity: u32, shards: u32) -> Registry {
        let mut config = RegistryConfig::new([capacity, 0, 0]);
        config.policy = crate::PolicyKind::LruLeaf;
        config.shards = shards;
        Registry::new(&config).unwrap()
    }

    /// Registers what is not there of `chain`, in one batch.
    fn come(registry: &Registry, chain: &[SequenceHash]) {
        let known = registry.pool::<G1>().match_sequence_hashes(GROUP, chain);
        if known.len() < chain.len() {
            drop(register::<G1>(registry, chain, known.len()));
        }
    }

    fn found_ahead(core: &Core<'_>, group: GroupId, hashes: &[SequenceHash]) -> Vec<u32> {
        let mut ahead = Ahead::new(core, group, hashes.chunks(LOOKUPS));
        let mut all = Vec::new();
        while let Some(found) = ahead.next(core) {
            all.extend_from_slice(found);
        }
        all
    }

    /// Chains that grow and go, looked up as they are, from their ends, with holes, and in pieces.
    #[test]
    fn what_is_found_ahead_is_what_the_table_says() {
        for shards in [1, 4] {
            let registry = registry(2000, shards);
            let mut random = Random::new(7);
            let mut below = |end: usize| random.below(end);
            let mut chains: Vec<Vec<SequenceHash>> = Vec::new();
            let mut number = 0;
            for round in 0..600 {
                let at = below(chains.len() + 4);
                if at >= chains.len() {
                    chains.push(Vec::new());
                }
                let at = at.min(chains.len() - 1);
                let most = [2, 20, 200][below(3)];
                for _ in 0..=below(most) {
                    number += 1;
                    chains[at].push(hash(number));
                }
                chains[at].truncate(1500);
                come(&registry, &chains[at]);
                let mut wanted = chains[below(chains.len())].clone();
                let (some, unknown) = (below(64).min(wanted.len()), hash(u128::MAX / 3));
                match round % 4 {
                    0 => wanted.reverse(),
                    1 => wanted.iter_mut().step_by(1 + below(40)).for_each(|hole| *hole = unknown),
                    2 => wanted.rotate_left(some),
                    _ => wanted.extend_from_within(..some),
                }
                let core = registry.shared.store.lock_all();
                let one_by_one = |group: GroupId| {
                    wanted.iter().map(|&hash| core.find(group, hash).unwrap_or(NONE)).collect::<Vec<_>>()
                };
                assert_eq!(found_ahead(&core, GROUP, &wanted), one_by_one(GROUP), "round {round}");
                assert!(found_ahead(&core, GroupId(1), &wanted).iter().all(|&index| index == NONE));
                drop(core);
                let tiers = wanted.iter().map(|&hash| registry.tiers_of(GROUP, hash));
                let there: Vec<_> = tiers.take_while(|tiers| !tiers.is_empty()).collect();
                assert_eq!(registry.peek_prefix(GROUP, &wanted), there, "round {round}");
            }
        }
    }

    #[test]
    fn blocks_whose_entries_are_in_a_row_cost_the_table_a_few_lines() {
        let registry = registry(1000, 1);
        let mut chain: Vec<_> = (1..=LOOKUPS as u128).map(hash).collect();
        come(&registry, &chain);
        let core = registry.shared.store.lock_all();
        for _ in 0..2 {
            let mut part = Part::NONE;
            part.begin(core.table(), GROUP, &chain, STRIDE);
            assert_eq!(part.asked, 1 | 1 << STRIDE | 1 << (LOOKUPS - 1));
            part.go_on(core.table(), core.store, GROUP);
            assert!(part.is_ready(), "nothing else was asked for");
            let entries: Vec<_> = chain.iter().map(|&hash| core.find(GROUP, hash).unwrap()).collect();
            assert_eq!(part.guesses[..], entries);
            chain.reverse();
        }
    }

    #[test]
    fn a_row_does_not_go_on_where_there_are_no_entries() {
        let registry = registry(1000, 1);
        let chain: Vec<_> = (1..=LOOKUPS as u128).map(hash).collect();
        come(&registry, &chain);
        let core = registry.shared.store.lock_all();
        let end = core.store.entries.len() as u32;
        for [first, second] in
            [[5, 5 + STRIDE as u32], [5 + STRIDE as u32, 5], [end - 20, end - 20 + STRIDE as u32]]
        {
            let mut part = Part { hashes: &chain, ..Part::NONE };
            (part.guesses[STRIDE / 2], part.guesses[STRIDE / 2 + STRIDE]) = (first, second);
            let step = part.step(STRIDE / 2, STRIDE / 2 + STRIDE);
            assert_eq!(part.fill(core.store, 0..LOOKUPS, STRIDE / 2, step), u32::MAX, "{first} to {second}");
        }
    }
}
