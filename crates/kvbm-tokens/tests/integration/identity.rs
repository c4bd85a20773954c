//! Namespaces, their errors, and the forms of identifiers.

use std::collections::BTreeSet;
use std::str::FromStr;

use kvbm_tokens::{
    ChainRoot, ExtraKey, ExtraKeyError, HashAlgorithm, MAX_EXTRA_KEY_BYTES, MAX_TOKENS, Namespace,
    NamespaceError, NamespaceTag, SequenceError, SequenceHash, TokenSequence,
};

fn base() -> Namespace {
    Namespace::new("model").page_size(16)
}

#[test]
fn every_field_of_a_namespace_changes_its_tag() {
    let variants = [
        base(),
        Namespace::new("model2").page_size(16),
        base().page_size(32),
        base().weights("a"),
        base().dtype("a"),
        base().rope_scaling("a"),
        base().rope_scaling(""),
        base().kv_quantization("a"),
        base().adapter("a"),
        base().tenant_salt("a"),
        base().deployment_secret("a"),
        base().deployment_secret(""),
        base().algorithm(HashAlgorithm::Xxh3_128),
        base().chain_root(ChainRoot::External(b"a".to_vec())),
        base().chain_root(ChainRoot::External(Vec::new())),
        base().chain_root(ChainRoot::PerProcess(b"a".to_vec())),
        // The same bytes, divided differently.
        base().weights("ab").dtype("c"),
        base().weights("a").dtype("bc"),
    ];
    let tags: BTreeSet<NamespaceTag> = variants.iter().map(Namespace::tag).collect();
    assert_eq!(tags.len(), variants.len());
    let hashes: BTreeSet<SequenceHash> =
        variants.iter().map(|ns| ns.hasher().expect("usable").hash_block(None, &[1; 16], &[])).collect();
    assert_eq!(hashes.len(), variants.len());
}

#[test]
fn unusable_namespaces_say_what_to_do() {
    let cases = [
        (Namespace::new("").page_size(16), NamespaceError::EmptyModel, "give the name"),
        (Namespace::new("m"), NamespaceError::NoPageSize { model: "m".into() }, "call page_size"),
        (base().page_size(0), NamespaceError::PageSize { model: "model".into(), value: 0 }, "page_size 0"),
        (
            base().page_size(u32::MAX),
            NamespaceError::PageSize { model: "model".into(), value: u32::MAX },
            "page_size 4294967295",
        ),
    ];
    for (namespace, error, part) in cases {
        let got = namespace.hasher().expect_err("unusable");
        assert_eq!(got, error);
        assert!(got.to_string().contains(part), "{got}");
    }
}

#[test]
fn a_root_that_changes_per_process_refuses_persistence() {
    let fixed = base().chain_root(ChainRoot::External(vec![1]));
    assert!(fixed.is_persistable());
    assert_eq!(fixed.check_persistable(), Ok(()));
    assert!(fixed.hasher().expect("usable").is_persistable());

    let changing = base().chain_root(ChainRoot::PerProcess(vec![1]));
    assert!(!changing.is_persistable());
    assert!(!changing.hasher().expect("usable").is_persistable());
    let error = changing.check_persistable().expect_err("not persistable").to_string();
    assert!(error.contains("\"model\"") && error.contains("fixed hash seed"), "{error}");
}

#[test]
fn salt_and_secret_are_not_printed() {
    let shown = format!("{:?}", base().tenant_salt("TENANTSALT").deployment_secret("SECRET").weights("w7"));
    assert!(shown.contains("w7"), "{shown}");
    let key = ExtraKey::salt(b"SECRET").expect("short");
    assert_eq!(format!("{key:?}"), "ExtraKey(salt, 7 bytes)");
    let bytes = [format!("{:?}", b"TENANTSALT"), format!("{:?}", b"SECRET")];
    for hidden in ["TENANTSALT", "SECRET", bytes[0].as_str(), bytes[1].as_str()] {
        assert!(!shown.contains(hidden), "{shown}");
    }
}

#[test]
fn hash_forms_round_trip() {
    let hash = SequenceHash::from_bytes(*b"0123456789abcdef");
    let text = "30313233343536373839616263646566";
    assert_eq!(hash.to_string(), text);
    assert_eq!(format!("{hash:?}"), format!("SequenceHash({text})"));
    assert_eq!(SequenceHash::from_str(text), Ok(hash));
    assert_eq!(SequenceHash::from_str(&text.to_uppercase()), Ok(hash));
    assert_eq!(hash.to_u128().to_le_bytes(), *hash.as_bytes());

    assert_eq!(serde_json::to_string(&hash).expect("JSON"), format!("\"{text}\""));
    assert_eq!(serde_json::from_str::<SequenceHash>(&format!("\"{text}\"")).expect("JSON"), hash);

    let packed = rmp_serde::to_vec(&hash).expect("msgpack");
    assert_eq!(packed, [&[0xc4, 16], hash.as_bytes().as_slice()].concat());
    assert_eq!(rmp_serde::from_slice::<SequenceHash>(&packed).expect("msgpack"), hash);
}

#[test]
fn malformed_hashes_are_refused() {
    for text in [
        "",
        "30",
        "3031323334353637383961626364656",
        "3031323334353637383961626364656g",
        "é313233343536373839616263646566",
    ] {
        let error = SequenceHash::from_str(text).expect_err(text).to_string();
        assert!(error.contains("SequenceHash: expected 32 hexadecimal digits"), "{error}");
        assert!(serde_json::from_str::<SequenceHash>(&format!("{text:?}")).is_err());
    }
    let long = "x".repeat(10_000);
    assert!(SequenceHash::from_str(&long).expect_err("long").to_string().len() < 200);
    for length in [0_usize, 15, 17, 300] {
        let packed = rmp_serde::to_vec(&vec![1_u8; length]).expect("msgpack array");
        assert!(rmp_serde::from_slice::<NamespaceTag>(&packed).is_err(), "{length}");
    }
    let array = rmp_serde::to_vec(&vec![7_u8; 16]).expect("msgpack array");
    assert_eq!(
        rmp_serde::from_slice::<NamespaceTag>(&array).expect("16 numbers"),
        NamespaceTag::from_bytes([7; 16])
    );
}

#[test]
fn extra_keys_come_before_their_block_is_complete() {
    let hasher = base().page_size(4).hasher().expect("usable");
    let mut sequence = TokenSequence::from_tokens(hasher, &[0; 9]);
    let before = sequence.clone();
    let key = ExtraKey::prompt_embeddings(b"e");
    let error = sequence.add_extra_key(5, key.clone()).expect_err("block 1 is complete");
    assert_eq!(error, SequenceError::BlockComplete { at: 5, block: 1, first_token: 4 });
    assert!(error.to_string().contains("truncate to 4 tokens"), "{error}");
    assert!(sequence.add_image(7..12, b"i").is_err());
    let length = MAX_EXTRA_KEY_BYTES + 1;
    let what = "image content hash";
    assert_eq!(
        sequence.add_image(9..12, &vec![0; length]),
        Err(SequenceError::ExtraKey(ExtraKeyError::TooLong { what, length }))
    );
    for span in [0..MAX_TOKENS + 1, MAX_TOKENS + 5..usize::MAX] {
        assert_eq!(sequence.add_image(span.clone(), b"i"), Err(SequenceError::BeyondEnd { at: span.end }));
    }
    assert_eq!(
        sequence.add_extra_key(usize::MAX, key.clone()),
        Err(SequenceError::BeyondEnd { at: usize::MAX })
    );
    assert_eq!(sequence, before, "refused keys leave no trace");

    sequence.add_extra_key(9, key.clone()).expect("block 2 is not complete");
    assert_eq!(sequence.extra_keys(2), vec![key]);
    assert_eq!(sequence.roll_back(10), Err(SequenceError::RollBack { count: 10, length: 9 }));
    assert_eq!(sequence.len(), 9);
}

#[test]
fn the_order_of_extra_keys_in_a_block_does_not_matter() {
    let hasher = base().hasher().expect("usable");
    let a = ExtraKey::image(b"a", 3).expect("short");
    let b = ExtraKey::prompt_embeddings(b"b");
    let one = hasher.hash_block(None, &[1; 16], &[a.clone(), b.clone()]);
    assert_eq!(one, hasher.hash_block(None, &[1; 16], &[b.clone(), a.clone()]));
    assert_ne!(one, hasher.hash_block(None, &[1; 16], &[a.clone(), a, b]));
}
