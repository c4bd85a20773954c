//! Lookups over all cache groups.

use super::Registry;
use crate::core::match_groups::{FoundOutside, GroupPart, match_groups};
use crate::found::PrefixBlock;
use crate::prefix::Prefix;
use crate::sync::Arc;
use crate::tier::TierMask;
use kvbm_plan::{GroupId, NamespaceId};
use kvbm_tokens::{BlockChain, ChainOrigin};

impl Registry {
    /// The longest prefix that every cache group can serve from `tiers` and what is known of places
    /// `outside`, in one look. Each group has its part, all of one length, with the blocks that the
    /// group needs pinned. A part has blocks of one such place at most; they are listed as on
    /// [`Tier::G4`](kvbm_plan::Tier::G4) and not pinned. A chain that need not begin with the first
    /// block of a sequence, as with [`match_chain`](Self::match_chain): where a group disagrees
    /// about it, all parts are empty.
    pub fn match_groups(
        &self,
        chain: BlockChain<'_>,
        tiers: TierMask,
        outside: &[FoundOutside],
    ) -> Vec<Prefix> {
        let losses = self.losses();
        let hashes = chain.hashes();
        let mut hold = self.shared.store.lock();
        let mut blocks = vec![Vec::new(); hold.entries.groups().len()];
        let found = match_groups(&mut hold, hashes, tiers, outside, |group, block| blocks[group].push(block));
        drop(hold);
        let part = |((group, GroupPart { found, outside }), blocks): ((usize, _), Vec<PrefixBlock>)| Prefix {
            shared: Arc::clone(&self.shared),
            // Those outside are of the namespace that was asked for.
            namespace: outside.map_or(found.namespace, |_| NamespaceId::from(chain.namespace())),
            group: GroupId(group as u16),
            hashes: hashes.to_vec(),
            origin: ChainOrigin::Root,
            start: found.start as u32,
            losses,
            blocks,
            arriving: Vec::new(),
            outside,
        };
        let mut parts: Vec<_> = found.into_iter().enumerate().zip(blocks).map(part).collect();
        let agrees = |part: &mut Prefix| chain.origin() == ChainOrigin::Root || part.begin_at(chain.origin());
        if !parts.iter_mut().all(agrees) {
            for part in &mut parts {
                part.truncate(0);
            }
        }
        parts
    }
}
