//! Serialized layouts: one golden file per version, round trips, and hostile bytes.

use kvbm_layout::{
    AnyLayout, AxisOrder, BlockLayout, Cell, CellView, DType, EngineRegions, FullyContiguous, InnerOrder,
    LayerSeparate, LayoutConfig, LayoutDescriptor, LayoutError, LayoutType, MemoryKind, OpaquePlane,
    OuterPlacement, RegionMemory, RegionSpec, StridedLayout, WireError,
};
use proptest::prelude::*;

use crate::shapes::{Kind, any_config, any_kind, config, kinds, lay_out};

/// Memory that follows region after region, each in an allocation that is larger than it has to be.
fn memory_for(layout: &dyn BlockLayout, kind: MemoryKind) -> Vec<RegionMemory> {
    let mut next = 0x7f00_0000_0000;
    let mut memory = Vec::new();
    for spec in layout.regions() {
        let base_offset = spec.alignment * 2;
        let bytes = base_offset + spec.bytes + 100;
        let address = if kind == MemoryKind::File { 0 } else { next };
        memory.push(RegionMemory { kind, device_id: 3, address, bytes, base_offset });
        next = (next + bytes).next_multiple_of(1 << 20);
    }
    memory
}

fn descriptor(layout: &dyn BlockLayout, kind: MemoryKind) -> LayoutDescriptor {
    LayoutDescriptor::new(AnyLayout::describe(layout).unwrap(), memory_for(layout, kind)).unwrap()
}

fn golden() -> Vec<(&'static str, LayoutDescriptor)> {
    let shape = LayoutConfig { alignment: 64, ..config(10, 3, 16, 4, 8, DType::BF16) };
    let mut fp8 = LayoutConfig { dtype: DType::F8E4M3, value_inner_dim: Some(16), ..shape.clone() };
    fp8.planes = vec![OpaquePlane::new("k_scale", 64), OpaquePlane::new("v_scale", 64)];
    let engine = LayoutConfig { alignment: 1, ..shape.clone() };
    let contiguous = FullyContiguous::new(shape, AxisOrder::Universal).unwrap();
    let separate = LayerSeparate::new(fp8, AxisOrder::Hnd, OuterPlacement::KvOuter).unwrap();
    let strided =
        StridedLayout::from_engine_order(engine, "LBHNC".parse().unwrap(), EngineRegions::PerLayer).unwrap();
    vec![
        ("fully_contiguous", descriptor(&contiguous, MemoryKind::File)),
        ("layer_separate", descriptor(&separate, MemoryKind::Pinned)),
        ("strided", descriptor(&strided, MemoryKind::Device)),
    ]
}

fn golden_bytes(name: &str) -> Vec<u8> {
    let files = [
        ("fully_contiguous", include_str!("../golden/v1/fully_contiguous.hex")),
        ("layer_separate", include_str!("../golden/v1/layer_separate.hex")),
        ("strided", include_str!("../golden/v1/strided.hex")),
    ];
    let (_, text) = files.into_iter().find(|(file, _)| *file == name).unwrap();
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    let line = |chunk: &[u8]| chunk.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ");
    bytes.chunks(16).map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn golden_files_of_version_1() {
    for (name, descriptor) in golden() {
        let encoded = descriptor.encode().unwrap();
        assert_eq!(golden_bytes(name), encoded, "{name} is now written as\n{}", hex(&encoded));
        assert_eq!(LayoutDescriptor::decode(&golden_bytes(name)).unwrap(), descriptor, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_layout_round_trips(config in any_config(), kind in any_kind(), memory in prop::sample::select(MemoryKind::ALL.to_vec())) {
        let layout = lay_out(kind, &config);
        let written = descriptor(&*layout, memory);
        prop_assert_eq!(written.layout().layout_type(), layout.layout_type());
        let encoded = written.encode().unwrap();
        let read = LayoutDescriptor::decode(&encoded).unwrap();
        prop_assert_eq!(&read, &written);
        prop_assert_eq!(read.encode().unwrap(), encoded);
        for layer in 0..config.num_layers {
            for cell in config.cells() {
                prop_assert_eq!(read.layout().view(layer, cell), layout.view(layer, cell));
            }
        }
    }
}

/// Replaces the checksum by the right one, so that damage gets past it.
fn reseal(message: &mut [u8]) {
    if let Some(split) = message.len().checked_sub(8) {
        let (body, sum) = message.split_at_mut(split);
        sum.copy_from_slice(&crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, body).to_le_bytes());
    }
}

/// Whatever was accepted must be a sound layout that has exactly one encoding.
fn accepted_is_sound(message: &[u8]) {
    if let Ok(read) = LayoutDescriptor::decode(message) {
        assert_eq!(read.encode().unwrap(), message);
        for (spec, at) in read.layout().regions().iter().zip(read.memory()) {
            assert!(at.base_offset + spec.bytes <= at.bytes);
        }
        let config = read.layout().config().clone();
        let (layer, block) = (config.num_layers - 1, config.num_blocks - 1);
        for cell in config.cells() {
            let last = read.layout().block_view(block, layer, cell).unwrap();
            assert!(last.offset + last.cell.span() <= read.layout().regions()[last.region as usize].bytes);
        }
    }
}

#[test]
fn truncated_at_every_length() {
    for (name, _) in golden() {
        let whole = golden_bytes(name);
        for length in 0..whole.len() {
            assert!(LayoutDescriptor::decode(&whole[..length]).is_err(), "{name} cut to {length}");
            let mut cut = whole[..length].to_vec();
            if length >= 16 {
                cut[12..16].copy_from_slice(&(length as u32).to_le_bytes());
            }
            reseal(&mut cut);
            assert!(LayoutDescriptor::decode(&cut).is_err(), "{name} cut to {length} and sealed again");
        }
        let longer = [whole.as_slice(), &[0]].concat();
        assert!(matches!(LayoutDescriptor::decode(&longer), Err(WireError::Length { .. })));
    }
}

#[test]
fn every_flipped_bit_is_found() {
    for (name, _) in golden() {
        let whole = golden_bytes(name);
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(LayoutDescriptor::decode(&flipped).is_err(), "{name}, bit {bit}");
        }
    }
}

#[test]
fn every_byte_set_to_hostile_values_and_sealed_again() {
    for (name, _) in golden() {
        let whole = golden_bytes(name);
        for at in 0..whole.len() - 8 {
            for value in [0, 1, 2, 7, 8, 0x7f, 0x80, 0xfe, 0xff] {
                let mut hostile = whole.clone();
                hostile[at] = value;
                reseal(&mut hostile);
                accepted_is_sound(&hostile);
            }
        }
        // Every aligned word as the largest and the smallest number of its size.
        for at in (16..whole.len() - 12).step_by(4) {
            for word in
                [[0xff; 8], [0; 8], (i64::MAX as u64).to_le_bytes(), (u64::from(u32::MAX)).to_le_bytes()]
            {
                for width in [4, 8] {
                    let mut hostile = whole.clone();
                    hostile[at..at + width].copy_from_slice(&word[..width]);
                    reseal(&mut hostile);
                    accepted_is_sound(&hostile);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn random_damage_behind_a_valid_checksum(
        which in 0_usize..3, edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)
    ) {
        let mut hostile = golden_bytes(golden()[which].0);
        for (at, value) in edits {
            let at = at.index(hostile.len() - 8);
            hostile[at] = value;
        }
        reseal(&mut hostile);
        accepted_is_sound(&hostile);
    }

    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(LayoutDescriptor::decode(&bytes).is_err());
    }
}

/// `golden` with some bytes replaced, and the error that decoding gives.
fn error_of(name: &str, at: usize, bytes: &[u8]) -> String {
    let mut message = golden_bytes(name);
    message[at..at + bytes.len()].copy_from_slice(bytes);
    reseal(&mut message);
    LayoutDescriptor::decode(&message).unwrap_err().to_string()
}

#[test]
fn errors_name_the_field() {
    let fully = "fully_contiguous";
    let cases: [(&str, usize, &[u8], &str); 16] = [
        (fully, 0, b"X", "does not start with KVBMLAYT"),
        (fully, 8, &[2], "version 2 is not supported"),
        (fully, 10, &[1], "reserved = 1"),
        (fully, 12, &[0], "not the length"),
        (fully, 16, &[9], "layout type = 9"),
        (fully, 17, &[7], "axis order = 7"),
        (fully, 18, &[99], "dtype = 99"),
        (fully, 19, &[9], "serialized layout of"),
        (fully, 20, &11_u32.to_le_bytes(), "bytes of a region = "),
        (fully, 44, &5_u32.to_le_bytes(), "num_heads = 5: must divide inner_dim (32)"),
        (fully, 48, &48_u64.to_le_bytes(), "alignment = 48"),
        (fully, 56, &u32::MAX.to_le_bytes(), "number of regions = 4294967295"),
        (fully, 64, &[4], "memory kind = 4"),
        (fully, 64 + 16, &1_u64.to_le_bytes(), "memory of region 0: base_offset = 128"),
        (fully, 64 + 24, &63_u64.to_le_bytes(), "has to be aligned to 64"),
        ("layer_separate", 64 + 8 + 7, b"\xff", "planes.name"),
    ];
    for (name, at, bytes, message) in cases {
        let error = error_of(name, at, bytes);
        let utf8 = error.contains("length of a plane's name");
        assert!(
            error.contains(message) || (message == "planes.name" && utf8),
            "expected `{message}`, found `{error}`"
        );
    }
}

#[test]
fn a_plane_has_no_token_stride_and_no_other_encoding() {
    let shape =
        LayoutConfig { planes: vec![OpaquePlane::new("scale", 8)], ..config(2, 2, 2, 2, 2, DType::U8) };
    let order = "LBHNC".parse().unwrap();
    let layout = StridedLayout::from_engine_order(shape, order, EngineRegions::One).unwrap();
    let mut message = descriptor(&layout, MemoryKind::Pinned).encode().unwrap();
    assert!(LayoutDescriptor::decode(&message).is_ok());
    let token_stride = message.len() - 8 - 24;
    message[token_stride] = 8;
    reseal(&mut message);
    let error = LayoutDescriptor::decode(&message).unwrap_err().to_string();
    assert!(error.contains("strides of an opaque plane"), "{error}");
}

type Change = fn(&mut Vec<RegionMemory>);

#[test]
fn memory_must_hold_its_region() {
    let layout =
        lay_out(Kind::Layers(AxisOrder::Nhd, OuterPlacement::KvOuter), &config(2, 2, 2, 2, 2, DType::F32));
    let good = memory_for(&*layout, MemoryKind::Pinned);
    let make = |change: Change| {
        let mut memory = good.clone();
        change(&mut memory);
        LayoutDescriptor::new(AnyLayout::describe(&*layout).unwrap(), memory)
    };
    assert!(make(|_| ()).is_ok());
    let cases: [(&str, Change); 6] = [
        ("count = 1", |memory| memory.truncate(1)),
        ("region 1: base_offset", |memory| memory[1].base_offset += 101),
        ("region 0: base_offset", |memory| memory[0].base_offset = u64::MAX),
        ("wraps around", |memory| memory[1].address = u64::MAX),
        ("a file has address 0", |memory| memory[0].kind = MemoryKind::File),
        ("region 1: address + base_offset", |memory| {
            memory[1].address = memory[0].address + 4;
            memory[1].kind = MemoryKind::System;
        }),
    ];
    for (message, change) in cases {
        let error = make(change).unwrap_err().to_string();
        assert!(error.contains(message), "expected `{message}`, found `{error}`");
    }
    let other_device = make(|memory| {
        memory[1].address = memory[0].address;
        (memory[0].kind, memory[1].kind) = (MemoryKind::Device, MemoryKind::Device);
        memory[1].device_id = 4;
    });
    assert!(other_device.is_ok(), "devices have address spaces of their own");
}

/// A layout of somebody else: layers in an order of their own.
#[derive(Debug)]
struct Foreign {
    inner: FullyContiguous,
    layer_of: fn(u32) -> u32,
}

impl BlockLayout for Foreign {
    fn config(&self) -> &LayoutConfig {
        self.inner.config()
    }
    fn layout_type(&self) -> LayoutType {
        self.inner.layout_type()
    }
    fn axis_order(&self) -> AxisOrder {
        self.inner.axis_order()
    }
    fn regions(&self) -> &[RegionSpec] {
        self.inner.regions()
    }
    fn view(&self, layer: u32, cell: Cell) -> Result<CellView, LayoutError> {
        self.inner.view((self.layer_of)(layer), cell)
    }
}

#[test]
fn foreign_layouts_are_described_by_their_strides_or_refused() {
    let inner = || FullyContiguous::new(config(2, 4, 2, 2, 2, DType::F16), AxisOrder::Nhd).unwrap();
    let same = AnyLayout::describe(&Foreign { inner: inner(), layer_of: |layer| layer }).unwrap();
    assert_eq!(same, inner().into());
    let shuffled = Foreign {
        inner: inner(),
        layer_of: |layer| [0, 1, 3, 2].get(layer as usize).copied().unwrap_or(layer),
    };
    let error = AnyLayout::describe(&shuffled).unwrap_err();
    assert!(error.to_string().contains("equal distances"), "{error}");
    let backwards = Foreign { inner: inner(), layer_of: |layer| 3_u32.wrapping_sub(layer) };
    assert!(AnyLayout::describe(&backwards).unwrap_err().to_string().contains("grow with the layer"));
}

#[test]
fn every_kind_and_an_undeclared_inner_order_are_describable() {
    for kind in kinds() {
        let layout = lay_out(kind, &config(2, 3, 4, 2, 8, DType::BF16));
        let described = AnyLayout::describe(&*layout).unwrap();
        assert_eq!(
            (described.layout_type(), described.axis_order()),
            (layout.layout_type(), layout.axis_order())
        );
    }
    let order = AxisOrder::Operational(InnerOrder::Opaque);
    let opaque = FullyContiguous::new(config(2, 3, 4, 2, 8, DType::BF16), order).unwrap();
    let written = descriptor(&opaque, MemoryKind::System);
    assert_eq!(LayoutDescriptor::decode(&written.encode().unwrap()), Ok(written));
}
