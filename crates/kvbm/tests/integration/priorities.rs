//! Priorities of plans, as a worker link sees them.

use crate::support::soon;
use kvbm::config::{Blocks, ModelConfig};
use kvbm::plan::{BlockId, Priority, TransferPlan};
use kvbm::worker::{Lane, LinkError, MetadataWorker, WorkerLink};
use kvbm::{Engine, KvBlockManager, Namespace, Path};
use std::sync::{Arc, Mutex};

/// A link that keeps every plan on its way to a worker that answers at once.
struct Recorder(MetadataWorker, Arc<Mutex<Vec<TransferPlan>>>);

impl WorkerLink for Recorder {
    fn send(&self, lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        if let Ok(kvbm::plan::Command::Transfer(plan)) = kvbm::plan::wire::decode_command(command) {
            self.1.lock().expect("a list").push(plan);
        }
        self.0.send(lane, command)
    }
}

/// Mutation that makes it fail: onboards of an engine have the priority of parked sequences.
#[test]
fn onboards_are_urgent_also_into_an_engine_s_blocks_and_offloads_are_background() {
    let plans: Arc<Mutex<Vec<TransferPlan>>> = Arc::default();
    let prepared = KvBlockManager::<Engine>::builder()
        .model(ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() })
        .namespace(Namespace::new("test-model").weights("1"))
        .engine_blocks(8)
        .host(Blocks(8));
    let manager = prepared
        .build_with_workers(|rank, epoch, sink| {
            Box::new(Recorder(MetadataWorker::start(rank, epoch, sink), Arc::clone(&plans)))
        })
        .unwrap();
    let sequence = manager.sequence(&[7; 32], b"").unwrap();
    let ids = [0, 1].map(BlockId);
    assert_eq!(manager.offload(&ids, &sequence, 0, None).unwrap().started, 2);
    assert!(manager.wait_offloads(soon()));
    let prefix = manager.match_prefix(&sequence);
    assert_eq!(manager.onboard(prefix, &[4, 5].map(BlockId), None).unwrap().wait().unwrap(), 2);
    let seen: Vec<_> = plans.lock().unwrap().iter().map(|plan| (plan.path(), plan.priority)).collect();
    assert_eq!(seen, [(Path::G1_G2, Priority::Background), (Path::G2_G1, Priority::Urgent)]);

    let owned = crate::support::script::Ranks::new(1);
    let manager = owned.manager([8, 8, 0], |_| ());
    let sequence = crate::support::tokens(&manager, 1, 2);
    drop(crate::support::fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    let cached = crate::support::fill(&manager, &sequence, 0);
    manager.offload(&cached, kvbm::Tier::G2).unwrap();
    assert!(manager.wait_offloads(soon()));
    drop(cached);
    manager.clear(kvbm::Tier::G1).unwrap();
    owned.set_all(crate::support::script::Mode::Hold);
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plan = owned.next_plan(0);
    assert_eq!((plan.path(), plan.priority), (Path::G2_G1, Priority::Urgent));
    owned.done(0, &plan);
    assert_eq!(onboarding.wait().unwrap().len(), 2);
}
