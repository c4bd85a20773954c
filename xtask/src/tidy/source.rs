//! Files, and Rust source with its comments and strings blanked out.

use super::Finding;
use anyhow::Context;
use std::path::{Path, PathBuf};

/// A text file of the workspace.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// Relative to the root.
    pub(super) file: PathBuf,
    /// As it is on disk.
    pub(super) text: String,
    /// Rust only: of the same length and lines, comments and the insides of strings and characters
    /// replaced by spaces.
    pub(super) code: String,
    without_tests: String,
}

impl Source {
    pub(super) fn new(file: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        let (file, text) = (file.into(), text.into());
        let code = if is_rust(&file) { blank(&text) } else { String::new() };
        let without_tests = blank_tests(&code);
        Self { file, text, code, without_tests }
    }

    pub(super) fn is_rust(&self) -> bool {
        is_rust(&self.file)
    }

    /// The code, the items that only tests compile replaced by spaces. Fields and statements stay.
    pub(super) fn without_tests(&self) -> &str {
        &self.without_tests
    }

    /// A finding at byte `at` of the text.
    pub(super) fn finding(&self, at: usize, text: String) -> Finding {
        let line = 1 + self.text[..at].matches('\n').count();
        Finding { file: self.file.clone(), line, text }
    }
}

fn is_rust(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "rs")
}

/// Every text file in `folders` that people write: Rust, shell, TOML, Markdown, CUDA and C++, and
/// files without ending.
pub(super) fn load(root: &Path, folders: &[&str]) -> anyhow::Result<Vec<Source>> {
    let mut sources = Vec::new();
    for folder in folders {
        visit(root, &root.join(folder), &mut sources)?;
    }
    Ok(sources)
}

/// The files with this ending in the root itself and in `docs/`.
pub(super) fn load_files(root: &Path, ending: &str) -> anyhow::Result<Vec<Source>> {
    let mut sources = Vec::new();
    for entry in std::fs::read_dir(root).with_context(|| root.display().to_string())? {
        let path = entry?.path();
        if path.is_file() && path.extension().is_some_and(|extension| extension == ending) {
            sources.push(read(root, &path)?);
        }
    }
    visit(root, &root.join("docs"), &mut sources)?;
    Ok(sources)
}

const WRITTEN_BY_PEOPLE: &[&str] = &["", "rs", "sh", "toml", "md", "cu", "cuh", "h", "cpp", "py", "yml"];

fn visit(root: &Path, path: &Path, sources: &mut Vec<Source>) -> anyhow::Result<()> {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).with_context(|| path.display().to_string())? {
            let entry = entry?.path();
            if !entry.ends_with("target") {
                visit(root, &entry, sources)?;
            }
        }
    } else if path.is_file() {
        let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        if WRITTEN_BY_PEOPLE.contains(&ending.as_str()) {
            sources.push(read(root, path)?);
        }
    }
    Ok(())
}

fn read(root: &Path, path: &Path) -> anyhow::Result<Source> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let file = path.strip_prefix(root).unwrap_or(path);
    Ok(Source::new(file, String::from_utf8_lossy(&bytes).into_owned()))
}

/// Replaces comments and the insides of strings and character literals by spaces; keeps bytes in
/// place.
fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = token_end(bytes, at);
        if let Some(end) = end {
            for byte in &mut out[at..end] {
                if *byte != b'\n' {
                    *byte = b' ';
                }
            }
            at = end;
        } else {
            at += 1;
        }
    }
    // Only whole tokens were replaced, and by ASCII.
    String::from_utf8_lossy(&out).into_owned()
}

/// Where the comment, string or character that starts at `at` ends; `None` for anything else.
fn token_end(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    let find = |needle: &[u8], from: usize| {
        rest[from..].windows(needle.len()).position(|window| window == needle).map(|found| at + from + found)
    };
    match rest {
        [b'/', b'/', ..] => Some(find(b"\n", 2).unwrap_or(bytes.len())),
        [b'/', b'*', ..] => Some(find(b"*/", 2).map_or(bytes.len(), |end| end + 2)),
        [b'"', ..] => Some(at + 1 + quoted(&rest[1..], b'"')),
        [b'r', b'"' | b'#', ..] if !is_word(bytes, at) => {
            let hashes = rest[1..].iter().take_while(|&&byte| byte == b'#').count();
            if rest.get(1 + hashes) != Some(&b'"') {
                return None;
            }
            let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
            Some(find(&close, 2 + hashes).map_or(bytes.len(), |end| end + close.len()))
        }
        [b'\'', b'\\', ..] => Some(at + 1 + quoted(&rest[1..], b'\'')),
        // A character of one to four bytes, else a lifetime.
        [b'\'', ..] => {
            let end = (2..=5).find(|&end| rest.get(end) == Some(&b'\''))?;
            let one = std::str::from_utf8(&rest[1..end]).is_ok_and(|inside| inside.chars().count() == 1);
            one.then_some(at + end + 1)
        }
        _ => None,
    }
}

/// Bytes up to and including the closing quote, escapes skipped.
fn quoted(inside: &[u8], quote: u8) -> usize {
    let mut at = 0;
    while at < inside.len() {
        match inside[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    inside.len()
}

/// Whether the byte before `at` belongs to a word, so that what starts at `at` is its tail.
fn is_word(bytes: &[u8], at: usize) -> bool {
    at.checked_sub(1).is_some_and(|before| bytes[before].is_ascii_alphanumeric() || bytes[before] == b'_')
}

/// How the attribute of an item begins that only tests compile.
const TEST_ATTRIBUTES: [&str; 2] = ["#[cfg(test)]", "#[cfg(all(test"];

/// Replaces items that only tests compile by spaces, with their attributes. `code` is blanked.
fn blank_tests(code: &str) -> String {
    let mut out = code.as_bytes().to_vec();
    for start in TEST_ATTRIBUTES {
        for (at, _) in code.match_indices(start) {
            let item = at + attributes_len(&code[at..]);
            let Some(len) = item_len(&code[item..]) else { continue };
            for byte in &mut out[at..item + len] {
                if *byte != b'\n' {
                    *byte = b' ';
                }
            }
        }
    }
    // Only whole items were replaced, and by ASCII.
    String::from_utf8_lossy(&out).into_owned()
}

/// Bytes in front of the item that has these attributes.
fn attributes_len(code: &str) -> usize {
    let mut rest = code.trim_start();
    while rest.starts_with("#[") {
        let mut depth = 0_u32;
        let end = rest.char_indices().find_map(|(at, c)| {
            match c {
                '[' => depth += 1,
                ']' => depth = depth.saturating_sub(1),
                _ => {}
            }
            (c == ']' && depth == 0).then_some(at + 1)
        });
        rest = rest[end.unwrap_or(rest.len())..].trim_start();
    }
    code.len() - rest.len()
}

/// Bytes of the item that `code` begins with; `None` for what is no item.
fn item_len(code: &str) -> Option<usize> {
    let public = code.strip_prefix("pub").map_or(code, str::trim_start);
    let item =
        public.strip_prefix('(').and_then(|rest| rest.split_once(')')).map_or(public, |(_, item)| item);
    let words = item.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    let mut words = words.skip_while(|word| ["unsafe", "async", "extern"].contains(word));
    let ends_with_semicolon = match (words.next()?, words.next()) {
        ("use" | "static" | "type", _) => true,
        ("const", next) => next != Some("fn"),
        ("fn" | "mod" | "impl" | "struct" | "enum" | "union" | "trait" | "macro_rules", _) => false,
        _ => return None,
    };
    let mut depth = 0_usize;
    code.char_indices().find_map(|(at, c)| {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        let ends = depth == 0 && (c == ';' || (c == '}' && !ends_with_semicolon));
        ends.then_some(at + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_strings_and_characters_are_blanked_and_nothing_else() {
        // What is left of the text, spaces aside.
        let cases = [
            ("let a = 1; // b {\nc", "leta=1;\nc"),
            ("a /* { \n */ b", "a\nb"),
            ("f(\"{ \\\" }\", x)", "f(,x)"),
            ("r\"{\" r#\"\"}\"# var\"x\" br\"}\"", "varbr"),
            ("'{' '\\'' <'a> 'é'", "<'a>"),
            ("r#type", "r#type"),
        ];
        for (text, left) in cases {
            assert_eq!(blank(text).replace(' ', ""), left, "{text}");
            assert_eq!(blank(text).len(), text.len());
        }
    }

    #[test]
    fn items_of_tests_are_left_out_and_what_follows_them_stays() {
        let left = |text: &str| {
            let source = Source::new("a.rs", text);
            assert_eq!(source.without_tests().len(), text.len());
            source.without_tests().replace([' ', '\n'], "")
        };
        for item in [
            "mod tests;",
            "mod tests { fn f() { if a { b() } } }",
            "#[path = \"b.rs\"]\n/// A comment.\nmod tests;",
            "pub(in crate::b) mod tests { }",
            "use a::{b, c};",
            "pub const fn f(a: [u8; 2]) -> u8 { 1 }",
            "const A: [B; 1] = [B { c: 1 }];",
            "struct A(u8);",
            "impl A {\n fn b() {}\n}",
            "macro_rules! a { () => { b; }; }",
        ] {
            for attribute in ["#[cfg(test)]", "#[cfg(all(test, not(miri)))]"] {
                let text = format!("mod a;\n{attribute}\n{item}\nfn b() {{}}");
                assert_eq!(left(&text), "moda;fnb(){}", "{text}");
            }
        }
        assert_eq!(left("a { #[cfg(test)] b: 1, c: 2 }"), "a{#[cfg(test)]b:1,c:2}", "no item");
        assert_eq!(left("#[cfg(any(test))] mod a;"), "#[cfg(any(test))]moda;");
    }

    #[test]
    fn an_unclosed_string_ends_with_the_file() {
        assert_eq!(blank("a \"b\\"), "a    ");
        assert_eq!(blank("a /* b"), "a     ");
    }

    #[test]
    fn findings_name_the_line() {
        let source = Source::new("a.rs", "x\ny\nz");
        assert_eq!(source.finding(4, String::new()).line, 3);
        assert_eq!(source.finding(0, String::new()).line, 1);
    }
}
