//! `cargo xtask gpu-bundle`: a folder with programs that check and measure kvbm on a machine that
//! has a GPU and no Rust.

use crate::workspace::{Profile, Workspace, cargo, compile, output_of, succeed};
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs: how cargo selects it, where it lies below the profile's folder, and the name in the
/// bundle. `kvbm` is selected as by `cargo run`: with `-p`, cargo builds the packages it depends on
/// again, with other features.
const PROGRAMS: [(&[&str], &str, &str); 2] = [
    (&["--bin", "kvbm"], "kvbm", "kvbm"),
    (&["-p", "kvbm-kernels", "--example", "gpu"], "examples/gpu", "gpu"),
];

/// Most that the bundle may weigh.
const MAX_BYTES: u64 = 40 << 20;

/// Newest version of glibc that a program may ask for: that of Ubuntu 22.04 and RHEL 9 is at least
/// this.
const GLIBC: (u32, u32) = (2, 34);

/// What the programs leave behind.
const RESULTS: [&str; 8] = [
    "bench.json",
    "check.json",
    "replay.json",
    "replay_latent.json",
    "replay_scales.json",
    "replay_states.json",
    "replay_windows.json",
    "report.html",
];

/// What to do with the bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Make it.
    Write,
    /// Make it, and run it here on the test driver.
    Rehearse,
}

/// Makes the bundle in `target/gpu-bundle`.
pub(crate) fn run(workspace: &Workspace, mode: Mode) -> anyhow::Result<()> {
    let folder = workspace.target.join("gpu-bundle");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    for (selection, built, name) in PROGRAMS {
        let program = folder.join(name);
        succeed(cargo(&workspace.root).args(["build", "--release"]).args(selection))?;
        fs::copy(workspace.target.join("release").join(built), &program).context(built)?;
        succeed(Command::new("strip").arg(&program))
            .context("strip comes with binutils, as the linker does")?;
        check_glibc(&program)?;
    }
    write_script(&folder.join("run.sh"), include_str!("run.sh"))?;
    write_script(&folder.join("torch_permute.py"), include_str!("torch_permute.py"))?;
    let mut bytes = 0;
    for entry in fs::read_dir(&folder)? {
        bytes += entry?.metadata()?.len();
    }
    ensure!(bytes <= MAX_BYTES, "the bundle has {bytes} bytes, at most {MAX_BYTES} are allowed");
    println!("{}: {:.1} MiB; there: ./run.sh", folder.display(), bytes as f64 / f64::from(1 << 20));
    if mode == Mode::Rehearse { rehearse(workspace, &folder) } else { Ok(()) }
}

fn write_script(file: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(file, text)?;
    Ok(fs::set_permissions(file, fs::Permissions::from_mode(0o755))?)
}

/// Fails if a program asks for a newer glibc than other machines have.
fn check_glibc(program: &Path) -> anyhow::Result<()> {
    let symbols = output_of(Command::new("objdump").arg("-T").arg(program))?;
    match newest_glibc(&symbols) {
        Some(found) if found > GLIBC => bail!(
            "{} needs glibc {}.{}, which machines with glibc {}.{} do not have: build on an older system",
            program.display(),
            found.0,
            found.1,
            GLIBC.0,
            GLIBC.1
        ),
        Some((major, minor)) => {
            println!("{}: needs glibc {major}.{minor}", program.display());
            Ok(())
        }
        None => bail!("{}: objdump names no version of glibc", program.display()),
    }
}

/// The newest version that a symbol is bound to; weak ones, which may be missing, do not count.
fn newest_glibc(symbols: &str) -> Option<(u32, u32)> {
    let bound = symbols.lines().filter(|line| !line.contains(" w "));
    let versions = bound.filter_map(|line| {
        let version = line.split("GLIBC_").nth(1)?.split([')', ' ']).next()?;
        let mut numbers = version.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    versions.max()
}

/// Runs the whole bundle quickly on the test driver, as on a machine with a GPU.
fn rehearse(workspace: &Workspace, folder: &Path) -> anyhow::Result<()> {
    let driver = driver(workspace)?;
    let results = workspace.target.join("gpu-rehearsal");
    if results.exists() {
        fs::remove_dir_all(&results)?;
    }
    let mut command = Command::new(folder.join("run.sh"));
    succeed(command.arg("--quick").arg(&results).env("KVBM_CUDA_DRIVER", driver))?;
    let mut left = Vec::new();
    for entry in fs::read_dir(&results)? {
        left.push(entry?.file_name().to_string_lossy().into_owned());
    }
    left.sort();
    ensure!(left == RESULTS, "it left {left:?}");
    let checks = rows(&results.join("check.json"))?;
    let failed: Vec<_> = checks.iter().filter(|row| row["passed"] != true).collect();
    ensure!(failed.is_empty() && checks.len() > 10, "of {} checks failed: {failed:?}", checks.len());
    for file in RESULTS.iter().filter(|file| file.starts_with("replay")) {
        check_replay(file, &parsed(&results.join(file))?)?;
    }
    let rates = rows(&results.join("bench.json"))?;
    ensure!(
        rates.iter().any(|row| row["name"] == "nhd_to_universal"),
        "no rate of a conversion was measured"
    );
    println!("{} checks passed, {} rates were measured on the test driver", checks.len(), rates.len());
    Ok(())
}

/// Fails unless blocks came back from every tier and were compared, and all of them were right.
fn check_replay(file: &str, replay: &Value) -> anyhow::Result<()> {
    let number = |field: &str| replay.pointer(field).and_then(Value::as_u64).unwrap_or_default();
    for field in ["/corrupt_blocks", "/failed_transfers"] {
        ensure!(number(field) == 0, "{file}: {field} is {}", number(field));
    }
    for field in ["/verified_blocks", "/hits/g1", "/hits/g2", "/hits/g3"] {
        ensure!(number(field) > 0, "{file}: {field} is 0, so the replay checks nothing of it");
    }
    Ok(())
}

fn parsed(file: &Path) -> anyhow::Result<Value> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    serde_json::from_str(&text).with_context(|| file.display().to_string())
}

fn rows(file: &Path) -> anyhow::Result<Vec<Value>> {
    let rows = parsed(file)?["rows"].as_array().cloned();
    rows.with_context(|| format!("{} has no rows", file.display()))
}

/// The library of the test driver: its own example builds it and says where it is.
pub(crate) fn driver(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let built = compile(workspace, Profile::Dev, &["--example", "library"])?;
    Ok(PathBuf::from(output_of(&mut Command::new(built.join("examples/library")))?.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_that_is_needed_counts() {
        let symbols = "\
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.2.5) free
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.34) dlsym
0000000000000000  w   DF *UND*  0000000000000000 (GLIBC_2.36) newer
0000000000000000      DF *UND*  0000000000000000 (GCC_3.0)    _Unwind_Resume
";
        assert_eq!(newest_glibc(symbols), Some((2, 34)));
        assert_eq!(newest_glibc("nothing"), None);
    }

    #[test]
    fn a_replay_that_checks_nothing_fails() {
        let replay = |corrupt: u64, g3: u64| {
            serde_json::json!({
                "corrupt_blocks": corrupt, "failed_transfers": 0, "verified_blocks": 3,
                "hits": { "g1": 1, "g2": 1, "g3": g3 },
            })
        };
        assert!(check_replay("replay.json", &replay(0, 1)).is_ok());
        let refused = |replay| check_replay("replay.json", &replay).unwrap_err().to_string();
        assert_eq!(refused(replay(2, 1)), "replay.json: /corrupt_blocks is 2");
        assert!(refused(replay(0, 0)).contains("/hits/g3 is 0"));
        assert!(refused(Value::Null).contains("/verified_blocks is 0"));
    }

    #[test]
    fn scripts_are_what_the_bundle_says_of_them() {
        let script = include_str!("run.sh");
        assert!(RESULTS.iter().all(|file| script.contains(file)));
        for (.., name) in PROGRAMS {
            assert!(script.contains(&format!("$here/{name}\"")), "{name}");
        }
    }
}
