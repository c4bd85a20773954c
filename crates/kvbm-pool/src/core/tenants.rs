//! What each tenant has of every tier, where tenants have shares, and so who gives a block when room is needed.
//!
//! Every tenant has the slots on a tier that its share says; who wants more gets what is free and what others have beyond
//! their shares. So a victim is taken from whoever is furthest over its share and has one, and nobody who is over
//! takes from somebody who is not. Blocks of nobody's namespaces have what the shares leave.
//!
//! Nothing is kept for a block: its namespace says whose it is.

mod room;
mod victims;

use super::slot::Usage;
use super::{Core, NONE, Store};
use crate::config::RegistryConfig;
use crate::policy::SlotSet;
use crate::tenants::{Share, TenantConfig, TenantError, TenantId, TenantStatus};
use crate::tier::TIERS;
use kvbm_plan::{BlockId, BlockIdentity, NamespaceId};
use std::borrow::Cow;
use std::collections::BTreeSet;

/// A tenant's number here: its place in the configuration and one; 0 for nobody's blocks.
type Number = usize;

/// For whom slots are allocated. Nobody in particular where there are no tenants, or where it is not said.
pub(crate) type Claim = Option<u8>;

#[derive(Clone, Copy, Default)]
struct On {
    /// Slots with blocks of its: registered, copies of these, on their way, removed while somebody uses them.
    blocks: u32,
    /// Those of them that are registered and have no users.
    idle: u32,
    /// Slots of exclusive batches that were allocated for it.
    held: u32,
    pinned: u32,
    evicted: u64,
}

struct Tenant {
    share: Share,
    on: [On; TIERS],
}

/// All tenants. Empty where none are configured.
pub(crate) struct Tenants {
    all: Vec<Tenant>,
    /// By namespace.
    of: Vec<(NamespaceId, u8)>,
}

impl Tenants {
    /// Tenants that were checked.
    pub(crate) fn new(config: &[TenantConfig]) -> Self {
        let mut tenants = Self { all: Vec::new(), of: Vec::new() };
        if config.is_empty() {
            return tenants;
        }
        let tenant = |share| Tenant { share, on: [On::default(); TIERS] };
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

    /// Who allocates slots for blocks of a namespace.
    pub(crate) fn claim_of(&self, namespace: NamespaceId) -> Claim {
        self.are_configured().then(|| self.number_of(namespace) as u8)
    }

    /// Who is known by that name outside.
    fn number(&self, tenant: TenantId) -> Result<Number, TenantError> {
        let (number, tenants) = (usize::from(tenant.0) + 1, self.all.len().saturating_sub(1));
        if number <= tenants { Ok(number) } else { Err(TenantError::Unknown { tenant, tenants }) }
    }

    fn set_rest(&mut self) -> bool {
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

    /// `n` slots, no more than the tier has, are allocated for, or will be blocks of, who claims them.
    #[inline]
    pub(crate) fn hold(&mut self, tier: usize, claim: Claim, n: usize) {
        if let Some(number) = claim {
            let held = &mut self.all[usize::from(number)].on[tier].held;
            *held = held.saturating_add(n as u32);
        }
    }

    /// Slots that were held are somebody's blocks now, or free.
    #[inline]
    pub(crate) fn let_go(&mut self, tier: usize, claim: Claim, n: usize) {
        if let Some(number) = claim {
            let held = &mut self.all[usize::from(number)].on[tier].held;
            debug_assert!(*held as usize >= n, "slots are let go that were not held");
            *held = held.saturating_sub(n as u32);
        }
    }

    /// A slot of a tier has a block of the namespace now, or has it no more.
    fn count(&mut self, tier: usize, namespace: NamespaceId, there: bool) {
        let number = self.number_of(namespace);
        let blocks = &mut self.all[number].on[tier].blocks;
        debug_assert!(there || *blocks > 0, "a slot is given up that was not counted");
        *blocks = if there { *blocks + 1 } else { blocks.saturating_sub(1) };
    }

    /// A registered slot of a tier with a block of the namespace has no users any more, or has some now, or goes.
    fn count_idle(&mut self, tier: usize, namespace: NamespaceId, more: bool) {
        let number = self.number_of(namespace);
        let idle = &mut self.all[number].on[tier].idle;
        debug_assert!(more || *idle > 0, "a slot comes into use that was not idle");
        *idle = if more { *idle + 1 } else { idle.saturating_sub(1) };
    }

    /// A tenant's share in blocks of a tier with `usable` slots: together exactly these.
    fn limit(&self, number: Number, usable: u32) -> u32 {
        if number > 0 {
            return self.all[number].share.of(usable);
        }
        let others: u32 = self.all[1..].iter().map(|tenant| tenant.share.of(usable)).sum();
        usable - others
    }

    /// How many blocks more than its share a tenant has, with those that it is about to have.
    fn excess(&self, number: Number, tier: usize, usable: u32) -> i64 {
        let On { blocks, held, .. } = self.all[number].on[tier];
        i64::from(blocks) + i64::from(held) - i64::from(self.limit(number, usable))
    }

    /// How many blocks are given for who claims them where each tenant has so many to give: all, unless it is over its share and stays
    /// so when it has given what it has itself. Then it gets what others have beyond their shares.
    fn given(&self, tier: usize, usable: u32, claim: Claim, has: impl Fn(Number) -> u32) -> usize {
        let excess = |number: Number| self.excess(number, tier, usable);
        let stays_over = claim.map(usize::from).is_some_and(|claim| excess(claim) > i64::from(has(claim)));
        let gives = |number: Number| match i64::from(has(number)) {
            all if stays_over => excess(number).clamp(0, all) as usize,
            all => all as usize,
        };
        (0..self.all.len()).map(gives).sum()
    }

    /// So many blocks of a tenant were evicted.
    fn count_evicted(&mut self, number: Number, tier: usize, blocks: u64) {
        self.all[number].on[tier].evicted += blocks;
    }

    /// Who gives a block: the one that is furthest over its share, of those whose bit in `tried` is not set. Whoever is over its own share takes
    /// from nobody who is not.
    fn giver(&self, tier: usize, usable: u32, claim: Claim, tried: u64) -> Option<Number> {
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

    /// How many blocks a namespace's tenant may pin on a tier at most, and how many it has; none where there are no tenants.
    pub(crate) fn pins(&self, tier: usize, usable: u32, namespace: NamespaceId) -> Option<(u32, u32)> {
        self.are_configured().then(|| {
            let number = self.number_of(namespace);
            (RegistryConfig::most_pinned(self.limit(number, usable)), self.all[number].on[tier].pinned)
        })
    }

    pub(crate) fn status(&self, tier: usize, usable: u32) -> Vec<TenantStatus> {
        let of = |(number, tenant): (usize, &Tenant)| {
            let On { blocks, held, evicted, .. } = tenant.on[tier];
            let id = number.checked_sub(1).map(|at| TenantId(at as u8));
            let limit = self.limit(number, usable);
            TenantStatus { tenant: id, share: tenant.share, limit, blocks, held, evicted }
        };
        self.all.iter().enumerate().map(of).collect()
    }
}

const _: () = assert!(RegistryConfig::MAX_TENANTS < u64::BITS as usize, "one bit each, and one for nobody");

impl Store {
    /// For whom slots are allocated that blocks of a namespace will be in.
    pub(crate) fn claim_of(&self, namespace: NamespaceId) -> Claim {
        if !self.has_tenants {
            return None;
        }
        self.lock(0).first().tenants.claim_of(namespace)
    }

    /// Held slots that were allocated for somebody are free again.
    pub(crate) fn give_back_for(&self, tier: usize, claim: Claim, blocks: &[BlockId]) {
        // Until they are free: nobody sees them neither held nor free.
        let mut core = claim.map(|_| self.lock(0));
        if let Some(core) = &mut core {
            core.first_mut().tenants.let_go(tier, claim, blocks.len());
        }
        self.give_back(tier, blocks);
    }
}

impl Core<'_> {
    /// The set of the slot of an entry on a tier.
    #[inline]
    pub(crate) fn set_of(&self, index: u32, tier: usize) -> SlotSet {
        let tenant = self.first().tenants.number_of(self.store.entries[index].namespace());
        SlotSet { tier, tenant }
    }

    /// Slots of a tier that blocks can be in.
    pub(crate) fn usable(&self, tier: usize) -> u32 {
        self.store.slots[tier].len() as u32 - self.store.free[tier].lock().quarantined
    }

    /// Whether `n` blocks more would be over the share of who claims them.
    pub(crate) fn is_over_share(&self, tier: usize, claim: Claim, n: usize) -> bool {
        let excess = |number: u8| self.first().tenants.excess(usize::from(number), tier, self.usable(tier));
        let n = i64::try_from(n).unwrap_or(i64::MAX);
        claim.is_some_and(|number| excess(number).saturating_add(n) > 0)
    }

    /// The blocks of each tenant, in their order, with who claims slots for them.
    pub(crate) fn by_tenant<'a>(
        &self,
        blocks: &'a [BlockIdentity],
    ) -> Vec<(Claim, Cow<'a, [BlockIdentity]>)> {
        let tenants = &self.first().tenants;
        let claim_of = |identity: &BlockIdentity| tenants.claim_of(identity.namespace);
        let Some(first) = blocks.first().map(claim_of) else { return Vec::new() };
        if blocks.iter().all(|identity| claim_of(identity) == first) {
            return vec![(first, Cow::Borrowed(blocks))];
        }
        let claims: BTreeSet<Claim> = blocks.iter().map(claim_of).collect();
        let part = |claim| blocks.iter().filter(|&identity| claim_of(identity) == claim).copied().collect();
        claims.into_iter().map(|claim| (claim, Cow::Owned(part(claim)))).collect()
    }

    /// Slots that were allocated for nobody in particular, or somebody else, are for blocks of a namespace.
    pub(crate) fn claim_for(&mut self, tier: usize, claim: &mut Claim, namespace: NamespaceId, n: usize) {
        let tenants = &mut self.first_mut().tenants;
        tenants.let_go(tier, *claim, n);
        *claim = tenants.claim_of(namespace);
        tenants.hold(tier, *claim, n);
    }

    /// Makes a namespace a tenant's, with the blocks that it has. Takes time in proportion to the tiers, unless it is the tenant's
    /// already.
    pub(crate) fn assign(&mut self, namespace: NamespaceId, tenant: TenantId) -> Result<(), TenantError> {
        let number = self.first().tenants.number(tenant)? as u8;
        let of = &self.first().tenants.of;
        let at = of.binary_search_by_key(&namespace, |&(known, _)| known);
        if at.is_ok_and(|at| of[at].1 == number) {
            return Ok(());
        }
        let Store { slots, entries, keeps, .. } = self.store;
        let is_its = |index: u32| entries[index].namespace() == namespace;
        let is_idle = |tier: usize, slot: u32| {
            let state = &slots[tier][slot as usize];
            state.usage() == Usage::Registered && state.refs() == 0
        };
        let theirs: Vec<(usize, u32)> = (0..TIERS)
            .flat_map(|tier| (0..slots[tier].len() as u32).map(move |slot| (tier, slot)))
            .filter(|&(tier, slot)| {
                let index = slots[tier][slot as usize].entry.get();
                index != NONE && is_its(index)
            })
            .collect();
        for &(tier, slot) in &theirs {
            if slots[tier][slot as usize].is_listed() {
                self.unlist(tier, slot);
            }
            self.first_mut().tenants.count(tier, namespace, false);
            if is_idle(tier, slot) {
                self.first_mut().tenants.count_idle(tier, namespace, false);
            }
        }
        let pins = keeps.lock().of(is_its);
        let tenants = &mut self.first_mut().tenants;
        tenants.count_pins(namespace, pins, false);
        match at {
            Ok(at) => tenants.of[at].1 = number,
            Err(at) => tenants.of.insert(at, (namespace, number)),
        }
        tenants.count_pins(namespace, pins, true);
        for &(tier, slot) in &theirs {
            self.first_mut().tenants.count(tier, namespace, true);
            if is_idle(tier, slot) {
                self.first_mut().tenants.count_idle(tier, namespace, true);
            }
            self.update_evictable(slots[tier][slot as usize].entry.get(), tier);
        }
        self.first_mut().tiers.iter_mut().for_each(|tier| tier.order.look_again());
        Ok(())
    }

    /// A slot of a tier has an entry's block now, or has it no more.
    #[inline]
    pub(crate) fn count_for_tenant(&mut self, index: u32, tier: usize, there: bool) {
        if self.store.has_tenants {
            let namespace = self.store.entries[index].namespace();
            self.first_mut().tenants.count(tier, namespace, there);
        }
    }

    /// A registered slot of an entry has no users any more, or has some now, or goes.
    #[inline]
    pub(crate) fn count_idle_for_tenant(&mut self, index: u32, tier: usize, more: bool) {
        if self.store.has_tenants {
            let namespace = self.store.entries[index].namespace();
            self.first_mut().tenants.count_idle(tier, namespace, more);
        }
    }
}
