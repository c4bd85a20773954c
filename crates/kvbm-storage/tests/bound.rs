//! Layouts bound to storage: fragments against every single byte of the views, and what must not be
//! bound.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvbm_layout::{
    AxisOrder, BlockLayout, DType, EngineRegions, FullyContiguous, InnerOrder, LayerSeparate, LayoutConfig,
    LayoutDescriptor, OpaquePlane, OuterPlacement, StridedLayout,
};
use kvbm_storage::{
    BoundLayout, DiskStorage, HugePages, RegionBinding, Storage, StorageError, StorageKind, SystemAllocator,
    SystemStorage,
};
use proptest::prelude::*;

fn config(
    layers: u32,
    outer: u32,
    page: u32,
    heads: u32,
    head_dim: u32,
    dtype: DType,
    plane: bool,
) -> LayoutConfig {
    let mut builder = LayoutConfig::builder()
        .num_blocks(4)
        .num_layers(layers)
        .outer_dim(outer)
        .page_size(page)
        .inner_dim(heads * head_dim)
        .num_heads(heads)
        .dtype(dtype)
        .alignment(64);
    if plane {
        builder = builder.plane(OpaquePlane::new("scales", 6));
    }
    builder.build().expect("a valid shape")
}

/// Every layout of a shape that there is.
fn layouts(config: &LayoutConfig) -> Vec<Arc<dyn BlockLayout>> {
    let mut all: Vec<Arc<dyn BlockLayout>> = Vec::new();
    let orders =
        [AxisOrder::Nhd, AxisOrder::Hnd, AxisOrder::Universal, AxisOrder::Operational(InnerOrder::Opaque)];
    for order in orders {
        all.extend(
            FullyContiguous::new(config.clone(), order)
                .map(|layout| Arc::new(layout) as Arc<dyn BlockLayout>),
        );
    }
    for order in [AxisOrder::Nhd, AxisOrder::Hnd] {
        for placement in [OuterPlacement::KvOuter, OuterPlacement::BlockOuter, OuterPlacement::PackedInHead] {
            let layout = LayerSeparate::new(config.clone(), order, placement);
            all.extend(layout.map(|layout| Arc::new(layout) as Arc<dyn BlockLayout>));
        }
    }
    for name in ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"] {
        for spread in [EngineRegions::One, EngineRegions::PerLayer] {
            let dense = LayoutConfig { alignment: 1, ..config.clone() };
            let order = name.parse().expect("a known order");
            let layout = StridedLayout::from_engine_order(dense, order, spread);
            all.extend(layout.map(|layout| Arc::new(layout) as Arc<dyn BlockLayout>));
        }
    }
    assert!(all.len() >= 10, "most layouts exist for every shape");
    all
}

/// (region, byte) of the whole payload of a block, element by element.
fn payload(layout: &dyn BlockLayout, block: u32) -> BTreeSet<(u32, u64)> {
    let mut bytes = BTreeSet::new();
    for layer in 0..layout.config().num_layers {
        for cell in layout.config().cells() {
            let view = layout.block_view(block, layer, cell).expect("in range");
            let at = view.cell;
            for token in 0..u64::from(at.tokens) {
                for head in 0..u64::from(at.heads) {
                    for elem in 0..at.elems {
                        let start = view.offset
                            + token * at.token_stride
                            + head * at.head_stride
                            + elem * at.elem_stride;
                        bytes.extend(
                            (start..start + u64::from(at.elem_bytes)).map(|byte| (view.region, byte)),
                        );
                    }
                }
            }
        }
    }
    bytes
}

fn check_fragments(layout: &Arc<dyn BlockLayout>) {
    let bound = BoundLayout::allocate(Arc::clone(layout), &SystemAllocator::default()).expect("memory");
    for block in 0..bound.num_blocks() {
        let fragments = bound.block_fragments(block).expect("in range");
        assert_eq!(fragments.len(), bound.fragments_per_block());
        for pair in fragments.windows(2) {
            let end = pair[0].offset + pair[0].len;
            assert!(
                pair[0].region < pair[1].region || end < pair[1].offset,
                "{layout:?}: {pair:?} are not in order, or could be one"
            );
        }
        let listed: BTreeSet<(u32, u64)> = fragments
            .iter()
            .flat_map(|part| (part.offset..part.offset + part.len).map(|byte| (part.region, byte)))
            .collect();
        assert_eq!(listed, payload(&**layout, block), "{layout:?}");
        assert_eq!(listed.len() as u64, bound.bytes_per_block());
    }
}

fn check_blocks_are_apart(layout: &Arc<dyn BlockLayout>) {
    let bound = BoundLayout::allocate(Arc::clone(layout), &SystemAllocator::default()).expect("memory");
    let len = bound.bytes_per_block() as usize;
    let content =
        |block: u32| -> Vec<u8> { (0..len).map(|at| (at as u8) ^ (block as u8 + 1) << 4).collect() };
    for block in 0..bound.num_blocks() {
        // SAFETY: the test alone touches these bytes now.
        unsafe { bound.write_block(block, &content(block)) }.expect("in range");
    }
    for block in 0..bound.num_blocks() {
        let mut bytes = vec![0; len];
        // SAFETY: the test alone touches these bytes now.
        unsafe { bound.read_block(block, &mut bytes) }.expect("in range");
        assert!(bytes == content(block), "{layout:?}: block {block}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 1 } else { 48 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fragments_are_the_payload(
        layers in 1_u32..4, outer in 1_u32..3, page in 1_u32..5, heads in 1_u32..4, head_dim in 1_u32..5,
        dtype in prop::sample::select(vec![DType::F8E4M3, DType::BF16, DType::F32]), plane in any::<bool>(),
    ) {
        for layout in layouts(&config(layers, outer, page, heads, head_dim, dtype, plane)) {
            check_fragments(&layout);
            check_blocks_are_apart(&layout);
        }
    }
}

fn example() -> LayoutConfig {
    config(3, 2, 4, 2, 8, DType::BF16, false)
}

fn layer_separate() -> Arc<dyn BlockLayout> {
    Arc::new(LayerSeparate::new(example(), AxisOrder::Nhd, OuterPlacement::KvOuter).expect("a layout"))
}

fn memory(len: u64) -> Arc<dyn Storage> {
    Arc::new(SystemStorage::new(len, 4096, HugePages::No).expect("memory"))
}

#[test]
#[cfg_attr(miri, ignore = "fallocate and statvfs do not exist there")]
fn one_file_under_two_names_is_one_file() {
    let layout = layer_separate();
    let bytes = layout.regions()[0].bytes;
    let directory = tempfile::tempdir().expect("a directory");
    let (name, alias) = (directory.path().join("slots"), directory.path().join("alias"));
    let first = Arc::new(DiskStorage::create(&name, 3 * bytes).expect("created"));
    std::fs::hard_link(&name, &alias).expect("linked");
    let second = Arc::new(DiskStorage::open(&alias, 3 * bytes).expect("opened"));
    let at = |offset: u64| {
        let binding = |storage: &Arc<DiskStorage>, offset| RegionBinding {
            storage: Arc::clone(storage) as Arc<dyn Storage>,
            offset,
        };
        let bindings = vec![binding(&first, 0), binding(&first, bytes), binding(&second, offset)];
        BoundLayout::bind(Arc::clone(&layout), bindings)
    };
    assert_eq!(at(bytes).err(), Some(StorageError::OverlappingRegions { first: 1, second: 2 }));
    assert!(at(2 * bytes).is_ok());
}

#[test]
fn regions_may_share_a_storage_but_no_byte() {
    let layout = layer_separate();
    let bytes = layout.regions()[0].bytes;
    let storage = memory(3 * bytes + 4096);
    let at = |offsets: [u64; 3]| -> Result<BoundLayout, StorageError> {
        let binding = |offset| RegionBinding { storage: Arc::clone(&storage), offset };
        BoundLayout::bind(Arc::clone(&layout), offsets.map(binding).into())
    };
    let bound = at([bytes * 2, 4096 + bytes * 2, 0]).expect("apart, in any order");
    assert_eq!(bound.address(0, 8, 8), Ok(storage.address() + bytes * 2 + 8));
    assert_eq!(at([0, bytes, bytes]).err(), Some(StorageError::OverlappingRegions { first: 1, second: 2 }));
    assert_eq!(
        at([0, bytes, 2 * bytes - 64]).err(),
        Some(StorageError::OverlappingRegions { first: 1, second: 2 })
    );
    let beyond = at([0, bytes, 2 * bytes + 4096 + 64]).expect_err("64 bytes too many");
    assert_eq!(
        beyond,
        StorageError::RegionFit { region: 2, what: "bytes", found: bytes - 64, needed: bytes }
    );
    let crooked = at([0, bytes, 2 * bytes + 32]).expect_err("regions are aligned to 64");
    let (what, found) = ("alignment of the address", 32);
    assert_eq!(crooked, StorageError::RegionFit { region: 2, what, found, needed: 64 });
    assert!(matches!(at([0, bytes, u64::MAX]), Err(StorageError::RegionFit { found: 0, .. })));
}

#[test]
fn every_region_needs_its_place() {
    let layout = layer_separate();
    let one = vec![RegionBinding::new(memory(1 << 20))];
    let error = BoundLayout::bind(layout, one).expect_err("one for three");
    assert_eq!(error, StorageError::RegionCount { regions: 3, storages: 1 });
}

#[test]
fn addresses_and_buffers_are_checked() {
    let bound = BoundLayout::allocate(layer_separate(), &SystemAllocator::default()).expect("memory");
    let bytes = bound.layout().regions()[0].bytes;
    assert!(bound.address(0, bytes - 1, 1).is_ok());
    for (region, offset, len) in [(0, bytes, 1), (0, u64::MAX, 2), (3, 0, 1)] {
        assert!(bound.address(region, offset, len).is_err(), "{region} {offset} {len}");
    }
    let mut short = vec![0; bound.bytes_per_block() as usize - 1];
    // SAFETY: the test alone touches these bytes now.
    assert!(matches!(unsafe { bound.read_block(0, &mut short) }, Err(StorageError::Invalid { .. })));
    // SAFETY: the test alone touches these bytes now.
    assert!(matches!(unsafe { bound.write_block(0, &short) }, Err(StorageError::Invalid { .. })));
    short.push(0);
    // SAFETY: the test alone touches these bytes now.
    assert!(matches!(unsafe { bound.write_block(4, &short) }, Err(StorageError::Layout(_))));
    assert_eq!((bound.kind(), bound.device(), bound.num_blocks()), (StorageKind::System, None, 4));
}

#[test]
fn a_contiguous_block_is_one_fragment_and_layers_are_one_each() {
    let contiguous = FullyContiguous::new(example(), AxisOrder::Universal).expect("a layout");
    let bound = BoundLayout::allocate(Arc::new(contiguous), &SystemAllocator::default()).expect("memory");
    assert_eq!(bound.fragments_per_block(), 1);
    let count = |placement| {
        let layout = LayerSeparate::new(example(), AxisOrder::Hnd, placement).expect("a layout");
        let bound = BoundLayout::allocate(Arc::new(layout), &SystemAllocator::default()).expect("memory");
        bound.fragments_per_block()
    };
    assert_eq!(count(OuterPlacement::KvOuter), 6, "keys and values of each layer");
    assert_eq!(count(OuterPlacement::BlockOuter), 3, "keys beside values");
    assert_eq!(count(OuterPlacement::PackedInHead), 3);
}

#[test]
fn a_described_layout_binds_again() {
    for layout in layouts(&config(2, 2, 4, 2, 4, DType::BF16, true)) {
        let bound = BoundLayout::allocate(layout, &SystemAllocator::default()).expect("memory");
        let Ok(description) = bound.describe() else {
            let order = bound.layout().axis_order();
            assert_eq!(
                order,
                AxisOrder::Operational(InnerOrder::Opaque),
                "only undeclared orders may refuse"
            );
            continue;
        };
        let wire = description.encode().expect("small");
        let description = LayoutDescriptor::decode(&wire).expect("what was written");
        let storages: Vec<_> = bound.bindings().iter().map(|binding| Arc::clone(&binding.storage)).collect();
        let again = BoundLayout::from_description(&description, |region, described| {
            assert_eq!(described.address, storages[region as usize].address());
            Ok(Arc::clone(&storages[region as usize]))
        });
        let again = again.expect("the same storages");
        let content: Vec<u8> = (0..bound.bytes_per_block()).map(|at| at as u8).collect();
        // SAFETY: the test alone touches these bytes now.
        unsafe { bound.write_block(2, &content) }.expect("in range");
        let mut bytes = vec![0; content.len()];
        // SAFETY: the test alone touches these bytes now.
        unsafe { again.read_block(2, &mut bytes) }.expect("in range");
        assert_eq!(bytes, content);
    }
}

#[test]
fn a_description_is_not_bound_to_something_else() {
    let bound = BoundLayout::allocate(layer_separate(), &SystemAllocator::default()).expect("memory");
    let description = bound.describe().expect("a known layout");
    let bytes = bound.layout().regions()[0].bytes;
    let error = BoundLayout::from_description(&description, |_, _| Ok(memory(bytes + 1)));
    assert!(matches!(error, Err(StorageError::DescribedOtherwise { region: 0, .. })), "{error:?}");
    let refused = StorageError::Invalid { what: "region", value: 0, rule: "not here" };
    let error = BoundLayout::from_description(&description, |_, _| Err(refused.clone()));
    assert_eq!(error.err(), Some(refused));
}

#[cfg(not(miri))] // the emulated device's memfd does not exist there.
#[test]
fn regions_of_one_layout_lie_in_one_place() {
    use kvbm_device::{EmulatedConfig, EmulatedDevice};
    use kvbm_storage::DeviceStorage;
    let device = Arc::new(EmulatedDevice::new(EmulatedConfig::default()).expect("address space"));
    let layout = layer_separate();
    let bytes = layout.regions()[0].bytes;
    let on_device = || -> Arc<dyn Storage> {
        let device: Arc<dyn kvbm_device::Device> = device.clone();
        Arc::new(DeviceStorage::new(&*device, bytes, 4096).expect("memory"))
    };
    let mixed = [on_device(), on_device(), memory(bytes)].map(RegionBinding::new).into();
    let error =
        BoundLayout::bind(Arc::clone(&layout), mixed).expect_err("two on the device, one on the host");
    assert!(matches!(&error, StorageError::MixedRegions { region: 2, .. }), "{error}");
    let same = [on_device(), on_device(), on_device()].map(RegionBinding::new).into();
    let bound = BoundLayout::bind(layout, same).expect("all on the device");
    assert_eq!((bound.kind(), bound.device().map(|id| id.0)), (StorageKind::Device, Some(0)));
    // SAFETY: the test alone touches these bytes now.
    let refused = unsafe { bound.read_block(0, &mut vec![0; bound.bytes_per_block() as usize]) };
    assert!(matches!(refused, Err(StorageError::NotHostAccessible { .. })), "{refused:?}");
}
