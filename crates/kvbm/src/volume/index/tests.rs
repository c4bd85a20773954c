use super::*;
use proptest::prelude::*;
use std::collections::HashSet;
use std::time::Duration;

const GROUP: GroupId = GroupId(0);

/// Block `number` of a tree: its parent is half of it.
fn block(number: u32) -> BlockIdentity {
    let hash = |number: u32| {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        SequenceHash::from_bytes(bytes)
    };
    let position = number.ilog2();
    let parent = (position > 0).then(|| hash(number / 2));
    BlockIdentity { namespace: NamespaceId(number % 3), group: GROUP, hash: hash(number), parent, position }
}

fn index(capacity: usize, most_changes: usize) -> (Index, Arc<Mutex<Log>>) {
    let log = Arc::new(Mutex::new(Log::new(most_changes)));
    (Index::new(VolumeId(4), capacity, Arc::clone(&log), Arc::new([true, false])), log)
}

/// Of a window or state each block is of use by itself: it needs no parent, and goes by its own
/// use.
#[test]
fn blocks_of_a_window_have_no_families() {
    let (mut index, _) = index(3, 100);
    let window = |number| BlockIdentity { group: GroupId(1), ..block(number) };
    for number in [4, 2, 8] {
        assert_eq!(index.begin(&window(number)), Admission::New);
        assert!(index.complete(&window(number)));
    }
    index.touch(GroupId(1), &[window(4).hash]);
    assert_eq!(index.evict(1), [window(2)], "the least recently used one, although 4 continues it");
    assert_eq!(index.begin(&block(8)), Admission::Orphan, "another group has its own");
    assert!(index.has_beside(&block(8)) && index.has_beside(&window(16)) && !index.has_beside(&window(2)));
    assert_eq!(index.evict(3), [window(8), window(4)]);
    assert!(index.entries.is_empty() && index.leaves.is_empty());
}

#[test]
fn a_chain_is_written_parents_first_and_evicted_children_first() {
    let (mut index, _) = index(2, 100);
    assert_eq!(index.begin(&block(2)), Admission::Orphan);
    for number in [1, 2, 4] {
        assert_eq!(index.begin(&block(number)), Admission::New);
        assert_eq!(index.begin(&block(number)), Admission::Known);
    }
    assert_eq!(index.prefix(GROUP, &[block(1).hash]), 0, "not there yet");
    for number in [1, 2, 4] {
        assert!(index.complete(&block(number)));
    }
    let chain = [1, 2, 4].map(|number| block(number).hash);
    assert_eq!(index.prefix(GROUP, &chain), 3);
    index.touch(GROUP, &chain);
    assert_eq!(index.evict(0), [block(4)], "one too many");
    assert_eq!(index.evict(1), [block(2)], "room for one");
    assert!(index.evict(1).is_empty() && index.yield_room(0).is_empty());
    assert_eq!(index.yield_room(3), [block(1)]);
    assert!(index.entries.is_empty() && index.leaves.is_empty());
}

#[test]
fn what_was_removed_meanwhile_does_not_come_back() {
    let (mut index, _) = index(10, 100);
    let (now, number) = (Instant::now(), block(1).namespace);
    let later = now + Duration::from_secs(1);
    assert_eq!(index.begin(&block(1)), Admission::New);
    assert_eq!(index.purge(Some(number)), 0, "it was not there");
    assert_eq!(index.landing(Some(number), now), Landing::UnderWay, "its removal is not over");
    index.learn(&block(1), true, index.now());
    assert_eq!((index.len(), index.begin(&block(1))), (0, Admission::Leaving));
    assert!(!index.complete(&block(1)) && index.entries.is_empty());
    assert_eq!(index.landing(Some(number), now), Landing::Over);
    index.purged(Some(number));
    assert_eq!(index.begin(&block(1)), Admission::New);
    index.fail(&block(1), Some(later));
    assert_eq!((index.purge(None), index.landing(None, now)), (0, Landing::Doubtful));
    assert_eq!(index.landing(None, later), Landing::Over);
    assert!(index.entries.is_empty());
}

/// Mutations that make it fail: `learn`, `staying` or `remove` do not ask what happened since
/// the look began.
#[test]
fn what_was_seen_before_it_came_or_went_counts_for_nothing() {
    let (mut index, _) = index(10, 100);
    let key = (GROUP, block(1).hash);
    let early = index.now();
    index.learn(&block(1), true, early);
    // Read, let go and removed, and only then is it reported that it was read.
    assert_eq!(index.yield_room(1), [block(1)]);
    index.begin_removal(&[block(1)]);
    index.end_removal(&[key]);
    index.learn(&block(1), true, early);
    assert_eq!((index.len(), index.staying(&[block(2), block(1)], early)), (0, 1));
    index.learn(&block(1), true, index.now());
    assert_eq!((index.len(), index.staying(&[block(2), block(1)], early)), (1, 2), "looked at again");
    // A whole namespace went.
    let early = index.now();
    assert_eq!(index.purge(None), 1);
    index.purged(None);
    index.learn(&block(1), true, early);
    assert_eq!((index.len(), index.staying(&[block(1)], early)), (0, 0));
    // Not found, written, and only then is it reported that it was not found.
    let early = index.now();
    index.begin(&block(1));
    assert!(index.complete(&block(1)) && !index.remove(GROUP, block(1).hash, early));
    assert!(index.contains(GROUP, block(1).hash) && index.remove(GROUP, block(1).hash, index.now()));
}

#[test]
fn what_is_on_its_way_out_neither_comes_nor_is_learned_of() {
    let (mut index, _) = index(10, 100);
    let key = (GROUP, block(1).hash);
    let now = index.now();
    index.learn(&block(1), true, now);
    assert!(index.remove(GROUP, block(1).hash, now) && !index.remove(GROUP, block(1).hash, now), "once");
    index.begin_removal(&[block(1)]);
    index.begin_removal(&[block(1)]);
    index.end_removal(&[key]);
    assert_eq!(index.begin(&block(1)), Admission::Leaving, "another order is under way");
    index.learn(&block(1), true, index.now());
    assert_eq!(index.len(), 0);
    index.end_removal(&[key]);
    assert_eq!(index.begin(&block(1)), Admission::New);
    assert!(!index.remove(GROUP, block(1).hash, index.now()), "another object than the one that was read");
    assert_eq!((index.purge(None), index.begin(&block(1))), (0, Admission::Leaving));
    assert_eq!(index.purge(Some(block(2).namespace)), 0);
    index.purged(None);
    assert_eq!(index.begin(&block(2)), Admission::Leaving);
    assert_eq!(index.staying(&[block(3), block(2)], index.now()), 1);
    assert_eq!(index.begin(&block(1)), Admission::New);
}

#[test]
fn nothing_comes_to_a_volume_that_was_unregistered() {
    let (mut index, log) = index(10, 100);
    for number in [1, 2] {
        index.begin(&block(number));
    }
    assert!(index.complete(&block(1)));
    assert_eq!(index.retire(), 1);
    assert!(!index.complete(&block(2)), "it arrived too late");
    index.learn(&block(1), true, index.now());
    assert_eq!(index.begin(&block(1)), Admission::Orphan);
    let mut published = Vec::new();
    log.lock().drain(9, |_, change| published.push((change.volume, change.stored, change.identity)));
    assert_eq!(published, [(VolumeId(4), true, block(1)), (VolumeId(4), false, block(1))]);
    assert!(index.entries.is_empty());
}

#[test]
fn assumptions_are_reported_when_they_proved_true() {
    let (mut index, log) = index(10, 2);
    let published = || {
        let mut published = Vec::new();
        let mut log = log.lock();
        let next = log.drain(9, |number, change| published.push((number, change.stored, change.identity)));
        (published, next)
    };
    let now = index.now();
    index.learn(&block(1), false, now);
    assert!(index.contains(GROUP, block(1).hash));
    assert_eq!(published(), (Vec::new(), 0));
    index.learn(&block(1), true, now);
    index.learn(&block(1), true, now);
    assert_eq!(published(), (vec![(0, true, block(1))], 1));
    index.learn(&block(2), false, now);
    assert!(index.remove(GROUP, block(2).hash, now), "an assumption that proved false");
    assert_eq!(published(), (Vec::new(), 1));
    for number in [3, 6, 7] {
        index.learn(&block(number), true, now);
    }
    assert_eq!(published(), (vec![(2, true, block(6)), (3, true, block(7))], 4), "a gap of one");
}

proptest! {
    /// Whatever happens: the count is right, leaves are what nothing continues, and the changes
    /// published lead to what is there.
    #[test]
    fn the_books_are_right(steps in prop::collection::vec((0..6_u8, 1..16_u32), 0..200)) {
        let (mut index, log) = index(8, 10_000);
        for (step, number) in steps {
            let identity = block(number);
            match step {
                0 => drop(index.begin(&identity)),
                1 => drop(index.complete(&identity)),
                2 => index.fail(&identity, Some(Instant::now())),
                3 => index.learn(&identity, number.is_multiple_of(2), index.now()),
                4 => drop(index.remove(GROUP, identity.hash, index.now())),
                _ => drop(index.evict(0)),
            }
            let there = index.entries.values().filter(|entry| entry.state.is_there());
            prop_assert_eq!(there.clone().count(), index.len());
            let leaves: HashSet<Key> =
                there.filter(|entry| entry.children == 0).map(|entry| (GROUP, entry.identity.hash)).collect();
            prop_assert_eq!(&leaves, &index.leaves.values().copied().collect());
            for entry in index.entries.values() {
                let of = |other: &&Entry| other.identity.parent == Some(entry.identity.hash);
                prop_assert!(entry.children as usize <= index.entries.values().filter(of).count());
                prop_assert!(entry.children > 0 || entry.state != CopyState::Gone);
            }
        }
        let present: HashSet<SequenceHash> = index
            .entries
            .values()
            .filter(|entry| entry.state == CopyState::Present)
            .map(|entry| entry.identity.hash)
            .collect();
        let mut published = HashSet::new();
        log.lock().drain(usize::MAX, |_, change| {
            if change.stored { published.insert(change.identity.hash) } else { published.remove(&change.identity.hash) };
        });
        prop_assert_eq!(published, present);
    }
}
