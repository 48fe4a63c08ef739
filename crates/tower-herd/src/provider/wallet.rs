//! A process's part of a rate that the fleet shares: chunks that were taken out of one bucket, each for a while.

use crate::Time;

/// What may be spent, and what is owed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wallet {
    /// The chunk that came last, and until when it is good.
    last: (u64, Time),
    /// What is left of those before it, until the first of them is not.
    rest: (u64, Time),
    /// Spent, but never had: paid before anything else is bought.
    owed: u64,
}

impl Wallet {
    pub(super) fn holds(&self, now: Time) -> u64 {
        let valid = |(amount, until): (u64, Time)| if now < until { amount } else { 0 };
        valid(self.last).saturating_add(valid(self.rest))
    }

    pub(super) fn owes(&self) -> u64 {
        self.owed
    }

    pub(super) fn affords(&self, now: Time, cost: u64) -> bool {
        self.owed == 0 && self.holds(now) >= cost
    }

    /// A chunk came.
    pub(super) fn fill(&mut self, now: Time, amount: u64, until: Time) {
        let amount = self.repay(amount);
        let before = [self.rest, self.last].into_iter().filter(|(amount, until)| *amount > 0 && now < *until);
        self.rest = before.reduce(|a, b| (a.0.saturating_add(b.0), a.1.min(b.1))).unwrap_or_default();
        self.last = (amount, until);
    }

    /// What goes first is what is good for the shortest time.
    pub(super) fn take(&mut self, now: Time, cost: u64) {
        let mut due = cost;
        for (amount, until) in [&mut self.rest, &mut self.last] {
            if now < *until {
                let part = due.min(*amount);
                *amount -= part;
                due -= part;
            }
        }
        self.owed = self.owed.saturating_add(due);
    }

    /// However much was spent.
    pub(super) fn owe_at_most(&mut self, most: u64) {
        self.owed = self.owed.min(most);
    }

    /// What was not used after all. It is no longer good than the chunk that came last.
    pub(super) fn give_back(&mut self, amount: u64) {
        let amount = self.repay(amount);
        self.last.0 = self.last.0.saturating_add(amount);
    }

    /// Takes out of the last chunk what it holds beyond `keep`.
    pub(super) fn surplus(&mut self, now: Time, keep: u64) -> u64 {
        let beyond = self.holds(now).saturating_sub(keep);
        let surplus = if now < self.last.1 { beyond.min(self.last.0) } else { 0 };
        self.last.0 -= surplus;
        surplus
    }

    fn repay(&mut self, amount: u64) -> u64 {
        let paid = amount.min(self.owed);
        self.owed -= paid;
        amount - paid
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn a_debt_is_paid_first_and_nothing_outlives_its_chunk() {
        let mut wallet = Wallet::default();
        assert!(!wallet.affords(at(0), 1));
        wallet.take(at(0), 5);
        wallet.fill(at(0), 8, at(2000));
        assert_eq!((wallet.holds(at(0)), wallet.owes()), (3, 0));
        wallet.fill(at(1000), 10, at(3000));
        assert_eq!([wallet.holds(at(1999)), wallet.holds(at(2000)), wallet.holds(at(3000))], [13, 10, 0]);
        wallet.take(at(1999), 4);
        assert_eq!(wallet.holds(at(2000)), 9, "the older chunk went first");
        assert_eq!((wallet.surplus(at(2000), 2), wallet.holds(at(2000))), (7, 2));
    }

    proptest! {
        /// What is spent and not owed never exceeds what came, less what went back.
        #[test]
        fn nothing_is_spent_that_was_not_given(steps in prop::collection::vec((0u64..500, 0u8..4, 0u64..50), 1..100)) {
            let (mut wallet, mut now, mut came, mut spent) = (Wallet::default(), 0, 0u64, 0u64);
            for (passed, what, amount) in steps {
                now += passed;
                match what {
                    0 => {
                        wallet.fill(at(now), amount, at(now + 1000));
                        came += amount;
                    }
                    1 if wallet.affords(at(now), amount) => {
                        wallet.take(at(now), amount);
                        spent += amount;
                    }
                    2 => {
                        wallet.take(at(now), amount);
                        spent += amount;
                    }
                    _ => came -= wallet.surplus(at(now), amount),
                }
                prop_assert!(spent <= came + wallet.owes());
            }
        }
    }
}
