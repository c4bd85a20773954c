//! Exported type names: each stands in one crate.

use super::Finding;
use super::source::Source;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Idioms that every crate may use; names that end in `Error` are idioms too.
const IDIOMS: &[&str] = &["Error", "Config", "Builder", "Status"];

/// Finds exported types that several crates declare.
pub(super) fn check(code: &[Source]) -> Vec<Finding> {
    let mut names: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut first: BTreeMap<&str, (&Source, usize)> = BTreeMap::new();
    for source in code {
        let Some(member) = member(&source.file) else { continue };
        for (name, at) in exported(source.without_tests()) {
            names.entry(name).or_default().insert(member);
            first.entry(name).or_insert((source, at));
        }
    }
    let is_idiom = |name: &str| IDIOMS.contains(&name) || name.ends_with("Error");
    let shared = |name: &str| names.get(name).is_some_and(|crates| crates.len() > 1);
    let mut findings = Vec::new();
    for (name, crates) in names.iter().filter(|(name, _)| shared(name) && !is_idiom(name)) {
        let (source, at) = first[name];
        let crates = crates.iter().copied().collect::<Vec<_>>().join(", ");
        let text = format!("`{name}` is an exported type of several crates ({crates}): rename all but one");
        findings.push(source.finding(at, text));
    }
    findings
}

/// The crate of a file below `crates/NAME/src`.
fn member(file: &Path) -> Option<&str> {
    let mut parts = file.iter().map(|part| part.to_str().unwrap_or_default());
    let (crates, name, src) = (parts.next()?, parts.next()?, parts.next()?);
    (crates == "crates" && src == "src").then_some(name)
}

/// Names behind `pub struct` and the like, with their positions.
fn exported(code: &str) -> impl Iterator<Item = (&str, usize)> {
    const KINDS: &[&str] = &["struct", "enum", "trait", "type", "union"];
    code.lines().filter_map(move |line| {
        let rest = line.trim_start().strip_prefix("pub ")?;
        let (kind, rest) = rest.strip_prefix("unsafe ").unwrap_or(rest).split_once(' ')?;
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        (KINDS.contains(&kind) && end > 0)
            .then(|| (&rest[..end], line.as_ptr() as usize - code.as_ptr() as usize))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(files: &[(&str, &str)]) -> Vec<String> {
        let code: Vec<Source> = files.iter().map(|(file, text)| Source::new(*file, *text)).collect();
        check(&code).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_type_of_two_crates_is_found_and_idioms_are_not() {
        let a = ("crates/a/src/lib.rs", "pub struct Config;\npub enum Side { A }\npub enum ReadError {}\n");
        let b = ("crates/b/src/x.rs", "pub struct Config;\npub trait Side<T> {}\npub struct ReadError;\n");
        let found = texts(&[a, b]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("crates/a/src/lib.rs:2: `Side`") && found[0].contains("(a, b)"),
            "{found:?}"
        );
        let private = (
            "crates/b/src/x.rs",
            "pub(crate) enum Side {}\n// pub enum Side\n#[cfg(test)]\nmod t {\npub enum Side {}\n}",
        );
        assert!(texts(&[a, private]).is_empty());
    }
}
