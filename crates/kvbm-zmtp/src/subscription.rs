//! The subscriptions of one peer of a PUB socket.

use crate::ZmtpError;

/// Prefixes of topics that a peer wants, bounded in number and bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subscriptions {
    /// One entry for each subscription: a prefix that was subscribed twice must be cancelled twice.
    prefixes: Vec<Vec<u8>>,
    bytes: usize,
}

impl Subscriptions {
    /// Most subscriptions of one peer.
    pub const MAX_COUNT: usize = 1024;
    /// Most bytes that the subscriptions of one peer keep; see [`bytes`](Self::bytes).
    pub const MAX_BYTES: usize = 64 << 10;

    /// Adds a subscription.
    ///
    /// # Errors
    /// The peer exceeds a limit; nothing is added.
    pub fn add(&mut self, prefix: Vec<u8>) -> Result<(), ZmtpError> {
        let bytes = self.bytes + cost(&prefix);
        if self.prefixes.len() == Self::MAX_COUNT || bytes > Self::MAX_BYTES {
            return Err(ZmtpError::Protocol("too many subscriptions (at most 1,024 or 64 KiB)"));
        }
        self.bytes = bytes;
        self.prefixes.push(prefix);
        Ok(())
    }

    /// Removes one subscription to `prefix`, if there is one.
    pub fn cancel(&mut self, prefix: &[u8]) {
        if let Some(at) = self.prefixes.iter().position(|known| known == prefix) {
            self.bytes -= cost(&self.prefixes.swap_remove(at));
        }
    }

    /// Whether the peer wants messages of `topic`.
    pub fn matches(&self, topic: &[u8]) -> bool {
        self.prefixes.iter().any(|prefix| topic.starts_with(prefix))
    }

    /// Bytes of memory that the subscriptions keep.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Bytes that a prefix costs, with the vector that holds it.
fn cost(prefix: &[u8]) -> usize {
    size_of::<Vec<u8>>() + prefix.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_that_was_subscribed_twice_is_cancelled_twice() {
        let mut subscriptions = Subscriptions::default();
        assert!(!subscriptions.matches(b"topic"));
        subscriptions.add(b"to".to_vec()).unwrap();
        subscriptions.add(b"to".to_vec()).unwrap();
        subscriptions.cancel(b"to");
        subscriptions.cancel(b"other");
        assert!(subscriptions.matches(b"topic") && !subscriptions.matches(b"t"));
        subscriptions.cancel(b"to");
        assert!(!subscriptions.matches(b"topic"));
        assert_eq!(subscriptions.bytes(), 0);
    }

    /// Mutation that makes it fail: `add` without one of its limits.
    #[test]
    fn invariant_5_subscriptions_are_bounded_in_number_and_bytes() {
        let mut subscriptions = Subscriptions::default();
        let added = (0..100).take_while(|_| subscriptions.add(vec![b'x'; 4096]).is_ok()).count();
        assert_eq!(added, 15);
        assert!(subscriptions.bytes() <= Subscriptions::MAX_BYTES);
        let mut subscriptions = Subscriptions::default();
        let added = (0..5000).take_while(|_| subscriptions.add(Vec::new()).is_ok()).count();
        assert_eq!(added, Subscriptions::MAX_COUNT);
        subscriptions.cancel(b"");
        assert!(subscriptions.add(Vec::new()).is_ok(), "a cancelled subscription leaves room");
    }
}
