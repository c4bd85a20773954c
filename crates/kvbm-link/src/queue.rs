//! Frames that wait to be sent, in two lanes. The urgent lane overtakes the bulk lane.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::time::Instant;

/// Most frames that wait, whatever their bytes.
const MAX_FRAMES: usize = 1 << 16;

/// How a command is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// In order with all other bulk commands.
    Bulk,
    /// As `Bulk`, and named: a command `Behind` the same number does not overtake it.
    Numbered(u64),
    /// Before all bulk commands that wait.
    Urgent,
    /// Before all bulk commands that wait, unless the one with this number is among them: then
    /// behind it.
    Behind(u64),
}

/// The queue takes no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PushError {
    /// The bound in bytes or frames is reached.
    Full,
    /// The line has ended.
    Closed,
}

/// What the writer does next.
pub(crate) enum Next {
    /// Sends this.
    Frame(Vec<u8>),
    /// Nothing came until the given time.
    Idle,
    /// Ends.
    Closed,
}

/// A frame in the bulk lane, with its number.
type Numbered = (Option<u64>, Vec<u8>);

/// Who writes to the socket.
#[derive(Default, PartialEq, Eq)]
enum Writing {
    /// The thread of the line; also before it has begun.
    #[default]
    Thread,
    /// A producer that has found nothing waiting.
    Producer,
    Nobody,
}

#[derive(Default)]
struct Lanes {
    writing: Writing,
    /// The thread of the line waits for the producer to end.
    is_awaited: bool,
    /// What is left of a frame that a producer has begun: it goes first.
    rest: Option<Vec<u8>>,
    urgent: VecDeque<Vec<u8>>,
    bulk: VecDeque<Numbered>,
    bytes: usize,
    /// Nothing is taken any more; what waits is still sent.
    ending: bool,
    closed: bool,
}

/// Frames that wait for the writer, bounded in bytes.
pub(crate) struct SendQueue {
    lanes: Mutex<Lanes>,
    /// A frame came, or the queue was closed.
    filled: Condvar,
    /// A frame was taken, or the queue was closed.
    drained: Condvar,
    max_bytes: usize,
}

impl SendQueue {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { lanes: Mutex::default(), filled: Condvar::new(), drained: Condvar::new(), max_bytes }
    }

    /// Whether the caller may write to the socket, because nothing waits and nobody else does. Who
    /// may has to [`release`](Self::release) it.
    pub(crate) fn claim(&self) -> bool {
        let mut lanes = self.lanes.lock();
        let is_free = lanes.writing == Writing::Nobody && lanes.is_empty() && !lanes.closed && !lanes.ending;
        if is_free {
            lanes.writing = Writing::Producer;
        }
        is_free
    }

    /// Ends a claim. The thread of the line sends the rest of the frame.
    pub(crate) fn release(&self, rest: Option<Vec<u8>>) {
        let mut lanes = self.lanes.lock();
        if lanes.closed {
            return;
        }
        lanes.writing = Writing::Nobody;
        lanes.bytes += rest.as_ref().map_or(0, Vec::len);
        lanes.rest = rest;
        if lanes.is_awaited || !lanes.is_empty() || lanes.ending {
            self.filled.notify_one();
        }
    }

    /// Adds a frame, or says why not. Never waits.
    pub(crate) fn push(&self, lane: Lane, frame: Vec<u8>) -> Result<(), PushError> {
        let mut lanes = self.lanes.lock();
        if lanes.closed || lanes.ending {
            return Err(PushError::Closed);
        }
        if !self.has_room(&lanes, frame.len()) {
            return Err(PushError::Full);
        }
        lanes.add(lane, frame);
        self.filled.notify_one();
        Ok(())
    }

    /// Adds a bulk frame; waits for room until the queue is closed.
    pub(crate) fn push_when_room(&self, frame: Vec<u8>) -> Result<(), PushError> {
        let mut lanes = self.lanes.lock();
        while !lanes.closed && !lanes.ending && !self.has_room(&lanes, frame.len()) {
            self.drained.wait(&mut lanes);
        }
        if lanes.closed || lanes.ending {
            return Err(PushError::Closed);
        }
        lanes.add(Lane::Bulk, frame);
        self.filled.notify_one();
        Ok(())
    }

    fn has_room(&self, lanes: &Lanes, bytes: usize) -> bool {
        // One frame always fits, however large.
        let frames = lanes.urgent.len() + lanes.bulk.len();
        frames == 0 || (lanes.bytes + bytes <= self.max_bytes && frames < MAX_FRAMES)
    }

    /// The next frame; waits until `until` at most.
    pub(crate) fn next(&self, until: Instant) -> Next {
        let mut lanes = self.lanes.lock();
        if lanes.writing == Writing::Thread {
            lanes.writing = Writing::Nobody;
        }
        loop {
            if lanes.closed {
                return Next::Closed;
            }
            let is_free = lanes.writing == Writing::Nobody;
            if let Some(frame) = is_free.then(|| lanes.take()).flatten() {
                lanes.writing = Writing::Thread;
                self.drained.notify_all();
                return Next::Frame(frame);
            }
            if is_free && lanes.ending {
                return Next::Closed;
            }
            if !is_free {
                // Not for long: the producer does not wait for the socket.
                lanes.is_awaited = true;
                self.filled.wait(&mut lanes);
                lanes.is_awaited = false;
            } else if self.filled.wait_until(&mut lanes, until).timed_out()
                && lanes.writing == Writing::Nobody
                && lanes.is_empty()
            {
                lanes.writing = Writing::Thread;
                return Next::Idle;
            }
        }
    }

    /// Takes a last frame, behind all others.
    pub(crate) fn end_with(&self, frame: Vec<u8>) {
        let mut lanes = self.lanes.lock();
        if !lanes.closed {
            lanes.add(Lane::Bulk, frame);
            lanes.ending = true;
        }
        self.filled.notify_all();
        self.drained.notify_all();
    }

    /// Drops what waits; nothing is taken any more.
    pub(crate) fn close(&self) {
        let mut lanes = self.lanes.lock();
        *lanes = Lanes { closed: true, ..Lanes::default() };
        self.filled.notify_all();
        self.drained.notify_all();
    }
}

impl Lanes {
    fn add(&mut self, lane: Lane, frame: Vec<u8>) {
        self.bytes += frame.len();
        match lane {
            Lane::Bulk => self.bulk.push_back((None, frame)),
            Lane::Numbered(number) => self.bulk.push_back((Some(number), frame)),
            Lane::Urgent => self.urgent.push_back(frame),
            Lane::Behind(number) => match self.bulk.iter().position(|(of, _)| *of == Some(number)) {
                Some(at) => self.bulk.insert(at + 1, (None, frame)),
                None => self.urgent.push_back(frame),
            },
        }
    }

    fn is_empty(&self) -> bool {
        self.rest.is_none() && self.urgent.is_empty() && self.bulk.is_empty()
    }

    fn take(&mut self) -> Option<Vec<u8>> {
        let next = self.rest.take().or_else(|| self.urgent.pop_front());
        let frame = next.or_else(|| self.bulk.pop_front().map(|(_, frame)| frame))?;
        self.bytes -= frame.len();
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn drain(queue: &SendQueue) -> Vec<u8> {
        let mut found = Vec::new();
        while let Next::Frame(frame) = queue.next(Instant::now()) {
            found.push(frame[0]);
        }
        found
    }

    #[test]
    fn urgent_frames_overtake_bulk_and_stay_behind_what_they_name() {
        let queue = SendQueue::new(100);
        for (lane, frame) in [
            (Lane::Numbered(7), 1),
            (Lane::Bulk, 2),
            (Lane::Behind(7), 3),
            (Lane::Urgent, 4),
            (Lane::Behind(8), 5),
            (Lane::Numbered(9), 6),
        ] {
            queue.push(lane, vec![frame]).unwrap();
        }
        assert_eq!(drain(&queue), [4, 5, 1, 3, 2, 6]);
    }

    #[test]
    fn the_bound_is_in_bytes_and_one_frame_always_fits() {
        let queue = SendQueue::new(10);
        queue.push(Lane::Bulk, vec![0; 50]).unwrap();
        assert_eq!(queue.push(Lane::Urgent, vec![0]), Err(PushError::Full));
        assert!(matches!(queue.next(Instant::now()), Next::Frame(_)));
        queue.push(Lane::Bulk, vec![0; 9]).unwrap();
        queue.push(Lane::Urgent, vec![0]).unwrap();
        assert_eq!(queue.push(Lane::Bulk, vec![0]), Err(PushError::Full));
    }

    #[test]
    fn a_producer_writes_where_nothing_waits_and_the_rest_of_its_frame_goes_first() {
        let queue = SendQueue::new(100);
        assert!(!queue.claim(), "the thread has not begun: others write to the socket");
        assert!(matches!(queue.next(Instant::now()), Next::Idle));
        assert!(!queue.claim(), "the thread sends a heartbeat");
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let until = Instant::now() + Duration::from_secs(60);
                [queue.next(until), queue.next(until)].map(|next| match next {
                    Next::Frame(frame) => frame,
                    Next::Idle | Next::Closed => Vec::new(),
                })
            });
            while !queue.claim() {
                std::thread::yield_now();
            }
            assert!(!queue.claim(), "one at a time");
            queue.push(Lane::Urgent, vec![2]).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            assert!(!thread.is_finished(), "the producer has not ended");
            queue.release(Some(vec![1]));
            assert_eq!(thread.join().unwrap(), [vec![1], vec![2]]);
        });
        assert!(matches!(queue.next(Instant::now()), Next::Idle));
    }

    #[test]
    fn a_producer_that_writes_when_a_heartbeat_is_due_delays_it_and_no_more() {
        let queue = SendQueue::new(100);
        queue.lanes.lock().writing = Writing::Nobody;
        assert!(queue.claim());
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| matches!(queue.next(Instant::now()), Next::Idle));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!thread.is_finished(), "the producer has not ended");
            queue.release(None);
            let until = Instant::now() + Duration::from_secs(20);
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            let is_idle = thread.is_finished();
            // Lets a thread that still waits go.
            queue.close();
            assert!(is_idle && thread.join().unwrap());
        });
    }

    #[test]
    fn the_last_frame_is_sent_and_no_other_follows() {
        let queue = SendQueue::new(9);
        queue.push(Lane::Bulk, vec![1]).unwrap();
        queue.end_with(vec![2]);
        assert_eq!(queue.push(Lane::Urgent, vec![3]), Err(PushError::Closed));
        assert_eq!(queue.push_when_room(vec![3]), Err(PushError::Closed));
        assert_eq!(drain(&queue), [1, 2]);
        assert!(matches!(queue.next(Instant::now() + Duration::from_secs(9)), Next::Closed));
    }

    #[test]
    fn a_producer_waits_for_room_until_the_end() {
        let queue = SendQueue::new(4);
        queue.push(Lane::Bulk, vec![1; 4]).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| queue.push_when_room(vec![2; 4]));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished(), "there is no room");
            assert!(matches!(queue.next(Instant::now()), Next::Frame(_)));
            assert_eq!(waiting.join().unwrap(), Ok(()));
            let waiting = scope.spawn(|| queue.push_when_room(vec![3; 4]));
            std::thread::sleep(Duration::from_millis(20));
            queue.close();
            assert_eq!(waiting.join().unwrap(), Err(PushError::Closed));
        });
        assert_eq!(queue.push(Lane::Bulk, vec![1]), Err(PushError::Closed));
        assert!(matches!(queue.next(Instant::now() + Duration::from_secs(9)), Next::Closed));
    }
}
