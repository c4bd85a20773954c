use super::*;
use kvbm_layout::{AxisOrder, DType, FullyContiguous, LayoutConfig, OpaqueLayout};
use kvbm_plan::{GroupId, NamespaceId, SequenceHash};
use kvbm_storage::SystemAllocator;

fn tier() -> Arc<HostTier> {
    let config = LayoutConfig::builder()
        .num_blocks(4)
        .num_layers(2)
        .page_size(2)
        .inner_dim(8)
        .dtype(DType::F8E4M3)
        .build()
        .unwrap();
    tier_of(config)
}

fn tier_of(config: LayoutConfig) -> Arc<HostTier> {
    let layout = Arc::new(FullyContiguous::new(config, AxisOrder::Nhd).unwrap());
    let bound = BoundLayout::allocate(layout, &SystemAllocator::default()).unwrap();
    Arc::new(HostTier::new([bound], BlockChecksum::new([0; 16]), VerifyHost::Always, false).unwrap())
}

fn block(name: u8) -> BlockIdentity {
    let hash = SequenceHash::from_bytes([name; 16]);
    BlockIdentity { namespace: NamespaceId(0), group: GroupId(0), hash, parent: None, position: 0 }
}

const LAYER: [Option<LayerRange>; 2] =
    [Some(LayerRange { first: 0, count: 1 }), Some(LayerRange { first: 1, count: 1 })];

fn read(tier: &Arc<HostTier>, name: u8, layers: Option<LayerRange>) -> Result<ReadClaim, FailureKind> {
    tier.read(1, &block(name), layers).map_err(|failure| failure.kind)
}

fn write(tier: &Arc<HostTier>, name: u8, layers: Option<LayerRange>) -> Result<WriteClaim, FailureKind> {
    tier.write(1, &block(name), layers).map_err(|failure| failure.kind)
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    let tier = tier();
    assert_eq!(read(&tier, 1, None).unwrap_err(), FailureKind::Missing);
    let claim = write(&tier, 1, None).unwrap();
    assert_eq!(read(&tier, 1, None).unwrap_err(), FailureKind::Missing, "being written");
    assert_eq!(read(&tier, 1, LAYER[1]).unwrap_err(), FailureKind::Missing, "each layer is");
    for layers in [None, LAYER[0]] {
        assert_eq!(write(&tier, 2, layers).unwrap_err(), FailureKind::QueueFull);
    }
    assert!(claim.finish(true, None).unwrap().is_some());
    let readers = [read(&tier, 1, None).unwrap(), read(&tier, 1, LAYER[1]).unwrap()];
    assert_eq!(read(&tier, 2, None).unwrap_err(), FailureKind::Corrupt);
    assert_eq!(write(&tier, 2, None).unwrap_err(), FailureKind::QueueFull);
    assert_eq!(readers[0].verify(), Ok(true));
    drop(readers);
    drop(write(&tier, 2, None).unwrap());
    assert_eq!(read(&tier, 1, None).unwrap_err(), FailureKind::Missing, "overwritten in part, perhaps");
    assert_eq!(tier.read(9, &block(1), None).unwrap_err().kind, FailureKind::Unsupported);
}

#[test]
fn claims_of_another_process_are_none_of_ours() {
    let bound = tier().bound().clone();
    let sums = BlockChecksum::new([0; 16]);
    let tier = Arc::new(HostTier::new([bound], sums, VerifyHost::Always, true).unwrap());
    let writers = [write(&tier, 1, None).unwrap(), write(&tier, 2, None).unwrap()];
    assert_eq!(read(&tier, 7, None).unwrap().verify(), Ok(false), "its owner has the checksum");
    let sums = writers.map(|claim| claim.finish(true, None).unwrap().expect("a checksum"));
    assert_ne!(sums[0], sums[1], "bound to the identity");
    assert_eq!(write(&tier, 1, LAYER[0]).unwrap().finish(true, None), Ok(None));
    assert_eq!(tier.read(4, &block(1), None).unwrap_err().kind, FailureKind::Unsupported);
    assert_eq!(tier.write(4, &block(1), None).unwrap_err().kind, FailureKind::Unsupported);
}

#[test]
fn a_process_that_reads_says_what_and_its_word_condemns_no_slot() {
    let ours = tier();
    let sum = write(&ours, 1, None).unwrap().finish(true, None).unwrap().expect("a checksum");
    let sums = BlockChecksum::new([0; 16]);
    let theirs = HostTier::new([ours.bound().clone()], sums, VerifyHost::Never, true).unwrap();
    let mut claim = read(&Arc::new(theirs), 1, None).unwrap();
    claim.sum().unwrap();
    assert_eq!(claim.checksum(), Some(sum));
    let known = read(&ours, 1, None).unwrap();
    assert_eq!(known.check(sum), Ok(true));
    assert_eq!(known.check(sum ^ 1).unwrap_err().kind, FailureKind::Device, "its word alone");
    assert_eq!(read(&ours, 1, None).unwrap().verify(), Ok(true));
    // SAFETY: nobody else touches the memory of this test.
    unsafe { ours.groups[0].regions[0].fill(ours.bound().bytes_per_block(), 1, 0xff) }.unwrap();
    claim.sum().unwrap();
    let found = claim.checksum().expect("a checksum");
    assert_eq!(known.check(found).unwrap_err().kind, FailureKind::Corrupt);
    drop(known);
    assert_eq!(read(&ours, 1, None).unwrap_err(), FailureKind::Missing);
}

#[test]
fn what_one_worker_has_another_one_of_the_same_memory_takes() {
    let ours = tier();
    write(&ours, 1, None).unwrap().finish(true, None).unwrap();
    ours.write(2, &block(2), LAYER[0]).unwrap().finish(true, None).unwrap();
    let contents = ours.contents();
    assert_eq!(contents.len(), 1, "a part of a block is none: {contents:?}");
    assert_eq!((contents[0].block, contents[0].identity), (BlockId(1), block(1)));
    let sums = BlockChecksum::new([0; 16]);
    let theirs = Arc::new(HostTier::new([ours.bound().clone()], sums, VerifyHost::Always, false).unwrap());
    let beyond = HostContent { block: BlockId(9), ..contents[0] };
    theirs.adopt(&[contents[0], beyond]);
    assert_eq!(theirs.contents(), contents);
    assert_eq!(read(&theirs, 1, None).unwrap().verify(), Ok(true));
    assert_eq!(read(&theirs, 2, None).unwrap_err(), FailureKind::Corrupt);
}

#[test]
fn layers_gather_under_one_identity_only() {
    gather_layers(&tier());
    // Of tensors without axes each is a layer.
    gather_layers(&tier_of(OpaqueLayout::config_of(4, &[64, 3], 1).unwrap()));
}

fn gather_layers(tier: &Arc<HostTier>) {
    let [first, second] = LAYER.map(|layer| write(tier, 1, layer).unwrap());
    for layers in [None, LAYER[1]] {
        assert_eq!(write(tier, 1, layers).unwrap_err(), FailureKind::QueueFull);
    }
    assert_eq!(second.finish(true, None), Ok(None), "not whole yet");
    assert!(read(tier, 1, LAYER[1]).is_ok());
    assert_eq!(read(tier, 1, LAYER[0]).unwrap_err(), FailureKind::Missing);
    let whole = first.finish(true, None).unwrap().expect("the last layer completes the block");
    assert_eq!(read(tier, 1, None).unwrap().checksum(), Some(whole));
    write(tier, 2, LAYER[0]).unwrap().finish(true, None).unwrap();
    assert_eq!(read(tier, 2, None).unwrap_err(), FailureKind::Missing, "layer 1 is of another block");
    assert_eq!(read(tier, 1, LAYER[1]).unwrap_err(), FailureKind::Corrupt);
}

#[test]
fn a_condemned_slot_is_not_read_again_until_it_is_written() {
    let tier = tier();
    write(&tier, 1, None).unwrap().finish(true, None).unwrap();
    // SAFETY: nobody else touches the memory of this test.
    unsafe { tier.groups[0].regions[0].fill(tier.bound().bytes_per_block(), 1, 0xff) }.unwrap();
    let claim = read(&tier, 1, None).unwrap();
    assert_eq!(claim.verify().unwrap_err().kind, FailureKind::Corrupt);
    drop(claim);
    assert_eq!(read(&tier, 1, None).unwrap_err(), FailureKind::Missing);
    write(&tier, 1, None).unwrap().finish_verified(7);
    assert_eq!(read(&tier, 1, None).unwrap().checksum(), Some(7));
}

/// Mutation that makes it fail: a ring says `Corrupt`, which takes the source out of use.
#[test]
fn a_staging_slot_whose_bytes_changed_says_nothing_of_the_blocks_source() {
    let ring = HostTier::of_ring([tier().bound().clone()], BlockChecksum::new([0; 16])).unwrap();
    let ring = Arc::new(ring);
    write(&ring, 1, None).unwrap().finish(true, None).unwrap();
    let claim = read(&ring, 1, None).unwrap();
    assert_eq!(claim.verify_always(), Ok(()));
    // SAFETY: nobody else touches the memory of this test.
    unsafe { ring.groups[0].regions[0].fill(ring.bound().bytes_per_block(), 1, 0xff) }.unwrap();
    let failure = claim.verify_always().unwrap_err();
    assert_eq!(failure.kind, FailureKind::Device);
    assert!(failure.detail.contains("the staging ring"), "{failure}");
}
