use super::*;

fn order_of(capacity: usize) -> EvictionOrder {
    EvictionOrder::new(capacity)
}

fn valid(order: &EvictionOrder, slots: &[Slot]) -> Vec<u32> {
    order.positions(0..u64::MAX, slots).filter_map(|(_, slot)| slot).collect()
}

fn agrees_with_a_list(count: u32, steps: usize, pop_one_in: u64) -> usize {
    let slots = Slot::many(count as usize);
    let mut order = order_of(slots.len());
    let mut oracle: VecDeque<u32> = VecDeque::new();
    let mut random = 99_u64;
    let mut longest = 0;
    for step in 0..steps {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let slot = (random >> 33) as u32 % count;
        let choice = random >> 48;
        if choice.is_multiple_of(pop_one_in) {
            let expected = oracle.pop_front();
            assert_eq!(order.pop_old(&slots, &mut 100_000), expected);
        } else if choice % 16 == 1 {
            oracle.retain(|&other| other != slot);
            oracle.push_front(slot);
            order.push_old(slot, &slots);
        } else if choice % 16 == 2 {
            // A slot that leaves for another reason only forgets its position.
            oracle.retain(|&other| other != slot);
            slots[slot as usize].order_position.set(NONE);
        } else {
            oracle.retain(|&other| other != slot);
            oracle.push_back(slot);
            order.push_young(slot, &slots);
        }
        if step % 97 == 0 {
            assert_eq!(valid(&order, &slots), oracle.iter().copied().collect::<Vec<_>>(), "step {step}");
            let numbers: Vec<u64> = order.positions(0..u64::MAX, &slots).map(|(number, _)| number).collect();
            assert!(numbers.is_sorted_by(|a, b| a < b), "numbers rise along the queue");
        }
        longest = longest.max(order.queue.len());
    }
    longest
}

#[test]
fn agrees_with_a_list_over_random_uses() {
    agrees_with_a_list(9, 40_000, 7);
}

/// More uses than evictions, so that stale positions have to be cleaned out again and again.
#[test]
fn stale_places_are_cleaned_out_on_the_way() {
    let longest = agrees_with_a_list(3000, 120_000, 1009);
    // A queue of one and a half times the slots, what comes while it is cleaned, and the ends.
    assert!(longest <= 3000 * 2 / LEN + 6, "{longest} segments");
}

#[test]
fn a_mark_that_cleaning_passes_misses_nothing() {
    let slots = Slot::many(2048);
    let mut order = order_of(slots.len());
    let push = |order: &mut EvictionOrder, slots: &[Slot], slot: u32| order.push_young(slot, slots);
    for slot in 0..2048 {
        push(&mut order, &slots, slot);
    }
    order.watch(order.end());
    // Slots below 1000 are used over and over; those from 1500 on once more, behind the mark.
    for round in 0..8 {
        for slot in 0..1000 {
            push(&mut order, &slots, slot);
        }
        if round == 0 {
            (1500..2048).for_each(|slot| push(&mut order, &slots, slot));
        }
    }
    let numbers = order.watched()..u64::MAX;
    let after: Vec<u32> = order.positions(numbers, &slots).filter_map(|(_, slot)| slot).collect();
    for slot in (0..1000).chain(1500..2048) {
        assert!(after.contains(&slot), "{slot} was used after the mark");
    }
}

#[test]
fn what_comes_after_the_queue_was_empty_was_not_looked_at() {
    let slots = Slot::many(3000);
    let mut order = order_of(3000);
    (0..3000).for_each(|slot| order.push_young(slot, &slots));
    order.watch(order.end());
    while order.pop_old(&slots, &mut 1000).is_some() {}
    order.push_young(7, &slots);
    let unseen: Vec<u64> = order.positions(order.watched()..u64::MAX, &slots).map(|(at, _)| at).collect();
    assert_eq!(unseen.len(), 1);
}

/// Also where something that was passed over comes back first.
#[test]
fn what_comes_back_after_the_queue_was_empty_and_what_comes_then_was_not_looked_at() {
    let slots = Slot::many(3000);
    let (mut order, mut seen) = (order_of(3000), vec![false; 3000]);
    (0..3000).for_each(|slot| order.push_young(slot, &slots));
    order.watch(order.end());
    assert_eq!(popped_unseen(&mut order, &slots, &mut seen, 4000), []);
    order.push_old(7, &slots);
    order.push_young(8, &slots);
    order.push_old(6, &slots);
    let unseen = order.positions(order.watched()..u64::MAX, &slots).filter_map(|(_, slot)| slot);
    assert_eq!(unseen.collect::<Vec<_>>(), [6, 7, 8]);
    assert_eq!(popped_unseen(&mut order, &slots, &mut seen, 3), []);
}

/// Looks ahead before every 32 pops, as evicting does, and pops up to `count` slots. What of
/// them was not looked at before.
fn popped_unseen(order: &mut EvictionOrder, slots: &[Slot], seen: &mut [bool], count: usize) -> Vec<u32> {
    let mut unseen = Vec::new();
    for turn in 0..count {
        if turn % 32 == 0 {
            order.prefetch_next(32, slots, |slot| seen[slot as usize] = true);
        }
        let Some(slot) = order.pop_old(slots, &mut 100_000) else { break };
        unseen.extend((!std::mem::take(&mut seen[slot as usize])).then_some(slot));
    }
    unseen
}

#[test]
fn what_is_looked_at_ahead_is_what_comes_up_also_after_the_queue_was_empty() {
    let slots = Slot::many(3000);
    let (mut order, mut seen) = (order_of(3000), vec![false; 3000]);
    for _ in 0..3 {
        (0..3000).for_each(|slot| order.push_young(slot, &slots));
        assert_eq!(popped_unseen(&mut order, &slots, &mut seen, 4000), []);
    }
}

#[test]
fn what_was_looked_at_ahead_is_not_looked_at_again() {
    let slots = Slot::many(100);
    let mut order = order_of(100);
    (0..100).for_each(|slot| order.push_young(slot, &slots));
    let mut looked_at = Vec::new();
    for _ in 0..2 {
        order.prefetch_next(32, &slots, |slot| looked_at.push(slot));
    }
    (0..10).for_each(|slot| assert_eq!(order.pop_old(&slots, &mut 1), Some(slot)));
    order.prefetch_next(32, &slots, |slot| looked_at.push(slot));
    assert_eq!(looked_at, (0..42).collect::<Vec<_>>());
}

/// Cleaning moves what was not looked at to positions that were: it is looked at there.
#[test]
fn what_cleaning_moves_is_looked_at_ahead() {
    let slots = Slot::many(2048);
    let (mut order, mut seen) = (order_of(2048), vec![false; 2048]);
    (0..2048).for_each(|slot| order.push_young(slot, &slots));
    assert_eq!(popped_unseen(&mut order, &slots, &mut seen, 512), []);
    for round in 0..8 {
        for slot in 1100..2048 {
            order.push_young(slot, &slots);
        }
        assert!(round < 7 || order.first() < MIDDLE + 512, "it was cleaned");
    }
    let unseen = popped_unseen(&mut order, &slots, &mut seen, 2048);
    // Numbers have a gap where cleaning ended.
    assert!(unseen.len() <= 32, "{} were not looked at", unseen.len());
}

#[test]
fn budget_bounds_the_search() {
    let slots = Slot::many(4);
    let mut order = order_of(4);
    for _ in 0..5 {
        order.push_young(0, &slots);
    }
    let mut budget = 3;
    assert_eq!(order.pop_old(&slots, &mut budget), None);
    assert_eq!(budget, 0);
    assert!(!order.is_empty());
    assert_eq!(order.pop_old(&slots, &mut 1000), Some(0));
}

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
    let mut order = EvictionOrder::new(slots.len());
    let mut lists = [const { VecDeque::<u32>::new() }; 3];
    let mut random = 5_u64;
    for step in 0..60_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let slot = (random >> 33) as u32 % count;
        let list = &mut lists[tenant_of(slot)];
        match random >> 48 {
            choice if choice % 64 == 0 => {
                // The tenants come up unevenly; what is found is put at the old end again, or
                // is gone.
                let tenant = [0, 0, 0, 0, 1, 1, 2][slot as usize % 7];
                let theirs = |entry| tenant_of(entry) == tenant;
                let found = order.pop_old_of(tenant, &slots, &mut 1_000_000, theirs);
                assert_eq!(found, lists[tenant].pop_front(), "step {step}");
            }
            choice if choice % 64 < 3 => {
                list.retain(|&other| other != slot);
                slots[slot as usize].order_position.set(NONE);
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
    let mut order = EvictionOrder::new(3000);
    (0..3000).for_each(|slot| order.push_young(slot, &slots));
    let pop = |order: &mut EvictionOrder, slots: &[Slot], tenant: usize, budget: usize| {
        let mut left = budget;
        (order.pop_old_of(tenant, slots, &mut left, |entry| (entry >= 2000) == (tenant == 1)), budget - left)
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
    assert_eq!(pop(&mut order, &slots, 0, 9), (Some(0), 3), "behind two positions that are empty now");
}
