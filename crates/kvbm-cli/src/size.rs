//! `kvbm size`: how many tokens of a model fit into each tier.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use kvbm::config::Bytes;
use kvbm_layout::DType;
use kvbm_model::{CacheKind, LayerCache, ModelShape, ShapeGroup};
use serde::Serialize;

use crate::args::{Output, WrongUsage};
use crate::human::{bytes, count};
use crate::number::{SOME, whole};
use crate::table::Table;

/// Slots of host memory and disk are padded to this.
const SLOT_ALIGNMENT: u64 = 4096;
/// The kind of a group that keeps all tokens.
const FULL: &str = "full attention";
/// Most bytes of a configuration that are read.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Options of `kvbm size`.
#[derive(Clone, Debug, Args)]
pub struct SizeArgs {
    /// The model's config.json of Hugging Face, or the folder in which it lies.
    #[arg(long, value_name = "FILE")]
    pub model: PathBuf,

    /// Host memory of each rank.
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub host: Option<Bytes>,

    /// Disk of each rank.
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub disk: Option<Bytes>,

    /// Element type of the KV cache, where it is not the model's own (fp8, bf16, ..).
    #[arg(long, value_name = "NAME")]
    pub dtype: Option<DType>,

    /// Tokens of a block.
    #[arg(long, value_name = "N", default_value_t = 16, allow_negative_numbers = true, value_parser = whole::<u32>(SOME))]
    pub page_size: u32,

    /// Tensor-parallel ranks.
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = whole::<u32>(SOME))]
    pub tensor_parallel: u32,

    /// Write the figures as JSON; - for standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// The figures of a model. Bytes are those of one rank.
#[derive(Debug, Serialize)]
pub struct Sizes {
    architecture: String,
    dtype: &'static str,
    page_size: u32,
    ranks: u32,
    groups: Vec<GroupSize>,
    bytes_per_token: u64,
    bytes_per_block: u64,
    state_bytes: u64,
    tiers: Vec<TierSize>,
}

/// Layers that cache alike.
#[derive(Debug, Serialize)]
struct GroupSize {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    window_tokens: Option<u32>,
    layers: u32,
    cache: String,
    bytes_per_token: u64,
    state_bytes: u64,
}

/// What fits into a tier.
#[derive(Debug, Serialize)]
struct TierSize {
    tier: &'static str,
    capacity_bytes: u64,
    blocks: u64,
    tokens: u64,
}

/// Reads the model's configuration and computes what fits.
pub fn run(args: &SizeArgs) -> Result<Sizes> {
    let mut model = ModelShape::from_hf(&read(&args.model)?)
        .with_context(|| format!("cannot size {}", args.model.display()))?;
    model.dtype = args.dtype.unwrap_or(model.dtype);
    let ranks = args.tensor_parallel;
    let group = |group: &ShapeGroup| GroupSize {
        kind: match group.kind {
            CacheKind::Full => FULL,
            CacheKind::SlidingWindow { .. } => "sliding window",
            CacheKind::State => "state",
        },
        window_tokens: match group.kind {
            CacheKind::SlidingWindow { tokens } => Some(tokens),
            CacheKind::Full | CacheKind::State => None,
        },
        layers: group.layers,
        cache: describe(group.cache),
        bytes_per_token: group.bytes_per_token(model.dtype, ranks),
        state_bytes: group.state_bytes(model.dtype, ranks),
    };
    let groups: Vec<_> = model.groups.iter().map(group).collect();
    let bytes_per_token = model.bytes_per_token(ranks);
    let page = u64::from(args.page_size);
    // Each group has blocks of its own.
    let slot =
        |group: &GroupSize| group.bytes_per_token.saturating_mul(page).next_multiple_of(SLOT_ALIGNMENT);
    let block: u64 = groups.iter().map(slot).fold(0, u64::saturating_add);
    let tiers =
        [("G2 host memory", args.host), ("G3 disk", args.disk)].into_iter().filter_map(|(tier, capacity)| {
            let capacity = capacity?.get();
            let blocks = capacity.checked_div(block).unwrap_or(0);
            Some(TierSize { tier, capacity_bytes: capacity, blocks, tokens: blocks.saturating_mul(page) })
        });
    Ok(Sizes {
        architecture: model.architecture.clone(),
        dtype: model.dtype.name(),
        page_size: args.page_size,
        ranks,
        tiers: tiers.collect(),
        groups,
        bytes_per_token,
        bytes_per_block: block,
        state_bytes: model.state_bytes(ranks),
    })
}

fn read(path: &Path) -> Result<String> {
    use std::io::Read;
    let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let wrong = |error: std::io::Error| WrongUsage(format!("--model {}: {error}", path.display()));
    let file = std::fs::File::open(&path).map_err(wrong)?;
    let mut text = String::new();
    file.take(MAX_CONFIG_BYTES).read_to_string(&mut text).map_err(wrong)?;
    Ok(text)
}

fn describe(cache: LayerCache) -> String {
    match cache {
        LayerCache::Heads { kv_heads, head_dim } => format!("{kv_heads} KV heads x {head_dim}"),
        LayerCache::Latent { width } => format!("latent of {width}, on every rank"),
        LayerCache::State { conv_elements, recurrent_elements, .. } => {
            format!("state of {} elements", count(conv_elements + recurrent_elements))
        }
    }
}

impl Sizes {
    /// As text for people.
    pub fn render(&self) -> String {
        let ranks = if self.ranks == 1 { String::new() } else { format!(", each of {} ranks", self.ranks) };
        let mut out = format!("{} in {}{ranks}\n\n", self.architecture, self.dtype);
        let mut groups =
            Table::new(["group", "layers", "cache of a layer", "bytes a token", "bytes a state"]);
        for group in &self.groups {
            let name = match group.window_tokens {
                Some(tokens) => format!("{} of {}", group.kind, count(u64::from(tokens))),
                None => group.kind.to_owned(),
            };
            let size = |n: u64| if n == 0 { "-".to_owned() } else { bytes(n) };
            groups.row([
                name,
                group.layers.to_string(),
                group.cache.clone(),
                size(group.bytes_per_token),
                size(group.state_bytes),
            ]);
        }
        out += &groups.render();
        let (token, block) = (bytes(self.bytes_per_token), bytes(self.bytes_per_block));
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(out, "\n{token} a token, {block} a block of {} tokens", self.page_size);
        if !self.tiers.is_empty() {
            let mut tiers = Table::new(["tier", "size", "blocks", "tokens"]);
            for tier in &self.tiers {
                let (blocks, tokens) = (count(tier.blocks), count(tier.tokens));
                tiers.row([tier.tier.to_owned(), bytes(tier.capacity_bytes), blocks, tokens]);
            }
            out += "\n";
            out += &tiers.render();
        }
        if self.state_bytes > 0 {
            let state = bytes(self.state_bytes);
            let _ = writeln!(
                out,
                "\nA checkpoint of all states takes {state}. Tiers are sized without checkpoints."
            );
        }
        if let Some(served) = self.served() {
            let _ = writeln!(out, "\n{served}");
        }
        out
    }

    /// Who serves a model whose layers do not all cache alike.
    fn served(&self) -> Option<&'static str> {
        let has_full = self.groups.iter().any(|group| group.kind == FULL);
        match (self.groups.len(), has_full) {
            (0 | 1, _) => None,
            (_, true) => Some(
                "This model has several cache groups. The tokens count a block of each group. kvbm and its\n\
                 connector for vLLM serve them (docs/models.md, docs/vllm.md); those for SGLang and\n\
                 TensorRT-LLM take models with one group.",
            ),
            (_, false) => Some(
                "This model has several cache groups, none of them with full attention: kvbm serves them\n\
                 (docs/models.md), and its connectors do not.",
            ),
        }
    }

    /// As JSON.
    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(model: &str, change: impl FnOnce(&mut SizeArgs)) -> Sizes {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvbm-model/tests/configs");
        let mut args = SizeArgs {
            model: folder.join(format!("{model}.json")),
            host: Some(Bytes::gib(64)),
            disk: None,
            dtype: None,
            page_size: 16,
            tensor_parallel: 1,
            json: None,
        };
        change(&mut args);
        run(&args).unwrap()
    }

    #[test]
    fn tokens_that_fit_follow_from_the_bytes_of_a_token() {
        let llama = sizes("llama-3-8b", |args| args.disk = Some(Bytes::gib(640)));
        assert_eq!((llama.bytes_per_token, llama.bytes_per_block), (128 << 10, 2 << 20));
        let tokens: Vec<u64> = llama.tiers.iter().map(|tier| tier.tokens).collect();
        assert_eq!(tokens, [524_288, 5_242_880]);
        let text = llama.render();
        assert!(text.contains("524,288") && text.contains("8 KV heads x 128"), "{text}");
        assert!(!text.contains("several cache groups"), "{text}");
        let fp8 = sizes("llama-3-8b", |args| args.dtype = Some(DType::F8E4M3));
        assert_eq!(fp8.tiers[0].tokens, 1_048_576);
        let ranks = sizes("llama-3-8b", |args| args.tensor_parallel = 4);
        assert_eq!(ranks.tiers[0].tokens, 4 * 524_288);
    }

    #[test]
    fn groups_and_states_are_shown() {
        let jamba = sizes("jamba-v0.1", |_| ());
        let text = jamba.render();
        assert!(text.contains("connector for vLLM serve") && text.contains("A checkpoint"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&jamba.to_json().unwrap()).unwrap();
        assert_eq!(json["groups"][1]["kind"], "full attention");
        let gemma = sizes("gemma-3-27b", |_| ()).render();
        assert!(gemma.contains("sliding window of 1,024"), "{gemma}");
    }

    #[test]
    fn a_model_that_cannot_be_read_is_named() {
        let args = |model: PathBuf| SizeArgs {
            model,
            host: None,
            disk: None,
            dtype: None,
            page_size: 16,
            tensor_parallel: 1,
            json: None,
        };
        let error = run(&args("no/such/folder".into())).unwrap_err();
        assert!(error.is::<WrongUsage>() && error.to_string().contains("no/such/folder"), "{error}");
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        let error = format!("{:#}", run(&args(folder.path().to_owned())).unwrap_err());
        assert!(error.contains("num_hidden_layers"), "{error}");
    }
}
