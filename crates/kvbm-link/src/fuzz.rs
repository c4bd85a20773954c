//! What must hold of any bytes that the other end sends: the body of the fuzz target `link`
//! (`cargo xtask fuzz`). It panics where it does not hold.

use crate::attach::{MAX_TERMS, decode_offer as decode_attach_offer};
use crate::frame::{FrameKind, MAX_HANDSHAKE, frame, read_frame};
use crate::handshake::{LeaderTerms, SharedSetting, WorkerTerms, decode_offer, read_answer, read_failure};
use kvbm_plan::{Epoch, Rank};

/// A frame that is read is written as the same bytes. An offer ends with an answer or a refusal
/// that fits into a frame; one of a process that attaches has terms of a bounded length. What is no
/// offer, and what a leader reads as its answer, ends with an error that says something.
pub fn link(input: &[u8]) {
    let mut rest = input;
    loop {
        let before = rest;
        let Ok((kind, body)) = read_frame(&mut rest) else { return };
        let read = &before[..before.len() - rest.len()];
        assert_eq!(frame(kind, &body), read);
        answer(&body);
        refuse(&body);
        attach(&body);
        if let Err(error) = read_answer(kind, &body) {
            assert!(!error.to_string().is_empty());
        }
        assert!(!read_failure(&body).to_string().is_empty());
    }
}

/// A worker reads it as an offer.
fn answer(body: &[u8]) {
    let (terms, versions) = match decode_offer(body) {
        Ok(offer) => offer,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let worker = worker_like(&terms);
    let refused = versions.and_then(|()| worker.check(&terms, Some(terms.epoch)));
    let Err(refusal) = refused else { return };
    assert!(!refusal.field.is_empty() || terms.settings.iter().any(|setting| setting.name.is_empty()));
}

/// A daemon reads it as the offer of a process that attaches.
fn attach(body: &[u8]) {
    match decode_attach_offer(body) {
        Ok(Ok(terms)) => assert!(terms.len() <= MAX_TERMS),
        Ok(Err(versions)) => assert!(!versions.is_empty()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A worker that differs from it refuses it with a frame that can be read.
fn refuse(body: &[u8]) {
    let Ok((terms, _)) = decode_offer(body) else { return };
    let strange = WorkerTerms {
        deployment: format!("not {}", terms.deployment),
        settings: Vec::new(),
        ..worker_like(&terms)
    };
    let Err(refusal) = strange.check(&terms, Some(Epoch(terms.epoch.0.saturating_add(1)))) else {
        panic!("another deployment passes")
    };
    let Ok(bytes) = refusal.frame() else { panic!("a refusal cannot be written") };
    let Ok((FrameKind::Refusal, body)) = read_frame(&mut &bytes[..]) else {
        panic!("a refusal cannot be read")
    };
    assert!(body.len() <= MAX_HANDSHAKE);
}

fn worker_like(terms: &LeaderTerms) -> WorkerTerms {
    let alike = |setting: &SharedSetting| setting.clone();
    WorkerTerms {
        deployment: terms.deployment.clone(),
        namespace: Some(terms.namespace),
        rank: Rank(terms.rank.0),
        ranks: terms.ranks,
        settings: terms.settings.iter().map(alike).collect(),
    }
}

#[cfg(test)]
#[path = "../../../fuzz/src/corpus.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_holds() {
        assert!(corpus::run("link", &[], link) > 0);
    }
}
