//! What the fatbin was built from, as hashes.

use super::{CUBIN_ARCHS, CUBIN_COMPILER, FLAGS, Files, PACKER, PTX_ARCH, PTX_COMPILER, Tool};
use anyhow::Context;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::path::Path;

/// Key, value: the keys say what the value is of.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Manifest(Map<String, Value>);

impl Manifest {
    /// Of the files as they are and the recipe of this version.
    pub(super) fn of(files: &Files) -> anyhow::Result<Self> {
        let mut map = Map::new();
        let mut sources: Vec<_> = std::fs::read_dir(&files.folder)
            .with_context(|| files.folder.display().to_string())?
            .map(|entry| Ok(entry?.path()))
            .collect::<std::io::Result<_>>()?;
        sources.retain(|path| path.extension().is_some_and(|kind| kind == "cu" || kind == "h"));
        sources.sort();
        sources.push(files.script.clone());
        for source in sources {
            let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
            map.insert(format!("source {name}"), json!({ "sha256": hash_of(&source)? }));
        }
        for (role, tool) in
            [("cubin compiler", CUBIN_COMPILER), ("ptx compiler", PTX_COMPILER), ("packer", PACKER)]
        {
            let Tool { package, version, sha256, .. } = tool;
            map.insert(role.into(), json!({ "package": package, "version": version, "sha256": sha256 }));
        }
        map.insert("cubin architectures".into(), json!(CUBIN_ARCHS));
        map.insert("ptx architecture".into(), json!(PTX_ARCH));
        map.insert("flags".into(), json!(FLAGS));
        map.insert("fatbin".into(), json!({ "sha256": hash_of(&files.fatbin)? }));
        Ok(Self(map))
    }

    pub(super) fn read(file: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(file).with_context(|| {
            format!("{} cannot be read; `cargo xtask regen-kernels` writes it", file.display())
        })?;
        Ok(Self(serde_json::from_str(&text).with_context(|| file.display().to_string())?))
    }

    pub(super) fn write(&self, file: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(&self.0)? + "\n";
        std::fs::write(file, text).with_context(|| file.display().to_string())
    }

    /// What differs, one line each.
    pub(super) fn differences(&self, now: &Self) -> Vec<String> {
        let keys: std::collections::BTreeSet<&String> = self.0.keys().chain(now.0.keys()).collect();
        let of = |map: &Map<String, Value>, key: &String| {
            map.get(key).map_or_else(|| "nothing".to_owned(), ToString::to_string)
        };
        keys.into_iter()
            .filter(|key| self.0.get(*key) != now.0.get(*key))
            .map(|key| {
                format!("  {key}: the manifest says {}, here is {}", of(&self.0, key), of(&now.0, key))
            })
            .collect()
    }
}

/// SHA-256 of a file, in hexadecimal.
pub(super) fn hash_of(file: &Path) -> anyhow::Result<String> {
    let bytes = std::fs::read(file).with_context(|| file.display().to_string())?;
    Ok(Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn every_change_of_source_tool_flag_or_output_is_named() {
        let folder = std::env::temp_dir().join(format!("kvbm-manifest-{}", std::process::id()));
        let files = Files::of(&folder);
        fs::create_dir_all(files.fatbin.parent().unwrap()).unwrap();
        fs::create_dir_all(files.script.parent().unwrap()).unwrap();
        for file in [&files.source, &files.folder.join("jobs.h"), &files.script, &files.fatbin] {
            fs::write(file, "abc").unwrap();
        }
        assert_eq!(
            hash_of(&files.fatbin).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        Manifest::of(&files).unwrap().write(&files.manifest).unwrap();
        let committed = Manifest::read(&files.manifest).unwrap();
        let changed = |file: &Path| {
            fs::write(file, "other").unwrap();
            let differences = committed.differences(&Manifest::of(&files).unwrap());
            fs::write(file, "abc").unwrap();
            differences.join("\n")
        };
        assert_eq!(committed.differences(&Manifest::of(&files).unwrap()), Vec::<String>::new());
        assert!(changed(&files.source).contains("source kvbm_kernels.cu: the manifest says"));
        assert!(changed(&files.folder.join("jobs.h")).contains("source jobs.h"));
        assert!(changed(&files.script).contains("source compile.py"));
        assert!(changed(&files.fatbin).contains("fatbin"));
        assert!(changed(&files.folder.join("new.h")).contains("source new.h: the manifest says nothing"));
        for key in ["flags", "cubin architectures", "ptx compiler"] {
            let mut other = committed.clone();
            other.0[key] = json!(["other"]);
            let named = committed.differences(&other);
            assert!(named[0].contains(key), "{named:?}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
