//! What was taken out of the budget for one repetition, and how the layers below hear of it.

use crate::{Executed, budget::Budget};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// One call that was taken out and may still be given back.
struct Open {
    budget: Arc<dyn Budget>,
    open: AtomicBool,
}

impl Open {
    fn refund(&self) {
        if self.open.swap(false, Ordering::Relaxed) {
            self.budget.refund();
        }
    }
}

/// A withdrawal: given back when dropped, unless the repetition was sent.
pub(crate) struct Withdrawal {
    open: Arc<Open>,
    pub(crate) sent: bool,
}

impl Withdrawal {
    pub(crate) fn try_new(budget: Arc<dyn Budget>) -> Option<Self> {
        let withdrawn = budget.try_withdraw();
        withdrawn.then(|| Withdrawal { open: Arc::new(Open { budget, open: true.into() }), sent: false })
    }
}

impl Drop for Withdrawal {
    fn drop(&mut self) {
        if !self.sent {
            self.open.refund();
        }
    }
}

/// What a repeated request tells the layers below: that it is one, and what it comes from.
///
/// On HTTP requests it is an extension; see [`HasTask::resent`](crate::HasTask::resent). A ladder
/// needs it: a [`Keyed`](crate::Safety::Keyed) write that may have been executed at one provider stays
/// there, and a repetition that goes to another one is no repetition there.
#[derive(Clone)]
pub struct Resent {
    attempt: u32,
    executed: Executed,
    provider: Option<Arc<str>>,
    open: Option<Arc<Open>>,
}

impl Resent {
    pub(crate) fn new(
        attempt: u32,
        executed: Executed,
        provider: Option<Arc<str>>,
        withdrawal: Option<&Withdrawal>,
    ) -> Self {
        Resent { attempt, executed, provider, open: withdrawal.map(|w| w.open.clone()) }
    }

    /// Which call of its request this is: 2 for the first repetition.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether an earlier call of it may have taken effect.
    #[must_use]
    pub fn executed(&self) -> Executed {
        self.executed
    }

    /// The provider whose reply made it be sent again, where the reply told.
    #[must_use]
    pub fn provider(&self) -> Option<&Arc<str>> {
        self.provider.as_ref()
    }

    /// To be called where the request is really sent: if that is another provider than the one whose
    /// budget was charged, the charge is given back (once).
    pub fn went_to(&self, provider: &str) {
        if let (Some(charged), Some(open)) = (&self.provider, &self.open)
            && **charged != *provider
        {
            open.refund();
        }
    }
}

impl fmt::Debug for Resent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resent")
            .field("attempt", &self.attempt)
            .field("executed", &self.executed)
            .field("provider", &self.provider)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::RatioBudget;

    #[tokio::test(start_paused = true)]
    async fn what_is_not_sent_comes_back() {
        let budget = RatioBudget::new(0.0);
        let handle: Arc<dyn Budget> = Arc::new(budget.clone());
        let first = Withdrawal::try_new(handle.clone()).unwrap();
        let mut second = Withdrawal::try_new(handle.clone()).unwrap();
        assert_eq!(budget.balance(), 1.0);
        drop(first);
        second.sent = true;
        drop(second);
        assert_eq!(budget.balance(), 2.0);
        let third = Withdrawal::try_new(handle.clone()).unwrap();
        let resent = Resent::new(2, Executed::Maybe, Some("a".into()), Some(&third));
        resent.went_to("a");
        assert_eq!(budget.balance(), 1.0);
        resent.went_to("b");
        resent.clone().went_to("c");
        drop(third);
        assert_eq!(budget.balance(), 2.0, "given back once");
    }
}
