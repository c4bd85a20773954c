//! What must hold whatever the disk says: the bodies of the fuzz targets `journal`, `keys` and
//! `stripes` (`cargo xtask fuzz`). They panic where it does not hold.

mod input;
mod journal;
mod keys;
mod stripes;

pub use journal::journal;
pub use keys::keys;
pub use stripes::stripes;

#[cfg(test)]
#[path = "../../../../fuzz/src/corpus.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpora_hold() {
        assert!(corpus::run("journal", &["tests/corpus", "tests/golden"], journal) > 0);
        assert!(corpus::run("keys", &[], keys) > 0);
        assert!(corpus::run("stripes", &[], stripes) > 0);
    }
}
