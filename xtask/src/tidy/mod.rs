//! The rules that the compiler does not check: each module checks one kind and says the way out.

mod assertions;
mod deadlines;
mod decoders;
mod docs;
mod impls;
mod invariants;
mod length;
mod map;
mod map_size;
mod module_map;
mod modules;
mod names;
mod paths;
mod prose;
mod source;
mod words;

use crate::workspace::Workspace;
use anyhow::Context;
use map::Map;
use source::Source;
use std::fmt;
use std::path::PathBuf;

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// Relative to the root.
    file: PathBuf,
    /// From 1.
    line: usize,
    /// What is wrong and the way out.
    text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.text)
    }
}

/// Prints what is wrong; whether nothing is.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<bool> {
    let findings = findings(workspace)?;
    for finding in &findings {
        println!("{finding}");
    }
    println!("tidy: {} findings", findings.len());
    Ok(findings.is_empty())
}

/// An error that lists what is wrong.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<()> {
    let findings: Vec<String> = findings(workspace)?.iter().map(ToString::to_string).collect();
    if findings.is_empty() { Ok(()) } else { anyhow::bail!("{}", findings.join("\n")) }
}

fn findings(workspace: &Workspace) -> anyhow::Result<Vec<Finding>> {
    let sources =
        source::load(&workspace.root, &["crates", "bindings/python/src", "xtask", "ci", ".ci", ".cargo"])?;
    let code: Vec<Source> = sources.iter().filter(|source| source.is_rust()).cloned().collect();
    let targets = source::load(&workspace.root, &["fuzz/targets"])?;
    let text = std::fs::read_to_string(workspace.root.join(map::FILE)).context("cannot read the map")?;
    let map = Map::parse(&text);

    let mut findings = Vec::new();
    findings.extend(map.check(workspace));
    findings.extend(invariants::check(&map, &code));
    findings.extend(docs::check(workspace)?);
    findings.extend(names::check(&code));
    findings.extend(module_map::check(&code));
    findings.extend(impls::check(&code));
    findings.extend(decoders::check(&code, &targets));
    let map = Source::new(map::FILE, text);
    findings.extend(map_size::check(&map));
    findings.extend(map_size::check_design(&sources));
    findings.extend(prose::kept_names(&map, &code));
    for source in &code {
        findings.extend(words::check(source));
        findings.extend(modules::check(source));
        findings.extend(assertions::check(source));
        findings.extend(deadlines::check(source));
        findings.extend(length::check(source));
        findings.extend(prose::comments(source));
    }
    let documents = source::load_files(&workspace.root, "md")?;
    findings.extend(prose::check(&documents));
    findings.extend(prose::check(&sources));
    for source in sources.iter().chain(&documents) {
        findings.extend(paths::check(source));
    }
    findings.sort();
    Ok(findings)
}
