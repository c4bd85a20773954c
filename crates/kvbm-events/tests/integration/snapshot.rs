//! A late joiner, and one who lost something, get the whole truth by asking for it.

use crate::support::{PATIENCE, World, block};
use kvbm_events::{
    Answer, EventManager, EventTransport, InProcessTransport, IndexFollower, KvIndex, PublisherConfig,
    Question, RemoteSnapshots, Snapshot, SnapshotServer, SourceId, StreamId, Subscriber,
};
use kvbm_plan::Epoch;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

fn stream(epoch: u64) -> StreamId {
    StreamId { source: SourceId(5), epoch: Epoch(epoch), shard: 0 }
}

/// After so long a source takes another snapshot.
const INTERVAL: Duration = Duration::from_millis(1 + 1000 / SnapshotServer::MAX_PER_SECOND as u64);

#[test]
fn a_late_joiner_reaches_the_full_truth() {
    let transport = Arc::new(InProcessTransport::default());
    let world = World::new(10_000);
    (0..400).for_each(|number| world.toggle(number, number as usize % 4));
    let config = PublisherConfig { max_age: Duration::ZERO, ..PublisherConfig::default() };
    let mut manager = EventManager::new(config, SourceId(5), Epoch(1), transport.clone()).unwrap();
    manager.add_shard(0, world.clone()).unwrap();
    manager.pump(Instant::now()).unwrap();
    let source = world.clone();
    let server = SnapshotServer::new(move |of| (of == stream(1)).then(|| source.snapshot()));
    let _answering = server.serve(transport.as_ref(), SourceId(5)).unwrap();
    let snapshots = RemoteSnapshots::new(transport.clone());
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    let mut follower = IndexFollower::new(subscriber, snapshots, KvIndex::default());
    (100..150).for_each(|number| world.toggle(number, number as usize % 4));
    manager.pump(Instant::now()).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while follower.poll(Duration::ZERO).unwrap() || follower.suspects().count() > 0 {
        assert!(Instant::now() < deadline, "{:?}", follower.stats());
    }
    assert!(world.is_mirrored_by(follower.index()), "{:?}", follower.stats());
    assert_eq!((follower.stats().resyncs, follower.suspects().count()), (1, 0));
}

#[test]
fn a_large_snapshot_comes_in_parts_of_one_state() {
    let transport = Arc::new(InProcessTransport::default());
    let taken = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&taken);
    let server = SnapshotServer::new(move |_| {
        let next_sequence = 10 + count.fetch_add(1, Ordering::SeqCst);
        Some(Snapshot { next_sequence, blocks: (0..20_000).map(block).collect() })
    });
    let _answering = server.serve(transport.as_ref(), SourceId(5)).unwrap();
    let snapshots = RemoteSnapshots::new(transport);
    let snapshot = snapshots.fetch(stream(1), 5).unwrap();
    assert_eq!((snapshot.next_sequence, snapshot.blocks.len()), (10, 20_000));
    assert!(snapshot.blocks.iter().zip(0..).all(|(found, n)| *found == block(n)));
    assert_eq!(taken.load(Ordering::SeqCst), 1);
    // It was fetched to its end, so the next one is new; one that cannot reach far enough is none.
    std::thread::sleep(INTERVAL);
    assert_eq!(snapshots.fetch(stream(1), 5).unwrap().next_sequence, 11);
    std::thread::sleep(INTERVAL);
    assert_eq!(snapshots.fetch(stream(1), 1_000), None);
}

#[test]
fn followers_share_a_snapshot_and_a_bounded_number_is_kept() {
    let taken = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&taken);
    let server = SnapshotServer::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Some(Snapshot { next_sequence: 100, blocks: (0..10_000).map(block).collect() })
    });
    let ask = |epoch, ticket, part| {
        let question = Question { stream: stream(epoch), reach: 50, ticket, part };
        match Answer::decode(&server.answer(&question.encode())).unwrap() {
            Answer::Part(part) => Some(part.ticket),
            Answer::Nothing => None,
        }
    };
    let first = ask(1, 0, 0);
    assert_eq!(ask(1, 0, 0), first, "the second follower gets the same");
    assert_eq!(taken.load(Ordering::SeqCst), 1);
    let others: Vec<_> = (2..6).map(|epoch| ask(epoch, 0, 0)).collect();
    assert_eq!(ask(1, first.unwrap(), 1), None, "newer ones took its place");
    assert_eq!(ask(5, others[3].unwrap(), 1), others[3]);
    assert_eq!(ask(5, others[3].unwrap(), 1), None, "fetched to the end");
    assert_eq!(server.answer(b"what?").as_ref(), Answer::Nothing.encode());
}

/// Mutations that make it fail: `SnapshotServer::part` that drops a snapshot with the first last
/// part; `taken` that does not wait for its turn.
#[test]
fn four_who_fetch_at_the_same_time_share_one_snapshot_to_its_end() {
    const FOLLOWERS: usize = 4;
    let (taken, asking) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (count, waiting) = (Arc::clone(&taken), Arc::clone(&asking));
    let server = SnapshotServer::new(move |_| {
        // All have begun to ask when the first snapshot is there.
        while waiting.load(Ordering::SeqCst) < FOLLOWERS as u64 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(50));
        let next_sequence = 100 + count.fetch_add(1, Ordering::SeqCst);
        Some(Snapshot { next_sequence, blocks: (0..20_000).map(block).collect() })
    });
    let ask = |ticket, part| {
        let question = Question { stream: stream(1), reach: 50, ticket, part };
        match Answer::decode(&server.answer(&question.encode())).unwrap() {
            Answer::Part(part) => Some(part),
            Answer::Nothing => None,
        }
    };
    let begun = Barrier::new(FOLLOWERS);
    std::thread::scope(|scope| {
        let fetch = || {
            asking.fetch_add(1, Ordering::SeqCst);
            let first = ask(0, 0);
            begun.wait();
            let (mut blocks, mut parts) = (0, 0);
            let mut next = first;
            while let Some(part) = next {
                (blocks, parts) = (blocks + part.blocks.len(), parts + 1);
                if parts == part.parts {
                    return (blocks, part.next_sequence);
                }
                next = ask(part.ticket, parts);
            }
            (blocks, 0)
        };
        let followers: Vec<_> = (0..FOLLOWERS).map(|_| scope.spawn(fetch)).collect();
        for follower in followers {
            assert_eq!(follower.join().unwrap(), (20_000, 100), "the whole of the same state");
        }
    });
    assert_eq!(taken.load(Ordering::SeqCst), 1);
    // With the last of them it went: memory is free again, and the next one gets the state of then.
    std::thread::sleep(INTERVAL);
    assert_eq!(ask(0, 0).unwrap().next_sequence, 101);
}

/// A server that counts how often it takes a snapshot of so many blocks.
fn counting(next_sequence: u64, blocks: u32) -> (SnapshotServer, Arc<AtomicU64>) {
    let taken = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&taken);
    let server = SnapshotServer::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Some(Snapshot { next_sequence, blocks: (0..blocks).map(block).collect() })
    });
    (server, taken)
}

fn first_question(reach: u64) -> Vec<u8> {
    Question { stream: stream(1), reach, ticket: 0, part: 0 }.encode()
}

/// Mutation that makes it fail: `take_for` without its first condition.
#[test]
fn no_snapshot_is_taken_for_a_question_that_none_can_answer() {
    let (server, taken) = counting(100, 0);
    let server = server.with_next_sequence(|of| (of == stream(1)).then_some(100));
    let unknown = Question { stream: stream(2), reach: 5, ticket: 0, part: 0 };
    let later_part = Question { stream: stream(1), reach: 5, ticket: 0, part: 1 };
    for question in [first_question(101), unknown.encode(), later_part.encode()] {
        assert_eq!(server.answer(&question).as_ref(), Answer::Nothing.encode());
        std::thread::sleep(INTERVAL);
    }
    assert_eq!(taken.load(Ordering::SeqCst), 0);
    assert_ne!(server.answer(&first_question(100)).as_ref(), Answer::Nothing.encode());
}

/// Mutation that makes it fail: `take_for` that does not look when the last snapshot was taken.
#[test]
fn snapshots_of_a_stream_are_limited_in_a_second_and_shared_meanwhile() {
    let (server, taken) = counting(100, 10);
    for _ in 0..100 {
        assert_eq!(server.answer(&first_question(u64::MAX)).as_ref(), Answer::Nothing.encode());
    }
    let few = taken.load(Ordering::SeqCst);
    assert!(few <= 2, "{few} snapshots for 100 questions in a moment");
    std::thread::sleep(INTERVAL);
    let answers: Vec<_> = (0..100).map(|_| server.answer(&first_question(50))).collect();
    assert!(answers.iter().all(|answer| answer.as_ref() != Answer::Nothing.encode()));
    let more = taken.load(Ordering::SeqCst) - few;
    assert!(more <= 2, "{more} snapshots for 100 questions in a moment");
}

#[test]
fn a_shard_keeps_its_snapshots_whatever_is_asked_of_others() {
    let server = SnapshotServer::new(|_| {
        Some(Snapshot { next_sequence: 100, blocks: (0..10_000).map(block).collect() })
    });
    let ask = |shard, ticket, part| {
        let question = Question { stream: StreamId { shard, ..stream(1) }, reach: 50, ticket, part };
        match Answer::decode(&server.answer(&question.encode())).unwrap() {
            Answer::Part(part) => Some(part.ticket),
            Answer::Nothing => None,
        }
    };
    let tickets: Vec<u64> = (0..8).map(|shard| ask(shard, 0, 0).unwrap()).collect();
    for (shard, ticket) in (0..8).zip(tickets) {
        assert_eq!(ask(shard, ticket, 1), Some(ticket), "shard {shard}");
    }
}

/// Mutations that make it fail: `RemoteSnapshots::snapshot` that waits for its answer;
/// `IndexFollower::load` without the events that came `since`.
#[test]
fn a_source_that_stalls_in_its_snapshot_holds_up_nobody_and_is_right_in_the_end() {
    let transport = Arc::new(InProcessTransport::default());
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let worlds: Vec<World> = (0..2).map(|_| World::new(10_000)).collect();
    let mut managers: Vec<EventManager> = Vec::new();
    let mut answering = Vec::new();
    for (id, world) in (0..).map(SourceId).zip(&worlds) {
        let config = PublisherConfig { max_age: Duration::ZERO, ..PublisherConfig::default() };
        let mut manager = EventManager::new(config, id, Epoch(1), transport.clone()).unwrap();
        manager.add_shard(0, world.clone()).unwrap();
        managers.push(manager);
    }
    // The first takes its snapshot and then says nothing for a while; it is old when it comes.
    let world = worlds[0].clone();
    let (taken, is_taken) = std::sync::mpsc::channel();
    let stalling = SnapshotServer::new(move |_| {
        let snapshot = world.snapshot();
        let _ = taken.send(());
        // Until nobody holds it back any more.
        let _ = held.lock().unwrap().recv();
        Some(snapshot)
    });
    answering.push(stalling.serve(transport.as_ref(), SourceId(0)).unwrap());
    let world = worlds[1].clone();
    let willing = SnapshotServer::new(move |_| Some(world.snapshot()));
    answering.push(willing.serve(transport.as_ref(), SourceId(1)).unwrap());
    let mut change = |round: u32| {
        for (world, manager) in worlds.iter().zip(&mut managers) {
            (0..60).for_each(|step| world.toggle((round * 37 + step * 7) % 200, step as usize % 4));
            manager.pump(Instant::now()).unwrap();
        }
    };
    change(0);
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    let mut follower =
        IndexFollower::new(subscriber, RemoteSnapshots::new(transport.clone()), KvIndex::default());
    let is_right = |follower: &IndexFollower<RemoteSnapshots>, source: usize| {
        let held = worlds[source].snapshot().blocks.len() as u64;
        let of = SourceId(source as u64);
        let suspect = follower.suspects().any(|stream| stream.source == of);
        !suspect && follower.index().blocks(of).iter().sum::<u64>() == held
    };
    let until = |follower: &mut IndexFollower<RemoteSnapshots>, source| {
        let deadline = Instant::now() + PATIENCE;
        while !is_right(follower, source) {
            assert!(Instant::now() < deadline, "source {source}: {:?}", follower.stats());
            follower.poll(Duration::from_millis(1)).unwrap();
        }
    };
    change(1);
    until(&mut follower, 1);
    is_taken.recv_timeout(PATIENCE).unwrap();
    // The question to the first hangs: the other is followed, event by event, and the first as far
    // as that is possible.
    for round in 2..8 {
        change(round);
        until(&mut follower, 1);
        assert!(!is_right(&follower, 0));
    }
    drop(release);
    until(&mut follower, 0);
    for (source, world) in worlds.iter().enumerate() {
        let wanted: BTreeSet<_> =
            world.snapshot().blocks.iter().map(|b| (b.identity.hash, b.location.tier)).collect();
        let holdings = follower.index().holdings();
        let found = holdings.filter(|(place, ..)| place.source == SourceId(source as u64));
        assert_eq!(
            found.map(|(place, _, hash)| (hash, place.location.tier)).collect::<BTreeSet<_>>(),
            wanted
        );
    }
}

/// Mutations that make it fail: a last part that is not waited with; a window of one; a part that a
/// helper failed at and nobody asks for again.
#[test]
fn several_parts_are_under_way_at_a_time_and_the_last_comes_last() {
    let transport = Arc::new(InProcessTransport::default());
    let server = SnapshotServer::new(|_| {
        Some(Snapshot { next_sequence: 10, blocks: (0..100_000).map(block).collect() })
    });
    let (now, most) = (AtomicU64::new(0), Arc::new(AtomicU64::new(0)));
    let (asked, seen) = (Arc::new(std::sync::Mutex::new(Vec::new())), Arc::clone(&most));
    let (parts, failed) = (Arc::clone(&asked), AtomicU64::new(0));
    let responder = move |question: &[u8]| {
        let part = Question::decode(question).unwrap().part;
        parts.lock().unwrap().push(part);
        let here = now.fetch_add(1, Ordering::SeqCst) + 1;
        seen.fetch_max(here, Ordering::SeqCst);
        // Those between the first and the last are here at once with others.
        let deadline = Instant::now() + Duration::from_secs(5);
        while (1..12).contains(&part) && seen.load(Ordering::SeqCst) < 3 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        now.fetch_sub(1, Ordering::SeqCst);
        // One of them gets no answer: if it only helped, the part is asked for again.
        let is_lost = part == 2 && failed.fetch_add(1, Ordering::SeqCst) == 0;
        if is_lost { Answer::Nothing.encode().into() } else { server.answer(question) }
    };
    let _answering = transport.answer(SourceId(5), Arc::new(responder)).unwrap();
    let snapshots = RemoteSnapshots::new(transport);
    // If it did more than help, the whole has failed and is asked for anew.
    let snapshot = (0..3).find_map(|_| snapshots.fetch(stream(1), 5)).unwrap();
    assert!(snapshot.blocks.iter().zip(0..).all(|(found, n)| *found == block(n)));
    assert_eq!(snapshot.blocks.len(), 100_000);
    assert!(most.load(Ordering::SeqCst) >= 3, "at a time");
    assert_eq!(asked.lock().unwrap().last(), Some(&12));
}

/// Three sources of more than 100,000 blocks each, which publish whenever they are asked for a
/// part, and one that never answers and publishes as much as all of them. What a source publishes
/// during its snapshot fits into what is remembered; of two it does not.
///
/// Mutation that makes it fail: one budget for all streams (`Suspect::is_under_way` always false).
#[test]
fn multi_part_snapshots_converge_while_every_source_publishes_and_little_is_remembered() {
    const BLOCKS: u32 = 110_000;
    const SILENT: usize = 3;
    let transport = Arc::new(InProcessTransport::default());
    let worlds: Vec<World> = (0..=SILENT).map(|_| World::new(10_000)).collect();
    let manager = |(id, world): (u64, &World)| {
        (0..BLOCKS).for_each(|number| world.toggle(number, 2));
        let config = PublisherConfig { max_age: Duration::ZERO, ..PublisherConfig::default() };
        let mut manager = EventManager::new(config, SourceId(id), Epoch(1), transport.clone()).unwrap();
        manager.add_shard(0, world.clone()).unwrap();
        std::sync::Mutex::new(manager)
    };
    let managers: Arc<Vec<_>> = Arc::new((0..).zip(&worlds).map(manager).collect());
    let changing = worlds.clone();
    let publish = Arc::new(move |source: usize, changes: u32| {
        let mut manager = managers[source].lock().unwrap();
        (0..changes).for_each(|number| changing[source].toggle(number * 7 % BLOCKS, 1));
        manager.pump(Instant::now()).unwrap();
    });
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    let mut answering = Vec::new();
    for (source, world) in worlds[..SILENT].iter().enumerate() {
        let (world, publish) = (world.clone(), Arc::clone(&publish));
        let server = SnapshotServer::new(move |_| Some(world.snapshot()));
        let responder = move |question: &[u8]| {
            // Much before the snapshot is taken, and some with each of its fourteen parts.
            let changes = if Question::decode(question).unwrap().part == 0 { 3_000 } else { 120 };
            publish(source, changes);
            publish(SILENT, changes);
            server.answer(question)
        };
        answering.push(transport.answer(SourceId(source as u64), Arc::new(responder)).unwrap());
    }
    let follower = IndexFollower::new(subscriber, RemoteSnapshots::new(transport), KvIndex::default());
    let mut follower = follower.remembering(2_400 * size_of::<kvbm_events::KvEvent>());
    (0..=SILENT).for_each(|source| publish(source, 1));
    let is_right = |follower: &IndexFollower<RemoteSnapshots>| {
        if follower.suspects().any(|stream| stream.source.0 < SILENT as u64) {
            return false;
        }
        (0..).zip(&worlds[..SILENT]).all(|(id, world)| {
            let wanted = world.snapshot().blocks;
            let wanted: BTreeSet<_> = wanted.iter().map(|b| (b.identity.hash, b.location.tier)).collect();
            let holdings = follower.index().holdings().filter(|(place, ..)| place.source == SourceId(id));
            let found: BTreeSet<_> = holdings.map(|(place, _, hash)| (hash, place.location.tier)).collect();
            found == wanted
        })
    };
    let deadline = Instant::now() + PATIENCE;
    while !is_right(&follower) {
        assert!(Instant::now() < deadline, "{:?}", follower.stats());
        follower.poll(Duration::from_millis(1)).unwrap();
    }
}
