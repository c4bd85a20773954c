//! Wrong bytes on every way that a block can take: a miss, out of use, counted and published; never
//! served.
#![cfg(feature = "worker")]

use crate::support::store::{Store, hashes, onboard, put, registry};
use crate::support::{model, namespace, slot_file, soon, tokens, unlimited};
use kvbm::config::{Blocks, Bytes, DiskEngine, VerifyHost, VolumeOffload};
use kvbm::events_plane::{Delivery, EventKind, Subscriber};
use kvbm::{FailureKind, KvBlockManager, Owned, Path, Tier, TokenSequence};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

/// Blocks of the chain, and the one whose bytes go bad.
const BLOCKS: u32 = 4;
const BAD: usize = 2;
/// Bytes of a block.
const BLOCK: u64 = 8192;

struct Rig {
    manager: KvBlockManager<Owned>,
    store: Arc<Store>,
    dir: tempfile::TempDir,
    sequence: TokenSequence,
}

/// A manager of four tiers where nothing goes further down than G2 by itself, with the chain in G1
/// and G2, and who heard of it from the beginning.
fn rig(scrub: Bytes) -> (Rig, Subscriber) {
    let (dir, store) = (tempfile::tempdir().expect("a folder"), Store::new());
    let manager = KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(8))
        .host(Blocks(16))
        .disk(dir.path(), Blocks(32))
        .volumes(registry(&[("test", &store)]))
        .volume("test:")
        .configure(|config| {
            unlimited(config);
            config.disk.engine = DiskEngine::Buffered;
            config.disk.scrub = scrub;
            config.volumes.offload = VolumeOffload::Explicit;
            config.transfer.verify_host = VerifyHost::Always;
        })
        .build()
        .expect("a manager");
    let events_of = manager.events().subscribe().expect("room");
    let sequence = tokens(&manager, 1, BLOCKS);
    put(&manager, &sequence);
    (Rig { manager, store, dir, sequence }, events_of)
}

impl Rig {
    /// Copies the chain from G2 to `tier`.
    fn offload(&self, tier: Tier) {
        self.manager.clear(Tier::G1).expect("ours");
        let parts = self.manager.match_prefix(&self.sequence).into_parts();
        assert_eq!(parts.g2.len(), BLOCKS as usize);
        self.manager.offload(&parts.g2, tier).expect("a path");
        assert!(self.manager.wait_offloads(soon()));
    }

    /// Copies the chain to `tier` and leaves it there alone.
    fn only_on(&self, tier: Tier) {
        self.offload(tier);
        self.manager.clear(Tier::G2).expect("ours");
    }

    fn damage_host(&self) {
        self.manager.clear(Tier::G1).expect("ours");
        let block = self.manager.match_prefix(&self.sequence).blocks()[BAD];
        assert_eq!(block.tier, Tier::G2);
        let g2 = self.manager.workers().iter().next().expect("a rank").g2().expect("configured").clone();
        let mut bytes = vec![0; g2.bytes_per_block() as usize];
        // SAFETY: the test alone touches these bytes now.
        unsafe { g2.read_block(block.block.0, &mut bytes) }.expect("host memory");
        bytes[4321] ^= 0x10;
        // SAFETY: the test alone touches these bytes now.
        unsafe { g2.write_block(block.block.0, &bytes) }.expect("host memory");
    }

    fn damage_disk(&self) {
        let block = self.manager.match_prefix(&self.sequence).blocks()[BAD];
        assert_eq!(block.tier, Tier::G3);
        let file = File::options().read(true).write(true).open(slot_file(self.dir.path())).expect("slots");
        let (mut byte, at) = ([0], u64::from(block.block.0) * BLOCK + 4321);
        file.read_exact_at(&mut byte, at).expect("a slot");
        file.write_all_at(&[byte[0] ^ 0x10], at).expect("a slot");
    }

    fn damage_object(&self) {
        let of = |hash| self.store.keys().into_iter().find(|key| key.hash == hash);
        let key = of(hashes(&self.sequence)[BAD]).expect("an object");
        assert!(self.store.memory.tamper(&key, |object| object[4321] ^= 0x10));
    }

    /// Blocks that arrive; every byte of them is compared.
    fn onboard(&self) -> usize {
        self.manager.clear(Tier::G1).expect("ours");
        onboard(&self.manager, &self.sequence)
    }
}

/// Whether the bad block's removal from `tier` was published, once.
fn is_published(events_of: &mut Subscriber, rig: &Rig, tier: Tier) -> bool {
    assert!(rig.manager.events().pump());
    let mut removed = 0;
    while let Some(delivery) = events_of.next(std::time::Duration::ZERO).expect("the transport") {
        let Delivery::Events { events, .. } = delivery else { panic!("{delivery:?}") };
        let is_it = |kind: &EventKind| match kind {
            EventKind::Remove(block) => {
                block.location.tier == tier && block.identity.hash == hashes(&rig.sequence)[BAD]
            }
            _ => false,
        };
        removed += events.iter().filter(|event| is_it(&event.kind)).count();
    }
    removed == 1
}

/// How bytes go bad and are read: the tier that they are on, the path of the read (none where
/// nobody asked), what is done before the bytes go bad, how they do, and how they are read.
struct Case {
    name: &'static str,
    tier: Tier,
    path: Option<Path>,
    before: fn(&Rig),
    damage: fn(&Rig),
    read: fn(&Rig),
}

fn asked_for(rig: &Rig) {
    assert_eq!(rig.onboard(), BAD, "the part before it");
}

const CASES: &[Case] = &[
    Case {
        name: "host memory to the device",
        tier: Tier::G2,
        path: Some(Path::G2_G1),
        before: |_| (),
        damage: Rig::damage_host,
        read: asked_for,
    },
    Case {
        name: "host memory to the disk",
        tier: Tier::G2,
        path: Some(Path::G2_G3),
        before: |_| (),
        damage: Rig::damage_host,
        read: |rig| rig.offload(Tier::G3),
    },
    Case {
        name: "host memory to a volume",
        tier: Tier::G2,
        path: Some(Path::G2_G4),
        before: |_| (),
        damage: Rig::damage_host,
        read: |rig| rig.offload(Tier::G4),
    },
    Case {
        name: "disk to the device",
        tier: Tier::G3,
        path: Some(Path::G3_G1),
        before: |rig| rig.only_on(Tier::G3),
        damage: Rig::damage_disk,
        read: asked_for,
    },
    Case {
        name: "scrubbing",
        tier: Tier::G3,
        path: None,
        before: |rig| rig.only_on(Tier::G3),
        damage: Rig::damage_disk,
        read: |_| (),
    },
    Case {
        name: "a volume to the device",
        tier: Tier::G4,
        path: Some(Path::G4_G1),
        before: |rig| rig.only_on(Tier::G4),
        damage: Rig::damage_object,
        read: asked_for,
    },
];

#[test]
fn invariant_5_wrong_bytes_are_a_miss_out_of_use_counted_and_published_on_every_path() {
    for Case { name, tier, path, before, damage, read } in CASES {
        let (rig, mut events_of) = rig(if path.is_none() { Bytes::gib(1) } else { Bytes(0) });
        before(&rig);
        damage(&rig);
        read(&rig);
        let corrupt = &rig.manager.metrics().tier(*tier).corrupt;
        let until = soon();
        while corrupt.get() == 0 {
            assert!(Instant::now() < until, "{name}: not counted");
            std::thread::yield_now();
        }
        assert!(is_published(&mut events_of, &rig, *tier), "{name}: its removal is published");
        if let Some(path) = path {
            let failures = rig.manager.metrics().path(*path).failures(FailureKind::Corrupt).get();
            assert_eq!(failures, 1, "{name}: on the path");
        }
        for other in Tier::ALL {
            let counted = rig.manager.metrics().tier(other).corrupt.get();
            assert_eq!(counted, u64::from(other == *tier), "{name}: on {other}");
        }

        // Out of use: a slot is never written again; an object is removed, for the next one is
        // another.
        let quarantined = |tier: Tier| rig.manager.status().tiers[tier.index()].quarantined;
        if *tier == Tier::G4 {
            let hash = hashes(&rig.sequence)[BAD];
            while rig.store.keys().iter().any(|key| key.hash == hash) {
                assert!(Instant::now() < until, "{name}: the object goes");
                std::thread::yield_now();
            }
        } else {
            assert_eq!(quarantined(*tier), 1, "{name}: the slot");
            assert_eq!(rig.manager.metrics().tier(*tier).quarantined.get(), 1, "{name}");
        }

        // A miss, without another read; what was before it is served, and so is what is computed
        // again.
        let found = rig.manager.match_prefix(&rig.sequence);
        assert_eq!(found.len(), BAD, "{name}: a miss from now on");
        drop(found);
        assert_eq!(rig.onboard(), BAD, "{name}");
        assert_eq!(corrupt.get(), 1, "{name}: found once");
        rig.manager.clear(Tier::G1).expect("ours");
        rig.manager.clear(Tier::G2).expect("ours");
        put(&rig.manager, &rig.sequence);
        assert_eq!(rig.onboard(), BLOCKS as usize, "{name}: computed again");
        let none = [Tier::G1, Tier::G2, Tier::G3].map(quarantined);
        assert_eq!(none.iter().sum::<u32>(), u32::from(*tier != Tier::G4), "{name}: no other slot");
    }
}
