//! Whatever happens in whatever order.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Submit { id: u64, path: usize, blocks: u32, gate: u8, after: Option<u64>, budget: u32, priority: u8 },
    Cancel(u64),
    Advance(u64),
    Event(u64, bool),
    Take(usize, usize),
    Settle { fail: bool },
    Later(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let submit =
        (0..24_u64, 0..5_usize, 1..6_u32, 0..6_u8, proptest::option::of(0..24_u64), 0..3_u32, 0..3_u8)
            .prop_map(|(id, path, blocks, gate, after, budget, priority)| Step::Submit {
                id,
                path,
                blocks,
                gate,
                after,
                budget,
                priority,
            });
    prop_oneof![
        4 => submit,
        1 => (0..24_u64).prop_map(Step::Cancel),
        1 => (0..4_u64).prop_map(Step::Advance),
        1 => (0..2_u64, any::<bool>()).prop_map(|(id, ok)| Step::Event(id, ok)),
        4 => (0..5_usize, 1..4_usize).prop_map(|(path, limit)| Step::Take(path, limit)),
        3 => any::<bool>().prop_map(|fail| Step::Settle { fail }),
        1 => (0..3_u64).prop_map(Step::Later),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever happens in whatever order: one report per submission, one outcome per block,
    /// nothing left behind.
    #[test]
    fn every_submission_is_answered_exactly_once(steps in proptest::collection::vec(step(), 1..120)) {
        let mut bench = Bench::with_queue(PathLimits { plans: 4, blocks: 8192 });
        let mut submitted: HashMap<PlanId, usize> = HashMap::new();
        let mut sizes: HashMap<PlanId, usize> = HashMap::new();
        let mut flying: Vec<Portion> = Vec::new();
        let settle = |bench: &mut Bench, portion: Portion, fail: bool| {
            let outcome = if fail {
                BlockOutcome::Failed(kvbm_plan::Failure::new(FailureKind::Io, "planted"))
            } else {
                BlockOutcome::Done { checksum: 0 }
            };
            let outcomes = portion.indices.iter().map(|index| (*index, outcome.clone()));
            bench.state.settle(portion.plan.plan_id, outcomes.collect::<Vec<_>>(), 0, bench.now);
        };
        for step in steps {
            match step {
                Step::Submit { id, path, blocks, gate, after, budget, priority } => {
                    let gate = match gate {
                        0 => Gate::Iteration(2),
                        1 => Gate::Layer { iteration: 3, layer: 1 },
                        2 => Gate::DeviceEvent(id % 2),
                        _ => Gate::None,
                    };
                    let priority = [Priority::Background, Priority::Normal, Priority::Urgent][usize::from(priority)];
                    let after = after.map(PlanId).into_iter().collect();
                    let new = TransferPlan { gate, after, budget_ms: budget, priority, ..plan(id, Path::LOCAL[path], blocks) };
                    sizes.entry(PlanId(id)).or_insert(blocks as usize);
                    *submitted.entry(PlanId(id)).or_default() += 1;
                    bench.submit(new);
                }
                Step::Cancel(id) => bench.state.cancel(PlanId(id), bench.now),
                Step::Advance(iteration) => bench.state.advance(iteration, None),
                Step::Event(id, ok) => {
                    let generation = bench.state.register_event(id, bench.now);
                    let result = if ok { Ok(()) } else { Err("planted".to_owned()) };
                    bench.state.event_over(id, generation, result, bench.now);
                }
                Step::Take(path, limit) => flying.extend(bench.state.take(Path::LOCAL[path], false, |_| limit, bench.now)),
                Step::Settle { fail } => {
                    if let Some(portion) = flying.pop() {
                        settle(&mut bench, portion, fail);
                    }
                }
                Step::Later(ms) => bench.later(ms),
            }
            bench.collect();
        }
        bench.state.close(bench.now);
        bench.collect();
        for path in Path::LOCAL {
            while let Some(portion) = bench.state.take(path, false, |_| 9, bench.now) {
                flying.push(portion);
            }
        }
        for portion in std::mem::take(&mut flying) {
            settle(&mut bench, portion, false);
        }
        bench.collect();
        prop_assert_eq!(bench.state.live_plans(), 0);
        prop_assert_eq!(bench.state.next_deadline(), None);
        for (plan_id, times) in submitted {
            let reports = &bench.reports[&plan_id];
            prop_assert_eq!(reports.len(), times, "plan {}", plan_id);
            prop_assert!(reports.iter().all(|report| report.blocks.len() == sizes[&plan_id]));
        }
        for stats in bench.state.path_stats() {
            prop_assert_eq!((stats.queued_plans, stats.queued_blocks, stats.running_plans), (0, 0, 0));
        }
    }
}
