//! Tickets of models with several cache groups, over an engine's tensors as vLLM lays them out:
//! bytes without axes, and one memory in which an id means a block of one group at a time.
#![cfg(feature = "worker")]
#![allow(clippy::unwrap_used)] // In a test a panic is the report.
#![allow(clippy::single_range_in_vec_init)] // One range is what is expected.

mod support;

use crate::support::{compute_in, holds_in, namespace, slot_file, soon, unlimited};
use kvbm::config::{Blocks, Config, ModelConfig, VolumeConfig};
use kvbm::device::HostBuffer;
use kvbm::layout::{OpaqueLayout, OpaqueTensor};
use kvbm::storage::{BoundLayout, HostStorage, RegionBinding};
use kvbm::{
    BlockId, Engine, FinishedLoad, GroupId, KvBlockManager, LoadOptions, LookUp, TicketError, Tier,
    TokenSequence,
};
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A window of two blocks, full attention, a state that fills a part of its page.
const GROUPS: &str = "window=31 layers=2 rank_bytes=512, full layers=2 rank_bytes=512, \
                      state layers=1 rank_bytes=301";
const ALL: [GroupId; 3] = [GroupId(0), GroupId(1), GroupId(2)];
const BLOCKS: usize = 6;
const G1: u32 = 48;
const PAGE: u64 = 512;

/// Two tensors, which the groups share.
fn engine_memory() -> Vec<BoundLayout> {
    let bytes = u64::from(G1) * PAGE;
    let tensors: Vec<Arc<HostStorage>> = (0..2)
        .map(|_| {
            let tensor = HostBuffer::zeroed(bytes as usize);
            let start = NonNull::new(tensor.as_ptr()).unwrap();
            // SAFETY: the buffer is its own owner; tests touch a block only while no transfer does.
            Arc::new(unsafe { HostStorage::from_external(start, bytes, Arc::new(tensor)) }.unwrap())
        })
        .collect();
    let group = |block_bytes: &[u32]| {
        let tensor = |(region, &block_bytes): (u32, &u32)| OpaqueTensor {
            region,
            offset: 0,
            block_stride: PAGE,
            block_bytes,
        };
        let places: Vec<_> = (0..).zip(block_bytes).map(tensor).collect();
        let bindings = tensors.iter().take(block_bytes.len());
        let bindings = bindings.map(|tensor| RegionBinding::new(Arc::clone(tensor) as _)).collect();
        BoundLayout::bind(Arc::new(OpaqueLayout::new(G1, places).unwrap()), bindings).unwrap()
    };
    [&[512, 512][..], &[512, 512], &[301]].map(group).to_vec()
}

fn open(disk: &Path) -> KvBlockManager<Engine> {
    open_on(|config| {
        config.disk.dir = Some(disk.to_owned());
        config.disk.capacity = Blocks(64).into();
    })
}

/// With a lower tier.
fn open_on(below: impl FnOnce(&mut Config)) -> KvBlockManager<Engine> {
    let mut text = Config::default();
    text.set("model.groups", GROUPS).unwrap();
    KvBlockManager::<kvbm::Owned>::builder()
        .model(ModelConfig { page_size: 16, ..text.model })
        .namespace(namespace())
        .engine_groups(vec![(None, engine_memory())])
        .host(Blocks(64))
        .configure(|config| {
            unlimited(config);
            below(config);
            config.offload.g2_g3.write_through = true;
        })
        .build()
        .unwrap()
}

fn tokens(manager: &KvBlockManager<Engine>, blocks: usize) -> TokenSequence {
    let prompt: Vec<u32> = (0..16 * blocks as u32).collect();
    manager.sequence(&prompt, b"").unwrap()
}

fn ids(range: Range<u32>) -> Vec<BlockId> {
    range.map(BlockId).collect()
}

/// Computes what each group keeps of a request and copies it down.
fn offload(manager: &KvBlockManager<Engine>, request: &TokenSequence) {
    let mut next = 0;
    for group in ALL {
        for range in manager.kept_blocks(group, request.num_blocks()) {
            let to = ids(next..next + range.len() as u32);
            next += range.len() as u32;
            for (&id, &hash) in to.iter().zip(&request.hashes()[range.clone()]) {
                compute_in(manager, group, id, hash);
            }
            let started = manager.offload_group(group, &to, request, range.start, None).unwrap();
            let taken = started.started + started.present;
            assert_eq!((taken, started.refused.len()), (range.len(), 0), "group {group}");
        }
    }
    assert!(manager.wait_offloads(soon()));
}

fn look_up(manager: &KvBlockManager<Engine>, request: &TokenSequence, first: usize) -> [usize; 5] {
    match manager.tickets().look_up("a", request, first).unwrap() {
        LookUp::Ready { blocks, by_tier: [g1, g2, g3, g4] } => [blocks, g1, g2, g3, g4],
        LookUp::Pending => panic!("there is no volume"),
    }
}

/// Ids for what was promised, from id 16 on.
fn places(manager: &KvBlockManager<Engine>) -> Vec<Vec<BlockId>> {
    let mut next = 16;
    let promised = manager.tickets().promised("a").into_iter();
    let place = |range: Range<usize>| {
        next += range.len() as u32;
        ids(next - range.len() as u32..next)
    };
    promised.map(place).collect()
}

fn commit(manager: &KvBlockManager<Engine>, ids: &[Vec<BlockId>]) -> Result<(), TicketError> {
    let ids: Vec<&[BlockId]> = ids.iter().map(Vec::as_slice).collect();
    manager.tickets().commit_groups("a", &ids, LoadOptions::default())
}

fn finished(manager: &KvBlockManager<Engine>) -> FinishedLoad {
    let until = soon();
    loop {
        if let Some(load) = manager.tickets().finished().pop() {
            return load;
        }
        assert!(Instant::now() < until, "a load ends");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Loads what is promised and compares every byte of every group.
fn load(manager: &KvBlockManager<Engine>, request: &TokenSequence) {
    let (promised, to) = (manager.tickets().promised("a"), places(manager));
    commit(manager, &to).unwrap();
    let done = finished(manager);
    assert_eq!((done.arrived, done.failures.len()), (done.wanted, 0), "{:?}", done.failures);
    for ((group, range), to) in ALL.into_iter().zip(promised).zip(to) {
        for (&id, &hash) in to.iter().zip(&request.hashes()[range]) {
            assert!(holds_in(manager, group, id, hash), "group {group}, block {id}");
        }
    }
    assert_eq!(manager.tickets().counts(), (0, 0));
}

#[test]
fn a_ticket_loads_all_groups_from_every_tier_and_after_a_restart() {
    let disk = tempfile::tempdir().unwrap();
    let manager = open(disk.path());
    let request = tokens(&manager, BLOCKS);
    offload(&manager, &request);
    assert_eq!(look_up(&manager, &request, 0), [6, 0, 6, 0, 0]);
    assert_eq!(manager.tickets().promised("a"), [4..6, 0..6, 5..6]);
    let pinned = manager.status().tiers[1].active;
    assert_eq!(pinned, 9, "what each group needs");
    load(&manager, &request);
    assert_eq!(look_up(&manager, &request, 5), [1, 0, 1, 0, 0]);
    assert_eq!(manager.tickets().promised("a"), [5..6, 5..6, 5..6], "the engine has the blocks before");
    load(&manager, &request);
    assert!(manager.wait_offloads(soon()));
    manager.clear(Tier::G2).unwrap();
    assert_eq!(look_up(&manager, &request, 0), [6, 0, 0, 6, 0]);
    load(&manager, &request);
    let report = manager.shutdown(Duration::from_secs(30));
    assert!(report.is_complete(), "{report:?}");
    drop(manager);

    let manager = open(disk.path());
    assert_eq!(look_up(&manager, &request, 0), [6, 0, 0, 6, 0], "after a restart");
    load(&manager, &request);
}

/// Volumes are asked in the background, for what each group needs.
#[test]
fn a_ticket_loads_all_groups_from_a_volume_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let uri = format!("dir://{}", folder.path().display());
    let open =
        || open_on(|config| config.volume.push(VolumeConfig { uri: uri.clone(), ..VolumeConfig::default() }));
    let manager = open();
    offload(&manager, &tokens(&manager, BLOCKS));
    drop(manager);
    let manager = open();
    let request = tokens(&manager, BLOCKS + 1);
    let until = soon();
    let by_tier = loop {
        match manager.tickets().look_up("a", &request, 0).unwrap() {
            LookUp::Ready { by_tier, .. } => break by_tier,
            LookUp::Pending => assert!(Instant::now() < until, "the volume answers"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(by_tier, [0, 0, 0, BLOCKS]);
    assert_eq!(manager.tickets().promised("a"), [4..6, 0..6, 5..6]);
    load(&manager, &request);
}

#[test]
fn a_promise_ends_where_every_group_can_keep_it() {
    let disk = tempfile::tempdir().unwrap();
    let manager = open(disk.path());
    let (long, short) = (tokens(&manager, BLOCKS), tokens(&manager, 4));
    offload(&manager, &short);
    assert_eq!(look_up(&manager, &long, 0)[0], 4, "the longest prefix that has a state");
    assert_eq!(manager.tickets().promised("a"), [2..4, 0..4, 3..4]);
    assert_eq!(look_up(&manager, &long, 4)[0], 0);
    assert!(manager.tickets().promised("a").is_empty());
    let three = kvbm::BlockChain::from(&long).slice(0..3);
    assert_eq!(
        manager.tickets().look_up("a", three, 0).unwrap(),
        LookUp::Ready { blocks: 0, by_tier: [0; 4] }
    );
}

#[test]
fn a_damaged_block_of_one_group_fails_the_load_of_all() {
    // Slots of the window, of full attention, of the state.
    for slot in [0, 3, 8] {
        let disk = tempfile::tempdir().unwrap();
        {
            let manager = open(disk.path());
            offload(&manager, &tokens(&manager, BLOCKS));
            manager.flush(Duration::from_secs(30)).unwrap();
        }
        let file = slot_file(disk.path());
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[slot * 4096 + 7] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let manager = open(disk.path());
        let request = tokens(&manager, BLOCKS);
        assert_eq!(look_up(&manager, &request, 0)[0], BLOCKS);
        let to = places(&manager);
        commit(&manager, &to).unwrap();
        let done = finished(&manager);
        assert_eq!((done.arrived, done.wanted), (0, BLOCKS), "slot {slot}: {:?}", done.failures);
        assert!(!done.failures.is_empty(), "slot {slot}");
        // What arrived of other groups is copied to G2: reads, no writes.
        assert!(manager.wait_offloads(soon()));
        assert_eq!(manager.busy(&to.concat()).unwrap(), [], "slot {slot}");
        assert_eq!(manager.tickets().counts(), (0, 0));
        assert_eq!(look_up(&manager, &request, 0)[0], 0, "the damaged block is a miss for all");
        offload(&manager, &request);
        assert_eq!(look_up(&manager, &request, 0)[0], BLOCKS, "computed again");
        load(&manager, &request);
    }
}

#[test]
fn ids_that_do_not_fit_are_refused_by_group() {
    let disk = tempfile::tempdir().unwrap();
    let manager = open(disk.path());
    let request = tokens(&manager, BLOCKS);
    offload(&manager, &request);
    look_up(&manager, &request, 0);
    let one = manager.tickets().commit("a", &ids(16..22), None).unwrap_err();
    assert!(matches!(one, TicketError::Groups { given: 1, groups: 3, .. }), "{one}");
    let right = places(&manager);
    let mut few = right.clone();
    few[1].pop();
    let few = commit(&manager, &few).unwrap_err();
    assert!(matches!(few, TicketError::Count { group: 1, ids: 5, promised: 6, .. }), "{few}");
    assert!(few.to_string().contains("cache group 1"), "{few}");
    assert_eq!(manager.tickets().counts(), (1, 0), "the ticket stays");
    let mut twice = right.clone();
    twice[2] = vec![right[0][0]];
    let twice = commit(&manager, &twice).unwrap_err();
    assert!(twice.to_string().contains("is named twice"), "{twice}");
    assert_eq!((manager.tickets().counts(), manager.busy(&right.concat()).unwrap()), ((0, 0), vec![]));
    look_up(&manager, &request, 0);
    commit(&manager, &vec![vec![]; 3]).unwrap();
    assert_eq!((manager.tickets().counts(), manager.status().tiers[1].active), ((0, 0), 0), "given up");
    let staged = manager.tickets().stage("a", &request, 0, soon()).unwrap_err();
    assert!(staged.to_string().contains("one cache group"), "{staged}");
}

#[test]
fn an_abandoned_load_of_several_groups_is_named_once() {
    let disk = tempfile::tempdir().unwrap();
    let manager = open(disk.path());
    let request = tokens(&manager, BLOCKS);
    offload(&manager, &request);
    look_up(&manager, &request, 0);
    let to = places(&manager);
    commit(&manager, &to).unwrap();
    assert!(manager.tickets().abandon("a"));
    let done = finished(&manager);
    assert_eq!((done.arrived, done.wanted), (0, BLOCKS));
    assert_eq!(manager.busy(&to.concat()).unwrap(), []);
    assert!(manager.tickets().finished().is_empty());
}
