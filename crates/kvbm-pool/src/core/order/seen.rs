//! The eviction order of one tenant's blocks, which lie among those of all: how far they were looked for is remembered, so that each
//! place is looked at once for each tenant.

use super::{LEN_BITS, Order};
use crate::core::NONE;
use crate::core::slot::Slot;
use std::ops::Range;

/// Places with numbers from `from` and below `to` are none of the tenant's, as far as they are valid.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    from: u64,
    to: u64,
}

impl Seen {
    /// Something was put at the old end.
    pub(super) fn pushed_old(&mut self, number: u64) {
        if (self.from..self.to).contains(&number) {
            self.from = number + 1;
        }
    }

    /// A place has another number, nearer to the old end.
    pub(super) fn moved(&mut self, number: u64, to: u64) {
        if number >= self.to && (self.from..self.to).contains(&to) {
            self.to = to;
        }
    }
}

impl Order {
    /// Blocks changed hands: what was looked at says nothing any more.
    pub(crate) fn look_again(&mut self) {
        self.seen.clear();
    }

    /// Takes the oldest slot of a tenant's out; `None` when none is left. What was put at the old end since the last look comes
    /// first. `is_theirs` is asked of the entry of a slot; `budget` counts down for every place looked at, and 0 ends the search.
    pub(crate) fn pop_old_of(
        &mut self,
        tenant: usize,
        slots: &[Slot],
        budget: &mut usize,
        is_theirs: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let (slot, after) = self.find(tenant, slots, budget, is_theirs)?;
        self.seen[tenant] = after;
        slots[slot as usize].place.set(NONE);
        Some(slot)
    }

    /// The same, but leaves it where it is.
    pub(crate) fn look_for(
        &mut self,
        tenant: usize,
        slots: &[Slot],
        budget: &mut usize,
        is_theirs: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        self.find(tenant, slots, budget, is_theirs).map(|(slot, _)| slot)
    }

    /// The oldest slot of a tenant's, and what was seen when that has been looked at.
    fn find(
        &mut self,
        tenant: usize,
        slots: &[Slot],
        budget: &mut usize,
        is_theirs: impl Fn(u32) -> bool,
    ) -> Option<(u32, Seen)> {
        let first = self.first();
        if self.seen.len() <= tenant {
            self.seen.resize(tenant + 1, Seen { from: first, to: first });
        }
        while *budget > 0 {
            let Seen { from, to } = self.seen[tenant];
            let (after, (id, index)) = if let Some((number, at)) = self.last_before(from) {
                (Seen { from: number, to }, at)
            } else {
                let (number, at) = self.next_from(to)?;
                (Seen { from, to: number + 1 }, at)
            };
            *budget -= 1;
            let slot = self.segments[id as usize].places[index];
            let state = &slots[slot as usize];
            let place = self.tag | id << LEN_BITS | index as u32;
            if state.place.get() == place && is_theirs(state.entry.get()) {
                return Some((slot, after));
            }
            self.seen[tenant] = after;
        }
        None
    }

    /// Places with numbers of a range that were not looked at for a tenant, whosever they are: number, and slot unless the place is stale.
    pub(crate) fn unseen(
        &self,
        tenant: usize,
        Range { start, end }: Range<u64>,
        slots: &[Slot],
    ) -> impl Iterator<Item = (u64, Option<u32>)> {
        let first = self.first();
        let Seen { from, to } = self.seen.get(tenant).copied().unwrap_or(Seen { from: first, to: first });
        let old = (start < from).then(|| self.places(start..from.min(end), slots)).into_iter().flatten();
        let places = old.chain(self.places(start.max(to)..end, slots));
        places.inspect(|_| {
            #[cfg(test)]
            crate::core::counts::a_place_is_looked_at();
        })
    }

    /// The youngest place before `number`: its number, segment and index there.
    fn last_before(&self, number: u64) -> Option<(u64, (u32, usize))> {
        let end = self.queue.partition_point(|&id| self.segments[id as usize].first() < number);
        let within = self.queue.range(..end).rev().find_map(|&id| {
            let segment = &self.segments[id as usize];
            let below = (number - segment.start).min(segment.tail as u64) as usize;
            (below > segment.head).then(|| (segment, id, below - 1))
        });
        within.map(|(segment, id, index)| (segment.start + index as u64, (id, index)))
    }

    /// The oldest place from `number` on.
    fn next_from(&self, number: u64) -> Option<(u64, (u32, usize))> {
        let first = self.queue.partition_point(|&id| self.segments[id as usize].end() <= number);
        let within = self.queue.range(first..).find_map(|&id| {
            let segment = &self.segments[id as usize];
            let from = number.max(segment.first()) - segment.start;
            ((from as usize) < segment.tail).then_some((segment, id, from as usize))
        });
        within.map(|(segment, id, index)| (segment.start + index as u64, (id, index)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Common;
    use super::*;
    use crate::sync::Arc;
    use std::collections::VecDeque;

    fn slots_with_entries(count: usize) -> Box<[Slot]> {
        let slots = Slot::many(count);
        for (number, slot) in slots.iter().enumerate() {
            slot.entry.set(number as u32);
        }
        slots
    }

    /// Three tenants, each slot always of the same: against a list for each.
    #[test]
    fn agrees_with_a_list_for_each_tenant() {
        let count = 1500_u32;
        let slots = slots_with_entries(count as usize);
        let tenant_of = |entry: u32| (entry * 7 % 31 % 3) as usize;
        let mut order = Order::new(slots.len(), 5, Arc::new(Common::new(slots.len(), 1)));
        let mut lists = [const { VecDeque::<u32>::new() }; 3];
        let mut random = 5_u64;
        for step in 0..60_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let slot = (random >> 33) as u32 % count;
            let list = &mut lists[tenant_of(slot)];
            match random >> 48 {
                choice if choice % 64 == 0 => {
                    // The tenants come up unevenly; what is found is put at the old end again, or is gone.
                    let tenant = [0, 0, 0, 0, 1, 1, 2][slot as usize % 7];
                    let theirs = |entry| tenant_of(entry) == tenant;
                    let found = order.pop_old_of(tenant, &slots, &mut 1_000_000, theirs);
                    assert_eq!(found, lists[tenant].pop_front(), "step {step}");
                }
                choice if choice % 64 < 3 => {
                    list.retain(|&other| other != slot);
                    slots[slot as usize].place.set(NONE);
                }
                _ => {
                    list.retain(|&other| other != slot);
                    list.push_back(slot);
                    order.push_young(slot, &slots);
                }
            }
        }
        assert!(order.queue.len() <= 2 * 1500 / 1024 + 6, "{} segments", order.queue.len());
    }

    #[test]
    fn what_is_put_at_the_old_end_is_found_and_the_budget_bounds_the_search() {
        let slots = slots_with_entries(3000);
        let mut order = Order::new(3000, 5, Arc::new(Common::new(3000, 1)));
        (0..3000).for_each(|slot| order.push_young(slot, &slots));
        let pop = |order: &mut Order, slots: &[Slot], tenant: usize, budget: usize| {
            let mut left = budget;
            (
                order.pop_old_of(tenant, slots, &mut left, |entry| (entry >= 2000) == (tenant == 1)),
                budget - left,
            )
        };
        assert_eq!(pop(&mut order, &slots, 1, 1500), (None, 1500));
        assert_eq!(pop(&mut order, &slots, 1, 1500), (Some(2000), 501), "it went on from there");
        assert_eq!(pop(&mut order, &slots, 1, 9), (Some(2001), 1));
        for slot in [7, 2000, 2900] {
            order.push_old(slot, &slots);
        }
        assert_eq!(pop(&mut order, &slots, 1, 9), (Some(2000), 2), "7 is none of theirs");
        assert_eq!(pop(&mut order, &slots, 1, 9), (Some(2900), 1));
        assert_eq!(pop(&mut order, &slots, 1, 9), (Some(2002), 1));
        assert_eq!(pop(&mut order, &slots, 0, 9), (Some(7), 1), "the others have an order of their own");
        assert_eq!(pop(&mut order, &slots, 0, 9), (Some(0), 3), "behind two places that are empty now");
    }
}
