//! Ports of this machine for tests that have to know the number before anybody listens there, or
//! listen there again later. Tests of other crates use it by its path.
//!
//! A port that the system gave to a socket that is closed again is anybody's: the next outgoing
//! connection may get it. So these lie outside the range of outgoing connections, and test
//! processes agree about them by their UDP sockets: who holds the UDP port has claimed the TCP port
//! of that number, and the claim ends with its process, however that ends.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU16, Ordering};

/// Most ports that are looked at.
const WIDTH: u16 = 12_000;
/// Below are those of well-known services.
const LOWEST: u16 = 1024;

/// A port that nobody else has while this is there.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    _claim: UdpSocket,
}

impl Port {
    /// Claims the next free one.
    pub(crate) fn claim() -> Self {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let range = range();
        let count = range.end() - range.start() + 1;
        // Processes that start together begin in different places.
        let first = (std::process::id() as u16).wrapping_mul(7919);
        (0..count)
            .find_map(|_| {
                let step = NEXT.fetch_add(1, Ordering::Relaxed);
                Self::take(range.start() + first.wrapping_add(step) % count)
            })
            .unwrap_or_else(|| panic!("every port of {range:?} is taken"))
    }

    fn take(number: u16) -> Option<Self> {
        let claim = UdpSocket::bind((Ipv4Addr::LOCALHOST, number)).ok()?;
        // Some server that is no test's may be there, on whichever address.
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)).ok()?;
        Some(Self { number, _claim: claim })
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

/// A port that is this process's own until it ends.
pub(crate) fn free_port() -> u16 {
    let port = Port::claim();
    let number = port.number();
    // The claim stays.
    std::mem::forget(port);
    number
}

/// Ports that outgoing connections do not take: below their range, or above it.
fn range() -> RangeInclusive<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut bounds = text.split_whitespace().map_while(|bound| bound.parse::<u16>().ok());
    // What Linux has unless somebody changed it.
    let (low, high) = bounds.next().zip(bounds.next()).unwrap_or((32_768, 60_999));
    match low.saturating_sub(LOWEST) {
        0..100 => {
            assert!(high < u16::MAX - 100, "outgoing connections use all ports: lower ip_local_port_range");
            high + 1..=u16::MAX
        }
        below => low - below.min(WIDTH)..=low - 1,
    }
}
