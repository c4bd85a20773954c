//! Messages to the service manager: the protocol of `sd_notify`.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::note::note;

/// Sends `state` to the service manager, if `NOTIFY_SOCKET` names one.
pub(crate) fn notify_service_manager(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send(&socket, state) {
        note(&format!("kvbm: NOTIFY_SOCKET={} did not receive {state}: {error}", socket.display()));
    }
}

fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    // It waits for nobody.
    sender.set_nonblocking(true)?;
    sender.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_manager_gets_the_state() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), "READY=1").unwrap();
        let mut message = [0; 16];
        let count = manager.recv(&mut message).unwrap();
        assert_eq!(&message[..count], b"READY=1");
        drop(manager);
        assert!(send(path.as_os_str(), "READY=1").is_err(), "nobody is there");
    }
}
