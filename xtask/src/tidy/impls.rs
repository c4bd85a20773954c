//! Where the methods of a type stand: a type with `impl` blocks in many files has several concerns,
//! and each belongs to a part with its own data.

use super::Finding;
use super::source::Source;
use std::collections::BTreeMap;
use std::path::Path;

/// Files that inherent `impl` blocks of one type may be in.
const MOST_FILES: usize = 6;

/// A type: its crate's folder, its name, and its file where the crate has several of that name.
type Type<'a> = (&'a Path, &'a str, Option<&'a Path>);

/// Finds types whose inherent `impl` blocks are in too many files of their crate.
pub(super) fn check(code: &[Source]) -> Vec<Finding> {
    let files = || code.iter().filter_map(|source| Some((crate_of(&source.file)?, source)));
    let mut declared: BTreeMap<(&Path, &str), Vec<&Path>> = BTreeMap::new();
    for (folder, source) in files() {
        for name in declarations(source.without_tests()) {
            declared.entry((folder, name)).or_default().push(&source.file);
        }
    }
    let mut blocks: BTreeMap<Type<'_>, Vec<(&Source, usize)>> = BTreeMap::new();
    for (folder, source) in files() {
        for (name, at) in inherent(source.without_tests()) {
            let all = declared.get(&(folder, name)).map_or(&[][..], Vec::as_slice);
            let own = (all.len() > 1).then(|| all.iter().find(|file| **file == source.file)).flatten();
            let files = blocks.entry((folder, name, own.copied())).or_default();
            if files.last().is_none_or(|(last, _)| last.file != source.file) {
                files.push((source, at));
            }
        }
    }
    let finding = |((_, name, _), files): (Type<'_>, Vec<(&Source, usize)>)| {
        let list: Vec<_> = files.iter().map(|(source, _)| source.file.display().to_string()).collect();
        let text = format!(
            "`impl {name}` stands in {} files, at most {MOST_FILES} are allowed ({}): give its parts \
             their own data and methods",
            list.len(),
            list.join(", ")
        );
        files[0].0.finding(files[0].1, text)
    };
    blocks.into_iter().filter(|(_, files)| files.len() > MOST_FILES).map(finding).collect()
}

/// The folder of the crate that a source file belongs to.
fn crate_of(file: &Path) -> Option<&Path> {
    file.ancestors().find(|folder| folder.ends_with("src")).and_then(Path::parent)
}

/// Names of the types that a file declares.
fn declarations(code: &str) -> impl Iterator<Item = &str> {
    code.lines().filter_map(|line| {
        let line = line.trim_start();
        let rest = line.strip_prefix("pub").map(|rest| rest.strip_prefix('(').unwrap_or(rest));
        let line = rest.and_then(|rest| rest.split_once(' ')).map_or(line, |(_, item)| item);
        let kinds = ["struct ", "enum ", "union "];
        kinds.iter().find_map(|kind| line.strip_prefix(kind)).map(word)
    })
}

/// The types of inherent `impl` blocks, with their positions. An `impl` block begins a line.
fn inherent(code: &str) -> impl Iterator<Item = (&str, usize)> {
    code.match_indices("\nimpl").filter_map(|(at, _)| {
        let rest = &code[at + "\nimpl".len()..];
        let head = rest.split_once('{')?.0;
        let head = if head.starts_with('<') { behind_generics(head)? } else { head.strip_prefix(' ')? };
        let path = head.trim_start().split(|c: char| c == '<' || c.is_whitespace()).next()?;
        let is_of_trait = head.split_whitespace().any(|part| part == "for");
        (!is_of_trait).then(|| (path.rsplit("::").next().unwrap_or(path), at + 1))
    })
}

/// What follows generic parameters in angle brackets.
fn behind_generics(head: &str) -> Option<&str> {
    let (mut depth, mut before) = (0, ' ');
    for (at, c) in head.char_indices() {
        match c {
            '<' => depth += 1,
            // Not the arrow of a function type.
            '>' if before != '-' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return head.get(at + 1..);
        }
        before = c;
    }
    None
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(files: &[(String, &str)]) -> Vec<String> {
        let code: Vec<Source> = files.iter().map(|(file, text)| Source::new(file, *text)).collect();
        check(&code).iter().map(ToString::to_string).collect()
    }

    fn files(count: usize, text: &'static str) -> Vec<(String, &'static str)> {
        (0..count).map(|number| (format!("crates/a/src/m{number}.rs"), text)).collect()
    }

    #[test]
    fn a_type_with_methods_in_seven_files_is_found() {
        for block in
            ["\nimpl Core {\n}\n", "\nimpl<'a, F: Fn() -> u8> core::state::Core<'a, F>\nwhere\n{\n}\n"]
        {
            assert!(texts(&files(MOST_FILES, block)).is_empty(), "{block}");
            let found = texts(&files(MOST_FILES + 1, block));
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].starts_with("crates/a/src/m0.rs:2: `impl Core` stands in 7 files"), "{found:?}");
        }
    }

    #[test]
    fn traits_tests_and_types_of_one_name_are_left_out() {
        let of_a_trait = "\nimpl<T: Clone> Debug for Core<T> {\n}\n";
        let in_tests = "\nfn f() {}\n#[cfg(test)]\nmod tests {\nimpl Core {\n}\n}\n";
        let of_its_own = "pub(crate) struct Core;\n\nimpl Core {\n}\n";
        for block in [of_a_trait, in_tests, of_its_own] {
            assert!(texts(&files(20, block)).is_empty(), "{block}");
        }
        let mut mixed = files(2, of_its_own);
        mixed.extend(files(20, "\nimpl Core {\n}\n").split_off(2));
        assert_eq!(texts(&mixed).len(), 1, "the others are of one type");
    }
}
