//! A round: a sequence is computed at the owner, the reader reads it, and something happens.

use super::process::Process;
use super::{BLOCKS, LEASE, LONG_STOP, LOOKUP_DEADLINE, OWNER, READ_DEADLINE, READER, SLACK, TIER_BLOCKS};
use crate::nats_server::NatsServer;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }
}

/// What happens while a sequence is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Accident {
    Nothing,
    ReaderKilled,
    OwnerKilled,
    ServerKilled,
    /// For longer than its lease.
    OwnerStopped,
    /// For longer than the lease that it holds.
    ReaderStopped,
    OwnerLeaves,
    /// For so long that its announcement is gone meanwhile.
    OwnerStoppedLong,
    /// The same.
    ReaderStoppedLong,
}

impl Accident {
    /// How long a process is stopped.
    fn stop(self) -> Duration {
        match self {
            Self::OwnerStoppedLong | Self::ReaderStoppedLong => LONG_STOP,
            _ => LEASE * 3 / 2,
        }
    }
}

/// Those of any round; the long stops have rounds of their own.
const ACCIDENTS: [Accident; 7] = [
    Accident::Nothing,
    Accident::ReaderKilled,
    Accident::OwnerKilled,
    Accident::ServerKilled,
    Accident::OwnerStopped,
    Accident::ReaderStopped,
    Accident::OwnerLeaves,
];

/// What all rounds came to.
#[derive(Default)]
pub(super) struct Figures {
    accidents: BTreeMap<Accident, u64>,
    /// Reads of which all, some and no blocks arrived.
    whole: u64,
    part: u64,
    none: u64,
    longest_read: u64,
    /// Pushes of which all, some and no blocks were taken.
    pushes: [u64; 3],
    longest_push: u64,
    longest_unleased: u64,
    longest_usable: u64,
    ended_in_order: u64,
}

impl Figures {
    pub(super) fn json(&self, rounds: u64, seed: u64) -> String {
        let accidents: Vec<String> =
            self.accidents.iter().map(|(accident, count)| format!("\"{accident:?}\": {count}")).collect();
        let Self { whole, part, none, longest_read, pushes, longest_push, .. } = self;
        let Self { longest_unleased, longest_usable, ended_in_order, .. } = self;
        let deadline = (LOOKUP_DEADLINE + READ_DEADLINE).as_millis();
        format!(
            "{{\"rounds\": {rounds}, \"seed\": {seed}, \"accidents\": {{{}}}, \"reads_whole\": {whole}, \
             \"reads_in_part\": {part}, \"reads_of_nothing\": {none}, \"longest_read_ms\": {longest_read}, \
             \"pushes_whole_in_part_and_of_nothing\": {pushes:?}, \"longest_push_ms\": {longest_push}, \
             \"deadline_ms\": {deadline}, \"lease_ms\": {}, \"longest_until_no_lease_ms\": {longest_unleased}, \
             \"longest_until_all_slots_usable_ms\": {longest_usable}, \"ended_in_order\": {ended_in_order}}}",
            accidents.join(", "),
            LEASE.as_millis()
        )
    }

    fn note_read(&mut self, blocks: u32, took: u64) {
        self.longest_read = self.longest_read.max(took);
        match blocks {
            0 => self.none += 1,
            BLOCKS => self.whole += 1,
            _ => self.part += 1,
        }
    }
}

/// The processes.
pub(super) struct Deployment {
    server: NatsServer,
    owner: Process,
    reader: Process,
    figures: Figures,
    /// How long a read takes that nothing disturbs, in milliseconds.
    typical: u64,
    /// The next sequence: each is used once.
    next: u32,
}

impl Deployment {
    pub(super) fn start(server: NatsServer) -> Self {
        let address = server.address();
        let [owner, reader] = [OWNER, READER].map(|id| Process::start(id, &address));
        let figures = Figures::default();
        let mut deployment = Self { server, owner, reader, figures, typical: 100, next: 0 };
        deployment.undisturbed();
        deployment
    }

    fn sequence(&mut self) -> u32 {
        self.next += 1;
        // Its tokens overlap with those of no other one.
        self.next
    }

    /// A sequence that the owner has, and that the reader knows of.
    fn offered(&mut self) -> u32 {
        let sequence = self.sequence();
        self.owner.order(&format!("put {sequence} {BLOCKS}"));
        self.reader.order(&format!("find {sequence} {BLOCKS}"));
        sequence
    }

    /// The reader has begun to read a sequence.
    fn begin(&mut self, sequence: u32) {
        self.reader.say(&format!("read {sequence} {BLOCKS}"));
        self.reader.hear("reading");
    }

    /// What the reader says of its read; by its deadline.
    fn arrived(&mut self, limit: Duration) -> (u32, u64, String) {
        let said = self.reader.hear_within("arrived", limit + SLACK);
        self.reader.hear("done read");
        let mut words = said.splitn(3, ' ');
        let mut number = || words.next().unwrap().parse::<u64>().unwrap();
        let (blocks, took) = (number() as u32, number());
        self.figures.note_read(blocks, took);
        (blocks, took, words.next().unwrap().to_owned())
    }

    /// A read of all that nothing disturbs.
    fn undisturbed(&mut self) {
        let sequence = self.offered();
        self.begin(sequence);
        let (blocks, took, why) = self.arrived(LOOKUP_DEADLINE + READ_DEADLINE);
        self.typical = took.max(1);
        assert_eq!(blocks, BLOCKS, "{why}");
    }

    pub(super) fn round(&mut self, round: u64, random: &mut Random) {
        let accident = ACCIDENTS[random.below(ACCIDENTS.len() as u64) as usize];
        self.round_with(round, accident, true, random);
    }

    /// Owner and reader are stopped for long, each in the middle of a read.
    pub(super) fn long_stops(&mut self, round: u64, random: &mut Random) {
        for (at, accident) in (0..).zip([Accident::OwnerStoppedLong, Accident::ReaderStoppedLong]) {
            self.round_with(round + at, accident, false, random);
        }
    }

    fn round_with(&mut self, round: u64, accident: Accident, may_push: bool, random: &mut Random) {
        let sequence = self.offered();
        // The owner needs room meanwhile: what is not leased is evicted.
        let is_crowded = random.below(2) == 0;
        let delay = Duration::from_micros(random.below(self.typical * 1250));
        let is_push = may_push && random.below(3) == 0;
        println!("round {round}: {accident:?} after {delay:?}, crowded: {is_crowded}, push: {is_push}");
        *self.figures.accidents.entry(accident).or_default() += 1;
        if is_push {
            self.push(sequence, accident, delay);
            return self.undisturbed();
        }
        self.begin(sequence);
        if is_crowded {
            let other = self.sequence();
            self.owner.say(&format!("put {other} {TIER_BLOCKS}"));
        }
        std::thread::sleep(delay);
        self.happens(accident, is_crowded);
        self.undisturbed();
    }

    /// The owner writes a sequence into the memory of the reader, and something happens.
    fn push(&mut self, sequence: u32, accident: Accident, delay: Duration) {
        self.owner.say(&format!("push {sequence} {BLOCKS}"));
        self.owner.hear("pushing");
        std::thread::sleep(delay);
        match accident {
            Accident::ReaderKilled => {
                self.reader.kill();
                self.pushed();
                self.free(OWNER);
                self.reader = Process::start(READER, &self.server.address());
            }
            Accident::OwnerKilled => {
                self.owner.kill();
                self.check(sequence, BLOCKS);
                self.free(READER);
                self.owner = Process::start(OWNER, &self.server.address());
            }
            Accident::OwnerStopped => {
                self.owner.signal("-STOP");
                std::thread::sleep(LEASE * 3 / 2);
                // The grant is over, and the reader uses what room it has: none that may be written
                // to.
                let other = self.sequence();
                self.reader.order(&format!("put {other} {TIER_BLOCKS}"));
                self.owner.signal("-CONT");
                self.pushed();
                self.check(other, TIER_BLOCKS);
                self.free(READER);
            }
            Accident::ReaderStopped => {
                self.reader.signal("-STOP");
                std::thread::sleep(LEASE * 3 / 2);
                self.reader.signal("-CONT");
                self.pushed();
                self.check(sequence, BLOCKS);
                self.free(OWNER);
                self.free(READER);
            }
            Accident::ServerKilled => {
                self.server.kill();
                assert_eq!(self.pushed(), BLOCKS, "peers stay known");
                self.server.restart();
                self.check(sequence, BLOCKS);
            }
            Accident::Nothing
            | Accident::OwnerLeaves
            | Accident::OwnerStoppedLong
            | Accident::ReaderStoppedLong => {
                assert_eq!(self.pushed(), BLOCKS);
                assert_eq!(self.check(sequence, BLOCKS), BLOCKS);
            }
        }
    }

    /// How many blocks of a push were taken; by its deadline.
    fn pushed(&mut self) -> u32 {
        let said = self.owner.hear_within("pushed", READ_DEADLINE + SLACK);
        self.owner.hear("done push");
        println!("pushed {said}");
        let mut words = said.split(' ').map(str::parse::<u64>);
        let mut number = || words.next().unwrap().unwrap();
        let (blocks, took) = (number() as u32, number());
        self.figures.longest_push = self.figures.longest_push.max(took);
        self.figures.pushes[if blocks == BLOCKS { 0 } else { 1 + usize::from(blocks == 0) }] += 1;
        blocks
    }

    /// What the reader's memory has of a sequence, all of it right: how many blocks.
    fn check(&mut self, sequence: u32, blocks: u32) -> u32 {
        self.reader.say(&format!("check {sequence} {blocks}"));
        let there = self.reader.hear("checked").parse().unwrap();
        self.reader.hear("done check");
        there
    }

    /// Something happens, and what must hold then holds. All processes run again afterwards.
    fn happens(&mut self, accident: Accident, is_crowded: bool) {
        let limit = LOOKUP_DEADLINE + READ_DEADLINE;
        match accident {
            Accident::Nothing => {
                let (blocks, _, why) = self.arrived(limit);
                assert!(is_crowded || blocks == BLOCKS, "{why}");
                self.crowded(is_crowded);
            }
            Accident::ReaderKilled => {
                self.reader.kill();
                self.crowded(is_crowded);
                self.free(OWNER);
                self.reader = Process::start(READER, &self.server.address());
            }
            Accident::OwnerKilled => {
                self.owner.kill();
                self.arrived(limit);
                self.free(READER);
                self.owner = Process::start(OWNER, &self.server.address());
            }
            Accident::ServerKilled => {
                self.server.kill();
                let (blocks, _, why) = self.arrived(limit);
                assert!(is_crowded || blocks == BLOCKS, "{why}");
                self.crowded(is_crowded);
                // Peers stay known while it is away.
                self.undisturbed();
                self.server.restart();
            }
            Accident::OwnerStopped => {
                self.owner.signal("-STOP");
                std::thread::sleep(accident.stop());
                self.owner.signal("-CONT");
                self.arrived(limit);
                self.crowded(is_crowded);
                self.free(READER);
            }
            Accident::OwnerStoppedLong => {
                self.owner.signal("-STOP");
                let until = Instant::now() + accident.stop();
                // What the owner does not answer is a miss by the deadline, while it is stopped.
                let (blocks, took, why) = self.arrived(limit);
                println!("arrived {blocks} blocks after {took} ms: {why}");
                assert!(u128::from(took) <= (limit + SLACK).as_millis(), "the read took {took} ms");
                std::thread::sleep(until.saturating_duration_since(Instant::now()));
                self.owner.signal("-CONT");
                self.crowded(is_crowded);
                self.free(READER);
            }
            Accident::ReaderStopped | Accident::ReaderStoppedLong => {
                self.reader.signal("-STOP");
                std::thread::sleep(accident.stop());
                self.crowded(is_crowded);
                // Its lease is over: all that it reads may be overwritten.
                self.free(OWNER);
                self.reader.signal("-CONT");
                let (blocks, took, why) = self.arrived(limit);
                println!("arrived {blocks} blocks after {took} ms: {why}");
                self.free(READER);
            }
            Accident::OwnerLeaves => {
                self.crowded(is_crowded);
                self.end_of(OWNER);
                self.arrived(limit);
                // Slots of a read that failed are out of use for a second.
                self.free(READER);
                self.owner = Process::start(OWNER, &self.server.address());
            }
        }
    }

    /// The owner has found its room.
    fn crowded(&mut self, is_crowded: bool) {
        if is_crowded {
            self.owner.hear("done put");
        }
    }

    /// No lease is left at a node, and it can use all of G2.
    fn free(&mut self, node: u32) {
        // Sequences of this order alone.
        let start = self.sequence();
        self.next += 1000;
        let process = if node == OWNER { &mut self.owner } else { &mut self.reader };
        process.say(&format!("free {start}"));
        let number = |text: String| text.parse::<u64>().unwrap();
        let unleased = number(process.hear("unleased"));
        let usable = number(process.hear("usable"));
        process.hear("done free");
        self.figures.longest_unleased = self.figures.longest_unleased.max(unleased);
        self.figures.longest_usable = self.figures.longest_usable.max(usable);
    }

    /// A node ends in order.
    fn end_of(&mut self, node: u32) {
        let process = if node == OWNER { &mut self.owner } else { &mut self.reader };
        process.end();
        self.figures.ended_in_order += 1;
    }

    /// All end in order.
    pub(super) fn end(mut self) -> Figures {
        self.end_of(READER);
        self.end_of(OWNER);
        self.figures
    }
}
