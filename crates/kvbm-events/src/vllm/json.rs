//! Payloads as JSON, for people and scripts.

use super::event::{EngineBatch, EngineEvent, EngineHash, Raw};
use crate::msgpack::{Head, Reader};
use std::fmt::{self, Write as _};

/// Deepest nesting that is shown; what is deeper becomes `null`.
const MAX_DEPTH: u32 = 32;

impl fmt::Display for EngineBatch {
    /// One line of JSON; bytes become `{"hex": "..."}`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{\"ts\":")?;
        float(f, self.timestamp)?;
        f.write_str(",\"events\":[")?;
        for (at, event) in self.events.iter().enumerate() {
            f.write_str(if at > 0 { "," } else { "" })?;
            fmt::Display::fmt(event, f)?;
        }
        f.write_str("],\"data_parallel_rank\":")?;
        match self.data_parallel_rank {
            Some(rank) => write!(f, "{rank}}}"),
            None => f.write_str("null}"),
        }
    }
}

impl fmt::Display for EngineEvent {
    /// One line of JSON, with every field that is set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The wire form has the same fields in the same order.
        let batch = EngineBatch { timestamp: 0.0, events: vec![self.clone()], data_parallel_rank: None };
        let bytes = super::encode(&batch);
        let mut reader = Reader::new(&bytes);
        // The heads of payload, timestamp and list.
        for _ in 0..3 {
            reader.head().map_err(|_| fmt::Error)?;
        }
        value(&mut reader, f, MAX_DEPTH).map_err(|_| fmt::Error)
    }
}

impl fmt::Display for Raw {
    /// JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        value(&mut Reader::new(&self.0), f, MAX_DEPTH)
    }
}

impl fmt::Debug for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for EngineHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uint(number) => write!(f, "{number}"),
            Self::Int(number) => write!(f, "{number}"),
            Self::Bytes(bytes) => hex(f, bytes),
        }
    }
}

fn value(reader: &mut Reader<'_>, f: &mut fmt::Formatter<'_>, depth: u32) -> fmt::Result {
    if depth == 0 {
        reader.raw(1).map_err(|_| fmt::Error)?;
        return f.write_str("null");
    }
    match reader.head().map_err(|_| fmt::Error)? {
        Head::Bool(flag) => write!(f, "{flag}"),
        Head::Uint(number) => write!(f, "{number}"),
        Head::Int(number) => write!(f, "{number}"),
        Head::Float(number) => float(f, number),
        Head::Nil => f.write_str("null"),
        Head::Str(text) => string(f, &String::from_utf8_lossy(text)),
        Head::Bin(bytes) | Head::Ext(bytes) => {
            f.write_str("{\"hex\":\"")?;
            hex(f, bytes)?;
            f.write_str("\"}")
        }
        Head::Array(len) => {
            f.write_char('[')?;
            for at in 0..len {
                f.write_str(if at > 0 { "," } else { "" })?;
                value(reader, f, depth - 1)?;
            }
            f.write_char(']')
        }
        Head::Map(pairs) => {
            f.write_char('{')?;
            for at in 0..pairs {
                f.write_str(if at > 0 { "," } else { "" })?;
                let key = reader.raw(1).map_err(|_| fmt::Error)?;
                match Reader::new(key).head() {
                    Ok(Head::Str(text)) => string(f, &String::from_utf8_lossy(text))?,
                    // JSON has no other keys than strings. A list or a map would be a string with
                    // quotes inside, which are escaped once more at each level: it is shown as the
                    // bytes that it is.
                    Ok(Head::Array(_) | Head::Map(_)) => {
                        f.write_char('"')?;
                        hex(f, key)?;
                        f.write_char('"')?;
                    }
                    _ => string(f, &Raw(key.to_vec()).to_string())?,
                }
                f.write_char(':')?;
                value(reader, f, depth - 1)?;
            }
            f.write_char('}')
        }
    }
}

fn hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// JSON has no infinite numbers.
fn float(f: &mut fmt::Formatter<'_>, number: f64) -> fmt::Result {
    if number.is_finite() { write!(f, "{number:?}") } else { f.write_str("null") }
}

fn string(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_char('"')?;
    for char in text.chars() {
        match char {
            '"' => f.write_str("\\\"")?,
            '\\' => f.write_str("\\\\")?,
            '\n' => f.write_str("\\n")?,
            '\r' => f.write_str("\\r")?,
            '\t' => f.write_str("\\t")?,
            '\u{8}' => f.write_str("\\b")?,
            '\u{c}' => f.write_str("\\f")?,
            control if (control as u32) < 0x20 => write!(f, "\\u{:04x}", control as u32)?,
            other => f.write_char(other)?,
        }
    }
    f.write_char('"')
}
