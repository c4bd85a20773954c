//! Additions to times and conversions to durations that panic on a caller's value.

use super::Finding;
use super::source::Source;

/// Where the helper is.
const HELPER: &str = "crates/kvbm-plan/src/deadline.rs";

/// Names of variables and fields that hold a time.
const TIMES: &[&str] =
    &["Instant::now()", "clock::now()", "now", "began", "started", "deadline", "until", "since"];

/// Conversions that panic on numbers that are negative, too large or none.
const CONVERSIONS: &[&str] = &["from_secs_f64(", "from_secs_f32(", ".mul_f64(", ".mul_f32("];

/// A test crate: its durations are its own.
const SIMULATOR: &str = "crates/kvbm-sim";

pub(super) fn check(source: &Source) -> Vec<Finding> {
    if source.file.ends_with(HELPER)
        || source.file.starts_with(SIMULATOR)
        || source.file.components().any(|part| {
            part.as_os_str() == "tests" || part.as_os_str() == "tests.rs" || part.as_os_str() == "examples"
        })
    {
        return Vec::new();
    }
    let code = source.without_tests();
    let additions = code.match_indices(" + ").filter(|(at, _)| panics(&code[..*at], &code[at + 3..]));
    let sums = additions.map(|(at, _)| {
        let text =
            "a sum of a time and a duration panics where the clock ends: use `kvbm_plan::deadline_after`";
        source.finding(at, text.into())
    });
    let conversions = CONVERSIONS.iter().flat_map(|name| code.match_indices(name));
    let conversions = conversions.filter(|(at, _)| !code[..*at].ends_with("try_")).map(|(at, name)| {
        let name = name.trim_start_matches('.').trim_end_matches('(');
        let text = format!("`{name}` panics on a number out of range: use `try_from_secs_f64`");
        source.finding(at, text)
    });
    sums.chain(conversions).collect()
}

/// Whether `before` ends with a time and `after` begins with what is not a constant.
fn panics(before: &str, after: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let is_time = TIMES.iter().any(|time| {
        before.strip_suffix(time).is_some_and(|rest| !rest.ends_with(is_name) || time.ends_with("()"))
    });
    let after = after.trim_start_matches("Self::");
    let name = &after[..after.find(|c: char| !is_name(c)).unwrap_or(after.len())];
    let is_constant = name.starts_with(char::is_uppercase) && !name.contains(char::is_lowercase);
    let is_literal = ["Duration::from_secs(", "Duration::from_millis(", "Duration::from_micros("]
        .iter()
        .any(|made| after.strip_prefix(made).is_some_and(|rest| rest.starts_with(char::is_numeric)));
    is_time && !is_constant && !is_literal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(line: &str) -> usize {
        check(&Source::new(
            "crates/a/src/a.rs",
            format!("fn f() {{ {line} }}\n#[cfg(test)]\nmod tests {{ now + x }}"),
        ))
        .len()
    }

    #[test]
    fn what_panics_on_a_callers_duration_is_found() {
        for line in [
            "let a = Instant::now() + timeout;",
            "let a = std::time::Instant::now() + self.pause;",
            "let a = clock::now() + self.pause;",
            "self.until = now + 2 * deadline;",
            "wait(self.deadline + Duration::from_secs(seconds))",
            "Duration::from_secs_f64(tokens / speed)",
            "pause.mul_f64(1.5)",
        ] {
            assert_eq!(findings(line), 1, "{line}");
        }
    }

    #[test]
    fn constants_and_numbers_are_allowed() {
        for line in [
            "let a = Instant::now() + TIMEOUT;",
            "let a = now + Self::PAUSE;",
            "let a = now + Duration::from_secs(60);",
            "let a = known + 1;",
            "let a = Duration::try_from_secs_f64(b);",
            "let a = deadline_after(now, timeout);",
        ] {
            assert_eq!(findings(line), 0, "{line}");
        }
        assert_eq!(check(&Source::new(HELPER, "fn f() { now + duration }")), []);
    }
}
