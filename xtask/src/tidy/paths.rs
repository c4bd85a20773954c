//! Paths that exist on one machine only.

use super::Finding;
use super::source::Source;

/// Starts of paths that are somebody's own, in two parts, so that this file is clean.
const STARTS: &[&[&str]] =
    &[&["/ho", "me/"], &["/ro", "ot/"], &["/wo", "rk/"], &["/Us", "ers/"], &["/tmp/tar", "get"]];

pub(super) fn check(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for parts in STARTS {
        let start = parts.concat();
        for (at, _) in source.text.match_indices(&start) {
            // `src/work/x` is a relative path, `https://host/work/x` an address.
            let continues = |c: char| c.is_alphanumeric() || "._-/}".contains(c);
            if !source.text[..at].ends_with(continues) {
                let way_out = "a path of one machine: make it relative, or take it from the environment";
                findings.push(source.finding(at, format!("`{start}`: {way_out}")));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_paths_are_found_and_relative_ones_are_not() {
        for parts in STARTS {
            let path = parts.concat();
            let findings = check(&Source::new("a.rs", format!("\n\"{path}x\"")));
            assert_eq!(findings.len(), 1, "{path}");
            assert_eq!(findings[0].line, 2);
            assert_eq!(check(&Source::new("a.rs", format!("src{path}x"))), [], "{path}");
        }
        assert_eq!(check(&Source::new("a.md", "/var/cache/kvbm /tmp/x /proc/self")), []);
    }
}
