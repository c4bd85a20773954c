//! G2 on this worker: identity and checksum of each slot, and its claims. So too of a staging ring
//! that blocks go down through.
//!
//! Every access of the worker to host memory happens under a claim, so that bytes are never read
//! while they are written, whatever the leader asks for. The table also catches what a checksum
//! alone cannot name: a slot that was swapped or is stale.
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `claims` | the rights to read and to write a slot | - |

mod claims;

use crate::config::{HostContent, VerifyHost};
use crate::error::StartError;
use crate::slot_layout::{disk_layout, layouts};
pub(crate) use claims::{ReadClaim, WriteClaim};
use kvbm_device::{DeviceError, HostRegion};
use kvbm_disk::{BlockChecksum, ContentCrc, IoFragments};
use kvbm_layout::{CopyPlan, Fragment, FragmentList, Selection};
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, LayerRange, Tier};
use kvbm_storage::{BoundLayout, RegionBytes};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

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
        0..self.bound.layout().config().separable_layers()
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
    /// What messages call it.
    place: &'static str,
    /// What a block whose bytes changed fails with. In a staging ring that says nothing of the
    /// block's source.
    damage: FailureKind,
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
        let (reads, place, damage) = (AtomicU64::new(0), "G2", FailureKind::Corrupt);
        Ok(Self { groups, sums, verify, reads, slots, claimed_elsewhere, place, damage })
    }

    /// The slots of a staging ring, which no plan names. Their bytes are on their way for a moment
    /// only: who writes them to a signed or encrypted disk, or to a volume, compares them.
    pub(crate) fn of_ring(
        rings: impl IntoIterator<Item = BoundLayout>,
        sums: BlockChecksum,
    ) -> Result<Self, StartError> {
        let (place, damage) = ("the staging ring", FailureKind::Device);
        Ok(Self { place, damage, ..Self::new(rings, sums, VerifyHost::Never, false)? })
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

    /// Whether these layouts, by cache group, are those of this tier, in the same memory.
    pub(crate) fn is_memory_of<'a>(&self, layouts: impl Iterator<Item = Option<&'a BoundLayout>>) -> bool {
        let starts = |regions: &[HostRegion]| -> Vec<_> {
            regions.iter().map(|region| (region.as_ptr(), region.len())).collect()
        };
        let is_same = |group: &HostGroup, bound: &BoundLayout| {
            group.bound.layout().config() == bound.layout().config()
                && host_regions(bound).is_some_and(|regions| starts(&regions) == starts(&group.regions))
        };
        let layouts: Vec<_> = layouts.collect();
        layouts.len() == self.groups.len()
            && self
                .groups
                .iter()
                .zip(layouts)
                .all(|(group, bound)| bound.is_some_and(|it| is_same(group, it)))
    }

    /// How checksums are bound to blocks.
    pub(crate) fn checksums(&self) -> BlockChecksum {
        self.sums
    }

    /// How blocks of group 0 lie there.
    pub(crate) fn bound(&self) -> &BoundLayout {
        &self.groups[0].bound
    }

    /// How blocks lie there, by group.
    pub(crate) fn layouts(&self) -> impl Iterator<Item = &BoundLayout> {
        self.groups.iter().map(|group| &group.bound)
    }

    /// The group of a block: plans of other groups are not admitted.
    fn group(&self, identity: &BlockIdentity) -> &HostGroup {
        &self.groups[usize::from(identity.group.0)]
    }

    /// Whether `plan`, into this tier, copies a block in the order in which its checksum takes the
    /// bytes.
    pub(crate) fn sums_in_order_of(&self, group: usize, plan: &CopyPlan) -> bool {
        let fragments = &self.groups[group].fragments;
        let (Ok(grids), Ok(fragments)) = (plan.grids(0, 0), fragments.fragments(0)) else { return false };
        let mut places = fragments.map(|fragment| (fragment.region, fragment.offset, fragment.len));
        let mut place = (0, 0, 0);
        for grid in grids {
            if place.2 == 0 {
                place = places.next().unwrap_or_default();
            }
            let bytes = grid.num_runs() * grid.run_bytes;
            if !grid.is_dense() || (grid.dst_region, grid.dst_offset) != (place.0, place.1) || bytes > place.2
            {
                return false;
            }
            place = (place.0, place.1 + bytes, place.2 - bytes);
        }
        place.2 == 0 && places.next().is_none()
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
        let place = self.place;
        let missing =
            |why: String| Failure::new(FailureKind::Missing, format!("slot {slot} of {place} {why}"));
        if state.is_written(&wanted) {
            return Err(missing("is being written".into()));
        }
        let checksum = match &state.content {
            Content::Empty | Content::Arriving => return Err(missing("holds no complete block".into())),
            Content::Filled { identity: held, .. } | Content::Partial { identity: held, .. }
                if held != identity =>
            {
                let why = format!(
                    "slot {slot} of {place} holds block {}, so it is stale or was swapped",
                    held.hash
                );
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
            let why =
                format!("slot {slot} of {} is in use by another plan: send this one `after` it", self.place);
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
        let detail =
            format!("slot {slot} of {} does not exist, it has {}", self.place, self.bound().num_blocks());
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
        let failed = |error: String| {
            Failure::new(FailureKind::Unsupported, format!("slot {slot} of {}: {error}", self.place))
        };
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
        io_memory(regions, fragments, slot).map_err(|why| {
            Failure::new(FailureKind::Unsupported, format!("slot {slot} of {}: {why}", self.place))
        })
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

#[cfg(test)]
mod tests;
