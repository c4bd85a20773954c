//! Block sets survive the journey; anything else is refused, and nothing panics.

use crc_fast::{CrcAlgorithm, checksum};
use kvbm_nixl::{BlockSet, ImportError, Lease, MemoryKind, MemoryRegion, SerializedBlockSet, UnixMillis};
use kvbm_plan::{BlockSetId, HeadRange, LeaseId, NamespaceTag, NodeId, Rank, RankSlice, Replication};
use proptest::prelude::*;

const NOW: UnixMillis = UnixMillis(1_000);
const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([0x11; 16]);

fn set() -> BlockSet {
    BlockSet {
        id: BlockSetId(0x0807_0605_0403_0201),
        namespace: NAMESPACE,
        node: NodeId(0x21),
        slice: RankSlice {
            rank: Rank(3),
            first_layer: 16,
            num_layers: 8,
            heads: HeadRange { start: 4, count: 2 },
            replication: Replication::Replicated { writer: Rank(2) },
        },
        num_blocks: 1024,
        memory: MemoryKind::Vram { device: 5 },
        regions: vec![
            MemoryRegion { address: 0x7f00_0000_0000, length_bytes: 1 << 30 },
            MemoryRegion { address: 0x1000, length_bytes: 1 },
        ],
        layout: b"layout".to_vec(),
        agent: "worker-3".into(),
        agent_metadata: b"\x00\xff".to_vec(),
        lease: Lease { id: LeaseId(9), expires: UnixMillis(2_000) },
    }
}

fn import(bytes: Vec<u8>) -> Result<BlockSet, ImportError> {
    SerializedBlockSet::from_bytes(bytes).import(&NAMESPACE, NOW)
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
    let mut expected = b"kvbmbset\x01\x00\x01\x01\x05\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08".to_vec();
    expected.extend([0x11; 16]);
    expected.extend(b"\x21\0\0\0\x03\0\x02\0");
    expected.extend(b"\x10\0\0\0\x08\0\0\0\x04\0\0\0\x02\0\0\0\x00\x04\0\0");
    expected.extend(b"\x09\0\0\0\0\0\0\0\xd0\x07\0\0\0\0\0\0");
    expected.extend(b"\x08\0worker-3\x02\0\0\0\x00\xff");
    expected.extend(b"\x02\0\0\0\0\0\0\0\0\x7f\0\0\0\0\0\x40\0\0\0\0\0\x10\0\0\0\0\0\0\x01\0\0\0\0\0\0\0");
    expected.extend(b"\x06\0\0\0layout\0\0\0\0\0\0\0\0");
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
        assert!(
            matches!(error, ImportError::Truncated { .. } | ImportError::Field { .. }),
            "{length}: {error}"
        );
    }
    let error = import(sealed([&bytes[..], &[0; 3]].concat())).unwrap_err();
    assert!(matches!(error, ImportError::Trailing { extra: 3 }), "{error}");

    let with = |at: usize, new: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        import(sealed(bytes)).unwrap_err()
    };
    assert!(matches!(with(0, b"K"), ImportError::Magic { .. }));
    assert_eq!(with(8, &[2]), ImportError::Version { found: 2, known: 1 });
    let cases: [(usize, &[u8], &str); 12] = [
        (10, &[3], "memory kind"),
        (10, &[0], "memory kind"),
        (11, &[2], "replication"),
        (11, &[0], "replication"),
        (48, &[0xff; 4], "layers"),
        (52, &[0; 4], "layers"),
        (60, &[0; 4], "heads"),
        (64, &[0; 4], "number of blocks"),
        (84, &[0xff, 0xff], "agent name"),
        (86, &[0xff], "agent name"),
        (94, &[0xff; 4], "agent metadata"),
        (100, &[0xff; 4], "number of regions"),
    ];
    for (at, new, field) in cases {
        let error = with(at, new);
        assert_eq!(field_of(&error), field, "{error}");
    }
    assert_eq!(field_of(&with(104, &[0xff; 8])), "region", "it wraps around the address space");
    assert_eq!(field_of(&with(112, &[0; 8])), "region", "it is empty");
    assert_eq!(field_of(&with(136, &[0xff; 4])), "layout");

    let error = import(vec![0; (4 << 20) + 1]).unwrap_err();
    assert!(matches!(error, ImportError::TooLong { .. }), "{error}");
}

#[test]
fn other_namespaces_and_old_leases_are_refused() {
    let serialized = set().export().unwrap();
    let other = NamespaceTag::from_bytes([0x12; 16]);
    let error = serialized.import(&other, NOW).unwrap_err();
    assert_eq!(error, ImportError::Namespace { expected: other, found: NAMESPACE });
    assert!(error.to_string().contains("compare model, weights"), "{error}");

    assert!(serialized.import(&NAMESPACE, UnixMillis(1_999)).is_ok());
    for now in [2_000, u64::MAX] {
        let error = serialized.import(&NAMESPACE, UnixMillis(now)).unwrap_err();
        assert!(matches!(error, ImportError::Expired { lease: LeaseId(9), .. }), "{error}");
        assert!(error.to_string().contains("ask for a new one"), "{error}");
    }
}

#[test]
fn what_a_peer_would_refuse_is_not_exported() {
    let mut heads = set();
    heads.slice.heads.count = 0;
    let cases = [
        (heads, "heads"),
        (BlockSet { num_blocks: 0, ..set() }, "number of blocks"),
        (BlockSet { agent: String::new(), ..set() }, "agent name length"),
        (BlockSet { agent: "a".repeat(256), ..set() }, "agent name length"),
        (BlockSet { agent_metadata: vec![0; (1 << 20) + 1], ..set() }, "agent metadata length"),
        (BlockSet { layout: Vec::new(), ..set() }, "layout length"),
        (BlockSet { layout: vec![0; (1 << 20) + 1], ..set() }, "layout length"),
        (BlockSet { regions: Vec::new(), ..set() }, "number of regions"),
        (
            BlockSet { regions: vec![MemoryRegion { address: 0, length_bytes: 1 }; 4097], ..set() },
            "number of regions",
        ),
        (BlockSet { regions: vec![MemoryRegion { address: 1, length_bytes: u64::MAX }], ..set() }, "region"),
    ];
    for (set, field) in cases {
        assert_eq!(set.export().unwrap_err().field(), field);
    }
}

#[test]
fn the_largest_set_fits() {
    let largest = BlockSet {
        regions: vec![MemoryRegion { address: 0, length_bytes: 1 }; 4096],
        layout: vec![1; 1 << 20],
        agent: "a".repeat(255),
        agent_metadata: vec![2; 1 << 20],
        ..set()
    };
    assert_eq!(import(exported(&largest)), Ok(largest));
}

fn any_memory() -> impl Strategy<Value = MemoryKind> {
    prop_oneof![
        Just(MemoryKind::Dram),
        Just(MemoryKind::File),
        any::<u32>().prop_map(|device| MemoryKind::Vram { device })
    ]
}

fn any_slice() -> impl Strategy<Value = RankSlice> {
    let replication = prop_oneof![
        Just(Replication::None),
        any::<u16>().prop_map(|writer| Replication::Replicated { writer: Rank(writer) })
    ];
    (any::<u16>(), 0..1000_u32, 1..1000_u32, 0..1000_u32, 1..1000_u32, replication).prop_map(
        |(rank, first_layer, num_layers, start, count, replication)| RankSlice {
            rank: Rank(rank),
            first_layer,
            num_layers,
            heads: HeadRange { start, count },
            replication,
        },
    )
}

fn any_set() -> impl Strategy<Value = BlockSet> {
    let region = (0..u64::MAX / 2, 1..u64::MAX / 2)
        .prop_map(|(address, length_bytes)| MemoryRegion { address, length_bytes });
    (
        (any::<u64>(), any::<u32>(), 1..=u32::MAX, any::<u64>(), 1_001..=u64::MAX),
        any_slice(),
        any_memory(),
        prop::collection::vec(region, 1..20),
        prop::collection::vec(any::<u8>(), 1..200),
        prop::collection::vec(any::<u8>(), 0..50),
        "[a-zé-]{1,40}",
    )
        .prop_map(
            |(
                (id, node, num_blocks, lease, expires),
                slice,
                memory,
                regions,
                layout,
                agent_metadata,
                agent,
            )| {
                BlockSet {
                    id: BlockSetId(id),
                    namespace: NAMESPACE,
                    node: NodeId(node),
                    slice,
                    num_blocks,
                    memory,
                    regions,
                    layout,
                    agent,
                    agent_metadata,
                    lease: Lease { id: LeaseId(lease), expires: UnixMillis(expires) },
                }
            },
        )
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
