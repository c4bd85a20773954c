//! Replays of models by name: cache groups, latents, scales, numbers of ranks.

use super::{first_tenth, json, number, run, temp, text};
use serde_json::Value;
use std::path::Path;

/// A replay of a model, as JSON.
fn replay_of_model(line: &str) -> Value {
    let dir = temp();
    let output = run(dir.path(), &format!("{line} --block-bytes 2KiB --json -"));
    assert!(output.status.success(), "{line}: {}", text(&output.stderr));
    serde_json::from_str(&text(&output.stdout)).unwrap()
}

/// Every byte of every group comes back from three tiers, every prefix is as long as a look at each
/// group alone says, and a window takes no more than windows at the ends of requests.
#[test]
fn models_of_several_groups_find_what_an_oracle_finds() {
    for line in [
        "--model gemma-3 --synthetic 60 --capacity 6000,12000,0",
        "--model gemma-3 --synthetic 60 --capacity 3000,1200,6000 --checkpoint-every 20 --tensor-parallel 2",
        "--model jamba --synthetic 60 --capacity 3000,4000,3000 --checkpoint-every 8",
        "--model gpt-oss --synthetic 60 --capacity 1500,600,3000 --dtype fp8_e4m3",
        "--model qwen3-next --synthetic 40 --capacity 9000,0,0 --policy lru-leaf",
    ] {
        let json = replay_of_model(line);
        let number = |field: &str| json[field].as_f64().unwrap();
        assert!(number("hit_ratio") > 0.02, "{line}: {json}");
        assert!((number("hit_ratio") - number("oracle_hit_ratio")).abs() < 1e-12, "{line}: {json}");
        assert!(number("verified_blocks") > 0.0, "{line}: {json}");
        assert_eq!((number("corrupt_blocks"), number("failed_transfers")), (0.0, 0.0), "{line}: {json}");
        for group in json["groups"].as_array().unwrap() {
            let figure = |field: &str| group[field].as_f64().unwrap();
            assert!(figure("held_blocks") <= 1.1 * figure("needed_blocks"), "{line}: {group}");
            assert!(figure("block_bytes") <= figure("slot_bytes"), "{line}: {group}");
        }
    }
}

/// What G1 and host memory let go of comes back from a volume, and all of it in a second run; the
/// oracle looks at each block of each group by itself.
#[test]
fn models_of_several_groups_find_on_a_volume_what_an_oracle_finds() {
    for line in [
        "--model gemma-3 --synthetic 40 --capacity 1000,400,0",
        "--model jamba --synthetic 40 --capacity 500,300,0 --checkpoint-every 8 --tensor-parallel 2",
    ] {
        let dir = temp();
        std::fs::create_dir(dir.path().join("volume")).unwrap();
        let volume = dir.path().join("volume").display().to_string();
        let line =
            format!("{line} --block-bytes 2KiB --concurrency 1 --offload wait --volume dir://{volume}");
        let (first, again) = (json(dir.path(), &line), json(dir.path(), &line));
        for json in [&first, &again] {
            let figure = |field: &str| json[field].as_f64().unwrap();
            assert!((figure("hit_ratio") - figure("oracle_hit_ratio")).abs() < 1e-12, "{line}: {json}");
            assert_eq!((figure("corrupt_blocks"), figure("failed_transfers")), (0.0, 0.0), "{line}: {json}");
            assert!(number(json, "/paths/g4_g1/blocks") > 0, "{line}: {json}");
        }
        assert!(first_tenth(&again) > 0.99, "{line}: {again:#}");
    }
}

/// One latent of a token on every rank, and elements of one byte.
#[test]
fn latents_and_narrow_elements_come_back_with_any_number_of_ranks() {
    for ranks in [1, 2, 4] {
        for dtype in ["fp8_e4m3", "fp8_e5m2", "int8", "fp16", "fp32"] {
            let line = format!(
                "--model deepseek-v3 --dtype {dtype} --tensor-parallel {ranks} --synthetic 40 --capacity 70,60,3000"
            );
            let json = replay_of_model(&line);
            assert!(json["verified_onboarded_blocks"].as_u64().unwrap() > 0, "{line}: {json}");
            assert_eq!(json["corrupt_blocks"], 0, "{line}: {json}");
            assert_eq!(json["failed_transfers"], 0, "{line}: {json}");
        }
    }
}

/// The same from a volume, written by one number of ranks and read by another.
#[test]
fn latents_and_narrow_elements_come_back_from_a_volume() {
    for (dtype, ranks, next) in [("fp8_e4m3", 1, 2), ("fp8_e5m2", 2, 4), ("int8", 4, 1)] {
        let dir = temp();
        std::fs::create_dir(dir.path().join("volume")).unwrap();
        let volume = dir.path().join("volume").display().to_string();
        let replay = |ranks: u32| {
            let line = format!("--model deepseek-v3 --dtype {dtype} --tp {ranks} --synthetic 40");
            let line = format!("{line} --capacity 70,60,0 --block-bytes 2KiB --concurrency 1");
            let json = json(dir.path(), &format!("{line} --offload wait --volume dir://{volume}"));
            let bad = ["/corrupt_blocks", "/failed_transfers"].map(|field| number(&json, field));
            assert_eq!(bad, [0, 0], "{line}: {json:#}");
            assert!(number(&json, "/paths/g4_g1/blocks") > 0, "{line}: {json:#}");
            assert!(number(&json, "/verified_onboarded_blocks") > 0, "{line}: {json:#}");
            json
        };
        replay(ranks);
        let second = replay(next);
        assert!(first_tenth(&second) > 0.95, "{dtype}, {ranks} and {next} ranks: {second:#}");
    }
}

/// Scales are part of the block: they come back with it from every tier, whatever they are for, and
/// blocks with other scales are other blocks.
#[test]
fn scales_travel_with_their_blocks() {
    let mut lengths = Vec::new();
    let small = "70,60,3000";
    for (model, scales, capacity) in [
        ("", "block", small),
        ("", "head:f16", small),
        ("--model deepseek-v3", "token", small),
        ("--model gemma-3", "head", "500,300,3000"),
    ] {
        let line =
            format!("{model} --dtype fp8_e4m3 --scales {scales} --tp 2 --synthetic 60 --capacity {capacity}");
        let json = replay_of_model(&line);
        assert!(number(&json, "/verified_onboarded_blocks") > 0, "{line}: {json}");
        let bad = ["/corrupt_blocks", "/failed_transfers"].map(|field| number(&json, field));
        assert_eq!(bad, [0, 0], "{line}");
        lengths.push(number(&json, "/g3/bytes_written") / number(&json, "/paths/g2_g3/blocks"));
    }
    // 8 layers of keys and values with one head, which both ranks hold, and a scale of four or two
    // bytes for each.
    assert_eq!(lengths[..2], [2048 + 8 * 2 * 4, 2048 + 8 * 2 * 2]);
    let dir = temp();
    let replay = |scales: &str| {
        let line = "--dtype fp8_e4m3 --synthetic 30 --capacity 100,100,4000 --block-bytes 2KiB --dir kv";
        json(dir.path(), &format!("{line} --scales {scales}"))
    };
    let first = replay("head");
    assert!(first_tenth(&replay("head")) > 0.99);
    let other = replay("token");
    assert!((first_tenth(&other) - first_tenth(&first)).abs() < 1e-9, "{other:#}");
    let error = text(&run(dir.path(), "--scales row --synthetic 3").stderr);
    assert!(error.contains("row") && error.contains("block, head or token"), "{error}");
}

/// What `kvbm` has in its directory: bytes of slot files.
fn slot_bytes(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    let bytes = |entry: std::fs::DirEntry| match entry.metadata().unwrap() {
        metadata if metadata.is_dir() => slot_bytes(&entry.path()),
        metadata if entry.file_name() == "slots.kvbm" => metadata.len(),
        _ => 0,
    };
    entries.map(bytes).sum()
}

/// Objects of a directory volume, and their bytes.
fn objects(dir: &Path) -> (u64, u64) {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    let of = |entry: std::fs::DirEntry| match entry.metadata().unwrap() {
        metadata if metadata.is_dir() => objects(&entry.path()),
        metadata if entry.file_name().to_string_lossy().contains(".l0+") => (1, metadata.len()),
        _ => (0, 0),
    };
    entries.map(of).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// A latent lies on every rank, and once on the disk and in a volume, whatever the ranks; another
/// number of them finds it there.
#[test]
fn one_copy_of_a_latent_is_on_the_disk_for_all_ranks() {
    let mut found = Vec::new();
    for (ranks, next) in [(1, 2), (2, 4), (4, 1)] {
        let dir = temp();
        std::fs::create_dir(dir.path().join("volume")).unwrap();
        let volume = dir.path().join("volume").display().to_string();
        let replay = |ranks: u32| {
            let line = "--model deepseek-v3 --dtype fp8_e4m3 --synthetic 40 --capacity 70,60,3000 --dir kv";
            let line = format!("{line} --block-bytes 2KiB --tp {ranks} --volume dir://{volume}");
            let json = json(dir.path(), &line);
            let bad = ["/corrupt_blocks", "/failed_transfers"].map(|field| number(&json, field));
            assert_eq!(bad, [0, 0], "{json:#}");
            json
        };
        let first = replay(ranks);
        let written = number(&first, "/g3/bytes_written");
        assert_eq!(number(&first, "/paths/g2_g3/bytes"), written, "{ranks} ranks: {first:#}");
        let (count, bytes) = objects(&dir.path().join("volume"));
        assert_eq!(count, number(&first, "/paths/g2_g4/blocks"), "one object a block, {ranks} ranks");
        let slots = slot_bytes(&dir.path().join("kv"));
        found.push((written, slots, number(&first, "/paths/g2_g3/blocks"), bytes / count));
        let second = replay(next);
        assert!(second["hits"]["g3"].as_u64().unwrap() > 0, "{ranks} ranks: {second:#}");
        assert!(first_tenth(&second) > 0.95, "{ranks} ranks: {second:#}");
    }
    assert!(found[0].0 > 0 && found.iter().all(|one| *one == found[0]), "{found:?}");
}

#[test]
fn a_model_that_there_is_not_is_named_with_those_that_there_are() {
    let dir = temp();
    let output = run(dir.path(), "--model no-such-model --synthetic 3");
    let error = text(&output.stderr);
    assert!(
        !output.status.success() && error.contains("no-such-model") && error.contains("jamba"),
        "{error}"
    );
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let error = text(&run(dir.path(), "--model config.json --synthetic 3").stderr);
    assert!(error.contains("num_hidden_layers"), "{error}");
}
