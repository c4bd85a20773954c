//! What must hold whatever comes over the wire: the body of the fuzz target `plan`
//! (`cargo xtask fuzz`). It panics where it does not hold.

use crate::wire::{DecodeError, EncodeError, decode_command, decode_message, encode_command, encode_message};
use std::fmt::Debug;

/// A command, and a message, that is read is written, and read again as the same.
pub fn plan(input: &[u8]) {
    is_written_and_read_again(decode_command(input), encode_command, decode_command);
    is_written_and_read_again(decode_message(input), encode_message, decode_message);
}

fn is_written_and_read_again<T: Debug + PartialEq>(
    read: Result<T, DecodeError>,
    encode: fn(&T) -> Result<Vec<u8>, EncodeError>,
    decode: fn(&[u8]) -> Result<T, DecodeError>,
) {
    let value = match read {
        Ok(value) => value,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let written = encode(&value).unwrap_or_else(|error| panic!("read, but cannot be written: {error}"));
    match decode(&written) {
        Ok(again) => assert_eq!(again, value),
        Err(error) => panic!("written, but cannot be read: {error}"),
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
        assert!(corpus::run("plan", &[], plan) > 0);
    }
}
