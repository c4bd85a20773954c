//! Chooses which blocks of a predecessor are taken over, in which order, and to which slots.

use super::source::OldRank;
use kvbm_disk::RecoveredSlot;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// A block that moves in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Incoming {
    pub(super) identity: BlockIdentity,
    /// Its slot there.
    pub(super) theirs: BlockId,
    /// Its slot here; they grow with age.
    pub(super) ours: BlockId,
    /// Where its parent stands, if that moves in too.
    pub(super) parent: Option<usize>,
    /// Every rank of ours has it, as far as it was their turn.
    pub(super) everywhere: bool,
}

/// Blocks that all ranks have in the same slot, the oldest first, and how many some rank has not.
pub(super) fn common(ranks: &[OldRank]) -> (Vec<(BlockId, BlockIdentity)>, u64) {
    let Some((first, others)) = ranks.split_first() else { return (Vec::new(), 0) };
    let by_slot = |rank: &OldRank| -> HashMap<BlockId, BlockIdentity> {
        rank.archive.blocks().into_iter().map(|found| (found.slot, found.identity)).collect()
    };
    let others: Vec<_> = others.iter().map(by_slot).collect();
    let everywhere =
        |found: &RecoveredSlot| others.iter().all(|rank| rank.get(&found.slot) == Some(&found.identity));
    let blocks = first.archive.blocks();
    let most = others.iter().map(HashMap::len).chain([blocks.len()]).max().unwrap_or(0);
    let common: Vec<_> =
        blocks.iter().filter(|found| everywhere(found)).map(|found| (found.slot, found.identity)).collect();
    let incomplete = (most - common.len()) as u64;
    (common, incomplete)
}

/// A block's name within what a disk holds.
pub(super) type Name = (NamespaceId, GroupId, SequenceHash);

pub(super) fn name(identity: &BlockIdentity, hash: SequenceHash) -> Name {
    (identity.namespace, identity.group, hash)
}

/// Of these blocks, the oldest first, at most `room`, as indices: the chains of the newest blocks
/// first, parents before children. And how many have no parent, neither here nor among those
/// `held`; blocks of groups that `alone` says so of need none.
pub(super) fn newest_chains(
    blocks: &[(BlockId, BlockIdentity)],
    held: &HashSet<Name>,
    room: usize,
    alone: impl Fn(GroupId) -> bool,
) -> (Vec<usize>, u64) {
    let places = places(blocks);
    let parent = |index: usize| parent_of(blocks, &places, index);
    let position = |index: usize| blocks[index].1.position;
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|&index| position(index));
    let mut rooted = vec![false; blocks.len()];
    for &index in &order {
        let identity = &blocks[index].1;
        rooted[index] = alone(identity.group)
            || identity.parent.is_none_or(|hash| held.contains(&name(identity, hash)))
            || parent(index).is_some_and(|parent| rooted[parent]);
    }
    // The newest block of those that continue a block.
    let mut newest: Vec<usize> = (0..blocks.len()).collect();
    for &index in order.iter().rev() {
        if let Some(parent) = parent(index) {
            newest[parent] = newest[parent].max(newest[index]);
        }
    }
    order.retain(|&index| rooted[index]);
    let orphans = (blocks.len() - order.len()) as u64;
    // What ends in the same newest block is one path.
    order.sort_by_key(|&index| (Reverse(newest[index]), position(index)));
    order.truncate(room);
    (order, orphans)
}

fn places(blocks: &[(BlockId, BlockIdentity)]) -> HashMap<Name, usize> {
    let names = blocks.iter().map(|(_, identity)| name(identity, identity.hash));
    names.enumerate().map(|(index, name)| (name, index)).collect()
}

/// Positions grow along a chain, so a walk up ends, whatever a journal says.
fn parent_of(
    blocks: &[(BlockId, BlockIdentity)],
    places: &HashMap<Name, usize>,
    index: usize,
) -> Option<usize> {
    let identity = &blocks[index].1;
    let place = *places.get(&name(identity, identity.parent?))?;
    (blocks[place].1.position < identity.position).then_some(place)
}

/// The blocks `chosen`, in this order; `free` slots are theirs in the order of age.
pub(super) fn incoming(
    blocks: &[(BlockId, BlockIdentity)],
    chosen: &[usize],
    free: impl Iterator<Item = BlockId>,
    alone: impl Fn(GroupId) -> bool,
) -> Vec<Incoming> {
    let mut by_age = chosen.to_vec();
    by_age.sort_unstable();
    let slots: HashMap<usize, BlockId> = by_age.into_iter().zip(free).collect();
    let stands: HashMap<usize, usize> =
        chosen.iter().enumerate().map(|(place, &index)| (index, place)).collect();
    let places = places(blocks);
    let incoming = chosen.iter().filter_map(|&index| {
        let (theirs, identity) = blocks[index];
        let parent = parent_of(blocks, &places, index).filter(|_| !alone(identity.group));
        let parent = parent.and_then(|parent| stands.get(&parent).copied());
        Some(Incoming { identity, theirs, ours: *slots.get(&index)?, parent, everywhere: true })
    });
    incoming.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block in the slot that is called as its hash.
    fn block(name: u8, parent: Option<u8>, position: u32) -> (BlockId, BlockIdentity) {
        let hash = |name: u8| SequenceHash::from_bytes([name; 16]);
        let (namespace, group) = (NamespaceId(0), GroupId(0));
        let identity =
            BlockIdentity { namespace, group, hash: hash(name), parent: parent.map(hash), position };
        (BlockId(name.into()), identity)
    }

    /// In the order in which they move in.
    fn chosen(blocks: &[(BlockId, BlockIdentity)], room: usize) -> (Vec<u32>, u64) {
        let (chosen, orphans) = newest_chains(blocks, &HashSet::new(), room, |_| false);
        (chosen.into_iter().map(|index| blocks[index].0.0).collect(), orphans)
    }

    #[test]
    fn the_newest_chains_come_first_from_their_beginnings() {
        let chain = [block(1, None, 0), block(2, Some(1), 1), block(3, Some(2), 2)];
        let blocks = [&chain[..], &[block(4, None, 0)]].concat();
        let all = [4, 1, 2, 3];
        for room in 0..6 {
            assert_eq!(chosen(&blocks, room), (all[..room.min(4)].to_vec(), 0), "room for {room}");
        }
        // A parent that was written after its child.
        assert_eq!(chosen(&[chain[1], chain[0]], 1), (vec![1], 0));
        assert_eq!(chosen(&[chain[1], chain[0]], 2), (vec![1, 2], 0));
        // A branch that was written last brings its trunk.
        let branch = [&blocks[..], &[block(5, Some(1), 1)]].concat();
        assert_eq!(chosen(&branch, 9), (vec![1, 5, 4, 2, 3], 0));
    }

    #[test]
    fn what_has_no_root_is_nobodys() {
        let lost = [block(1, None, 0), block(5, Some(9), 3), block(6, Some(5), 4)];
        assert_eq!(chosen(&lost, 9), (vec![1], 2));
        let circle = [block(7, Some(8), 1), block(8, Some(7), 2), block(9, Some(9), 0)];
        assert_eq!(chosen(&circle, 9), (vec![], 3));
        assert_eq!(chosen(&[], 9), (vec![], 0));
        // Their parent is here already.
        let (_, nine) = block(9, None, 0);
        let held = HashSet::from([name(&nine, nine.hash)]);
        assert_eq!(newest_chains(&lost, &held, 9, |_| false), (vec![1, 2, 0], 0));
        // In a group whose prefixes need their last blocks only.
        assert_eq!(newest_chains(&lost, &HashSet::new(), 9, |_| true), (vec![1, 2, 0], 0));
        let moved = incoming(&lost, &[1, 2], (0..9).map(BlockId), |_| true);
        assert!(moved.iter().all(|block| block.parent.is_none()));
    }

    const TRUNK: u32 = 100_000;

    /// A walk up from each of these blocks would take thousands of millions of steps.
    #[test]
    fn a_long_trunk_of_many_branches_without_room_is_settled_once() {
        let identity = |number: u32, parent: Option<u32>, position| {
            let hash = |number: u32| SequenceHash::from_bytes(u128::from(number).to_be_bytes());
            let (namespace, group) = (NamespaceId(0), GroupId(0));
            let (hash, parent) = (hash(number), parent.map(hash));
            (BlockId(number), BlockIdentity { namespace, group, hash, parent, position })
        };
        let trunk = (0..TRUNK).map(|at| identity(at, at.checked_sub(1), at));
        let branches = (TRUNK..2 * TRUNK).map(|at| identity(at, Some(TRUNK - 1), TRUNK));
        let blocks: Vec<_> = trunk.chain(branches).collect();
        let room = TRUNK as usize;
        assert_eq!(newest_chains(&blocks, &HashSet::new(), room, |_| false), ((0..room).collect(), 0));
    }

    #[test]
    fn incoming_blocks_get_free_slots_by_age() {
        let chain = [block(2, Some(1), 1), block(1, None, 0), block(3, None, 0)];
        let (order, _) = newest_chains(&chain, &HashSet::new(), 9, |_| false);
        let moved = incoming(&chain, &order, [5, 7, 8].into_iter().map(BlockId), |_| false);
        let seen: Vec<_> = moved.iter().map(|block| (block.theirs.0, block.ours.0, block.parent)).collect();
        assert_eq!(seen, [(3, 8, None), (1, 7, None), (2, 5, Some(1))]);
    }
}
