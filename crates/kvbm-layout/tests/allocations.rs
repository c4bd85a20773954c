//! Walking a plan allocates nothing, and reading hostile bytes allocates in proportion to their
//! length.
#![allow(clippy::unwrap_used, reason = "helpers of tests may unwrap as tests do")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell as StdCell;

use kvbm_layout::{
    AnyLayout, AxisOrder, BlockLayout, Cell, CellStrides, CopyPlan, DType, FragmentList, FullyContiguous,
    LayerSeparate, LayoutConfig, LayoutDescriptor, MemoryKind, OpaquePlane, OuterPlacement, RegionMemory,
    RegionSpec, Selection, StridedLayout,
};

thread_local! {
    static LIVE: StdCell<usize> = const { StdCell::new(0) };
    static PEAK: StdCell<usize> = const { StdCell::new(0) };
    static COUNT: StdCell<usize> = const { StdCell::new(0) };
}

/// The system allocator, counting the bytes of this thread.
struct Counting;

// SAFETY: every call goes to the system allocator with the caller's arguments; counting neither
// allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.get().wrapping_add(layout.size());
        LIVE.set(live);
        PEAK.set(PEAK.get().max(live));
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get().saturating_sub(layout.size()));
        // SAFETY: `pointer` came from `System.alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations and peak of additional bytes while `work` runs.
fn measured<T>(work: impl FnOnce() -> T) -> (T, usize, usize) {
    let (live, count) = (LIVE.get(), COUNT.get());
    PEAK.set(live);
    let done = work();
    (done, COUNT.get() - count, PEAK.get() - live)
}

fn shape(num_layers: u32, planes: usize) -> LayoutConfig {
    LayoutConfig {
        num_blocks: 4,
        num_layers,
        outer_dim: 8,
        page_size: 4,
        inner_dim: 16,
        value_inner_dim: None,
        dtype: DType::BF16,
        alignment: 1,
        num_heads: 4,
        planes: (0..planes).map(|index| OpaquePlane::new(format!("p{index}"), 2)).collect(),
    }
}

#[test]
fn walking_a_plan_allocates_nothing() {
    let src = LayerSeparate::new(shape(12, 2), AxisOrder::Nhd, OuterPlacement::PackedInHead).unwrap();
    let dst = FullyContiguous::new(shape(12, 2), AxisOrder::Universal).unwrap();
    let plan = CopyPlan::between(&src, &dst, &Selection::all()).unwrap();
    let list = FragmentList::between(&src, &dst, &Selection::all()).unwrap();
    let (bytes, allocations, _) = measured(|| {
        let mut bytes = 0;
        plan.for_each_run(3, 1, |run| bytes += run.len).unwrap();
        bytes += plan.grids(3, 1).unwrap().map(|grid| grid.num_runs() * grid.run_bytes).sum::<u64>();
        bytes += list.fragments(2).unwrap().map(|fragment| fragment.len).sum::<u64>();
        bytes + src.block_view(1, 2, Cell::Kv(0)).unwrap().cell.bytes()
    });
    assert_eq!(bytes, 3 * src.bytes_per_block() + 4 * 16 * 2);
    assert_eq!(allocations, 0);
}

/// The largest honest messages: most layers, cells and regions.
fn large() -> Vec<Vec<u8>> {
    let many = shape(4096, 8);
    let separate = LayerSeparate::new(many.clone(), AxisOrder::Nhd, OuterPlacement::BlockOuter).unwrap();
    let contiguous = FullyContiguous::new(many.clone(), AxisOrder::Universal).unwrap();
    let spec = RegionSpec { bytes: 1 << 20, alignment: 2 };
    let cells = (0..16)
        .map(|cell| CellStrides {
            region_per_layer: 1,
            offset: cell << 12,
            block_stride: 1 << 16,
            token_stride: 128,
            head_stride: 32,
            elem_stride: 2,
            ..CellStrides::default()
        })
        .collect();
    let strided = StridedLayout::new(many, vec![spec; 4096], cells).unwrap();
    let layouts: [AnyLayout; 3] = [separate.into(), contiguous.into(), strided.into()];
    let message = |layout: AnyLayout| {
        let memory: Vec<_> = layout
            .regions()
            .iter()
            .zip(0_u64..)
            .map(|(spec, index)| RegionMemory {
                kind: MemoryKind::Device,
                device_id: 0,
                address: index << 32,
                bytes: spec.bytes,
                base_offset: 0,
            })
            .collect();
        LayoutDescriptor::new(layout, memory).unwrap().encode().unwrap()
    };
    layouts.map(message).into()
}

#[test]
fn reading_allocates_in_proportion_to_the_message() {
    for message in large() {
        let (read, _, peak) = measured(|| LayoutDescriptor::decode(&message));
        assert!(read.is_ok());
        assert!(peak <= 64 * message.len() + (64 << 10), "{peak} bytes for a message of {}", message.len());

        // Counts that promise more than there is: at every 32-bit field of the header.
        let short = &message[..message.len().min(4096)];
        for at in (16..64).step_by(4) {
            for value in [u32::MAX, 1 << 24, 4096, 65_536] {
                let mut hostile = short.to_vec();
                hostile[12..16].copy_from_slice(&(short.len() as u32).to_le_bytes());
                hostile[at..at + 4].copy_from_slice(&value.to_le_bytes());
                let split = hostile.len() - 8;
                let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &hostile[..split]);
                hostile[split..].copy_from_slice(&sum.to_le_bytes());
                let (_, _, peak) = measured(|| LayoutDescriptor::decode(&hostile).is_ok());
                assert!(peak <= 64 * hostile.len() + (64 << 10), "{peak} bytes, field {at} = {value}");
            }
        }
    }
}
