//! The map and the pool's design stay short: people read them whole.

use super::Finding;
use super::source::Source;
use std::path::Path;

/// Most lines of the map.
const LINES: usize = 200;
/// Most terms of its glossary.
const TERMS: usize = 60;

/// The design of a crate, relative to the root.
const DESIGN: &str = "crates/kvbm-pool/DESIGN.md";
/// Most lines of it.
const DESIGN_LINES: usize = 150;

/// A design that is too long, and one that is not there.
pub(super) fn check_design(sources: &[Source]) -> Vec<Finding> {
    let Some(design) = sources.iter().find(|source| source.file == Path::new(DESIGN)) else {
        let text = "no such document: name it in xtask/src/tidy/map_size.rs".to_owned();
        return vec![Finding { file: DESIGN.into(), line: 0, text }];
    };
    too_long(design, DESIGN_LINES, "comments of the code").into_iter().collect()
}

/// A map that is too long, a glossary that is, and one that is not there.
pub(super) fn check(map: &Source) -> Vec<Finding> {
    let mut findings: Vec<Finding> = too_long(map, LINES, "docs/").into_iter().collect();
    let Some((at, terms)) = glossary(&map.text) else {
        findings.push(map.finding(0, "no table below `## Glossary`: it says what terms mean".to_owned()));
        return findings;
    };
    if terms > TERMS {
        let text = format!(
            "{terms} terms, at most {TERMS} are allowed: remove what the field's engineers know, or no text uses"
        );
        findings.push(map.finding(at, text));
    }
    findings
}

fn too_long(source: &Source, most: usize, elsewhere: &str) -> Option<Finding> {
    let lines = source.text.lines().count();
    let text = format!("{lines} lines, at most {most} are allowed: move details into {elsewhere}");
    (lines > most).then(|| source.finding(0, text))
}

/// Where the glossary begins, and how many terms it has. Its rows alternate terms and meanings.
fn glossary(text: &str) -> Option<(usize, usize)> {
    const HEADING: &str = "\n## Glossary\n";
    let at = text.find(HEADING)? + 1;
    let section = text[at..].lines().skip(1).take_while(|line| !line.starts_with("## "));
    let rows = section.filter_map(|line| line.strip_prefix('|')?.trim_end().strip_suffix('|'));
    // The first two rows are the heads of the columns and the line below them.
    let terms = |row: &str| row.split('|').step_by(2).filter(|term| !term.trim().is_empty()).count();
    let terms: usize = rows.skip(2).map(terms).sum();
    (terms > 0).then_some((at, terms))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map with so many rows of two terms and then one of one, and so many lines behind them.
    fn texts(rows: usize, more: usize) -> Vec<String> {
        let (row, line) = ("| a | b | c | d |\n".repeat(rows), "\n".repeat(more));
        let text = format!(
            "# Map\n\n| x | y |\n\n## Glossary\n\n| term | meaning | term | meaning |\n|---|---|---|---|\n\
             {row}| e | f | | |\n\n## Next\n| x | y |\n{line}"
        );
        check(&Source::new("MAP.md", text)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_glossary_with_too_many_terms_is_found() {
        assert_eq!(texts(29, 0), [""; 0], "59");
        let found = texts(30, 0);
        assert!(found.len() == 1 && found[0].starts_with("MAP.md:5: 61 terms"), "{found:?}");
    }

    #[test]
    fn a_map_with_too_many_lines_is_found() {
        // Twelve lines are around the row and what is behind it.
        assert_eq!(texts(1, LINES - 13), [""; 0]);
        let found = texts(1, LINES - 12);
        assert!(found.len() == 1 && found[0].starts_with("MAP.md:1: 201 lines"), "{found:?}");
    }

    #[test]
    fn a_design_with_too_many_lines_is_found() {
        let found = |file: &str, lines: usize| check_design(&[Source::new(file, "\n".repeat(lines))]);
        assert_eq!(found(DESIGN, DESIGN_LINES), []);
        assert!(found("docs/operate.md", 1)[0].text.contains("no such document"));
        let found = found(DESIGN, DESIGN_LINES + 1);
        assert!(found.len() == 1 && found[0].text.starts_with("151 lines"), "{found:?}");
    }

    #[test]
    fn a_map_without_a_glossary_is_found() {
        for text in ["# Map\n", "# Map\n\n## Glossary\n\nNone.\n"] {
            assert_eq!(check(&Source::new("MAP.md", text)).len(), 1, "{text}");
        }
    }
}
