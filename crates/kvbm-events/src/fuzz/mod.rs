//! What must hold whatever strangers send: the bodies of the fuzz targets `batch`, `snapshot` and
//! `engine` (`cargo xtask fuzz`). They panic where it does not hold.

mod engine;
mod holdings;
mod wire;

pub use engine::engine;
pub use wire::{batch, snapshot};

#[cfg(test)]
#[path = "../../../../fuzz/src/corpus.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpora_hold() {
        assert!(corpus::run("batch", &["tests/golden"], batch) > 0);
        assert!(corpus::run("snapshot", &[], snapshot) > 0);
        assert!(corpus::run("engine", &["tests/golden/vllm"], engine) > 0);
    }
}
