//! Reader and writer of an established line.

use crate::frame::{FrameKind, announced_wait, frame, leaving, read_frame};
use crate::handshake::read_failure;
use crate::peer::{Peer, ProcessState, Ready};
use crate::queue::{Lane, Next, PushError, SendQueue};
use crate::shutdown::GracefulShutdown;
use crate::stream::Stream;
use crate::timed::Timeouts;
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::io::{self, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes that the kernel takes before the other end has read them: an urgent frame waits behind no
/// more.
const SOCKET_BUFFER: usize = 256 << 10;

/// How long a process may take from closing its sockets to its end.
const EXIT_TIME: Duration = Duration::from_millis(200);

/// Times of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineTimes {
    /// An end that has nothing to send sends a heartbeat so often.
    pub heartbeat: Duration,
    /// An end that was not heard for so long counts as silent.
    pub silent_after: Duration,
    /// The line to an end that may be on another machine is closed when it was not heard for so
    /// long. A line to a process of this machine is not: the system says when the process ends.
    pub lost_after: Duration,
    /// A handshake takes no longer.
    pub handshake: Duration,
    /// A leader that finds no worker tries again after this time at most.
    pub reconnect: Duration,
}

impl Default for LineTimes {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(500),
            silent_after: Duration::from_secs(3),
            lost_after: Duration::from_secs(10),
            handshake: Duration::from_secs(2),
            reconnect: Duration::from_millis(500),
        }
    }
}

/// A line after its handshake.
pub(crate) struct Connection {
    stream: Stream,
    pub(crate) peer: Peer,
    pub(crate) queue: SendQueue,
    times: LineTimes,
    started: Instant,
    /// When the other end was heard last, in milliseconds since `started`.
    heard: AtomicU64,
    closed: AtomicBool,
    /// Of the worker at this end, or at the other one.
    shutdown: GracefulShutdown,
}

impl Connection {
    pub(crate) fn new(
        stream: impl Into<Stream>,
        peer: Peer,
        times: LineTimes,
        queue_bytes: usize,
    ) -> io::Result<Self> {
        let stream = stream.into();
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, SOCKET_BUFFER)?;
        Ok(Self {
            stream,
            peer,
            queue: SendQueue::new(queue_bytes),
            times,
            started: Instant::now(),
            heard: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            shutdown: GracefulShutdown::default(),
        })
    }

    /// For how long the other end has not been heard.
    pub(crate) fn silence(&self) -> Duration {
        let heard = Duration::from_millis(self.heard.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(heard)
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.silence() > self.times.silent_after
    }

    /// Why nobody is there any more, as far as silence tells.
    fn lost(&self) -> Option<io::Error> {
        let silence = self.silence();
        let is_lost = self.peer.is_elsewhere() && silence > self.times.lost_after;
        let text = || format!("{} sent nothing for {} ms", self.peer.id, silence.as_millis());
        is_lost.then(|| io::Error::new(io::ErrorKind::TimedOut, text()))
    }

    /// What became of the process at the other end, now that the line has ended.
    pub(crate) fn process_state(&self) -> ProcessState {
        self.peer.state(EXIT_TIME)
    }

    /// Sends this last, and no more.
    pub(crate) fn end_with(&self, bytes: Vec<u8>) {
        // An end that reads nothing does not keep the writer.
        let _ = self.stream.set_write_timeout(Some(self.times.handshake));
        self.queue.end_with(bytes);
    }

    /// Ends both threads.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.queue.close();
        self.stream.shut();
        self.shutdown.over();
    }

    /// Tells the leader that this worker is about to end, behind all messages, and waits until it
    /// has saved what it wants, or `until`. Whether the leader said so, or is gone.
    pub(crate) fn leave(&self, patience: Duration, until: Instant) -> bool {
        if self.shutdown.begin() && self.send(Lane::Bulk, leaving(patience)).is_err() {
            return self.closed.load(Ordering::Acquire);
        }
        self.shutdown.wait_until(until)
    }

    /// Tells the worker at the other end that it may end. Whether it has said that it is about to,
    /// and was not told before.
    pub(crate) fn dismiss(&self) -> bool {
        let is_leaving = self.shutdown.dismissed();
        if is_leaving {
            // One that does not get it ends when its patience does.
            let _ = self.send(Lane::Bulk, frame(FrameKind::Dismissed, &[]));
        }
        is_leaving
    }

    /// Sends a frame, at once where nothing waits: that saves a thread's wake-up. Never waits.
    pub(crate) fn send(&self, lane: Lane, frame: Vec<u8>) -> Result<(), PushError> {
        match self.claim() {
            Some(socket) => self.write_now(socket, frame),
            None => self.queue.push(lane, frame),
        }
    }

    /// Sends a bulk frame; waits for room in the queue until the line ends.
    pub(crate) fn send_when_room(&self, frame: Vec<u8>) -> Result<(), PushError> {
        match self.claim() {
            Some(socket) => self.write_now(socket, frame),
            None => self.queue.push_when_room(frame),
        }
    }

    /// The socket, where the caller may write to it. Over TLS the line's own thread writes.
    fn claim(&self) -> Option<&UnixStream> {
        self.stream.as_plain().filter(|_| self.queue.claim())
    }

    /// Writes what the socket takes without waiting; the queue gets the rest.
    fn write_now(&self, socket: &UnixStream, mut frame: Vec<u8>) -> Result<(), PushError> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = match rustix::net::send(socket, &frame, flags) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(_) => {
                self.close();
                return Err(PushError::Closed);
            }
        };
        let rest = frame.split_off(sent.min(frame.len()));
        self.queue.release(Some(rest).filter(|rest| !rest.is_empty()));
        Ok(())
    }

    /// Sends what waits in the queue, and heartbeats, until the line ends.
    pub(crate) fn write(&self) {
        let heartbeat = frame(FrameKind::Heartbeat, &[]);
        loop {
            let sent = match self.queue.next(kvbm_plan::deadline_after(Instant::now(), self.times.heartbeat))
            {
                Next::Frame(bytes) => self.stream.write_all(&bytes),
                Next::Idle => self.stream.write_all(&heartbeat),
                Next::Closed => return,
            };
            if sent.is_err() {
                return self.close();
            }
        }
    }

    /// Gives every body to `on_body` until the line ends. Why it ended.
    pub(crate) fn read(&self, on_body: impl FnMut(Vec<u8>)) -> io::Error {
        self.read_and_watch(on_body, None)
    }

    /// The same at the leader's end: `on_leave` is told when the worker is about to end.
    pub(crate) fn read_and_watch(
        &self,
        mut on_body: impl FnMut(Vec<u8>),
        on_leave: Option<&dyn Fn(Duration)>,
    ) -> io::Error {
        let mut reader = BufReader::with_capacity(64 << 10, Watched(self));
        let error = loop {
            match read_frame(&mut reader) {
                Ok((FrameKind::Body, body)) => on_body(body),
                Ok((FrameKind::Heartbeat, _)) => {}
                Ok((FrameKind::Refusal, body)) => break io::Error::other(read_failure(&body)),
                Ok((FrameKind::Dismissed, _)) if on_leave.is_none() && self.shutdown.dismissed() => {}
                Ok((kind, body)) => {
                    // A worker says once that it is about to end.
                    if let (FrameKind::Leaving, Some(on_leave)) = (kind, on_leave)
                        && self.shutdown.begin()
                    {
                        match announced_wait(&body) {
                            Ok(patience) => on_leave(patience),
                            Err(error) => break error,
                        }
                        continue;
                    }
                    let what = format!("a frame of kind {kind:?} came on an established line");
                    break io::Error::new(io::ErrorKind::InvalidData, what);
                }
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    break io::Error::new(error.kind(), "the other end is gone");
                }
                Err(error) => break error,
            }
        };
        self.close();
        error
    }
}

/// Reads of the socket that end with the process at the other end, also where another process keeps
/// the socket open.
struct Watched<'a>(&'a Connection);

impl Read for Watched<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let Self(line) = self;
        if let Some(count) = line.stream.read_waiting(bytes)? {
            return Ok(count);
        }
        loop {
            match line.peer.wait(&line.stream, line.times.heartbeat)? {
                Ready::Socket => {
                    let read = line.stream.read(bytes);
                    line.heard.store(line.started.elapsed().as_millis() as u64, Ordering::Relaxed);
                    match read {
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        read => return read,
                    }
                }
                Ready::Gone => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ready::Nothing if line.closed.load(Ordering::Acquire) => {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                Ready::Nothing => {
                    if let Some(error) = line.lost() {
                        return Err(error);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn frames_of_many_producers_arrive_whole_and_in_order() {
        const PRODUCERS: u8 = 4;
        const FRAMES: u32 = 300;
        let (near, far) = UnixStream::pair().unwrap();
        let times = LineTimes { heartbeat: Duration::from_millis(1), ..LineTimes::default() };
        let line = |stream: UnixStream| {
            let peer = Peer::of(&stream).unwrap();
            Arc::new(Connection::new(stream, peer, times, 64 << 20).unwrap())
        };
        let (near, far) = (line(near), line(far));
        std::thread::scope(|scope| {
            scope.spawn(|| near.write());
            for producer in 0..PRODUCERS {
                let near = &near;
                scope.spawn(move || {
                    for number in 0..FRAMES {
                        // More than the socket takes at a time, now and then.
                        let len = if number % 50 == 0 { 700_000 } else { 100 };
                        let mut body = vec![producer; len];
                        body[..4].copy_from_slice(&number.to_le_bytes());
                        near.send(Lane::Bulk, frame(FrameKind::Body, &body)).unwrap();
                    }
                });
            }
            let (mut next, mut left) = ([0; PRODUCERS as usize], u32::from(PRODUCERS) * FRAMES);
            let _ended = far.read(|body| {
                let number = u32::from_le_bytes(body[..4].try_into().unwrap());
                let producer = usize::from(body[4]);
                assert_eq!(number, next[producer]);
                assert!(body[4..].iter().all(|byte| usize::from(*byte) == producer));
                next[producer] += 1;
                left -= 1;
                if left == 0 {
                    far.close();
                }
            });
            assert_eq!((left, next), (0, [FRAMES; PRODUCERS as usize]));
            near.close();
        });
        assert_eq!(near.send(Lane::Bulk, frame(FrameKind::Body, &[1])), Err(PushError::Closed));
    }
}
