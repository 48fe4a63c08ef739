//! What to do after a reply: pure, fed with what the reply says and how the task stands.
//!
//! The order of the questions matters: whether the request *may* be sent again comes before whether
//! it *can*, and the budget is asked last, so that nothing is taken out for a call that is not sent.

use super::{backoff, backoff::Range, config::RetryConfig};
use crate::{Kind, Pushback, ResendAdvice, Safety, Signal, random::Random};
use std::time::Duration;

/// What to do with the reply at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is the answer: a success, or nothing that sending again would change.
    Done,
    /// Send the request again after this time.
    Resend {
        /// How long to sleep before.
        wait: Duration,
        /// What it is charged to.
        cost: Cost,
    },
    /// It could be sent again and is not.
    GiveUp {
        /// What stands against it.
        why: Why,
        /// When asking again may help; none if never.
        retry_in: Option<Duration>,
    },
}

/// What a repetition is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// A wire call failed: the allowance, and the budget.
    Attempt,
    /// A 429, which is flow control, or a key in flight, which is no other call than the one that runs: only
    /// counted.
    Redelivery,
    /// A refusal of our own, nothing was sent: nothing.
    Free,
}

/// Why no more attempts are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// The allowance of the task, or of the layer, is used up.
    Attempts,
    /// It was delivered again after a 429, or asked for again while its key was in flight, too often.
    Redeliveries,
    /// The wait does not fit the deadline.
    Deadline,
    /// The budget has nothing left.
    Budget,
    /// Too many requests sleep already.
    Sleepers,
    /// The request could not be kept: a body that cannot be read twice, or outgrew its cap.
    Body,
    /// A layer of ours refused it for good.
    Refused,
}

impl Why {
    /// A short fixed name, for events.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Why::Attempts => "attempts",
            Why::Redeliveries => "redeliveries",
            Why::Deadline => "deadline",
            Why::Budget => "budget",
            Why::Sleepers => "sleepers",
            Why::Body => "body",
            Why::Refused => "refused",
        }
    }
}

/// What the reply says.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    /// Its signal.
    pub signal: Signal,
    /// Whether another retry layer has marked it as its last.
    pub exhausted: bool,
    /// For [`Kind::Refused`]: the time until the refusal ends; none if asking again is of no use.
    pub refused_for: Option<Duration>,
}

/// How the task stands.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// What the request may suffer.
    pub safety: Safety,
    /// Whether there is a copy to send.
    pub kept: bool,
    /// Failed calls charged to the task before this reply, by all layers.
    pub spent: u32,
    /// Calls of the task that may fail.
    pub allowance: u32,
    /// Re-deliveries of the task so far, by all layers.
    pub redelivered: u32,
    /// Time until its deadline.
    pub left: Duration,
    /// Whether one more may sleep.
    pub room: bool,
}

/// The memory of one request's session.
#[derive(Clone, Copy, Debug, Default)]
pub struct Session {
    /// Calls that got a reply of the provider, or an error in its place.
    calls: u32,
    failed: u32,
    redelivered: u32,
    /// Attempt number of the backoff: starts again after each pushback.
    n: u32,
    previous: Option<Duration>,
}

/// Tokio's timers fire up to this much late: a wait that ends closer to the deadline does not fit.
const TICK: Duration = Duration::from_millis(1);

impl Session {
    /// Replies so far, refusals of our own left out.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// Takes note of a reply and says what to do. `budget` is asked at most once, and only when
    /// nothing else stands against a repetition that has to be paid for.
    pub fn decide(
        &mut self,
        config: &RetryConfig,
        reply: &Reply,
        standing: &Standing,
        random: &mut Random,
        budget: impl FnOnce() -> bool,
    ) -> Decision {
        let signal = &reply.signal;
        if signal.kind == Kind::Refused {
            return Self::refused(config, reply, standing, random);
        }
        self.calls = self.calls.saturating_add(1);
        if reply.exhausted || !may_resend(config, signal, standing.safety) {
            return Decision::Done;
        }
        let is_free = signal.kind == Kind::Throttled || signal.resend == ResendAdvice::InProgress;
        let cost = if is_free { Cost::Redelivery } else { Cost::Attempt };
        let range = self.range(config, signal);
        let mut give_up = |why| {
            let retry_in = range.draw(Duration::MAX, random);
            Decision::GiveUp { why, retry_in }
        };
        match cost {
            Cost::Redelivery => {
                if self.redelivered.max(standing.redelivered) >= config.redeliveries {
                    return give_up(Why::Redeliveries);
                }
                self.redelivered = self.redelivered.saturating_add(1);
            }
            _ => {
                self.failed = self.failed.saturating_add(1);
                let failed = self.failed.max(standing.spent.saturating_add(1));
                if failed >= config.attempts.min(standing.allowance) {
                    return give_up(Why::Attempts);
                }
            }
        }
        if !standing.kept {
            return give_up(Why::Body);
        }
        if !standing.room {
            return give_up(Why::Sleepers);
        }
        if range.low.saturating_add(TICK) > standing.left {
            return give_up(Why::Deadline);
        }
        if cost == Cost::Attempt && !budget() {
            return give_up(Why::Budget);
        }
        let wait = range.draw(standing.left.saturating_sub(TICK), random).unwrap_or(range.low);
        self.waited(signal, wait);
        Decision::Resend { wait, cost }
    }

    fn refused(config: &RetryConfig, reply: &Reply, standing: &Standing, random: &mut Random) -> Decision {
        let Some(wait) = reply.refused_for else {
            return Decision::GiveUp { why: Why::Refused, retry_in: None };
        };
        // The gate that refused spreads the crowd itself; what is added here keeps those apart that
        // stand behind different gates, and keeps a refusal of no length from spinning.
        let low = wait.max(TICK);
        let range = Range { low, high: low.saturating_add(config.base) };
        let left = standing.left.saturating_sub(TICK);
        let why = match (standing.kept, standing.room) {
            (false, _) => Why::Body,
            (_, false) => Why::Sleepers,
            _ => match range.draw(left, random) {
                Some(wait) => return Decision::Resend { wait, cost: Cost::Free },
                None => Why::Deadline,
            },
        };
        Decision::GiveUp { why, retry_in: Some(wait) }
    }

    fn range(&self, config: &RetryConfig, signal: &Signal) -> Range {
        let base = if signal.kind == Kind::Throttled { config.throttled_base } else { config.base };
        match signal.pushback {
            Pushback::After(hint) => backoff::after_pushback(hint, backoff::bound(base, config.cap, self.n)),
            _ => config.backoff.range(base, config.cap, self.n, self.previous.unwrap_or(base)),
        }
    }

    fn waited(&mut self, signal: &Signal, wait: Duration) {
        let told = matches!(signal.pushback, Pushback::After(_));
        (self.n, self.previous) = if told { (0, None) } else { (self.n.saturating_add(1), Some(wait)) };
    }
}

fn is_repeatable(signal: &Signal) -> bool {
    match signal.kind {
        Kind::Throttled | Kind::Overloaded | Kind::Failed => true,
        Kind::Rejected => matches!(signal.resend, ResendAdvice::Allowed | ResendAdvice::InProgress),
        _ => false,
    }
}

/// Whether a budget that goes by outcomes counts this one as failed (gRFC A6): if it is to be sent again,
/// other than as a mere re-delivery, or the server says never. A mark on the reply is no reason not to: a
/// pushback of never is one itself. `counted`: a retry layer further in has done so.
pub(super) fn takes_token(config: &RetryConfig, reply: &Reply, counted: bool, safety: Safety) -> bool {
    let signal = &reply.signal;
    let charged = !reply.exhausted && signal.kind != Kind::Throttled && may_resend(config, signal, safety);
    let forbidden = is_repeatable(signal) && signal.pushback == Pushback::Never;
    !counted && (charged || forbidden)
}

/// Whether this reply, to this request, is one to send again after.
fn may_resend(config: &RetryConfig, signal: &Signal, safety: Safety) -> bool {
    let kind = is_repeatable(signal);
    // "Never" binds here even where a ladder below may go elsewhere: that choice is the ladder's.
    let never = signal.resend == ResendAdvice::Never || signal.pushback == Pushback::Never;
    kind && !never && safety.allows(signal, config.same_domain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Executed, random::Seeds};
    use proptest::prelude::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn standing() -> Standing {
        Standing {
            safety: Safety::Safe,
            kept: true,
            spent: 0,
            allowance: 3,
            redelivered: 0,
            left: S(60),
            room: true,
        }
    }

    fn reply(signal: Signal) -> Reply {
        Reply { signal, exhausted: false, refused_for: None }
    }

    fn once(signal: Signal, standing: &Standing) -> Decision {
        let mut random = Seeds::from_seed(1).session();
        Session::default().decide(&RetryConfig::default(), &reply(signal), standing, &mut random, || true)
    }

    fn resends(decision: Decision) -> bool {
        matches!(decision, Decision::Resend { .. })
    }

    #[test]
    fn the_table_of_the_kinds() {
        for (kind, again) in [
            (Kind::Success, false),
            (Kind::Empty, false),
            (Kind::Throttled, true),
            (Kind::Overloaded, true),
            (Kind::Failed, true),
            (Kind::Depleted, false),
            (Kind::Misconfigured, false),
            (Kind::Rejected, false),
        ] {
            let decision = once(Signal::new(kind), &standing());
            assert_eq!((resends(decision), decision == Decision::Done), (again, !again), "{kind:?}");
        }
        // 421 and 425: proven not executed, and said to be worth another attempt.
        let early =
            Signal::new(Kind::Rejected).with_resend(ResendAdvice::Allowed).with_executed(Executed::No);
        assert!(resends(once(early, &Standing { safety: Safety::Once, ..standing() })));
        // A key in flight: asked for again where that is no second call.
        for (safety, again) in [(Safety::Keyed, true), (Safety::Once, false)] {
            let decision = once(Signal::in_progress(), &Standing { safety, spent: 9, ..standing() });
            assert_eq!(matches!(decision, Decision::Resend { cost: Cost::Redelivery, .. }), again);
        }
        // 501 and 505, and gRPC's negative pushback.
        for never in [
            Signal::new(Kind::Failed).with_resend(ResendAdvice::Never),
            Signal::new(Kind::Throttled).with_pushback(Pushback::Never),
        ] {
            assert_eq!(once(never, &standing()), Decision::Done);
            let config = RetryConfig { same_domain: false, ..RetryConfig::default() };
            let mut random = Seeds::from_seed(1).session();
            let elsewhere =
                Session::default().decide(&config, &reply(never), &standing(), &mut random, || true);
            assert_eq!(elsewhere, Decision::Done);
        }
    }

    #[test]
    fn each_limit_is_named() {
        let why = |signal: Signal, standing: Standing, budget: bool| {
            let mut random = Seeds::from_seed(1).session();
            let config = RetryConfig::default();
            let decision =
                Session::default().decide(&config, &reply(signal), &standing, &mut random, || budget);
            match decision {
                Decision::GiveUp { why, retry_in: Some(_) } => why,
                other => panic!("{other:?}"),
            }
        };
        let failed = Signal::new(Kind::Failed);
        let throttled = Signal::new(Kind::Throttled).with_pushback(Pushback::After(S(60)));
        assert_eq!(why(failed, Standing { spent: 2, ..standing() }, true), Why::Attempts);
        assert_eq!(why(failed, Standing { allowance: 1, ..standing() }, true), Why::Attempts);
        assert_eq!(why(throttled, Standing { redelivered: 10, ..standing() }, true), Why::Redeliveries);
        assert_eq!(why(throttled, standing(), true), Why::Deadline);
        assert_eq!(why(failed, standing(), false), Why::Budget);
        assert_eq!(why(failed, Standing { room: false, ..standing() }, true), Why::Sleepers);
        assert_eq!(why(failed, Standing { kept: false, ..standing() }, true), Why::Body);
    }

    #[test]
    fn a_refusal_costs_nothing_and_is_waited_for_if_it_fits() {
        let refused = |wait| Reply { refused_for: wait, ..reply(Signal::new(Kind::Refused)) };
        let spent = Standing { spent: 9, redelivered: 99, safety: Safety::Once, ..standing() };
        let decide = |reply: &Reply, standing: &Standing| {
            let mut random = Seeds::from_seed(1).session();
            Session::default().decide(&RetryConfig::default(), reply, standing, &mut random, || panic!())
        };
        let Decision::Resend { wait, cost: Cost::Free } = decide(&refused(Some(S(5))), &spent) else {
            panic!()
        };
        assert!(S(5) <= wait && wait <= Duration::from_millis(5500));
        let late = decide(&refused(Some(S(60))), &spent);
        assert_eq!(late, Decision::GiveUp { why: Why::Deadline, retry_in: Some(S(60)) });
        let over = decide(&refused(Some(S(0))), &Standing { left: S(0), ..spent });
        assert_eq!(over, Decision::GiveUp { why: Why::Deadline, retry_in: Some(S(0)) });
        let terminal = decide(&refused(None), &spent);
        assert_eq!(terminal, Decision::GiveUp { why: Why::Refused, retry_in: None });
    }

    // anomalyco/opencode#30510: an index off by one halves the delay.
    #[test]
    fn the_backoff_counts_from_zero_and_starts_again_after_a_pushback() {
        let config = RetryConfig { attempts: 99, backoff: Backoff::PlusMinus(0.0), ..RetryConfig::default() };
        let standing = Standing { allowance: 99, left: S(3600), ..standing() };
        let mut session = Session::default();
        let mut random = Seeds::from_seed(1).session();
        let mut wait = |signal| match session.decide(&config, &reply(signal), &standing, &mut random, || true)
        {
            Decision::Resend { wait, .. } => wait.as_millis(),
            other => panic!("{other:?}"),
        };
        let failed = Signal::new(Kind::Failed);
        assert_eq!([wait(failed), wait(failed), wait(failed)], [500, 1000, 2000]);
        let told = wait(Signal::new(Kind::Overloaded).with_pushback(Pushback::After(S(10))));
        assert!((10_000..=15_000).contains(&told), "{told}");
        assert_eq!([wait(failed), wait(failed)], [500, 1000]);
        assert_eq!(wait(Signal::new(Kind::Throttled)), 4000, "a throttle starts from its own base");
    }
    use super::super::backoff::Backoff;

    fn signals() -> impl Strategy<Value = Signal> {
        let kinds = prop::sample::select(vec![
            Kind::Success,
            Kind::Empty,
            Kind::Throttled,
            Kind::Overloaded,
            Kind::Failed,
            Kind::Depleted,
            Kind::Misconfigured,
            Kind::Rejected,
            Kind::Refused,
        ]);
        let pushback = prop_oneof![
            3 => Just(Pushback::None),
            3 => (0..100_000u64).prop_map(|ms| Pushback::After(Duration::from_millis(ms))),
            1 => Just(Pushback::After(Duration::MAX)),
            1 => Just(Pushback::Never),
        ];
        let executed = prop::sample::select(vec![Executed::No, Executed::Maybe, Executed::Yes]);
        let advice = prop::sample::select(vec![
            ResendAdvice::BySafety,
            ResendAdvice::Allowed,
            ResendAdvice::Never,
            ResendAdvice::InProgress,
        ]);
        (kinds, pushback, executed, advice).prop_map(|(kind, pushback, executed, advice)| {
            Signal::new(kind).with_pushback(pushback).with_executed(executed).with_resend(advice)
        })
    }

    proptest! {
        #[test]
        fn the_laws_hold_over_any_session(
            replies in prop::collection::vec((signals(), prop::option::of(prop_oneof![Just(0), 0..90_000u64]), any::<bool>()), 1..60),
            safety in prop::sample::select(vec![Safety::Safe, Safety::Costly, Safety::Keyed, Safety::Once]),
            (attempts, allowance, redeliveries) in (1..6u32, 1..6u32, 0..12u32),
            same_domain: bool,
            seed: u64,
        ) {
            let config = RetryConfig { attempts, redeliveries, same_domain, ..RetryConfig::default() };
            let mut random = Seeds::from_seed(seed).session();
            let mut session = Session::default();
            let (mut spent, mut redelivered, mut left) = (0, 0, S(60));
            for (signal, refused, budget) in replies {
                let standing = Standing { safety, kept: true, spent, allowance, redelivered, left, room: true };
                let refused_for = refused.map(Duration::from_millis);
                let reply = Reply { signal, exhausted: false, refused_for };
                let mut asked = false;
                let decision = session.decide(&config, &reply, &standing, &mut random, || { asked = true; budget });
                let Decision::Resend { wait, cost } = decision else { break };
                // Law 1: never early. Law 10: no wait outlives the deadline.
                let floor = if cost == Cost::Free { refused_for } else { signal.pushback.wait() };
                prop_assert!(wait >= floor.unwrap_or_default());
                prop_assert!(wait < left);
                left -= wait;
                // Law 4: no second side effect.
                if signal.executed != Executed::No && cost != Cost::Free {
                    prop_assert!(safety != Safety::Once && (same_domain || safety != Safety::Keyed));
                }
                // Law 3: what fails is paid for, what is throttled is counted.
                prop_assert_eq!(asked, cost == Cost::Attempt);
                match cost {
                    Cost::Attempt => { prop_assert!(budget); spent += 1; }
                    Cost::Redelivery => redelivered += 1,
                    Cost::Free => {}
                }
                prop_assert!(spent < attempts.min(allowance) && redelivered <= redeliveries);
            }
        }
    }
}
