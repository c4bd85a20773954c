//! What each tenant has of the tiers, beside its share.

use super::counters::{Counter, Gauge};
use super::expose::{Labels, counter_value};
use kvbm_plan::Tier;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use std::fmt;

/// The label of blocks that are no tenant's. No tenant has such a name.
pub const NO_TENANT: &str = "(none)";

/// Metrics of one tenant.
#[derive(Debug, Default)]
pub struct TenantMetrics {
    name: String,
    /// Its share of every tier, in millionths.
    pub share_millionths: Gauge,
    tiers: [TenantTierMetrics; Tier::SLOTTED.len()],
}

/// Metrics of one tenant on one tier.
#[derive(Debug, Default)]
pub struct TenantTierMetrics {
    /// The share in blocks.
    pub limit: Gauge,
    /// Its blocks that are there, and on their way.
    pub blocks: Gauge,
    /// Slots that are held for blocks of its that are not registered yet.
    pub held: Gauge,
    /// Its blocks that left because their slot was needed.
    pub evicted: Counter,
    /// Blocks that its requests asked for and were refused, because it was over its share with
    /// them.
    pub refused: Counter,
}

impl TenantMetrics {
    pub(super) fn new(name: String) -> Self {
        Self { name, ..Self::default() }
    }

    /// Its name, or [`NO_TENANT`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it has on G1, G2 or G3; of another tier, what it has on G3.
    pub fn tier(&self, tier: Tier) -> &TenantTierMetrics {
        &self.tiers[tier.index().min(Tier::SLOTTED.len() - 1)]
    }
}

/// Nothing where no tenants have shares.
pub(super) fn encode(tenants: &[TenantMetrics], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    type Read = fn(&TenantTierMetrics) -> u64;
    if tenants.is_empty() {
        return Ok(());
    }
    let help = "Share of every tier that is kept for the tenant";
    let mut metric = encoder.encode_descriptor("tenant_share", help, None, MetricType::Gauge)?;
    for tenant in tenants {
        let labels: Labels<'_> = &[("tenant", tenant.name())];
        let share = tenant.share_millionths.get() as f64 / 1e6;
        metric.encode_family(&labels)?.encode_gauge(&share)?;
    }
    let gauges: [(&str, &str, Read); 3] = [
        ("tenant_limit_blocks", "The tenant's share of the tier in blocks", |on| on.limit.get()),
        ("tenant_blocks", "Blocks of the tenant that are on the tier or on their way there", |on| {
            on.blocks.get()
        }),
        (
            "tenant_held_blocks",
            "Slots that are held for the tenant's blocks before they are registered",
            |on| on.held.get(),
        ),
    ];
    let counters: [(&str, &str, Read); 2] = [
        (
            "tenant_evicted_blocks",
            "Blocks of the tenant that left the tier because their slot was needed",
            |on| on.evicted.get(),
        ),
        (
            "tenant_refused_blocks",
            "Blocks that the tenant's requests were refused because it was over its share",
            |on| on.refused.get(),
        ),
    ];
    let gauges = gauges.map(|figure| (figure, MetricType::Gauge));
    for ((name, help, read), kind) in
        gauges.into_iter().chain(counters.map(|figure| (figure, MetricType::Counter)))
    {
        let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
        for tenant in tenants {
            for tier in Tier::SLOTTED {
                let labels: Labels<'_> = &[("tenant", tenant.name()), ("tier", tier.as_str())];
                let (mut one, value) = (metric.encode_family(&labels)?, read(tenant.tier(tier)));
                match kind {
                    MetricType::Counter => counter_value(&mut one, value)?,
                    _ => one.encode_gauge(&value)?,
                }
            }
        }
    }
    Ok(())
}
