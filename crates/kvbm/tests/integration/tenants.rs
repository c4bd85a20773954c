//! Tenants and their shares through the facade: configured, asked for, seen.

use crate::support::{books, soon, tokens};
use kvbm::{Cached, G1, KvBlockManager, Namespace, Owned, TenantError, TokenSequence};

/// Makes a request of a namespace present on G1.
fn fill(manager: &KvBlockManager<Owned>, namespace: &Namespace, sequence: &TokenSequence) -> Cached<G1> {
    let fresh = manager.allocate_in(namespace, sequence.num_blocks()).unwrap();
    let (done, _) = manager.commit(fresh, sequence, 0).unwrap();
    manager.register(done).unwrap()
}

/// A sequence of `blocks` blocks that begins with `start`, in a namespace.
fn sequence(
    manager: &KvBlockManager<Owned>,
    namespace: &Namespace,
    start: u32,
    blocks: u32,
) -> TokenSequence {
    manager.sequence_in(namespace, tokens(manager, start, blocks).tokens(), b"").unwrap()
}

/// Blocks of all others and of each tenant on G1 and G2.
fn blocks(manager: &KvBlockManager<Owned>) -> Vec<[u32; 2]> {
    let tenants = manager.status().tenants;
    tenants.iter().map(|tenant| [0, 1].map(|tier| tenant.tiers[tier].blocks)).collect()
}

#[test]
fn tenants_keep_their_shares_of_every_tier() {
    for policy in ["lru-leaf", "hazard"] {
        let manager = books([32, 64, 0], |config| {
            config.set("policy.eviction", policy).unwrap();
            config.set("tenants.shares", "acme=0.5, beta=0.25").unwrap();
        });
        let [acme, beta] = ["acme", "beta"].map(|name| manager.tenant(name).unwrap());
        for start in 0..30 {
            drop(fill(&manager, &acme, &sequence(&manager, &acme, start, 4)));
            assert!(manager.wait_offloads(soon()));
        }
        assert_eq!(blocks(&manager), [[0, 0], [32, 64], [0, 0]], "{policy}: nobody else wants it");
        for start in 0..30 {
            drop(fill(&manager, &beta, &sequence(&manager, &beta, start, 2)));
            drop(crate::support::fill(&manager, &tokens(&manager, start, 2), 0));
            assert!(manager.wait_offloads(soon()));
        }
        assert_eq!(blocks(&manager), [[8, 16], [16, 32], [8, 16]], "{policy}");
        // Nobody's and acme's are the same tokens, and do not meet.
        assert!(manager.look_up(&tokens(&manager, 2, 4)).is_empty());
        let status = manager.status().tenants;
        assert_eq!(
            status.iter().map(|tenant| tenant.name.as_deref()).collect::<Vec<_>>(),
            [None, Some("acme"), Some("beta")]
        );
        assert_eq!(status[1].tiers.map(|on| on.limit), [16, 32, 0]);
        let text = manager.metrics().encode();
        for line in [
            "kvbm_tenant_share{tenant=\"acme\"} 0.5",
            "kvbm_tenant_share{tenant=\"(none)\"} 0.25",
            "kvbm_tenant_blocks{tenant=\"acme\",tier=\"g1\"} 16",
            "kvbm_tenant_blocks{tenant=\"(none)\",tier=\"g2\"} 16",
            "kvbm_tenant_evicted_blocks_total{tenant=\"beta\",tier=\"g1\"} 52",
            "kvbm_tenant_limit_blocks{tenant=\"beta\",tier=\"g2\"} 16",
            "kvbm_tenant_held_blocks{tenant=\"acme\",tier=\"g1\"} 0",
            "kvbm_tenant_refused_blocks_total{tenant=\"acme\",tier=\"g1\"} 0",
        ] {
            assert!(text.contains(line), "{line} is missing from {text}");
        }
    }
}

#[test]
fn a_tenant_over_its_share_is_refused_rather_than_served_from_others() {
    let manager = books([8, 0, 0], |config| config.set("tenants.shares", "acme=0.5, beta=0.5").unwrap());
    let [acme, beta] = ["acme", "beta"].map(|name| manager.tenant(name).unwrap());
    drop(fill(&manager, &beta, &sequence(&manager, &beta, 1, 4)));
    let running = fill(&manager, &acme, &sequence(&manager, &acme, 1, 4));
    let refused = manager.allocate_in(&acme, 1).unwrap_err();
    assert!(refused.over_share && refused.to_string().contains("raise the share"), "{refused}");
    let refused = manager.allocate(1).unwrap_err();
    assert!(refused.over_share, "what is left for others is nothing: {refused}");
    let refused = manager.status().tenants.into_iter().map(|tenant| tenant.tiers[0].refused);
    assert_eq!(refused.collect::<Vec<_>>(), [1, 1, 0]);
    let text = manager.metrics().encode();
    assert!(text.contains("kvbm_tenant_refused_blocks_total{tenant=\"(none)\",tier=\"g1\"} 1"), "{text}");
    manager.set_share("beta", 0.25).unwrap();
    manager.set_share("acme", 0.75).unwrap();
    drop(manager.allocate_in(&acme, 2).unwrap());
    assert_eq!(manager.status().tenants[2].tiers[0].evicted, 2);
    drop(running);
}

#[test]
fn what_is_unknown_or_too_much_is_named() {
    let manager = books([8, 0, 0], |config| config.set("tenants.shares", "acme=0.5, beta=0.25").unwrap());
    let unknown = manager.tenant("gamma").unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "there is no tenant 'gamma': there are acme, beta; add it to tenants.shares and start again"
    );
    assert!(matches!(manager.set_share("gamma", 0.1), Err(TenantError::Unknown { .. })));
    let name = || "acme".to_owned();
    assert_eq!(manager.set_share("acme", 1.5), Err(TenantError::Share { name: name(), share: 1.5 }));
    assert_eq!(manager.set_share("acme", 0.8), Err(TenantError::Shares { name: name(), share: 0.8 }));
    let lora = manager.tenant("acme").unwrap().adapter("lora-7");
    manager.assign(&lora, "acme").unwrap();
    drop(fill(&manager, &lora, &sequence(&manager, &lora, 1, 3)));
    assert_eq!(manager.status().tenants[1].tiers[0].blocks, 3);
    manager.assign(&lora, "beta").unwrap();
    let on_device = [1, 2].map(|tenant: usize| manager.status().tenants[tenant].tiers[0].blocks);
    assert_eq!(on_device, [0, 3], "blocks that are known already go along");
    assert!(matches!(manager.assign(&lora, "gamma"), Err(TenantError::Unknown { .. })));
    let without = books([8, 0, 0], |_| ());
    assert!(without.tenant("acme").unwrap_err().to_string().contains("none are configured"));
    assert!(without.status().tenants.is_empty() && !without.metrics().encode().contains("tenant"));
}

#[test]
fn what_an_engine_hashed_itself_is_a_tenants_too() {
    let manager = books([8, 0, 0], |config| config.set("tenants.shares", "acme=0.5").unwrap());
    let acme = manager.tenant("acme").unwrap();
    let hashes = [[1_u8; 8], [2; 8], [3; 8]];
    let theirs = manager.external_sequence_in(&acme, hashes).unwrap();
    let fresh = manager.allocate_in(&acme, theirs.num_blocks()).unwrap();
    let (done, _) = manager.commit(fresh, &theirs, 0).unwrap();
    drop(manager.register(done).unwrap());
    assert_eq!(blocks(&manager), [[0, 0], [3, 0]]);
    assert_eq!(manager.look_up(&theirs).len(), 3);
    assert!(manager.look_up(&manager.external_sequence(hashes)).is_empty(), "nobody's are others");
    let other = manager.external_sequence_in(&crate::support::namespace().page_size(8).dtype("bf16"), hashes);
    assert!(other.unwrap_err().to_string().contains("8 tokens a block"));
}

#[test]
fn a_tenants_namespace_is_a_part_of_the_managers() {
    let salted = crate::support::namespace().tenant_salt("site").page_size(16).dtype("bf16");
    let plain = crate::support::namespace().page_size(16).dtype("bf16");
    assert_eq!(plain.clone().tenant("acme").tag(), plain.clone().tenant_salt("acme").tag());
    assert_eq!(salted.clone().tenant("acme").tag(), plain.clone().tenant_salt("site/acme").tag());
    assert_ne!(salted.tenant("acme").tag(), plain.tenant("acme").tag());
}

#[cfg(feature = "worker")]
#[test]
fn what_is_on_disk_is_its_tenants_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let open = || {
        crate::support::three_tiers([16, 16, 32], dir.path(), |config| {
            config.set("tenants.shares", "acme=0.5").unwrap();
        })
    };
    let manager = open();
    let acme = manager.tenant("acme").unwrap();
    let sequences = [sequence(&manager, &acme, 1, 6), tokens(&manager, 1, 4)];
    let namespaces = [acme, manager.namespace().clone()];
    for (namespace, sequence) in namespaces.iter().zip(&sequences) {
        let fresh = manager.allocate_in(namespace, sequence.num_blocks()).unwrap();
        for (&block, &hash) in fresh.block_ids().iter().zip(sequence.hashes()) {
            crate::support::compute(&manager, block, hash);
        }
        let (done, _) = manager.commit(fresh, sequence, 0).unwrap();
        drop(manager.register(done).unwrap());
    }
    assert!(manager.wait_offloads(soon()));
    let on_disk = |manager: &KvBlockManager<Owned>| -> Vec<u32> {
        manager.status().tenants.iter().map(|tenant| tenant.tiers[kvbm::Tier::G3.index()].blocks).collect()
    };
    assert_eq!(on_disk(&manager), [4, 6]);
    assert!(manager.shutdown(std::time::Duration::from_secs(60)).is_complete());
    drop(manager);
    let manager = open();
    assert_eq!(on_disk(&manager), [4, 6]);
    assert_eq!(manager.look_up(&sequences[0]).len(), 6);
}
