//! Slots: one for each block id of a tier.

use crate::entry::NONE;
use std::cell::Cell;

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Usage {
    /// In the free list.
    Free = 0,
    /// In an exclusive batch: Reset, Partial or Complete.
    Held = 1,
    /// Destination of a transfer; its entry is Arriving here.
    Arriving = 2,
    /// Destination of a transfer whose block was removed, or registered by another, meanwhile.
    Cancelled = 3,
    /// Registered: the primary slot of its entry, or a duplicate on the primary's list.
    Registered = 4,
    /// Removed while in use: invisible, back to `Free` after the last user.
    Detached = 5,
    /// Removed while in use because its bytes are bad: never used again after the last user.
    Tainted = 6,
    /// Never used again.
    Quarantined = 7,
}

const USAGES: [Usage; 8] = [
    Usage::Free,
    Usage::Held,
    Usage::Arriving,
    Usage::Cancelled,
    Usage::Registered,
    Usage::Detached,
    Usage::Tainted,
    Usage::Quarantined,
];

const REF_BITS: u32 = 28;
const MAX_REFS: u32 = (1 << REF_BITS) - 1;
const LISTED: u32 = 1 << 31;

/// What the registry knows of one block id on its tier.
#[repr(C)]
pub(crate) struct Slot {
    /// Entry of the block in it, or `NONE`.
    pub entry: Cell<u32>,
    /// Listed (1 bit), usage (3 bits) and 28 bits of references. A listed slot has no references:
    /// the bits are its number in the policy's list. Those of an Arriving slot are the rest of the
    /// ticket.
    word: Cell<u32>,
    /// The only valid position of the slot in the eviction order, or `NONE`.
    pub order_position: Cell<u32>,
    /// Free, or retired in the list of free slots: next in the list. Registered: next duplicate.
    /// Arriving: part of the ticket.
    pub link: Cell<u32>,
}

const _: () = assert!(size_of::<Slot>() == 16);

impl Slot {
    pub(crate) const fn new() -> Self {
        Self {
            entry: Cell::new(NONE),
            word: Cell::new(0),
            order_position: Cell::new(NONE),
            link: Cell::new(NONE),
        }
    }

    /// That many new slots.
    pub(crate) fn many(count: usize) -> Box<[Self]> {
        (0..count).map(|_| Self::new()).collect()
    }

    /// As new, for `usage`.
    #[inline]
    pub(crate) fn reset(&self, usage: Usage) {
        self.entry.set(NONE);
        self.word.set((usage as u32) << REF_BITS);
        self.order_position.set(NONE);
        self.link.set(NONE);
    }

    /// A Held slot has the block of an entry now, with one reference.
    #[inline]
    pub(crate) fn register(&self, entry: u32) {
        debug_assert!(
            self.word.get() == (Usage::Held as u32) << REF_BITS,
            "what is in a slot was reset with it"
        );
        debug_assert!(self.link.get() == NONE && self.order_position.get() == NONE);
        self.entry.set(entry);
        self.word.set((Usage::Registered as u32) << REF_BITS | 1);
    }

    #[inline]
    pub(crate) fn usage(&self) -> Usage {
        USAGES[(self.word.get() >> REF_BITS & 7) as usize]
    }

    /// Changes the usage; the rest stays.
    #[inline]
    pub(crate) fn set_usage(&self, usage: Usage) {
        self.word.set(self.word.get() & (MAX_REFS | LISTED) | (usage as u32) << REF_BITS);
    }

    /// Whether the eviction policy counts the slot as evictable.
    #[inline]
    pub(crate) fn is_listed(&self) -> bool {
        self.word.get() & LISTED != 0
    }

    /// Only a slot without references is listed.
    #[inline]
    pub(crate) fn set_listed(&self, listed: bool) {
        debug_assert_eq!(self.refs(), 0, "a slot in use is not evictable");
        self.word.set(self.word.get() & !(LISTED | MAX_REFS) | if listed { LISTED | MAX_REFS } else { 0 });
    }

    /// The policy's number of a listed slot.
    #[inline]
    pub(crate) fn number(&self) -> Option<u32> {
        let word = self.word.get();
        Some(word & MAX_REFS).filter(|&number| word & LISTED != 0 && number != MAX_REFS)
    }

    /// Sets or clears the policy's number of a listed slot; of others nothing changes.
    #[inline]
    pub(crate) fn set_number(&self, number: Option<u32>) {
        let word = self.word.get();
        if word & LISTED != 0 {
            self.word.set(word & !MAX_REFS | number.unwrap_or(MAX_REFS) & MAX_REFS);
        }
    }

    #[inline]
    pub(crate) fn refs(&self) -> u32 {
        refs_of(self.word.get())
    }

    /// One reference more. A count that reaches its maximum stays there: the block is then pinned
    /// for ever, which is safe, where a wrapped count would free it under its users.
    #[inline]
    pub(crate) fn add_ref(&self) {
        let word = self.word.get();
        debug_assert!(word & LISTED == 0, "a listed slot is taken off the policy's list first");
        if refs_of(word) < MAX_REFS {
            self.word.set(word + 1);
        }
    }

    /// One reference more, if there are some already: then nothing else changes. False, and nothing
    /// happens, where there is none, or as many as can be.
    #[inline]
    pub(crate) fn add_another_ref(&self) -> bool {
        let word = self.word.get();
        // A listed slot has more in these bits than any count.
        let has_some = (word & (LISTED | MAX_REFS)).wrapping_sub(1) < MAX_REFS - 1;
        if has_some {
            self.word.set(word + 1);
        }
        has_some
    }

    /// One reference less; says how many are left.
    #[inline]
    pub(crate) fn drop_ref(&self) -> u32 {
        let word = self.word.get();
        match refs_of(word) {
            refs @ (0 | MAX_REFS) => refs,
            refs => {
                self.word.set(word - 1);
                refs - 1
            }
        }
    }

    /// An Arriving slot has no users and no duplicates: those bits carry its ticket. (Not
    /// `order_position`: a stale position in the eviction order must not meet a number that looks
    /// like it.)
    pub(crate) fn set_ticket(&self, ticket: u64) {
        self.word.set(self.word.get() & !MAX_REFS | (ticket >> 32) as u32 & MAX_REFS);
        self.link.set(ticket as u32);
    }

    pub(crate) fn ticket(&self) -> u64 {
        u64::from(self.refs()) << 32 | u64::from(self.link.get())
    }

    /// The ticket is not needed any more: no users, no duplicates.
    pub(crate) fn clear_ticket(&self) {
        self.word.set(self.word.get() & !MAX_REFS);
        self.link.set(NONE);
    }
}

/// References in a word; a listed slot has none.
#[inline]
const fn refs_of(word: u32) -> u32 {
    if word & LISTED == 0 { word & MAX_REFS } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_and_references_do_not_disturb_each_other() {
        let slot = Slot::new();
        for usage in USAGES {
            slot.set_usage(usage);
            slot.add_ref();
            assert_eq!(slot.usage(), usage);
        }
        assert_eq!(slot.refs(), USAGES.len() as u32);
        for left in (0..USAGES.len() as u32).rev() {
            assert_eq!(slot.drop_ref(), left);
        }
        assert_eq!(slot.drop_ref(), 0, "a count never goes below zero");
        assert_eq!(slot.usage(), Usage::Quarantined);
    }

    #[test]
    fn saturated_references_stay() {
        let slot = Slot { word: Cell::new(MAX_REFS - 1), ..Slot::new() };
        assert!(slot.add_another_ref());
        assert!(!slot.add_another_ref());
        slot.add_ref();
        assert_eq!(slot.drop_ref(), MAX_REFS);
        assert_eq!(slot.usage(), Usage::Free);
    }

    #[test]
    fn another_reference_is_one_beside_others() {
        let slot = Slot::new();
        slot.set_usage(Usage::Registered);
        assert!(!slot.add_another_ref());
        slot.set_listed(true);
        slot.set_number(Some(7));
        assert!(!slot.add_another_ref());
        assert_eq!((slot.number(), slot.refs()), (Some(7), 0));
        slot.set_listed(false);
        slot.add_ref();
        assert!(slot.add_another_ref());
        assert_eq!((slot.refs(), slot.usage()), (2, Usage::Registered));
    }

    #[test]
    fn a_listed_slot_carries_a_number_instead_of_references() {
        let slot = Slot::new();
        slot.set_usage(Usage::Registered);
        slot.set_number(Some(7));
        assert_eq!((slot.number(), slot.refs()), (None, 0), "only listed slots have one");
        slot.set_listed(true);
        assert_eq!((slot.number(), slot.refs(), slot.usage()), (None, 0, Usage::Registered));
        slot.set_number(Some(MAX_REFS - 1));
        assert_eq!((slot.number(), slot.refs(), slot.usage()), (Some(MAX_REFS - 1), 0, Usage::Registered));
        slot.set_number(None);
        assert_eq!(slot.number(), None);
        slot.set_number(Some(9));
        slot.set_listed(false);
        slot.add_ref();
        assert_eq!((slot.number(), slot.refs()), (None, 1));
    }

    #[test]
    fn a_ticket_survives_its_two_halves() {
        let slot = Slot::new();
        slot.set_usage(Usage::Arriving);
        slot.set_ticket(0x0123_4567_89ab_cdef);
        assert_eq!(slot.ticket(), 0x0123_4567_89ab_cdef);
        assert_eq!((slot.usage(), slot.order_position.get()), (Usage::Arriving, NONE));
        slot.set_usage(Usage::Cancelled);
        assert_eq!(slot.ticket(), 0x0123_4567_89ab_cdef);
        slot.clear_ticket();
        assert_eq!((slot.usage(), slot.refs(), slot.link.get()), (Usage::Cancelled, 0, NONE));
    }
}
