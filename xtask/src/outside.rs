//! A project outside the workspace that uses each library crate by path, as a first user would.

use crate::workspace::{Crate, Workspace, cargo, succeed};
use anyhow::{Context, bail};
use std::fmt::Write as _;
use std::fs;

/// One use of each library crate: it has to compile and to hold.
const USES: &[(&str, &str)] = &[
    ("kvbm", "kvbm::config::Capacity::default() == kvbm::config::Capacity::NONE"),
    ("kvbm-cli", "std::mem::size_of::<kvbm_cli::args::Cli>() > 0"),
    ("kvbm-codec", "kvbm_codec::Compressor::new(kvbm_codec::Codec::Lz4).is_ok()"),
    ("kvbm-device", "kvbm_device::Clock::now(&kvbm_device::ManualClock::new()).is_zero()"),
    ("kvbm-disk", "kvbm_disk::ContentCrc::new().finish() == kvbm_disk::ContentCrc::combine(0, 0, 0)"),
    ("kvbm-events", "kvbm_events::PublisherConfig::default().validate().is_ok()"),
    ("kvbm-kernels", "kvbm_kernels::BlockShape::new(2, 2, 4, 16, 8, 2).unwrap().row_bytes() == 16"),
    (
        "kvbm-keys",
        "kvbm_keys::DeploymentKey::from_secret(b\"a\").id() == kvbm_keys::DeploymentKey::from_secret(b\"a\").id()",
    ),
    ("kvbm-layout", "kvbm_layout::DType::BF16.width() == 2"),
    ("kvbm-libclang", "{ use kvbm_libclang as _; true }"),
    ("kvbm-link", "kvbm_link::Lane::Urgent != kvbm_link::Lane::Bulk"),
    ("kvbm-model", "kvbm_model::ModelShape::from_hf(\"{}\").is_err()"),
    ("kvbm-nixl", "kvbm_nixl::NixlOptions::new(\"outside\").validate().is_ok()"),
    ("kvbm-node", "std::mem::size_of::<kvbm_node::NodeEngine>() > 0"),
    ("kvbm-plan", "kvbm_plan::Tier::G1 < kvbm_plan::Tier::G2"),
    ("kvbm-pool", "kvbm_pool::TRANSITIONS.len() == 6"),
    ("kvbm-sim", "{ use kvbm_sim as _; true }"),
    ("kvbm-storage", "kvbm_storage::SystemStorage::new(4096, 4096, kvbm_storage::HugePages::No).is_ok()"),
    ("kvbm-test-driver", "std::mem::size_of::<kvbm_test_driver::TestDriver>() > 0"),
    ("kvbm-tokens", "kvbm_tokens::Namespace::new(\"model\").model_id() == \"model\""),
    ("kvbm-transfer", "kvbm_transfer::PathConfig::default().threads > 0"),
    ("kvbm-volume", "kvbm_volume::VolumeRegistry::new().descriptors().is_empty()"),
    ("kvbm-zmtp", "\"tcp://127.0.0.1:1\".parse::<kvbm_zmtp::ZmtpEndpoint>().is_ok()"),
];

pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<()> {
    let libraries: Vec<_> = workspace.crates.iter().filter(|member| member.library.is_some()).collect();
    let mut body = String::new();
    for library in &libraries {
        let Some((_, holds)) = USES.iter().find(|(name, _)| *name == library.name) else {
            bail!("nothing of `{}` is used: add a line to the table in xtask/src/outside.rs", library.name);
        };
        writeln!(body, "    assert!({holds});")?;
    }
    let project = workspace.target.join("outside");
    fs::create_dir_all(project.join("src"))?;
    fs::write(project.join("Cargo.toml"), manifest(&libraries)?)?;
    fs::write(project.join("src").join("main.rs"), format!("fn main() {{\n{body}}}\n"))?;
    // The same versions as the workspace: nothing new to fetch.
    fs::copy(workspace.root.join("Cargo.lock"), project.join("Cargo.lock"))
        .context("cannot copy Cargo.lock")?;
    for library in &libraries {
        succeed(cargo(&project).args(["add", "--quiet", "--offline", "--path"]).arg(&library.folder))?;
    }
    let mut run = cargo(&project);
    run.args(["run", "--quiet", "--offline", "--release"]).env("CARGO_TARGET_DIR", &workspace.target);
    succeed(&mut run).context("a project outside the workspace cannot use the crates")
}

/// The project's manifest, without its dependencies. Packages of the registry have the profile of
/// `cargo build --release` in the workspace, so that they are compiled once for both. Ours are
/// compiled anew in another workspace, which is faster without optimisation.
fn manifest(libraries: &[&Crate]) -> anyhow::Result<String> {
    let mut manifest = String::from(
        "[package]\nname = \"outside\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [profile.release]\ndebug = false\n\n[profile.release.package]\n",
    );
    for library in libraries {
        writeln!(manifest, "{} = {{ opt-level = 0 }}", library.name)?;
    }
    manifest.push_str("\n[dependencies]\n");
    Ok(manifest)
}
