//! What the server does not permit. It says so on the connection, some time after it was tried, and
//! to nobody in particular.

use crate::TransportError;
use async_nats::{Event, ServerError};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// What a user may have a permission for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Right {
    Publish,
    Subscribe,
}

/// How long nothing more is published where it was denied. Then it is tried again: permissions
/// change while a server runs.
const AGAIN: Duration = Duration::from_secs(1);

/// Denials that are remembered.
const MOST: usize = 64;

/// Subjects on which answers come begin so.
const INBOX: &str = "_INBOX.";

#[derive(Debug)]
struct Denial {
    right: Right,
    subject: String,
    at: Instant,
}

/// Denials of a connection.
#[derive(Debug, Default)]
pub(super) struct Denied {
    noted: Mutex<VecDeque<Denial>>,
    more: Notify,
    /// Whether something was published on this connection and nothing was said against it.
    may_publish: AtomicBool,
}

impl Denied {
    /// Takes an event of the client's connection.
    pub(super) fn observe(&self, event: &Event) {
        match event {
            // Another server perhaps, and subscriptions are made anew: it says again what it
            // denies.
            Event::Connected | Event::Disconnected => {
                self.noted.lock().clear();
                self.may_publish.store(false, Ordering::Relaxed);
            }
            Event::ServerError(ServerError::Other(text)) => {
                let Some((right, subject)) = parse(text) else { return };
                self.may_publish.store(false, Ordering::Relaxed);
                let mut noted = self.noted.lock();
                noted.retain(|denial| denial.right != right || denial.subject != subject);
                if noted.len() == MOST {
                    noted.pop_front();
                }
                noted.push_back(Denial { right, subject: subject.to_owned(), at: Instant::now() });
                drop(noted);
                self.more.notify_waiters();
            }
            _ => {}
        }
    }

    /// Whether what is published here is known to be taken.
    pub(super) fn may_publish(&self) -> bool {
        self.may_publish.load(Ordering::Relaxed)
    }

    pub(super) fn published(&self) {
        self.may_publish.store(true, Ordering::Relaxed);
    }

    /// It is tried anew.
    pub(super) fn forget(&self, right: Right, subject: &str) {
        self.noted.lock().retain(|denial| denial.right != right || denial.subject != subject);
    }

    /// That it is denied, if it is.
    pub(super) fn check(
        &self,
        name: &'static str,
        right: Right,
        subject: &str,
    ) -> Result<(), TransportError> {
        let is_it = |denial: &Denial| denial.right == right && denial.subject == subject;
        match self.noted.lock().iter().find(|denial| is_it(denial)) {
            Some(denial) => Err(denial.error(name)),
            None => Ok(()),
        }
    }

    /// That publishing was denied not long ago.
    pub(super) fn check_publishing(&self, name: &'static str, subject: &str) -> Result<(), TransportError> {
        let is_old = |denial: &Denial| denial.right == Right::Publish && denial.at.elapsed() >= AGAIN;
        self.noted.lock().retain(|denial| !is_old(denial));
        self.check(name, Right::Publish, subject)
    }

    /// What `work` gives, which publishes to `subject`, or where that ends with a dot to what
    /// begins so, and waits for an answer. Ends as soon as one of both is known to be denied.
    pub(super) async fn unless<T>(
        &self,
        name: &'static str,
        subject: &str,
        work: impl Future<Output = Result<T, TransportError>>,
    ) -> Result<T, TransportError> {
        let is_of =
            |denied: &str| denied == subject || (subject.ends_with('.') && denied.starts_with(subject));
        let is_it = |denial: &Denial| match denial.right {
            Right::Publish => is_of(&denial.subject) && denial.at.elapsed() < AGAIN,
            Right::Subscribe => denial.subject.starts_with(INBOX),
        };
        let denied = self.wait(|denial| is_it(denial).then(|| denial.error(name)));
        futures_util::pin_mut!(work, denied);
        match futures_util::future::select(work, denied).await {
            futures_util::future::Either::Left((done, _)) => done,
            futures_util::future::Either::Right((error, _)) => Err(error),
        }
    }

    /// Ends when one of both is denied on `subject`.
    pub(super) async fn of(&self, subject: &str) {
        self.wait(|denial| (denial.subject == subject).then_some(())).await;
    }

    /// Ends when subscribing to `subject` is denied.
    pub(super) async fn of_subscribing(&self, subject: &str) {
        let is_it = |denial: &Denial| denial.right == Right::Subscribe && denial.subject == subject;
        self.wait(|denial| is_it(denial).then_some(())).await;
    }

    async fn wait<T>(&self, found: impl Fn(&Denial) -> Option<T>) -> T {
        loop {
            let more = self.more.notified();
            futures_util::pin_mut!(more);
            // Before it is looked: what is noted in between is not missed.
            more.as_mut().enable();
            if let Some(found) = self.noted.lock().iter().find_map(&found) {
                return found;
            }
            more.await;
        }
    }
}

impl Denial {
    fn error(&self, transport: &'static str) -> TransportError {
        let (doing, permission) = match self.right {
            Right::Publish => ("publish to", "publish"),
            Right::Subscribe => ("subscribe to", "subscribe"),
        };
        let subject = if self.subject.starts_with(INBOX) { "_INBOX.> (for answers)" } else { &self.subject };
        let reason = format!(
            "the server does not let this user {doing} subject {subject}: give him the permission '{permission}' \
             for it in the server's configuration or JWT, or name another user or subject"
        );
        TransportError::Config { transport, reason }
    }
}

/// `Permissions Violation for Publish to "SUBJECT"`, or for `Subscription`.
fn parse(text: &str) -> Option<(Right, &str)> {
    let (_, of) = text.split_once("ermissions Violation for ")?;
    let (right, subject) = match of.split_once(" to \"")? {
        ("Publish", subject) => (Right::Publish, subject),
        ("Subscription", subject) => (Right::Subscribe, subject),
        _ => return None,
    };
    Some((right, subject.split('"').next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_error(text: &str) -> Event {
        Event::ServerError(ServerError::Other(text.into()))
    }

    #[test]
    fn what_the_server_says_is_understood_and_bounded() {
        let denied = Denied::default();
        denied.published();
        denied.observe(&server_error("Permissions Violation for Publish to \"a.b\""));
        denied.observe(&server_error("Permissions Violation for Subscription to \"c\" using queue \"d\""));
        denied.observe(&server_error("Something else"));
        assert!(!denied.may_publish());
        for (right, subject, part) in [
            (Right::Publish, "a.b", "publish to subject a.b: give him the permission 'publish'"),
            (Right::Subscribe, "c", "subscribe to subject c: give him the permission 'subscribe'"),
        ] {
            let error = denied.check("nats", right, subject).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(denied.check("nats", Right::Subscribe, "a.b").is_ok());
        denied.forget(Right::Subscribe, "c");
        assert!(denied.check("nats", Right::Subscribe, "c").is_ok());
        for number in 0..200 {
            denied.observe(&server_error(&format!("Permissions Violation for Publish to \"{number}\"")));
        }
        assert_eq!(denied.noted.lock().len(), MOST);
        denied.observe(&Event::Connected);
        assert!(denied.check("nats", Right::Publish, "199").is_ok());
    }
    /// Mutation that makes it fail: `unless` that compares only how subjects begin.
    #[test]
    fn what_is_denied_on_one_subject_ends_no_work_on_another_that_begins_it() {
        let ended = |subject: &str, denied_subject: &str| {
            let denied = Denied::default();
            denied.observe(&server_error(&format!(
                "Permissions Violation for Publish to \"{denied_subject}\""
            )));
            let work = async {
                // Long enough to be told.
                tokio::task::yield_now().await;
                Ok(())
            };
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(denied.unless("nats", subject, work)).is_err()
        };
        assert!(!ended("kvbm.events", "kvbm.events.ask.000"));
        assert!(!ended("kvbm.events", "kvbm.events2"));
        assert!(ended("kvbm.events", "kvbm.events"));
        assert!(ended("$JS.API.", "$JS.API.STREAM.INFO.kvbm"));
        assert!(!ended("$JS.API.", "$JS.ACK.kvbm"));
    }
}
