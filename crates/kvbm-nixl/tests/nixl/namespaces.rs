//! Two network namespaces, as two machines have: bytes cross a TCP connection between them.

use std::io::Write;
use std::process::Command;

use kvbm_nixl::NixlEnabledStorage;
use kvbm_storage::{StorageAllocator, SystemAllocator};

use crate::agent;
use crate::processes::{BYTES, Holder, read_all};

/// In the reader's environment: the namespace of the process that it reads from.
const HOLDERS_NAMESPACE: &str = "NIXL_TEST_NAMESPACE";
const READER: &str = "namespaces::reader_in_a_namespace";
/// Each namespace's end of the line between them.
const DEVICE: &str = "kvbm0";

/// Two namespaces with a line between them.
struct Namespaces([String; 2]);

impl Namespaces {
    /// # Errors
    /// The system refuses a namespace: to a user who is not root, for example.
    fn new() -> Result<Self, String> {
        let id = std::process::id();
        let names = [format!("kvbm-reader-{id}"), format!("kvbm-holder-{id}")];
        ip(&["netns", "add", &names[0]])?;
        // From here on both are removed at the end.
        let namespaces = Self(names);
        namespaces.join().unwrap_or_else(|error| panic!("{error}"));
        Ok(namespaces)
    }

    fn join(&self) -> Result<(), String> {
        let [reader, holder] = &self.0;
        ip(&["netns", "add", holder])?;
        let [kind, peer] = [["type", "veth"], ["peer", "name"]];
        ip(&[&["link", "add", DEVICE, "netns", reader][..], &kind, &peer, &[DEVICE, "netns", holder]]
            .concat())?;
        for (name, address) in [(reader, "192.0.2.1/24"), (holder, "192.0.2.2/24")] {
            ip(&["-n", name, "address", "add", address, "dev", DEVICE])?;
            ip(&["-n", name, "link", "set", DEVICE, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    /// Bytes that the reader's end received.
    fn received(&self) -> u64 {
        let file = format!("/sys/class/net/{DEVICE}/statistics/rx_bytes");
        ip(&["netns", "exec", &self.0[0], "cat", &file]).expect("as set up").trim().parse().expect("a number")
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            // It may not be there: the second could not be made.
            let _absent = ip(&["netns", "del", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<String, String> {
    let line = arguments.join(" ");
    let output =
        Command::new("ip").args(arguments).output().map_err(|error| format!("ip {line}: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("ip {line}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

/// A program of a namespace, over TCP alone: both are on one machine, where UCX has faster ways.
fn inside(namespace: &str) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace]).arg(std::env::current_exe().expect("this program"));
    command.env("UCX_TLS", "tcp");
    command
}

/// The process that reads.
#[test]
fn reader_in_a_namespace() {
    // Only as the child of another test.
    let Ok(namespace) = std::env::var(HOLDERS_NAMESPACE) else { return };
    let agent = agent("reader");
    let memory = SystemAllocator::default().allocate(BYTES, 4096).expect("as set up");
    let _registration = memory.nixl_register(&agent).expect("as set up");
    read_all(&agent, &memory, &Holder::spawn(inside(&namespace)));
}

#[test]
fn bytes_of_another_network_namespace_are_read_over_tcp() {
    let namespaces = match Namespaces::new() {
        Ok(namespaces) => namespaces,
        Err(why) => {
            // Not by `eprintln`, whose output a test that passes keeps to itself.
            let text = format!("no network namespaces, so no read between them: {why}\n");
            std::io::stderr().write_all(text.as_bytes()).expect("standard error");
            return;
        }
    };
    let mut reader = inside(&namespaces.0[0]);
    reader.args(["--exact", READER]).env(HOLDERS_NAMESPACE, &namespaces.0[1]);
    let output = reader.output().expect("a process");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
    assert!(namespaces.received() >= BYTES, "the bytes came over the line");
}
