//! Requests to replay: read from a Mooncake trace, or made up.

mod mooncake;
mod synthetic;

pub use mooncake::{TraceError, read};
pub use synthetic::generate;

use std::collections::HashMap;

/// Requests in the order of their arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    requests: Vec<Request>,
    ids: Vec<u64>,
    tenants: Vec<String>,
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
    /// Whose it is: a place among the tenants and one, or 0 for nobody's.
    tenant: usize,
}

impl Request {
    /// Whose it is: a place in [`Trace::tenants`] and one, or 0 for nobody's.
    pub fn tenant(&self) -> usize {
        self.tenant
    }
}

impl Trace {
    /// Adds a request. Each id names a block together with everything before it, so equal ids mean
    /// equal prefixes.
    pub fn push(&mut self, timestamp_ms: u64, input_length: u64, ids: &[u64]) {
        let first = self.ids.len();
        self.ids.extend_from_slice(ids);
        self.requests.push(Request { timestamp_ms, input_length, first, blocks: ids.len(), tenant: 0 });
    }

    /// The last request is a tenant's.
    fn set_tenant(&mut self, name: &str) {
        let at = self.tenants.iter().position(|known| known == name).unwrap_or_else(|| {
            self.tenants.push(name.to_owned());
            self.tenants.len() - 1
        });
        if let Some(request) = self.requests.last_mut() {
            request.tenant = at + 1;
        }
    }

    /// Gives the requests to tenants: those that begin alike to the same, in turn.
    pub fn deal(&mut self, names: impl IntoIterator<Item = String>) {
        self.tenants = names.into_iter().collect();
        let mut of = HashMap::new();
        for request in &mut self.requests {
            let next = of.len();
            let root = self.ids.get(request.first).copied().filter(|_| request.blocks > 0);
            request.tenant = match self.tenants.len() {
                0 => 0,
                tenants => *of.entry(root).or_insert(1 + next % tenants),
            };
        }
    }

    /// The tenants that requests are of, by name.
    pub fn tenants(&self) -> &[String] {
        &self.tenants
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
