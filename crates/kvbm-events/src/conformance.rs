//! What every [`EventTransport`] must do: run [`check`] in the tests of an implementation.

use crate::deadline;
use crate::{EventReceiver, EventTransport, Payload, SourceId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Generous: a correct transport answers much sooner.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs every check on transports made by `make`, each on its own.
///
/// # Panics
/// When the transport breaks the contract, with the rule in the message.
pub fn check<T: EventTransport>(make: impl Fn() -> T) {
    delivers_unchanged_in_order_to_every_subscriber(&make());
    waits_no_longer_than_asked(&make());
    a_stalled_subscriber_harms_nobody(&make());
    a_dropped_subscriber_harms_nobody(&make());
    questions_are_answered_by_who_answers_for_the_source(&make());
}

fn payload(number: u32, len: usize) -> Payload {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((0..len).map(|i| (i as u32).wrapping_mul(number).to_le_bytes()[0]));
    bytes.into()
}

fn publish(transport: &dyn EventTransport, payload: &Payload) {
    let sent = transport.publish(payload, PATIENCE);
    assert_eq!(sent, Ok(()), "{}: publish must succeed while the transport is up", transport.name());
}

fn subscribe(transport: &dyn EventTransport) -> Box<dyn EventReceiver> {
    match transport.subscribe() {
        Ok(receiver) => receiver,
        Err(error) => panic!("{}: subscribe failed: {error}", transport.name()),
    }
}

fn expect(name: &str, receiver: &mut dyn EventReceiver, wanted: &Payload) {
    let got = receiver.recv(PATIENCE);
    assert!(
        matches!(&got, Ok(Some(found)) if found == wanted),
        "{name}: payloads must arrive unchanged and in order, got {got:?}"
    );
}

fn delivers_unchanged_in_order_to_every_subscriber(transport: &dyn EventTransport) {
    let mut receivers = [subscribe(transport), subscribe(transport)];
    let sent: Vec<Payload> = (0..64).map(|n| payload(n, n as usize * 37)).collect();
    for payload in &sent {
        publish(transport, payload);
    }
    for receiver in &mut receivers {
        for wanted in &sent {
            expect(transport.name(), receiver.as_mut(), wanted);
        }
        assert_eq!(receiver.dropped(), 0, "{}: 64 small payloads fit any queue", transport.name());
    }
}

fn waits_no_longer_than_asked(transport: &dyn EventTransport) {
    let mut receiver = subscribe(transport);
    let start = Instant::now();
    assert_eq!(
        receiver.recv(Duration::from_millis(1)),
        Ok(None),
        "{}: nothing was published",
        transport.name()
    );
    assert!(start.elapsed() < PATIENCE, "{}: recv must return after its timeout", transport.name());
}

fn a_stalled_subscriber_harms_nobody(transport: &dyn EventTransport) {
    let _stalled = subscribe(transport);
    let mut reader = subscribe(transport);
    for number in 0..2_000 {
        let sent = payload(number, 1024);
        publish(transport, &sent);
        expect(transport.name(), reader.as_mut(), &sent);
    }
}

fn a_dropped_subscriber_harms_nobody(transport: &dyn EventTransport) {
    let mut reader = subscribe(transport);
    drop(subscribe(transport));
    let sent = payload(7, 7);
    publish(transport, &sent);
    expect(transport.name(), reader.as_mut(), &sent);
}

fn questions_are_answered_by_who_answers_for_the_source(transport: &dyn EventTransport) {
    let name = transport.name();
    let ask = |source, question: &Payload| transport.ask(SourceId(source), question, PATIENCE);
    let question = payload(1, 300_000);
    // Where nobody can say that nobody answers, this takes as long as it may.
    let unanswered = |source| transport.ask(SourceId(source), &question, Duration::from_secs(2)).is_err();
    assert!(unanswered(7), "{name}: nobody answers yet");
    let start = |source: u64| {
        let responder = move |question: &[u8]| {
            Payload::from(question.iter().rev().map(|byte| byte ^ source as u8).collect::<Vec<u8>>())
        };
        match transport.answer(SourceId(source), Arc::new(responder)) {
            Ok(answering) => answering,
            Err(error) => panic!("{name}: answering failed: {error}"),
        }
    };
    let answering = [start(7), start(8)];
    for source in [8, 7, 8] {
        let wanted: Vec<u8> = question.iter().rev().map(|byte| byte ^ source as u8).collect();
        let got = ask(source, &question);
        assert!(
            matches!(&got, Ok(answer) if **answer == *wanted),
            "{name}: who answers for a source gets the question unchanged, and the asker the answer"
        );
    }
    drop(answering);
    let deadline = deadline::after(PATIENCE);
    while !unanswered(7) {
        assert!(Instant::now() < deadline, "{name}: nobody answers any more");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Answering, InProcessConfig, InProcessTransport, Responder, TransportError};

    #[test]
    fn the_in_process_transport_conforms() {
        check(InProcessTransport::default);
        check(|| InProcessTransport::new(InProcessConfig { queue_batches: 64, queue_bytes: 1 << 20 }));
    }

    /// Flips a bit in every payload.
    struct Corrupting(InProcessTransport);

    impl EventTransport for Corrupting {
        fn name(&self) -> &'static str {
            "corrupting"
        }
        fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
            let mut bytes = payload.to_vec();
            bytes[0] ^= 1;
            self.0.publish(&Arc::from(bytes), timeout)
        }
        fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
            self.0.subscribe()
        }
        fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
            self.0.answer(source, responder)
        }
        fn ask(
            &self,
            source: SourceId,
            question: &Payload,
            timeout: Duration,
        ) -> Result<Payload, TransportError> {
            self.0.ask(source, question, timeout)
        }
    }

    #[test]
    #[should_panic(expected = "payloads must arrive unchanged")]
    fn a_corrupting_transport_does_not() {
        check(|| Corrupting(InProcessTransport::default()));
    }
}
