// The committed corpus of a target, for the tests of the crates that have its body: they include
// this file.

use std::path::Path;

/// Runs `body` on every file of `fuzz/corpus/TARGET`, and of the folders `more` of the crate; how
/// many.
pub(crate) fn run(target: &str, more: &[&str], body: fn(&[u8])) -> usize {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let committed = here.join("../../fuzz/corpus").join(target);
    let folders = more.iter().map(|folder| here.join(folder)).chain([committed]);
    let files = folders.flat_map(|folder| match folder.read_dir() {
        Ok(files) => files.filter_map(|file| Some(file.ok()?.path())),
        Err(error) => panic!("{}: {error}", folder.display()),
    });
    let mut count = 0;
    for file in files.filter(|file| file.is_file()) {
        // Told apart from its neighbours where the body panics.
        println!("{}", file.display());
        match std::fs::read(&file) {
            Ok(bytes) => body(&bytes),
            Err(error) => panic!("{}: {error}", file.display()),
        }
        count += 1;
    }
    count
}
