//! The map, ARCHITECTURE.md: which crates there are, which may use which, which invariants hold.

use super::Finding;
use crate::workspace::{Crate, Workspace};
use std::collections::BTreeSet;
use std::path::PathBuf;

pub(super) const FILE: &str = "ARCHITECTURE.md";

/// What the map says, with the lines where it says so.
#[derive(Debug, Default)]
pub(super) struct Map {
    crates: Vec<Row>,
    pub(super) invariants: Vec<Invariant>,
}

/// A crate: a table row whose first cell is `` `kvbm-name` `` and whose third cell lists the crates
/// that it uses, without their prefix (`-` for none).
#[derive(Debug)]
struct Row {
    line: usize,
    name: String,
    uses: Vec<String>,
}

/// An invariant: a table row whose first cell is a number and whose last cell names tests.
#[derive(Debug)]
pub(super) struct Invariant {
    pub(super) line: usize,
    pub(super) number: u32,
    pub(super) tests: Vec<String>,
}

impl Map {
    /// Reads the tables of the map; everything else is for people.
    pub(super) fn parse(text: &str) -> Self {
        let mut map = Self::default();
        for (line, row) in (1..).zip(text.lines()) {
            let Some(row) = row.strip_prefix('|').and_then(|row| row.trim_end().strip_suffix('|')) else {
                continue;
            };
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let name = cells[0].trim_matches('`');
            if cells[0].starts_with("`kvbm") && cells.len() >= 4 && !name.contains(' ') {
                map.crates.push(Row { line, name: name.to_owned(), uses: used(cells[2]) });
            } else if let (Ok(number), true) = (cells[0].parse(), cells.len() == 3) {
                map.invariants.push(Invariant { line, number, tests: tests(cells[2]) });
            }
        }
        map
    }

    /// Compares the map with the workspace: every crate on it, every arrow on it and no other,
    /// arrows point down.
    pub(super) fn check(&self, workspace: &Workspace) -> Vec<Finding> {
        let at = |line, text| Finding { file: PathBuf::from(FILE), line, text };
        let mut findings = Vec::new();
        for (index, row) in self.crates.iter().enumerate() {
            for used in &row.uses {
                if !self.crates[index + 1..].iter().any(|below| below.name == *used) {
                    let text = format!(
                        "`{}` uses `{used}`, which is not below it: arrows point down only",
                        row.name
                    );
                    findings.push(at(row.line, text));
                }
            }
            match workspace.find(&row.name) {
                Some(member) => findings.extend(Self::arrows(row, member, workspace)),
                None => {
                    findings.push(at(row.line, format!("there is no crate `{}`: remove the row", row.name)));
                }
            }
        }
        let known: BTreeSet<&str> = self.crates.iter().map(|row| row.name.as_str()).collect();
        for member in workspace.crates.iter().filter(|member| !known.contains(member.name.as_str())) {
            findings.push(at(1, format!("crate `{}` is not on the map: add its row", member.name)));
        }
        findings
    }

    fn arrows(row: &Row, member: &Crate, workspace: &Workspace) -> Vec<Finding> {
        let manifest = workspace.relative(&member.folder).join("Cargo.toml");
        let new = member.uses.iter().filter(|used| !row.uses.contains(used)).map(|used| Finding {
            file: manifest.clone(),
            line: 1,
            text: format!(
                "`{}` uses `{used}`: a new arrow is a design decision; decide it in {FILE} first",
                member.name
            ),
        });
        let gone = row.uses.iter().filter(|used| !member.uses.contains(used)).map(|used| Finding {
            file: PathBuf::from(FILE),
            line: row.line,
            text: format!("`{}` does not use `{used}`: remove the arrow", member.name),
        });
        new.chain(gone).collect()
    }
}

/// Full names of the crates in a cell like `plan, storage`; `kvbm` is the facade itself.
fn used(cell: &str) -> Vec<String> {
    let names =
        cell.split(',').map(|name| name.trim().trim_matches('`')).filter(|name| !["", "-"].contains(name));
    names.map(|name| if name == "kvbm" { name.to_owned() } else { format!("kvbm-{name}") }).collect()
}

/// The names of tests between backticks.
fn tests(cell: &str) -> Vec<String> {
    cell.split('`').filter(|part| part.starts_with("invariant_")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const MAP: &str = "\
# Map
| crate | what it is | uses | must never know |
|---|---|---|---|
| `kvbm-cli` | program | kvbm | a |
| `kvbm` | facade | plan, pool | b |
| `kvbm-pool` | bookkeeping | plan | c |
| `kvbm-plan` | words | - | d |

| n | invariant | tests |
|---|---|---|
| 1 | Fail closed. | `invariant_1_a`, `invariant_1_b` (pool) |
";

    fn member(name: &str, uses: &[&str]) -> Crate {
        let uses = uses.iter().map(|&name| name.to_owned()).collect();
        let folder = Path::new("/w/crates").join(name);
        Crate { name: name.to_owned(), folder, uses, features: Vec::new(), library: None }
    }

    fn workspace(pool_uses: &[&str]) -> Workspace {
        let crates = vec![
            member("kvbm", &["kvbm-plan", "kvbm-pool"]),
            member("kvbm-cli", &["kvbm"]),
            member("kvbm-plan", &[]),
            member("kvbm-pool", pool_uses),
        ];
        Workspace { root: "/w".into(), target: "/w/target".into(), crates }
    }

    fn texts(map: &str, workspace: &Workspace) -> Vec<String> {
        Map::parse(map).check(workspace).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_true_map_has_no_findings() {
        assert_eq!(texts(MAP, &workspace(&["kvbm-plan"])), Vec::<String>::new());
        let map = Map::parse(MAP);
        assert_eq!(map.invariants.len(), 1);
        assert_eq!((map.invariants[0].number, map.invariants[0].line), (1, 11));
        assert_eq!(map.invariants[0].tests, ["invariant_1_a", "invariant_1_b"]);
    }

    #[test]
    fn a_new_arrow_is_found_at_the_crate_and_a_lost_one_at_the_map() {
        let new = texts(MAP, &workspace(&["kvbm-plan", "kvbm-storage"]));
        assert!(
            matches!(&new[..], [one] if one.starts_with("crates/kvbm-pool/Cargo.toml:1: `kvbm-pool` uses")),
            "{new:?}"
        );
        let gone = texts(MAP, &workspace(&[]));
        assert!(
            matches!(&gone[..], [one] if one.starts_with("ARCHITECTURE.md:6: `kvbm-pool` does not use")),
            "{gone:?}"
        );
    }

    #[test]
    fn arrows_up_missing_rows_and_rows_too_many_are_found() {
        let up = MAP.replace("| words | - |", "| words | pool |");
        assert!(
            texts(&up, &workspace(&["kvbm-plan"])).iter().any(|text| text.contains("arrows point down only"))
        );
        let missing = MAP.replace("| `kvbm-cli` | program | kvbm | a |\n", "");
        assert!(texts(&missing, &workspace(&["kvbm-plan"]))[0].contains("`kvbm-cli` is not on the map"));
        let many = MAP.replace("| `kvbm-cli` |", "| `kvbm-gui` |");
        assert!(
            texts(&many, &workspace(&["kvbm-plan"])).iter().any(|text| text.contains("no crate `kvbm-gui`"))
        );
    }
}
