//! Module maps: a crate states which of its modules may use which, and arrows point down.
//!
//! The map is a table in the documentation of `lib.rs` below a line `//! # Modules`. A row is
//! ``//! | `name` | what it is | `a`, `b` |``.
//! Its third cell lists the modules that `name` may use; each must stand in a row below. The check
//! reads paths `crate::name::..` in the code; tests of a module may use anything.

use super::Finding;
use super::source::Source;
use std::path::Path;

/// Crates whose map must exist.
const REQUIRED: &[&str] = &["kvbm", "kvbm-pool"];

/// A row of the table.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    line: usize,
    name: String,
    uses: Vec<String>,
}

/// Checks the maps of all crates that have one.
pub(super) fn check(code: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for library in code.iter().filter(|source| source.file.ends_with("src/lib.rs")) {
        let Some(folder) = library.file.parent() else { continue };
        let rows = rows(&library.text);
        let name = folder.parent().and_then(Path::file_name).unwrap_or_default();
        if rows.is_empty() {
            if REQUIRED.iter().any(|required| name == *required) {
                let text = "no table below `//! # Modules`: state which module may use which".to_owned();
                findings.push(Finding { file: library.file.clone(), line: 1, text });
            }
            continue;
        }
        findings.extend(upward(library, &rows));
        for source in code.iter().filter(|source| source.file.starts_with(folder)) {
            findings.extend(uses(folder, source, &rows));
        }
    }
    findings
}

fn rows(text: &str) -> Vec<Row> {
    let lines = (1..).zip(text.lines()).skip_while(|(_, line)| line.trim() != "//! # Modules");
    let table = lines.skip(1).take_while(|(_, line)| line.starts_with("//!") && !line.starts_with("//! # "));
    let row = |(line, text): (usize, &str)| {
        let cells: Vec<&str> = text.strip_prefix("//! |")?.split('|').map(str::trim).collect();
        let name = cells.first()?.strip_prefix('`')?.strip_suffix('`')?;
        let uses =
            cells.get(2)?.split(',').filter_map(|used| used.trim().strip_prefix('`')?.strip_suffix('`'));
        Some(Row {
            line,
            name: name.to_owned(),
            uses: uses.filter(|used| *used != "-").map(str::to_owned).collect(),
        })
    };
    table.filter_map(row).collect()
}

/// Rows that name a module which does not stand below them.
fn upward(library: &Source, rows: &[Row]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        for used in &row.uses {
            if !rows[index + 1..].iter().any(|below| below.name == *used) {
                let text = format!(
                    "`{}` may not use `{used}`, which has no row below it: arrows point down",
                    row.name
                );
                findings.push(Finding { file: library.file.clone(), line: row.line, text });
            }
        }
    }
    findings
}

/// Uses in one file that the map does not allow.
fn uses(folder: &Path, source: &Source, rows: &[Row]) -> Vec<Finding> {
    let Some(module) = module_of(folder, &source.file) else { return Vec::new() };
    let Some(row) = rows.iter().find(|row| row.name == module) else {
        let text = format!("module `{module}` has no row in the map of its crate (lib.rs)");
        return vec![source.finding(0, text)];
    };
    let code = source.without_tests();
    let mut findings = Vec::new();
    for (at, used) in used(code) {
        let known = rows.iter().any(|row| row.name == used);
        if known && used != module && !row.uses.iter().any(|allowed| allowed == used) {
            let text = format!("`{module}` uses `{used}`, which the map in lib.rs does not allow");
            findings.push(source.finding(at, text));
        }
    }
    findings
}

/// The top-level module that a file belongs to; `None` for the root, for tests and fuzz bodies.
fn module_of(folder: &Path, file: &Path) -> Option<String> {
    let inside = file.strip_prefix(folder).ok()?;
    let is_test = inside.iter().any(|part| part == "tests" || part == "fuzz")
        || file.to_string_lossy().ends_with("tests.rs");
    let first = Path::new(inside.iter().next()?).file_stem()?.to_str()?.to_owned();
    (!is_test && first != "lib" && first != "main").then_some(first)
}

/// Top-level modules that `crate::..` paths name, groups `crate::{a::B, c}` included.
fn used(code: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        // `pub(in crate::x)` and `$crate::` are uses like any other.
        match rest.strip_prefix('{') {
            Some(group) => found.extend(group_members(group).into_iter().map(|name| (at, name))),
            None => found.push((at, word(rest))),
        }
    }
    found
}

/// First words of the members of a `use` group, of its outermost level alone.
fn group_members(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut members) = (0_u32, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                members.push(word(group[start..at].trim_start()));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                members.push(word(group[start..at].trim_start()));
                start = at + 1;
            }
            _ => {}
        }
    }
    members
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(files: &[(&str, &str)]) -> Vec<String> {
        let code: Vec<Source> = files.iter().map(|(file, text)| Source::new(*file, *text)).collect();
        check(&code).iter().map(ToString::to_string).collect()
    }

    const MAP: &str = "//! A crate.\n//! # Modules\n//!\n//! | module | what | uses |\n//! |---|---|---|\n\
        //! | `top` | above | `low` |\n//! | `low` | below | - |\n\nmod low;\n";

    #[test]
    fn an_arrow_that_the_map_does_not_allow_is_found() {
        let lib = ("crates/a/src/lib.rs", MAP);
        let down = ("crates/a/src/top/x.rs", "use crate::{low::{A, B}, Type};\n");
        assert!(texts(&[lib, down]).is_empty(), "{:?}", texts(&[lib, down]));
        let up = ("crates/a/src/low.rs", "use crate::top::A;\n#[cfg(test)]\nmod tests { use crate::top; }\n");
        let found = texts(&[lib, up]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("crates/a/src/low.rs:1: `low` uses `top`"), "{found:?}");
        let group = ("crates/a/src/low.rs", "use crate::{Type, top};\n");
        assert_eq!(texts(&[lib, group]).len(), 1);
        let unknown = ("crates/a/src/new.rs", "fn f() {}\n");
        assert!(texts(&[lib, unknown])[0].contains("`new` has no row"));
    }

    #[test]
    fn a_row_may_only_name_rows_below_it() {
        let map = MAP.replace("| below | - |", "| below | `top` |");
        assert!(texts(&[("crates/a/src/lib.rs", &map)])[0].contains("arrows point down"));
    }

    #[test]
    fn a_required_map_must_exist() {
        assert!(texts(&[("crates/kvbm/src/lib.rs", "//! A crate.\n")])[0].contains("no table"));
        assert!(texts(&[("crates/other/src/lib.rs", "//! A crate.\n")]).is_empty());
    }
}
