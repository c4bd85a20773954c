//! Module maps: a crate, and a module with many parts, state which of their modules may use which,
//! and arrows point down.
//!
//! A map is a table in the documentation of a file below a line `//! # Modules`, in `lib.rs` or in
//! the file of a module. A row is ``//! | `name` | what it is | `a`, `b` |``.
//! Its third cell lists the modules that `name` may use; each must stand in a row below. The check
//! reads paths `crate::..`, `super::..` and `self::..` in the code, those of groups included. A
//! name that the file of the map has from one of the modules is a use of that module. Tests may
//! use anything.

use super::Finding;
use super::source::Source;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Crates whose map must exist.
const REQUIRED: &[&str] = &["kvbm", "kvbm-pool"];

/// A row of the table.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    line: usize,
    name: String,
    uses: Vec<String>,
}

/// A map with the modules that it is about.
struct Map<'a> {
    source: &'a Source,
    rows: Vec<Row>,
    /// The folder of `src`.
    root: PathBuf,
    /// The module that has the modules, from the root of its crate on.
    module: Vec<String>,
    /// Names that the file of the map uses from its modules: who names them there uses the module.
    reexports: BTreeMap<String, String>,
}

impl<'a> Map<'a> {
    /// The map of a file, with rows or without.
    fn read(source: &'a Source) -> Option<Self> {
        let root = source.file.ancestors().find(|folder| folder.ends_with("src"))?.to_owned();
        let module = module_of(&root, &source.file)?;
        let rows = rows(&source.text);
        let reexports = reexports(source.without_tests(), &rows);
        Some(Self { source, rows, root, module, reexports })
    }

    /// The module of this map that a file belongs to, with all names of its path; `None` for files
    /// of others, for the file of the map and for tests.
    fn member(&self, file: &Path) -> Option<Vec<String>> {
        let module = module_of(&self.root, file)?;
        let is_test =
            module.iter().any(|name| name == "tests") || file.to_string_lossy().ends_with("tests.rs");
        (!is_test && module.len() > self.module.len() && module.starts_with(&self.module)).then_some(module)
    }

    /// Rows that name a module which does not stand below them, and rows without a file.
    fn stale(&self, code: &[Source]) -> Vec<Finding> {
        let mut findings = Vec::new();
        let at = |row: &Row, text| Finding { file: self.source.file.clone(), line: row.line, text };
        for (index, row) in self.rows.iter().enumerate() {
            for used in &row.uses {
                if !self.rows[index + 1..].iter().any(|below| below.name == *used) {
                    let text = format!(
                        "`{}` may not use `{used}`, which has no row below it: arrows point down",
                        row.name
                    );
                    findings.push(at(row, text));
                }
            }
            let is_here = |source: &Source| {
                module_of(&self.root, &source.file).is_some_and(|module| {
                    module.starts_with(&self.module) && module.get(self.module.len()) == Some(&row.name)
                })
            };
            if !code.iter().any(is_here) {
                findings.push(at(row, format!("there is no module `{}`: remove its row", row.name)));
            }
        }
        findings
    }

    /// Uses in one file that the map does not allow.
    fn uses(&self, source: &Source) -> Vec<Finding> {
        let Some(path) = self.member(&source.file) else { return Vec::new() };
        let (level, map) = (self.module.len(), self.source.file.display());
        let module = &path[level];
        let Some(row) = self.rows.iter().find(|row| row.name == *module) else {
            return vec![source.finding(0, format!("module `{module}` has no row in the map of {map}"))];
        };
        let mut findings = Vec::new();
        for (at, used) in paths(source.without_tests(), &path) {
            let Some(used) = used.get(level).filter(|_| used.starts_with(&self.module)) else { continue };
            let used = self.reexports.get(used).unwrap_or(used);
            let known = self.rows.iter().any(|row| row.name == *used);
            if known && used != module && !row.uses.contains(used) {
                let text = format!("`{module}` uses `{used}`, which the map of {map} does not allow");
                findings.push(source.finding(at, text));
            }
        }
        findings
    }
}

/// Checks all maps.
pub(super) fn check(code: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let tests: Vec<PathBuf> = code.iter().flat_map(for_tests).collect();
    for map in code.iter().filter_map(Map::read) {
        if map.rows.is_empty() {
            let name = map.root.parent().and_then(Path::file_name).unwrap_or_default();
            if map.module.is_empty() && REQUIRED.iter().any(|required| name == *required) {
                let text = "no table below `//! # Modules`: state which module may use which".to_owned();
                findings.push(map.source.finding(0, text));
            }
            continue;
        }
        findings.extend(map.stale(code));
        let is_for_tests = |source: &&Source| tests.iter().any(|path| source.file.starts_with(path));
        findings
            .extend(code.iter().filter(|source| !is_for_tests(source)).flat_map(|source| map.uses(source)));
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

/// The files and folders of modules that only tests compile, and that a file declares.
fn for_tests(source: &Source) -> Vec<PathBuf> {
    let declared = |code: &str| -> BTreeSet<String> {
        let lines =
            code.lines().filter_map(|line| line.strip_suffix(';')?.split("mod ").nth(1).map(str::to_owned));
        lines.filter(|name| word(name) == name).collect()
    };
    let stem = source.file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let folder = if ["lib", "main", "mod"].contains(&stem) {
        source.file.parent().unwrap_or(Path::new("")).to_owned()
    } else {
        source.file.with_extension("")
    };
    let (all, others) = (declared(&source.code), declared(source.without_tests()));
    all.difference(&others).flat_map(|name| [folder.join(name), folder.join(format!("{name}.rs"))]).collect()
}

/// The module of a file below `root`, by name from the root of the crate on; none for the root.
fn module_of(root: &Path, file: &Path) -> Option<Vec<String>> {
    let inside = file.strip_prefix(root).ok()?.with_extension("");
    let mut names: Vec<String> = inside.iter().filter_map(|part| Some(part.to_str()?.to_owned())).collect();
    let is_root = |name: &str| ["lib", "main"].contains(&name);
    if names.last().is_some_and(|name| name == "mod") || names.len() == 1 && is_root(&names[0]) {
        names.pop();
    }
    Some(names)
}

/// The modules of names that code uses from modules of the map, by name.
fn reexports(code: &str, rows: &[Row]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (at, start) in code.match_indices("use ") {
        let path = code[at + start.len()..].trim_start_matches("self::");
        let module = word(path);
        if rows.iter().any(|row| row.name == module) {
            let names = leaves(path).into_iter().filter(|leaf| leaf.len() > 1);
            found.extend(names.filter_map(|leaf| Some(((*leaf.last()?).to_owned(), module.to_owned()))));
        }
    }
    found
}

/// Paths in the code of `module` that begin with `crate`, `super` or `self`, from the root of the
/// crate on, with where they stand; one for each leaf of a group.
fn paths(code: &str, module: &[String]) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            // The tail of `self::super::`, `super::super::` or `my_crate::`.
            let is_tail = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            // `$crate::` is a use like any other.
            if !is_tail {
                let leaves = leaves(&code[at..]).into_iter();
                found.extend(leaves.filter_map(|leaf| Some((at, absolute(&leaf, module)?))));
            }
        }
    }
    found
}

/// A path from the root of the crate on; `None` where there are more `super` than modules.
fn absolute(path: &[&str], module: &[String]) -> Option<Vec<String>> {
    let mut from = module.to_vec();
    for name in path {
        match *name {
            "crate" => from.clear(),
            "super" => drop(from.pop()?),
            "self" => {}
            name => from.push(name.to_owned()),
        }
    }
    Some(from)
}

/// The path that `code` begins with; where it ends with a group in braces, the path of each member.
fn leaves(code: &str) -> Vec<Vec<&str>> {
    let (mut path, mut rest) = (Vec::new(), code);
    loop {
        let name = word(rest);
        if !name.is_empty() {
            path.push(name);
        }
        let Some(next) = rest[name.len()..].strip_prefix("::") else { return vec![path] };
        rest = next;
        if let Some(group) = rest.strip_prefix('{') {
            let members = members(group).into_iter().flat_map(leaves);
            return members.map(|member| [path.clone(), member].concat()).collect();
        }
    }
}

/// The members of a group, up to its closing brace.
fn members(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut members) = (0_u32, 0, Vec::new());
    for (at, c) in group.char_indices() {
        let ends = depth == 0 && matches!(c, '}' | ',');
        if ends {
            members.push(group[start..at].trim());
            start = at + 1;
        }
        match c {
            '}' if ends => break,
            '{' => depth += 1,
            '}' => depth -= 1,
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

    /// The files of a map, one for each module, below `folder`.
    fn files<'a>(
        map: &'a str,
        [file, top, low]: [&'a str; 3],
        codes: [&'a str; 2],
    ) -> [(&'a str, &'a str); 3] {
        [(file, map), (top, codes[0]), (low, codes[1])]
    }

    const CRATE: [&str; 3] = ["crates/a/src/lib.rs", "crates/a/src/top/x.rs", "crates/a/src/low.rs"];
    const INNER: [&str; 3] = ["crates/a/src/b/mod.rs", "crates/a/src/b/top/x.rs", "crates/a/src/b/low.rs"];
    const BESIDE: [&str; 3] = ["crates/a/src/b.rs", "crates/a/src/b/top.rs", "crates/a/src/b/low.rs"];

    #[test]
    fn an_arrow_that_the_map_does_not_allow_is_found() {
        let down = "use crate::{low::{A, B}, Type};\nuse super::super::low::C;\n";
        let tests = "#[cfg(test)]\nmod tests { use crate::top; }\n";
        assert_eq!(texts(&files(MAP, CRATE, [down, tests])), [""; 0]);
        for up in
            ["use crate::top::A;", "use super::top;", "use crate::{Type, top};", "fn f(a: crate::top::A) {}"]
        {
            let up = format!("{up}\n{tests}");
            let found = texts(&files(MAP, CRATE, ["", &up]));
            assert_eq!(found.len(), 1, "{up} {found:?}");
            assert!(found[0].starts_with("crates/a/src/low.rs:1: `low` uses `top`"), "{found:?}");
        }
        for other in ["use my_crate::top;", "use a::super_top;", "use crate::topmost;", "fn f(top: u8) {}"] {
            assert_eq!(texts(&files(MAP, CRATE, ["", other])), [""; 0], "{other}");
        }
    }

    #[test]
    fn the_map_of_a_module_is_about_its_own_modules() {
        for names in [INNER, BESIDE] {
            let down = "use crate::b::low;\nuse crate::top;\n";
            assert_eq!(texts(&files(MAP, names, [down, "use crate::top; use super::{Type, low};"])), [""; 0]);
            for up in ["use crate::b::top;", "use super::{Type, top::{A, B}};", "use crate::{b::{top}, c};"] {
                let found = texts(&files(MAP, names, ["", up]));
                assert!(
                    !found.is_empty() && found.iter().all(|text| text.contains("`low` uses `top`")),
                    "{found:?}"
                );
            }
        }
        let deep = texts(&files(MAP, INNER, ["use super::super::other; use super::y;", ""]));
        assert_eq!(deep, [""; 0], "`y` is a module of `top`");
    }

    #[test]
    fn a_name_of_a_module_that_the_map_passes_on_is_a_use_of_it() {
        for passes_on in ["pub use top::A;", "use self::top::{x::A, B};", "pub(crate) use top::A;"] {
            let map = format!("{MAP}{passes_on}\n");
            for (names, up) in [(CRATE, "use crate::A;"), (INNER, "use super::{A, C};")] {
                let found = texts(&files(&map, names, ["", up]));
                assert!(found.len() == 1 && found[0].contains("`low` uses `top`"), "{passes_on} {found:?}");
            }
            assert_eq!(texts(&files(&map, INNER, ["", "use super::C;"])), [""; 0]);
        }
    }

    #[test]
    fn modules_of_tests_may_use_anything() {
        let up = "use super::top;\nuse crate::b::top;\n";
        let map = format!("{MAP}#[cfg(all(test, not(miri)))]\nmod probe;\n");
        for (names, file) in [(INNER, "crates/a/src/b/probe.rs"), (BESIDE, "crates/a/src/b/probe/x.rs")] {
            let mut all = files(&map, names, ["", ""]).to_vec();
            all.push((file, up));
            assert_eq!(texts(&all), [""; 0]);
            all[0].1 = MAP;
            assert!(!texts(&all).is_empty(), "declared for everything");
        }
        assert_eq!(
            texts(&[files(MAP, INNER, ["", ""]).as_slice(), &[("crates/a/src/b/low/tests.rs", up)]].concat()),
            [""; 0]
        );
    }

    #[test]
    fn each_module_has_a_row_and_each_row_a_module() {
        for (names, new) in [(CRATE, "crates/a/src/new.rs"), (INNER, "crates/a/src/b/new.rs")] {
            let mut all = files(MAP, names, ["", ""]).to_vec();
            all.push((new, "fn f() {}\n"));
            let found = texts(&all);
            assert!(found.len() == 1 && found[0].contains("`new` has no row"), "{found:?}");
        }
        let gone = texts(&[(CRATE[0], MAP), (CRATE[1], "")]);
        assert!(gone.len() == 1 && gone[0].contains("no module `low`"), "{gone:?}");
    }

    #[test]
    fn a_row_may_only_name_rows_below_it() {
        let map = MAP.replace("| below | - |", "| below | `top` |");
        for names in [CRATE, INNER] {
            assert!(texts(&files(&map, names, ["", ""]))[0].contains("arrows point down"));
        }
    }

    #[test]
    fn a_required_map_must_exist() {
        assert!(texts(&[("crates/kvbm/src/lib.rs", "//! A crate.\n")])[0].contains("no table"));
        assert!(texts(&[("crates/other/src/lib.rs", "//! A crate.\n")]).is_empty());
    }
}
