//! The wire form: round trips, a golden file, and bytes that are not ours.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use kvbm_plan::wire::{self, DecodeError, EncodeError};
use kvbm_plan::{
    BlockId, BlockIdentity, BlockOutcome, BlockTransfer, ChecksumMode, Command, Comparison, Elements,
    Endpoint, Epoch, Failure, FailureKind, FlushOutcome, Gate, GroupId, KeyNotice, LayerRange, Message,
    NamespaceId, Path, PlanError, PlanId, Priority, Rank, RecoveredBlock, SequenceHash, StoredBlock, Tier,
    TransferPlan, TransferReport, VolumeAnswer, VolumeDescriptor, VolumeId, VolumePlace, VolumeRequest,
};
use proptest::prelude::*;

const GOLDEN: &[u8] = include_bytes!("golden/transfer_v3.msgpack");

fn chain(blocks: u8) -> Vec<BlockIdentity> {
    let hashes: Vec<_> = (0..blocks).map(|byte| SequenceHash::from_bytes([byte; 16])).collect();
    BlockIdentity::chain(NamespaceId(5), GroupId(0), &hashes).collect()
}

fn plan(blocks: u8) -> TransferPlan {
    let transfer = |(index, identity)| BlockTransfer {
        identity,
        src: BlockId(index as u32),
        dst: BlockId(100 + index as u32),
    };
    TransferPlan {
        plan_id: PlanId(7),
        epoch: Epoch(3),
        group: GroupId(0),
        src: Endpoint::Local(Tier::G1),
        dst: Endpoint::Local(Tier::G2),
        blocks: chain(blocks).into_iter().enumerate().map(transfer).collect(),
        layers: Some(LayerRange { first: 1, count: 2 }),
        gate: Gate::Layer { iteration: 5, layer: 1 },
        after: vec![PlanId(6)],
        priority: Priority::Urgent,
        budget_ms: 250,
        checksums: ChecksumMode::Required,
        tag: 0,
        compare: None,
    }
}

fn stored() -> StoredBlock {
    let BlockIdentity { namespace, group, hash, .. } = plan(1).blocks[0].identity;
    StoredBlock { namespace, group, hash }
}

fn place() -> VolumePlace {
    VolumePlace::from(&VolumeDescriptor {
        capacity_bytes: Some(1 << 40),
        alignment: 4096,
        ..VolumeDescriptor::new(VolumeId(3), "s3://bucket/kv?credentials=env:STORE")
    })
}

fn volume_answer(answer: VolumeAnswer) -> Message {
    Message::Volume { rank: Rank(0), epoch: Epoch(3), token: 12, answer }
}

fn keys(volume: Option<VolumeId>, count: usize) -> Message {
    let key = KeyNotice { namespace: NamespaceId(6), id: [0xd4; 16], is_destroyed: volume.is_none() };
    Message::Keys { rank: Rank(1), epoch: Epoch(3), volume, keys: vec![key; count] }
}

fn messages() -> Vec<Message> {
    let corrupt = Failure::new(FailureKind::Corrupt, "slot 4: checksum");
    let report = TransferReport {
        plan_id: PlanId(7),
        epoch: Epoch(3),
        rank: Rank(1),
        path: Path::G3_G1,
        blocks: vec![BlockOutcome::Done { checksum: u64::MAX }, BlockOutcome::Failed(corrupt.clone())],
        bytes: 1 << 40,
        queued_us: 12,
        busy_us: 345,
    };
    let damaged = Message::Damaged {
        rank: Rank(1),
        epoch: Epoch(3),
        tier: Tier::G3,
        block: BlockId(4),
        identity: chain(1)[0],
        failure: corrupt.clone(),
    };
    let recovered = chain(3).into_iter().map(|identity| RecoveredBlock { block: BlockId(9), identity });
    vec![
        Message::Transfer(report),
        Message::Flushed {
            rank: Rank(0),
            epoch: Epoch(3),
            token: 4,
            outcome: FlushOutcome::Durable { blocks: 12 },
        },
        Message::Flushed { rank: Rank(0), epoch: Epoch(3), token: 4, outcome: FlushOutcome::Failed(corrupt) },
        volume_answer(VolumeAnswer::Present(vec![true, false])),
        volume_answer(VolumeAnswer::Removed(7)),
        volume_answer(VolumeAnswer::Listed(vec![stored()])),
        volume_answer(VolumeAnswer::Failed(Failure::new(FailureKind::Io, "refused"))),
        volume_answer(VolumeAnswer::Done),
        Message::Ready { rank: Rank(1), epoch: Epoch(3), volumes: true },
        Message::Recovered {
            rank: Rank(2),
            tier: Tier::G3,
            blocks: recovered.collect(),
            unusable: vec![BlockId(3), BlockId(u32::MAX)],
            last: true,
        },
        damaged,
        every_failure(),
        keys(None, 2),
        keys(Some(VolumeId(7)), 1),
    ]
}

/// A block for each kind: a new one is another wire form.
fn every_failure() -> Message {
    let failed = |kind| BlockOutcome::Failed(Failure::new(kind, "why"));
    Message::Transfer(TransferReport {
        plan_id: PlanId(7),
        epoch: Epoch(3),
        rank: Rank(1),
        path: Path::G3_G1,
        // Older readers know no `Differs`: it answers plans that compare, which are newer.
        blocks: FailureKind::ALL[..14].iter().copied().map(failed).collect(),
        bytes: 0,
        queued_us: 12,
        busy_us: 345,
    })
}

fn commands() -> Vec<Command> {
    vec![
        Command::Transfer(plan(5)),
        Command::Cancel { plan_id: PlanId(7) },
        Command::Advance { iteration: 9, layer: Some(3) },
        Command::Advance { iteration: 9, layer: None },
        Command::Release { tier: Tier::G3, blocks: vec![BlockId(1), BlockId(2)] },
        Command::Flush { token: 11 },
        Command::Volume {
            token: 12,
            volume: VolumeId(3),
            request: VolumeRequest::Probe(vec![plan(1).blocks[0].identity]),
        },
        Command::Volume {
            token: 13,
            volume: VolumeId(3),
            request: VolumeRequest::Discard(vec![plan(1).blocks[0].identity]),
        },
        Command::Volume {
            token: 14,
            volume: VolumeId(3),
            request: VolumeRequest::Purge(Some(NamespaceId(5))),
        },
        Command::Volume { token: 15, volume: VolumeId(3), request: VolumeRequest::List(Some(stored())) },
        Command::Volume { token: 16, volume: VolumeId(3), request: VolumeRequest::Register(place()) },
        Command::Volume { token: 17, volume: VolumeId(3), request: VolumeRequest::Unregister },
        Command::Volume {
            token: 18,
            volume: VolumeId(3),
            request: VolumeRequest::DiscardDamaged(vec![plan(1).blocks[0].identity]),
        },
        Command::Forget { tier: Tier::G3, namespace: NamespaceId(5) },
    ]
}

#[test]
fn every_kind_comes_back_as_it_went() {
    for command in commands() {
        let bytes = wire::encode_command(&command).unwrap();
        assert_eq!(wire::decode_command(&bytes).unwrap(), command);
    }
    for message in messages() {
        let bytes = wire::encode_message(&message).unwrap();
        assert_eq!(wire::decode_message(&bytes).unwrap(), message);
    }
}

#[test]
fn golden_plan_still_reads_and_writes_the_same() {
    let command = Command::Transfer(plan(3));
    assert_eq!(wire::encode_command(&command).unwrap(), GOLDEN, "the wire form changed: raise wire::VERSION");
    assert_eq!(wire::decode_command(GOLDEN).unwrap(), command);
}

/// Every kind of command and message, one per line in hexadecimal.
#[test]
fn golden_commands_and_messages_still_read_and_write_the_same() {
    let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat();
    let commands = commands().into_iter().map(|command| hex(wire::encode_command(&command).unwrap()));
    let messages = messages().into_iter().map(|message| hex(wire::encode_message(&message).unwrap()));
    let written: Vec<String> = commands.chain(messages).collect();
    let golden: Vec<&str> = include_str!("golden/messages_v3.hex").lines().collect();
    assert_eq!(written, golden, "the wire form changed: raise wire::VERSION");
}

#[test]
fn a_place_is_what_its_descriptor_says() {
    let described = place().describe(VolumeId(3));
    assert_eq!(VolumePlace::from(&described), place());
    assert_eq!((described.id, described.deadline), (VolumeId(3), std::time::Duration::from_secs(5)));
    let long = VolumePlace { uri: "x".repeat(VolumePlace::MAX_URI + 1), ..place() };
    let request = VolumeRequest::Register(long);
    let error =
        wire::encode_command(&Command::Volume { token: 1, volume: VolumeId(3), request }).unwrap_err();
    assert!(matches!(error, EncodeError::TooMany { len: 4097, max: 4096, .. }), "{error}");
}

#[test]
fn a_full_plan_fits_the_bound() {
    let mut full = plan(1);
    full.blocks = vec![full.blocks[0]; TransferPlan::MAX_BLOCKS];
    let bytes = wire::encode_command(&Command::Transfer(full)).unwrap();
    assert!(bytes.len() < wire::MAX_BYTES / 2, "{} bytes", bytes.len());
}

#[test]
fn another_version_is_named() {
    let mut bytes = wire::encode_command(&Command::Flush { token: 1 }).unwrap();
    assert_eq!(bytes[1], wire::VERSION as u8);
    bytes[1] = 9;
    let error = wire::decode_command(&bytes).unwrap_err();
    assert!(matches!(error, DecodeError::Version { found: 9 }), "{error}");
}

/// A leader that does not know them is told the version, not that the message is malformed.
#[test]
fn notices_of_keys_are_of_the_newest_version() {
    let bytes = wire::encode_message(&keys(Some(VolumeId(7)), 1)).unwrap();
    assert_eq!(bytes[1], wire::NEWEST as u8);
}

/// A plan without a tag is the golden one above: older readers know it.
#[test]
fn a_tag_is_of_a_newer_version_and_a_plan_without_one_has_none() {
    let tagged = Command::Transfer(TransferPlan { tag: 9, ..plan(3) });
    let bytes = wire::encode_command(&tagged).unwrap();
    assert_eq!((bytes[1], bytes.len()), (4, GOLDEN.len() + 1));
    assert_eq!(wire::decode_command(&bytes).unwrap(), tagged);
    assert_eq!(GOLDEN[1], wire::VERSION as u8);
    let Command::Transfer(old) = wire::decode_command(GOLDEN).unwrap() else { panic!("a plan") };
    assert_eq!(old.tag, 0);
}

/// A reader that does not know comparisons must not take one for a copy.
#[test]
fn a_comparison_is_of_the_newest_version_and_needs_a_tag() {
    let compare = Some(Comparison { elements: Elements::BF16, tolerance_ppm: 250_000 });
    let (dst, src) = (Endpoint::Local(Tier::G1), Endpoint::Local(Tier::G2));
    let audit = TransferPlan { compare, dst, src, tag: 1, ..plan(3) };
    let bytes = wire::encode_command(&Command::Transfer(audit.clone())).unwrap();
    assert_eq!(bytes[1], 5);
    assert_eq!(wire::decode_command(&bytes).unwrap(), Command::Transfer(audit.clone()));
    for broken in [TransferPlan { tag: 0, ..audit.clone() }, TransferPlan { dst: src, src: dst, ..audit }] {
        assert_eq!(broken.validate(), Err(PlanError::Comparison(PlanId(7))));
    }
}

#[test]
fn rules_hold_on_both_sides() {
    type Break = fn(&mut TransferPlan);
    let broken: [(Break, PlanError); 5] = [
        (|plan| plan.blocks.clear(), PlanError::Empty(PlanId(7))),
        (
            |plan| plan.blocks = vec![plan.blocks[0]; TransferPlan::MAX_BLOCKS + 1],
            PlanError::TooManyBlocks { plan_id: PlanId(7), blocks: TransferPlan::MAX_BLOCKS + 1 },
        ),
        (|plan| plan.dst = plan.src, PlanError::SameTier { plan_id: PlanId(7), tier: Tier::G1 }),
        (
            |plan| plan.blocks[1].identity.parent = None,
            PlanError::BadIdentity { plan_id: PlanId(7), index: 1, hash: SequenceHash::from_bytes([1; 16]) },
        ),
        (|plan| plan.layers = Some(LayerRange { first: 0, count: 0 }), PlanError::EmptyLayers(PlanId(7))),
    ];
    for (break_it, expected) in broken {
        let mut plan = plan(2);
        break_it(&mut plan);
        assert_eq!(plan.validate(), Err(expected));
        assert!(wire::encode_command(&Command::Transfer(plan)).is_err());
    }
    assert_eq!(plan(2).validate(), Ok(()));
}

/// The bytes of a sender that checks nothing.
fn unchecked<T: serde::Serialize>(body: &T) -> Vec<u8> {
    rmp_serde::to_vec(&wire::Envelope { version: wire::VERSION, body }).unwrap()
}

/// Each breaks one bound, with what is too long.
fn oversized_messages() -> Vec<(Message, &'static str)> {
    // The field is public: only `Failure::new` cuts.
    let wordy = Failure { kind: FailureKind::Io, detail: "x".repeat(Failure::MAX_DETAIL + 1) };
    let Message::Transfer(report) = messages().remove(0) else { panic!("a report comes first") };
    let blocks = vec![BlockOutcome::Done { checksum: 0 }; TransferPlan::MAX_BLOCKS + 1];
    let long = TransferReport { blocks, ..report.clone() };
    let talkative = TransferReport { blocks: vec![BlockOutcome::Failed(wordy.clone())], ..report };
    let recovered = RecoveredBlock { block: BlockId(9), identity: chain(1)[0] };
    let recovered = vec![recovered; Message::MAX_RECOVERED + 1];
    let found =
        |blocks, unusable| Message::Recovered { rank: Rank(0), tier: Tier::G3, blocks, unusable, last: true };
    vec![
        (Message::Transfer(long), "reported blocks"),
        (Message::Transfer(talkative), "bytes of a failure's detail"),
        (
            Message::Flushed {
                rank: Rank(0),
                epoch: Epoch(3),
                token: 4,
                outcome: FlushOutcome::Failed(wordy),
            },
            "bytes of a failure's detail",
        ),
        (found(recovered, Vec::new()), "recovered blocks"),
        (keys(None, Message::MAX_KEYS + 1), "data keys"),
        (
            volume_answer(VolumeAnswer::Present(vec![true; Command::MAX_VOLUME_BLOCKS + 1])),
            "blocks of a volume's answer",
        ),
        (found(Vec::new(), vec![BlockId(9); Message::MAX_RECOVERED + 1]), "unusable slots"),
    ]
}

#[test]
fn a_report_of_nothing_but_failures_fits_the_bound() {
    let Message::Transfer(mut report) = messages().remove(0) else { panic!("a report comes first") };
    let failure = Failure::new(FailureKind::ShuttingDown, "x".repeat(Failure::MAX_DETAIL));
    report.blocks = vec![BlockOutcome::Failed(failure); TransferPlan::MAX_BLOCKS];
    let bytes = wire::encode_message(&Message::Transfer(report)).unwrap();
    assert!(bytes.len() < wire::MAX_BYTES, "{} bytes", bytes.len());
    assert!(wire::decode_message(&bytes).is_ok());
}

#[test]
fn invariant_5_a_list_beyond_its_bound_is_refused() {
    let blocks = vec![BlockId(0); Command::MAX_RELEASE + 1];
    let release = Command::Release { tier: Tier::G3, blocks };
    let refused = wire::encode_command(&release).unwrap_err();
    assert!(matches!(refused, EncodeError::TooMany { len: 4097, max: 4096, .. }), "{refused}");
    let refused = wire::decode_command(&unchecked(&release)).unwrap_err();
    assert!(matches!(refused, DecodeError::TooMany { what: "released blocks", .. }), "{refused}");
    for (message, what) in oversized_messages() {
        let refused = wire::encode_message(&message).unwrap_err();
        assert!(refused.to_string().starts_with(what), "{refused}");
        let refused = wire::decode_message(&unchecked(&message)).unwrap_err();
        assert!(matches!(&refused, DecodeError::TooMany { what: found, .. } if *found == what), "{refused}");
    }
    let huge = vec![0x91; wire::MAX_BYTES + 1];
    assert!(matches!(wire::decode_message(&huge), Err(DecodeError::TooLong { .. })));
    let mut trailing = wire::encode_command(&Command::Flush { token: 1 }).unwrap();
    trailing.extend([0; 3]);
    assert!(matches!(wire::decode_command(&trailing), Err(DecodeError::Trailing { extra: 3 })));
}

#[test]
fn invariant_5_every_prefix_of_a_message_is_an_error() {
    let commands = commands().into_iter().map(|command| wire::encode_command(&command).unwrap());
    let messages = messages().into_iter().map(|message| wire::encode_message(&message).unwrap());
    for bytes in commands.chain(messages) {
        for end in 0..bytes.len() {
            assert!(wire::decode_command(&bytes[..end]).is_err());
            assert!(wire::decode_message(&bytes[..end]).is_err());
        }
    }
}

/// A list header that promises 2^32 - 1 items must not allocate for them.
#[test]
fn invariant_5_a_lying_length_does_not_allocate() {
    let mut bytes = vec![0x92, wire::VERSION as u8, 0x81];
    bytes.extend([0xa7]);
    bytes.extend(b"Release");
    bytes.extend([0x92, 0xa2]);
    bytes.extend(b"G3");
    bytes.extend([0xdd, 0xff, 0xff, 0xff, 0xff]);
    assert!(matches!(wire::decode_command(&bytes), Err(DecodeError::Malformed(_))));
}

#[test]
fn details_are_cut_at_a_character() {
    let failure = Failure::new(FailureKind::Io, "é".repeat(400));
    assert_eq!(failure.detail.len(), Failure::MAX_DETAIL);
    assert!(failure.to_string().contains("check the disk"));
}

proptest! {
    #[test]
    fn invariant_5_mutated_messages_never_panic(at in 0usize..400, value: u8, which in 0usize..6) {
        let mut bytes = wire::encode_command(&commands()[which]).unwrap();
        let index = at % bytes.len();
        bytes[index] = value;
        if let Ok(Command::Transfer(plan)) = wire::decode_command(&bytes) {
            prop_assert_eq!(plan.validate(), Ok(()));
        }
        let _ = wire::decode_message(&bytes);
    }

    #[test]
    fn invariant_5_random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
        prop_assert!(wire::decode_command(&bytes).is_err() || bytes.first() == Some(&0x92));
        let _ = wire::decode_message(&bytes);
    }
}
