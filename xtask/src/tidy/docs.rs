//! Each crate says first what it knows and what it must never know.

use super::Finding;
use crate::workspace::Workspace;
use anyhow::Context;
use std::path::Path;

/// Lines from the top within which both have to stand.
const WITHIN: usize = 20;

pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for library in workspace.crates.iter().filter_map(|member| member.library.as_deref()) {
        let text = std::fs::read_to_string(library).with_context(|| library.display().to_string())?;
        findings.extend(missing(workspace.relative(library), &text));
    }
    Ok(findings)
}

fn missing(file: &Path, text: &str) -> Vec<Finding> {
    let top: Vec<&str> = text.lines().take(WITHIN).filter(|line| line.starts_with("//!")).collect();
    ["//! **Knows:** ", "//! **Must never know:** "]
        .into_iter()
        .filter(|start| !top.iter().any(|line| line.starts_with(start)))
        .map(|start| Finding {
            file: file.to_owned(),
            line: 1,
            text: format!("no line `{start}...` in the first {WITHIN}: say it, as in ARCHITECTURE.md"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_statements_are_needed_near_the_top() {
        let good = "//! A crate.\n//!\n//! **Knows:** a.\n//! **Must never know:** b.\n";
        assert_eq!(missing(Path::new("lib.rs"), good), []);
        assert_eq!(missing(Path::new("lib.rs"), "//! A crate.\n").len(), 2);
        let late = format!("{}{good}", "//!\n".repeat(WITHIN));
        assert_eq!(missing(Path::new("lib.rs"), &late).len(), 2);
        assert_eq!(missing(Path::new("lib.rs"), &good.replace("//!", "//")).len(), 2);
    }
}
