//! Who may not take over, and that the daemon that refuses serves on. Those that may are processes
//! of their own: `cargo xtask node-test`.

use crate::support::{Daemon, Model, TestEngine, config, sequence, socket, times};
use kvbm::config::Config;
use kvbm_node::{DaemonError, NodeServer};

#[test]
fn a_daemon_hands_over_to_one_that_fits_and_to_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, host) = (socket(&folder), "[host]\ncapacity = \"32 blocks\"\n");
    let refusal = |config: &Config| match NodeServer::take_over(config, &socket, 256, times()) {
        Err(DaemonError::TakeOver { reason, .. }) => reason,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("taken over"),
    };
    let config = config(1, host);
    let nobody = refusal(&config);
    assert!(nobody.contains("No such file"), "{nobody}");
    let daemon = Daemon::start(&socket, &config);
    let engine = TestEngine::attach(&socket, "engine", 16, 1);
    let tokens = sequence(&config, 1, 4);
    engine.save(&tokens, &[0, 1, 2, 3]);
    let mut other = config.clone();
    other.namespace.weights = "2".into();
    for (config, expected) in [
        (
            crate::support::config(1, "[host]\ncapacity = \"33 blocks\"\n"),
            "(host.capacity): the new daemon has 33, this one 32",
        ),
        (crate::support::config(1, &format!("{host}[transfer]\nstaging = \"1MiB\"\n")), "(transfer.staging)"),
        (crate::support::config(2, host), "the new daemon has 2 ranks, this one 1"),
        (other, "the namespace differs"),
    ] {
        let reason = refusal(&config);
        assert!(reason.contains(expected), "{reason}");
    }
    let broken = NodeServer::take_over(&crate::support::config(1, ""), &socket, 256, times());
    assert!(broken.is_err(), "without host memory there is nothing to take");
    // Files that cannot be used are found before the daemon ends.
    let disk =
        format!("{host}[disk]\ndir = \"{0}/disk\"\ncapacity = 64\nencrypt = true\n", folder.path().display());
    for (settings, expected) in [
        (
            format!("{host}[metrics]\nhttp = \"127.0.0.1:0\"\ntoken_file = \"/no/token\"\n"),
            "metrics.token_file = /no/token",
        ),
        (format!("{disk}[encryption]\nkey_file = \"/no/key\"\n"), "encryption.key_file = /no/key"),
    ] {
        let wrong = NodeServer::take_over(&crate::support::config(1, &settings), &socket, 256, times());
        let error = wrong.map(drop).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(!daemon.server.is_handed_over());
    assert_eq!(engine.load("r", &tokens, &[4, 5, 6, 7]).arrived, 4, "it serves on");
    assert!(engine.holds(&tokens, 0, &[4, 5, 6, 7]));
}

#[test]
fn a_daemon_whose_ranks_share_memory_hands_over_to_no_other_kind() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), Model::Latent.config(2, "[host]\ncapacity = \"32 blocks\"\n"));
    let _daemon = Daemon::start(&socket, &config);
    let mut other = config.clone();
    other.host.one_copy = false;
    let refused = NodeServer::take_over(&other, &socket, 256, times()).map(drop).unwrap_err().to_string();
    assert!(
        refused.contains("host.one_copy") && refused.contains("the new daemon has 1, this one 2"),
        "{refused}"
    );
}
