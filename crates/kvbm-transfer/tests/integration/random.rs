//! Random plans, side by side wherever they touch different slots, against a naive copy: what is
//! reported as done is there, byte for byte, and what is not was asked of a slot that did not hold
//! it.

use crate::support::{Rig, Shape, pattern, soon};
use kvbm_device::{EmulatedConfig, RandomDelays};
use kvbm_plan::{BlockOutcome, Path, PlanId, Priority, Tier, TransferPlan};
use kvbm_transfer::{PathConfig, PathConfigs, TransferHandle, VerifyHost};
use proptest::prelude::*;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

const SLOTS: u32 = 6;
/// A block that is nowhere.
const NOBODY: u8 = 200;

/// Some moves along one path.
#[derive(Clone, Debug)]
struct Step {
    path: usize,
    /// (source slot, destination slot, whether the block that is there is asked for)
    moves: Vec<(u32, u32, bool)>,
    priority: usize,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let moves = proptest::collection::vec((0..SLOTS, 0..SLOTS, proptest::bool::weighted(0.93)), 1..5);
    let step = (0..Path::LOCAL.len(), moves, 0..3_usize).prop_map(|(path, moves, priority)| Step {
        path,
        moves,
        priority,
    });
    proptest::collection::vec(step, 1..40)
}

type Place = (Tier, u32);

/// What each slot holds, by block name, and which plan touched it last.
#[derive(Default)]
struct Model {
    held: HashMap<Place, u8>,
    last: HashMap<Place, PlanId>,
    /// Slots of the disk that gave a wrong block and may be quarantined.
    suspect: HashSet<u32>,
}

/// A plan with what should come of it.
struct Asked {
    moves: Vec<(u8, u32, u32)>,
    expected: Vec<bool>,
}

impl Model {
    /// The part of a step that has a definite result.
    fn ask(&self, path: Path, step: &Step) -> Asked {
        let mut asked = Asked { moves: Vec::new(), expected: Vec::new() };
        let mut written = HashSet::new();
        for &(src, dst, honest) in &step.moves {
            let held = self.held.get(&(path.src, src)).copied();
            // Memory of the engine carries no label: G1 is taken at the leader's word, so lies
            // about it prove nothing.
            let unlabelled = path.src == Tier::G1 && !(honest && held.is_some());
            let suspect = path.src == Tier::G3 && self.suspect.contains(&src)
                || path.dst == Tier::G3 && self.suspect.contains(&dst);
            if unlabelled || suspect || !written.insert(dst) {
                continue;
            }
            let name = held.filter(|_| honest).unwrap_or(NOBODY);
            asked.moves.push((name, src, dst));
            asked.expected.push(held == Some(name));
        }
        asked
    }

    /// Plans that must be over before one may touch these slots.
    fn predecessors(&self, path: Path, asked: &Asked) -> Vec<PlanId> {
        let places = asked.moves.iter().flat_map(|&(_, src, dst)| [(path.src, src), (path.dst, dst)]);
        places
            .filter_map(|place| self.last.get(&place).copied())
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// The naive copy.
    fn copy(&mut self, path: Path, asked: &Asked, plan: PlanId) {
        for (&(name, src, dst), &there) in asked.moves.iter().zip(&asked.expected) {
            self.last.insert((path.src, src), plan);
            self.last.insert((path.dst, dst), plan);
            if there {
                self.held.insert((path.dst, dst), name);
            } else if path.dst == Tier::G2 || path.src == Tier::G3 {
                // What a refused read left behind is nobody's block.
                self.held.remove(&(path.dst, dst));
            }
            if !there && path.src == Tier::G3 {
                self.suspect.insert(src);
            }
        }
    }

    /// A plan failed in part: nothing may wait for it.
    fn forget(&mut self, plan: PlanId) {
        self.last.retain(|_, last| *last != plan);
    }
}

fn rig(seed: u64, threads: usize, batch: usize) -> Rig {
    let device = EmulatedConfig {
        memory_bytes: 4 << 20,
        random_delays: Some(RandomDelays { seed, max: Duration::from_micros(200) }),
        ..EmulatedConfig::default()
    };
    let shape = Shape {
        g1: crate::support::layer_separate(SLOTS),
        g2: crate::support::contiguous(SLOTS),
        disk_slots: SLOTS,
        device,
        ..Shape::default()
    };
    Rig::with(shape, |worker| {
        worker.verify_host = VerifyHost::Always;
        worker.direct_offload = true;
        let path =
            PathConfig { threads, batch_blocks: batch, depth_blocks: 2 * batch, ..PathConfig::default() };
        worker.paths = PathConfigs::all(path);
    })
}

fn check(handle: &TransferHandle, expected: &[bool]) -> Result<(), TestCaseError> {
    let report = handle.wait(soon()).map_err(|error| TestCaseError::fail(error.to_string()))?;
    let done: Vec<bool> = report.blocks.iter().map(BlockOutcome::is_done).collect();
    prop_assert_eq!(done, expected, "{:?}", report);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn random_plans_agree_with_a_naive_copy(
        steps in steps(),
        seed in any::<u64>(),
        threads in 1..3_usize,
        batch in 1..4_usize,
    ) {
        let rig = rig(seed, threads, batch);
        let mut model = Model::default();
        for slot in 0..SLOTS {
            rig.fill_g1(slot, slot as u8);
            model.held.insert((Tier::G1, slot), slot as u8);
        }
        let mut running = Vec::new();
        for step in steps {
            let path = Path::LOCAL[step.path];
            let asked = model.ask(path, &step);
            if asked.moves.is_empty() {
                continue;
            }
            let priority = [Priority::Background, Priority::Normal, Priority::Urgent][step.priority];
            let after = model.predecessors(path, &asked);
            let plan = TransferPlan { priority, after, ..rig.plan(path, &asked.moves) };
            let plan_id = plan.plan_id;
            model.copy(path, &asked, plan_id);
            let handle = rig.manager().execute(plan).expect("accepted");
            if asked.expected.contains(&false) {
                check(&handle, &asked.expected)?;
                model.forget(plan_id);
            } else {
                running.push((handle, asked.expected));
            }
        }
        for (handle, expected) in running {
            check(&handle, &expected)?;
        }
        for (&(tier, slot), &name) in &model.held {
            let bound = match tier {
                Tier::G1 => &rig.g1,
                Tier::G2 => &rig.g2,
                _ => continue,
            };
            prop_assert_eq!(rig.read(bound, slot), pattern(name, bound.bytes_per_block()), "slot {} of {}", slot, tier);
        }
        let on_disk: Vec<_> = (0..SLOTS).filter(|slot| !model.suspect.contains(slot)).collect();
        for slot in on_disk {
            if let Some(&name) = model.held.get(&(Tier::G3, slot)) {
                rig.must(Path::G3_G1, &[(name, slot, 0)]);
                rig.assert_g1(0, name);
            }
        }
    }
}
