//! Block sets survive the journey; anything else is refused, and nothing panics.

use crc_fast::{CrcAlgorithm, checksum};
use kvbm_layout::{
    AnyLayout, AxisOrder, DType, FullyContiguous, LayerSeparate, LayoutConfig, LayoutDescriptor, MemoryKind,
    OuterPlacement, RegionMemory, WireError,
};
use kvbm_nixl::{BlockSet, ExportError, ImportError, SerializedBlockSet};
use kvbm_plan::{BlockSetId, GroupId, HeadRange, NamespaceTag, NodeId, Rank, RankSlice, Replication};
use proptest::prelude::*;

const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([0x11; 16]);

fn config(num_layers: u32, num_heads: u32) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(10)
        .num_layers(num_layers)
        .outer_dim(2)
        .page_size(4)
        .inner_dim(num_heads * 8)
        .num_heads(num_heads)
        .dtype(DType::BF16)
        .alignment(64)
        .build()
        .expect("a small config")
}

fn described(layout: AnyLayout, kind: MemoryKind, device_id: u32) -> LayoutDescriptor {
    use kvbm_layout::BlockLayout;
    let region = |(index, bytes): (u64, u64)| {
        let address = if kind == MemoryKind::File { 0 } else { 0x7f00_0000_0000 + 0x1000_0000 * index };
        RegionMemory { kind, device_id, address, bytes, base_offset: 0 }
    };
    let memory = (0..).zip(layout.regions().iter().map(|spec| spec.bytes)).map(region).collect();
    LayoutDescriptor::new(layout, memory).expect("memory that fits")
}

fn layout(num_layers: u32, num_heads: u32) -> LayoutDescriptor {
    let layout = FullyContiguous::new(config(num_layers, num_heads), AxisOrder::Nhd).expect("a layout");
    described(AnyLayout::FullyContiguous(layout), MemoryKind::Device, 5)
}

fn set() -> BlockSet {
    BlockSet {
        id: BlockSetId(0x0807_0605_0403_0201),
        namespace: NAMESPACE,
        group: GroupId(0x0a0b),
        node: NodeId(0x21),
        slice: RankSlice {
            rank: Rank(3),
            first_layer: 16,
            num_layers: 8,
            heads: HeadRange { start: 4, count: 2 },
            replication: Replication::Replicated { writer: Rank(2) },
        },
        layout: layout(8, 2),
        agent: "worker-3".into(),
        agent_metadata: b"\x00\xff".to_vec(),
    }
}

fn import(bytes: Vec<u8>) -> Result<BlockSet, ImportError> {
    SerializedBlockSet::from_bytes(bytes).import(&NAMESPACE)
}

fn exported(set: &BlockSet) -> Vec<u8> {
    set.export().expect("a sound set").as_bytes().to_vec()
}

/// Puts the right checksum at the end, as a hostile peer would.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let body = bytes.len() - 8;
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes[..body]);
    bytes[body..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn field_of(error: &ImportError) -> &'static str {
    match error {
        ImportError::Field { field, .. } | ImportError::Truncated { field, .. } => field,
        _ => "",
    }
}

#[test]
fn golden_bytes() {
    let mut expected = b"kvbmbset\x02\x00\x0b\x0a\x03\0\x02\0\x01\0\0\0\x21\0\0\0".to_vec();
    expected.extend(b"\x01\x02\x03\x04\x05\x06\x07\x08");
    expected.extend([0x11; 16]);
    expected.extend(b"\x10\0\0\0\x08\0\0\0\x04\0\0\0\x02\0\0\0");
    expected.extend(b"\x08\0worker-3\x02\0\0\0\x00\xff");
    let layout = layout(8, 2).encode().unwrap();
    expected.extend((layout.len() as u32).to_le_bytes());
    expected.extend(layout);
    expected.extend([0; 8]);
    let expected = sealed(expected);
    assert_eq!(exported(&set()), expected);
    assert_eq!(import(expected), Ok(set()));
}

#[test]
fn every_cut_and_every_flipped_bit_is_refused() {
    let bytes = exported(&set());
    for length in 0..bytes.len() {
        assert!(import(bytes[..length].to_vec()).is_err(), "{length}");
    }
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(import(damaged).is_err(), "bit {bit}");
    }
}

#[test]
fn a_hostile_peer_with_right_checksums_is_refused() {
    let bytes = exported(&set());
    for length in 18..bytes.len() {
        let error = import(sealed(bytes[..length].to_vec())).unwrap_err();
        assert!(matches!(error, ImportError::Truncated { .. }), "{length}: {error}");
    }
    let error = import(sealed([&bytes[..], &[0; 3]].concat())).unwrap_err();
    assert!(matches!(error, ImportError::Trailing { extra: 3 }), "{error}");

    let with = |at: usize, new: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        import(sealed(bytes)).unwrap_err()
    };
    assert!(matches!(with(0, b"K"), ImportError::Magic { .. }));
    for other in [1, 3] {
        let found = u16::from(other);
        assert_eq!(with(8, &[other]), ImportError::Version { found, known: 2 });
    }
    let cases: [(usize, &[u8], &str); 12] = [
        (16, &[2], "replication"),
        (16, &[0], "replication"),
        (17, &[1], "replication"),
        (48, &[0xff; 4], "layers"),
        (52, &[0; 4], "layers"),
        (52, &[7], "layers"),
        (56, &[0xff; 4], "heads"),
        (60, &[0; 4], "heads"),
        (64, &[0xff, 0xff], "agent name"),
        (66, &[0xff], "agent name"),
        (74, &[0xff; 4], "agent metadata"),
        (80, &[0xff; 4], "layout"),
    ];
    for (at, new, field) in cases {
        let error = with(at, new);
        assert_eq!(field_of(&error), field, "{error}");
    }
    let error = with(84, b"X");
    assert_eq!(error, ImportError::Layout(WireError::Magic));
    let error = with(104, &[0xff]);
    assert!(matches!(error, ImportError::Layout(WireError::Checksum { .. })), "{error}");

    let error = import(vec![0; 6 << 20]).unwrap_err();
    assert!(matches!(error, ImportError::TooLong { .. }), "{error}");
}

#[test]
fn other_namespaces_are_refused() {
    let serialized = set().export().unwrap();
    let other = NamespaceTag::from_bytes([0x12; 16]);
    let error = serialized.import(&other).unwrap_err();
    assert_eq!(error, ImportError::Namespace { expected: other, found: NAMESPACE });
    assert!(error.to_string().contains("compare model, weights"), "{error}");
}

#[test]
fn what_a_peer_would_refuse_is_not_exported() {
    let mut heads = set();
    heads.slice.heads.count = 1;
    let mut layers = set();
    layers.slice.first_layer = u32::MAX;
    let cases = [
        (heads, "heads"),
        (layers, "layers"),
        (BlockSet { layout: layout(7, 2), ..set() }, "layers"),
        (BlockSet { agent: String::new(), ..set() }, "agent name length"),
        (BlockSet { agent: "a".repeat(256), ..set() }, "agent name length"),
        (BlockSet { agent_metadata: vec![0; (1 << 20) + 1], ..set() }, "agent metadata length"),
    ];
    for (set, expected) in cases {
        let error = set.export().unwrap_err();
        assert!(matches!(error, ExportError::Field { field, .. } if field == expected), "{error}");
    }
}

#[test]
fn the_longest_name_and_metadata_fit() {
    let largest = BlockSet { agent: "a".repeat(255), agent_metadata: vec![2; 1 << 20], ..set() };
    assert_eq!(import(exported(&largest)), Ok(largest));
}

fn any_layout(num_layers: u32, num_heads: u32) -> impl Strategy<Value = LayoutDescriptor> {
    let kind = prop::sample::select(&MemoryKind::ALL[..]);
    let order = prop::sample::select(vec![AxisOrder::Nhd, AxisOrder::Hnd, AxisOrder::Universal]);
    (any::<bool>(), kind, order, 0..8_u32).prop_map(move |(separate, kind, order, device)| {
        let config = config(num_layers, num_heads);
        let device = if kind == MemoryKind::Device { device } else { 0 };
        let layout = if separate {
            let placement = OuterPlacement::BlockOuter;
            AnyLayout::LayerSeparate(LayerSeparate::new(config, AxisOrder::Nhd, placement).expect("a layout"))
        } else {
            AnyLayout::FullyContiguous(FullyContiguous::new(config, order).expect("a layout"))
        };
        described(layout, kind, device)
    })
}

fn any_set() -> impl Strategy<Value = BlockSet> {
    let replication = prop_oneof![
        Just(Replication::None),
        any::<u16>().prop_map(|writer| Replication::Replicated { writer: Rank(writer) })
    ];
    let shape = (1..6_u32, 1..5_u32);
    shape.prop_flat_map(move |(num_layers, count)| {
        (
            (any::<u64>(), any::<u32>(), any::<u16>()),
            (any::<u16>(), 0..1000_u32, 0..1000_u32, replication.clone()),
            any_layout(num_layers, count),
            prop::collection::vec(any::<u8>(), 0..50),
            "[a-zé-]{1,40}",
        )
            .prop_map(move |((id, node, group), slice, layout, agent_metadata, agent)| {
                let (rank, first_layer, start, replication) = slice;
                let heads = HeadRange { start, count };
                BlockSet {
                    id: BlockSetId(id),
                    namespace: NAMESPACE,
                    group: GroupId(group),
                    node: NodeId(node),
                    slice: RankSlice { rank: Rank(rank), first_layer, num_layers, heads, replication },
                    layout,
                    agent,
                    agent_metadata,
                }
            })
    })
}

proptest! {
    #[test]
    fn sets_round_trip(set in any_set()) {
        prop_assert_eq!(import(exported(&set)), Ok(set));
    }

    #[test]
    fn arbitrary_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(import(bytes).is_err());
    }

    #[test]
    fn sealed_mutations_never_panic_and_stay_valid(
        set in any_set(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = exported(&set);
        let body = bytes.len() - 8;
        for (at, value) in changes {
            bytes[at.index(body)] = value;
        }
        if let Ok(read) = import(sealed(bytes.clone())) {
            prop_assert_eq!(exported(&read), sealed(bytes), "what is accepted has one form only");
        }
    }
}
