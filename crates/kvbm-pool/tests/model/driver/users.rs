//! Users come and go: matches, clones, drops.

use super::Driver;
use crate::oracle::Pin;
use kvbm_pool::{G1, G2, G3, Pinned, Prefix};

impl Driver {
    pub(super) fn match_prefix(&mut self) {
        if self.prefixes.len() > 4 {
            return self.drop_prefix();
        }
        let path = self.any_path();
        let (start, expected) = self.oracle.longest_prefix(&path, &[0, 1, 2]);
        let hashes = self.hashes(&path);
        let prefix = self.registry.match_prefix(self.group(&path), &hashes);
        let found: Vec<(usize, u32)> =
            prefix.blocks().iter().map(|block| (block.tier.index(), block.block.0)).collect();
        assert_eq!(found, expected);
        if !expected.is_empty() {
            assert_eq!(prefix.start(), start);
        }
        for (index, identity) in prefix.identities().into_iter().enumerate() {
            assert_eq!(identity, self.oracle.universe[path[start + index]]);
        }
        for arriving in prefix.arriving() {
            let (_, ticket) = self.oracle.tiers[arriving.tier.index()].arriving[&path[arriving.index]];
            assert_eq!(arriving.ticket, ticket);
        }
        for &(tier, slot) in &expected {
            self.oracle.pin(tier, slot, Pin::Use);
        }
        if self.rng.below(3) > 0 {
            self.prefixes.push(prefix);
            return;
        }
        let parts = prefix.into_parts();
        for part in [parts.g1.erase(), parts.g2.erase(), parts.g3.erase()] {
            self.pinned.push((part, Pin::Use));
        }
    }

    pub(super) fn unpin_prefix(&mut self, prefix: Prefix) {
        for block in prefix.blocks().iter().rev() {
            self.oracle.unpin(block.tier.index(), block.block.0, Pin::Use);
        }
        drop(prefix);
    }

    pub(super) fn drop_prefix(&mut self) {
        if self.prefixes.is_empty() {
            return;
        }
        let index = self.rng.below(self.prefixes.len());
        let mut prefix = self.prefixes.swap_remove(index);
        let tail = prefix.split_off(self.rng.below(prefix.len() + 1));
        self.unpin_prefix(tail);
        if self.rng.below(2) == 0 {
            self.prefixes.push(prefix);
        } else {
            self.unpin_prefix(prefix);
        }
    }

    pub(super) fn match_tier(&mut self) {
        let path = self.any_path();
        let tier = self.rng.below(3);
        let (_, expected) = self.oracle.longest_prefix(&path, &[tier]);
        let (group, hashes) = (self.group(&path), self.hashes(&path));
        let pinned = match tier {
            0 => self.registry.pool::<G1>().match_sequence_hashes(group, &hashes).erase(),
            1 => self.registry.pool::<G2>().match_sequence_hashes(group, &hashes).erase(),
            _ => self.registry.pool::<G3>().match_sequence_hashes(group, &hashes).erase(),
        };
        let found: Vec<(usize, u32)> = pinned.block_ids().iter().map(|block| (tier, block.0)).collect();
        assert_eq!(found, expected);
        for &(tier, slot) in &expected {
            self.oracle.pin(tier, slot, Pin::Use);
        }
        self.pinned.push((pinned, Pin::Use));
    }

    pub(super) fn unpin(&mut self, pinned: Pinned, pin: Pin) {
        for block in pinned.block_ids().iter().rev() {
            self.oracle.unpin(pinned.tier().index(), block.0, pin);
        }
        drop(pinned);
    }

    pub(super) fn change_pinned(&mut self) {
        if self.pinned.is_empty() {
            return;
        }
        let index = self.rng.below(self.pinned.len());
        let (mut pinned, pin) = self.pinned.swap_remove(index);
        let tier = pinned.tier().index();
        let many = self.pinned.len() > 5;
        match if many { 9 } else { self.rng.below(10) } {
            0 => {
                for block in pinned.block_ids() {
                    self.oracle.pin(tier, block.0, pin);
                }
                self.pinned.push((pinned.clone(), pin));
                self.pinned.push((pinned, pin));
            }
            1 => {
                let tail = pinned.split_off(self.rng.below(pinned.len() + 1));
                self.unpin(tail, pin);
                self.pinned.push((pinned, pin));
            }
            2 => {
                let count = pinned.len() as u64;
                let counts = &mut self.oracle.tiers[tier].transfer_pins;
                if pin == Pin::Use {
                    *counts += count;
                    self.pinned.push((pinned.into_transfer(), Pin::Transfer));
                } else {
                    *counts -= count;
                    self.pinned.push((pinned.into_use(), Pin::Use));
                }
            }
            _ => self.unpin(pinned, pin),
        }
    }
}
