//! `kvbm events decode`: a payload of the event plane, readable.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use kvbm::events_plane::{EventBatch, vllm, wire};
use serde_json::{Value, json};

use super::shown::event_json;

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
    /// The third frame of vLLM's publisher; those of SGLang and older vLLM are read, and written as vLLM writes.
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

    #[test]
    fn what_is_no_payload_is_an_error_that_names_the_file() {
        let error = format!("{:#}", decode(Format::Vllm, OURS).unwrap_err());
        assert!(error.contains("payload: malformed engine event payload"), "{error}");
        assert!(decode(Format::Kvbm, VLLM).is_err());
        let args = DecodeArgs { format: Format::Kvbm, recode: None, file: "no/such/file".into() };
        assert!(run(&args).unwrap_err().to_string().contains("cannot open no/such/file"));
    }
}
