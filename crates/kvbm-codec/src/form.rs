//! Which numbers become which codes.

use std::fmt;

/// How numbers are shortened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Lossy {
    /// 8-bit floating point with 3 bits of mantissa.
    Fp8E4m3 = 16,
    /// Whole numbers from -127 to 127.
    Int8 = 17,
    /// Whole numbers from -7 to 7.
    Int4 = 18,
}

/// What the numbers of a content are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Element {
    /// bfloat16.
    Bf16 = 1,
    /// IEEE half precision.
    F16 = 2,
    /// IEEE single precision.
    F32 = 3,
}

impl Lossy {
    /// Each of them.
    pub const ALL: [Self; 3] = [Self::Fp8E4m3, Self::Int8, Self::Int4];
}

impl Element {
    /// Each of them.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Its bytes.
    pub const fn width(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

impl fmt::Display for Lossy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        })
    }
}

/// Which numbers, and how they are shortened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LossyForm {
    /// How they are shortened.
    pub lossy: Lossy,
    /// What they are.
    pub element: Element,
}

/// Whether a frame that begins so is lossy.
pub(crate) fn is_lossy(first: u8) -> bool {
    Lossy::ALL.iter().any(|lossy| *lossy as u8 == first)
}
