//! Comparing blocks instead of copying them.

use serde::{Deserialize, Serialize};

/// How a plan compares the bytes at its source with those at its destination. It writes nothing.
///
/// Numbers are equal if they differ by at most `tolerance_ppm` millionths of the larger of their
/// magnitudes, or of the root mean square of the run of bytes that they lie in. The second is for
/// numbers near 0, which have the error of the sum that they came from. A number equals no NaN,
/// unless both have the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// What the bytes are.
    pub elements: Elements,
    /// Millionths. With 0, bytes are compared.
    pub tolerance_ppm: u32,
}

/// What the bytes of a block are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Elements {
    /// Nothing that is known: equal bytes are equal, whatever the tolerance.
    Bytes,
    /// IEEE single precision, little-endian.
    F32,
    /// IEEE half precision, little-endian.
    F16,
    /// bfloat16, little-endian.
    BF16,
}
