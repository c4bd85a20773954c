//! Recordings of engines, replayed without the engine. `KVBM_RECORDING=FILE` replays your own.
//!
//! Python's `kvbm_rs/recording.py` writes them. docs/operate.md says how to make one.
#![cfg(feature = "worker")]

mod file;
mod replay;

use file::Recording;
use replay::{Summary, replay};
use std::fmt::Write as _;

/// Replays texts of recordings, as restarts over one disk.
fn play(texts: &[&str]) -> Result<Vec<Summary>, String> {
    let disk = tempfile::tempdir().unwrap();
    let recordings = texts.iter().map(|text| Recording::parse(text)).collect::<Result<Vec<_>, _>>()?;
    replay(&recordings, disk.path())
}

const HEADER: &str = r#"{"format":"kvbm-recording","version":1,"page_size":16,"blocks":16,"block_bytes":4096,"capacity":[0,64,0,0],"flat":false,"shadow":false}"#;

/// A recording of these calls, which have no number yet.
fn written(calls: &[&str]) -> String {
    let mut text = format!("{HEADER}\n");
    for (number, call) in calls.iter().enumerate() {
        writeln!(text, "{{\"n\":{number},{}", &call[1..]).unwrap();
    }
    text
}

const OFFER: &str = r#"{"call":"offload","new":["00000000000000000000000000000001","00000000000000000000000000000002"],"chain":[[0,2]],"first":0,"ids":[1,2],"started":2,"present":0,"refused":[]}"#;
const ASK: &str =
    r#"{"call":"look_up","request":0,"chain":[[0,2]],"first":0,"blocks":2,"by_tier":[0,2,0,0]}"#;
const LOAD: &str = r#"{"call":"commit","request":0,"ids":[5,6]}"#;
const LOADED: &str = r#"{"call":"finished","request":0,"arrived":2,"wanted":2,"failures":0}"#;

#[test]
fn what_was_offered_is_found_and_comes_back() {
    let summary = play(&[&written(&[OFFER, ASK, LOAD, LOADED])]).unwrap().remove(0);
    assert_eq!((summary.offloaded, summary.promised, summary.loads, summary.arrived), (2, 2, 1, 2));
    let aborted = [OFFER, ASK, LOAD, r#"{"call":"abandon","request":0,"had":true}"#, LOADED];
    let summary = play(&[&written(&aborted)]).unwrap().remove(0);
    assert_eq!((summary.loads, summary.abandoned), (1, 1));
    // The recording ended in the middle of it.
    assert_eq!(play(&[&written(&[OFFER, ASK, LOAD])]).unwrap()[0].loads, 1);
    assert_eq!(play(&[&written(&[OFFER, ASK])]).unwrap()[0].promised, 2);
}

#[test]
fn audits_prefetches_and_prefill_speeds_are_replayed() {
    let audit = r#"{"call":"audit","request":0,"ids":[7,8]}"#;
    let calls = [
        OFFER,
        r#"{"call":"flush","blocks":2}"#,
        r#"{"call":"clear","tier":"g2","blocks":2,"wait":true}"#,
        r#"{"call":"prefilled","tokens":640,"elapsed_us":1000,"counts":true}"#,
        r#"{"call":"prefetch","chain":[[0,2]],"blocks":2}"#,
        r#"{"call":"session_resumes","chain":[[0,2]],"blocks":0}"#,
        ASK,
        audit,
        LOADED,
    ];
    let summary = play(&[&written(&calls).replace("[0,64,0,0]", "[0,64,64,0]")]).unwrap().remove(0);
    assert_eq!((summary.prefetched, summary.audited, summary.loads), (2, 2, 0));
    // What the engine computed into these blocks is something else, and it had not said so.
    let wrong = [OFFER, ASK, audit.replace("[7,8]", "[2,1]").as_str()].map(str::to_owned);
    let error = play(&[&written(&wrong.each_ref().map(String::as_str))]).unwrap_err();
    assert!(error.contains("line 4: engine block 2 changes"), "{error}");
}

#[test]
fn an_engine_that_overwrites_a_block_and_says_nothing_is_found() {
    let other = r#"{"call":"offload","new":["00000000000000000000000000000003"],"chain":[[2,1]],"first":0,"ids":[2],"started":1,"present":0,"refused":[]}"#;
    let error = play(&[&written(&[OFFER, other])]).unwrap_err();
    assert!(error.contains("line 3: engine block 2 changes"), "{error}");
    let released = r#"{"call":"released","ids":[2],"busy":[]}"#;
    play(&[&written(&[OFFER, released, other])]).unwrap();
}

#[test]
fn a_recording_that_cannot_be_read_names_line_and_reason() {
    let good = written(&[OFFER, ASK, LOAD, LOADED]);
    let cases = [
        (String::new(), "line 1: the file is empty"),
        (good[..good.len() - 20].to_owned(), "line 5: the line is cut off"),
        (good.replace(r#""version":1"#, r#""version":2"#), "line 1: the recording has format version 2"),
        (good.replace("kvbm-recording", "other"), "line 1: the file is no recording"),
        (good.replace(r#""blocks":16,"#, r#""blocks":0,"#), "line 1: blocks is 0"),
        (good.replace(r#""call":"commit""#, r#""call":"comit""#), r#"line 4: there is no call "comit""#),
        (good.replace("[5,6]", "[5,16]"), "line 4: `ids` has block 16, and the engine has 16 blocks"),
        (good.replace("[5,6]", "[5,-1]"), "line 4: `ids` is [5,-1], which is no list of numbers"),
        (good.replace("0001\"", "000x\""), "line 2: `new` has"),
        (good.replacen("[[0,2]]", "[[0,3]]", 1), "line 2: `chain` has [0,3]"),
        (
            good.replace(r#""ids":[1,2]"#, r#""ids":[1,2,3]"#),
            "line 2: 3 ids from block 0 on for a chain of 2",
        ),
        (good.replace(r#"{"n":2,"#, r#"{"n":3,"#), "line 4: call 3 stands where call 2 has to be"),
        (good.replace(r#"{"n":2,"#, r#"["n":2,"#), "line 4: the line is no JSON object"),
        (good.replace(r#""request":0,"ids""#, r#""ids""#), "line 4: the field `request` is missing"),
        (
            good + "{\"n\":4,\"call\":\"close\"}\n{\"n\":5,\"call\":\"step\"}\n",
            "line 7: a call follows the end",
        ),
    ];
    for (text, expected) in cases {
        let error = Recording::parse(&text).unwrap_err();
        assert!(error.starts_with(expected), "{error:?} for {expected:?}");
    }
}

// Runs of vLLM 0.32 with a model of 128 KiB a block: the scenarios `record` and `failures` of
// bindings/python/engine_tests/scenarios.py.
const PREEMPTED: &str = include_str!("../../data/recordings/vllm-preempted.kvbmrec");
const BEFORE_RESTART: &str = include_str!("../../data/recordings/vllm-before-restart.kvbmrec");
const AFTER_RESTART: &str = include_str!("../../data/recordings/vllm-after-restart.kvbmrec");
const FAILURES: &str = include_str!("../../data/recordings/vllm-failures.kvbmrec");

/// Conversations of several turns, prompts in chunks of 256 tokens, 36 engine blocks for up to
/// eight requests, and four preemptions.
#[test]
fn vllm_with_too_few_blocks_preempts_and_loads() {
    let run = play(&[PREEMPTED]).unwrap().remove(0);
    assert!(run.offloaded > 50 && run.loads > 10 && run.arrived > 60, "{run:?}");
    assert_eq!(run.arrived, run.by_tier.iter().sum::<usize>(), "{run:?}");
}

/// Conversations of several turns with a preemption, then the same ones after a restart.
#[test]
fn vllm_finds_on_the_disk_what_it_stored_before_a_restart() {
    let summaries = play(&[BEFORE_RESTART, AFTER_RESTART]).unwrap();
    let [before, after] = &summaries[..] else { panic!("{summaries:?}") };
    assert!(before.offloaded > 50 && before.loads > 5, "{before:?}");
    assert!(after.loads > 5 && after.by_tier[2] > 20, "{after:?}");
    for run in &summaries {
        assert_eq!(run.arrived, run.by_tier.iter().sum::<usize>(), "{run:?}");
    }
    // Alone, the second finds nothing from before.
    let alone = play(&[AFTER_RESTART]).unwrap().remove(0);
    assert_eq!(alone.by_tier[2], 0, "{alone:?}");
}

/// In the recording half of the loads fail: damaged and shortened files. The calls around them are
/// vLLM's.
#[test]
fn vllm_goes_on_after_loads_that_failed() {
    let run = play(&[FAILURES]).unwrap().remove(0);
    assert!(run.loads >= 8 && run.by_tier[2] > 20, "{run:?}");
    assert_eq!(run.arrived, run.by_tier.iter().sum::<usize>(), "{run:?}");
}

// The calls of the connector for TensorRT-LLM, in the engine's order: bindings/python/tests/
// test_trtllm_connector.py writes it.
const TRTLLM: &str = include_str!("../../data/recordings/trtllm-contract.kvbmrec");

/// Four conversations of six turns in one place each, computed in chunks, over 40 blocks of host
/// memory and a disk.
#[test]
fn trtllm_is_promised_what_is_staged_and_it_comes_back() {
    let run = play(&[TRTLLM]).unwrap().remove(0);
    assert!(run.offloaded >= 12 && run.loads >= 20 && run.arrived >= 60, "{run:?}");
    assert_eq!((run.abandoned, run.arrived), (0, run.by_tier[1]), "{run:?}");
}

/// Replays the files that the environment names, in this order, as restarts over one disk.
#[test]
fn your_own() {
    let Some(paths) = std::env::var_os("KVBM_RECORDING") else { return };
    let texts: Vec<String> = std::env::split_paths(&paths)
        .map(|path| std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display())))
        .collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    for summary in play(&texts).unwrap_or_else(|why| panic!("{why}")) {
        println!("{summary:?}");
    }
}
