//! What must hold of any call of an operator: a part of the fuzz target `request`.

use super::LIMITS;
use super::call_arguments::{CHAIN, Fields, MAX_PIN_S, Refusal};
use crate::http;
use kvbm_tokens::Namespace;
use std::time::Duration;

/// Fields of the calls beside those of a chain.
const OTHERS: &[&str] = &["tiers", "iterations", "seconds", "tier", "timeout_s", "level"];

/// Reads a request as the server of calls does, and its body as calls do. What is refused is
/// refused with a reason.
pub(crate) fn call(bytes: &[u8]) {
    let Some(request) = http::fuzz::request(bytes, &LIMITS) else { return };
    let read = Fields::parse(&request.body, &[CHAIN, OTHERS]).and_then(|fields| {
        let namespace = Namespace::new("fuzz");
        refused(fields.tier());
        refused(fields.tiers());
        refused(fields.timeout(Duration::from_secs(1)));
        refused(fields.seconds("seconds", MAX_PIN_S));
        refused(fields.whole("iterations"));
        refused(fields.text("level"));
        let chain = fields.chain(&namespace)?;
        // No more blocks than the text has room to name.
        assert!(chain.chain().len() <= request.body.len());
        Ok(())
    });
    refused(read);
}

fn refused<T>(read: Result<T, Refusal>) {
    if let Err(Refusal { status, why }) = read {
        assert!(status >= 400 && !why.is_empty());
    }
}
