//! Mooncake traces: JSON lines of `{"timestamp", "input_length", "output_length", "hash_ids"}`, and
//! `"tenant"` where requests are of several.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;

use super::Trace;

/// Longest line; a request of a million blocks is shorter.
const MAX_LINE: u64 = 16 << 20;
/// Most blocks of a trace: 2 GiB of ids.
const MAX_BLOCKS: usize = 1 << 28;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Most tenants of a trace: far more than can have shares.
const MAX_TENANTS: usize = 1024;

/// A trace that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error(
        "cannot read the trace {file}: {source}; name a file of Mooncake JSON lines, or leave --trace out for a made-up workload"
    )]
    Read {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// A line is not a request.
    #[error(
        "{file}:{line}: {what}; expected one JSON object per line with \"timestamp\" and \"input_length\" (whole \
         numbers) and \"hash_ids\" (an array of whole numbers)"
    )]
    Line {
        /// The file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// There is nothing in it.
    #[error("{file} holds no request: expected Mooncake JSON lines, one request each")]
    Empty {
        /// The file.
        file: String,
    },
}

/// The fields we use; `output_length` and any others are not looked at.
#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    hash_ids: Vec<u64>,
    tenant: Option<String>,
}

/// Reads the trace in `path`.
pub fn read(path: &Path) -> Result<Trace, TraceError> {
    let file = path.display().to_string();
    let reader = File::open(path).map_err(|source| TraceError::Read { file: file.clone(), source })?;
    parse(BufReader::with_capacity(1 << 20, reader), &file)
}

fn parse(mut reader: impl BufRead, file: &str) -> Result<Trace, TraceError> {
    let mut trace = Trace::default();
    let mut seen = HashSet::new();
    let mut text = Vec::new();
    for number in 1.. {
        let wrong = |what: String| TraceError::Line { file: file.to_owned(), line: number, what };
        text.clear();
        let read = (&mut reader)
            .take(MAX_LINE + 1)
            .read_until(b'\n', &mut text)
            .map_err(|source| TraceError::Read { file: file.to_owned(), source })?;
        if read == 0 {
            break;
        }
        if read as u64 > MAX_LINE {
            return Err(wrong(format!("the line is longer than {MAX_LINE} bytes")));
        }
        // Some editors write a mark at the beginning of a file that says that it is UTF-8.
        let text = text.strip_prefix(BYTE_ORDER_MARK).filter(|_| number == 1).unwrap_or(&text);
        if text.trim_ascii().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_slice(text).map_err(|error| wrong(reason(&error)))?;
        seen.clear();
        if let Some(id) = line.hash_ids.iter().find(|id| !seen.insert(**id)) {
            return Err(wrong(format!(
                "hash_ids has {id} twice, but an id names a block with all before it"
            )));
        }
        if trace.ids.len() + line.hash_ids.len() > MAX_BLOCKS {
            return Err(wrong(format!("the trace has more than {MAX_BLOCKS} blocks")));
        }
        trace.push(line.timestamp, line.input_length, &line.hash_ids);
        if let Some(tenant) = &line.tenant {
            trace.set_tenant(tenant);
            if trace.tenants.len() > MAX_TENANTS {
                return Err(wrong(format!("the trace has requests of more than {MAX_TENANTS} tenants")));
            }
        }
    }
    if trace.requests.is_empty() {
        return Err(TraceError::Empty { file: file.to_owned() });
    }
    Ok(trace)
}

/// The parser's message, with the column but without its own "line 1".
fn reason(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or_default();
    format!("{message} (column {})", error.column())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn requests_are_read_in_order() {
        let text =
            b"{\"timestamp\": 0, \"input_length\": 1030, \"output_length\": 5, \"hash_ids\": [0, 1, 2]}\n\n\
                     {\"hash_ids\": [0, 7], \"input_length\": 600, \"timestamp\": 27000, \"extra\": null}";
        let trace = parse(&text[..], "t").unwrap();
        assert_eq!(trace.num_blocks(), 5);
        let [first, second] = trace.requests() else { panic!("two requests") };
        assert_eq!(trace.blocks(first), [0, 1, 2]);
        assert_eq!(trace.blocks(second), [0, 7]);
        assert_eq!((second.timestamp_ms, second.input_length), (27_000, 600));
    }

    #[test]
    fn a_byte_order_mark_at_the_beginning_is_passed_over() {
        let line = "{\"timestamp\": 0, \"input_length\": 1, \"hash_ids\": [7]}\n";
        for text in [format!("\u{feff}{line}"), format!("\u{feff}\n{line}")] {
            assert_eq!(parse(text.as_bytes(), "t").unwrap().num_blocks(), 1);
        }
        let later = parse(format!("{line}\u{feff}{line}").as_bytes(), "t").unwrap_err().to_string();
        assert!(later.starts_with("t:2: "), "{later}");
    }

    #[test]
    fn requests_may_be_tenants() {
        let line = |tenant: &str, id: u64| {
            format!("{{\"timestamp\": 0, \"input_length\": 1, \"hash_ids\": [{id}]{tenant}}}\n")
        };
        let text =
            [("", 1), (", \"tenant\": \"b\"", 2), (", \"tenant\": \"a\"", 1), (", \"tenant\": \"b\"", 1)];
        let text: String = text.iter().map(|(tenant, id)| line(tenant, *id)).collect();
        let mut trace = parse(text.as_bytes(), "t").unwrap();
        let of =
            |trace: &Trace| trace.requests().iter().map(super::super::Request::tenant).collect::<Vec<_>>();
        assert_eq!((trace.tenants(), of(&trace)), (&["b".to_owned(), "a".to_owned()][..], vec![0, 1, 2, 1]));
        trace.deal(["x".to_owned(), "y".to_owned()]);
        assert_eq!(of(&trace), [1, 2, 1, 1], "by the first block");
    }

    #[test]
    fn errors_name_file_line_and_what_was_expected() {
        let good = "{\"timestamp\": 0, \"input_length\": 1, \"hash_ids\": [0]}\n";
        for (bad, what) in [
            ("nonsense", "column"),
            ("{\"timestamp\": 0, \"hash_ids\": [0]}", "missing field `input_length`"),
            ("{\"timestamp\": -1, \"input_length\": 1, \"hash_ids\": [0]}", "invalid value: integer `-1`"),
            ("{\"timestamp\": 0, \"input_length\": 1, \"hash_ids\": [\"a\"]}", "invalid type: string \"a\""),
            ("{\"timestamp\": 0, \"input_length\": 1, \"hash_ids\": [4, 4]}", "hash_ids has 4 twice"),
            ("{\"timestamp\": 0, \"input_length\": 1", "EOF while parsing"),
        ] {
            let error = parse(format!("{good}{bad}\n").as_bytes(), "traces/x.jsonl").unwrap_err().to_string();
            assert!(error.starts_with("traces/x.jsonl:2: ") && error.contains(what), "{bad}: {error}");
            assert!(error.contains("expected one JSON object per line"), "{error}");
        }
        assert!(parse(&b"\n"[..], "t").unwrap_err().to_string().contains("no request"));
        let error = read(Path::new("no/such/trace.jsonl")).unwrap_err().to_string();
        assert!(error.contains("no/such/trace.jsonl"), "{error}");
    }

    #[test]
    fn an_endless_line_is_refused() {
        let error = parse(BufReader::new(std::io::repeat(b' ')), "t").unwrap_err().to_string();
        assert!(error.contains("longer than"), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(parse(&bytes[..], "t").err().is_none_or(|error| error.to_string().contains('t')));
        }
    }
}
