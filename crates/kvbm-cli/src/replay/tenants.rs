//! Whose requests these are, where tenants have shares: each tenant's blocks lie in a namespace of
//! its own.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use kvbm::tokens::BlockHasher;
use kvbm::{KvBlockManager, Namespace, Owned};

use super::permits::{Permit, Permits};
use super::requests::Requests;
use super::serve::Served;
use crate::human;
use crate::summary::{TenantFigures, TenantOn};
use crate::trace::Trace;

/// Everybody else, among the names of tenants.
const NOBODY: &str = "(none)";

/// The namespaces of a replay: first the manager's, for requests of nobody, then one for each
/// tenant that the trace names. Also what requests of each may hold of G1 together, which is what
/// is kept for their tenant.
pub(super) struct Tenants {
    namespaces: Vec<Namespace>,
    /// For each namespace; nothing at all where no tenants have shares. None where nothing is kept.
    permits: Vec<Option<Permits>>,
}

impl Tenants {
    /// Of a manager and of a trace.
    ///
    /// # Errors
    /// A tenant of the trace that the manager does not know.
    pub(super) fn new(manager: &KvBlockManager<Owned>, trace: &Trace) -> Result<Self> {
        let own = manager.namespace().clone();
        let known = manager.status().tenants;
        if known.is_empty() {
            return Ok(Self { namespaces: vec![own], permits: Vec::new() });
        }
        let theirs = trace.tenants().iter().map(|name| {
            let hint = || format!("the trace has requests of '{name}': give it a share with --tenants");
            manager.tenant(name).with_context(hint)
        });
        let namespaces = std::iter::once(Ok(own)).chain(theirs).collect::<Result<_>>()?;
        let names = std::iter::once(None).chain(trace.tenants().iter().map(|name| Some(name.as_str())));
        let limit = |name: Option<&str>| {
            let tenant = known.iter().find(|tenant| tenant.name.as_deref() == name);
            tenant.map_or(0, |tenant| tenant.tiers[0].limit as usize)
        };
        let permits = names.map(limit).map(|limit| (limit > 0).then(|| Permits::new(limit))).collect();
        Ok(Self { namespaces, permits })
    }

    /// What hashes the blocks of each namespace.
    pub(super) fn hashers(&self) -> Result<Vec<BlockHasher>> {
        self.namespaces.iter().map(|namespace| Ok(namespace.hasher()?)).collect()
    }

    /// A namespace by its number.
    pub(super) fn namespace(&self, number: usize) -> &Namespace {
        &self.namespaces[number]
    }

    /// The most blocks that one request of a namespace can get.
    pub(super) fn most(&self, number: usize) -> usize {
        self.permits.get(number).map_or(usize::MAX, |kept| kept.as_ref().map_or(0, Permits::total))
    }

    /// Waits until the other requests of its tenant leave room for one of so many blocks.
    pub(super) fn acquire(&self, number: usize, blocks: usize) -> Option<Permit<'_>> {
        self.permits.get(number)?.as_ref().map(|permits| permits.acquire(blocks))
    }
}

/// What became of each tenant's requests and blocks, by its name.
pub(super) fn figures(
    manager: &KvBlockManager<Owned>,
    trace: &Trace,
    requests: &Requests,
    served: &[Served],
) -> BTreeMap<String, TenantFigures> {
    let mut all = BTreeMap::new();
    for tenant in manager.status().tenants {
        let namespace = match &tenant.name {
            None => Some(0),
            Some(name) => trace.tenants().iter().position(|known| known == name).map(|at| at + 1),
        };
        let theirs =
            served.iter().enumerate().filter(|(index, _)| Some(requests.namespace(*index)) == namespace);
        let [requests, blocks, hits] = theirs.fold([0; 3], |[requests, blocks, hits], (_, served)| {
            [requests + 1, blocks + served.blocks, hits + served.hits.iter().sum::<u64>()]
        });
        let on = |tier: usize| {
            let on = tenant.tiers[tier];
            TenantOn { limit: on.limit, blocks: on.blocks, evicted: on.evicted }
        };
        let figures = TenantFigures {
            share: tenant.share.get(),
            requests,
            blocks,
            hits,
            hit_ratio: human::share(hits, blocks),
            g1: on(0),
            g2: on(1),
            g3: on(2),
        };
        all.insert(tenant.name.unwrap_or_else(|| NOBODY.to_owned()), figures);
    }
    all
}
