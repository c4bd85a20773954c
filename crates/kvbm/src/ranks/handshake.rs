//! Handshakes of the workers: whether they speak this version of the wire form, and take volumes.

use kvbm_plan::{Failure, FailureKind, Rank, wire};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::time::Instant;

/// What a rank answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handshake {
    /// It takes volumes.
    Ready,
    /// It speaks another version of the wire form, and drops what it is sent.
    Version(u16),
}

/// See the module.
#[derive(Default)]
pub(crate) struct Handshakes {
    of: Mutex<BTreeMap<Rank, Handshake>>,
    changed: Condvar,
}

impl Handshakes {
    /// A rank takes volumes.
    pub(crate) fn ready(&self, rank: Rank) {
        self.note(rank, Handshake::Ready);
    }

    /// A rank speaks another version. Where one said that it takes volumes, this is a late message
    /// of the process that it replaced.
    pub(crate) fn speaks(&self, rank: Rank, version: u16) {
        self.note(rank, Handshake::Version(version));
    }

    fn note(&self, rank: Rank, handshake: Handshake) {
        let mut of = self.of.lock();
        if of.get(&rank) != Some(&Handshake::Ready) {
            of.insert(rank, handshake);
        }
        drop(of);
        self.changed.notify_all();
    }

    /// Waits until each of the first `ranks` takes volumes.
    ///
    /// # Errors
    /// The first rank that speaks another version, at once, or that has said nothing by `deadline`.
    pub(crate) fn wait(&self, ranks: usize, deadline: Instant) -> Result<(), Failure> {
        let ranks = || (0..ranks as u16).map(Rank);
        let mut of = self.of.lock();
        loop {
            for rank in ranks() {
                if let Some(Handshake::Version(version)) = of.get(&rank) {
                    let ours = wire::NEWEST;
                    let detail = format!(
                        "rank {rank} speaks version {version} of the wire form, this leader {ours}: run the same kvbm everywhere"
                    );
                    return Err(Failure::new(FailureKind::Unsupported, detail));
                }
            }
            let Some(missing) = ranks().find(|rank| !of.contains_key(rank)) else { return Ok(()) };
            if self.changed.wait_until(&mut of, deadline).timed_out() {
                let detail = format!(
                    "rank {missing} has not reported that it takes volumes: start its worker, give it `WorkerConfig::volumes`, and run the \
                     same kvbm everywhere"
                );
                return Err(Failure::new(FailureKind::Unsupported, detail));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_rank_that_says_nothing_and_one_of_another_version_are_named() {
        let handshakes = Handshakes::default();
        let refusal = |patience| {
            let failure =
                handshakes.wait(2, Instant::now() + Duration::from_secs(patience)).expect_err("not all");
            failure.detail
        };
        handshakes.ready(Rank(0));
        assert!(refusal(0).contains("rank 1 has not reported"));
        handshakes.speaks(Rank(1), 1);
        assert!(refusal(3600).contains("rank 1 speaks version 1"), "at once");
        // Its process is replaced, whose last word comes late, and a third one starts while
        // somebody waits for it.
        handshakes.ready(Rank(1));
        handshakes.speaks(Rank(1), 1);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| handshakes.wait(3, Instant::now() + Duration::from_secs(60)));
            handshakes.ready(Rank(2));
            assert_eq!(waiting.join().expect("it ends"), Ok(()));
        });
    }
}
