//! Requests to replay: read from a Mooncake trace, or made up.

mod mooncake;
mod synthetic;

pub use mooncake::{TraceError, read};
pub use synthetic::generate;

/// Requests in the order of their arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    requests: Vec<Request>,
    ids: Vec<u64>,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Milliseconds since the start of the trace.
    pub timestamp_ms: u64,
    /// Tokens of the prompt.
    pub input_length: u64,
    first: usize,
    blocks: usize,
}

impl Trace {
    /// Adds a request. Each id names a block together with everything before it, so equal ids mean equal prefixes.
    pub fn push(&mut self, timestamp_ms: u64, input_length: u64, ids: &[u64]) {
        let first = self.ids.len();
        self.ids.extend_from_slice(ids);
        self.requests.push(Request { timestamp_ms, input_length, first, blocks: ids.len() });
    }

    /// The requests.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The blocks of `request`, which must be one of this trace's.
    pub fn blocks(&self, request: &Request) -> &[u64] {
        &self.ids[request.first..request.first + request.blocks]
    }

    /// Blocks of all requests together.
    pub fn num_blocks(&self) -> u64 {
        self.ids.len() as u64
    }
}
