//! A file system that is shut down without writing anything more: what power loss leaves of ext4.

use crate::ledger::Ledger;
use crate::process::{After, Process};
use crate::support::Random;
use crate::writer::ENGINES;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// `EXT4_IOC_SHUTDOWN` of Linux, `_IOR('X', 125, __u32)`.
const SHUTDOWN: libc::c_ulong = 0x8004_587D;
/// Drop everything that is not on the device, the journal too.
const NO_LOG_FLUSH: u32 = 2;
const IMAGE_BYTES: u64 = 64 << 20;

pub(crate) fn run(rounds: u64, dir: &Path, seed: u64) -> ExitCode {
    let (image, mount) = (dir.join("ext4.img"), dir.join("mnt"));
    if let Err(why) = prepare(&image, &mount) {
        println!("{{\"skipped\": \"{}\"}}", why.replace(['"', '\\', '\n'], " "));
        return ExitCode::SUCCESS;
    }
    let _unmount = Unmount(&mount);
    let mut random = Random(seed);
    let mut ledger = Ledger::default();
    for round in 0..rounds {
        let engine = ENGINES[round as usize % ENGINES.len()];
        let inside = mount.join("g3");
        // A writer that the shutdown overtakes ends with an error, which is nobody's business.
        let mut process = Process::start(&inside, round + 1, engine, Stdio::null());
        After::of_round(round).wait(&mut process, &mut random);
        ledger.found.met_a_writer += u64::from(process.is_running());
        shut_down(&mount);
        let ended = process.kill();
        unmount(&mount).unwrap();
        mount_image(&image, &mount).unwrap();
        ledger.take(&ended.output);
        ledger.check(&inside, engine);
    }
    println!("{}", ledger.found.json());
    if ledger.found.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// An image with a file system, mounted; why not, where that is not permitted.
fn prepare(image: &Path, mount: &Path) -> Result<(), String> {
    std::fs::create_dir_all(mount).map_err(|error| error.to_string())?;
    let file = File::create(image).and_then(|file| file.set_len(IMAGE_BYTES));
    file.map_err(|error| error.to_string())?;
    succeed(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(image))?;
    mount_image(image, mount)
}

fn mount_image(image: &Path, mount: &Path) -> Result<(), String> {
    succeed(Command::new("mount").args(["-o", "loop"]).arg(image).arg(mount))
}

/// Leaves no mount behind, however the test ends.
struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        if let Err(why) = unmount(self.0) {
            eprintln!("{why}");
        }
    }
}

/// The kernel gives the files of a ring back a moment after its process is gone.
fn unmount(mount: &Path) -> Result<(), String> {
    let patience = Instant::now() + Duration::from_secs(20);
    loop {
        match succeed(Command::new("umount").arg(mount)) {
            Err(_) if Instant::now() < patience => std::thread::sleep(Duration::from_millis(20)),
            result => return result,
        }
    }
}

fn shut_down(mount: &Path) {
    let root = File::open(mount).unwrap();
    let flags = NO_LOG_FLUSH;
    // SAFETY: an open descriptor, and four bytes that live through the call.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), SHUTDOWN, &raw const flags) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn succeed(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
