//! Messages that wait for an agent.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::agent::{AgentError, Notification};

/// Most messages that wait.
const MAX_MESSAGES: usize = 4096;

/// Messages that have arrived and were not taken yet.
#[derive(Default)]
pub(super) struct Mailbox {
    messages: Mutex<VecDeque<Notification>>,
    /// Called when a message has come.
    wake: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

impl Mailbox {
    pub(super) fn put(&self, from: &str, message: &[u8]) -> Result<(), AgentError> {
        let mut messages = self.messages.lock();
        if messages.len() >= MAX_MESSAGES {
            let (peer, bytes) = (from.to_owned(), message.len());
            let reason = "the peer does not take its messages and its mailbox is full";
            return Err(AgentError::Notification { peer, bytes, reason });
        }
        messages.push_back(Notification { from: from.to_owned(), message: message.to_vec() });
        drop(messages);
        let wake = self.wake.lock().clone();
        if let Some(wake) = wake {
            wake();
        }
        Ok(())
    }

    pub(super) fn set_wake(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        let before = self.wake.lock().replace(wake);
        drop(before);
    }

    pub(super) fn take(&self) -> Vec<Notification> {
        std::mem::take(&mut *self.messages.lock()).into()
    }
}
