//! Which peers a look-up asks, where there are more than one question can go to.
//!
//! Half of the places are for peers whose blocks came lately: who serves one chain of a tenant
//! often has the next. The others are chosen by rendezvous hashing of the chain's first block: each
//! chain asks other peers, the same ones again for every request of it, and a peer that comes or
//! goes changes one of them at most.

use kvbm_plan::{NodeId, SequenceHash};
use std::cmp::Reverse;
use std::time::Instant;

/// Most peers that one look-up asks.
const MAX_ASKED: usize = 32;
/// Of those, how many because blocks of theirs came lately, at most.
const MAX_LATE: usize = MAX_ASKED / 2;

/// Up to 32 of `peers` for the chain that begins with `first`. `last_hit` is when blocks of a peer
/// last came, verified.
pub(super) fn choose(
    mut peers: Vec<NodeId>,
    first: &SequenceHash,
    last_hit: impl Fn(NodeId) -> Option<Instant>,
) -> Vec<NodeId> {
    if peers.len() <= MAX_ASKED {
        return peers;
    }
    let mut late: Vec<_> = peers.iter().filter_map(|peer| Some((last_hit(*peer)?, *peer))).collect();
    late.sort_unstable_by_key(|hit| Reverse(*hit));
    late.truncate(MAX_LATE);
    let chain = seed(first);
    // Peers with a late hit stand before all others.
    peers.sort_by_cached_key(|peer| {
        let is_late = late.iter().any(|(_, known)| known == peer);
        (!is_late, Reverse(weight(chain, *peer)))
    });
    peers.truncate(MAX_ASKED);
    peers
}

fn seed(first: &SequenceHash) -> u64 {
    let (low, _) = first.as_bytes().split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
    u64::from_le_bytes(*low)
}

/// How much a chain is for a peer: a mixture of both (splitmix64).
fn weight(chain: u64, peer: NodeId) -> u64 {
    let mut mixed = chain ^ u64::from(peer.0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};
    use std::time::Duration;

    fn chain(of: u64) -> SequenceHash {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&of.wrapping_mul(0xD6E8_FEB8_6659_FD93).to_le_bytes());
        SequenceHash::from_bytes(bytes)
    }

    fn peers(count: u32) -> Vec<NodeId> {
        (1..=count).map(NodeId).collect()
    }

    fn asked(count: u32, of: u64) -> BTreeSet<NodeId> {
        choose(peers(count), &chain(of), |_| None).into_iter().collect()
    }

    #[test]
    fn few_peers_are_all_asked() {
        assert_eq!(choose(peers(32), &chain(1), |_| None), peers(32));
    }

    /// Mutation that makes it fail: the first 32 by number are asked.
    #[test]
    fn of_forty_peers_each_is_asked_for_its_share_of_the_chains() {
        let mut times: BTreeMap<NodeId, u32> = BTreeMap::new();
        for of in 0..1000 {
            let asked = asked(40, of);
            assert_eq!(asked.len(), MAX_ASKED);
            for peer in asked {
                *times.entry(peer).or_default() += 1;
            }
        }
        assert_eq!(times.len(), 40);
        assert!(times.values().all(|times| (740..=860).contains(times)), "{times:?}");
    }

    #[test]
    fn a_peer_that_goes_changes_one_at_most() {
        for of in 0..50 {
            let (before, gone) = (asked(40, of), NodeId(of as u32 % 40 + 1));
            let mut left = peers(40);
            left.retain(|peer| *peer != gone);
            let after: BTreeSet<_> = choose(left, &chain(of), |_| None).into_iter().collect();
            assert!(after.difference(&before).count() <= 1);
        }
    }

    #[test]
    fn peers_that_had_blocks_lately_are_asked_first_and_leave_room() {
        let start = Instant::now();
        let hit = |peer: NodeId| (peer.0 > 100).then(|| start + Duration::from_secs(peer.0.into()));
        for of in 0..50 {
            let asked = choose(peers(200), &chain(of), hit);
            let late: BTreeSet<_> = asked[..MAX_LATE].iter().copied().collect();
            assert_eq!(late, (185..=200).map(NodeId).collect(), "the latest of them");
        }
        let others = |of| -> BTreeSet<_> {
            choose(peers(200), &chain(of), hit).split_off(MAX_LATE).into_iter().collect()
        };
        assert_ne!(others(1), others(2), "the others differ from chain to chain");
        assert_eq!(others(1), others(1));
    }
}
