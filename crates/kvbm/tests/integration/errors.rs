//! What is not supported, or asked for wrongly, is an error at the call that says what to do.

use crate::support::{books, fill, model, namespace, soon, tokens};
use kvbm::builder::{NeedsDevice, WithOwned};
use kvbm::config::{Blocks, Bytes, Capacity};
use kvbm::tokens::ChainRoot;
use kvbm::{
    BuildError, Builder, FailureKind, FenceError, KvBlockManager, Namespace, OffloadError, Owned,
    SequenceError, Tier, TokenSequence,
};

fn builder(namespace: Namespace) -> Builder<NeedsDevice> {
    KvBlockManager::<Owned>::builder().model(model()).namespace(namespace)
}

fn build_error(builder: Builder<WithOwned>) -> BuildError {
    builder.build_metadata_only().err().expect("it cannot be built")
}

#[test]
fn invariant_7_what_cannot_be_built_is_named_with_the_way_out() {
    let base = || builder(namespace()).device(Blocks(8));
    let per_process = namespace().chain_root(ChainRoot::PerProcess(b"seed".to_vec()));
    let table: Vec<(Builder<WithOwned>, &[&str])> = vec![
        (
            base().configure(|config| config.device.capacity = Capacity::NONE).disk("dir", Blocks(8)),
            &["disk.capacity", "needs device.capacity or host.capacity"],
        ),
        (
            base().disk("dir", Blocks(8)).configure(|config| config.transfer.staging = Bytes(0)),
            &["transfer.staging", "more than 0"],
        ),
        (base().disk("dir", Capacity::NONE), &["disk.dir", "needs disk.capacity"]),
        (base().tensor_parallel(3), &["parallelism.tensor_parallel", "3", "model.num_kv_heads (2)"]),
        (base().tensor_parallel(0), &["parallelism.tensor_parallel", "from 1 to"]),
        (
            base().configure(|config| config.offload.g1_g2.queue_share = 0.0),
            &["offload.g1_g2.queue_share", "above 0"],
        ),
        (base().configure(|config| config.model.num_layers = 0), &["model.num_layers"]),
        (
            base().configure(|config| config.namespace.adapter = Some("lora-1".into())),
            &["namespace = test-model", "given to the builder"],
        ),
        (builder(per_process).device(Blocks(8)).host(Blocks(8)).disk("dir", Blocks(8)), &["process"]),
    ];
    for (builder, parts) in table {
        let text = build_error(builder).to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text:?} lacks one of {parts:?}");
    }
}

/// Both where NIXL is compiled in and where it is not.
#[test]
fn invariant_7_a_disk_through_nixl_without_its_library_is_named_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let built = builder(namespace()).device(Blocks(8)).host(Blocks(8)).disk(dir.path(), Blocks(8)).configure(
        |config| {
            config.disk.engine = kvbm::config::DiskEngine::Nixl;
            config.remote.library = Some("/no/such/libnixl_capi.so".into());
        },
    );
    let text = built.build().map(drop).unwrap_err().to_string();
    for part in [
        "disk.engine is \"nixl\" and disk.nixl_backend is \"POSIX\"",
        "tried /no/such/libnixl_capi.so",
        "pip install --no-deps nixl-cu12",
        "or set disk.engine to \"auto\"",
    ] {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "nothing was made there");
}

#[test]
fn invariant_7_an_engine_without_host_memory_gets_an_error() {
    let error =
        builder(namespace()).engine_blocks(8).build_metadata_only().err().expect("no tier").to_string();
    assert!(error.contains("host.capacity") && error.contains("engine"), "{error}");
}

#[test]
fn invariant_8_sizes_at_their_extremes_are_answered_when_a_manager_is_built() {
    let engine = builder(namespace()).engine_blocks(u32::MAX).host(Blocks(8)).build_metadata_only();
    let error = engine.err().expect("nobody has the memory to count so many").to_string();
    assert!(error.contains("G1 has 4294967295 blocks, more than 268435455"), "{error}");
    let error = build_error(builder(namespace()).device(Blocks(1 << 28))).to_string();
    assert!(error.contains("device.capacity = 268435456 blocks: is more than 268435455"), "{error}");
    // A block of more bytes than a number holds, on each of 1,024 ranks.
    let manager = books([8, 8, 0], |config| {
        (config.model.num_layers, config.model.page_size) = (4096, 1 << 20);
        (config.model.num_kv_heads, config.model.head_dim) = (1 << 16, 1 << 16);
        config.parallelism.tensor_parallel = 1024;
        config.offload.g1_g2.watermark = 0.5;
    });
    assert_eq!(manager.allocate(9).unwrap_err().free, 8);
    assert_eq!(manager.status().ranks.len(), 1024);
}

#[test]
fn bytes_of_a_capacity_pay_for_the_padding_of_small_blocks() {
    // 3 tokens x 2 layers x 2 x 2 heads x 32 x bf16: 1536 bytes.
    let manager = books([8, 8, 0], |config| {
        config.model.page_size = 3;
        config.device.capacity = Bytes::kib(12).into();
        config.host.capacity = Bytes::kib(12).into();
        config.offload.g1_g2.write_through = false;
    });
    let status = manager.status();
    assert_eq!([0, 1].map(|tier| status.tiers[tier].capacity), [8, 3]);
}

#[test]
fn invariant_7_paths_and_tiers_that_do_not_exist_are_refused() {
    let manager = books([8, 0, 0], |_| ());
    let blocks = fill(&manager, &tokens(&manager, 1, 2), 0);
    for to in [Tier::G1, Tier::G2, Tier::G3, Tier::G4] {
        let error = manager.offload(&blocks, to).unwrap_err();
        assert_eq!(error, OffloadError::NoPath { from: Tier::G1, to });
        assert!(error.to_string().contains(&format!("configure {to}")), "{error}");
    }
    for tier in [Tier::G2, Tier::G3, Tier::G4] {
        assert!(manager.clear(tier).unwrap_err().to_string().contains(&tier.to_string()));
    }
    let error = manager.flush(std::time::Duration::from_secs(1)).unwrap_err();
    assert!(error.to_string().contains("set disk.dir and disk.capacity"), "{error}");
    assert_eq!(manager.fence_at(0), Err(FenceError::Number(0)));
    manager.fence_at(7).unwrap();
    assert_eq!(manager.fence_at(7), Err(FenceError::Number(7)));
    assert_eq!(manager.fence_at(u64::MAX), Err(FenceError::Number(u64::MAX)));
    #[cfg(feature = "worker")]
    assert_eq!(manager.fence(&[]), Err(FenceError::Elsewhere));
}

#[test]
fn invariant_7_namespaces_that_do_not_fit_are_refused() {
    let manager = books([8, 8, 8], |_| ());
    let prompt: Vec<u32> = (0..64).collect();
    let sequence = |namespace: Namespace| manager.sequence_in(&namespace, &prompt, b"").unwrap_err();
    let error = sequence(namespace().page_size(32));
    assert_eq!(error, SequenceError::PageSize { given: 32, ours: 16 });
    assert!(matches!(sequence(namespace()), SequenceError::Namespace(_)), "no page size");
    let per_process = namespace().page_size(16).chain_root(ChainRoot::PerProcess(b"seed".to_vec()));
    assert!(matches!(sequence(per_process.clone()), SequenceError::NotPersistable(_)));
    let no_disk = books([8, 8, 0], |_| ());
    assert_eq!(no_disk.sequence_in(&per_process, &prompt, b"").unwrap().num_blocks(), 4);
    assert!(matches!(manager.sequence(&prompt, &vec![1; 1 << 20]), Err(SequenceError::Salt(_))));
}

#[test]
fn a_page_size_that_is_set_late_is_the_namespace_s_too() {
    let manager = books([8, 8, 0], |config| config.model.page_size = 32);
    let sequence = manager.sequence(&(0..64).collect::<Vec<_>>(), b"").unwrap();
    assert_eq!(sequence.num_blocks(), 2);
    assert_eq!(
        manager.sequence_in(manager.namespace(), &[], b"").map(|sequence| sequence.num_blocks()),
        Ok(0)
    );
}

#[test]
fn invariant_8_hostile_sizes_are_answered() {
    let manager = books([8, 8, 0], |_| ());
    for huge in [9, 1 << 20, usize::MAX] {
        let error = manager.allocate(huge).unwrap_err();
        assert_eq!((error.tier, error.asked, error.free), (Tier::G1, huge, 8));
        assert!(error.to_string().contains("fewer blocks at once"), "{error}");
    }
    assert_eq!(manager.allocate(0).unwrap().len(), 0);
    let empty = manager.sequence(&[], b"").unwrap();
    assert!(manager.match_prefix(&empty).is_empty() && manager.look_up(&empty).is_empty());
    assert_eq!(manager.onboard(manager.match_prefix(&empty)).wait().unwrap().len(), 0);
    let (done, rest) = manager.commit(manager.allocate(0).unwrap(), &empty, 0).unwrap();
    assert_eq!((done.len(), rest.len()), (0, 0));
    assert_eq!(manager.register(done).unwrap().len(), 0);
    assert!(manager.park(rest).unwrap().is_empty());
    let sequence = tokens(&manager, 1, 2);
    for first in [2, 3, usize::MAX] {
        let rejected = manager.commit(manager.allocate(1).unwrap(), &sequence, first).unwrap_err();
        assert_eq!(rejected.batch.len(), 1, "the batch comes back: {}", rejected.error);
    }
    assert_eq!(manager.status().tiers[0].free, 8);
}

#[test]
fn invariant_8_a_block_without_its_parent_is_refused_and_comes_back() {
    let manager = books([8, 8, 0], |_| ());
    let sequence = tokens(&manager, 1, 4);
    let (done, _) = manager.commit(manager.allocate(2).unwrap(), &sequence, 2).unwrap();
    let rejected = manager.register(done).unwrap_err();
    assert_eq!(rejected.batch.len(), 2);
    assert!(rejected.error.to_string().contains("register the parent first"), "{}", rejected.error);
    assert!(manager.look_up(&sequence).is_empty());
}

#[test]
fn invariant_8_handles_of_another_manager_are_refused() {
    let [ours, theirs] = [books([8, 8, 0], |_| ()), books([8, 8, 0], |_| ())];
    let sequence = tokens(&theirs, 1, 3);
    let blocks = fill(&theirs, &sequence, 0);
    assert!(theirs.wait_offloads(soon()));
    assert_eq!(ours.offload(&blocks, Tier::G2), Err(OffloadError::Foreign));
    drop(blocks);
    assert_eq!(theirs.clear(Tier::G1), Ok(3));
    let error = ours.onboard(theirs.match_prefix(&sequence)).wait().unwrap_err();
    assert_eq!((error.arrived.len(), error.failures.len()), (0, 3));
    assert!(error.to_string().contains("another manager"), "{error}");
    let (done, _) = theirs.commit(theirs.allocate(1).unwrap(), &tokens(&theirs, 2, 1), 0).unwrap();
    let rejected = ours.register(done).unwrap_err();
    assert!(rejected.error.to_string().contains("another registry"), "{}", rejected.error);
    assert_eq!(theirs.register(rejected.batch).unwrap().len(), 1);
    assert!(ours.look_up(&sequence).is_empty(), "nothing of it is found here");
    assert_eq!(ours.onboard(ours.match_prefix(&sequence)).wait().unwrap().len(), 0);
}

#[test]
fn invariant_8_a_prefix_cut_in_two_is_onboarded_in_parts() {
    let manager = books([8, 8, 0], |_| ());
    let sequence: TokenSequence = tokens(&manager, 1, 4);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    let mut head = manager.match_prefix(&sequence);
    let tail = head.split_off(2);
    let error = manager.onboard(tail).wait().unwrap_err();
    assert_eq!(error.failures[0].failure.kind, FailureKind::Missing, "{error}");
    assert!(error.to_string().contains("bring the parent first"), "{error}");
    drop(error);
    let mut head = manager.onboard(head).wait().unwrap();
    let tail = manager.onboard(manager.match_prefix(&sequence).split_off(2)).wait().unwrap();
    assert_eq!((head.len(), tail.len()), (2, 2));
    head.append(tail).unwrap();
    assert_eq!(head.len(), 4);
}

#[test]
fn invariant_8_a_prefix_that_finds_no_room_says_what_holds_it() {
    let manager = books([8, 16, 0], |_| ());
    let sequence = tokens(&manager, 1, 6);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(6));
    let held = manager.allocate(5).unwrap();
    let error = manager.onboard(manager.match_prefix(&sequence)).wait().unwrap_err();
    let refused = error.refused.expect("no room");
    assert_eq!((refused.asked, refused.held, refused.free), (6, 5, 3));
    assert!(error.to_string().contains("register or drop exclusive batches"), "{error}");
    drop(held);
    assert_eq!(manager.onboard(manager.match_prefix(&sequence)).wait().unwrap().len(), 6);
}
