//! What ranks have said of themselves: one that never says that it takes volumes would be asked in vain.

use kvbm_plan::{Failure, FailureKind, Rank, wire};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::time::Instant;

/// What a rank said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hello {
    /// It takes volumes.
    Ready,
    /// It speaks another version of the wire form, and drops what it is told.
    Version(u16),
}

/// See the module.
#[derive(Default)]
pub(crate) struct Hellos {
    of: Mutex<BTreeMap<Rank, Hello>>,
    said: Condvar,
}

impl Hellos {
    /// A rank takes volumes.
    pub(crate) fn ready(&self, rank: Rank) {
        self.note(rank, Hello::Ready);
    }

    /// A rank speaks another version. Where one said that it takes volumes, this is a late word of the process that it replaced.
    pub(crate) fn speaks(&self, rank: Rank, version: u16) {
        self.note(rank, Hello::Version(version));
    }

    fn note(&self, rank: Rank, hello: Hello) {
        let mut of = self.of.lock();
        if of.get(&rank) != Some(&Hello::Ready) {
            of.insert(rank, hello);
        }
        drop(of);
        self.said.notify_all();
    }

    /// Waits until each of the first `ranks` takes volumes.
    ///
    /// # Errors
    /// The first rank that speaks another version, at once, or that has said nothing by `deadline`.
    pub(super) fn wait(&self, ranks: usize, deadline: Instant) -> Result<(), Failure> {
        let ranks = || (0..ranks as u16).map(Rank);
        let mut of = self.of.lock();
        loop {
            for rank in ranks() {
                if let Some(Hello::Version(version)) = of.get(&rank) {
                    let ours = wire::VERSION;
                    let detail = format!(
                        "rank {rank} speaks version {version} of the wire form, this leader {ours}: run the same kvbm everywhere"
                    );
                    return Err(Failure::new(FailureKind::Unsupported, detail));
                }
            }
            let Some(silent) = ranks().find(|rank| !of.contains_key(rank)) else { return Ok(()) };
            if self.said.wait_until(&mut of, deadline).timed_out() {
                let detail = format!(
                    "rank {silent} has not said that it takes volumes: start its worker, give it `WorkerConfig::volumes`, and run the \
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
        let hellos = Hellos::default();
        let told = |patience| {
            let failure =
                hellos.wait(2, Instant::now() + Duration::from_secs(patience)).expect_err("not all");
            failure.detail
        };
        hellos.ready(Rank(0));
        assert!(told(0).contains("rank 1 has not said"));
        hellos.speaks(Rank(1), 1);
        assert!(told(3600).contains("rank 1 speaks version 1"), "at once");
        // Its process is replaced, whose last word comes late, and a third one starts while somebody waits for it.
        hellos.ready(Rank(1));
        hellos.speaks(Rank(1), 1);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| hellos.wait(3, Instant::now() + Duration::from_secs(60)));
            hellos.ready(Rank(2));
            assert_eq!(waiting.join().expect("it ends"), Ok(()));
        });
    }
}
