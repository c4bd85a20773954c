//! Words that mark unfinished work.

use super::Finding;
use super::source::Source;

/// The word, whether it also counts in comments, and the way out. Spelled in two parts, so that
/// this file is clean.
const WORDS: &[(&[&str], bool, &str)] = &[
    (&["to", "do!"], false, "write it, or return an error that names what is missing"),
    (&["unimple", "mented!"], false, "write it, or return an error that names what is missing"),
    (&["db", "g!"], false, "remove it"),
    (&["#[ig", "nore"], false, "let the test run, or find out at run time that it cannot and say so"),
    (&["TO", "DO"], true, "do it now or open an issue"),
    (&["FIX", "ME"], true, "do it now or open an issue"),
    (&["XX", "X"], true, "do it now or open an issue"),
];

pub(super) fn check(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (parts, in_comments, way_out) in WORDS {
        let word = parts.concat();
        let text = if *in_comments { &source.text } else { &source.code };
        for (at, _) in text.match_indices(&word) {
            if !in_word(text, at, word.len()) {
                findings.push(source.finding(at, format!("`{word}`: {way_out}")));
            }
        }
    }
    findings
}

/// Whether what was found is a part of a longer word.
fn in_word(text: &str, at: usize, len: usize) -> bool {
    let is_letter = |c: char| c.is_alphanumeric() || c == '_';
    let first = text[at..].starts_with(is_letter);
    let last = text[..at + len].ends_with(is_letter);
    (first && text[..at].ends_with(is_letter)) || (last && text[at + len..].starts_with(is_letter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_is_found_where_it_counts() {
        for (parts, in_comments, _) in WORDS {
            let word = parts.concat();
            let findings = check(&Source::new("a.rs", format!("fn f() {{\n    {word}\n}}")));
            assert_eq!(findings.len(), 1, "{word}");
            assert_eq!(findings[0].line, 2);
            let comment = check(&Source::new("a.rs", format!("// {word}")));
            assert_eq!(comment.len(), usize::from(*in_comments), "{word} in a comment");
        }
    }

    #[test]
    fn longer_words_are_other_words() {
        let longer = ["XX", "XX not_to", "do!() "].concat();
        assert_eq!(check(&Source::new("a.rs", longer)), []);
    }
}
