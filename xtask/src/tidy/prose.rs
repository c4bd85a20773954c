//! Plain documents: short sentences and lines, and a names table that is true.

use super::Finding;
use super::source::Source;

/// Documents whose sentences have fewer words than [`MAX_MEAN`] on average.
const SHORT_SENTENCES: &[&str] =
    &["ARCHITECTURE.md", "crates/kvbm-pool/DESIGN.md", "docs/design.md", "docs/operate.md"];
const MAX_MEAN: f64 = 18.0;

/// Longest line of prose and of comments.
const COLUMNS: usize = 100;

/// Documents with long lines: an entry, or a paragraph that a program writes, has one line.
const WIDE: &[&str] = &["CHANGELOG.md", "docs/config.md"];

/// Checks the documents among `sources`.
pub(super) fn check(sources: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources {
        let file = source.file.to_string_lossy();
        if SHORT_SENTENCES.contains(&file.as_ref()) {
            let mean = mean_sentence(&source.text);
            if mean >= MAX_MEAN {
                let text =
                    format!("a sentence has {mean:.1} words on average: fewer than {MAX_MEAN} are wanted");
                findings.push(source.finding(0, text));
            }
        }
        if file.ends_with(".md") && !WIDE.contains(&file.as_ref()) {
            findings.extend(long_lines(source));
        }
    }
    findings
}

/// Comments beyond [`COLUMNS`] in Rust code. Tables, code and single long words may be longer.
pub(super) fn comments(source: &Source) -> Vec<Finding> {
    let mut in_code = false;
    let mut findings = Vec::new();
    for (line, text) in (1..).zip(source.text.lines()) {
        let Some(comment) = text.trim_start().strip_prefix("//") else {
            in_code = false;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim_start();
        in_code ^= comment.starts_with("```");
        let is_exempt = in_code || comment.starts_with('|') || !comment.contains(' ');
        if !is_exempt && text.chars().count() > COLUMNS {
            let text = format!("a comment of more than {COLUMNS} columns: wrap it");
            findings.push(Finding { file: source.file.clone(), line, text });
        }
    }
    findings
}

/// Names that the map lists as kept from the reference documents and that no crate exports.
pub(super) fn kept_names(map: &Source, code: &[Source]) -> Vec<Finding> {
    let Some(start) = map.text.find("Names kept: ") else {
        return vec![
            map.finding(0, "no list `Names kept: ..`: it says which reference names exist".to_owned()),
        ];
    };
    let end = map.text[start..].find("Changed:").map_or(map.text.len(), |end| start + end);
    let names = map.text[start..end].split('`').skip(1).step_by(2);
    let exports = |name: &str| {
        ["struct", "enum", "trait", "type"].iter().any(|kind| {
            let declared = format!("pub {kind} {name}");
            let ends = |text: &str| !text.starts_with(|c: char| c.is_alphanumeric() || c == '_');
            code.iter().any(|source| {
                source
                    .without_tests()
                    .match_indices(&declared)
                    .any(|(at, _)| ends(&source.without_tests()[at + declared.len()..]))
            })
        })
    };
    let missing = names.filter(|name| !exports(name));
    missing
        .map(|name| map.finding(start, format!("`{name}` is listed as kept, and no crate exports it")))
        .collect()
}

/// Mean words of a sentence. Code, tables and headings do not count, nor do fragments of three
/// words.
fn mean_sentence(text: &str) -> f64 {
    let (mut words, mut sentences) = (0, 0);
    for paragraph in prose(text).split("\n\n") {
        for sentence in paragraph.split_inclusive(['.', '!', '?']).flat_map(|part| part.split("\n- ")) {
            let count = sentence.split_whitespace().count();
            if count > 3 {
                (words, sentences) = (words + count, sentences + 1);
            }
        }
    }
    f64::from(u32::try_from(words).unwrap_or(u32::MAX)) / f64::from(sentences.max(1))
}

fn prose(text: &str) -> String {
    let mut in_code = false;
    let lines = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        !(fence || in_code || line.trim_start().starts_with(['|', '#']))
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn long_lines(source: &Source) -> Vec<Finding> {
    let mut in_code = false;
    let mut findings = Vec::new();
    for (line, text) in (1..).zip(source.text.lines()) {
        in_code ^= text.trim_start().starts_with("```");
        if !in_code && !text.starts_with('|') && text.chars().count() > COLUMNS {
            let text = format!("a line of more than {COLUMNS} columns: wrap it");
            findings.push(Finding { file: source.file.clone(), line, text });
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_sentences_and_lines_are_found() {
        let long = "word ".repeat(39) + "word.\n";
        let found = check(&[Source::new("docs/operate.md", long.as_str())]);
        assert!(found.len() == 2 && found[0].text.contains("40.0 words"), "{found:?}");
        let wide = format!("# Title\n\n```\n{0}\n```\n| {0} |\n{0}\n", "x".repeat(120));
        let found = check(&[Source::new("ARCHITECTURE.md", wide)]);
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [7]);
        assert!(check(&[Source::new("CHANGELOG.md", long.as_str())]).is_empty());
        assert!(check(&[Source::new("src/lib.rs", long)]).is_empty());
    }

    #[test]
    fn wide_comments_are_found_and_tables_and_code_are_not() {
        let wide = "x ".repeat(60);
        let text = format!(
            "/// {wide}\n// | {wide} |\n//! ```\n//! {wide}\n//! ```\n    // {wide}\nlet a = 1; {wide}\n"
        );
        let found = comments(&Source::new("a.rs", text));
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [1, 6]);
    }

    #[test]
    fn code_tables_and_headings_are_no_sentences() {
        let text = "# A heading of many many words\n\nFour words stand here.\n\n```\na b c d e f g h\n```\n| a b c d e f |\n";
        assert!((mean_sentence(text) - 4.0).abs() < f64::EPSILON);
    }

    #[test]
    fn a_name_that_no_crate_exports_is_found() {
        let map = Source::new("ARCHITECTURE.md", "Names kept: `Pool`, `Gone`. Changed:\n`Other`\n");
        let code = [Source::new("crates/a/src/lib.rs", "pub struct Pool<T>(T);\npub struct GoneBy;\n")];
        let found = kept_names(&map, &code);
        assert!(found.len() == 1 && found[0].text.contains("`Gone`"), "{found:?}");
        assert_eq!(kept_names(&Source::new("ARCHITECTURE.md", ""), &code).len(), 1);
    }
}
