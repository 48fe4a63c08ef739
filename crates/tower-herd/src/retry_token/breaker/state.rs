//! What a dependency's token says, and what a failure makes of it: pure, without time and without a store.
//!
//! The breaker of a fleet is one token. Its streak counts failures in a row: each failure is a grant of a short
//! wait, and a success clears it. Below the threshold it is closed, whatever its wait. From the threshold on it is open
//! while its wait lasts, and half open after it; then one claim is granted, which is the probe.

use crate::retry_token::{Claim, HolderId, Token};
use std::time::Duration;

/// What a token says to a job that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It may run. If there were failures: whose token its success is to clear.
    Closed(Option<HolderId>),
    /// It must wait.
    Open(Duration),
    /// It may ask to be the probe.
    HalfOpen,
}

/// Reads a token.
#[must_use]
pub fn seen(token: Option<&Token>, threshold: u32) -> Seen {
    match token {
        None => Seen::Closed(None),
        Some(token) if token.streak < threshold => Seen::Closed(Some(token.holder)),
        Some(token) if token.wait.is_zero() => Seen::HalfOpen,
        Some(token) => Seen::Open(token.wait),
    }
}

/// What to do about a failure whose claim was answered so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// It is counted.
    Counted,
    /// It is counted, and opens the breaker: extend it for this holder. `first`: nobody was before; tell.
    Opens(HolderId, bool),
    /// Another failure is being counted at this instant: claim again after this.
    Again(Duration),
    /// It is open already: this run began before.
    Late,
}

/// Reads the answer to the claim of a failure.
#[must_use]
pub fn failed(claim: &Claim, threshold: u32) -> Failed {
    match claim {
        Claim::Granted(grant) if grant.streak >= threshold => {
            Failed::Opens(grant.holder, grant.streak == threshold)
        }
        Claim::Granted(_) => Failed::Counted,
        Claim::NotBefore(wait) if wait.streak >= threshold => Failed::Late,
        Claim::NotBefore(wait) => Failed::Again(wait.wait),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retry_token::{Grant, Wait, WaitCause};
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A token store for one key, in whole seconds.
    #[derive(Default)]
    struct Model {
        now: u64,
        token: Option<(u64, u32, u64)>,
        holders: u64,
    }

    impl Model {
        fn peek(&self) -> Option<Token> {
            self.token.map(|(not_before, streak, holder)| Token {
                holder: holder.into(),
                wait: SECOND * u32::try_from(not_before.saturating_sub(self.now)).unwrap(),
                streak,
            })
        }
        fn claim(&mut self, window: u64) -> Claim {
            match self.token {
                Some((not_before, streak, _)) if not_before > self.now => {
                    let wait = SECOND * u32::try_from(not_before - self.now).unwrap();
                    Claim::NotBefore(Wait { wait, streak, cause: WaitCause::Token })
                }
                old => {
                    self.holders += 1;
                    let streak = old.map_or(0, |(_, streak, _)| streak) + 1;
                    self.token = Some((self.now + window, streak, self.holders));
                    Claim::Granted(Grant { holder: self.holders.into(), next_in: SECOND, streak })
                }
            }
        }
        fn extend(&mut self, holder: HolderId, by: u64) {
            if let Some((not_before, _, held)) = &mut self.token
                && *held == holder.get()
            {
                *not_before = (*not_before).max(self.now + by);
            }
        }
        fn clear(&mut self, holder: HolderId) {
            if self.token.is_some_and(|(.., held)| held == holder.get()) {
                self.token = None;
            }
        }
    }

    const OPEN: u64 = 600;
    const PROBE: u64 = 30;

    proptest! {
        /// Runs one after the other, of any process: it opens after exactly so many failures in a row, tells once, and
        /// lets one probe through.
        #[test]
        fn it_opens_after_exactly_so_many_failures_in_a_row(
            threshold in 1_u32..8, steps in prop::collection::vec((any::<bool>(), 1_u64..700), 1..200),
        ) {
            let mut model = Model::default();
            let (mut row, mut open_until, mut alerts, mut openings) = (0, None::<u64>, 0, 0);
            for (succeeds, pause) in steps {
                let seen = seen(model.peek().as_ref(), threshold);
                match (seen, open_until) {
                    (Seen::Closed(failures), None) => {
                        prop_assert_eq!(failures.is_some(), row > 0);
                        if succeeds {
                            if let Some(holder) = failures { model.clear(holder); }
                            row = 0;
                        } else {
                            row += 1;
                            match failed(&model.claim(1), threshold) {
                                Failed::Counted => prop_assert!(row < threshold),
                                Failed::Opens(holder, first) => {
                                    prop_assert_eq!(row, threshold);
                                    prop_assert!(first);
                                    alerts += 1;
                                    openings += 1;
                                    model.extend(holder, OPEN);
                                    open_until = Some(model.now + OPEN);
                                }
                                other => prop_assert!(false, "{:?}", other),
                            }
                        }
                    }
                    (Seen::Open(wait), Some(until)) => {
                        prop_assert_eq!(wait.as_secs(), until - model.now);
                        // A run that began before it opened.
                        prop_assert_eq!(failed(&model.claim(1), threshold), Failed::Late);
                    }
                    (Seen::HalfOpen, Some(until)) => {
                        prop_assert!(model.now >= until);
                        let Claim::Granted(probe) = model.claim(PROBE) else { panic!("nobody probes") };
                        prop_assert!(matches!(model.claim(PROBE), Claim::NotBefore(_)), "one probe");
                        if succeeds {
                            model.clear(probe.holder);
                            (row, open_until) = (0, None);
                        } else {
                            model.extend(probe.holder, OPEN);
                            open_until = Some(model.now + OPEN);
                        }
                    }
                    other => prop_assert!(false, "{:?}", other),
                }
                model.now += pause;
            }
            prop_assert_eq!(alerts, openings);
        }
    }

    #[test]
    fn two_that_trip_it_at_once_tell_once() {
        let granted = |streak| Claim::Granted(Grant { holder: 7.into(), next_in: SECOND, streak });
        assert_eq!(failed(&granted(4), 5), Failed::Counted);
        assert_eq!(failed(&granted(5), 5), Failed::Opens(7.into(), true));
        assert_eq!(failed(&granted(6), 5), Failed::Opens(7.into(), false));
        let refused = |streak| Claim::NotBefore(Wait { wait: SECOND, streak, cause: WaitCause::Token });
        assert_eq!(failed(&refused(4), 5), Failed::Again(SECOND));
        assert_eq!(failed(&refused(5), 5), Failed::Late);
    }
}
