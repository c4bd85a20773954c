//! Names of modules that say nothing.

use super::Finding;
use super::source::Source;

const NAMES: &[&str] = &["common", "helper", "helpers", "misc", "util", "utils"];

/// A file stands for the module that it is named after; the declaration is in another file.
pub(super) fn check(source: &Source) -> Option<Finding> {
    let stem = source.file.file_stem()?.to_str()?;
    let name = if stem == "mod" { source.file.parent()?.file_name()?.to_str()? } else { stem };
    NAMES
        .contains(&name)
        .then(|| source.finding(0, format!("a module called `{name}`: name it after what it does")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_folders_are_judged_by_the_module_they_make() {
        for file in ["crates/a/src/utils.rs", "crates/a/tests/common/mod.rs", "src/helpers.rs"] {
            assert!(check(&Source::new(file, "")).is_some(), "{file}");
        }
        for file in ["crates/a/src/utilization.rs", "crates/common/src/lib.rs", "tests/support/mod.rs"] {
            assert_eq!(check(&Source::new(file, "")), None, "{file}");
        }
    }
}
