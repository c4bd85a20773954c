//! `kvbm disk` as people and scripts run it.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn kvbm(dir: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
    command.current_dir(dir).env("TMPDIR", dir).args(line.split_whitespace()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The JSON of a command that ends with `status`.
fn json(dir: &Path, line: &str, status: i32) -> Value {
    let output = kvbm(dir, &format!("{line} --json -"));
    assert_eq!(output.status.code(), Some(status), "{line}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What a command that fails says.
fn error_of(dir: &Path, line: &str) -> String {
    let output = kvbm(dir, line);
    assert_eq!(output.status.code(), Some(1), "{line}: {}", text(&output.stdout));
    text(&output.stderr)
}

fn fill(dir: &Path, namespace: &str) {
    let line = "replay --synthetic 60 --block-bytes 4KiB --capacity 50,100,2000 --dir kept --namespace";
    assert!(kvbm(dir, &format!("{line} {namespace}")).status.success());
}

/// The directory of the engine of the only namespace.
fn rank(dir: &Path) -> PathBuf {
    let namespaces: Vec<_> =
        std::fs::read_dir(dir.join("kept")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(namespaces.len(), 1);
    namespaces[0].join("rank-0-of-1")
}

#[test]
fn a_directory_is_inspected_verified_repaired_and_cleared() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fill(dir, "one");
    let found = json(dir, "disk inspect kept", 0);
    let first = &found["directories"][0];
    assert!(first["geometry"].as_str().unwrap().starts_with("model=one; rank=0/1; order="), "{found:#}");
    assert_eq!((&first["block_bytes"], &first["slots"]), (&4096.into(), &2000.into()));
    assert_eq!(
        (&first["clean"], &first["owner"], &first["orphans"]),
        (&true.into(), &Value::Null, &0.into())
    );
    let blocks = first["blocks"].as_u64().unwrap();
    assert!(blocks > 200, "{found:#}");

    let good = json(dir, "disk verify kept", 0);
    assert_eq!((&good["verified_blocks"], &good["passed"]), (&blocks.into(), &true.into()));
    let slots = rank(dir).join("slots.kvbm");
    let mut bytes = std::fs::read(&slots).unwrap();
    for block in bytes.chunks_mut(10 << 12) {
        block[100] ^= 4;
    }
    std::fs::write(&slots, bytes).unwrap();
    let bad = json(dir, "disk verify kept", 1);
    let damaged = bad["damaged_blocks"].as_u64().unwrap();
    assert!(damaged > 10 && bad["passed"] == false, "{bad:#}");
    assert_eq!(bad["verified_blocks"].as_u64().unwrap() + damaged, blocks);
    assert!(error_of(dir, "disk verify kept").contains("kvbm disk repair"));
    let repair = json(dir, "disk repair kept", 0);
    assert_eq!(
        (&repair["damaged_blocks"], &repair["repaired"]["quarantined_slots"]),
        (&damaged.into(), &damaged.into())
    );
    let mended = json(dir, "disk verify kept", 0);
    assert_eq!(
        (&mended["orphans"], &mended["directories"][0]["quarantined_slots"]),
        (&0.into(), &damaged.into())
    );

    fill(dir, "two");
    assert_eq!(json(dir, "disk inspect kept", 0)["directories"].as_array().unwrap().len(), 2);
    std::fs::write(dir.join("kept/note.txt"), "mine").unwrap();
    let cleared = json(dir, "disk clear kept", 0);
    assert_eq!(cleared["cleared"].as_array().unwrap().len(), 2);
    let left: Vec<_> =
        std::fs::read_dir(dir.join("kept")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["note.txt"], "what is not ours stays");

    // As if it had been interrupted.
    std::fs::remove_file(dir.join("kept/note.txt")).unwrap();
    fill(dir, "one");
    std::fs::remove_file(rank(dir).join("journal.kvbm")).unwrap();
    assert!(error_of(dir, "disk inspect kept").contains("no directory of kvbm"));
    assert!(json(dir, "disk clear kept", 0)["bytes"].as_u64().unwrap() > 2000 * 4096);
    assert_eq!(std::fs::read_dir(dir.join("kept")).unwrap().count(), 0);
}

/// Mutation that makes it fail: directories with spaces between them are one disk, as those with
/// commas are.
#[test]
fn several_disks_are_looked_at_one_after_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fill(dir, "one");
    fill(dir, "two");
    let folders: Vec<_> = std::fs::read_dir(dir.join("kept")).unwrap().map(|entry| entry.unwrap()).collect();
    let [one, two] = [0, 1].map(|at| format!("kept/{}", folders[at].file_name().display()));
    for command in ["inspect", "verify"] {
        let found = json(dir, &format!("disk {command} {one} {two} kept"), 0);
        let found = found["directories"].as_array().unwrap();
        assert_eq!(found.len(), 2, "each once: {found:#?}");
        assert!(found.iter().all(|disk| disk["dirs"].as_array().unwrap().len() == 1), "{found:#?}");
    }
    assert!(error_of(dir, &format!("disk inspect {one} nowhere")).contains("cannot read nowhere"));
    assert_eq!(kvbm(dir, &format!("disk inspect {one},")).status.code(), Some(2));
    assert_eq!(json(dir, &format!("disk clear {one} {two}"), 0)["cleared"].as_array().unwrap().len(), 2);
    assert_eq!(std::fs::read_dir(dir.join("kept")).unwrap().count(), 0);
}

#[test]
fn what_cannot_be_read_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert!(error_of(dir, "disk inspect nowhere").contains("cannot read nowhere; name what disk.dir"));
    for command in ["inspect", "verify", "repair", "clear"] {
        assert!(error_of(dir, &format!("disk {command} .")).contains("no directory of kvbm"), "{command}");
    }
    assert_eq!(kvbm(dir, "disk").status.code(), Some(2));
    assert_eq!(kvbm(dir, "disk inspect").status.code(), Some(2));

    fill(dir, "one");
    let journal = rank(dir).join("journal.kvbm");
    let good = std::fs::read(&journal).unwrap();
    let lock = kvbm_disk::medium::DirMedium::lock(&rank(dir)).unwrap();
    for command in ["verify", "repair", "clear"] {
        let message = error_of(dir, &format!("disk {command} kept"));
        assert!(message.contains(&format!("in use by process {}", std::process::id())), "{message}");
    }
    let found = json(dir, "disk inspect kept", 0);
    let owner = found["directories"][0]["owner"].as_str().unwrap();
    assert!(owner.starts_with(&format!("process {} on ", std::process::id())), "{owner}");
    drop(lock);

    let mut other = good.clone();
    other[8] = 99;
    std::fs::write(&journal, &other).unwrap();
    for command in ["inspect", "verify", "repair"] {
        let message = error_of(dir, &format!("disk {command} kept"));
        assert!(message.contains("version 99, this build reads 2"), "{message}");
    }
    assert!(std::fs::read(&journal).unwrap() == other, "left as it is");
    assert_eq!(json(dir, "disk inspect kept", 1)["errors"].as_array().unwrap().len(), 1);
    assert!(json(dir, "disk clear kept", 0)["bytes"].as_u64().unwrap() > 2000 * 4096);
}

#[test]
fn several_directories_are_one_disk_and_a_lost_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let line = "replay --synthetic 60 --block-bytes 4KiB --capacity 50,100,4000 --dir a,b";
    json(dir, line, 0);
    let again = json(dir, line, 0);
    assert!(again["hit_ratio_first_10pct"].as_f64().unwrap() > 0.9, "{again:#}");
    assert_eq!((&again["corrupt_blocks"], &again["failed_transfers"]), (&0.into(), &0.into()));
    let found = json(dir, "disk verify a,b", 0);
    assert_eq!(found["directories"][0]["dirs"].as_array().unwrap().len(), 2);
    assert!(found["verified_blocks"].as_u64().unwrap() > 256, "more than the first unit: {found:#}");
    assert!(error_of(dir, "disk verify a").contains("number 1 of 2"));
    assert!(error_of(dir, "disk verify b").contains("number 2 of 2"));

    std::fs::rename(dir.join("b"), dir.join("gone")).unwrap();
    let error = error_of(dir, line);
    assert!(error.contains("b/ns-") && error.contains("mounted"), "{error}");
    std::fs::remove_dir_all(dir.join("b")).unwrap();
    std::fs::rename(dir.join("gone"), dir.join("b")).unwrap();
    assert_eq!(json(dir, "disk repair a,b", 0)["damaged_blocks"], 0);

    json(dir, "disk clear a,b", 0);
    let folders = ["a", "b"].map(|root| std::fs::read_dir(dir.join(root)).unwrap().count());
    assert_eq!(folders, [0, 0], "nothing stays behind");
    json(dir, line, 0);
}

/// The folder of the only engine below `root`.
fn folder(root: &Path) -> PathBuf {
    let only = |dir: &Path| std::fs::read_dir(dir).unwrap().next().unwrap().unwrap().path();
    only(&only(root))
}

#[test]
fn a_clear_of_several_directories_may_be_interrupted_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let line = "replay --synthetic 60 --block-bytes 4KiB --capacity 50,100,4000 --dir a,b";
    // No file of ours is a folder: what cannot be removed ends a clear in the second directory, and
    // in the first behind it.
    for (root, file) in [("b", "probe.tmp"), ("b", "stripe.kvbm"), ("a", "probe.tmp"), ("a", "slots.kvbm")] {
        for goes_on in [true, false] {
            json(dir, line, 0);
            let obstacle = folder(&dir.join(root)).join(file);
            if obstacle.is_file() {
                std::fs::remove_file(&obstacle).unwrap();
            }
            std::fs::create_dir(&obstacle).unwrap();
            for _ in 0..2 {
                let error = error_of(dir, "disk clear a,b");
                assert!(error.contains("cannot remove") && error.contains(file), "{error}");
            }
            std::fs::remove_dir(&obstacle).unwrap();
            if goes_on {
                let opened = json(dir, line, 0);
                let ratio = opened["hit_ratio_first_10pct"].as_f64().unwrap();
                assert!(ratio < 0.5, "{root}/{file}: as on an empty disk: {ratio}");
                assert_eq!((&opened["corrupt_blocks"], &opened["failed_transfers"]), (&0.into(), &0.into()));
            }
            json(dir, "disk clear a,b", 0);
            let left = ["a", "b"].map(|root| std::fs::read_dir(dir.join(root)).unwrap().count());
            assert_eq!(left, [0, 0], "{root}/{file}");
        }
    }
}

#[test]
fn a_clear_ends_at_a_file_that_it_cannot_look_at() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let line = "replay --synthetic 60 --block-bytes 4KiB --capacity 50,100,4000 --dir a,b";
    json(dir, line, 0);
    let slots = folder(&dir.join("b")).join("slots.kvbm");
    std::fs::remove_file(&slots).unwrap();
    // As little is told of a link to itself as of a file on a device that fails.
    std::os::unix::fs::symlink("slots.kvbm", &slots).unwrap();
    let error = error_of(dir, "disk clear a,b");
    assert!(error.contains("cannot look at") && error.contains("slots.kvbm"), "{error}");
    std::fs::remove_file(&slots).unwrap();
    json(dir, "disk clear a,b", 0);
    let left = ["a", "b"].map(|root| std::fs::read_dir(dir.join(root)).unwrap().count());
    assert_eq!(left, [0, 0]);
}

#[test]
fn a_clear_of_several_directories_changes_none_where_it_cannot_have_all() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let line = "replay --synthetic 60 --block-bytes 4KiB --capacity 50,100,4000 --dir a,b";
    json(dir, line, 0);
    let lock = kvbm_disk::medium::DirMedium::lock(&folder(&dir.join("b"))).unwrap();
    assert!(error_of(dir, "disk clear a,b").contains("in use by process"));
    drop(lock);
    std::fs::rename(dir.join("b"), dir.join("gone")).unwrap();
    let error = error_of(dir, "disk clear a,b");
    assert!(error.contains("b/ns-") && error.contains("is its device mounted"), "{error}");
    std::fs::rename(dir.join("gone"), dir.join("b")).unwrap();
    let again = json(dir, line, 0);
    assert!(again["hit_ratio_first_10pct"].as_f64().unwrap() > 0.9, "{again:#}");

    // Without the one that is lost.
    std::fs::remove_dir_all(dir.join("b")).unwrap();
    json(dir, "disk clear a", 0);
    json(dir, line, 0);
}

/// An engine's directory with three blocks that are encrypted.
fn encrypted(dir: &Path, key: &str) -> PathBuf {
    use kvbm_disk::{DiskConfig, DiskEncryption, DiskEngine, IoBatch, OwnedBuffer};
    use kvbm_keys::OperatorKey;
    use std::os::unix::fs::PermissionsExt;
    let (file, rank) = (dir.join("operator.key"), dir.join("kept/ns-0000000000000000/rank-0-of-1"));
    std::fs::write(&file, key).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let mut config = DiskConfig::new(&rank, 8, 4096, [7; 16]);
    let key = OperatorKey::parse(key.as_bytes()).unwrap();
    config.encryption = Some(DiskEncryption { key, previous: None });
    let (engine, _) = DiskEngine::open(config).unwrap();
    let (done, outcomes) = std::sync::mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    for slot in 0..3 {
        let identity = kvbm::plan::BlockIdentity {
            namespace: kvbm::plan::NamespaceId(0xAB),
            group: kvbm::plan::GroupId(0),
            hash: kvbm::plan::SequenceHash::from_bytes([slot as u8; 16]),
            parent: None,
            position: 0,
        };
        batch.write_buffer(kvbm::plan::BlockId(slot), identity, &OwnedBuffer::from_slice(&[9; 4096]).into());
    }
    engine.submit(batch).unwrap();
    assert!(outcomes.recv().unwrap().iter().all(Result::is_ok));
    engine.flush(std::time::Duration::from_secs(60)).unwrap();
    rank
}

#[test]
fn an_encrypted_directory_is_inspected_without_a_key_and_verified_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let rank = encrypted(dir, &"0123456789abcdef".repeat(4));
    let found = json(dir, "disk inspect kept", 0);
    let keys = &found["directories"][0]["encryption"]["keys"];
    assert_eq!((&keys[0]["namespace"], &keys[0]["state"]), (&"000000ab".into(), &"current".into()));
    assert!(text(&kvbm(dir, "disk inspect kept").stdout).contains("encrypted, operator's key"));
    assert!(error_of(dir, "disk verify kept").contains("--key-file"));
    let good = json(dir, "disk verify kept --key-file operator.key", 0);
    assert_eq!(good["verified_blocks"], 3);
    std::fs::write(dir.join("other.key"), "fedcba9876543210".repeat(4)).unwrap();
    assert!(error_of(dir, "disk verify kept --key-file other.key").contains("chmod 600"));
    let wrong = kvbm(dir, "disk verify kept --key-command");
    assert_eq!(wrong.status.code(), Some(2), "an option without its value");
    let output = Command::new(env!("CARGO_BIN_EXE_kvbm"))
        .current_dir(dir)
        .args(["disk", "verify", "kept", "--key-command", "cat other.key"])
        .output()
        .unwrap();
    assert!(text(&output.stderr).contains("wrapped with the operator's key"), "{}", text(&output.stderr));

    assert!(error_of(dir, "disk rotate kept").contains("--key-file"));
    let rotated = json(dir, "disk rotate kept --key-file operator.key --namespace 000000ac", 0);
    assert_eq!(rotated["directories"][0]["retired_keys"], 0);
    let rotated = json(dir, "disk rotate kept --key-file operator.key --namespace 000000ab", 0);
    assert_eq!(rotated["directories"][0]["retired_keys"], 1);
    let found = json(dir, "disk inspect kept", 0);
    assert_eq!(found["directories"][0]["encryption"]["keys"][0]["state"], "old");

    // Somebody has a link to the key file: it is overwritten, not only removed.
    let link = dir.join("link");
    std::fs::hard_link(rank.join("keys.kvbm"), &link).unwrap();
    json(dir, "disk clear kept", 0);
    assert!(!rank.exists());
    let left = std::fs::read(link).unwrap();
    assert!(!left.is_empty() && left.iter().all(|byte| *byte == 0));
}
