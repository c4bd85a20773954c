//! What must hold whatever a journal says about its slots: the body of the fuzz target `geometry`
//! (`cargo xtask fuzz`). It panics where it does not hold.

use crate::SlotGeometry;
use kvbm_layout::BlockLayout;

/// A geometry that is read is written, and read again as the same but for the model's name; a slot
/// has as many bytes as it says.
pub fn geometry(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let read: SlotGeometry = match text.parse() {
        Ok(read) => read,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let written = read.to_string();
    let again: SlotGeometry = written.parse().unwrap_or_else(|error| panic!("{written}: {error}"));
    assert_eq!(
        (again.to_string(), &again),
        (written, &SlotGeometry { model: again.model.clone(), ..read.clone() })
    );
    assert_eq!(read.differs(&again), None);
    match read.slot() {
        Ok(slot) => {
            let sizes = [read.layers.len(), read.heads.len()].map(|size| size as u128);
            let numbers = [read.outer, read.tokens, read.head_dim, read.dtype.width()].map(u128::from);
            let combinations: u128 = sizes.iter().chain(&numbers).product();
            assert_eq!(u128::from(slot.bytes_per_block()), combinations);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[cfg(test)]
#[path = "../../../fuzz/src/corpus.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_holds() {
        assert!(corpus::run("geometry", &[], geometry) > 0);
    }
}
