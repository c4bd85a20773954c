//! Tests that cannot fail.

use super::Finding;
use super::source::Source;
use std::collections::BTreeSet;

/// What makes a test able to fail on purpose. Names of checking functions count: `check(...)`,
/// `conformance::...`.
const SIGNS: &[&str] =
    &["assert", "panic", "expect", "check", "conform", "verify", "unwrap_err", "?", "must_"];

pub(super) fn check(source: &Source) -> Vec<Finding> {
    let functions = functions(&source.code);
    let checking = checking(&functions);
    let says_nothing = |test: &&Function<'_>| !test.should_panic && !is_checking(test.body, &checking);
    functions
        .iter()
        .filter(|function| function.is_test)
        .filter(says_nothing)
        .map(|test| {
            source.finding(test.at, format!("test `{}` asserts nothing: say what must hold", test.name))
        })
        .collect()
}

/// Names of the test functions of a file, those of `proptest!` included.
pub(super) fn tests(source: &Source) -> impl Iterator<Item = &str> {
    functions(&source.code).into_iter().filter(|function| function.is_test).map(|test| test.name)
}

/// A function with a body.
struct Function<'a> {
    name: &'a str,
    /// Byte of its `fn`.
    at: usize,
    body: &'a str,
    is_test: bool,
    should_panic: bool,
}

/// Names of the functions that check something, themselves or through others of the same file.
fn checking<'a>(functions: &[Function<'a>]) -> BTreeSet<&'a str> {
    let mut checking = BTreeSet::new();
    loop {
        let before = checking.len();
        let found: Vec<&str> = functions
            .iter()
            .filter(|f| is_checking(f.body, &checking))
            .map(|function| function.name)
            .collect();
        checking.extend(found);
        if checking.len() == before {
            return checking;
        }
    }
}

fn is_checking(body: &str, checking: &BTreeSet<&str>) -> bool {
    let is_letter = |c: char| c.is_alphanumeric() || c == '_';
    let calls = |name: &&str| {
        body.match_indices(*name).any(|(at, _)| {
            let (before, after) = (&body[..at], &body[at + name.len()..]);
            !before.ends_with(is_letter) && (after.starts_with('(') || after.starts_with("::<"))
        })
    };
    SIGNS.iter().any(|sign| body.contains(sign)) || checking.iter().any(calls)
}

fn functions(code: &str) -> Vec<Function<'_>> {
    let mut functions = Vec::new();
    let mut after_last = 0;
    for (at, _) in code.match_indices("fn ") {
        let preceded = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        if let Some((name, body, end)) = named(&code[at + 3..]).filter(|_| !preceded) {
            let attributes = attributes(&code[after_last..at]);
            let (is_test, should_panic) =
                (attributes.contains("#[test]"), attributes.contains("should_panic"));
            functions.push(Function { name, at, body, is_test, should_panic });
            // Functions inside this one are found as well, with their own attributes.
            after_last = at + 3 + end - body.len();
        }
    }
    functions
}

/// What stands between the last item, statement or opening brace and a function.
fn attributes(before: &str) -> &str {
    &before[before.rfind(['{', '}', ';']).map_or(0, |at| at + 1)..]
}

/// Where the body starts, or the semicolon of a function without one; those of array types are
/// inside brackets.
fn signature_end(rest: &str) -> Option<usize> {
    let mut depth = 0usize;
    rest.char_indices().find_map(|(at, c)| {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        (depth == 0 && matches!(c, '{' | ';')).then_some(at)
    })
}

/// Name, body with its braces, and where the body ends; `None` for a function without a body or a
/// type `fn (...)`.
fn named(rest: &str) -> Option<(&str, &str, usize)> {
    let name = &rest[..rest.find(|c: char| !(c.is_alphanumeric() || c == '_'))?];
    let open = signature_end(rest)?;
    if name.is_empty() || rest[open..].starts_with(';') {
        return None;
    }
    let mut depth = 0usize;
    let close = rest[open..].char_indices().find_map(|(offset, c)| {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        (depth == 0).then_some(open + offset)
    })?;
    Some((name, &rest[open..=close], close + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one test, spelled so that this file does not seem to contain it.
    fn file(attributes: &str, body: &str) -> Source {
        Source::new(
            "a.rs",
            format!("mod tests {{\n    #[{}]{attributes}\n    fn t() {{ {body} }}\n}}", "test"),
        )
    }

    #[test]
    fn a_test_without_an_assertion_is_found() {
        for body in ["", "let x = f();", "// assert\n", "f(\"assert\");", "if a { b() }"] {
            let source = file("", body);
            let findings = check(&source);
            assert_eq!(findings.len(), 1, "{body}");
            assert!(findings[0].to_string().starts_with("a.rs:3: test `t`"), "{}", findings[0]);
        }
    }

    #[test]
    fn what_a_test_calls_counts() {
        let helpers = "fn outer() { inner(1) }\n    fn inner<T: Copy>(t: T) -> [u8; 2] { assert!(x) }\n    fn other() {}\n    ";
        let with = |body: &str| {
            let source = file("", body);
            Source::new("a.rs", source.text.replace("mod tests {", &format!("mod tests {{ {helpers}")))
        };
        assert_eq!(check(&with("outer()")), []);
        assert_eq!(check(&with("inner::<u8>(1)")), []);
        for body in ["other()", "an_outer()", "outer"] {
            assert_eq!(check(&with(body)).len(), 1, "{body}");
        }
    }

    #[test]
    fn only_functions_with_the_attribute_are_tests() {
        let attribute = format!("#[{}]", "test");
        let text = format!(
            "{attribute}\n#[should_panic(expected = \"a\")]\nfn a() {{ fn b() {{}} }}\nfn c() {{}}\n{attribute}\nfn d();"
        );
        let source = Source::new("a.rs", text);
        assert_eq!(tests(&source).collect::<Vec<_>>(), ["a"]);
        assert_eq!(check(&source), []);
    }

    #[test]
    fn a_test_that_can_fail_is_not() {
        for body in
            ["assert!(x)", "if a { b() } prop_assert_eq!(a, b)", "check(1)", "conformance::run()", "f()?;"]
        {
            assert_eq!(check(&file("", body)), [], "{body}");
        }
        assert_eq!(check(&file("\n#[should_panic]", "f()")), []);
    }
}
