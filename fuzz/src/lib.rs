//! What all targets share: a body is run on the fuzzer's bytes, and held to a bound of memory that
//! depends on their number alone.

mod heap;

use heap::Counting;

#[doc(hidden)]
pub use libfuzzer_sys::fuzz_target;

#[global_allocator]
static HEAP: Counting = Counting;

/// How much memory a body may take at a time.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Bytes, whatever the input.
    pub fixed: usize,
    /// Bytes for each byte of input.
    pub per_byte: usize,
}

/// Runs `body` on `input`.
///
/// # Panics
/// Where the body does, and where it took more than its bound: a number in the input was believed.
pub fn run(bound: Bound, input: &[u8], body: fn(&[u8])) {
    let most = bound.fixed + bound.per_byte * input.len();
    let taken = heap::peak_of(|| body(input));
    assert!(
        taken <= most,
        "{taken} bytes of memory for {} bytes of input, at most {most} are allowed",
        input.len()
    );
}

/// The program of a target: a body and its [`Bound`].
#[macro_export]
macro_rules! target {
    ($body:path, $fixed:expr, $per_byte:expr) => {
        $crate::fuzz_target!(|input: &[u8]| $crate::run(
            $crate::Bound { fixed: $fixed, per_byte: $per_byte },
            input,
            $body
        ));
    };
}
