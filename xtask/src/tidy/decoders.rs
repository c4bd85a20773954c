//! Functions that read untrusted bytes: each of them has a fuzz target.

use super::Finding;
use super::source::Source;
use std::path::Path;

/// What gives a decoder random bytes.
enum Fuzzing {
    /// A program of `fuzz/targets`.
    Target(&'static str),
    /// A test in the same file, where the bytes are the operator's own.
    Test(&'static str),
}

use Fuzzing::{Target, Test};

/// Files of libraries with a function `decode` or `decode_..`.
const DECODERS: &[(&str, Fuzzing)] = &[
    ("crates/kvbm-codec/src/quantise.rs", Target("frame")),
    ("crates/kvbm-disk/src/keyring/file.rs", Target("keys")),
    ("crates/kvbm-disk/src/record.rs", Target("journal")),
    ("crates/kvbm-disk/src/stripes.rs", Target("stripes")),
    ("crates/kvbm-events/src/snapshot/wire.rs", Target("snapshot")),
    ("crates/kvbm-events/src/url/parts.rs", Test("what_cannot_be_read_is_refused_without_showing_it")),
    ("crates/kvbm-events/src/vllm/read.rs", Target("engine")),
    ("crates/kvbm-events/src/wire.rs", Target("batch")),
    ("crates/kvbm-layout/src/wire/decode.rs", Target("block_set")),
    ("crates/kvbm-link/src/attach.rs", Target("link")),
    ("crates/kvbm-link/src/handshake.rs", Target("link")),
    ("crates/kvbm-nixl/src/announcement.rs", Target("announcement")),
    ("crates/kvbm-nixl/src/codec.rs", Target("block_set")),
    ("crates/kvbm-nixl/src/in_process/wire.rs", Target("peer")),
    ("crates/kvbm-nixl/src/node/messages.rs", Target("peer")),
    ("crates/kvbm-node/src/protocol.rs", Target("node")),
    ("crates/kvbm-plan/src/wire.rs", Target("plan")),
    ("crates/kvbm-volume/src/key_object.rs", Target("volume_key")),
    ("crates/kvbm-volume/src/object.rs", Target("object")),
];

/// Decoders that get no random bytes, and entries of the list without a decoder or a program.
/// `targets` are the files of `fuzz/targets`.
pub(super) fn check(code: &[Source], targets: &[Source]) -> Vec<Finding> {
    let is_library = |source: &&Source| {
        let parts: Vec<_> = source.file.iter().filter_map(|part| part.to_str()).collect();
        matches!(parts[..], ["crates", _, "src", ..]) && !parts.contains(&"fuzz")
    };
    let mut findings: Vec<Finding> =
        code.iter().filter(is_library).filter_map(|source| not_fuzzed(source, targets)).collect();
    let stale = DECODERS.iter().filter(|(file, _)| {
        !code.iter().any(|source| source.file == Path::new(file) && decoder(source).is_some())
    });
    findings.extend(stale.map(|(file, _)| {
        let text = format!("{file} has no `decode` any more: remove it from DECODERS");
        Finding { file: file!().into(), line: 1, text }
    }));
    findings
}

/// Where a decoder of the file begins.
fn decoder(source: &Source) -> Option<usize> {
    let code = source.without_tests();
    let mut places = code.match_indices("fn decode");
    places.find(|(at, name)| code[at + name.len()..].starts_with(['(', '<', '_'])).map(|(at, _)| at)
}

fn not_fuzzed(source: &Source, targets: &[Source]) -> Option<Finding> {
    let at = decoder(source)?;
    let fuzzing =
        DECODERS.iter().find(|(file, _)| source.file == Path::new(file)).map(|(_, fuzzing)| fuzzing);
    let text = match fuzzing {
        None => "a decoder without a fuzz target: write one (fuzz/targets), and name it in \
                 xtask/src/tidy/decoders.rs"
            .to_owned(),
        Some(Target(name)) => {
            let path = Path::new("fuzz/targets").join(format!("{name}.rs"));
            if targets.iter().any(|target| target.file == path) {
                return None;
            }
            format!("the fuzz target `{name}` of this decoder is gone")
        }
        Some(Test(name)) if source.code.contains(&format!("fn {name}(")) => return None,
        Some(Test(name)) => format!("the test `{name}` of this decoder is gone"),
    };
    Some(source.finding(at, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(file: &str, text: &str) -> Source {
        Source::new(file, text)
    }

    /// Without findings about files of the list that are not given.
    fn found(code: &[Source], targets: &[Source]) -> Vec<String> {
        let findings = check(code, targets).into_iter().filter(|finding| finding.file != Path::new(file!()));
        findings.map(|finding| finding.text).collect()
    }

    #[test]
    fn a_decoder_needs_its_target_or_its_test() {
        let target = of("fuzz/targets/plan.rs", "");
        let plan = of("crates/kvbm-plan/src/wire.rs", "pub fn decode_command(bytes: &[u8]) {}");
        assert_eq!(found(std::slice::from_ref(&plan), &[target]), [""; 0]);
        assert!(found(&[plan], &[])[0].contains("`plan`"));
        let url = "fn decode() {}\n#[cfg(test)]\nmod tests {\n";
        let test = "fn what_cannot_be_read_is_refused_without_showing_it() {} }";
        let file = "crates/kvbm-events/src/url/parts.rs";
        assert_eq!(found(&[of(file, &format!("{url}{test}"))], &[]), [""; 0]);
        assert!(found(&[of(file, &format!("{url}}}"))], &[])[0].contains("is gone"));
    }

    #[test]
    fn a_new_decoder_is_found_where_strangers_bytes_come_in() {
        let new = "impl A { pub fn decode(bytes: &[u8]) {} }";
        let findings = found(&[of("crates/kvbm-new/src/a.rs", new)], &[]);
        assert!(findings[0].contains("without a fuzz target"), "{findings:?}");
        for (file, text) in [
            ("crates/kvbm-new/src/a.rs", "fn decoded() {} // fn decode()"),
            ("crates/kvbm-new/src/a.rs", "#[cfg(test)]\nmod tests { fn decode() {} }"),
            ("crates/kvbm-new/src/fuzz/a.rs", "fn decode() {}"),
            ("crates/kvbm-new/tests/a.rs", "fn decode() {}"),
            ("xtask/src/a.rs", "fn decode() {}"),
        ] {
            assert_eq!(found(&[of(file, text)], &[]), [""; 0], "{file}: {text}");
        }
    }

    #[test]
    fn a_list_that_names_too_much_is_a_finding() {
        let findings = check(&[], &[]);
        assert_eq!(findings.len(), DECODERS.len());
        assert!(findings[0].text.contains("remove it"));
    }
}
