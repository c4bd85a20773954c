//! Layouts without axes: places of tensors, aliases, copy plans.

use kvbm_layout::{
    AnyLayout, AxisOrder, BlockLayout, CopyPlan, FullyContiguous, LayoutConfig, LayoutDescriptor,
    LayoutError, MemoryKind, OpaqueLayout, OpaqueTensor, PlanError, RegionMemory, Selection, WireError,
    conformance,
};

const BLOCKS: u32 = 5;

fn tensor(region: u32, offset: u64, block_stride: u64, block_bytes: u32) -> OpaqueTensor {
    OpaqueTensor { region, offset, block_stride, block_bytes }
}

/// What engines have: name and tensors.
fn engines() -> Vec<(&'static str, Vec<OpaqueTensor>)> {
    vec![
        ("a tensor for each layer", (0..4).map(|region| tensor(region, 0, 64, 64)).collect()),
        ("layers packed into each block", (0..4).map(|layer| tensor(0, 64 * layer, 256, 64)).collect()),
        ("keys and values apart in one allocation", vec![tensor(0, 0, 64, 64), tensor(0, 320, 64, 64)]),
        (
            "an engine's block is two blocks of its kernels",
            vec![tensor(0, 0, 128, 128), tensor(1, 0, 128, 128)],
        ),
        ("a latent and its scales, padded", vec![tensor(0, 0, 96, 72), tensor(1, 8, 16, 3)]),
        ("recurrent state beside attention", vec![tensor(0, 0, 64, 64), tensor(1, 0, 1024, 1000)]),
        ("a view that begins late", vec![tensor(0, 4096, 64, 64)]),
    ]
}

#[test]
fn what_engines_have_conforms_and_copies_whole() {
    for (name, tensors) in engines() {
        let engine = OpaqueLayout::new(BLOCKS, tensors.clone()).unwrap();
        assert_eq!(conformance::check(&engine), Ok(()), "{name}");
        let bytes: Vec<_> = tensors.iter().map(|tensor| tensor.block_bytes).collect();
        let config = OpaqueLayout::config_of(9, &bytes, 512).unwrap();
        let slots = FullyContiguous::new(config, AxisOrder::Nhd).unwrap();
        let plan = CopyPlan::between(&engine, &slots, &Selection::all()).unwrap();
        let total: u64 = bytes.iter().map(|&bytes| u64::from(bytes)).sum();
        assert_eq!((plan.bytes_per_block(), engine.bytes_per_block()), (total, total), "{name}");
        // Every byte of every tensor goes to its place behind those of the tensors before it.
        let mut moved = vec![None; total as usize];
        plan.for_each_run(3, 7, |run| {
            for at in 0..run.len {
                let to = (run.dst_offset + at - 7 * slots.block_stride()) as usize;
                assert!(moved[to].replace((run.src_region, run.src_offset + at)).is_none(), "{name}");
            }
        })
        .unwrap();
        let mut at = 0;
        for tensor in &tensors {
            for byte in 0..u64::from(tensor.block_bytes) {
                let from = (tensor.region, tensor.offset + 3 * tensor.block_stride + byte);
                assert_eq!(moved[at], Some(from), "{name}, byte {at}");
                at += 1;
            }
        }
    }
}

/// Mutation that makes it fail: `selected_planes` begins at 0.
#[test]
fn a_tensor_is_a_layer_that_can_be_copied_by_itself() {
    for (name, tensors) in engines() {
        let engine = OpaqueLayout::new(BLOCKS, tensors.clone()).unwrap();
        let bytes: Vec<_> = tensors.iter().map(|tensor| tensor.block_bytes).collect();
        let slots =
            FullyContiguous::new(OpaqueLayout::config_of(9, &bytes, 512).unwrap(), AxisOrder::Nhd).unwrap();
        let count = tensors.len() as u32;
        assert_eq!((engine.config().num_layers, engine.config().separable_layers()), (1, count), "{name}");
        for (first, end) in (0..count).flat_map(|first| (first + 1..=count).map(move |end| (first, end))) {
            let selection = engine.config().select_layers(first, end - first);
            let plan = CopyPlan::between(&engine, &slots, &selection).unwrap();
            let mut moved = Vec::new();
            plan.for_each_run(3, 7, |run| {
                let to = run.dst_offset - 7 * slots.block_stride();
                moved.extend((0..run.len).map(|at| (to + at, run.src_region, run.src_offset + at)));
            })
            .unwrap();
            let mut expected = Vec::new();
            let mut place = 0;
            for (at, tensor) in (0..).zip(&tensors) {
                let from = tensor.offset + 3 * tensor.block_stride;
                let of_tensor =
                    (0..u64::from(tensor.block_bytes)).map(|byte| (place + byte, tensor.region, from + byte));
                expected.extend(of_tensor.filter(|_| (first..end).contains(&at)));
                place += u64::from(tensor.block_bytes);
            }
            moved.sort_unstable();
            assert_eq!(moved, expected, "{name}, tensors {first}..{end}");
            assert_eq!(plan.bytes_per_block(), expected.len() as u64);
        }
        for (first, len) in [(0, 0), (0, count + 1), (count, 1), (u32::MAX, 2)] {
            let selection = engine.config().select_layers(first, len);
            let error = CopyPlan::between(&engine, &slots, &selection).unwrap_err();
            assert!(matches!(error, PlanError::Range { axis: "planes", .. }), "{name}: {error}");
        }
    }
}

#[test]
fn tensors_that_share_bytes_are_refused() {
    for (name, tensors) in [
        ("the same twice", vec![tensor(0, 0, 64, 64), tensor(0, 0, 64, 64)]),
        ("a byte shared", vec![tensor(0, 0, 128, 64), tensor(0, 63, 128, 64)]),
        ("another group's pages overlaid", vec![tensor(0, 0, 64, 64), tensor(0, 0, 128, 128)]),
        ("a stride shorter than a block", vec![tensor(0, 0, 63, 64)]),
        ("no stride", vec![tensor(0, 0, 0, 64)]),
    ] {
        let error = OpaqueLayout::new(BLOCKS, tensors).unwrap_err();
        assert!(matches!(error, LayoutError::Overlap { .. }), "{name}: {error}");
    }
    OpaqueLayout::new(1, vec![tensor(0, 0, 0, 64)]).expect("one block needs no stride");
}

#[test]
fn shapes_that_are_none_are_refused_and_named() {
    let many = |count| (0..count).map(|region| tensor(region, 0, 8, 8)).collect::<Vec<_>>();
    let most = OpaqueLayout::MAX_TENSORS as u32;
    for (message, blocks, tensors) in [
        ("unless the layout has opaque planes", BLOCKS, vec![]),
        ("at most 1024", BLOCKS, many(most + 1)),
        ("num_blocks = 0", 0, many(1)),
        ("bytes_per_layer = 0", BLOCKS, vec![tensor(0, 0, 8, 0)]),
        ("region = 0: no tensor lies there", BLOCKS, vec![tensor(1, 0, 8, 8), tensor(1, 40, 8, 8)]),
        ("count = 4294967296", BLOCKS, vec![tensor(u32::MAX, 0, 8, 8)]),
        ("one region exceeds", BLOCKS, vec![tensor(0, u64::MAX, 8, 8)]),
        ("one region exceeds", BLOCKS, vec![tensor(0, 0, u64::MAX / 2, 8)]),
    ] {
        let error = OpaqueLayout::new(blocks, tensors).unwrap_err().to_string();
        assert!(error.contains(message), "expected `{message}`, found `{error}`");
    }
    OpaqueLayout::new(BLOCKS, many(most)).expect("the most there may be");
}

#[test]
fn other_tensors_are_not_copied_to_nor_cut_by_heads() {
    let layout = |bytes: &[u32]| -> FullyContiguous {
        FullyContiguous::new(OpaqueLayout::config_of(4, bytes, 1).unwrap(), AxisOrder::Nhd).unwrap()
    };
    let two = layout(&[64, 32]);
    for other in [&[32, 64][..], &[96], &[64, 32, 1], &[64, 33]] {
        let error = CopyPlan::between(&two, &layout(other), &Selection::all()).unwrap_err();
        assert!(matches!(error, PlanError::Mismatch { field: "planes", .. }), "{other:?}: {error}");
        assert_ne!(OpaqueLayout::fingerprint(&[64, 32]), OpaqueLayout::fingerprint(other));
    }
    let halves = LayoutConfig { num_heads: 2, inner_dim: 2, ..two.config().clone() };
    let halves = FullyContiguous::new(halves, AxisOrder::Nhd).unwrap();
    let error = CopyPlan::between(&halves, &halves, &Selection::all().heads(0, 0, 1)).unwrap_err();
    assert!(matches!(error, PlanError::PlaneSplit { .. }), "{error}");
}

#[test]
fn an_opaque_layout_is_written_and_read_as_its_strides() {
    let describe = |layout: &OpaqueLayout| {
        let memory = layout.regions().iter().map(|region| RegionMemory {
            kind: MemoryKind::File,
            device_id: 0,
            address: 0,
            bytes: region.bytes,
            base_offset: 0,
        });
        LayoutDescriptor::new(AnyLayout::describe(layout).unwrap(), memory.collect()).unwrap()
    };
    let layout = OpaqueLayout::new(BLOCKS, vec![tensor(0, 0, 96, 72), tensor(1, 8, 16, 3)]).unwrap();
    let read = LayoutDescriptor::decode(&describe(&layout).encode().unwrap()).unwrap();
    assert_eq!(read.layout().config(), layout.config());
    for cell in layout.config().cells() {
        assert_eq!(read.layout().view(0, cell), layout.view(0, cell));
    }
    let many = OpaqueLayout::new(BLOCKS, (0..256).map(|region| tensor(region, 0, 8, 8))).unwrap();
    assert!(matches!(describe(&many).encode(), Err(WireError::Planes { found: 256 })));
}
