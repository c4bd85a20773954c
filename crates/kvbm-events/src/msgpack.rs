//! MessagePack, as far as events need it
//! (<https://github.com/msgpack/msgpack/blob/master/spec.md>): a reader that borrows and bounds
//! everything by the bytes that are really there, and writers of the shortest form.

use rmp::{Marker, encode};

/// Bytes that are not the MessagePack that was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected} at byte {at}")]
pub struct Malformed {
    /// What the format has there.
    pub expected: &'static str,
    /// Offset in the bytes given.
    pub at: usize,
}

/// A value of which only the head was read: what stands in it follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Head<'a> {
    Nil,
    Bool(bool),
    /// Not negative.
    Uint(u64),
    /// Negative.
    Int(i64),
    /// As 32 or 64 bits.
    Float(f64),
    Bin(&'a [u8]),
    /// Not checked to be UTF-8 yet.
    Str(&'a [u8]),
    /// This many values follow.
    Array(u32),
    /// This many pairs follow.
    Map(u32),
    /// Type and content.
    Ext(&'a [u8]),
}

/// Reads values from the front of a slice.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes that were not read yet.
    pub(crate) const fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// An error about the value that begins here.
    pub(crate) const fn malformed(&self, expected: &'static str) -> Malformed {
        Malformed { expected, at: self.at }
    }

    #[inline]
    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..count));
        let taken = taken.ok_or(Malformed { expected: "more bytes", at: self.bytes.len() })?;
        self.at += count;
        Ok(taken)
    }

    #[inline]
    fn be<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    /// A big-endian number of `width` bytes, at most 8.
    fn number(&mut self, width: usize) -> Result<u64, Malformed> {
        Ok(self.take(width)?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    /// Content behind its length of `width` bytes.
    fn content(&mut self, width: usize) -> Result<&'a [u8], Malformed> {
        let len = self.number(width)? as usize;
        self.take(len)
    }

    /// Type and content behind the content's length of `width` bytes.
    fn extension(&mut self, width: usize) -> Result<&'a [u8], Malformed> {
        let len = self.number(width)? as usize;
        self.take(len + 1)
    }

    /// The head of the next value; content of strings and binaries included.
    pub(crate) fn head(&mut self) -> Result<Head<'a>, Malformed> {
        let start = self.at;
        let [first] = self.be()?;
        let head = match Marker::from_u8(first) {
            Marker::FixPos(number) => Head::Uint(u64::from(number)),
            Marker::U8 => Head::Uint(self.number(1)?),
            Marker::U16 => Head::Uint(self.number(2)?),
            Marker::U32 => Head::Uint(self.number(4)?),
            Marker::U64 => Head::Uint(self.number(8)?),
            Marker::FixNeg(number) => Head::Int(i64::from(number)),
            Marker::I8 => signed(i64::from(i8::from_be_bytes(self.be()?))),
            Marker::I16 => signed(i64::from(i16::from_be_bytes(self.be()?))),
            Marker::I32 => signed(i64::from(i32::from_be_bytes(self.be()?))),
            Marker::I64 => signed(i64::from_be_bytes(self.be()?)),
            Marker::F32 => Head::Float(f64::from(f32::from_be_bytes(self.be()?))),
            Marker::F64 => Head::Float(f64::from_be_bytes(self.be()?)),
            Marker::Null => Head::Nil,
            Marker::False => Head::Bool(false),
            Marker::True => Head::Bool(true),
            Marker::FixStr(len) => Head::Str(self.take(usize::from(len))?),
            Marker::Str8 => Head::Str(self.content(1)?),
            Marker::Str16 => Head::Str(self.content(2)?),
            Marker::Str32 => Head::Str(self.content(4)?),
            Marker::Bin8 => Head::Bin(self.content(1)?),
            Marker::Bin16 => Head::Bin(self.content(2)?),
            Marker::Bin32 => Head::Bin(self.content(4)?),
            Marker::FixArray(len) => Head::Array(u32::from(len)),
            Marker::Array16 => Head::Array(self.number(2)? as u32),
            Marker::Array32 => Head::Array(self.number(4)? as u32),
            Marker::FixMap(pairs) => Head::Map(u32::from(pairs)),
            Marker::Map16 => Head::Map(self.number(2)? as u32),
            Marker::Map32 => Head::Map(self.number(4)? as u32),
            Marker::FixExt1 => Head::Ext(self.take(1 + 1)?),
            Marker::FixExt2 => Head::Ext(self.take(1 + 2)?),
            Marker::FixExt4 => Head::Ext(self.take(1 + 4)?),
            Marker::FixExt8 => Head::Ext(self.take(1 + 8)?),
            Marker::FixExt16 => Head::Ext(self.take(1 + 16)?),
            Marker::Ext8 => Head::Ext(self.extension(1)?),
            Marker::Ext16 => Head::Ext(self.extension(2)?),
            Marker::Ext32 => Head::Ext(self.extension(4)?),
            Marker::Reserved => return Err(Malformed { expected: "a MessagePack value", at: start }),
        };
        Ok(head)
    }

    /// Reads a head that `select` accepts, or says what was expected there.
    #[inline]
    fn expect<T>(
        &mut self,
        expected: &'static str,
        select: impl FnOnce(Head<'a>) -> Option<T>,
    ) -> Result<T, Malformed> {
        let at = self.at;
        let head = self.head()?;
        select(head).ok_or(Malformed { expected, at })
    }

    /// Elements of the array that begins here.
    pub(crate) fn array(&mut self, what: &'static str) -> Result<u32, Malformed> {
        self.expect(what, |head| match head {
            Head::Array(len) => Some(len),
            _ => None,
        })
    }

    /// A number with or without a fraction.
    pub(crate) fn float(&mut self, what: &'static str) -> Result<f64, Malformed> {
        self.expect(what, |head| match head {
            Head::Float(number) => Some(number),
            Head::Uint(number) => Some(number as f64),
            _ => None,
        })
    }

    /// An unsigned integer that fits `T`.
    #[inline]
    pub(crate) fn uint<T: TryFrom<u64>>(&mut self, what: &'static str) -> Result<T, Malformed> {
        self.expect(what, |head| match head {
            Head::Uint(number) => T::try_from(number).ok(),
            _ => None,
        })
    }

    /// A string.
    pub(crate) fn str(&mut self, what: &'static str) -> Result<&'a str, Malformed> {
        self.expect(what, |head| match head {
            Head::Str(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        })
    }

    /// A binary of exactly `N` bytes.
    pub(crate) fn bin<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        self.expect(what, |head| match head {
            Head::Bin(bytes) => bytes.try_into().ok(),
            _ => None,
        })
    }

    /// Reads a nil, if one begins here.
    #[inline]
    pub(crate) fn nil(&mut self) -> bool {
        let is_nil = self.bytes.get(self.at) == Some(&0xC0);
        self.at += usize::from(is_nil);
        is_nil
    }

    /// The bytes of the next `count` values, however deep they are nested. Takes no memory and time
    /// by the bytes there are.
    pub(crate) fn raw(&mut self, count: u64) -> Result<&'a [u8], Malformed> {
        let start = self.at;
        let mut open = count;
        while open > 0 {
            open -= 1;
            open = open.saturating_add(match self.head()? {
                Head::Array(len) => u64::from(len),
                Head::Map(pairs) => 2 * u64::from(pairs),
                _ => 0,
            });
        }
        Ok(&self.bytes[start..self.at])
    }
}

fn signed<'a>(number: i64) -> Head<'a> {
    u64::try_from(number).map_or(Head::Int(number), Head::Uint)
}

/// Functions that write one value, or the head of one, in its shortest form.
macro_rules! writers {
    ($($(#[$doc:meta])* $name:ident($value:ident: $type:ty) = $write:expr;)*) => {
        $(
            $(#[$doc])*
            #[inline]
            pub(crate) fn $name(out: &mut Vec<u8>, $value: $type) {
                // A vector takes any bytes.
                let _infallible = $write(out, $value);
            }
        )*
    };
}

writers! {
    /// Writes a number that is not negative.
    write_uint(number: u64) = encode::write_uint;
    /// Writes a number.
    write_int(number: i64) = encode::write_sint;
    /// Writes a number as 64 bits with a fraction.
    write_float(number: f64) = encode::write_f64;
    /// Writes the head of an array of so many values.
    write_array(len: usize) = |out, len| encode::write_array_len(out, len as u32);
    /// Writes the head of a map of so many pairs.
    write_map(pairs: usize) = |out, pairs| encode::write_map_len(out, pairs as u32);
    /// Writes a string of less than 4 GiB.
    write_str(text: &str) = encode::write_str;
    /// Writes a binary of less than 4 GiB.
    write_bin(bytes: &[u8]) = encode::write_bin;
}

/// Writes a nil.
pub(crate) fn write_nil(out: &mut Vec<u8>) {
    out.push(Marker::Null.to_u8());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out);
        out
    }

    /// Values and forms of the specification.
    #[test]
    fn every_form_is_read() {
        let cases: [(&[u8], Head<'_>); 22] = [
            (&[0x7F], Head::Uint(127)),
            (&[0xE0], Head::Int(-32)),
            (&[0xC0], Head::Nil),
            (&[0xC2], Head::Bool(false)),
            (&[0xC3], Head::Bool(true)),
            (&[0xCC, 200], Head::Uint(200)),
            (&[0xCD, 1, 0], Head::Uint(256)),
            (&[0xCE, 0, 1, 0, 0], Head::Uint(65_536)),
            (&[0xCF, 1, 0, 0, 0, 0, 0, 0, 0], Head::Uint(1 << 56)),
            (&[0xD0, 0x80], Head::Int(-128)),
            (&[0xD1, 0, 1], Head::Uint(1)),
            (&[0xD2, 0xFF, 0xFF, 0xFF, 0xFE], Head::Int(-2)),
            (&[0xD3, 0, 0, 0, 0, 0, 0, 0, 9], Head::Uint(9)),
            (&[0xCB, 0x3F, 0xF8, 0, 0, 0, 0, 0, 0], Head::Float(1.5)),
            (&[0xCA, 0x3F, 0xC0, 0, 0], Head::Float(1.5)),
            (&[0xA2, b'h', b'i'], Head::Str(b"hi")),
            (&[0xDA, 0, 1, b'x'], Head::Str(b"x")),
            (&[0xC4, 1, 7], Head::Bin(&[7])),
            (&[0xDC, 0, 3], Head::Array(3)),
            (&[0xDF, 0, 0, 0, 2], Head::Map(2)),
            (&[0xD5, 1, 2, 3], Head::Ext(&[1, 2, 3])),
            (&[0xC7, 1, 9, 5], Head::Ext(&[9, 5])),
        ];
        for (bytes, head) in cases {
            let mut reader = Reader::new(bytes);
            assert_eq!(reader.head(), Ok(head), "{bytes:02x?}");
            assert_eq!(reader.left(), 0, "{bytes:02x?}");
            for cut in 0..bytes.len() {
                assert!(Reader::new(&bytes[..cut]).head().is_err(), "{cut} of {bytes:02x?}");
            }
        }
        assert!(Reader::new(&[0xC1]).head().is_err(), "never used");
    }

    #[test]
    fn lengths_choose_the_shortest_head() {
        for (len, head) in [(0, 1), (31, 1), (32, 2), (255, 2), (256, 3), (65_535, 3), (65_536, 5)] {
            let text = "x".repeat(len);
            let bytes = written(|out| write_str(out, &text));
            assert_eq!(bytes.len(), head + len);
            assert_eq!(Reader::new(&bytes).str("text"), Ok(text.as_str()));
        }
        for (len, head) in [(0, 1), (15, 1), (16, 3), (65_535, 3), (65_536, 5)] {
            let bytes = written(|out| write_array(out, len));
            assert_eq!((bytes.len(), Reader::new(&bytes).array("list")), (head, Ok(len as u32)));
        }
        for (len, head) in [(0, 2), (255, 2), (256, 3), (65_536, 5)] {
            assert_eq!(written(|out| write_bin(out, &vec![0; len])).len(), head + len);
        }
    }

    #[test]
    fn errors_say_what_and_where() {
        let mut reader = Reader::new(&[0x01, 0xA1, b'x']);
        assert_eq!(reader.uint::<u8>("a number"), Ok(1));
        let error = reader.uint::<u8>("a number").unwrap_err();
        assert_eq!(error.to_string(), "expected a number at byte 1");
        assert!(Reader::new(&[0xCD, 1, 0]).uint::<u8>("a byte").is_err(), "256 does not fit");
        assert!(Reader::new(&[0xA1, 0xFF]).str("text").is_err(), "not UTF-8");
    }

    #[test]
    fn raw_values_keep_their_bytes_whatever_their_depth() {
        let mut deep = vec![0x91; 100_000];
        assert!(Reader::new(&deep).raw(1).is_err(), "the innermost value is missing");
        deep.push(0xC0);
        assert_eq!(Reader::new(&deep).raw(1).map(<[u8]>::len), Ok(deep.len()));
        let claims = [0xDD, 0xFF, 0xFF, 0xFF, 0xFF, 0xDF, 0xFF, 0xFF, 0xFF, 0xFF];
        assert!(Reader::new(&claims).raw(u64::MAX).is_err());
        let mut two = Reader::new(&[0x81, 0xA1, b'k', 0x92, 1, 2, 0xC3, 5]);
        assert_eq!(two.raw(2).map(<[u8]>::len), Ok(7));
        assert_eq!(two.left(), 1);
    }

    proptest! {
        #[test]
        fn numbers_are_read_as_written(number in any::<u64>(), shift in 0u32..64) {
            let number = number >> shift;
            let bytes = written(|out| write_uint(out, number));
            prop_assert_eq!(Reader::new(&bytes).uint::<u64>("a number"), Ok(number));
        }

        #[test]
        fn signed_numbers_are_read_as_written(number in any::<i64>(), shift in 0u32..64) {
            let number = number >> shift;
            let bytes = written(|out| write_int(out, number));
            prop_assert_eq!(Reader::new(&bytes).head(), Ok(signed(number)));
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64), count in any::<u64>()) {
            let mut reader = Reader::new(&bytes);
            let read = reader.raw(count).map(<[u8]>::len);
            prop_assert!(read.is_err() || read == Ok(bytes.len() - reader.left()));
        }
    }
}
