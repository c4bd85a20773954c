//! Every invariant has a test that can fail, and the map names tests that exist.

use super::map::{FILE, Map};
use super::source::Source;
use super::{Finding, assertions};
use std::collections::BTreeSet;
use std::path::PathBuf;

pub(super) fn check(map: &Map, code: &[Source]) -> Vec<Finding> {
    let names: BTreeSet<&str> = code
        .iter()
        .filter(|source| source.file.starts_with("crates"))
        .flat_map(assertions::tests)
        .filter(|name| name.starts_with("invariant_"))
        .collect();
    let at = |line, text| Finding { file: PathBuf::from(FILE), line, text };
    let mut findings = Vec::new();
    if map.invariants.is_empty() {
        findings.push(at(1, "no table of invariants: `| number | invariant | tests |`".to_owned()));
    }
    for invariant in &map.invariants {
        let prefix = format!("invariant_{}_", invariant.number);
        if !names.iter().any(|name| name.starts_with(&prefix)) {
            let text = format!("invariant {} has no test: write one called `{prefix}...`", invariant.number);
            findings.push(at(invariant.line, text));
        }
        for test in invariant.tests.iter().filter(|test| !names.contains(test.as_str())) {
            findings.push(at(
                invariant.line,
                format!("`{test}` guards an invariant but does not exist: correct the name"),
            ));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "| n | invariant | tests |\n|---|---|---|\n\
        | 1 | Fail closed. | `invariant_1_a` |\n| 2 | Bytes never change. | `invariant_2_gone` |\n";

    #[test]
    fn an_invariant_without_a_test_and_a_test_that_is_gone_are_found() {
        let attribute = format!("#[{}]", "test");
        let source =
            Source::new("crates/a/src/lib.rs", format!("{attribute}\nfn invariant_1_a() {{ assert!(x) }}"));
        let findings = check(&Map::parse(MAP), std::slice::from_ref(&source));
        let texts: Vec<String> = findings.iter().map(ToString::to_string).collect();
        assert_eq!(texts.len(), 2, "{texts:?}");
        assert!(texts[0].contains(":4: invariant 2 has no test"), "{texts:?}");
        assert!(texts[1].contains("`invariant_2_gone`"), "{texts:?}");
        let elsewhere = Source::new("xtask/src/a.rs", source.text);
        assert_eq!(check(&Map::parse(MAP), &[elsewhere]).len(), 4, "only tests of crates count");
    }

    #[test]
    fn a_map_without_invariants_is_found() {
        assert_eq!(check(&Map::parse("# Map"), &[]).len(), 1);
    }
}
