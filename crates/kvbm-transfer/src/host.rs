//! G2 on this worker: identity and checksum of each slot, and its claims.
//!
//! Every access of the worker to host memory happens under a claim, so that bytes are never read
//! while they are written, whatever the leader asks for. The table also catches what a checksum
//! alone cannot name: a slot that was swapped or is stale.

use crate::config::{HostContent, VerifyHost};
use crate::error::StartError;
use crate::slot_layout::{disk_layout, layouts};
use kvbm_device::{DeviceError, HostRegion};
use kvbm_disk::{BlockChecksum, ContentCrc, IoFragments};
use kvbm_layout::{CopyPlan, Fragment, FragmentList, Selection};
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, LayerRange, Tier};
use kvbm_storage::{BoundLayout, RegionBytes};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a slot holds.
#[derive(Debug, Default)]
enum Content {
    /// Nothing that may be read.
    #[default]
    Empty,
    /// Nothing yet: all of it is being written.
    Arriving,
    /// Some layers of a block.
    Partial { identity: BlockIdentity, arrived: Vec<bool> },
    /// A whole block; its checksum if it was computed.
    Filled { identity: BlockIdentity, checksum: Option<u64> },
}

#[derive(Debug, Default)]
struct Slot {
    content: Content,
    readers: u32,
    /// Layers that are being written, where it is not all of them.
    writing: Vec<Range<u32>>,
}

impl Slot {
    /// Whether any of `layers` is being written.
    fn is_written(&self, layers: &Range<u32>) -> bool {
        matches!(self.content, Content::Arriving) || self.writing.iter().any(|range| overlap(range, layers))
    }
}

/// How blocks of a cache group lie in host memory.
#[derive(Debug)]
struct HostGroup {
    bound: BoundLayout,
    regions: Vec<HostRegion>,
    fragments: FragmentList,
}

impl HostGroup {
    fn new(bound: BoundLayout) -> Result<Self, StartError> {
        let regions = host_regions(&bound).ok_or_else(|| {
            let rule = "must be host memory (system or pinned storage)";
            crate::config::bad("g2", bound.kind().to_string(), rule)
        })?;
        let on_disk =
            disk_layout(bound.layout().as_ref(), 1).map_err(|error| layouts(Tier::G2, Tier::G3, &error))?;
        let fragments = FragmentList::between(bound.layout().as_ref(), &on_disk, &Selection::all())
            .map_err(|error| layouts(Tier::G2, Tier::G3, &error))?;
        Ok(Self { bound, regions, fragments })
    }

    fn all_layers(&self) -> Range<u32> {
        0..self.bound.layout().config().num_layers
    }

    fn span(&self, layers: Option<LayerRange>) -> Range<u32> {
        layers.map_or_else(|| self.all_layers(), |range| range.first..range.first.saturating_add(range.count))
    }
}

/// Host memory of one worker. A slot holds a block of any cache group.
#[derive(Debug)]
pub(crate) struct HostTier {
    /// By id.
    groups: Vec<HostGroup>,
    sums: BlockChecksum,
    verify: VerifyHost,
    reads: AtomicU64,
    slots: Mutex<Vec<Slot>>,
    /// Another process keeps identities, checksums and claims: `slots` is empty.
    claimed_elsewhere: bool,
}

impl HostTier {
    pub(crate) fn new(
        groups: impl IntoIterator<Item = BoundLayout>,
        sums: BlockChecksum,
        verify: VerifyHost,
        claimed_elsewhere: bool,
    ) -> Result<Self, StartError> {
        let groups: Vec<_> = groups.into_iter().map(HostGroup::new).collect::<Result<_, _>>()?;
        let slots = groups.iter().map(|group| group.bound.num_blocks()).min().unwrap_or(0);
        let known = if claimed_elsewhere { 0 } else { slots };
        let slots = Mutex::new((0..known).map(|_| Slot::default()).collect());
        Ok(Self { groups, sums, verify, reads: AtomicU64::new(0), slots, claimed_elsewhere })
    }

    /// Takes blocks as there: another worker of the same memory has put them there. Those of slots
    /// beyond the last one are left out.
    pub(crate) fn adopt(&self, kept: &[HostContent]) {
        let mut slots = self.slots.lock();
        for HostContent { block, identity, checksum } in kept {
            if let Some(slot) = slots.get_mut(block.index()) {
                slot.content = Content::Filled { identity: *identity, checksum: Some(*checksum) };
            }
        }
    }

    /// Whole blocks with a checksum.
    pub(crate) fn contents(&self) -> Vec<HostContent> {
        let slots = self.slots.lock();
        let content = |(block, slot): (u32, &Slot)| match slot.content {
            Content::Filled { identity, checksum: Some(checksum) } => {
                Some(HostContent { block: BlockId(block), identity, checksum })
            }
            _ => None,
        };
        (0..).zip(slots.iter()).filter_map(content).collect()
    }

    /// How blocks of group 0 lie there.
    pub(crate) fn bound(&self) -> &BoundLayout {
        &self.groups[0].bound
    }

    /// The group of a block: plans of other groups are not admitted.
    fn group(&self, identity: &BlockIdentity) -> &HostGroup {
        &self.groups[usize::from(identity.group.0)]
    }

    /// Whether `plan`, into this tier, copies a block in the order in which its checksum takes the
    /// bytes.
    pub(crate) fn sums_in_order_of(&self, group: usize, plan: &CopyPlan) -> bool {
        let fragments = &self.groups[group].fragments;
        let (Ok(runs), Ok(fragments)) = (plan.runs(0, 0), fragments.fragments(0)) else { return false };
        let mut places = fragments.map(|fragment| (fragment.region, fragment.offset, fragment.len));
        let mut place = (0, 0, 0);
        for run in runs {
            if place.2 == 0 {
                place = places.next().unwrap_or_default();
            }
            if (run.dst_region, run.dst_offset) != (place.0, place.1) || run.len > place.2 {
                return false;
            }
            place = (place.0, place.1 + run.len, place.2 - run.len);
        }
        place.2 == 0 && places.next().is_none()
    }

    /// Bytes of the longest block.
    pub(crate) fn bytes_per_block(&self) -> u64 {
        self.groups.iter().map(|group| group.bound.bytes_per_block()).max().unwrap_or(0)
    }

    /// Claims `layers` of `slot` for reading, if it holds `identity`.
    pub(crate) fn read(
        self: &Arc<Self>,
        slot: u32,
        identity: &BlockIdentity,
        layers: Option<LayerRange>,
    ) -> Result<ReadClaim, Failure> {
        let wanted = self.group(identity).span(layers);
        if self.is_elsewhere(slot) {
            return Ok(ReadClaim { tier: Arc::clone(self), slot, identity: *identity, checksum: None });
        }
        let mut slots = self.slots.lock();
        let Some(state) = slots.get_mut(slot as usize) else { return Err(self.no_slot(slot)) };
        let missing = |why: String| Failure::new(FailureKind::Missing, format!("slot {slot} of G2 {why}"));
        if state.is_written(&wanted) {
            return Err(missing("is being written".into()));
        }
        let checksum = match &state.content {
            Content::Empty | Content::Arriving => return Err(missing("holds no complete block".into())),
            Content::Filled { identity: held, .. } | Content::Partial { identity: held, .. }
                if held != identity =>
            {
                let why =
                    format!("slot {slot} of G2 holds block {}, so it is stale or was swapped", held.hash);
                return Err(Failure::new(FailureKind::Corrupt, why));
            }
            Content::Filled { checksum, .. } => *checksum,
            Content::Partial { arrived, .. } => {
                if let Some(layer) =
                    wanted.clone().find(|layer| !arrived.get(*layer as usize).copied().unwrap_or(false))
                {
                    return Err(missing(format!("has not got layer {layer}")));
                }
                None
            }
        };
        state.readers += 1;
        Ok(ReadClaim { tier: Arc::clone(self), slot, identity: *identity, checksum })
    }

    /// Claims `layers` of `slot` for writing `identity`. What the slot held is no longer readable.
    pub(crate) fn write(
        self: &Arc<Self>,
        slot: u32,
        identity: &BlockIdentity,
        layers: Option<LayerRange>,
    ) -> Result<WriteClaim, Failure> {
        let group = self.group(identity);
        let (span, all) = (group.span(layers), group.all_layers());
        if self.is_elsewhere(slot) {
            return Ok(WriteClaim { tier: Arc::clone(self), slot, identity: *identity, span, open: true });
        }
        let mut slots = self.slots.lock();
        let Some(state) = slots.get_mut(slot as usize) else { return Err(self.no_slot(slot)) };
        if state.readers > 0 || state.is_written(&span) {
            let why = format!("slot {slot} of G2 is in use by another plan: send this one `after` it");
            return Err(Failure::new(FailureKind::QueueFull, why));
        }
        match &mut state.content {
            whole if span == all => *whole = Content::Arriving,
            Content::Partial { identity: held, arrived } if held == identity => {
                for layer in span.clone() {
                    arrived[layer as usize] = false;
                }
            }
            other => *other = Content::Partial { identity: *identity, arrived: vec![false; all.len()] },
        }
        if span != all {
            state.writing.push(span.clone());
        }
        Ok(WriteClaim { tier: Arc::clone(self), slot, identity: *identity, span, open: true })
    }

    /// Whether another process has the claims on `slot`, which exists.
    fn is_elsewhere(&self, slot: u32) -> bool {
        self.claimed_elsewhere && slot < self.bound().num_blocks()
    }

    fn no_slot(&self, slot: u32) -> Failure {
        let detail = format!("slot {slot} of G2 does not exist, it has {}", self.bound().num_blocks());
        Failure::new(FailureKind::Unsupported, detail)
    }

    /// What `slot` holds is not read again.
    fn forget(&self, slot: u32) {
        if let Some(slot) = self.slots.lock().get_mut(slot as usize) {
            slot.content = Content::Empty;
        }
    }

    /// Checksum of the whole slot, in the byte order of the disk.
    ///
    /// # Safety
    /// The caller holds a claim that keeps writers away from all of `slot` (a read claim of a
    /// filled slot, or the only write claim after its copy is complete).
    unsafe fn checksum(&self, slot: u32, identity: &BlockIdentity) -> Result<u64, Failure> {
        let failed =
            |error: String| Failure::new(FailureKind::Unsupported, format!("slot {slot} of G2: {error}"));
        let mut content = ContentCrc::new();
        let group = self.group(identity);
        for fragment in group.fragments.fragments(slot).map_err(|error| failed(error.to_string()))? {
            let region = &group.regions[fragment.region as usize];
            // SAFETY: no writer of these bytes, by the contract of this function.
            let bytes = unsafe { region.bytes(fragment.offset, fragment.len) };
            content.update(bytes.map_err(|error| failed(error.to_string()))?);
        }
        Ok(self.sums.bind(identity, content.finish()))
    }

    /// The memory of `slot`, where the block is, in the byte order of the disk.
    fn io_memory(&self, slot: u32, identity: &BlockIdentity) -> Result<IoFragments, Failure> {
        let HostGroup { regions, fragments, .. } = self.group(identity);
        io_memory(regions, fragments, slot)
            .map_err(|why| Failure::new(FailureKind::Unsupported, format!("slot {slot} of G2: {why}")))
    }
}

/// The host memory behind a layout; `None` if any region lies elsewhere.
pub(crate) fn host_regions(bound: &BoundLayout) -> Option<Vec<HostRegion>> {
    let host = |memory: &RegionBytes| match memory {
        RegionBytes::Host(region) => Some(region.clone()),
        _ => None,
    };
    bound.memory().iter().map(host).collect()
}

/// Disk fragments over `slot`. Whoever submits them must hold a claim on the slot, and guard the
/// batch with what holds `regions`, until the completion.
pub(crate) fn io_memory(
    regions: &[HostRegion],
    fragments: &FragmentList,
    slot: u32,
) -> Result<IoFragments, String> {
    let mut wrong = None;
    let place = |fragment: Fragment| {
        let region = regions.get(fragment.region as usize).ok_or("a fragment lies in no region")?;
        let start = region.ptr_at(fragment.offset, fragment.len).map_err(|error| error.to_string())?;
        Ok((start, fragment.len as usize))
    };
    let runs = fragments.fragments(slot).map_err(|error| error.to_string())?;
    let runs = runs.map_while(|fragment| place(fragment).map_err(|why: String| wrong = Some(why)).ok());
    // SAFETY: `ptr_at` checked every run against a live region, which the guard of the caller's
    // batch keeps allocated; regions are initialised memory that any thread may use. The caller's
    // claim (a slot of G2, or a slot of its own staging ring) keeps others away from the bytes
    // until the completion.
    let memory = unsafe { IoFragments::from_raw(runs) };
    wrong.map_or_else(|| memory.ok_or_else(|| "its fragments are no memory".into()), Err)
}

/// Visits the pieces of `slot`: where each is in memory, and where in a block of the byte order of
/// `order`.
pub(crate) fn each_fragment(
    regions: &[HostRegion],
    order: &FragmentList,
    slot: u32,
    mut visit: impl FnMut(&HostRegion, u64, Range<usize>) -> Result<(), DeviceError>,
) -> Result<(), String> {
    for fragment in order.fragments(slot).map_err(|error| error.to_string())? {
        let start = fragment.slot_offset as usize;
        let region = regions.get(fragment.region as usize).ok_or("a fragment lies in no region")?;
        visit(region, fragment.offset, start..start + fragment.len as usize)
            .map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn overlap(a: &Range<u32>, b: &Range<u32>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The right to read (part of) a slot. Must outlive the copy.
#[derive(Debug)]
pub(crate) struct ReadClaim {
    tier: Arc<HostTier>,
    slot: u32,
    identity: BlockIdentity,
    checksum: Option<u64>,
}

impl ReadClaim {
    /// Checksum that the slot is known to have.
    pub(crate) fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    /// Whether the policy wants the bytes compared with their checksum this time.
    pub(crate) fn is_due(&self) -> bool {
        match self.tier.verify {
            VerifyHost::Never => false,
            VerifyHost::Always => true,
            VerifyHost::Sampled(every) => {
                self.tier.reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(u64::from(every))
            }
        }
    }

    /// Compares bytes and checksum if the policy asks for it. Returns whether it did.
    pub(crate) fn verify(&self) -> Result<bool, Failure> {
        let Some(expected) = self.checksum else { return Ok(false) };
        if self.is_due() { self.compare(expected).map(|()| true) } else { Ok(false) }
    }

    /// Whether another process knows what the slot should hold.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.tier.is_elsewhere(self.slot)
    }

    /// Computes the checksum of the whole block, for the process that knows what it should be.
    pub(crate) fn sum(&mut self) -> Result<(), Failure> {
        // SAFETY: this claim keeps writers away from the slot; where it is another process's, that
        // one does.
        self.checksum = Some(unsafe { self.tier.checksum(self.slot, &self.identity) }?);
        Ok(())
    }

    /// Compares the checksum that another process found as it copied the block. Returns whether the
    /// right one is known. A process that found another one may be wrong: so the bytes are looked
    /// at here too.
    pub(crate) fn check(&self, found: u64) -> Result<bool, Failure> {
        let Some(expected) = self.checksum else { return Ok(false) };
        if found != expected {
            self.compare(expected)?;
            let why = format!(
                "slot {} of G2: the engine's process read checksum {found:016x}, but {expected:016x} is there",
                self.slot
            );
            return Err(Failure::new(FailureKind::Device, why));
        }
        Ok(true)
    }

    /// Always compares bytes and checksum: for blocks that leave this machine.
    pub(crate) fn verify_always(&self) -> Result<(), Failure> {
        self.checksum.map_or(Ok(()), |expected| self.compare(expected))
    }

    fn compare(&self, expected: u64) -> Result<(), Failure> {
        // SAFETY: this claim is on a filled slot (only those have a checksum), so nobody writes any
        // of it.
        let found = unsafe { self.tier.checksum(self.slot, &self.identity) }?;
        if found == expected {
            return Ok(());
        }
        self.tier.forget(self.slot);
        let bytes = self.tier.group(&self.identity).bound.bytes_per_block();
        let why = format!(
            "slot {} of G2, bytes 0..{bytes}: checksum {found:016x}, but {expected:016x} was written; it is not read again",
            self.slot
        );
        Err(Failure::new(FailureKind::Corrupt, why))
    }

    /// Copies the block out, in the byte order of `order`.
    pub(crate) fn gather(&self, order: &FragmentList) -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; order.slot_bytes() as usize];
        let copied = each_fragment(
            &self.tier.group(&self.identity).regions,
            order,
            self.slot,
            |region, offset, place| {
                // SAFETY: this claim keeps writers away from the slot.
                unsafe { region.read_at(offset, &mut bytes[place]) }
            },
        );
        let failed = |why| Failure::new(FailureKind::Unsupported, format!("slot {} of G2: {why}", self.slot));
        copied.map(|()| bytes).map_err(failed)
    }

    /// Marks the slot as damaged: it is never read again.
    pub(crate) fn condemn(&self) {
        self.tier.forget(self.slot);
    }

    pub(crate) fn io_memory(&self) -> Result<IoFragments, Failure> {
        self.tier.io_memory(self.slot, &self.identity)
    }
}

impl Drop for ReadClaim {
    fn drop(&mut self) {
        // There is none where the claim is another process's.
        if let Some(slot) = self.tier.slots.lock().get_mut(self.slot as usize) {
            slot.readers -= 1;
        }
    }
}

/// The right to write (part of) a slot. Dropped unfinished, it leaves the slot without those
/// layers.
#[derive(Debug)]
pub(crate) struct WriteClaim {
    tier: Arc<HostTier>,
    slot: u32,
    identity: BlockIdentity,
    span: Range<u32>,
    open: bool,
}

impl WriteClaim {
    pub(crate) fn io_memory(&self) -> Result<IoFragments, Failure> {
        self.tier.io_memory(self.slot, &self.identity)
    }

    /// The bytes arrived, with a checksum that was verified on the way.
    pub(crate) fn finish_verified(mut self, checksum: u64) {
        self.close(true, Some(checksum));
    }

    /// The bytes arrived. With `compute`, a whole block gets its checksum now, from that of its
    /// `content` if that was computed on the way; it is returned. A block that came in parts gets
    /// it with the last part.
    pub(crate) fn finish(mut self, compute: bool, content: Option<u64>) -> Result<Option<u64>, Failure> {
        if self.span == self.tier.group(&self.identity).all_layers() {
            let checksum = match content {
                _ if !compute => None,
                Some(content) => Some(self.tier.sums.bind(&self.identity, content)),
                // SAFETY: this claim is on all layers and its copy is complete, so nobody writes
                // the slot.
                None => Some(unsafe { self.tier.checksum(self.slot, &self.identity) }?),
            };
            self.close(true, checksum);
            return Ok(checksum);
        }
        let complete = self.close(true, None);
        if !(complete && compute) {
            return Ok(None);
        }
        let claim = self.tier.read(self.slot, &self.identity, None)?;
        // SAFETY: `complete` says that the slot is filled, and `claim` keeps writers away.
        let checksum = unsafe { self.tier.checksum(self.slot, &self.identity) }?;
        let mut slots = self.tier.slots.lock();
        if let Content::Filled { checksum: known, .. } = &mut slots[self.slot as usize].content {
            *known = Some(checksum);
        }
        drop(slots);
        drop(claim);
        Ok(Some(checksum))
    }

    /// Ends the claim. Whether the slot holds the whole block now.
    fn close(&mut self, arrived: bool, checksum: Option<u64>) -> bool {
        self.open = false;
        let whole = self.span == self.tier.group(&self.identity).all_layers();
        let mut slots = self.tier.slots.lock();
        let Some(slot) = slots.get_mut(self.slot as usize) else { return arrived && whole };
        if whole {
            let filled = Content::Filled { identity: self.identity, checksum };
            slot.content = if arrived { filled } else { Content::Empty };
            return arrived;
        }
        if let Some(index) = slot.writing.iter().position(|range| *range == self.span) {
            slot.writing.swap_remove(index);
        }
        if !arrived {
            return false;
        }
        let Content::Partial { identity, arrived } = &mut slot.content else { return false };
        if *identity != self.identity {
            return false;
        }
        for layer in self.span.clone() {
            arrived[layer as usize] = true;
        }
        let complete = slot.writing.is_empty() && arrived.iter().all(|layer| *layer);
        if complete {
            slot.content = Content::Filled { identity: self.identity, checksum: None };
        }
        complete
    }
}

impl Drop for WriteClaim {
    fn drop(&mut self) {
        if self.open {
            self.close(false, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_layout::{AxisOrder, DType, FullyContiguous, LayoutConfig};
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
        unsafe { ours.groups[0].regions[0].fill(ours.bytes_per_block(), 1, 0xff) }.unwrap();
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
        let theirs =
            Arc::new(HostTier::new([ours.bound().clone()], sums, VerifyHost::Always, false).unwrap());
        let beyond = HostContent { block: BlockId(9), ..contents[0] };
        theirs.adopt(&[contents[0], beyond]);
        assert_eq!(theirs.contents(), contents);
        assert_eq!(read(&theirs, 1, None).unwrap().verify(), Ok(true));
        assert_eq!(read(&theirs, 2, None).unwrap_err(), FailureKind::Corrupt);
    }

    #[test]
    fn layers_gather_under_one_identity_only() {
        let tier = tier();
        let [first, second] = LAYER.map(|layer| write(&tier, 1, layer).unwrap());
        for layers in [None, LAYER[1]] {
            assert_eq!(write(&tier, 1, layers).unwrap_err(), FailureKind::QueueFull);
        }
        assert_eq!(second.finish(true, None), Ok(None), "not whole yet");
        assert!(read(&tier, 1, LAYER[1]).is_ok());
        assert_eq!(read(&tier, 1, LAYER[0]).unwrap_err(), FailureKind::Missing);
        let whole = first.finish(true, None).unwrap().expect("the last layer completes the block");
        assert_eq!(read(&tier, 1, None).unwrap().checksum(), Some(whole));
        write(&tier, 2, LAYER[0]).unwrap().finish(true, None).unwrap();
        assert_eq!(read(&tier, 2, None).unwrap_err(), FailureKind::Missing, "layer 1 is of another block");
        assert_eq!(read(&tier, 1, LAYER[1]).unwrap_err(), FailureKind::Corrupt);
    }

    #[test]
    fn a_condemned_slot_is_not_read_again_until_it_is_written() {
        let tier = tier();
        write(&tier, 1, None).unwrap().finish(true, None).unwrap();
        // SAFETY: nobody else touches the memory of this test.
        unsafe { tier.groups[0].regions[0].fill(tier.bytes_per_block(), 1, 0xff) }.unwrap();
        let claim = read(&tier, 1, None).unwrap();
        assert_eq!(claim.verify().unwrap_err().kind, FailureKind::Corrupt);
        drop(claim);
        assert_eq!(read(&tier, 1, None).unwrap_err(), FailureKind::Missing);
        write(&tier, 1, None).unwrap().finish_verified(7);
        assert_eq!(read(&tier, 1, None).unwrap().checksum(), Some(7));
    }
}
