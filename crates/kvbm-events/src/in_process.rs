//! The transport inside one process: a bounded queue per subscriber.

use crate::InProcessConfig;
use crate::queue::{Queue, QueueReceiver};
use crate::responders::Responders;
use crate::{Answering, EventReceiver, EventTransport, Payload, Responder, SourceId, TransportError};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::Duration;

const NAME: &str = "in-process";

/// Delivers to subscribers of the same process. Publishing never waits: a full queue loses its
/// oldest payload.
#[derive(Default)]
pub struct InProcessTransport {
    config: InProcessConfig,
    subscribers: Mutex<Vec<Weak<Queue>>>,
    responders: Arc<Responders>,
}

impl std::fmt::Debug for InProcessTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InProcessTransport").field("config", &self.config).finish_non_exhaustive()
    }
}

impl InProcessTransport {
    /// A transport without subscribers.
    pub fn new(config: InProcessConfig) -> Self {
        Self { config, subscribers: Mutex::default(), responders: Arc::default() }
    }

    /// Living subscribers.
    pub fn subscribers(&self) -> usize {
        self.subscribers.lock().iter().filter(|queue| queue.strong_count() > 0).count()
    }
}

impl EventTransport for InProcessTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn publish(&self, payload: &Payload, _timeout: Duration) -> Result<(), TransportError> {
        if payload.len() > self.config.queue_bytes {
            let reason = format!("{} bytes exceed the queue of {}", payload.len(), self.config.queue_bytes);
            return Err(TransportError::Refused { transport: NAME, reason });
        }
        let mut subscribers = self.subscribers.lock();
        subscribers.retain(|queue| match queue.upgrade() {
            Some(queue) => {
                queue.push(Arc::clone(payload), payload.len(), &self.config);
                true
            }
            None => false,
        });
        Ok(())
    }

    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        let queue = Arc::new(Queue::default());
        self.subscribers.lock().push(Arc::downgrade(&queue));
        Ok(Box::new(QueueReceiver::new(queue, NAME)))
    }

    fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
        Ok(self.responders.add(source, responder))
    }

    fn ask(
        &self,
        source: SourceId,
        question: &Payload,
        _timeout: Duration,
    ) -> Result<Payload, TransportError> {
        let Some(responder) = self.responders.find(source) else {
            let reason = format!("no publisher answers for source {source}");
            return Err(TransportError::Unavailable { transport: NAME, reason });
        };
        Ok(responder(question))
    }
}

impl Drop for InProcessTransport {
    fn drop(&mut self) {
        for queue in self.subscribers.get_mut().drain(..) {
            if let Some(queue) = queue.upgrade() {
                queue.close();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(byte: u8, len: usize) -> Payload {
        vec![byte; len].into()
    }

    #[test]
    fn a_slow_subscriber_loses_its_oldest_and_others_nothing() {
        let transport = InProcessTransport::new(InProcessConfig { queue_batches: 4, queue_bytes: 1 << 20 });
        let mut slow = transport.subscribe().unwrap();
        let mut quick = transport.subscribe().unwrap();
        for byte in 0..10 {
            transport.publish(&payload(byte, 8), Duration::ZERO).unwrap();
            assert_eq!(quick.recv(Duration::ZERO).unwrap().unwrap()[0], byte);
        }
        assert_eq!((slow.dropped(), quick.dropped()), (6, 0));
        let kept: Vec<u8> = std::iter::from_fn(|| slow.recv(Duration::ZERO).unwrap()).map(|p| p[0]).collect();
        assert_eq!(kept, [6, 7, 8, 9]);
    }

    #[test]
    fn bytes_bound_the_queue_too() {
        let transport = InProcessTransport::new(InProcessConfig { queue_batches: 100, queue_bytes: 100 });
        let mut receiver = transport.subscribe().unwrap();
        for byte in 0..5 {
            transport.publish(&payload(byte, 40), Duration::ZERO).unwrap();
        }
        assert_eq!(receiver.dropped(), 3);
        assert_eq!(receiver.recv(Duration::ZERO).unwrap().unwrap()[0], 3);
        let error = transport.publish(&payload(9, 101), Duration::ZERO).unwrap_err();
        assert!(matches!(error, TransportError::Refused { .. }), "{error}");
    }

    #[test]
    fn queues_of_dropped_subscribers_are_freed() {
        let transport = InProcessTransport::default();
        drop(transport.subscribe().unwrap());
        let _kept = transport.subscribe().unwrap();
        transport.publish(&payload(1, 1), Duration::ZERO).unwrap();
        assert_eq!(transport.subscribers.lock().len(), 1);
        assert_eq!(transport.subscribers(), 1);
    }

    #[test]
    fn a_dropped_transport_lets_its_subscribers_read_the_rest_then_closes() {
        let transport = InProcessTransport::default();
        let mut receiver = transport.subscribe().unwrap();
        transport.publish(&payload(7, 1), Duration::ZERO).unwrap();
        drop(transport);
        assert_eq!(receiver.recv(Duration::from_secs(60)).unwrap().unwrap()[0], 7);
        assert_eq!(receiver.recv(Duration::from_secs(60)), Err(TransportError::Closed { transport: NAME }));
    }
}
