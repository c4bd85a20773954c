//! Whether volumes of G4 can be used: each is opened as a manager would, and an object goes there
//! and back.

use std::time::{Duration, Instant};

use kvbm::VolumeDescriptor;
use kvbm::config::Config;
use kvbm::plan::shown_uri;
use kvbm::volumes::{Probe, RegistryError, VolumeError, probe};

use super::{Finding, Status};
use crate::{human, space};

/// Deadlines that a probe may take: it makes several calls.
const PATIENCE: u32 = 4;
const EFFECT: &str = "nothing is kept there, and nothing is found";
const FULL: &str = "it is full: what is there is found, what finds no room is dropped";

pub(super) fn examine(config: &Config, descriptor: &VolumeDescriptor) -> Finding {
    let name = format!("volume {}", descriptor.id);
    let uri = &shown_uri(&descriptor.uri);
    let missing = |why: String, fix: String| {
        Finding::short(name.clone(), Status::Missing, format!("{uri}: {why}"), EFFECT, fix)
    };
    let volume = match kvbm::volume_registry(config).register_volume(descriptor.clone()) {
        Ok(volume) => volume,
        Err(error) => return missing(error.to_string(), unopened(uri, &error)),
    };
    let deadline = kvbm::plan::deadline_after(Instant::now(), descriptor.deadline.saturating_mul(PATIENCE));
    match probe(&*volume, deadline) {
        Ok(probe) => judge(&name, descriptor, &probe),
        Err(error) if error.is_full() => {
            let fix = unusable(descriptor, &error);
            Finding::short(name, Status::Limited, format!("{uri}: {error}"), FULL, fix)
        }
        Err(error) => missing(error.to_string(), unusable(descriptor, &error)),
    }
}

/// How a volume that works is found.
fn judge(name: &str, descriptor: &VolumeDescriptor, probe: &Probe) -> Finding {
    let VolumeDescriptor { alignment, deadline, capacity_bytes, .. } = descriptor;
    let uri = shown_uri(&descriptor.uri);
    let calls: Vec<_> = probe.took.iter().map(|(call, took)| format!("{call} {}", millis(*took))).collect();
    let conditions = match probe.facts.conditional_puts {
        Some(true) => ", conditional puts",
        Some(false) => ", no conditional puts: every writer writes",
        None => "",
    };
    let free = probe.facts.folder.as_deref().map(space::free).and_then(Result::ok);
    let room = free.map_or_else(String::new, |free| format!(", {} free", human::bytes(free)));
    let calls = calls.join(", ");
    let found =
        format!("{uri}: {calls} with 64 KiB, payloads at multiples of {alignment} bytes{conditions}{room}");
    let limited =
        |found: String, effect, fix: String| Finding::short(name, Status::Limited, found, effect, fix);
    let slowest = probe.took.iter().max_by_key(|(_, took)| *took);
    if let Some((call, took)) = slowest.filter(|(_, took)| *took > *deadline / 4) {
        let (took, given) = (millis(*took), millis(*deadline));
        return limited(
            found,
            "calls under load are given up: reads are misses, copies are dropped",
            format!("{call} took {took} of {given}: raise volume.deadline, or use a store that is nearer"),
        );
    }
    let wanted = capacity_bytes.unwrap_or(0);
    if let Some(free) = free.filter(|free| *free < wanted) {
        return limited(
            found,
            "what finds no room is dropped",
            format!(
                "{} are to be kept there, {} are free: lower volume.capacity, or make room (what this namespace keeps there counts)",
                human::bytes(wanted),
                human::bytes(free)
            ),
        );
    }
    Finding::ok(name, found)
}

/// What helps where it could not be opened.
fn unopened(uri: &str, error: &RegistryError) -> String {
    match error {
        RegistryError::Scheme { .. } if uri.starts_with("s3:") => {
            format!("this build lacks s3: {}", crate::features::command_with("s3"))
        }
        RegistryError::Scheme { .. } => {
            "use a URI with one of these schemes; a vendor's volume is known to the program that adds its scheme".into()
        }
        RegistryError::Descriptor { field, rule, .. } => format!("set volume.{field} to {rule}"),
        _ if uri.starts_with("s3:") => format!("{S3}, and that the bucket is there"),
        _ => "create the directory, or mount what it stands for: kvbm does neither".into(),
    }
}

const S3: &str = "check endpoint, region and credentials of volume.uri";

/// What helps where a call failed.
fn unusable(descriptor: &VolumeDescriptor, error: &VolumeError) -> String {
    if error.is_late() {
        let given = millis(descriptor.deadline.saturating_mul(PATIENCE));
        return format!(
            "it did not answer within {given}: check that its server runs and is near, or raise volume.deadline"
        );
    }
    if error.is_full() {
        return "delete what is not needed there, make room in its store, or raise volume.capacity".into();
    }
    if descriptor.uri.starts_with("s3:") {
        return format!(
            "{S3}, that the bucket is there, and that they allow to put, get, list and delete objects in it"
        );
    }
    "let this user read and write there: chown or chmod the directory, or mount it writable".into()
}

fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::VolumeId;

    fn at(uri: &str) -> VolumeDescriptor {
        VolumeDescriptor::new(VolumeId(3), uri)
    }

    #[test]
    fn a_directory_that_works_is_reported_with_its_figures_and_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let finding = examine(
            &Config::default(),
            &VolumeDescriptor { alignment: 4096, ..at(&format!("dir://{}", dir.path().display())) },
        );
        assert_eq!((finding.name.as_str(), finding.status), ("volume 3", Status::Ok), "{finding:?}");
        for part in ["put ", "exists ", "get ", "list ", "delete ", "multiples of 4096", " free"] {
            assert!(finding.found.contains(part), "{part}: {}", finding.found);
        }
        let files = |dir: &std::path::Path| -> usize {
            let each = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
            each.filter(|path| !path.is_dir()).count()
        };
        assert_eq!(files(dir.path()), 0, "no object stays");
    }

    #[test]
    fn what_does_not_work_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let absent = format!("dir://{}", dir.path().join("absent").display());
        for (descriptor, found, fix) in [
            (at(&absent), "mount it first", "create the directory, or mount"),
            (at("vendor:x"), "no implementation", "a vendor's volume"),
            (VolumeDescriptor { alignment: 3, ..at("memory:") }, "alignment 3", "a power of two"),
        ] {
            let finding = examine(&Config::default(), &descriptor);
            assert_eq!(finding.status, Status::Missing, "{finding:?}");
            assert!(finding.found.contains(found), "{finding:?}");
            assert!(finding.fix.as_ref().is_some_and(|text| text.contains(fix)), "{finding:?}");
            assert_eq!(finding.effect.as_deref(), Some(EFFECT));
        }
    }

    #[test]
    fn slow_small_and_full_stores_are_limited() {
        let dir = tempfile::tempdir().unwrap();
        let descriptor = at(&format!("dir://{}", dir.path().display()));
        let full =
            examine(&Config::default(), &VolumeDescriptor { capacity_bytes: Some(10), ..descriptor.clone() });
        assert_eq!((full.status, full.effect.as_deref()), (Status::Limited, Some(FULL)), "{full:?}");
        assert!(full.found.contains("full, ") && full.fix.unwrap().contains("or raise volume.capacity"));
        let facts = kvbm::volumes::StoreFacts { folder: Some(dir.path().to_owned()), conditional_puts: None };
        let slow = Probe { facts: facts.clone(), took: vec![("put", Duration::from_secs(2))] };
        let finding = judge("volume 3", &descriptor, &slow);
        assert!(
            finding.status == Status::Limited
                && finding.fix.unwrap().contains("put took 2000.0 ms of 5000.0 ms")
        );
        let quick = Probe { facts, took: vec![("put", Duration::from_millis(2))] };
        assert_eq!(judge("volume 3", &descriptor, &quick).status, Status::Ok);
        let large = VolumeDescriptor { capacity_bytes: Some(u64::MAX), ..descriptor };
        let finding = judge("volume 3", &large, &quick);
        assert!(finding.status == Status::Limited && finding.fix.unwrap().contains("lower volume.capacity"));
    }
}
