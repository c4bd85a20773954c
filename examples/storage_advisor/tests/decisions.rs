//! What the advisor makes of events.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use advisor::{Advisor, Policy, Prefix, Proposal};
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
    let (live_bytes, removed_bytes) = (8 * BYTES, 12 * BYTES);
    let compact = Proposal::Compact { source: SourceId(1), at, live_bytes, removed_bytes, orphans: 0 };
    assert_eq!(advisor.proposals(now), [compact]);
    advisor.compacted(SourceId(1), at);
    assert_eq!(advisor.proposals(now), []);

    // The middle of both chains goes: what follows is of no use to a prefix.
    let torn = [3, 4].map(|chain| remove(block(chain, 1, Tier::G3)));
    advisor.apply(stream(1), &torn, now);
    let proposals = advisor.proposals(now);
    assert!(matches!(proposals[..], [Proposal::Compact { orphans: 2, .. }]), "{proposals:?}");
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
    advisor.replace(stream(1), &snapshot, now);
    assert_eq!((advisor.blocks(), advisor.bytes_on(Tier::G2), advisor.bytes_on(Tier::G1)), (1, BYTES, 0));
    advisor.apply(stream(2), &[KvEvent::new(1, EventKind::Cleared)], now);
    advisor.forget(SourceId(1));
    assert_eq!(advisor.blocks(), 0);
    advisor.apply(stream(1), &[remove(block(1, 0, Tier::G1))], now);
    assert_eq!(advisor.blocks(), 0, "what is not known cannot go");
}
