//! Files that have grown too long to read.

use super::Finding;
use super::source::Source;

const MAX_LINES: usize = 700;

pub(super) fn check(source: &Source) -> Option<Finding> {
    let lines = source.text.lines().count();
    (lines > MAX_LINES).then(|| {
        let text = format!("{lines} lines, at most {MAX_LINES} are allowed: split it by concept");
        Finding { file: source.file.clone(), line: MAX_LINES + 1, text }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_itself_is_allowed() {
        assert_eq!(check(&Source::new("a.rs", "x\n".repeat(MAX_LINES))), None);
        let finding = check(&Source::new("a.rs", "x\n".repeat(MAX_LINES + 1))).unwrap();
        assert!(finding.to_string().starts_with("a.rs:701: 701 lines"), "{finding}");
    }
}
