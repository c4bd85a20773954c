//! What both ends must agree on before the first command.
//!
//! The leader sends an offer, the worker answers or refuses with the field that differs and both
//! values.

use crate::frame::{FrameKind, MAX_HANDSHAKE, frame, read_frame};
use crate::pem::TlsRefused;
use kvbm_plan::{Epoch, Rank, wire};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, Read, Write};

/// Begins every offer: another program's bytes are found at once.
const MAGIC: [u8; 8] = *b"KVBMLINK";
/// Versions of this protocol that this build speaks, the first and the last.
const PROTOCOLS: [u16; 2] = [1, 1];
/// What a worker refuses that serves another leader.
pub(crate) const SERVED: &str = "leader";
/// Longest name of a deployment in bytes.
const MAX_DEPLOYMENT: usize = 256;
/// Most characters of a text of a refusal: four bytes each, three texts.
const MAX_SHOWN: usize = 300;

/// A setting that both ends must have alike, such as a number of blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedSetting {
    /// Its name, as people know it.
    pub name: String,
    /// Its value, as people write it.
    pub value: String,
}

/// What a leader offers to the worker of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaderTerms {
    /// Which engine or cluster this is: a worker of another one is not taken by mistake. At most
    /// 256 bytes.
    pub deployment: String,
    /// Tag of the namespace.
    pub namespace: [u8; 16],
    /// The rank, and the number of ranks.
    pub rank: Rank,
    /// The number of ranks.
    pub ranks: u16,
    /// The leader's life: a worker refuses one that is older than the last.
    pub epoch: Epoch,
    /// Settings that the worker must have too, with the same values. With the other terms they
    /// take 4 KiB at most.
    pub settings: Vec<SharedSetting>,
}

/// What a worker serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerTerms {
    /// As [`LeaderTerms::deployment`].
    pub deployment: String,
    /// Tag of the namespace, where the worker knows it before a leader comes.
    pub namespace: Option<[u8; 16]>,
    /// The rank.
    pub rank: Rank,
    /// The number of ranks.
    pub ranks: u16,
    /// Its settings: those of the leader must be among them.
    pub settings: Vec<SharedSetting>,
}

/// Two processes that do not become leader and worker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The socket failed, or the other end did not answer in time.
    #[error("handshake: {0}")]
    Io(#[from] io::Error),
    /// What came is no handshake of kvbm.
    #[error("handshake: {0}; is another program at this socket?")]
    Malformed(String),
    /// The worker accepted the leader, then could not start for it.
    #[error("the worker does not start: {0}")]
    NotServed(String),
    /// The worker refuses the leader.
    #[error(
        "{field} differs: the leader has {leader}, the worker has {worker}; start both with the same settings"
    )]
    Refused {
        /// What differs.
        field: String,
        /// The leader's value.
        leader: String,
        /// The worker's value.
        worker: String,
    },
}

impl HandshakeError {
    /// Whether the other end refuses this one, or is refused, for a reason that time does not
    /// change.
    pub(crate) fn is_refusal(&self) -> bool {
        match self {
            // A leader that is still being served goes some time.
            Self::Refused { field, .. } => field != SERVED,
            Self::Io(error) => {
                error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<TlsRefused>)
            }
            Self::Malformed(_) | Self::NotServed(_) => false,
        }
    }
}

/// The worker's reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) field: String,
    pub(crate) leader: String,
    pub(crate) worker: String,
}

impl Refusal {
    pub(crate) fn new(field: &str, leader: impl fmt::Display, worker: impl fmt::Display) -> Self {
        // A frame of a handshake is short; what is cut off is in the worker's log.
        let shown = |text: String| text.chars().take(MAX_SHOWN).collect();
        let (leader, worker) = (shown(leader.to_string()), shown(worker.to_string()));
        Self { field: shown(field.to_owned()), leader, worker }
    }

    /// Says to a leader that was accepted why it is not served.
    pub(crate) fn not_served(reason: &str) -> Self {
        Self::new("", "", reason)
    }

    /// Its bytes on the wire.
    pub(crate) fn frame(&self) -> Result<Vec<u8>, HandshakeError> {
        Ok(frame(FrameKind::Refusal, &encode(self)?))
    }
}

#[derive(Serialize, Deserialize)]
struct Offer {
    magic: [u8; 8],
    protocols: [u16; 2],
    wire: u16,
    build: String,
    terms: LeaderTerms,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    magic: [u8; 8],
    protocol: u16,
    build: String,
}

fn encode(body: &impl Serialize) -> Result<Vec<u8>, HandshakeError> {
    rmp_serde::to_vec(body).map_err(|error| HandshakeError::Malformed(error.to_string()))
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, HandshakeError> {
    rmp_serde::from_slice(body).map_err(|error| HandshakeError::Malformed(error.to_string()))
}

fn build() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// The leader's part: offers, and waits for the answer.
pub(crate) fn offer(line: &mut (impl Read + Write), terms: &LeaderTerms) -> Result<(), HandshakeError> {
    if terms.deployment.len() > MAX_DEPLOYMENT {
        let name: String = terms.deployment.chars().take(32).collect();
        return Err(HandshakeError::Malformed(format!(
            "the deployment's name `{name}..` has {} bytes, at most {MAX_DEPLOYMENT} are allowed",
            terms.deployment.len()
        )));
    }
    let (protocols, wire) = (PROTOCOLS, wire::NEWEST);
    let offer = Offer { magic: MAGIC, protocols, wire, build: build(), terms: terms.clone() };
    let offer = encode(&offer)?;
    if offer.len() > MAX_HANDSHAKE {
        let settings = terms.settings.len();
        return Err(HandshakeError::Malformed(format!(
            "an offer with {settings} settings has {} bytes, at most {MAX_HANDSHAKE} are allowed",
            offer.len()
        )));
    }
    line.write_all(&frame(FrameKind::Handshake, &offer))?;
    let (kind, body) = read_frame(line)?;
    read_answer(kind, &body)
}

/// What a worker answered to an offer.
pub(crate) fn read_answer(kind: FrameKind, body: &[u8]) -> Result<(), HandshakeError> {
    match kind {
        FrameKind::Handshake => {
            let answer: Answer = decode(body)?;
            if answer.magic != MAGIC {
                return Err(HandshakeError::Malformed("the answer does not begin as ours".into()));
            }
            Ok(())
        }
        FrameKind::Refusal => Err(refused(decode(body)?)),
        other => Err(HandshakeError::Malformed(format!("a frame of kind {other:?} came as the answer"))),
    }
}

/// Why the worker does not serve the leader that it has accepted.
pub(crate) fn read_failure(body: &[u8]) -> HandshakeError {
    match decode::<Refusal>(body) {
        Ok(Refusal { worker, .. }) => HandshakeError::NotServed(worker),
        Err(error) => error,
    }
}

fn refused(Refusal { field, leader, worker }: Refusal) -> HandshakeError {
    HandshakeError::Refused { field, leader, worker }
}

/// The worker's part: reads the offer of a leader.
pub(crate) fn read_offer(line: &mut impl Read) -> Result<(LeaderTerms, Result<(), Refusal>), HandshakeError> {
    let (FrameKind::Handshake, body) = read_frame(line)? else {
        return Err(HandshakeError::Malformed("no offer came first".into()));
    };
    decode_offer(&body)
}

/// The same of the body of its frame.
pub(crate) fn decode_offer(body: &[u8]) -> Result<(LeaderTerms, Result<(), Refusal>), HandshakeError> {
    let offer: Offer = decode(body)?;
    if offer.magic != MAGIC {
        return Err(HandshakeError::Malformed("the offer does not begin as ours".into()));
    }
    let [first, last] = offer.protocols;
    let versions = if PROTOCOLS[1] < first || last < PROTOCOLS[0] {
        Err(Refusal::new(
            "protocol",
            format!("{first} to {last} (kvbm {})", offer.build),
            format!("{} to {} (kvbm {})", PROTOCOLS[0], PROTOCOLS[1], build()),
        ))
    } else if offer.wire != wire::NEWEST {
        Err(Refusal::new(
            "version of plans",
            format!("{} (kvbm {})", offer.wire, offer.build),
            format!("{} (kvbm {})", wire::NEWEST, build()),
        ))
    } else {
        Ok(())
    };
    Ok((offer.terms, versions))
}

/// The worker accepts.
pub(crate) fn accept(line: &mut impl Write) -> Result<(), HandshakeError> {
    let answer = Answer { magic: MAGIC, protocol: PROTOCOLS[1], build: build() };
    Ok(line.write_all(&frame(FrameKind::Handshake, &encode(&answer)?))?)
}

/// The worker refuses.
pub(crate) fn refuse(line: &mut impl Write, refusal: &Refusal) -> Result<(), HandshakeError> {
    Ok(line.write_all(&refusal.frame()?)?)
}

fn hex(bytes: [u8; 16]) -> String {
    // The first byte is the highest digits.
    format!("{:032x}", u128::from_be_bytes(bytes))
}

impl WorkerTerms {
    /// Whether a leader with these terms fits; `last` is the epoch of the last leader.
    pub(crate) fn check(&self, leader: &LeaderTerms, last: Option<Epoch>) -> Result<(), Refusal> {
        if leader.deployment != self.deployment {
            return Err(Refusal::new("deployment", &leader.deployment, &self.deployment));
        }
        if let Some(namespace) = self.namespace.filter(|namespace| *namespace != leader.namespace) {
            return Err(Refusal::new("namespace", hex(leader.namespace), hex(namespace)));
        }
        if (leader.rank, leader.ranks) != (self.rank, self.ranks) {
            let shown = |rank: Rank, ranks: u16| format!("{} of {ranks}", rank.0);
            let (theirs, ours) = (shown(leader.rank, leader.ranks), shown(self.rank, self.ranks));
            return Err(Refusal::new("rank", theirs, ours));
        }
        for SharedSetting { name, value } in &leader.settings {
            let ours = self.settings.iter().find(|ours| ours.name == *name);
            let ours = ours.map_or("no such setting", |ours| ours.value.as_str());
            if ours != value {
                return Err(Refusal::new(name, value, ours));
            }
        }
        match last.filter(|last| leader.epoch < *last) {
            Some(last) => Err(Refusal::new("epoch", leader.epoch.0, format!("served {} since", last.0))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timed::Timed;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    fn setting(name: &str, value: &str) -> SharedSetting {
        SharedSetting { name: name.into(), value: value.into() }
    }

    fn worker() -> WorkerTerms {
        WorkerTerms {
            deployment: "engine".into(),
            namespace: Some([3; 16]),
            rank: Rank(1),
            ranks: 2,
            settings: vec![setting("G1", "9 blocks"), setting("G2", "8 blocks")],
        }
    }

    fn leader() -> LeaderTerms {
        LeaderTerms {
            deployment: "engine".into(),
            namespace: [3; 16],
            rank: Rank(1),
            ranks: 2,
            epoch: Epoch(5),
            settings: vec![setting("G1", "9 blocks")],
        }
    }

    #[test]
    fn each_difference_is_named_with_both_values() {
        assert_eq!(worker().check(&leader(), Some(Epoch(5))), Ok(()));
        let unknown = WorkerTerms { namespace: None, ..worker() };
        assert_eq!(
            unknown.check(&LeaderTerms { namespace: [4; 16], settings: vec![], ..leader() }, None),
            Ok(())
        );
        for (changed, field, theirs, ours) in [
            (LeaderTerms { deployment: "other".into(), ..leader() }, "deployment", "other", "engine"),
            (LeaderTerms { namespace: [4; 16], ..leader() }, "namespace", "0404", "0303"),
            (LeaderTerms { rank: Rank(0), ..leader() }, "rank", "0 of 2", "1 of 2"),
            (LeaderTerms { ranks: 4, ..leader() }, "rank", "1 of 4", "1 of 2"),
            (LeaderTerms { settings: vec![setting("G2", "7")], ..leader() }, "G2", "7", "8 blocks"),
            (LeaderTerms { settings: vec![setting("G5", "7")], ..leader() }, "G5", "7", "no such setting"),
            (LeaderTerms { epoch: Epoch(4), ..leader() }, "epoch", "4", "5"),
        ] {
            let refusal = worker().check(&changed, Some(Epoch(5))).unwrap_err();
            assert_eq!(refusal.field, field);
            assert!(refusal.leader.contains(theirs) && refusal.worker.contains(ours), "{refusal:?}");
        }
    }

    #[test]
    fn both_ends_agree_or_the_leader_learns_why() {
        let time = Duration::from_secs(5);
        let agree = |leader: &LeaderTerms, worker: &WorkerTerms| {
            let (near, far) = UnixStream::pair().unwrap();
            std::thread::scope(|scope| {
                let serving = scope.spawn(move || {
                    let mut line = Timed::new(&far, time);
                    let (terms, versions) = read_offer(&mut line).unwrap();
                    match versions.and_then(|()| worker.check(&terms, None)) {
                        Ok(()) => accept(&mut line).unwrap(),
                        Err(refusal) => refuse(&mut line, &refusal).unwrap(),
                    }
                });
                let outcome = offer(&mut Timed::new(&near, time), leader);
                serving.join().unwrap();
                outcome
            })
        };
        agree(&leader(), &worker()).unwrap();
        let error = agree(&LeaderTerms { ranks: 8, ..leader() }, &worker()).unwrap_err().to_string();
        assert!(error.contains("the leader has 1 of 8, the worker has 1 of 2"), "{error}");
        let long = LeaderTerms { deployment: "x".repeat(999), ..leader() };
        assert!(offer(&mut Timed::new(&UnixStream::pair().unwrap().0, time), &long).is_err());
        let many = LeaderTerms { settings: vec![setting("x", &"y".repeat(50)); 99], ..leader() };
        let error = offer(&mut Timed::new(&UnixStream::pair().unwrap().0, time), &many).unwrap_err();
        assert!(error.to_string().contains("99 settings"), "{error}");
        // The longest refusal passes.
        let long = "\u{10348}".repeat(MAX_SHOWN + 1);
        let bytes = Refusal::new(&long, &long, &long).frame().unwrap();
        assert!(read_frame(&mut &bytes[..]).is_ok());
    }

    #[test]
    fn a_silent_peer_and_a_strange_one_end_the_handshake() {
        let (near, far) = UnixStream::pair().unwrap();
        let start = Instant::now();
        let error = offer(&mut Timed::new(&near, Duration::from_millis(50)), &leader()).unwrap_err();
        assert!(
            matches!(error, HandshakeError::Io(_)) && start.elapsed() < Duration::from_secs(2),
            "{error}"
        );
        (&far).write_all(b"HTTP/1.1 400 Bad Request\r\n").unwrap();
        let error = offer(&mut Timed::new(&near, Duration::from_secs(5)), &leader()).unwrap_err();
        assert!(error.to_string().contains("unknown kind") || error.to_string().contains("bytes"), "{error}");
    }
}
