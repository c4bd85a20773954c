//! Speculative decoding: accepted tokens are registered, rejected ones never are, and their blocks
//! come back.

use crate::support::{books, soon};
use kvbm::{Tier, TokenSequence};
use std::collections::HashSet;

const PAGE: usize = 16;

/// A deterministic choice of how many draft tokens a step accepts.
fn accepted(step: u32, drafted: usize) -> usize {
    (step as usize * 7 + step as usize / 3) % (drafted + 1)
}

#[test]
fn rejected_tokens_never_get_registered() {
    let manager = books([64, 64, 0], |_| ());
    let free = manager.status().tiers[0].free;
    let prompt: Vec<u32> = (0..40).collect();
    let mut sequence = manager.sequence(&prompt, b"").unwrap();
    let mut truth = prompt;
    let mut held = Vec::new();
    let mut seen_only_in_drafts = HashSet::new();
    let mut registered = 0;
    for step in 0..40_u32 {
        // The draft model speculates over several blocks; the engine writes KV for all of it.
        let draft: Vec<u32> = (0..5 + step % 30).map(|n| 1_000_000 + step * 100 + n).collect();
        sequence.add_tokens(&draft);
        let touched = sequence.len().div_ceil(PAGE) - registered;
        let fresh = manager.allocate(touched).unwrap();
        seen_only_in_drafts.extend(sequence.hashes()[registered..].iter().copied());
        // The target model takes a part.
        let keep = accepted(step, draft.len());
        sequence.roll_back(draft.len() - keep).unwrap();
        truth.extend(&draft[..keep]);
        assert_eq!(sequence.tokens(), truth);
        for hash in &sequence.hashes()[registered..] {
            seen_only_in_drafts.remove(hash);
        }
        if sequence.num_blocks() == registered {
            // Nothing is complete: all that was drafted into goes back to Reset.
            let refused = manager.commit(fresh, &sequence, registered).unwrap_err();
            assert_eq!(refused.batch.len(), touched);
            continue;
        }
        let (done, rest) = manager.commit(fresh, &sequence, registered).unwrap();
        assert_eq!((done.len(), rest.len()), (sequence.num_blocks() - registered, touched - done.len()));
        // What was drafted into and is not complete goes back to Reset, and is computed again when
        // its tokens are accepted.
        drop(rest);
        registered = sequence.num_blocks();
        held.push(manager.register(done).unwrap());
    }
    assert!(manager.wait_offloads(soon()));
    assert!(registered > 8 && seen_only_in_drafts.len() > 8, "{registered}, {}", seen_only_in_drafts.len());
    let again: TokenSequence = manager.sequence(&truth, b"").unwrap();
    let tiers = manager.look_up(&again);
    assert_eq!(tiers.iter().filter(|tiers| tiers.contains(Tier::G1)).count(), registered);
    for hash in seen_only_in_drafts {
        let found =
            manager.look_up(kvbm::BlockChain::of_hashes(&[hash]).in_namespace(again.chain().namespace()));
        assert!(found.is_empty() || found[0].is_empty(), "{hash} was rejected");
    }
    assert_eq!(manager.status().tiers[0].free as usize, free as usize - registered);
    drop(held);
}
