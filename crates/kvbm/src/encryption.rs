//! Operator's keys, from a file or from a command such as the client of a key management service.

#[cfg(feature = "worker")]
use crate::config::{Config, EncryptionConfig};
use kvbm_keys::{BadKey, OperatorKey};
use kvbm_link::private_file;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Bytes of a key file, and of what a command prints: more are no key.
const MOST_BYTES: u64 = 4096;
/// Characters of a command's complaint that a message quotes.
const QUOTED: usize = 300;
/// Between two looks whether a command has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// An operator's key that is not to be had. Says nothing of what was read instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperatorKeyError {
    /// The file.
    #[error("{setting} = {file}: {why}")]
    File {
        /// The setting or option.
        setting: String,
        /// The file.
        file: String,
        /// What is wrong with it.
        why: String,
    },
    /// The command.
    #[error("{setting} = {command}: {why}")]
    Command {
        /// The setting or option.
        setting: String,
        /// The command.
        command: String,
        /// What is wrong with it.
        why: String,
    },
}

/// The operator's keys of a configuration: the key, and the one before it.
#[cfg(feature = "worker")]
pub type OperatorKeys = (OperatorKey, Option<OperatorKey>);

/// The keys for G3 and G4, where blocks of one of them are encrypted. Reads files, and runs
/// commands.
///
/// # Errors
/// A key is not to be had.
#[cfg(feature = "worker")]
pub fn operator_keys(config: &Config) -> Result<Option<OperatorKeys>, OperatorKeyError> {
    if !config.disk.encrypt && !config.volumes.encrypt {
        return Ok(None);
    }
    let EncryptionConfig { key_file, key_command, previous_key_file, previous_key_command, command_timeout } =
        &config.encryption;
    let read = |name: &str, file: Option<&Path>, command: &[String]| {
        let setting = |kind: &str| format!("encryption.{name}_{kind}");
        match file {
            Some(file) => key_from_file(&setting("file"), file).map(Some),
            None if command.is_empty() => Ok(None),
            None => key_from_command(&setting("command"), command, *command_timeout).map(Some),
        }
    };
    let key = read("key", key_file.as_deref(), key_command.as_slice())?;
    let previous = read("previous_key", previous_key_file.as_deref(), previous_key_command.as_slice())?;
    // `validate` has asked for one.
    Ok(key.map(|key| (key, previous)))
}

/// Reads a key from a file that belongs to this user, or to root, and that no other user reads.
/// `setting`: what names the file, for messages.
///
/// # Errors
/// The file cannot be read, others can open it, or it holds no key.
pub fn key_from_file(setting: &str, file: &Path) -> Result<OperatorKey, OperatorKeyError> {
    let wrong = |why: String| {
        let file = file.display().to_string();
        OperatorKeyError::File { setting: setting.to_owned(), file, why }
    };
    let bytes = private_file::read(file, MOST_BYTES + 1).map_err(|error| wrong(error.to_string()))?;
    OperatorKey::parse(&bytes).map_err(|bad| wrong(bad.to_string()))
}

/// Runs a command, without a shell, whose standard output is a key and nothing else; it gets no
/// input. After `timeout` it is killed, with the processes of its group.
///
/// # Errors
/// The command cannot be started, does not end, fails, or prints no key.
pub fn key_from_command(
    setting: &str,
    command: &[String],
    timeout: Duration,
) -> Result<OperatorKey, OperatorKeyError> {
    let wrong = |why: String| {
        let command = format!("{command:?}");
        OperatorKeyError::Command { setting: setting.to_owned(), command, why }
    };
    let Some((program, arguments)) = command.split_first() else {
        return Err(wrong("it names no program".to_owned()));
    };
    let printed = run(program, arguments, timeout).map_err(&wrong)?;
    OperatorKey::parse(&printed).map_err(|bad| match bad {
        BadKey::Length(bytes) if bytes as u64 > MOST_BYTES => wrong(format!(
            "it prints more than {MOST_BYTES} bytes: a key is 64 hexadecimal digits or 32 bytes"
        )),
        bad => wrong(format!("what it prints is no key: {bad}")),
    })
}

/// What the command prints.
fn run(program: &str, arguments: &[String], timeout: Duration) -> Result<Vec<u8>, String> {
    let until = kvbm_plan::deadline_after(Instant::now(), timeout);
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A group of its own: what it starts ends with it.
    let child = command.process_group(0).spawn();
    let mut child =
        child.map_err(|error| format!("it cannot be started: {error}; name a program by its path"))?;
    let (printed, complaint) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let too_late = || format!("it took longer than encryption.command_timeout ({timeout:?}) and was killed");
    let Some(status) =
        wait(&mut child, until).map_err(|error| format!("it cannot be waited for: {error}"))?
    else {
        kill(&mut child);
        return Err(too_late());
    };
    if !status.success() {
        kill(&mut child);
        return Err(failed(status, &rest(&complaint, until).unwrap_or_default()));
    }
    // Something that it has started may still have its output.
    let bytes = rest(&printed, until);
    kill(&mut child);
    bytes.ok_or_else(too_late)
}

/// Reads an output in a thread of its own, which ends when all who have it have ended.
fn collect(output: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (send, receive) = channel();
    let read = move || {
        let mut bytes = Vec::new();
        if let Some(mut output) = output {
            // What was read before an error is no key, and is refused as such. The rest is read
            // too: who cannot write it would fail for that.
            let _ = output.by_ref().take(MOST_BYTES + 1).read_to_end(&mut bytes);
            let _ = io::copy(&mut output, &mut io::sink());
        }
        let _nobody_waits = send.send(bytes);
    };
    // Without a thread there is no output, which is no key.
    let _ = std::thread::Builder::new().name("kvbm-key-command".to_owned()).spawn(read);
    receive
}

fn rest(output: &Receiver<Vec<u8>>, until: Instant) -> Option<Vec<u8>> {
    output.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
}

fn wait(child: &mut Child, until: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Ends the command, if it runs, and what is left of its group.
fn kill(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        // There may be nobody left.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ended = child.wait();
}

fn failed(status: ExitStatus, complaint: &[u8]) -> String {
    let complaint: String = String::from_utf8_lossy(complaint).trim().chars().take(QUOTED).collect();
    let complaint = complaint.replace(char::is_control, " ");
    match complaint.as_str() {
        "" => format!("it failed ({status}) and printed no error"),
        words => format!("it failed ({status}): {words}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const DIGITS: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    const PATIENCE: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Vec<String> {
        ["sh", "-c", script].map(str::to_owned).to_vec()
    }

    fn refused(command: &[String], timeout: Duration) -> String {
        let error = key_from_command("encryption.key_command", command, timeout).map(|key| key.id());
        let error = error.expect_err("no key").to_string();
        assert!(error.starts_with("encryption.key_command = ["), "{error}");
        error
    }

    #[test]
    fn a_command_prints_the_key_that_a_file_holds() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("key");
        std::fs::write(&path, DIGITS).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("mode");
        let of_file = key_from_file("encryption.key_file", &path).expect("a key").id();
        // What it complains of beside the key is nobody's business, nor is what stays behind.
        for script in [
            format!("echo {DIGITS}"),
            format!("echo some warning >&2; printf {DIGITS}"),
            format!("sleep 1000 > /dev/null 2>&1 & echo {DIGITS}"),
        ] {
            let key = key_from_command("encryption.key_command", &shell(&script), PATIENCE).expect("a key");
            assert_eq!(key.id(), of_file, "{script}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("mode");
        let error =
            key_from_file("encryption.key_file", &path).map(|key| key.id()).expect_err("others read it");
        assert!(error.to_string().contains("chmod 600") && error.to_string().contains("key_file"), "{error}");
        std::fs::write(&path, "password").expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("mode");
        let error = key_from_file("encryption.key_file", &path).map(|key| key.id()).expect_err("no key");
        assert!(error.to_string().contains("8 bytes") && !error.to_string().contains("password"), "{error}");
    }

    #[test]
    fn a_command_that_fails_prints_garbage_or_is_not_there_is_named_with_why() {
        for (script, why) in [
            ("echo denied by the service >&2; exit 7", "denied by the service"),
            ("exit 7", "printed no error"),
            ("true", "0 bytes"),
            ("echo secret-garbage", "no key"),
            ("head -c 100000 /dev/zero", "more than 4096 bytes"),
            ("head -c 64 /dev/zero | tr '\\0' 0", "equal"),
        ] {
            let error = refused(&shell(script), PATIENCE);
            assert!(error.contains(why), "{error}");
            // The command itself is quoted, and what it prints is not.
            assert_eq!(
                error.matches("secret-garbage").count(),
                usize::from(script.contains("secret-garbage"))
            );
        }
        assert!(refused(&["/no/such/program".to_owned()], PATIENCE).contains("cannot be started"));
        let none = key_from_command("encryption.key_command", &[], PATIENCE).map(|key| key.id());
        assert!(none.expect_err("no program").to_string().contains("names no program"));
    }

    #[test]
    fn a_command_that_hangs_is_killed_with_what_it_has_started() {
        let dir = tempfile::tempdir().expect("a directory");
        let pid = dir.path().join("pid");
        let timeout = Duration::from_millis(300);
        for script in [
            format!("sleep 1000 & echo $! > {}; wait", pid.display()),
            // It ends, and what it has started keeps its output.
            format!("sleep 1000 & echo $! > {}; echo {DIGITS}", pid.display()),
        ] {
            let error = refused(&shell(&script), timeout);
            assert!(error.contains("encryption.command_timeout"), "{error}");
            let sleeper = std::fs::read_to_string(&pid).expect("its number");
            let until = Instant::now() + PATIENCE;
            // Gone, or dead and not yet collected by whoever has to.
            let lives = || {
                let stat = std::fs::read_to_string(format!("/proc/{}/stat", sleeper.trim()));
                stat.is_ok_and(|stat| !stat.contains(") Z "))
            };
            while lives() {
                assert!(Instant::now() < until, "it still runs");
                std::thread::sleep(PAUSE);
            }
        }
    }
}
