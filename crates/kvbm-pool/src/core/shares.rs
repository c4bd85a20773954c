//! Counts of each tenant's blocks on every tier against its share, and which tenant gives a block
//! when another needs room.
//!
//! Every tenant has the slots on a tier that its share says. A tenant that wants more gets free
//! slots, and blocks of others beyond their shares. So a victim comes from the tenant that is
//! furthest over its share and has one, and no tenant over its share takes from one that is not.
//! Blocks of namespaces without a tenant have what the shares leave.
//!
//! A block costs no memory for it: its namespace tells its tenant.

use crate::config::RegistryConfig;
use crate::share::{Share, TenantConfig, TenantError, TenantId, TenantUsage};
use crate::tier::TIERS;
use kvbm_plan::{BlockIdentity, NamespaceId};
use std::borrow::Cow;
use std::collections::BTreeSet;

/// A tenant's number here: its index in the configuration plus one; 0 for blocks without a tenant.
pub(crate) type Number = usize;

/// The tenant for which slots are allocated. None where no tenants are configured, or the caller
/// names no namespace.
pub(crate) type Claim = Option<u8>;

#[derive(Clone, Copy, Default)]
pub(crate) struct TierCounts {
    /// Slots with blocks of its: registered, copies of these, on their way, removed while in use.
    pub blocks: u32,
    /// Those of them that are registered and have no users.
    pub idle: u32,
    /// Slots of exclusive batches that were allocated for it.
    pub held: u32,
    pub pinned: u32,
    pub evicted: u64,
}

pub(crate) struct TenantState {
    pub share: Share,
    pub on: [TierCounts; TIERS],
}

/// All tenants. Empty where none are configured.
pub(crate) struct TenantShares {
    pub all: Vec<TenantState>,
    /// By namespace.
    of: Vec<(NamespaceId, u8)>,
}

impl TenantShares {
    /// Tenants that were checked.
    pub(crate) fn new(config: &[TenantConfig]) -> Self {
        let mut tenants = Self { all: Vec::new(), of: Vec::new() };
        if config.is_empty() {
            return tenants;
        }
        let tenant = |share| TenantState { share, on: [TierCounts::default(); TIERS] };
        tenants.all.push(tenant(Share::default()));
        for (at, TenantConfig { share, namespaces }) in config.iter().enumerate() {
            tenants.all.push(tenant(*share));
            tenants.of.extend(namespaces.iter().map(|&namespace| (namespace, at as u8 + 1)));
        }
        tenants.of.sort_unstable();
        tenants.set_rest();
        tenants
    }

    /// Whether there are any.
    #[inline]
    pub(crate) fn are_configured(&self) -> bool {
        !self.all.is_empty()
    }

    /// Whose blocks those of a namespace are.
    #[inline]
    pub(crate) fn number_of(&self, namespace: NamespaceId) -> Number {
        if self.of.is_empty() {
            return 0;
        }
        let found = self.of.binary_search_by_key(&namespace, |&(known, _)| known);
        found.map_or(0, |at| usize::from(self.of[at].1))
    }

    /// The claim of slots for blocks of a namespace.
    pub(crate) fn claim_of(&self, namespace: NamespaceId) -> Claim {
        self.are_configured().then(|| self.number_of(namespace) as u8)
    }

    /// The blocks of each tenant, in their order, with the claim of slots for them.
    pub(crate) fn split<'a>(&self, blocks: &'a [BlockIdentity]) -> Vec<(Claim, Cow<'a, [BlockIdentity]>)> {
        let claim_of = |identity: &BlockIdentity| self.claim_of(identity.namespace);
        let Some(first) = blocks.first().map(claim_of) else { return Vec::new() };
        if blocks.iter().all(|identity| claim_of(identity) == first) {
            return vec![(first, Cow::Borrowed(blocks))];
        }
        let claims: BTreeSet<Claim> = blocks.iter().map(claim_of).collect();
        let part = |claim| blocks.iter().filter(|&identity| claim_of(identity) == claim).copied().collect();
        claims.into_iter().map(|claim| (claim, Cow::Owned(part(claim)))).collect()
    }

    /// `n` slots that were allocated without a claim, or for another tenant, are for blocks of a
    /// namespace.
    pub(crate) fn claim_for(&mut self, tier: usize, claim: &mut Claim, namespace: NamespaceId, n: usize) {
        self.let_go(tier, *claim, n);
        *claim = self.claim_of(namespace);
        self.hold(tier, *claim, n);
    }

    /// Whether a namespace was named as a tenant's.
    pub(crate) fn owns(&self, number: Number, namespace: NamespaceId) -> bool {
        self.of.binary_search(&(namespace, number as u8)).is_ok()
    }

    /// Makes a namespace a tenant's. The caller has taken its blocks out of all counts.
    pub(crate) fn set_owner(&mut self, namespace: NamespaceId, number: Number) {
        match self.of.binary_search_by_key(&namespace, |&(known, _)| known) {
            Ok(at) => self.of[at].1 = number as u8,
            Err(at) => self.of.insert(at, (namespace, number as u8)),
        }
    }

    /// The number of a tenant by its public id.
    pub(crate) fn number(&self, tenant: TenantId) -> Result<Number, TenantError> {
        let (number, tenants) = (usize::from(tenant.0) + 1, self.all.len().saturating_sub(1));
        if number <= tenants { Ok(number) } else { Err(TenantError::Unknown { tenant, tenants }) }
    }

    pub(crate) fn set_rest(&mut self) -> bool {
        let rest = Share::rest(self.all[1..].iter().map(|tenant| tenant.share));
        self.all[0].share = rest.unwrap_or_default();
        rest.is_some()
    }

    pub(crate) fn set_share(&mut self, tenant: TenantId, share: Share) -> Result<(), TenantError> {
        let number = self.number(tenant)?;
        let before = std::mem::replace(&mut self.all[number].share, share);
        if self.set_rest() {
            return Ok(());
        }
        self.all[number].share = before;
        self.set_rest();
        Err(TenantError::Shares { tenant, share })
    }

    pub(crate) fn tenant_of(&self, namespace: NamespaceId) -> Option<TenantId> {
        self.number_of(namespace).checked_sub(1).map(|at| TenantId(at as u8))
    }

    /// `n` slots, no more than the tier has, are allocated for the tenant that claims them.
    #[inline]
    pub(crate) fn hold(&mut self, tier: usize, claim: Claim, n: usize) {
        if let Some(number) = claim {
            let held = &mut self.all[usize::from(number)].on[tier].held;
            *held = held.saturating_add(n as u32);
        }
    }

    /// Slots that were held hold blocks now, or are free.
    #[inline]
    pub(crate) fn let_go(&mut self, tier: usize, claim: Claim, n: usize) {
        if let Some(number) = claim {
            let held = &mut self.all[usize::from(number)].on[tier].held;
            debug_assert!(*held as usize >= n, "slots are let go that were not held");
            *held = held.saturating_sub(n as u32);
        }
    }

    /// A slot of a tier has a block of the namespace now, or has it no more.
    #[inline]
    pub(crate) fn count(&mut self, tier: usize, namespace: NamespaceId, there: bool) {
        if !self.are_configured() {
            return;
        }
        let number = self.number_of(namespace);
        let blocks = &mut self.all[number].on[tier].blocks;
        debug_assert!(there || *blocks > 0, "a slot is given up that was not counted");
        *blocks = if there { *blocks + 1 } else { blocks.saturating_sub(1) };
    }

    /// A registered slot of a tier with a block of the namespace has no users any more, or has some
    /// now, or goes.
    #[inline]
    pub(crate) fn count_idle(&mut self, tier: usize, namespace: NamespaceId, more: bool) {
        if !self.are_configured() {
            return;
        }
        let number = self.number_of(namespace);
        let idle = &mut self.all[number].on[tier].idle;
        debug_assert!(more || *idle > 0, "a slot comes into use that was not idle");
        *idle = if more { *idle + 1 } else { idle.saturating_sub(1) };
    }

    /// A tenant's share in blocks of a tier with `usable` slots: together exactly these.
    pub(crate) fn limit(&self, number: Number, usable: u32) -> u32 {
        if number > 0 {
            return self.all[number].share.of(usable);
        }
        let others: u32 = self.all[1..].iter().map(|tenant| tenant.share.of(usable)).sum();
        usable - others
    }

    /// How many blocks more than its share a tenant has, with those that it is about to have.
    pub(crate) fn excess(&self, number: Number, tier: usize, usable: u32) -> i64 {
        let TierCounts { blocks, held, .. } = self.all[number].on[tier];
        i64::from(blocks) + i64::from(held) - i64::from(self.limit(number, usable))
    }

    /// Whether `n` blocks more would be over the share of the tenant that claims them.
    pub(crate) fn is_over_share(&self, tier: usize, usable: u32, claim: Claim, n: usize) -> bool {
        let n = i64::try_from(n).unwrap_or(i64::MAX);
        claim.is_some_and(|number| self.excess(usize::from(number), tier, usable).saturating_add(n) > 0)
    }

    /// How many blocks the tenants give to the claiming one where each has so many to give. That is
    /// all, unless it is over its share and stays so when it has given what it has itself. Then it
    /// gets what others have beyond their shares.
    pub(crate) fn given(&self, tier: usize, usable: u32, claim: Claim, has: impl Fn(Number) -> u32) -> usize {
        let excess = |number: Number| self.excess(number, tier, usable);
        let stays_over = claim.map(usize::from).is_some_and(|claim| excess(claim) > i64::from(has(claim)));
        let gives = |number: Number| match i64::from(has(number)) {
            all if stays_over => excess(number).clamp(0, all) as usize,
            all => all as usize,
        };
        (0..self.all.len()).map(gives).sum()
    }

    /// So many blocks of a tenant were evicted.
    pub(crate) fn count_evicted(&mut self, number: Number, tier: usize, blocks: u64) {
        self.all[number].on[tier].evicted += blocks;
    }

    /// The tenant that gives a block: the one furthest over its share, of those whose bit in
    /// `tried` is not set. A tenant over its own share takes from no tenant within its share.
    pub(crate) fn giver(&self, tier: usize, usable: u32, claim: Claim, tried: u64) -> Option<Number> {
        let excess = |number: Number| self.excess(number, tier, usable);
        let only_over = claim.is_some_and(|number| excess(usize::from(number)) > 0);
        (0..self.all.len())
            .filter(|number| tried >> number & 1 == 0)
            .map(|number| (excess(number), claim == Some(number as u8), number))
            .filter(|&(excess, ..)| excess > 0 || !only_over)
            .max()
            .map(|(.., number)| number)
    }

    /// So many blocks of a namespace are pinned on each tier, or are no more.
    pub(crate) fn count_pins(&mut self, namespace: NamespaceId, pins: [u32; TIERS], more: bool) {
        if !self.are_configured() {
            return;
        }
        let number = self.number_of(namespace);
        for (on, pins) in self.all[number].on.iter_mut().zip(pins) {
            on.pinned = if more { on.pinned + pins } else { on.pinned.saturating_sub(pins) };
        }
    }

    /// A block of a namespace is pinned on a tier until some iteration, or is no more.
    pub(crate) fn count_pin(&mut self, namespace: NamespaceId, tier: usize, more: bool) {
        let mut pins = [0; TIERS];
        pins[tier] = 1;
        self.count_pins(namespace, pins, more);
    }

    /// How many blocks a namespace's tenant may pin on a tier at most, and how many it has; none
    /// where there are no tenants.
    pub(crate) fn pins(&self, tier: usize, usable: u32, namespace: NamespaceId) -> Option<(u32, u32)> {
        self.are_configured().then(|| {
            let number = self.number_of(namespace);
            (RegistryConfig::most_pinned(self.limit(number, usable)), self.all[number].on[tier].pinned)
        })
    }

    pub(crate) fn status(&self, tier: usize, usable: u32) -> Vec<TenantUsage> {
        let of = |(number, tenant): (usize, &TenantState)| {
            let TierCounts { blocks, held, evicted, .. } = tenant.on[tier];
            let id = number.checked_sub(1).map(|at| TenantId(at as u8));
            let limit = self.limit(number, usable);
            TenantUsage { tenant: id, share: tenant.share, limit, blocks, held, evicted }
        };
        self.all.iter().enumerate().map(of).collect()
    }
}

const _: () = assert!(RegistryConfig::MAX_TENANTS < u64::BITS as usize, "one bit each, and one for nobody");
