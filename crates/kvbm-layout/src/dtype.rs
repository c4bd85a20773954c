//! Element types of a KV cache: only their width matters to a layout, their name matters to people
//! and to identity.

use std::fmt;
use std::str::FromStr;

/// Element type of the keys and values.
///
/// Formats narrower than a byte have no `DType`. Pack them along the head (`U8` with half the
/// elements) if bytes may be permuted, or declare them as an [`OpaquePlane`](crate::OpaquePlane),
/// which is copied whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[repr(u8)]
pub enum DType {
    /// 8-bit unsigned integer, also the carrier of packed formats.
    U8 = 0,
    /// 8-bit signed integer.
    I8 = 1,
    /// 8-bit float, 4 exponent and 3 mantissa bits (OCP FP8).
    F8E4M3 = 2,
    /// 8-bit float, 5 exponent and 2 mantissa bits (OCP FP8).
    F8E5M2 = 3,
    /// IEEE half precision.
    F16 = 4,
    /// bfloat16.
    BF16 = 5,
    /// 16-bit unsigned integer.
    U16 = 6,
    /// 16-bit signed integer.
    I16 = 7,
    /// IEEE single precision.
    F32 = 8,
    /// 32-bit unsigned integer.
    U32 = 9,
    /// 32-bit signed integer.
    I32 = 10,
    /// IEEE double precision.
    F64 = 11,
    /// 64-bit unsigned integer.
    U64 = 12,
    /// 64-bit signed integer.
    I64 = 13,
}

impl DType {
    /// Every element type, in the order of its wire code.
    pub const ALL: [Self; 14] = [
        Self::U8,
        Self::I8,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::F16,
        Self::BF16,
        Self::U16,
        Self::I16,
        Self::F32,
        Self::U32,
        Self::I32,
        Self::F64,
        Self::U64,
        Self::I64,
    ];

    /// Bytes per element: 1, 2, 4 or 8.
    pub const fn width(self) -> u32 {
        match self {
            Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::BF16 | Self::U16 | Self::I16 => 2,
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F64 | Self::U64 | Self::I64 => 8,
        }
    }

    /// The name used in configuration and messages, such as `bf16` or `f8_e4m3`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::F8E4M3 => "f8_e4m3",
            Self::F8E5M2 => "f8_e5m2",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::F32 => "f32",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F64 => "f64",
            Self::U64 => "u64",
            Self::I64 => "i64",
        }
    }

    /// The stable code of this type in serialized layouts.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The type with this wire code, if there is one.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no element type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown dtype `{name}`; known are u8, i8, f8_e4m3, f8_e5m2, f16, bf16, u16, i16, f32, u32, i32, f64, u64, i64 \
     (also PyTorch's float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, float64)"
)]
pub struct UnknownDType {
    /// What was given.
    pub name: String,
}

impl FromStr for DType {
    type Err = UnknownDType;

    /// Accepts our names and those of torch, without regard to case.
    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        let lower = name.to_ascii_lowercase();
        let alias = match lower.as_str() {
            "fp8" | "fp8_e4m3" | "float8_e4m3fn" | "f8e4m3" => Some(Self::F8E4M3),
            "fp8_e5m2" | "float8_e5m2" | "f8e5m2" => Some(Self::F8E5M2),
            "fp16" | "half" | "float16" => Some(Self::F16),
            "bfloat16" => Some(Self::BF16),
            "fp32" | "float" | "float32" => Some(Self::F32),
            "fp64" | "double" | "float64" => Some(Self::F64),
            "uint8" => Some(Self::U8),
            "int8" => Some(Self::I8),
            _ => None,
        };
        alias
            .or_else(|| Self::ALL.into_iter().find(|dtype| dtype.name() == lower))
            .ok_or_else(|| UnknownDType { name: name.chars().take(64).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for (index, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), index);
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert!([1, 2, 4, 8].contains(&dtype.width()));
        }
        assert_eq!(DType::from_code(14), None);
    }

    #[test]
    fn engine_names_are_understood_and_unknown_ones_are_named() {
        assert_eq!("BFloat16".parse(), Ok(DType::BF16));
        assert_eq!("float8_e4m3fn".parse(), Ok(DType::F8E4M3));
        let error = "int3".parse::<DType>().unwrap_err();
        assert!(error.to_string().contains("`int3`"), "{error}");
    }
}
