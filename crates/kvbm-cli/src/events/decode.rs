//! `kvbm events decode`: a payload of the event plane, readable.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use kvbm::events_plane::{EventBatch, vllm, wire};
use serde_json::{Value, json};

use super::render::event_json;

/// Options of `kvbm events decode`.
#[derive(Clone, Debug, Args)]
pub struct DecodeArgs {
    /// Whose payload it is.
    #[arg(long, value_enum)]
    pub format: Format,

    /// Write the payload back to OUT, encoded again: the same bytes, if the format was right.
    #[arg(long, value_name = "OUT")]
    pub recode: Option<PathBuf>,

    /// The payload alone, without topic and sequence frames.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// A format of payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The third frame of vLLM's publisher; those of SGLang and older vLLM are read, and written as
    /// vLLM writes.
    Vllm,
    /// kvbm's own batches.
    Kvbm,
}

/// Carries out the command; what it prints.
pub(super) fn run(args: &DecodeArgs) -> Result<String> {
    let DecodeArgs { format, recode, file } = args;
    let bytes = read(file)?;
    let shown = file.display();
    let (json, recoded) = match format {
        Format::Vllm => {
            let batch = vllm::decode(&bytes).with_context(|| format!("cannot decode {shown}"))?;
            (batch.to_string(), vllm::encode(&batch))
        }
        Format::Kvbm => {
            let batch = wire::decode(&bytes).with_context(|| format!("cannot decode {shown}"))?;
            (batch_json(&batch).to_string(), wire::encode(&batch)?)
        }
    };
    if let Some(out) = recode {
        std::fs::write(out, recoded).with_context(|| format!("cannot write {}", out.display()))?;
    }
    Ok(json + "\n")
}

/// A file of no more than the largest payload and one byte: the decoder refuses it then.
fn read(path: &Path) -> Result<Vec<u8>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut bytes = Vec::new();
    let limit = vllm::MAX_BYTES.max(wire::MAX_BYTES) as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(bytes)
}

fn batch_json(batch: &EventBatch) -> Value {
    let events: Vec<Value> = batch.events.iter().map(event_json).collect();
    json!({
        "source": batch.stream.source.to_string(),
        "epoch": batch.stream.epoch.0,
        "shard": batch.stream.shard,
        "next_sequence": batch.next_sequence,
        "published_us": batch.published_us,
        "unknown_fields": batch.unknown.values(),
        "events": events,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const VLLM: &[u8] = include_bytes!("../../../kvbm-events/tests/golden/vllm/cpuspec_018.msgpack");
    const OURS: &[u8] = include_bytes!("../../../kvbm-events/tests/golden/batch_v1.bin");

    fn decode(format: Format, bytes: &[u8]) -> Result<(Value, Vec<u8>)> {
        let dir = tempfile::tempdir()?;
        let (file, out) = (dir.path().join("payload"), dir.path().join("out"));
        std::fs::write(&file, bytes)?;
        let text = run(&DecodeArgs { format, recode: Some(out.clone()), file })?;
        assert_eq!(text.matches('\n').count(), 1, "one line");
        Ok((serde_json::from_str(&text)?, std::fs::read(out)?))
    }

    #[test]
    fn payloads_become_json_and_are_written_back() {
        let (json, recoded) = decode(Format::Vllm, VLLM).unwrap();
        assert_eq!(recoded, VLLM);
        let wanted = include_str!("../../../kvbm-events/tests/golden/vllm/cpuspec_018.json");
        let wanted: Value = serde_json::from_str(wanted).unwrap();
        assert_eq!(
            [&json["ts"], &json["events"], &json["data_parallel_rank"]],
            [&wanted[0], &wanted[1], &wanted[2]]
        );

        let (json, recoded) = decode(Format::Kvbm, OURS).unwrap();
        assert_eq!(recoded, OURS);
        assert_eq!(json["source"], "1122334455667788");
        assert_eq!(json["events"][1]["extra_metadata"]["reason"], "evicted");
        assert_eq!(json["events"][2]["storage_location"]["node"], 3);
        assert_eq!(json["events"][3]["event_type"], "cleared");
    }

    /// The bytes, and what the error says.
    type Bad = (Format, Vec<u8>, &'static str);

    fn changed(bytes: &[u8], at: usize, to: u8) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        bytes[at] = to;
        bytes
    }

    #[test]
    fn what_is_no_payload_is_an_error_that_names_the_file_and_the_byte() {
        let cut = |bytes: &[u8], len: usize| bytes[..len].to_vec();
        let behind = |bytes: &[u8]| [bytes, &[0]].concat();
        let table: Vec<Bad> = vec![
            (Format::Vllm, vec![], "malformed engine event payload: expected more bytes at byte 0"),
            (Format::Vllm, cut(VLLM, 20), "malformed engine event payload: expected more bytes at byte 20"),
            (Format::Vllm, behind(VLLM), "1 bytes follow the engine event payload"),
            (Format::Vllm, OURS.to_vec(), "expected a list of events at byte 2"),
            // A list where the timestamp is, text where the list of events is, a number for the
            // type of an event.
            (Format::Vllm, changed(VLLM, 1, 0x90), "expected a timestamp at byte 1"),
            (Format::Vllm, changed(VLLM, 10, 0xA1), "expected a list of events at byte 10"),
            (Format::Vllm, changed(VLLM, 11, 5), "expected an event with its type first at byte 11"),
            (Format::Vllm, b"{\"ts\": 1.0}".to_vec(), "is this the third frame of a KV event publisher?"),
            (Format::Vllm, vec![0; vllm::MAX_BYTES + 1], "exceeds 16777216: refused unread"),
            (Format::Kvbm, vec![], "at byte 0"),
            (Format::Kvbm, cut(OURS, OURS.len() - 1), "expected"),
            (Format::Kvbm, behind(OURS), "1 bytes follow"),
            (Format::Kvbm, changed(OURS, 1, 2), "version 2"),
            (Format::Kvbm, VLLM.to_vec(), "expected"),
            (Format::Kvbm, vec![0; wire::MAX_BYTES + 1], "refused unread"),
        ];
        for (format, bytes, part) in table {
            let error = format!("{:#}", decode(format, &bytes).unwrap_err());
            assert!(error.contains("cannot decode") && error.contains("payload: "), "{error}");
            assert!(error.contains(part), "{format:?}, {part:?} is missing: {error}");
        }
        let args = DecodeArgs { format: Format::Kvbm, recode: None, file: "no/such/file".into() };
        assert!(run(&args).unwrap_err().to_string().contains("cannot open no/such/file"));
        let args = DecodeArgs { file: ".".into(), ..args };
        assert!(run(&args).unwrap_err().to_string().contains("cannot read ."));
    }

    /// Nothing is written when nothing was read, and what is there stays.
    #[test]
    fn a_payload_that_is_none_is_not_written_back() {
        let dir = tempfile::tempdir().unwrap();
        let (file, out) = (dir.path().join("payload"), dir.path().join("out"));
        std::fs::write(&file, &VLLM[..30]).unwrap();
        std::fs::write(&out, "before").unwrap();
        let mut args = DecodeArgs { format: Format::Vllm, recode: Some(out.clone()), file: file.clone() };
        assert!(run(&args).is_err());
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "before");
        std::fs::write(&file, VLLM).unwrap();
        args.recode = Some(dir.path().join("no/such/folder"));
        assert!(run(&args).unwrap_err().to_string().starts_with("cannot write "));
    }

    #[test]
    fn what_a_later_version_says_survives() {
        // One more element behind those of the batch, and one more field behind those of the only
        // event.
        let ours = {
            let mut batch = wire::decode(OURS).unwrap();
            batch.events.truncate(1);
            let mut bytes = wire::encode(&batch).unwrap();
            // Behind the place of the time, which this one does not say.
            bytes[0] += 2;
            bytes.extend([0xC0, 0x93, 1, 0xA1, b'x', 0xC0]);
            bytes
        };
        let (json, recoded) = decode(Format::Kvbm, &ours).unwrap();
        assert_eq!((&json["unknown_fields"], recoded), (&json!(1), ours));

        let mut theirs = VLLM.to_vec();
        let head = theirs.iter().position(|&byte| byte == 0x8B).unwrap();
        theirs[head] = 0x8C;
        let rank = theirs.pop().unwrap();
        theirs.extend([0xA3, b'n', b'e', b'w', 0x92, 1, 0xC3, rank]);
        let (json, recoded) = decode(Format::Vllm, &theirs).unwrap();
        assert_eq!((&json["events"][0]["new"], recoded), (&json!([1, true]), theirs));
    }
}
