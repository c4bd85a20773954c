//! Tests that cannot fail.

use super::Finding;
use super::source::Source;

/// What makes a test able to fail on purpose. Names of checking functions count: `check(...)`, `conformance::...`.
const SIGNS: &[&str] =
    &["assert", "panic", "expect", "check", "conform", "verify", "unwrap_err", "?", "must_"];

pub(super) fn check(source: &Source) -> Vec<Finding> {
    tests(source)
        .into_iter()
        .filter(|test| !test.should_panic && !SIGNS.iter().any(|sign| test.body.contains(sign)))
        .map(|test| {
            source.finding(test.at, format!("test `{}` asserts nothing: say what must hold", test.name))
        })
        .collect()
}

/// A test function.
pub(super) struct Test<'a> {
    pub(super) name: &'a str,
    /// Byte of its attribute.
    pub(super) at: usize,
    body: &'a str,
    should_panic: bool,
}

/// Every test function of a file, those of `proptest!` included.
pub(super) fn tests(source: &Source) -> Vec<Test<'_>> {
    source.code.match_indices("#[test]").filter_map(|(at, _)| test(&source.code, at)).collect()
}

fn test(code: &str, at: usize) -> Option<Test<'_>> {
    let function = at + code[at..].find("fn ")?;
    let rest = &code[function + 3..];
    let name = &rest[..rest.find(|c: char| !(c.is_alphanumeric() || c == '_'))?];
    let mut depth = 0usize;
    let open = rest.find('{')?;
    let close = rest[open..].char_indices().find_map(|(offset, c)| {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        (depth == 0).then_some(open + offset)
    })?;
    let should_panic = code[at..function].contains("should_panic");
    Some(Test { name, at, body: &rest[open..=close], should_panic })
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
            assert!(findings[0].to_string().starts_with("a.rs:2: test `t`"), "{}", findings[0]);
        }
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
