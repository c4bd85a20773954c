//! The committed golden vectors, which `golden/make_vectors.py` computed independently from the
//! specification.

use kvbm_tokens::{
    BlockHasher, ChainRoot, ExtraKey, HashAlgorithm, Namespace, SequenceHash, Token, TokenSequence,
};
use serde_json::Value;

fn vectors() -> Value {
    serde_json::from_str(include_str!("../golden/vectors.json")).expect("vectors.json is JSON")
}

fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key).map(|text| text.as_str().expect("a string"))
}

fn number(value: &Value, key: &str) -> i64 {
    value[key].as_i64().expect("a number")
}

fn bytes(value: &Value, key: &str) -> Option<Vec<u8>> {
    text(value, key).map(|text| {
        let digits: Vec<u32> = text.chars().map(|c| c.to_digit(16).expect("a hexadecimal digit")).collect();
        digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
    })
}

fn namespace(value: &Value) -> Namespace {
    let mut ns = Namespace::new(text(value, "model").expect("a model"))
        .page_size(u32::try_from(number(value, "page_size")).expect("a page size"));
    for (key, set) in [
        ("weights", Namespace::weights as fn(Namespace, String) -> Namespace),
        ("dtype", Namespace::dtype),
        ("rope_scaling", Namespace::rope_scaling),
        ("kv_quantization", Namespace::kv_quantization),
        ("adapter", Namespace::adapter),
    ] {
        if let Some(value) = text(value, key) {
            ns = set(ns, value.to_owned());
        }
    }
    if let Some(salt) = bytes(value, "tenant_salt") {
        ns = ns.tenant_salt(salt);
    }
    if let Some(secret) = bytes(value, "deployment_secret") {
        ns = ns.deployment_secret(secret);
    }
    if text(value, "algorithm") == Some("xxh3-128") {
        ns = ns.algorithm(HashAlgorithm::Xxh3_128);
    }
    match (text(value, "chain_root_kind"), bytes(value, "chain_root")) {
        (Some("external"), Some(root)) => ns.chain_root(ChainRoot::External(root)),
        (Some("per-process"), Some(root)) => ns.chain_root(ChainRoot::PerProcess(root)),
        _ => ns,
    }
}

fn hasher(vectors: &Value, name: &str) -> BlockHasher {
    let namespaces = vectors["namespaces"].as_array().expect("namespaces");
    let found = namespaces.iter().find(|ns| text(ns, "name") == Some(name)).expect("a known namespace");
    namespace(found).hasher().expect("a usable namespace")
}

fn extra_key(value: &Value) -> ExtraKey {
    match text(value, "kind").expect("a kind") {
        "salt" => ExtraKey::salt(&bytes(value, "bytes").expect("bytes")).expect("short"),
        "image" => ExtraKey::image(&bytes(value, "content_hash").expect("bytes"), number(value, "offset"))
            .expect("short"),
        "embeddings" => ExtraKey::prompt_embeddings(&bytes(value, "bytes").expect("bytes")),
        other => panic!("unknown kind {other}"),
    }
}

fn tokens(case: &Value) -> Vec<Token> {
    let seed = number(case, "seed") as u64;
    (0..number(case, "count") as u64).map(|i| (seed + i * 2_654_435_761) as Token).collect()
}

#[test]
fn namespace_tags() {
    let vectors = vectors();
    let namespaces = vectors["namespaces"].as_array().expect("namespaces");
    assert_eq!(namespaces.len(), 10);
    for case in namespaces {
        assert_eq!(namespace(case).tag().to_string(), text(case, "tag").expect("a tag"), "{case}");
    }
}

#[test]
fn sequences() {
    let vectors = vectors();
    let cases = vectors["sequences"].as_array().expect("sequences");
    assert_eq!(cases.len(), 10);
    for case in cases {
        let mut sequence = TokenSequence::new(hasher(&vectors, text(case, "namespace").expect("a name")));
        for key in case["extra"].as_array().expect("extra keys") {
            let at = usize::try_from(number(key, "at")).expect("a position");
            sequence.add_extra_key(at, extra_key(key)).expect("nothing is complete yet");
        }
        sequence.add_tokens(&tokens(case));
        let hashes: Vec<String> = sequence.hashes().iter().map(ToString::to_string).collect();
        let local: Vec<String> = (0..sequence.num_blocks())
            .map(|block| format!("{:016x}", sequence.local_hash(block).expect("complete").0))
            .collect();
        assert_eq!(serde_json::json!(hashes), case["hashes"], "{case}");
        assert_eq!(serde_json::json!(local), case["local_hashes"], "{case}");
        assert!(!hashes.is_empty());
    }
}

#[test]
fn external_hashes() {
    let vectors = vectors();
    let cases = vectors["external"].as_array().expect("external");
    assert_eq!(cases.len(), 4);
    for case in cases {
        let hasher = hasher(&vectors, text(case, "namespace").expect("a name"));
        let hash = SequenceHash::from_external(&hasher, &bytes(case, "engine_hash").expect("bytes"));
        assert_eq!(hash.to_string(), text(case, "hash").expect("a hash"), "{case}");
    }
}

#[test]
fn a_salt_is_an_extra_key_of_the_first_block() {
    let vectors = vectors();
    let hasher = hasher(&vectors, "plain");
    let mut salted = TokenSequence::with_salt(hasher, b"salt").expect("short");
    let mut keyed = TokenSequence::new(hasher);
    keyed.add_extra_key(0, ExtraKey::salt(b"salt").expect("short")).expect("nothing is complete yet");
    salted.add_tokens(&[1; 40]);
    keyed.add_tokens(&[1; 40]);
    assert_eq!(salted.hashes(), keyed.hashes());
    assert_eq!(salted.extra_keys(0), keyed.extra_keys(0));
}
