use super::{Allowance, Amount, Reservation};
use crate::{
    Provider,
    provider::handover,
    usage::{Bill, sealed},
};
use std::fmt;

/// What was reserved for one call, in all allowances that it is charged to. Dropped before the call was sent
/// it is given back; after, it stays charged: it may have been billed.
pub struct Charge {
    parts: [Option<Reservation>; 3],
    amount: Amount,
    provider: usize,
    pub(super) sent: bool,
}

impl Charge {
    /// Reserves from all of them, or from none: then the words of the one that is used up.
    pub(super) fn reserve(
        provider: &Provider,
        from: [(Option<&Allowance>, &'static str); 3],
        amount: Amount,
    ) -> Result<Self, &'static str> {
        // Looked at first, so that hardly ever a reservation is made that has to be taken back: meanwhile it
        // would stand in the way of others.
        if let Some((_, why)) = from.iter().find(|(from, _)| from.is_some_and(|from| from.left() < amount)) {
            return Err(why);
        }
        let provider = handover::address(provider.core());
        let mut charge = Charge { parts: [None, None, None], amount, provider, sent: false };
        for (part, (from, why)) in charge.parts.iter_mut().zip(from) {
            if let Some(from) = from {
                *part = Some(from.reserve(amount).ok_or(why)?);
            }
        }
        Ok(charge)
    }

    /// After the call was made, or polled while it waited further in.
    #[inline]
    pub(super) fn called(&mut self) {
        self.sent = !handover::is_queued(self.provider);
    }

    /// Before it is polled while it waits further in.
    #[inline]
    pub(super) fn polling(&self) {
        handover::mark_queued(self.provider);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if !self.sent {
            self.parts.iter_mut().filter_map(Option::take).for_each(Reservation::refund);
        }
    }
}

impl sealed::Sealed for Charge {}

impl Bill<Amount> for Charge {
    fn settle(mut self, used: Amount) {
        self.sent = true;
        self.parts.iter_mut().filter_map(Option::take).for_each(|part| part.settle(used));
    }
    fn at_least(self, used: Amount) {
        let used = used.max(self.amount);
        self.settle(used);
    }
    fn refund(mut self) {
        self.sent = false;
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charge")
            .field("amount", &self.amount)
            .field("sent", &self.sent)
            .finish_non_exhaustive()
    }
}
