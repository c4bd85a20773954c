//! Random plans against a naive copy: what is reported as done is there, byte for byte, and what is not was asked of
//! a slot that did not hold it.

mod support;

use kvbm_device::{EmulatedConfig, RandomDelays};
use kvbm_plan::{BlockOutcome, Path, PlanId, Priority, Tier};
use kvbm_transfer::{PathConfig, PathConfigs, VerifyHost};
use proptest::prelude::*;
use std::collections::HashSet;
use std::time::Duration;
use support::{Rig, Shape, pattern, soon};

const SLOTS: u32 = 6;

/// What each slot of G1, G2, G3 holds, by block name.
#[derive(Clone, Debug, Default)]
struct Model {
    slots: [[Option<u8>; SLOTS as usize]; 3],
}

#[derive(Clone, Debug)]
struct Move {
    path: usize,
    /// (source slot, destination slot, ask for the block that is there rather than for another)
    blocks: Vec<(u32, u32, bool)>,
    priority: u8,
}

fn moves() -> impl Strategy<Value = Move> {
    let blocks = proptest::collection::vec((0..SLOTS, 0..SLOTS, proptest::bool::weighted(0.9)), 1..5);
    (0..5_usize, blocks, 0..3_u8).prop_map(|(path, blocks, priority)| Move { path, blocks, priority })
}

fn tier(tier: Tier) -> usize {
    tier.index()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn random_plans_agree_with_a_naive_copy(
        rounds in proptest::collection::vec(moves(), 1..30),
        seed in any::<u64>(),
        threads in 1..3_usize,
        batch in 1..4_usize,
    ) {
        let device = EmulatedConfig {
            memory_bytes: 4 << 20,
            random_delays: Some(RandomDelays { seed, max: Duration::from_micros(200) }),
            ..EmulatedConfig::default()
        };
        let shape = Shape {
            g1: support::layer_separate(SLOTS),
            g2: support::contiguous(SLOTS),
            disk_slots: SLOTS,
            device,
            ..Shape::default()
        };
        let rig = Rig::with(shape, |worker| {
            worker.verify_host = VerifyHost::Always;
            let config = PathConfig { threads, batch_blocks: batch, depth_blocks: 2 * batch, ..PathConfig::default() };
            worker.paths = PathConfigs::all(config);
        });
        let mut model = Model::default();
        for slot in 0..SLOTS {
            rig.fill_g1(slot, slot as u8);
            model.slots[0][slot as usize] = Some(slot as u8);
        }
        // Every plan follows the one before, so the model can go step by step while the worker has them all at once.
        let mut before: Option<PlanId> = None;
        let mut handles = Vec::new();
        for Move { path, blocks, priority } in rounds {
            let path = Path::LOCAL[path];
            let mut written = HashSet::new();
            let mut list = Vec::new();
            let mut expected = Vec::new();
            for (src, dst, honest) in blocks {
                if !written.insert(dst) {
                    continue;
                }
                let held = model.slots[tier(path.src)][src as usize];
                let name = if honest { held.unwrap_or(200) } else { 201 };
                // Memory of the engine is not labelled: whatever G1 holds is taken at the leader's word.
                let there = if path.src == Tier::G1 { held.is_some() && honest } else { held == Some(name) };
                if path.src == Tier::G1 && !there {
                    continue;
                }
                list.push((name, src, dst));
                expected.push(there);
            }
            if list.is_empty() {
                continue;
            }
            let mut plan = rig.plan(path, &list);
            plan.priority = [Priority::Background, Priority::Normal, Priority::Urgent][usize::from(priority)];
            let all_there = expected.iter().all(|there| *there);
            // A failed predecessor would fail the rest: wait for it instead.
            plan.after = before.into_iter().collect();
            for ((name, _, dst), there) in list.iter().zip(&expected) {
                if *there {
                    model.slots[tier(path.dst)][*dst as usize] = Some(*name);
                } else if path.dst != Tier::G3 {
                    // The claim on the destination came first in some paths: it is either as before or empty.
                }
            }
            before = Some(plan.plan_id);
            let plan_id = plan.plan_id;
            handles.push((rig.manager().execute(plan).unwrap(), expected.clone()));
            if !all_there {
                let (handle, expected) = handles.pop().unwrap();
                let report = handle.wait(soon()).unwrap();
                prop_assert_eq!(report.blocks.iter().map(BlockOutcome::is_done).collect::<Vec<_>>(), expected);
                for ((_, src, dst), outcome) in list.iter().zip(&report.blocks) {
                    // What a failed read left in G2 or G1 is nobody's block; what disk reads refused may be quarantined.
                    if !outcome.is_done() {
                        if path.dst != Tier::G3 {
                            model.slots[tier(path.dst)][*dst as usize] = None;
                        }
                        if path.src == Tier::G3 {
                            model.slots[2][*src as usize] = None;
                        }
                    }
                }
                before = None;
            }
            let _ = plan_id;
        }
        for (handle, expected) in handles {
            let report = handle.wait(soon()).unwrap();
            prop_assert_eq!(report.blocks.iter().map(BlockOutcome::is_done).collect::<Vec<_>>(), expected, "{:?}", report);
        }
        let bytes = rig.g1.bytes_per_block();
        for slot in 0..SLOTS {
            for (held, bound) in [(model.slots[0][slot as usize], &rig.g1), (model.slots[1][slot as usize], &rig.g2)] {
                if let Some(name) = held {
                    prop_assert_eq!(rig.read(bound, slot), pattern(name, bytes), "slot {}", slot);
                }
            }
        }
    }
}
