//! What the thread of a publisher is told.

#![cfg_attr(kvbm_sim, allow(dead_code, reason = "a simulation has no threads"))]

use crate::TransportError;
use crossbeam_channel::Sender;
use std::time::Duration;

/// Wakes the thread of a [`Publisher`](crate::Publisher). Never waits.
#[derive(Clone, Debug)]
pub struct PublisherWaker(pub(crate) Sender<Command>);

impl PublisherWaker {
    /// Asks for a pump now.
    pub fn wake(&self) {
        // A full inbox means that the thread is about to pump anyway.
        let _ = self.0.try_send(Command::Wake);
    }
}

#[derive(Debug)]
pub(crate) enum Command {
    Wake,
    Flush { timeout: Duration, answer: Sender<Result<bool, TransportError>> },
}
