//! What the advisor makes of events.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use advisor::{Advisor, Policy, Prefix, Proposal, best_of_each};
use kvbm_events::{EventBlock, EventKind, KvEvent, Snapshot, SourceId, StreamId};
use kvbm_plan::{BlockIdentity, Epoch, GroupId, Location, NamespaceId, NodeId, SequenceHash, Tier};
use std::time::{Duration, Instant};

const BYTES: u64 = 1 << 20;

fn stream(source: u64) -> StreamId {
    StreamId { source: SourceId(source), epoch: Epoch(1), shard: 0 }
}

fn hash(chain: u8, position: u32) -> SequenceHash {
    let mut bytes = [chain; 16];
    bytes[..4].copy_from_slice(&position.to_le_bytes());
    SequenceHash::from_bytes(bytes)
}

fn block(chain: u8, position: u32, tier: Tier) -> EventBlock {
    EventBlock {
        identity: BlockIdentity {
            namespace: NamespaceId(1),
            group: GroupId(0),
            hash: hash(chain, position),
            parent: position.checked_sub(1).map(|parent| hash(chain, parent)),
            position,
        },
        prefix_hash: hash(chain, 0),
        local_hash: None,
        block_bytes: BYTES,
        block_tokens: 16,
        location: Location::on(NodeId(0), tier),
    }
}

fn prefix(chain: u8) -> Prefix {
    Prefix { namespace: NamespaceId(1), group: GroupId(0), hash: hash(chain, 0) }
}

fn store(block: EventBlock) -> KvEvent {
    KvEvent::new(0, EventKind::Store(block))
}

fn remove(block: EventBlock) -> KvEvent {
    KvEvent::new(0, EventKind::Remove(block))
}

/// Four blocks of a chain, computed in G1 and written down to G3.
fn written(advisor: &mut Advisor, chain: u8, now: Instant) {
    for tier in [Tier::G1, Tier::G2, Tier::G3] {
        let events: Vec<_> = (0..4).map(|position| store(block(chain, position, tier))).collect();
        advisor.apply(stream(1), &events, now);
    }
}

/// The chain leaves G1 and is brought there again.
fn used(advisor: &mut Advisor, chain: u8, now: Instant) {
    let out: Vec<_> = (0..4).rev().map(|position| remove(block(chain, position, Tier::G1))).collect();
    let back: Vec<_> = (0..4).map(|position| store(block(chain, position, Tier::G1))).collect();
    advisor.apply(stream(1), &out, now);
    advisor.apply(stream(1), &back, now);
}

#[test]
fn what_is_brought_up_again_is_hot_and_what_is_not_grows_cold() {
    let policy = Policy { half_life: Duration::from_secs(10), ..Policy::default() };
    let (mut advisor, start) = (Advisor::new(policy), Instant::now());
    written(&mut advisor, 1, start);
    written(&mut advisor, 2, start);
    assert_eq!(advisor.proposals(start), [], "new is neither hot nor cold");
    let later = start + Duration::from_secs(60);
    used(&mut advisor, 1, later);
    let proposals = advisor.proposals(later);
    assert!(
        matches!(proposals[0], Proposal::Promote { prefix: p, from, blocks: 4, bytes, .. }
            if p == prefix(1) && from.tier == Tier::G3 && bytes == 4 * BYTES),
        "{proposals:?}"
    );
    assert!(
        matches!(proposals[1], Proposal::Demote { prefix: p, blocks: 4, heat, .. } if p == prefix(2) && heat < 0.25),
        "{proposals:?}"
    );
    assert_eq!(proposals.len(), 2);
    let many = [&proposals[..1], &proposals[..1], &proposals[1..]].concat();
    assert_eq!(best_of_each(&many, 1), [&proposals[0], &proposals[1]], "one kind does not hide another");
    assert!(proposals[0].to_string().starts_with("promote prefix "), "{}", proposals[0]);
    // Left alone, the hot one grows cold as well.
    let proposals = advisor.proposals(later + Duration::from_secs(100));
    assert!(proposals.iter().all(|proposal| matches!(proposal, Proposal::Demote { .. })), "{proposals:?}");
    assert_eq!(proposals.len(), 2);
}

#[test]
fn holes_and_torn_chains_are_worth_a_rewrite() {
    let policy = Policy { dead_bytes: 8 * BYTES, cold: 0.0, ..Policy::default() };
    let (mut advisor, now) = (Advisor::new(policy), Instant::now());
    (0..5).for_each(|chain| written(&mut advisor, chain, now));
    let gone = |chain: u8| (0..4).rev().map(move |position| remove(block(chain, position, Tier::G3)));
    advisor.apply(stream(1), &gone(0).chain(gone(1)).collect::<Vec<_>>(), now);
    assert_eq!(advisor.proposals(now), [], "eight of twenty blocks are not half");
    advisor.apply(stream(1), &gone(2).collect::<Vec<_>>(), now);
    let at = Location::on(NodeId(0), Tier::G3);
    let (live_bytes, hole_bytes) = (8 * BYTES, 12 * BYTES);
    let compact = Proposal::Compact { source: SourceId(1), at, live_bytes, hole_bytes, orphans: 0 };
    assert_eq!(advisor.proposals(now), [compact]);
    advisor.compacted(SourceId(1), at);
    assert_eq!(advisor.proposals(now), []);

    // The middle of both chains goes: what follows is of no use to a prefix.
    let torn = [3, 4].map(|chain| remove(block(chain, 1, Tier::G3)));
    advisor.apply(stream(1), &torn, now);
    let proposals = advisor.proposals(now);
    assert!(matches!(proposals[..], [Proposal::Compact { orphans: 2, .. }]), "{proposals:?}");
}

/// A disk that is full: whatever comes takes the place of what goes.
/// Mutation that makes it fail: removed bytes that are summed up.
#[test]
fn a_place_whose_holes_are_filled_again_is_not_worth_a_rewrite() {
    let policy = Policy { dead_bytes: 4 * BYTES, cold: 0.0, hot: f64::MAX, ..Policy::default() };
    let (mut advisor, now) = (Advisor::new(policy), Instant::now());
    let all = |chain: u8, kind: fn(EventBlock) -> KvEvent| {
        (0..4).map(|position| kind(block(chain, position, Tier::G3))).collect::<Vec<_>>()
    };
    (0..5).for_each(|chain| advisor.apply(stream(1), &all(chain, store), now));
    for chain in 5..100 {
        advisor.apply(stream(1), &all(chain - 5, remove), now);
        assert_eq!(advisor.proposals(now), [], "chain {chain}");
        advisor.apply(stream(1), &all(chain, store), now);
    }
    assert_eq!(advisor.bytes_on(Tier::G3), 20 * BYTES);
    // Now nothing comes any more.
    (95..98).for_each(|chain| advisor.apply(stream(1), &all(chain, remove), now));
    let proposals = advisor.proposals(now);
    let (live, holes) = (8 * BYTES, 12 * BYTES);
    assert!(
        matches!(proposals[..], [Proposal::Compact { live_bytes, hole_bytes, .. }]
            if (live_bytes, hole_bytes) == (live, holes)),
        "{proposals:?}"
    );
}

#[test]
fn chains_are_looked_at_once_for_all_places_and_no_more_than_the_policy_allows() {
    let policy = Policy { dead_bytes: u64::MAX, cold: 0.0, hot: f64::MAX, ..Policy::default() };
    let (mut advisor, now) = (Advisor::new(policy), Instant::now());
    let mut bounded = Advisor::new(Policy { max_compared: 0, ..policy });
    let torn = |source: u64| (0..4).filter(move |position| source.is_multiple_of(2) || *position != 1);
    for source in 0..100 {
        let blocks: Vec<_> = torn(source).map(|position| store(block(1, position, Tier::G3))).collect();
        advisor.apply(stream(source), &blocks, now);
        bounded.apply(stream(source), &blocks, now);
    }
    let proposals = advisor.proposals(now);
    assert_eq!(proposals.len(), 50, "those of which the middle is gone");
    assert!(proposals.iter().all(|proposal| matches!(proposal, Proposal::Compact { source, orphans: 1, .. }
        if source.0 % 2 == 1)));
    assert_eq!(bounded.proposals(now), [], "nothing was looked at");
}

#[test]
fn the_index_follows_every_source_and_is_bounded() {
    let (mut advisor, now) = (Advisor::new(Policy { max_blocks: 6, ..Policy::default() }), Instant::now());
    written(&mut advisor, 1, now);
    advisor.apply(stream(2), &[store(block(1, 0, Tier::G3))], now);
    assert_eq!((advisor.blocks(), advisor.bytes_on(Tier::G3)), (4, 5 * BYTES));
    written(&mut advisor, 2, now);
    assert_eq!((advisor.blocks(), advisor.refused()), (6, 6), "two blocks of four, on three tiers");
    let snapshot = Snapshot { next_sequence: 9, blocks: vec![block(1, 0, Tier::G2)] };
    advisor.replace(stream(1), &snapshot, &[], now);
    assert_eq!((advisor.blocks(), advisor.bytes_on(Tier::G2), advisor.bytes_on(Tier::G1)), (1, BYTES, 0));
    advisor.apply(stream(2), &[KvEvent::new(1, EventKind::Cleared)], now);
    advisor.forget(SourceId(1));
    assert_eq!(advisor.blocks(), 0);
    advisor.apply(stream(1), &[remove(block(1, 0, Tier::G1))], now);
    assert_eq!(advisor.blocks(), 0, "what is not known cannot go");
}

/// A manager tells of its pool and of its volumes in streams of their own, with a snapshot each.
/// Mutations that make it fail: `replace`, or `Cleared`, that forgets the whole source.
#[test]
fn what_happens_to_one_stream_of_a_source_leaves_the_others_alone() {
    let (mut advisor, now) = (Advisor::new(Policy::default()), Instant::now());
    let volumes = StreamId { shard: 1, ..stream(1) };
    written(&mut advisor, 1, now);
    let on_volumes: Vec<_> = (0..4).map(|position| store(block(1, position, Tier::G4))).collect();
    advisor.apply(volumes, &on_volumes, now);
    let held = |advisor: &Advisor| [Tier::G1, Tier::G3, Tier::G4].map(|tier| advisor.bytes_on(tier) / BYTES);
    assert_eq!(held(&advisor), [4, 4, 4]);

    let of_pool = Snapshot { next_sequence: 12, blocks: vec![block(1, 0, Tier::G3)] };
    advisor.replace(stream(1), &of_pool, &[], now);
    assert_eq!((held(&advisor), advisor.blocks()), ([0, 1, 4], 4), "the volumes' blocks stay");
    let of_volumes =
        Snapshot { next_sequence: 9, blocks: vec![block(1, 0, Tier::G4), block(1, 1, Tier::G4)] };
    let cleared = KvEvent::new(9, EventKind::Cleared);
    advisor.replace(volumes, &of_volumes, &[], now);
    assert_eq!((held(&advisor), advisor.blocks()), ([0, 1, 2], 2), "the pool's block stays");
    advisor.replace(volumes, &of_volumes, std::slice::from_ref(&cleared), now);
    assert_eq!((held(&advisor), advisor.blocks()), ([0, 1, 0], 1), "cleared since the snapshot");
    advisor.apply(volumes, &on_volumes, now);
    advisor.apply(stream(1), &[cleared], now);
    assert_eq!((held(&advisor), advisor.blocks()), ([0, 0, 4], 4), "only the pool is empty");
    advisor.forget(SourceId(1));
    assert_eq!((held(&advisor), advisor.blocks()), ([0, 0, 0], 0), "a source that is gone takes all with it");
}

/// What a block is called does not depend on the prefix that is told along with it.
/// Mutation that makes it fail: blocks that are looked up below the prefix of the event.
#[test]
fn a_block_is_found_by_its_own_name_whatever_prefix_is_given() {
    let (mut advisor, now) = (Advisor::new(Policy::default()), Instant::now());
    let torn = |position| EventBlock { prefix_hash: hash(1, position), ..block(1, position, Tier::G3) };
    written(&mut advisor, 1, now);
    advisor.apply(stream(2), &[store(torn(2))], now);
    assert_eq!(
        (advisor.blocks(), advisor.bytes_on(Tier::G3)),
        (4, 5 * BYTES),
        "the same block at another source"
    );
    let gone: Vec<_> = (0..4).rev().map(|position| remove(torn(position))).collect();
    advisor.apply(stream(1), &gone, now);
    assert_eq!((advisor.blocks(), advisor.bytes_on(Tier::G3)), (4, BYTES), "G1 and G2 are left");
    for tier in [Tier::G1, Tier::G2] {
        let gone: Vec<_> = (0..4).map(|position| remove(block(1, position, tier))).collect();
        advisor.apply(stream(1), &gone, now);
    }
    assert_eq!(advisor.blocks(), 1, "what the other source holds");
    advisor.apply(stream(2), &[remove(block(1, 2, Tier::G3))], now);
    assert_eq!((advisor.blocks(), advisor.bytes_on(Tier::G3)), (0, 0));
    // Nothing of it is left over: it may come again below another prefix.
    advisor.apply(stream(2), &[store(torn(2)), remove(torn(2))], now);
    assert_eq!(advisor.blocks(), 0);
}
