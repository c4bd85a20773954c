//! What must hold of any bytes: the bodies of the fuzz targets (`cargo xtask fuzz`). They panic
//! where it does not hold.

use crate::admin;
use crate::config::ModelConfig;

/// A request to the server of metrics, the index or administration, and the JSON of a call.
pub fn request(input: &[u8]) {
    admin::fuzz::call(input);
}

/// A model's `config.json`. It is refused with a reason, or describes blocks whose sizes can be
/// computed: a rank of eight has no more bytes than a rank that is alone.
pub fn model(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match ModelConfig::from_hf(text, 16) {
        Ok(model) => {
            for group in model.cache_groups() {
                let bytes = |ranks| group.rank_bytes(model.page_size, model.dtype, ranks);
                assert!(bytes(8) <= bytes(1));
            }
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

    /// The file, all its beginnings, and with each of its bytes changed.
    fn around(body: fn(&[u8]), input: &[u8]) {
        body(input);
        for at in 0..input.len() {
            body(&input[..at]);
            let mut changed = input.to_vec();
            changed[at] ^= 0x10;
            body(&changed);
        }
    }

    #[test]
    fn requests_of_the_corpus_and_bytes_around_them_hold() {
        assert!(corpus::run("request", &[], |input| around(request, input)) > 8);
    }

    #[test]
    fn models_of_the_corpus_and_bytes_around_them_hold() {
        let configurations = "../kvbm-model/tests/configs";
        assert!(corpus::run("model", &[configurations], |input| around(model, input)) > 8);
    }
}
