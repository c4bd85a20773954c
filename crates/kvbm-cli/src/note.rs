//! Lines beside the results, on standard error.

use std::io::Write;

/// Tells something to whoever watches. Nobody need: unlike `eprintln!` this goes on when standard
/// error was closed (`kvbm replay 2>&1 | head`).
pub fn note(line: &str) {
    let _unheard = writeln!(std::io::stderr().lock(), "{line}");
}
