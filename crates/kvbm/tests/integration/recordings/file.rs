//! The file of a recording: what `kvbm_rs/recording.py` writes.

use serde_json::Value;

/// Most engine blocks of a recording that is replayed: each takes 512 bytes.
const MOST_BLOCKS: u64 = 1 << 22;

/// The name that kvbm gave a block.
pub(super) type Key = [u8; 16];

/// What an engine asked of its manager.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) blocks: u32,
    pub(super) flat: bool,
    pub(super) has_disk: bool,
    pub(super) calls: Vec<Call>,
}

/// A call, and the line that it is in.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) line: usize,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// `promised` is `None` where a volume was being asked.
    LookUp {
        request: u64,
        chain: Vec<Key>,
        first: usize,
        promised: Option<usize>,
    },
    Stage {
        request: u64,
        chain: Vec<Key>,
        first: usize,
    },
    Commit {
        request: u64,
        ids: Vec<u32>,
        failed: bool,
    },
    /// Engine blocks hold what was promised, and are compared with it.
    Audit {
        request: u64,
        ids: Vec<u32>,
        failed: bool,
    },
    Abandon {
        request: u64,
    },
    Finished {
        request: u64,
    },
    Offload {
        chain: Vec<Key>,
        first: usize,
        ids: Vec<u32>,
        failed: bool,
    },
    Released {
        ids: Vec<u32>,
    },
    BeforeReuse {
        ids: Vec<u32>,
    },
    Step,
    BranchEnds {
        chain: Vec<Key>,
    },
    Prefilled {
        tokens: u64,
        elapsed_us: u64,
    },
    /// `resumes`: the session goes on, rather than a request that comes.
    Prefetch {
        chain: Vec<Key>,
        resumes: bool,
    },
    WaitOffloads,
    Flush,
    Clear {
        tier: String,
    },
    Forget {
        own: bool,
    },
    /// The manager was closed, or the recording ended before it.
    End,
}

impl Recording {
    /// Reads a recording; an error names the line and the reason.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let count = text.lines().count();
        if text.is_empty() {
            return Err("line 1: the file is empty: a recording begins with a line about its format".into());
        }
        if !text.ends_with('\n') {
            return Err(format!(
                "line {count}: the line is cut off: its process ended while it wrote; remove the line to replay what is before"
            ));
        }
        let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
        let mut recording = lines.next().map_or_else(
            || Err("it has no line".to_owned()),
            |(_, line)| Self::header(line).map_err(|why| format!("line 1: {why}")),
        )?;
        let mut keys = Vec::new();
        for (line, text) in lines {
            let call =
                recording.call(text, line - 2, &mut keys).map_err(|why| format!("line {line}: {why}"))?;
            recording.calls.push(Call { line, kind: call });
        }
        Ok(recording)
    }

    fn header(line: &str) -> Result<Self, String> {
        let header = Fields::read(line)?;
        match header.text("format") {
            Ok("kvbm-recording") => {}
            _ => return Err("the file is no recording: its format is not \"kvbm-recording\"".into()),
        }
        let version = header.number("version")?;
        if version != 1 {
            return Err(format!(
                "the recording has format version {version}, and this replayer knows version 1: use the kvbm that wrote it"
            ));
        }
        let blocks = header.number("blocks")?;
        if !(1..=MOST_BLOCKS).contains(&blocks) {
            return Err(format!("blocks is {blocks}: 1 to {MOST_BLOCKS} can be replayed"));
        }
        let capacity = header.numbers("capacity")?;
        Ok(Self {
            blocks: blocks as u32,
            flat: header.truth("flat")?,
            has_disk: capacity.get(2).is_some_and(|&blocks| blocks > 0),
            calls: Vec::new(),
        })
    }

    fn call(&self, line: &str, expected: usize, keys: &mut Vec<Key>) -> Result<Kind, String> {
        if self.calls.last().is_some_and(|call| matches!(call.kind, Kind::End)) {
            return Err("a call follows the end of the recording".into());
        }
        let fields = Fields::read(line)?;
        let number = fields.number("n")?;
        if number != expected as u64 {
            return Err(format!("call {number} stands where call {expected} has to be: lines are missing"));
        }
        if fields.has("new") {
            for key in fields.list("new")? {
                keys.push(key.as_str().and_then(key_of).ok_or_else(|| {
                    format!("`new` has {key}, which is no hash of 16 bytes in hexadecimal digits")
                })?);
            }
        }
        let chain = || fields.chain(keys);
        let (request, first) = (|| fields.number("request"), || fields.number("first").map(|at| at as usize));
        let ids = || self.ids(&fields);
        let failed = fields.has("error");
        Ok(match fields.text("call")? {
            "look_up" => {
                let pending = failed || fields.has("pending");
                let promised = if pending { None } else { Some(fields.number("blocks")? as usize) };
                Kind::LookUp { request: request()?, chain: chain()?, first: first()?, promised }
            }
            "stage" => Kind::Stage { request: request()?, chain: chain()?, first: first()? },
            "commit" => Kind::Commit { request: request()?, ids: ids()?, failed },
            "audit" => Kind::Audit { request: request()?, ids: ids()?, failed },
            "abandon" => Kind::Abandon { request: request()? },
            "finished" => Kind::Finished { request: request()? },
            "offload" => {
                let (chain, first, ids) = (chain()?, first()?, ids()?);
                if !failed && first.saturating_add(ids.len()) > chain.len() {
                    return Err(format!(
                        "{} ids from block {first} on for a chain of {} blocks",
                        ids.len(),
                        chain.len()
                    ));
                }
                Kind::Offload { chain, first, ids, failed }
            }
            "released" => Kind::Released { ids: ids()? },
            "before_reuse" => Kind::BeforeReuse { ids: ids()? },
            "step" => Kind::Step,
            "branch_ends" => Kind::BranchEnds { chain: chain()? },
            "prefilled" => {
                Kind::Prefilled { tokens: fields.number("tokens")?, elapsed_us: fields.number("elapsed_us")? }
            }
            call @ ("prefetch" | "session_resumes") => {
                Kind::Prefetch { chain: chain()?, resumes: call == "session_resumes" }
            }
            "wait_offloads" => Kind::WaitOffloads,
            "flush" => Kind::Flush,
            "clear" => Kind::Clear { tier: fields.text("tier")?.to_owned() },
            "forget" => Kind::Forget { own: fields.truth("own")? },
            "close" | "stopped" => Kind::End,
            other => return Err(format!("there is no call {other:?}")),
        })
    }

    fn ids(&self, fields: &Fields) -> Result<Vec<u32>, String> {
        let ids = fields.numbers("ids")?;
        match ids.iter().find(|&&id| id >= u64::from(self.blocks)) {
            Some(id) => Err(format!("`ids` has block {id}, and the engine has {} blocks", self.blocks)),
            None => Ok(ids.into_iter().map(|id| id as u32).collect()),
        }
    }
}

/// The fields of a line.
struct Fields(serde_json::Map<String, Value>);

impl Fields {
    fn read(line: &str) -> Result<Self, String> {
        serde_json::from_str(line).map(Self).map_err(|why| format!("the line is no JSON object: {why}"))
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn get<'a, T>(
        &'a self,
        name: &str,
        what: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, String> {
        let value = self.0.get(name).ok_or_else(|| format!("the field `{name}` is missing"))?;
        read(value).ok_or_else(|| format!("`{name}` is {value}, which is no {what}"))
    }

    fn number(&self, name: &str) -> Result<u64, String> {
        self.get(name, "number from 0 on", Value::as_u64)
    }

    fn truth(&self, name: &str) -> Result<bool, String> {
        self.get(name, "true or false", Value::as_bool)
    }

    fn text(&self, name: &str) -> Result<&str, String> {
        self.get(name, "text", Value::as_str)
    }

    fn list(&self, name: &str) -> Result<&[Value], String> {
        self.get(name, "list", |value| value.as_array().map(Vec::as_slice))
    }

    fn numbers(&self, name: &str) -> Result<Vec<u64>, String> {
        self.get(name, "list of numbers", |value| value.as_array()?.iter().map(Value::as_u64).collect())
    }

    /// Runs of known blocks: a first number and a count each.
    fn chain(&self, keys: &[Key]) -> Result<Vec<Key>, String> {
        let mut chain = Vec::new();
        for run in self.list("chain")? {
            let part = run.as_array().and_then(|run| match run.as_slice() {
                [first, count] => {
                    let first = usize::try_from(first.as_u64()?).ok()?;
                    keys.get(first..first.checked_add(usize::try_from(count.as_u64()?).ok()?)?)
                }
                _ => None,
            });
            let known = keys.len();
            chain.extend(part.ok_or_else(|| {
                format!("`chain` has {run}, which is no first block and count of the {known} known blocks")
            })?);
        }
        Ok(chain)
    }
}

fn key_of(text: &str) -> Option<Key> {
    if text.len() != 32 || !text.is_ascii() {
        return None;
    }
    let mut key = Key::default();
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(key)
}
