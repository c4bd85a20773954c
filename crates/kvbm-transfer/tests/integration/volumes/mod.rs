//! Memory to volumes, volumes to the device, and what happens when volumes fail.

mod asks;
mod copies;
mod direct;
mod faulty;
mod hangs;

use crate::support::{LAYERS, NAMESPACE, Rig, Shape, identity, kinds};
use faulty::Faulty;
use kvbm_plan::{
    Command, Endpoint, FailureKind, Message, NamespaceTag, Path, TransferPlan, VolumeAnswer, VolumeId,
    VolumeRequest,
};
use kvbm_transfer::{VolumeGroup, VolumeTier};
use kvbm_volume::{BlobKey, BlobSlice, ObjectSeal, VolumeRegistry};
use std::sync::Arc;

const VOLUME: VolumeId = VolumeId(4);
const SLICE: BlobSlice = BlobSlice { first_layer: 0, num_layers: LAYERS, first_head: 2, num_heads: 2 };

fn rig(volume: &Arc<Faulty>, shape: Shape, writes: bool) -> Rig {
    rig_with(&opened(volume), shape, writes)
}

fn opened(volume: &Arc<Faulty>) -> Arc<VolumeRegistry> {
    let registry = Arc::new(VolumeRegistry::new());
    registry.register(Arc::clone(volume) as _).expect("the test's own set-up");
    registry
}

fn rig_with(registry: &Arc<VolumeRegistry>, shape: Shape, writes: bool) -> Rig {
    Rig::with(shape, |config| config.volumes = Some(VolumeTier { writes, ..tier(registry) }))
}

/// Volumes that take writes and have two threads each.
fn tier(registry: &Arc<VolumeRegistry>) -> VolumeTier {
    VolumeTier {
        registry: Arc::clone(registry),
        groups: vec![VolumeGroup { slice: SLICE, heads: 4 }],
        writes: true,
        share: (0, 1),
        seal: ObjectSeal::default(),
        threads: 2,
    }
}

fn up(rig: &Rig, moves: &[(u8, u32)]) -> TransferPlan {
    let moves: Vec<_> = moves.iter().map(|&(name, slot)| (name, slot, 0)).collect();
    TransferPlan { dst: Endpoint::Volume(VOLUME), ..rig.plan(Path::G2_G4, &moves) }
}

fn down(rig: &Rig, moves: &[(u8, u32)]) -> TransferPlan {
    let moves: Vec<_> = moves.iter().map(|&(name, slot)| (name, 0, slot)).collect();
    TransferPlan { src: Endpoint::Volume(VOLUME), ..rig.plan(Path::G4_G1, &moves) }
}

fn key(name: u8) -> BlobKey {
    BlobKey::of(NamespaceTag::from_bytes(NAMESPACE), &identity(name), SLICE)
}

/// Blocks 1 to `count` in G2, block `n` in slot `n`.
fn fill(rig: &Rig, count: u8) {
    for name in 1..=count {
        rig.fill_g1(0, name);
        rig.must(Path::G1_G2, &[(name, 0, u32::from(name))]);
    }
}

fn failed(rig: &Rig, plan: TransferPlan) -> Vec<Option<FailureKind>> {
    kinds(&rig.run(plan))
}

/// Sends a request and waits for its answer.
fn ask(rig: &Rig, token: u64, request: VolumeRequest) -> VolumeAnswer {
    ask_of(VOLUME, rig, token, request)
}

fn ask_of(volume: VolumeId, rig: &Rig, token: u64, request: VolumeRequest) -> VolumeAnswer {
    rig.send(&Command::Volume { token, volume, request });
    loop {
        if let Message::Volume { token: answered, answer, .. } = rig.inbox.next() {
            assert_eq!(answered, token);
            return answer;
        }
    }
}
