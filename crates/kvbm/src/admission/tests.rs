use super::*;
use kvbm_plan::{GroupId, NamespaceId, SequenceHash, Tier};
use std::collections::HashSet;

const MS: Duration = Duration::from_millis(1);

struct Rng(u64);

impl Rng {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn hash(n: u64) -> SequenceHash {
    SequenceHash::from_bytes(u128::from(n + 1).to_le_bytes())
}

fn block(n: u64, parent: Option<u64>, position: u32, expected_reuse: Option<f32>) -> Candidate {
    let identity = BlockIdentity {
        group: GroupId(0),
        namespace: NamespaceId::default(),
        hash: hash(n),
        parent: parent.map(hash),
        position,
    };
    Candidate { identity, expected_reuse }
}

fn offer(blocks: &[Candidate], costs: Costs) -> Offer<'_> {
    Offer { path: Path::new(Tier::G2, Tier::G3), trigger: Trigger::Eviction, blocks, costs }
}

/// A forest, parents before children, some of them beneath blocks that are not in the offer.
fn forest(rng: &mut Rng, count: u64) -> Vec<Candidate> {
    let mut blocks: Vec<Candidate> = Vec::new();
    for n in 0..count {
        let expected = (rng.below(4) > 0).then(|| rng.below(6) as f32 / 2.0);
        let above = (n > 0 && rng.below(3) > 0).then(|| rng.below(n));
        let position = above.map_or(0, |above| blocks[above as usize].identity.position + 1);
        let parent = above.or((rng.below(5) == 0).then_some(1000 + n));
        blocks.push(block(n, parent, position, expected));
    }
    blocks
}

/// What the documentation of [`CostAdmission`] says, word for word, without cleverness.
fn oracle(offer: &Offer<'_>) -> HashSet<SequenceHash> {
    let costs = offer.costs;
    if costs.recompute.is_some() && costs.read_back.is_some() && costs.read_back >= costs.recompute {
        return HashSet::new();
    }
    let budget = costs.write_budget.unwrap_or(usize::MAX);
    if budget >= offer.blocks.len() {
        return offer.blocks.iter().map(|block| block.identity.hash).collect();
    }
    let mut admitted: HashSet<SequenceHash> = HashSet::new();
    let mut left: Vec<&Candidate> = offer.blocks.iter().collect();
    while !left.is_empty() {
        let most = left.iter().map(|block| block.expected_reuse.unwrap_or(0.0)).fold(0.0_f32, f32::max);
        let at = left.iter().position(|block| block.expected_reuse.unwrap_or(0.0) >= most).expect("one is");
        let mut line = HashSet::new();
        let mut next = Some(left.remove(at).identity);
        while let Some(identity) = next {
            if !admitted.contains(&identity.hash) {
                line.insert(identity.hash);
            }
            let parent = offer.blocks.iter().find(|block| Some(block.identity.hash) == identity.parent);
            next = parent.map(|parent| parent.identity);
        }
        if admitted.len() + line.len() <= budget {
            admitted.extend(line);
        }
    }
    admitted
}

#[test]
fn the_default_agrees_with_its_description() {
    let mut rng = Rng(11);
    let mut partly = 0;
    for round in 0..2000 {
        let count = 1 + rng.below(24);
        let blocks = forest(&mut rng, count);
        let time = |rng: &mut Rng| (rng.below(3) > 0).then(|| MS * (1 + rng.below(4) as u32));
        let costs = Costs {
            recompute: time(&mut rng),
            read_back: time(&mut rng),
            write_budget: (rng.below(4) > 0).then(|| rng.below(count + 3) as usize),
            ..Costs::default()
        };
        let offer = offer(&blocks, costs);
        let verdicts = judge(&CostAdmission, &offer);
        let admitted: HashSet<_> = blocks
            .iter()
            .zip(&verdicts)
            .filter(|(_, verdict)| **verdict == Verdict::Admit)
            .map(|(block, _)| block.identity.hash)
            .collect();
        assert_eq!(admitted, oracle(&offer), "round {round}: {offer:?}");
        partly += usize::from((1..blocks.len()).contains(&admitted.len()));
    }
    assert!(partly > 300, "budgets were felt: {partly}");
}

#[test]
fn a_disk_slower_than_computing_gets_nothing_and_an_unknown_one_everything() {
    let blocks = [block(0, None, 0, None), block(1, Some(0), 1, Some(0.0))];
    let table = [
        (Some(4 * MS), Some(5 * MS), Verdict::Refuse),
        (Some(5 * MS), Some(5 * MS), Verdict::Refuse),
        (Some(5 * MS), Some(4 * MS), Verdict::Admit),
        (None, Some(5 * MS), Verdict::Admit),
        (Some(MS), None, Verdict::Admit),
    ];
    for (recompute, read_back, expected) in table {
        let costs = Costs { recompute, read_back, ..Costs::default() };
        assert_eq!(judge(&CostAdmission, &offer(&blocks, costs)), [expected; 2], "{costs:?}");
    }
}

#[test]
fn no_policy_tears_a_chain_or_exceeds_the_budget() {
    /// Refuses what it is told to, and knows nothing of budgets and chains.
    struct Picky(HashSet<SequenceHash>);
    impl AdmissionPolicy for Picky {
        fn judge(&self, offer: &Offer<'_>, verdicts: &mut [Verdict]) {
            for (block, verdict) in offer.blocks.iter().zip(verdicts) {
                if self.0.contains(&block.identity.hash) {
                    *verdict = Verdict::Refuse;
                }
            }
        }
    }
    let mut rng = Rng(5);
    for _ in 0..500 {
        let count = 1 + rng.below(20);
        let blocks = forest(&mut rng, count);
        let refused = (0..count).filter(|_| rng.below(5) == 0).map(hash).collect();
        let budget = (rng.below(2) == 0).then(|| rng.below(count + 1) as usize);
        let costs = Costs { write_budget: budget, ..Costs::default() };
        let verdicts = judge(&Picky(refused), &offer(&blocks, costs));
        let admitted = verdicts.iter().filter(|verdict| **verdict == Verdict::Admit).count();
        assert!(admitted <= budget.unwrap_or(usize::MAX));
        for (block, verdict) in blocks.iter().zip(&verdicts) {
            let parent = blocks.iter().position(|other| Some(other.identity.hash) == block.identity.parent);
            if let Some(parent) = parent.filter(|_| *verdict == Verdict::Admit) {
                assert_eq!(verdicts[parent], Verdict::Admit, "{block:?} goes without its parent");
            }
        }
    }
    let all = judge(&AdmitAll, &offer(&forest(&mut rng, 9), Costs::default()));
    assert_eq!(all, [Verdict::Admit; 9]);
}
